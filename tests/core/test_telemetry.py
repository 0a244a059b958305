"""Expert telemetry: exact counts, norms before clipping, and no trace of it in the training."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny_runs import tiny_parts, tiny_spec, untracked_run
from torch import Tensor, nn

from workbench.core import train as training
from workbench.core.checkpoint import checkpoints
from workbench.core.moe import EXPERT_STACKS, LearnedRouted, TokenRouted
from workbench.core.parallel import Team
from workbench.core.routing import route_table
from workbench.core.telemetry import entropy
from workbench.core.train import StepResult, clip_gradients, train
from workbench.run import Components, build
from workbench.spec.run import RunSpec
from workbench.track.journal import MEASURED_COLUMNS, columns, read_metrics
from workbench.track.layer_table import SEGMENTS, TABLE, LayerTable
from workbench.track.mlflow_fields import metrics_of
from workbench.track.store import Store

VOCAB = 257
MOE = {"log_steps": 1, "moe": True}
LEARNED = {"mlp_type": "learned_router"}
PER_STEP = 4 * 32

# What telemetry alone fills in `metrics.csv`.
TELEMETRY_COLUMNS = (
    *(f"expert_{e}_{kind}" for e in range(4) for kind in ("share", "grad_norm")),
    *(f"{path}_{kind}" for path in ("shared", "routed") for kind in ("gate", "rms", "grad_norm")),
    "expert_dead_count",
    "route_entropy",
)

Cells = dict[tuple[int, int, int | None, str], float]


def train_all(parts: Components, **options: Any) -> list[StepResult]:
    return list(train(parts.spec, parts.state, parts.forward, **options))


def cells_of(rows: list[dict[str, Any]]) -> Cells:
    """(step, layer, expert, metric) -> value; each stands once."""
    found = {(r["step"], r["layer"], r["expert"], r["metric"]): r["value"] for r in rows}
    assert len(found) == len(rows)
    return found


def table_of(folder: Path) -> Cells:
    return cells_of(pq.ParquetFile(folder / TABLE).read().to_pylist())


def cells_of_steps(results: list[StepResult]) -> Cells:
    assert all(result.experts for result in results)
    return cells_of(
        [{"step": r.step, **row} for r in results if r.experts for row in r.experts.rows]
    )


def counts_of(cells: Cells) -> dict[tuple[int, int], list[int]]:
    """(step, layer) -> routes of each expert."""
    found: dict[tuple[int, int], list[int]] = {}
    for (step, layer, expert, metric), value in sorted(cells.items(), key=str):
        if metric == "route_count":
            assert expert == len(found.setdefault((step, layer), []))
            found[step, layer].append(round(value))
    return found


# -- counts


def counted_by_hand(spec: RunSpec, folder: Path) -> dict[tuple[int, int], list[int]]:
    """The routes of every consumed token, one by one."""
    model = spec.model
    assert model.routing_strategy
    assert model.num_experts
    assert model.top_k
    stream = build(spec, Store(folder / "mlruns")).data.train_stream()
    found = {}
    for step in range(1, spec.training.steps + 1):
        windows = stream.next_batch(spec.sequences_per_update)
        for layer in range(model.num_hidden_layers):
            table = route_table(
                model.routing_strategy, VOCAB, model.num_experts, model.top_k, layer
            ).tolist()
            counts = [0] * model.num_experts
            for window in windows.tolist():
                for token in window[:-1]:
                    for row in table:
                        counts[row[token]] += 1
            found[step, layer] = counts
    return found


@pytest.mark.parametrize(
    ("training_fields", "eval_steps", "top_k"),
    [
        ({}, 0, 2),
        ({}, 1, 1),
        ({"grad_ckpt": True}, 1, 2),
        ({"batch_size": 1, "gradient_accumulation_steps": 4}, 1, 3),
    ],
)
def test_counts_are_those_of_the_tokens_trained_on(
    tmp_path: Path, training_fields: dict[str, Any], eval_steps: int, top_k: int
) -> None:
    spec = tiny_spec(
        tmp_path,
        model={"top_k": top_k, "routing_strategy": "token_id_multi_hash"},
        training={"steps": 3, **training_fields},
        evaluation={"eval_steps": eval_steps},
        telemetry=MOE,
    )
    folder = untracked_run(spec, Store(tmp_path / "mlruns")).folder
    cells = table_of(folder)
    expected = counted_by_hand(spec, tmp_path)
    assert counts_of(cells) == expected
    assert len(expected) == 3 * 2
    metrics = read_metrics(folder / "metrics.csv")
    for (step, layer), counts in expected.items():
        assert sum(counts) == PER_STEP * top_k
        shares = [cells[step, layer, e, "route_share"] for e in range(4)]
        assert shares == pytest.approx([count / sum(counts) for count in counts], rel=1e-12)
        summed = [sum(expected[step, i][e] for i in range(2)) for e in range(4)]
        row = metrics["step"].index(step)
        for e in range(4):
            share = metrics[f"expert_{e}_share"][row]
            assert share == pytest.approx(summed[e] / (2 * PER_STEP * top_k), rel=1e-12)


@pytest.mark.parametrize(
    "layout", [{}, {"grad_ckpt": True}, {"batch_size": 1, "gradient_accumulation_steps": 4}]
)
def test_counts_of_a_learned_router_are_those_of_its_own_choices(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    parts = tiny_parts(tmp_path, model=LEARNED, training={"steps": 2, **layout}, telemetry=MOE)
    model = parts.state.model
    passes: list[list[Tensor]] = [[] for _ in range(2)]
    for layer, mlp in enumerate(model.routed_layers):
        assert isinstance(mlp, LearnedRouted)

        def note(_m: nn.Module, _x: Any, y: Tensor, layer: int = layer) -> None:
            if torch.is_grad_enabled():
                passes[layer].append(y.detach())

        mlp.router.register_forward_hook(note)
    counts = counts_of(cells_of_steps(train_all(parts)))
    micro = layout.get("gradient_accumulation_steps", 1)
    repeats = 2 if layout.get("grad_ckpt") else 1  # checkpointing computes each block again
    for layer, seen in enumerate(passes):
        assert len(seen) == 2 * micro * repeats
        for step in (1, 2):
            own = seen[(step - 1) * micro * repeats : step * micro * repeats][::repeats]
            expected = [0] * 4
            for probabilities in own:
                for token in probabilities.flatten(0, 1).tolist():
                    for e in sorted(range(4), key=lambda e: -token[e])[:2]:
                        expected[e] += 1
            assert counts[step, layer] == expected
            assert sum(expected) == PER_STEP * 2


def test_a_dead_expert_in_one_layer_shows(tmp_path: Path) -> None:
    parts = tiny_parts(tmp_path, training={"steps": 1}, telemetry=MOE)
    mlp = parts.state.model.routed_layers[1]
    assert isinstance(mlp, TokenRouted)
    table = mlp.topk_token_to_expert
    table[0] = table[0] % 3
    table[1] = (table[0] + 1) % 3
    (result,) = train_all(parts)
    cells = cells_of_steps([result])
    assert cells[1, 0, None, "dead_experts"] == 0
    assert cells[1, 1, None, "dead_experts"] == 1
    assert cells[1, 1, 3, "route_share"] == 0
    assert cells[1, 1, 3, "expert_grad_norm"] == 0
    assert result.experts
    assert result.experts.totals["expert_dead_count"] == 1
    assert result.experts.totals["expert_3_share"] > 0  # the sum over layers would hide it


def test_entropy() -> None:
    assert entropy(np.array([5, 5, 5, 5])) == pytest.approx(math.log(4))
    assert entropy(np.array([0, 7])) == 0.0
    assert entropy(np.array([1, 3])) == pytest.approx(
        -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    )


# -- what else a row says


def test_norms_are_those_before_clipping_and_rms_of_what_is_added(tmp_path: Path) -> None:
    gates = {"learn_shared_routed_gates": True, "shared_gate_init": 0.7, "routed_gate_init": 0.3}
    parts = tiny_parts(
        tmp_path,
        model=gates,
        training={
            "steps": 1,
            "max_grad_norm": 1e-3,
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
        },
        telemetry=MOE,
    )
    model = parts.state.model
    at_start = copy.deepcopy(model)
    seen: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for index, mlp in enumerate(model.routed_layers):
        mlp.register_forward_pre_hook(
            lambda _m, args, index=index: seen[index].append((args[0].detach(), args[1]))
        )
    gradients: dict[str, Tensor] = {}

    def kept(module: nn.Module, max_norm: float, team: Team) -> float:
        gradients.update(
            {n: p.grad.double() for n, p in module.named_parameters() if p.grad is not None}
        )
        return clip_gradients(module, max_norm, team)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "clip_gradients", kept)
        (result,) = train_all(parts)
    assert result.grad_norm > 0.1, "nothing was clipped"
    cells = cells_of_steps([result])
    shared_norms, expert_norms = [], [[] for _ in range(4)]
    for index, mlp in enumerate(at_start.routed_layers):
        prefix = f"layers.{index}.mlp."
        own = {n.removeprefix(prefix): g for n, g in gradients.items() if n.startswith(prefix)}
        shared = math.hypot(
            *(float(own[f"shared_{n}.weight"].norm()) for n in ("gate", "up", "down"))
        )
        assert cells[1, index, None, "shared_grad_norm"] == pytest.approx(shared, rel=1e-5)
        shared_norms.append(shared)
        each = [math.hypot(*(float(own[n][e].norm()) for n in EXPERT_STACKS)) for e in range(4)]
        for e, norm in enumerate(each):
            assert cells[1, index, e, "expert_grad_norm"] == pytest.approx(norm, rel=1e-5)
            expert_norms[e].append(norm)
        routed = cells[1, index, None, "routed_grad_norm"]
        assert routed == pytest.approx(math.hypot(*each), rel=1e-5)
        assert cells[1, index, None, "shared_gate"] == pytest.approx(0.7)
        assert cells[1, index, None, "routed_gate"] == pytest.approx(0.3)
        with torch.no_grad():
            assert isinstance(mlp, TokenRouted)
            added = {"shared": 0.0, "routed": 0.0}
            for x, ids in seen[index]:
                added["shared"] += float((0.7 * mlp.shared(x)).square().sum())
                weights, _ = mlp.expert_weights(x, ids)
                added["routed"] += float((0.3 * mlp.routed(x, weights)).square().sum())
        for path, squares in added.items():
            rms = math.sqrt(squares / (PER_STEP * 64))
            assert cells[1, index, None, f"{path}_rms"] == pytest.approx(rms, rel=1e-4)
    assert result.experts
    totals = result.experts.totals
    assert totals["shared_grad_norm"] == pytest.approx(math.hypot(*shared_norms), rel=1e-5)
    for e, norms in enumerate(expert_norms):
        assert totals[f"expert_{e}_grad_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)
    for path in ("shared", "routed"):
        layers = [cells[1, index, None, f"{path}_rms"] for index in range(2)]
        assert totals[f"{path}_rms"] == pytest.approx(math.hypot(*layers) / math.sqrt(2))
    counts = np.array([counts_of(cells)[1, index] for index in range(2)])
    assert totals["route_entropy"] == pytest.approx(entropy(counts.sum(0)))
    assert cells[1, 1, None, "route_entropy"] == pytest.approx(entropy(counts[1]))


def test_the_table_holds_every_layer_and_expert_of_the_logged_steps(tmp_path: Path) -> None:
    spec = tiny_spec(
        tmp_path,
        model={"num_experts": 8},
        training={"steps": 7},
        evaluation={"eval_steps": 4},
        telemetry={"log_steps": 3, "moe": True},
    )
    outcome = untracked_run(spec, Store(tmp_path / "mlruns"))
    table = pq.ParquetFile(outcome.folder / TABLE).read()
    assert table.column_names == ["step", "tokens", "layer", "expert", "metric", "value"]
    rows = table.to_pylist()
    assert {row["step"] for row in rows} == {1, 3, 4, 6, 7}
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert all(row["tokens"] == row["step"] * PER_STEP for row in rows)
    by_layer = {"shared_rms", "routed_rms", "shared_grad_norm", "routed_grad_norm"}
    by_layer |= {"route_entropy", "dead_experts"}
    by_expert = {"route_count", "route_share", "expert_grad_norm"}
    cells = cells_of(rows)
    for step in (1, 3, 4, 6, 7):
        for layer in range(2):
            found = {k[2:] for k in cells if k[:2] == (step, layer)}
            wanted = {(None, metric) for metric in by_layer}
            assert found == wanted | {(e, metric) for e in range(8) for metric in by_expert}
    assert not (outcome.folder / SEGMENTS).exists()
    metrics = read_metrics(outcome.folder / "metrics.csv")
    row = metrics["step"].index(7)
    # Columns hold four experts; their shares are of all eight.
    assert sum(metrics[f"expert_{e}_share"][row] or 0 for e in range(4)) < 0.99


def test_rows_reach_the_disk_at_every_evaluation(tmp_path: Path) -> None:
    """A run that is killed has lost the rows since the last one only."""

    def rows(*steps: int) -> list[dict[str, Any]]:
        return [{"layer": 0, "expert": None, "metric": "dead_experts", "value": s} for s in steps]

    table = LayerTable(tmp_path)
    table.flush()
    assert not any(tmp_path.iterdir())
    for step in (8, 9, 10):
        table.add(step, step * 100, rows(step))
        table.flush()
    table.add(11, 1100, rows(11))
    segments = sorted(path.name for path in (tmp_path / SEGMENTS).iterdir())
    assert segments == [f"step_{step:08d}.parquet" for step in (8, 9, 10)]
    table.close()
    assert [row["step"] for row in pq.ParquetFile(tmp_path / TABLE).read().to_pylist()] == [
        8,
        9,
        10,
        11,
    ]
    assert [path.name for path in tmp_path.iterdir()] == [TABLE]


# -- off, and on without a trace in training


def test_off_leaves_empty_cells_and_no_table(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, training={"steps": 2})
    folder = untracked_run(spec, Store(tmp_path / "mlruns")).folder
    table = read_metrics(folder / "metrics.csv")
    for name in TELEMETRY_COLUMNS:
        assert table[name] == [None] * 3, name
    assert not (folder / TABLE).exists()
    assert not (folder / SEGMENTS).exists()


def test_off_nothing_is_measured_in_the_forward_pass(tmp_path: Path) -> None:
    for model in ({}, {"mlp_type": "dense"}, {"learn_shared_routed_gates": True}):
        parts = tiny_parts(tmp_path, model=model)
        assert len(train_all(parts)) == 4
        ids = torch.arange(32).view(1, 32)
        assert parts.forward(ids).extras == [{}, {}]


def saved_weights(folder: Path) -> bytes:
    return (checkpoints(folder / "checkpoints")[-1] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ({"learn_shared_routed_gates": True}, "fp32"),
        ({}, "bf16"),
        (LEARNED, "fp32"),
        ({"mlp_type": "dense"}, "fp32"),
    ],
)
def test_telemetry_does_not_change_training_by_one_bit(
    tmp_path: Path, model: dict[str, Any], precision: str
) -> None:
    store = Store(tmp_path / "mlruns")
    tables, weights = [], []
    for on in (False, True):
        spec = tiny_spec(
            tmp_path,
            f"moe-{on}",
            model=model,
            training={"precision": precision},
            telemetry={"moe": on},
        )
        folder = untracked_run(spec, store).folder
        tables.append(read_metrics(folder / "metrics.csv"))
        weights.append(saved_weights(folder))
    off, on = tables
    assert weights[0] == weights[1]
    for name in off.keys() - set(MEASURED_COLUMNS) - set(TELEMETRY_COLUMNS):
        assert off[name] == on[name], name
    assert any(value is not None for value in on["shared_rms"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["token_routed", "learned_router"])
def test_telemetry_does_not_change_a_compiled_run_by_one_bit(tmp_path: Path, kind: str) -> None:
    found = []
    for on in (False, True):
        torch._dynamo.reset()
        parts = tiny_parts(
            tmp_path,
            model={"mlp_type": kind},
            training={"compile": True},
            telemetry={"log_steps": 1, "moe": on},
        )
        losses = [(r.nll, r.objective, r.grad_norm) for r in train_all(parts)]
        found.append((losses, dict(parts.state.model.named_parameters())))
    assert found[0][0] == found[1][0]
    for name, parameter in found[0][1].items():
        assert torch.equal(parameter, found[1][1][name]), name


def test_a_dense_model_has_the_values_of_its_one_path(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, model={"mlp_type": "dense"}, telemetry=MOE)
    folder = untracked_run(spec, Store(tmp_path / "mlruns")).folder
    table = read_metrics(folder / "metrics.csv")
    for name in TELEMETRY_COLUMNS:
        if name in ("shared_rms", "shared_grad_norm"):
            assert table[name][0] is None  # nothing was trained
            assert all(value is not None and value > 0 for value in table[name][1:]), name
        else:
            assert table[name] == [None] * 5, name
    keys = {key[1:] for key in table_of(folder)}
    metrics = ("shared_rms", "shared_grad_norm")
    assert keys == {(layer, None, metric) for layer in range(2) for metric in metrics}


def test_a_tracker_gets_few_keys_however_deep_the_model(tmp_path: Path) -> None:
    """24 layers of 64 experts, with every term on."""
    model = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 24,
        "num_experts": 64,
        "intermediate_size": 64,
        "shared_intermediate_size": 16,
        "learn_shared_routed_gates": True,
        "expert_diversity_lambda": 0.1,
        "expert_diversity_schedule_ratio": 0.0,
        **LEARNED,
    }
    spec = tiny_spec(
        tmp_path,
        model=model,
        training={"steps": 1, "z_loss": 1e-3, "label_smoothing": 0.1},
        telemetry=MOE,
    )
    folder = untracked_run(spec, Store(tmp_path / "mlruns")).folder
    table = read_metrics(folder / "metrics.csv")
    rows = [{name: table[name][i] for name in table} for i in range(2)]
    keys = {key for row in rows for key in metrics_of(row)}
    assert {"expert_3_grad_norm", "route_entropy", "expert_lr", "train/balance"} <= keys
    assert len(keys) < 60
    whole = dict.fromkeys(columns(["train_split", "held_out"]), 1.0)
    assert len(metrics_of(whole)) < 60
    cells = table_of(folder)
    assert {key[1] for key in cells} == set(range(24))
    assert {key[2] for key in cells} == {None, *range(64)}


def test_every_forward_pass_of_an_evaluation_is_without_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter is called once for each update, with the extras of its micro-batches."""
    seen = []
    count = training.RouteCounter.count

    def counted(self: Any, ids: Any, extras: list[list[Any]]) -> Any:
        seen.append((ids.shape, len(extras)))
        return count(self, ids, extras)

    monkeypatch.setattr(training.RouteCounter, "count", counted)
    layout = {"steps": 3, "batch_size": 2, "gradient_accumulation_steps": 2}
    spec = tiny_spec(
        tmp_path, model=LEARNED, training=layout, evaluation={"eval_steps": 1}, telemetry=MOE
    )
    untracked_run(spec, Store(tmp_path / "mlruns"))
    assert seen == [((4, 32), 2)] * 3
