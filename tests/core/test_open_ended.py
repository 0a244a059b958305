"""Runs to the end of their data (`training.steps: 0`): one pass, a constant rate, known totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_spec, untracked_run

from workbench.compare import check_specs, compare_runs
from workbench.compare.evidence import check_record
from workbench.core.data.batches import TokenDigest
from workbench.core.schedules import last_step, planned_trace, ramp_tokens
from workbench.core.train import train
from workbench.errors import UserError
from workbench.foresee import foresee
from workbench.run import build
from workbench.spec.run import RunSpec
from workbench.track.journal import read_metrics
from workbench.track.record import read_record
from workbench.track.store import Store


def open_spec(folder: Path, name: str = "open", **changes: Any) -> RunSpec:
    base: dict[str, dict[str, Any]] = {
        "data": {"order": "sequential"},
        "training": {"steps": 0},
        "schedule": {"warmup_steps": 3, "decay": "constant"},
        "evaluation": {"eval_steps": 0},
    }
    laid = {key: base.get(key, {}) | changes.get(key, {}) for key in base | changes}
    return tiny_spec(folder, name, **laid)


def test_it_reads_every_window_once_in_order_and_ends(tmp_path: Path) -> None:
    spec = open_spec(tmp_path)
    store = Store(tmp_path / "mlruns")
    stream = build(spec, store).data.train_stream()
    assert stream.windows_per_epoch
    steps = stream.windows_per_epoch // 4
    assert steps > 10
    assert last_step(spec, stream) == steps
    outcome = untracked_run(spec, store)
    record = read_record(outcome.folder)
    assert record.status == "FINISHED"
    assert record.effective.budget.finished is True
    assert record.total_tokens == record.results.tokens == steps * 128
    assert spec.total_tokens is None

    digest = TokenDigest()
    digest.update(stream.sequences(range(4 * steps)))
    assert record.points[-1].step == steps
    assert record.points[-1].order_digest == digest.hexdigest()
    assert record.points[-1].lr_trace == planned_trace(spec, steps)
    check_record(outcome.folder, record)

    table = read_metrics(outcome.folder / "metrics.csv")
    assert table["step"] == list(range(steps + 1))
    rates = table["lr"][1:]
    assert rates == pytest.approx([1e-3, 2e-3] + [3e-3] * (steps - 2))
    assert table["held_out/nll"][0] is not None
    assert table["held_out/nll"][-1] is not None


def test_what_is_foreseen_is_what_happens(tmp_path: Path) -> None:
    spec, store = open_spec(tmp_path), Store(tmp_path / "mlruns")
    foreseen = foresee(spec, store)
    record = untracked_run(spec, store).record
    assert foreseen.points == tuple(point.tokens for point in record.points if point.step)
    assert foreseen.points[-1] == record.total_tokens
    facts = {**foreseen.facts, **foreseen.at(foreseen.points[-1])}
    assert facts["effective.budget.lr_trace"] == record.points[-1].lr_trace
    assert facts["effective.data.order_digest"] == record.points[-1].order_digest
    assert facts["effective.budget.bytes"] == record.points[-1].bytes > 0
    assert facts["effective.optimizer.warmup_steps"] == 3
    check = check_specs(spec, open_spec(tmp_path, "other"), foreseen, foreseen)
    assert check.verdict == "comparable"


def test_it_equals_a_planned_run_of_as_many_steps(tmp_path: Path) -> None:
    store = Store(tmp_path / "mlruns")
    outcome = untracked_run(open_spec(tmp_path), store)
    steps = outcome.record.points[-1].step
    planned = untracked_run(open_spec(tmp_path, "planned", training={"steps": steps}), store)
    comparison = compare_runs(outcome.folder, planned.folder)
    assert comparison.verdict == "comparable", comparison.to_json()["rules"]
    assert comparison.to_json()["results"]["held_out/nll"]["difference"] == 0


def test_ramps_in_steps_are_well_defined(tmp_path: Path) -> None:
    model = {"top_k_primary_weight_final": 0.9, "top_k_primary_weight_schedule_steps": 5}
    spec = open_spec(tmp_path, model=model)
    assert ramp_tokens(spec) == {"top_k_primary_weight_schedule": 5 * 128}
    parts = build(spec, Store(tmp_path / "mlruns"))
    steps = train(parts.spec, parts.state, parts.forward)
    for _ in range(6):
        next(steps)
    weights = [
        float(layer.get_buffer("route_weights")[0]) for layer in parts.state.model.routed_layers
    ]
    assert weights == pytest.approx([0.9, 0.9])


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"schedule": {"decay": "cosine"}}, "schedule.decay"),
        ({"schedule": {"decay": "linear"}}, "schedule.decay"),
        ({"schedule": {"warmup_steps": None}}, "schedule.warmup_steps"),
        ({"data": {"order": "shuffled"}}, "data.order"),
        ({"data": {"order": "random"}}, "data.order"),
        (
            {"model": {"top_k_primary_weight_final": 0.9}},
            "model.top_k_primary_weight_schedule_ratio",
        ),
        ({"model": {"expert_diversity_lambda": 0.1}}, "model.expert_diversity_schedule_ratio"),
        (
            {"model": {"learn_shared_routed_gates": True, "routed_gate_final": 1.0}},
            "model.gate_schedule_ratio",
        ),
    ],
)
def test_what_needs_a_planned_end_is_refused(
    tmp_path: Path, changes: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        open_spec(tmp_path, **changes)
    assert [fault.place for fault in faults_of(caught.value)] == [place]


def faults_of(error: Exception) -> list[Any]:
    found = [one["ctx"]["error"] for one in error.errors() if "error" in one.get("ctx", {})]  # type: ignore[attr-defined]
    assert found
    assert all(isinstance(one, UserError) for one in found)
    return [fault for one in found for fault in one.faults]


def test_random_tokens_have_no_end(tmp_path: Path) -> None:
    data = {"dataset": "random"} | dict.fromkeys(
        ("text_file", "text_unit", "held_out_ratio", "order")
    )
    with pytest.raises(ValueError, match=r"data\.order"):
        open_spec(tmp_path, data=data)


def test_a_text_shorter_than_one_update_is_a_clear_error(tmp_path: Path) -> None:
    spec = open_spec(tmp_path, training={"batch_size": 5000})
    with pytest.raises(UserError, match=r"training.steps: one pass over the data has \d+ windows"):
        build(spec, Store(tmp_path / "mlruns"))
