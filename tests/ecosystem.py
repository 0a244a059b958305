"""Measures how the workbench lives with others, and writes `reports/ecosystem.md`.

`make ecosystem` runs it: what a shared tracking server takes, how much of other trainers' runs is
known here, and how long a newcomer takes to a first comparison. Each figure is of this run of this
command alone; where a point is lost, it writes no page.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "track"))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded

from importing.legacy_runs import ORIGINAL
from importing.test_mlflow_runs import log_runs, mapping
from mlflow_servers import Server
from postgres_servers import Postgres, programs
from track.tracked_runs import assert_equal_to_file, end_run, make_record, make_run, track_rows

from workbench.importing.complexity import read_complexity
from workbench.importing.csv_runs import read_csv
from workbench.importing.draft import Draft, keep
from workbench.importing.mlflow_runs import read_mlflow
from workbench.track.feeder import MlflowTracker, send_run
from workbench.track.journal import TWINS, read_metrics
from workbench.track.mlflow_store import connect
from workbench.track.store import METRICS, Store

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "docs" / "examples"
TUTORIAL = HERE / "tutorial.py"
COMPARED = "compare"  # in the title of the section that ends with the comparison
RUNS = [1, 4, 12]  # at once
ROWS = 10.0  # of each in a second
SECONDS = 20.0


@dataclass(frozen=True)
class Load:
    """What a server was asked to take, and what it took."""

    runs: int
    rate: float
    points: int
    writing: float
    after: float
    reading: float
    slowest: float


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Name -> address of a server over SQLite and, where it is installed, over PostgreSQL."""
    with contextlib.ExitStack() as stack:
        backends = {"SQLite": f"sqlite:///{folder / 'server.db'}"}
        if programs() is not None and importlib.util.find_spec("psycopg2") is not None:
            backends["PostgreSQL"] = stack.enter_context(Postgres()).uri
        yield {
            name: stack.enter_context(Server(folder / name, uri, workers=2)).address
            for name, uri in backends.items()
        }


def load(folder: Path, address: str, runs: int, rate: float, seconds: float) -> Load:
    """Lets runs write rows at once, waits until the server has them, and reads all of it back."""
    store = Store(folder / "mlruns")
    began, slowest = [], [0.0] * runs
    for index in range(runs):
        name = f"run-{index}"
        run, record, journal = make_run(store, name, 0, make_record(name))
        tracker = MlflowTracker(address, store, "load", grace_seconds=300.0, poll_seconds=1.0)
        began.append((run, record, journal, tracker))
    for run, record, _, tracker in began:
        tracker.start(record, run)

    def write(index: int) -> None:
        _, _, journal, tracker = began[index]
        slowest[index] = track_rows(journal, tracker, 0, round(rate * seconds), 1 / rate)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(runs)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writing = time.monotonic() - start
    for run, record, journal, _ in began:
        journal.close()
        end_run(run, record)
    start = time.monotonic()
    for run, record, _, tracker in began:
        if tracker.finish(record) is not None:
            assert send_run(run) is None
    after = time.monotonic() - start
    target = connect(address, store, "load")
    start = time.monotonic()
    for run, *_ in began:
        assert_equal_to_file(target, run)
    reading = time.monotonic() - start
    count = sum(_points(run) for run, *_ in began)
    return Load(runs, rate, count, writing, after, reading, max(slowest))


def _points(run: Path) -> int:
    """How many points the metrics of a run are, each of which the server must have."""
    table = read_metrics(run / METRICS)
    named = set(table) - {"step", "unix_time", *TWINS}
    return sum(value is not None for name in named for value in table[name])


def load_lines(folder: Path, seconds: float, runs_at_once: list[int]) -> list[str]:
    """A row for each server and load."""
    lines = [
        "| server over | runs at once | rows/s of each | points sent | points/s written "
        "| all there after the last row | points/s read back | longest that a row waited |",
        "| --- " + "| ---: " * 7 + "|",
    ]
    with servers(folder) as found:
        for name, address in found.items():
            for runs in runs_at_once:
                print(f"       {runs} runs over {name}", file=sys.stderr, flush=True)
                with scratch() as home:
                    one = load(home, address, runs, ROWS, seconds)
                lines.append(
                    f"| {name} | {runs} | {ROWS:g} | {one.points:,} | "
                    f"{one.points / one.writing:,.0f} | {one.after:.1f} s | "
                    f"{one.points / one.reading:,.0f} | {one.slowest * 1e3:.2f} ms |"
                )
    lines += [
        "",
        f"Rows were written for {seconds:g} s. Every point was read back and is the one in "
        "`metrics.csv`, once. A row waits for nothing "
        "but its own file: a process of each run feeds the server. The time after the last row "
        "holds the run's end too: its files, its tags, and its list of hashes.",
    ]
    if "PostgreSQL" not in found:
        lines.append("PostgreSQL or its driver is not installed here.")
    return lines


def fidelity_lines(folder: Path) -> list[str]:
    """How much of what the checklist judges is known of the runs of others."""
    store = Store(folder / "store")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    theirs = folder / "theirs"
    theirs.mkdir()
    log_runs(MlflowClient(theirs.as_uri()))
    drafts: list[tuple[str, Draft]] = [("complexity", read_complexity(ORIGINAL))]
    drafts += [
        ("csv", draft)
        for draft in read_csv(EXAMPLES / "nanogpt.csv", EXAMPLES / "nanogpt.map.yaml")
    ]
    drafts += [("mlflow", d) for d in read_mlflow("theirs", str(theirs), mapping(folder))[:1]]
    lines = [
        "| importer | run | facts judged | known | missing | corrected |",
        "| --- | --- " + "| ---: " * 4 + "|",
    ]
    details = []
    for importer, draft in drafts:
        found = keep(draft, store)
        known, missing = found.fidelity.known, len(found.fidelity.missing)
        corrected = found.fidelity.corrected
        lines.append(
            f"| {importer} | {draft.name} | {known + missing} | {known} | {missing} "
            f"| {len(corrected)} |"
        )
        if corrected:
            details.append(f"- {draft.name}, corrected: {', '.join(corrected)}")
    lines += [
        "",
        "A fact is judged where a rule of the checklist compares it; a missing one equals nothing. "
        "The runs are the original runner's that the tests keep, the example of "
        "`docs/importing.md`, and one of a trainer that logs five settings to MLflow.",
        "",
        *details,
    ]
    return lines


def tutorial_lines(times: Path | None) -> list[str]:
    """From a fresh copy to the comparison of the tutorial, by its sections.

    Args:
        times: what `tests/tutorial.py --json` wrote; None: it is run now, where it is there.
    """
    if times is None and not TUTORIAL.exists():
        return ["The tutorial was not run."]
    with scratch() as folder:
        if times is None:
            times = folder / "times.json"
            subprocess.run([sys.executable, str(TUTORIAL), "--json", str(times)], check=True)
        found: dict[str, Any] = json.loads(times.read_text())
    seconds: dict[str, float] = found["seconds"]
    titles = list(seconds)
    last = next((at for at, title in enumerate(titles) if COMPARED in title.lower()), None)
    lines = ["| section | seconds |", "| --- | ---: |"]
    lines += [f"| {title} | {value:,.0f} |" for title, value in seconds.items()]
    total = sum(seconds.values())
    cores = f"{found['cores']} cores"
    lines += ["", f"All of its commands take {total / 60:.1f} minutes on {cores}, without reading."]
    if last is not None:
        until = sum(seconds[title] for title in titles[: last + 1])
        lines[-1] = f"From install to the comparison: {until / 60:.1f} minutes. {lines[-1]}"
    return lines


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ecosystem-") as name:
        yield Path(name)


def main() -> int:
    """Measures everything, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE.parent / "reports" / "ecosystem.md")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of writing at each load")
    parser.add_argument("--runs", type=int, nargs="+", default=RUNS, help="at once, at each load")
    parser.add_argument("--tutorial", type=Path, help="times that tests/tutorial.py --json wrote")
    parser.add_argument("--only", help="one section, printed and not written")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    for name in ("MLFLOW_TRACKING_URI", "WB_HOME"):
        os.environ.pop(name, None)
    began = time.monotonic()
    sections = {
        "load": (
            "Load of a tracking server",
            lambda home: load_lines(home, asked.seconds, asked.runs),
        ),
        "imports": ("Runs of others", fidelity_lines),
        "tutorial": (
            "From install to a comparison",
            lambda home: tutorial_lines(asked.tutorial),
        ),
    }
    lines: list[str] = []
    for name, (title, make) in sections.items():
        if asked.only in (None, name):
            print(f"{time.monotonic() - began:5.0f} s  {name}", file=sys.stderr, flush=True)
            with scratch() as home:
                lines += ["", f"## {title}", "", *make(home)]
    if asked.only:
        print("\n".join(lines).strip())
        return 0
    head = [
        "# At home in the ecosystem",
        "",
        "Generated by `make ecosystem`; do not edit. Where a point is lost it writes no page.",
        "",
        f"Made in {time.monotonic() - began:.0f} s on {platform.machine()} with {os.cpu_count()} "
        f"cores, Python {platform.python_version()}, load average {os.getloadavg()[1]:.1f} over "
        "five minutes: times depend on what else ran.",
    ]
    asked.out.write_text("\n".join([*head, *lines]) + "\n")
    print(f"wrote {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
