"""Restoring: the next updates are those that would have come, and damage is found before use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import tiny_parts

from workbench.core.checkpoint import save_checkpoint
from workbench.core.random_states import random_states, set_random_states
from workbench.core.restore import newest_checkpoint, open_checkpoint, restore
from workbench.core.train import train
from workbench.errors import UserError
from workbench.run import Components

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "bf16": {"training": {"precision": "bf16", "steps": 6}},
    "accumulated": {"training": {"steps": 6, "batch_size": 2, "gradient_accumulation_steps": 2}},
    "muon": {"optimizer": {"name": "muon_tr", "muon_scope": "all"}},
    "learned_router": {"model": {"mlp_type": "learned_router"}},
    "ramps": {
        "model": {
            "learn_shared_routed_gates": True,
            "routed_gate_final": 1.0,
            "top_k_primary_weight_final": 0.9,
            "expert_diversity_lambda": 0.1,
        },
        "telemetry": {"log_steps": 1, "moe": True},
    },
    "untied": {"model": {"tie_word_embeddings": False}},
    "random order": {"data": {"order": "random"}},
    "sequential": {"data": {"order": "sequential"}},
}


def parts_of(folder: Path, kind: str) -> Components:
    changes = KINDS[kind]
    training = {"steps": 6} | changes.get("training", {})
    return tiny_parts(folder, **{**changes, "training": training})


def bits(parts: Components) -> dict[str, Any]:
    """Everything that a run has come to, to be compared bit by bit."""
    state = parts.state
    tensors = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    for name, parameter in state.model.named_parameters():
        for optimizer in state.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return {
        **{name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
        "digest": state.digest.hexdigest(),
        "trace": state.trace.hexdigest(),
        "watch": json.dumps(state.watch.state_dict()),
        "step": state.step,
        "tokens": state.tokens,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_run_goes_on_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    straight = parts_of(tmp_path, kind)
    losses, norms = [], []
    for result in train(straight.spec, straight.state, straight.forward, straight.loss):
        losses.append(result.objective)
        norms.append(result.grad_norm)
        if result.step == 4:  # the tiny corpus has more windows than an epoch by then
            saved = save_checkpoint(straight.state, tmp_path / "checkpoints", {}, keep=1)
    end = bits(straight)

    resumed = parts_of(tmp_path, kind)
    restore(resumed.state, open_checkpoint(saved), resumed.spec)
    assert resumed.state.step == 4
    rest = list(train(resumed.spec, resumed.state, resumed.forward, resumed.loss))
    assert [one.objective for one in rest] == losses[4:]
    assert [one.grad_norm for one in rest] == norms[4:]
    assert bits(resumed) == end


def test_weights_alone_go_another_way(tmp_path: Path) -> None:
    """The reason for the moments: without them the next update is another one."""
    straight = parts_of(tmp_path, "adamw")
    run = train(straight.spec, straight.state)
    for _ in range(4):
        next(run)
    saved = open_checkpoint(save_checkpoint(straight.state, tmp_path / "c", {}, keep=1))
    next(run)
    resumed = parts_of(tmp_path, "adamw")
    restore(resumed.state, saved, resumed.spec)
    for optimizer in resumed.state.optimizers:
        optimizer.state.clear()
    next(train(resumed.spec, resumed.state))
    assert bits(resumed) != bits(straight)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_find_their_parameter_whatever_the_order(tmp_path: Path, kind: str) -> None:
    """Experts have the same shape: by position one would get the moments of another unnoticed."""
    straight = parts_of(tmp_path, kind)
    run = train(straight.spec, straight.state)
    for _ in range(4):
        next(run)
    saved = open_checkpoint(save_checkpoint(straight.state, tmp_path / "c", {}, keep=1))
    other = parts_of(tmp_path, kind)
    for optimizer in other.state.optimizers:
        optimizer.param_groups.reverse()
        for group in optimizer.param_groups:
            group["params"].reverse()
    restore(other.state, saved, other.spec)
    assert bits(other) == bits(straight)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    parts = parts_of(tmp_path, "adamw")
    next(train(parts.spec, parts.state))
    return save_checkpoint(parts.state, tmp_path / "checkpoints", {}, keep=3)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_changed_byte_is_found(saved: Path, name: str) -> None:
    raw = bytearray((saved / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (saved / name).write_bytes(raw)
    with pytest.raises(UserError, match=rf"{name}.*damaged"):
        open_checkpoint(saved)


def test_a_damaged_newest_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, "adamw")
    folder = tmp_path / "checkpoints"
    for _ in train(parts.spec, parts.state):
        save_checkpoint(parts.state, folder, {}, keep=9)
    (folder / "step_00000006/model.safetensors").write_bytes(b"\0" * 8)
    raw = bytearray((folder / "step_00000005/optimizer.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "step_00000005/optimizer.safetensors").write_bytes(raw)
    (folder / "step_00000007").mkdir()
    found, problems = newest_checkpoint(folder)
    assert found is not None
    assert found.step == 4
    assert [problem.split()[0] for problem in problems] == [
        "step_00000006",
        "step_00000007",
        "step_00000005",
    ]


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nothing") == (None, [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"num_hidden_layers": 3}}, "lacks"),
        ({"model": {"num_hidden_layers": 1}}, "beyond"),
        ({"model": {"shared_intermediate_size": 32}}, "another shape"),
        ({"training": {"seq_len": 16, "steps": 6}}, "other data"),
        ({"seed": 7}, "other data"),
    ],
)
def test_another_model_or_other_data_are_refused(
    tmp_path: Path, saved: Path, changes: dict[str, Any], words: str
) -> None:
    parts = tiny_parts(tmp_path, **changes)
    with pytest.raises(UserError, match=words):
        restore(parts.state, open_checkpoint(saved), parts.spec)


def test_random_states_come_back() -> None:
    import random

    states = json.loads(json.dumps(random_states()))
    draw = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    set_random_states(states)
    again = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    assert draw == again
