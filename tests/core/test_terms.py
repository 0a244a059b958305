"""The terms of the objective beside the NLL, one clip over both optimizers, and Muon in a run."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_parts, tiny_spec, untracked_run
from torch import Tensor
from torch.nn import functional as F

from workbench.core.schedules import learning_rate
from workbench.core.train import StepResult, clip_gradients, train
from workbench.run import Components
from workbench.track.journal import read_metrics
from workbench.track.store import Store

ROUTER = {"mlp_type": "learned_router", "router_aux_loss_weight": 0.0}


def train_all(parts: Components, **options: Any) -> list[StepResult]:
    return list(train(parts.spec, parts.state, parts.forward, **options))


# -- terms


def every_combination() -> list[dict[str, bool]]:
    names = ("z_loss", "smoothing", "balance", "diversity")
    return [
        dict(zip(names, flags, strict=True)) for flags in itertools.product((False, True), repeat=4)
    ]


def test_the_nll_is_plain_cross_entropy_whatever_else_is_optimised(tmp_path: Path) -> None:
    bits, plain = set(), None
    for on in every_combination():
        model = dict(ROUTER)
        if on["balance"]:
            model["router_aux_loss_weight"] = 0.7
        if on["diversity"]:
            model |= {"expert_diversity_lambda": 3.0, "expert_diversity_schedule_ratio": 0.0}
        fields = {
            "steps": 1,
            "z_loss": 1e-2 * on["z_loss"],
            "label_smoothing": 0.1 * on["smoothing"],
        }
        parts = tiny_parts(tmp_path, model=model, training=fields)
        if plain is None:
            batch = torch.from_numpy(parts.data.train_stream().next_batch(4))
            with torch.no_grad():
                logits = parts.state.model.logits(batch[:, :-1]).flatten(0, 1)
            plain = float(F.cross_entropy(logits, batch[:, 1:].flatten()))
            lse = float(logits.double().logsumexp(-1).square().mean())
        (result,) = train_all(parts)
        bits.add(result.nll)
        assert (result.z_loss != 0) == on["z_loss"]
        assert (result.smoothing != 0) == on["smoothing"]
        assert (result.balance is not None) == on["balance"]
        assert (result.diversity is not None) == on["diversity"]
        if on["z_loss"]:
            assert result.z_loss == pytest.approx(1e-2 * lse, rel=1e-5)
        terms = [one.contribution for one in (result.balance, result.diversity) if one]
        expected = result.nll + result.smoothing + result.z_loss + sum(terms)
        assert result.objective == pytest.approx(expected, rel=1e-6)
        if not any(on.values()):
            assert result.objective == pytest.approx(result.nll, rel=1e-7)
    assert len(bits) == 1, "a term changed the reported NLL"
    assert bits.pop() == pytest.approx(plain, rel=1e-6)


def test_terms_are_columns_of_their_own(tmp_path: Path) -> None:
    model = {
        **ROUTER,
        "router_aux_loss_weight": 0.02,
        "expert_diversity_lambda": 0.5,
        "expert_diversity_schedule_steps": 2,
    }
    spec = tiny_spec(tmp_path, model=model, training={"steps": 3, "z_loss": 1e-3})
    table = read_metrics(untracked_run(spec, Store(tmp_path / "mlruns")).folder / "metrics.csv")
    for row in range(1, 4):
        cells = {name: column[row] for name, column in table.items()}
        ramped = row > 1
        assert (cells["expert_diversity_loss"] is not None) == ramped
        assert cells["expert_diversity_lambda"] == (0.5 if ramped else None)
        assert cells["router_aux_weight"] == 0.02
        assert cells["router_aux_loss"]
        assert cells["train/balance"] == pytest.approx(0.02 * cells["router_aux_loss"])
        parts = ("train/nll", "train/smoothing", "train/z_loss", "train/balance", "train/diversity")
        total = sum(cells[name] or 0.0 for name in parts)
        assert cells["train/objective"] == pytest.approx(total, rel=1e-6)
        assert cells["train/z_loss"]
    off = tiny_spec(tmp_path, "off", model=ROUTER, training={"steps": 1})
    table = read_metrics(untracked_run(off, Store(tmp_path / "mlruns")).folder / "metrics.csv")
    for name in ("train/balance", "router_aux_loss", "router_aux_weight", "train/diversity"):
        assert table[name] == [None, None], name


# -- one clip


def test_one_clip_on_the_joint_norm_of_both_optimizers(tmp_path: Path) -> None:
    """3 on Muon's side and 4 on AdamW's are 5 together, and both are scaled by 1 / 5."""
    model = tiny_parts(tmp_path, optimizer={"name": "muon_tr"}).state.model
    experts = model.routed_layers[0].up_proj_w
    norm = model.norm.weight
    for limit, scale in ((1.0, 0.2), (0.0, 1.0), (6.0, 1.0)):
        model.zero_grad()
        experts.grad, norm.grad = torch.zeros_like(experts), torch.zeros_like(norm)
        experts.grad[2, 0, 1], norm.grad[5] = 3.0, -4.0
        assert clip_gradients(model, limit) == pytest.approx(5.0)
        assert float(experts.grad[2, 0, 1]) == pytest.approx(3.0 * scale)
        assert float(norm.grad[5]) == pytest.approx(-4.0 * scale)


@pytest.mark.parametrize("limit", [0.05, 0.0])
def test_both_optimizers_step_on_gradients_clipped_together(tmp_path: Path, limit: float) -> None:
    parts = tiny_parts(
        tmp_path,
        optimizer={"name": "muon_tr", "muon_scope": "expert_shared"},
        training={"steps": 1, "max_grad_norm": limit},
    )
    squares: dict[str, float] = {}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        squares[type(optimizer).__name__] = sum(float(g.double().square().sum()) for g in grads)

    for optimizer in parts.state.optimizers:
        optimizer.register_step_pre_hook(note)
    (result,) = train_all(parts)
    assert squares.keys() == {"AdamW", "Muon"}
    assert min(squares.values()) > 0
    joint = math.sqrt(sum(squares.values()))
    assert result.grad_norm > 0.1
    assert joint == pytest.approx(limit or result.grad_norm, rel=1e-5)


# -- Muon in a run


@pytest.mark.parametrize("scope", ["expert", "expert_shared", "all"])
def test_a_muon_run_learns_and_says_how_each_parameter_was_trained(
    tmp_path: Path, scope: str
) -> None:
    optimizer = {"name": "muon_tr", "muon_scope": scope, "muon_lr": 0.02, "lr": 1e-2}
    optimizer |= {"shared_lr_scale": 0.5} if scope == "expert" else {}
    spec = tiny_spec(
        tmp_path, training={"steps": 12}, optimizer=optimizer, evaluation={"eval_steps": 0}
    )
    outcome = untracked_run(spec, Store(tmp_path / "mlruns"))
    table = read_metrics(outcome.folder / "metrics.csv")
    nll = table["train/nll"]
    assert nll[12] is not None
    assert nll[1] is not None
    assert nll[12] < nll[1] - 1
    for step in (1, 2, 6, 12):
        assert table["lr"][step] == learning_rate(spec, step)
        assert table["muon_lr"][step] == learning_rate(spec, step, 0.02)
        assert table["expert_lr"][step] is None
        shared = 0.5 * learning_rate(spec, step) if scope == "expert" else None
        assert table["shared_lr"][step] == shared
    rows = json.loads((outcome.folder / "run_config.json").read_text())["parameter_table"]
    named = {row["name"]: row for row in rows}
    model = dict(tiny_parts(tmp_path).state.model.named_parameters())
    assert named.keys() == model.keys()
    assert len(rows) == len(named)
    by_muon = {
        name.removeprefix("layers.0.")
        for name, row in named.items()
        if row["optimizer"] == "muon" and "layers.1." not in name
    }
    expected = {f"mlp.{name}_proj_w" for name in ("gate", "up", "down")}
    if scope != "expert":
        expected |= {f"mlp.shared_{name}.weight" for name in ("gate", "up", "down")}
    if scope == "all":
        expected |= {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert by_muon == expected
    assert named["layers.1.mlp.up_proj_w"]["weight_decay"] == 0.005
    assert named["layers.1.mlp.up_proj_w"]["shape"] == [4, 64, 8]


def test_an_adamw_run_logs_its_own_rates_only(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, training={"steps": 2}, optimizer={"expert_lr_scale": 2.0})
    table = read_metrics(untracked_run(spec, Store(tmp_path / "mlruns")).folder / "metrics.csv")
    rate = learning_rate(spec, 2)
    assert [table[n][2] for n in ("lr", "expert_lr", "shared_lr")] == [rate, 2 * rate, rate]
    assert table["muon_lr"] == [None] * 3
    dense = tiny_spec(tmp_path, "dense", model={"mlp_type": "dense"}, training={"steps": 1})
    table = read_metrics(untracked_run(dense, Store(tmp_path / "mlruns")).folder / "metrics.csv")
    assert table["expert_lr"] == table["shared_lr"] == [None, None]


def test_the_same_muon_spec_gives_the_same_bits_whatever_the_telemetry(tmp_path: Path) -> None:
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for on in (False, True):
        parts = tiny_parts(
            tmp_path,
            optimizer={"name": "muon_tr", "muon_scope": "all"},
            telemetry={"log_steps": 1, "moe": on},
        )
        losses = [result.nll for result in train_all(parts)]
        found.append((losses, dict(parts.state.model.named_parameters())))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(weights[name], found[0][1][name]) for name in weights)
