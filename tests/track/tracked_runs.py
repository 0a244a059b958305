"""Run folders for the tests of tracking: real records, real journals; and how MLflow holds them."""

from __future__ import annotations

import math
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from track.faulty_proxy import FaultyProxy, Mode

from workbench.spec.run import RunSpec, spec_hash
from workbench.track.feeder import MlflowTracker
from workbench.track.journal import TWINS, Journal, columns, read_metrics
from workbench.track.mlflow_store import read_position
from workbench.track.record import RunRecord, write_record
from workbench.track.store import METRICS, Store, release_run

BIGGEST = sys.float_info.max  # what MLflow's SQL store makes of an infinity


def points(target: Any, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Every stored point of a run by metric, in the order of their steps."""
    keys = target.client.get_run(run_id).data.metrics
    return {
        key: sorted((m.step, m.value) for m in target.client.get_metric_history(run_id, key))
        for key in keys
    }


def assert_equal_to_file(target: Any, folder: Path) -> None:
    """Every measured cell of metrics.csv is in MLflow, once, and nothing else is."""
    position = read_position(folder)
    assert position
    table = read_metrics(folder / "metrics.csv")
    expected = {}
    for name in set(table) - {"step", "unix_time", *TWINS}:
        cells = zip(table["step"], table[name], strict=True)
        if found := [(step, value) for step, value in cells if value is not None]:
            expected[name] = found
    stored = points(target, position.run_id)
    assert set(stored) == set(expected)
    for name, wanted in expected.items():
        assert len(stored[name]) == len(wanted), name
        for (step, value), (want_step, want) in zip(stored[name], wanted, strict=True):
            assert step == want_step
            if math.isnan(want):
                assert math.isnan(value)
            else:
                assert value == max(-BIGGEST, min(BIGGEST, want)), (name, step)


SETS = ["train_split", "held_out"]


def make_record(name: str = "tiny", status: str = "RUNNING", **spec: Any) -> RunRecord:
    """A record of a run on random tokens, with the facts that tracking shows."""
    resolved = RunSpec.model_validate({"name": name, "data": {"dataset": "random"}, **spec})
    record = RunRecord(
        id=uuid.uuid4().hex,
        name=name,
        status=status,
        started="2026-01-02T03:04:05+00:00",
        spec=resolved.model_dump(mode="json"),
        spec_sha256=spec_hash(resolved),
        provenance={"user": "ada", "versions": {"torch": "2.13.0"}},
        git_commit="c0ffee",
        tokens_per_step=resolved.tokens_per_step,
        total_tokens=resolved.total_tokens,
    )
    effective = record.effective.model_dump()
    effective["data"] = {"source": "a corpus", "train_sha256": "a" * 64, "train_tokens": 1000}
    effective["hardware"] = {"driver": {"not_applicable": "a CPU has no driver"}, "threads": 2}
    effective["evaluation"] = {
        "held_out": {"sha256": "b" * 64, "documents": 7},
        "train_split": {"sha256": "c" * 64, "documents": 8},
    }
    record.effective = type(record.effective).model_validate(effective)
    return record


def rows(count: int, first: int = 0) -> list[dict[str, float | int | None]]:
    """Rows with awkward numbers; every fourth has an evaluation, one is NaN, one infinite."""
    found = []
    for step in range(first, first + count):
        row: dict[str, float | int | None] = {
            "step": step,
            "tokens": step * 4096,
            "train/nll": math.nan if step == 2 else 12.2 - step / 3,
            "train/objective": math.inf if step == 3 else 12.3 - step / 3,
            "lr": 3e-4 / (step + 1),
            "tokens_per_s": 1000.0 + step,
        }
        if step % 4 == 0:
            row |= {"held_out/nll": 0.1 + step, "held_out/perplexity": math.exp(0.1 + step)}
            row |= {"train_split/nll": 1 / (step + 3)}
        found.append(row)
    return found


def track_rows(
    journal: Journal, tracker: MlflowTracker, first: int, count: int, pause: float
) -> float:
    """Writes and logs rows, one every `pause` seconds; returns the longest that tracking took of
    one, in seconds."""
    slowest = 0.0
    for row in rows(count, first=first):
        journal.write(row)
        before = time.perf_counter()
        tracker.log(row)
        slowest = max(slowest, time.perf_counter() - before)
        time.sleep(pause)
    return slowest


def track_spell(
    proxy: FaultyProxy,
    mode: Mode,
    journal: Journal,
    tracker: MlflowTracker,
    first: int,
    pause: float,
) -> float:
    """Eight rows while the server does this, and the time until the feeder has met it: one that
    was refused looks ever more rarely. Returns as `track_rows` does."""
    before = proxy.counts.get(mode, 0)
    proxy.set(mode)
    slowest = track_rows(journal, tracker, first, 8, pause)
    deadline = time.monotonic() + 120
    while True:
        is_told = (tracker._pending is None) == (mode == "ok")
        if is_told and (mode == "gone" or proxy.counts.get(mode, 0) > before):
            return slowest
        assert time.monotonic() < deadline, f"the feeder never met {mode}"
        time.sleep(0.05)


def make_run(
    store: Store, name: str = "tiny", count: int = 9, record: RunRecord | None = None
) -> tuple[Path, RunRecord, Journal]:
    """A run of this process with `count` rows, its journal still open."""
    record = record or make_record(name)
    folder = store.create_run(name)
    write_record(record, folder)
    journal = Journal(folder / METRICS, columns(SETS))
    for row in rows(count):
        journal.write(row)
    return folder, record, journal


def end_run(folder: Path, record: RunRecord, status: str = "FINISHED") -> None:
    """Writes the end of a run into its record, and lets go of its folder."""
    record.status = status  # type: ignore[assignment]
    record.ended = "2026-01-02T04:00:00+00:00"
    write_record(record, folder)
    release_run(folder)
