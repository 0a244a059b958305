"""A loaded model scores as the run did, to the bit; what is damaged or foreign is told apart."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import tiny_parts, tiny_spec, untracked_run

from workbench.core.checkpoint import save_checkpoint
from workbench.core.data.loading import load_data
from workbench.core.evaluate import evaluate
from workbench.core.load_model import find_checkpoint, load_model
from workbench.core.train import loss_settings, train
from workbench.errors import UserError
from workbench.run import RunOutcome, recorded
from workbench.track.store import Store

GATES = {
    "learn_shared_routed_gates": True,
    "routed_gate_final": 0.6,
    "gate_schedule_ratio": 1.0,
    "top_k": 2,
    "top_k_primary_weight_final": 0.9,
}
KINDS: dict[str, dict[str, Any]] = {
    "routed, gates and weights ramped": {"model": GATES},
    "dense, untied": {"model": {"mlp_type": "dense", "tie_word_embeddings": False}},
    "learned router, bf16": {
        "model": {"mlp_type": "learned_router"},
        "training": {"precision": "bf16"},
    },
    "one table for all layers": {"model": {"routing_strategy": "round_robin"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_scores_as_the_run_did_to_the_bit(kind: str, tmp_path: Path) -> None:
    changes = {**KINDS[kind], "evaluation": {"stride": 8}}
    store = Store(tmp_path / "mlruns")
    outcome = untracked_run(tiny_spec(tmp_path, **changes), store)
    loaded = load_model(outcome.folder)
    assert (loaded.step, loaded.tokens) == (4, 4 * 128)
    assert recorded(loaded.spec) == outcome.record.spec
    data = load_data(loaded.spec, store.home, seed=loaded.spec.seed)
    for name, documents in data.evaluation_sets.items():
        score = evaluate(loaded.model, documents, 32, loss_settings(loaded.spec), stride=8)
        for number, value in score.values().items():
            assert value == outcome.record.results.final[number], (name, number)


def test_scheduled_values_are_those_of_the_step(tmp_path: Path) -> None:
    """Two checkpoints on a ramp: each has its own values, and neither those of the start."""
    parts = tiny_parts(tmp_path, model=GATES)
    spec = recorded(parts.spec)
    for result in train(parts.spec, parts.state):
        if result.step in (2, 4):
            save_checkpoint(parts.state, tmp_path / "run/checkpoints", spec, keep=2)
    shifts = {
        step: [float(layer.routed_gate_shift) for layer in loaded.model.routed_layers]
        for step in (2, 4)
        if (loaded := load_model(tmp_path / "run", step))
    }
    present = [float(layer.routed_gate_shift) for layer in parts.state.model.routed_layers]
    assert shifts[4] == present
    assert len({0.0, shifts[2][0], shifts[4][0]}) == 3
    assert load_model(find_checkpoint(tmp_path / "run")).step == 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunOutcome:
    folder = tmp_path_factory.mktemp("restore")
    return untracked_run(tiny_spec(folder, checkpoint={"save_steps": 2}), Store(folder / "mlruns"))


@pytest.fixture
def run(finished: RunOutcome, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished.folder, tmp_path / "run"))


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])


def flip(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-10] ^= 1
        (folder / name).write_bytes(bytes(content))

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def signed(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """A change that the manifest agrees with: not damage, but another content."""

    def apply(folder: Path) -> None:
        change(folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in manifest["files"]:
            content = (folder / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            manifest["files"][name] = {"bytes": len(content), "sha256": digest}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return apply


def with_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        change(state)
        (folder / "state.json").write_text(json.dumps(state))

    return signed(apply)


def with_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return signed(apply)


def no_tensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not tensors")


def halve(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"] = weights["norm.weight"].half()


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, r"step_00000004: the checkpoint is not whole"),
    "a bit": (flip("model.safetensors"), r"model\.safetensors: .* the file is damaged"),
    "state": (flip("state.json"), r"state\.json: .* the file is damaged"),
    "no weights": (remove("model.safetensors"), r"step_00000004: the checkpoint is not whole"),
    "no manifest": (remove("manifest.json"), r"step_00000004: .* no manifest"),
    "an empty manifest": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        r"step_00000004: the checkpoint is not whole",
    ),
    "another format": (with_state(lambda s: s.update(format=2)), r"a format that this version"),
    "another step": (with_state(lambda s: s.update(step=3)), "the name of another step"),
    "no spec": (with_state(lambda s: s.update(spec=3)), "is not the spec of a run"),
    "a field of the future": (
        with_state(lambda s: s["spec"]["model"].update(heads_of_tomorrow=3)),
        r"state\.json: spec\.model\.heads_of_tomorrow: there is no such key",
    ),
    "a value of the future": (
        with_state(lambda s: s["spec"]["model"].update(attention_type="linear")),
        r"state\.json: spec\.model\.attention_type",
    ),
    "another model": (
        with_state(lambda s: s["spec"]["model"].update(intermediate_size=64)),
        r"model\.safetensors: a tensor of another shape or type .*mlp\.gate_proj_w",
    ),
    "a missing tensor": (
        with_weights(lambda w: w.pop("norm.weight")),
        r"model\.safetensors: the checkpoint lacks .*norm\.weight",
    ),
    "no embedding": (
        with_weights(lambda w: w.pop("embed_tokens.weight")),
        r"model\.safetensors: the checkpoint lacks .*embed_tokens\.weight",
    ),
    "a further tensor": (
        with_weights(lambda w: w.update(more=torch.ones(2))),
        r"model\.safetensors: the checkpoint has beyond .*more",
    ),
    "another dtype": (with_weights(halve), r"another shape or type .*norm\.weight.*float16"),
    "not tensors": (signed(no_tensors), "not a safetensors file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_loaded_is_one_clear_error(run: Path, fault: str) -> None:
    """And never an older checkpoint in its place."""
    change, message = FAULTS[fault]
    change(run / "checkpoints/step_00000004")
    with pytest.raises(UserError, match=message) as caught:
        load_model(run)
    assert caught.value.exit_code == 2
    assert load_model(run, 2).step == 2


def test_a_run_without_checkpoints_says_so(run: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint of this step .*allowed: 2, 4"):
        load_model(run, 3)
    with pytest.raises(UserError, match="another step"):
        load_model(run / "checkpoints/step_00000002", 4)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="a run that ended before its first update has none"):
        load_model(run)
