"""What MLflow costs a run that it follows: of two cores, and in the process that trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from track.tracked_runs import end_run, make_record, rows

from workbench.track.feeder import MlflowTracker
from workbench.track.journal import Journal, columns
from workbench.track.record import write_record
from workbench.track.store import Store

ROWS_PER_SECOND = 4
BEGINNING = 120  # rows before the feeder is up and has caught up


@dataclass(frozen=True)
class Cost:
    """The feeder's share of two cores, and the seconds of a row in the process that trains."""

    share: float
    seconds_per_row: float


def tracking_cost(store: Store, count: int = 260) -> tuple[Cost, Path]:
    """Follows a run that writes four rows a second; returns what it cost, and the run's folder."""
    record = make_record("cost")
    folder = store.create_run("cost")
    write_record(record, folder)
    journal = Journal(folder / "metrics.csv", columns(["train_split", "held_out"]))
    tracker = MlflowTracker(None, store, "workbench")
    before = set(psutil.Process().children(recursive=True))
    tracker.start(record, folder)
    (feeder,) = set(psutil.Process().children(recursive=True)) - before
    began, inside, start = time.monotonic(), 0.0, (0.0, 0.0)
    for number, row in enumerate(rows(count), 1):
        journal.write(row)
        asked = time.perf_counter()
        tracker.log(row)
        inside += time.perf_counter() - asked
        time.sleep(1 / ROWS_PER_SECOND)
        if number == BEGINNING:
            start = time.monotonic() - began, sum(feeder.cpu_times()[:2])
    seconds = time.monotonic() - began - start[0]
    used = sum(feeder.cpu_times()[:2]) - start[1]
    journal.close()
    end_run(folder, record)
    assert tracker.finish(record) is None
    return Cost(used / (2 * seconds), inside / count), folder
