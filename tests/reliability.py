"""Measures what a run survives and what that costs, and writes `reports/reliability.md`.

`make reliability` runs it: minutes, most of them kills. Each figure is of this run of this command
alone. Every section fails outright where something is lost, so a page that exists says that
nothing was.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "fuzz"))
sys.path.insert(0, str(Path(__file__).parent / "track"))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded

import psutil
import torch
import tracking_cost
from readers import READERS, Case
from test_store_faults import CHECKPOINT, OTHERS, assert_told, ended
from tiny_runs import tiny_spec
from track.faulty_proxy import FaultyProxy, Mode, mlflow_server
from track.tracked_runs import (
    assert_equal_to_file,
    end_run,
    make_record,
    make_run,
    points,
    track_spell,
)

from workbench import run as runner
from workbench.core.checkpoint import save_checkpoint
from workbench.core.restore import open_checkpoint, restore
from workbench.core.train import train
from workbench.resume import ResumeRequest
from workbench.spec.load import load_spec
from workbench.spec.run import RunSpec, TelemetrySpec
from workbench.track.events import NullTracker
from workbench.track.feeder import MlflowTracker, send_run
from workbench.track.journal import read_metrics
from workbench.track.mlflow_store import connect, read_position
from workbench.track.store import Store

HERE = Path(__file__).resolve().parent
KILLS = (
    ("AdamW", ["30", "--seed", "1"]),
    ("muon_tr", ["30", "--seed", "2", "--optimizer", "muon_tr"]),
    ("AdamW, followed by MLflow", ["8", "--seed", "5", "--tracked"]),
)
FAULTS: tuple[Mode, ...] = ("gone", "hang", "500", "429", "lost", "cut")
SAID = {
    "gone": "nobody listens",
    "hang": "no answer",
    "500": "answers 500",
    "429": "answers 429",
    "lost": "carried out, the answer lost",
    "cut": "reset within the request",
}
MOST_COST = 0.01


@dataclasses.dataclass
class Section:
    """A heading, its text and its figures."""

    title: str
    lines: list[str]
    figures: dict[str, Any]


def kills(folder: Path) -> Section:
    """Runs killed with SIGKILL and resumed, compared with unbroken ones."""
    lines = [
        "| run | kills | start | metrics | evaluation | saving | saved | telemetry |"
        " resumed from a checkpoint | files that differ |",
        "| --- " * 10 + "|",
    ]
    moments = ["start", "metrics", "evaluation", "saving", "saved", "telemetry"]
    total = 0
    for name, arguments in KILLS:
        # A process of its own: one that has computed with torch must not be forked.
        home = folder / f"kills-{total}"
        home.mkdir()
        command = [sys.executable, str(HERE / "kills.py"), *arguments, "--folder", str(home)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        assert found["differences"] == [], found
        count = sum(found["kills"].values())
        assert count == int(arguments[0])
        total += count
        if "--tracked" in arguments:
            store = Store(home / "broken")
            target = connect(store.tracking_uri, store, "workbench")
            assert_equal_to_file(target, store.runs / "killed")
        cells = [str(found["kills"].get(moment, 0)) for moment in moments]
        resumed = sum(step > 0 for step in found["resumed_from"])
        lines.append(f"| {name} | {count} | {' | '.join(cells)} | {resumed} | 0 |")
        shutil.rmtree(home)
    lines += [
        "",
        f"{total} kills survived of {total}. Compared byte by byte with an unbroken run: every "
        "column of `metrics.csv` but measured times, evaluations, telemetry, checkpoints, and the "
        "record's points and results. The columns say where the run was: it had just begun, "
        "written a row, been evaluated, was in the middle of a save, had saved, had written "
        "telemetry. A kill before the record or the first checkpoint begins the run again.",
    ]
    return Section("Kills", lines, {"kills": total})


def outages(folder: Path) -> Section:
    """Runs of 99 rows over every fault of a server, read back from the server."""
    lines = ["| fault of the server | requests that met it |", "| --- | --- |"]
    counts: Counter[str] = Counter()
    sent = back = missing = twice = synced = 0
    slowest = 0.0
    with mlflow_server(folder) as server:
        proxy = FaultyProxy(server)
        store = Store(folder / "mlruns")
        for seed in range(2):
            name, modes = f"outages-{seed}", list(FAULTS)
            random.Random(seed).shuffle(modes)
            proxy.set("ok")
            run, record, journal = make_run(store, name, 3, make_record(name))
            tracker = MlflowTracker(proxy.address, store, "workbench", 60.0, poll_seconds=0.1)
            tracker.start(record, run)
            wait_for_position(run)
            step = 3
            for mode in modes:
                for now in (mode, "ok"):
                    slowest = max(slowest, track_spell(proxy, now, journal, tracker, step, 0.3))
                    step += 8
                    if now != "ok":
                        counts[f"{mode}: spells"] += 1
            journal.close()
            end_run(run, record)
            proxy.set("hang")  # and once more when the run ends
            tracker.finish(record)
            proxy.set("ok")
            os.environ["MLFLOW_TRACKING_URI"] = proxy.address
            try:
                assert send_run(run) is None
            finally:
                del os.environ["MLFLOW_TRACKING_URI"]
            synced += 1
            target = connect(f"http://{server}", store, "workbench")
            assert_equal_to_file(target, run)
            position = read_position(run)
            assert position is not None
            wanted = len(cells_of(run))
            stored = [
                (key, one[0])
                for key, history in points(target, position.run_id).items()
                for one in history
            ]
            sent += wanted
            back += len(set(stored))
            twice += len(stored) - len(set(stored))
            missing += wanted - len(set(stored))
        counts.update(proxy.counts)
        proxy.set("gone")
    assert (missing, twice) == (0, 0)
    assert all(counts[mode] >= counts[f"{mode}: spells"] for mode in FAULTS if mode != "gone")
    injected = 0
    for mode in FAULTS:
        met = counts.get(mode, 0)
        injected += met + counts[f"{mode}: spells"] * (mode == "gone")
        spells = counts[f"{mode}: spells"]
        what = f"refused, in {spells} spells" if mode == "gone" else f"{met}, in {spells} spells"
        lines.append(f"| {SAID[mode]} | {what} |")
    lines += [
        "",
        "| points | |",
        "| --- | --- |",
        f"| measured cells of `metrics.csv` | {sent:,} |",
        f"| read back from the server | {back:,} |",
        f"| missing | {missing} |",
        f"| there twice | {twice} |",
        "",
        f"A real MLflow server behind a proxy that fails, {synced} runs, each over every fault in "
        "turn and with the server hanging at its end; then `wb sync`. Not a number and infinities "
        "are among the points. The longest that a row waited for tracking: "
        f"{slowest * 1e6:,.0f} microseconds.",
    ]
    return Section("Faults of a tracking server", lines, {"faults": injected, "points": back})


def wait_for_position(run: Path) -> None:
    """Until the feeder has reached the server."""
    deadline = time.monotonic() + 60
    while read_position(run) is None:
        assert time.monotonic() < deadline, "MLflow was never reached"
        time.sleep(0.05)


def cells_of(run: Path) -> list[tuple[str, int]]:
    """Name and step of every measured cell of the run's metrics that MLflow is to have."""
    from workbench.track.journal import TWINS

    table = read_metrics(run / "metrics.csv")
    return [
        (name, int(step or 0))
        for name in set(table) - {"step", "unix_time", *TWINS}
        for step, value in zip(table["step"], table[name], strict=True)
        if value is not None
    ]


def disks(folder: Path) -> Section:
    """Runs on small disks that fill up at chosen moments."""
    lines = [
        "| the disk fills | exit | the run | checkpoints left whole |",
        "| --- | --- | --- | --- |",
    ]
    found = ended(folder / "a", CHECKPOINT) | ended(folder / "b", OTHERS)
    what = {
        "checkpoint": ("during a save", "step_00000004"),
        "metrics": ("within `metrics.csv`", "metrics.csv"),
        "scores": ("as scores are written", ".parquet"),
        "record": ("as the record is written", "run_config"),
    }
    for name, (when, place) in what.items():
        one = found[name]
        assert_told(one, place)
        lines.append(f"| {when} | {one['code']} | {one['status']} | {len(one['kept'])} |")
    assert found["none"]["code"] == 74
    lines.append("| before a run that has no room for a checkpoint | 74 | does not begin | |")
    lines += [
        "",
        "Real disks (tmpfs of 8 MiB). Each error says what was written and what is missing.",
    ]
    return Section("Disks that fill", lines, {"faults": len(what) + 1})


def damage(folder: Path, each: int) -> Section:
    """Damaged inputs for every reader."""
    lines = ["| reader | inputs | refused | read, harmless |", "| --- | --- | --- | --- |"]
    total = 0
    for name, reader in READERS.items():
        case, draw = Case(reader, folder / name.replace(" ", "_")), random.Random(7)
        outcome = Counter(case.try_one(draw) for _ in range(each))
        total += each
        lines.append(f"| {name} | {each} | {outcome['refused']} | {each - outcome['refused']} |")
    lines += [
        "",
        f"{total:,} inputs, no crash, no hang, and nothing read as right that a hash forbids.",
    ]
    return Section("Damaged files", lines, {"faults": total})


def resuming(folder: Path) -> Section:
    """What a resume adds to a run: the same tiny run straight, and in two parts."""
    runner.tracker_for = lambda spec, store: NullTracker()
    overhead = []
    for turn in range(4):
        spec = tiny_spec(
            folder, f"whole-{turn}", training={"steps": 8}, checkpoint={"save_steps": 4}
        )
        store = Store(folder / "mlruns")
        whole = timed(spec, store)
        spec = RunSpec.model_validate(spec.model_dump() | {"name": f"parts-{turn}"})
        stop = spec.model_dump()
        stop["training"]["stop_at_step"] = 4
        parts = timed(RunSpec.model_validate(stop), store)
        parts += timed(spec, store, ResumeRequest(None))
        if turn:  # the first loads what all of them need
            overhead.append(parts - whole)
    middle = statistics.median(overhead)
    lines = [
        f"A tiny run that stops half way and is resumed takes {middle:.2f} s longer than one "
        f"without a break (median of {len(overhead)}; {min(overhead):.2f} to {max(overhead):.2f}), "
        "beside the start of a process. It holds a second look at the data, the check of the "
        "checkpoint's hashes, the guard and a second end of a run.",
    ]
    return Section("Resume overhead", lines, {"seconds": middle})


def timed(spec: RunSpec, store: Store, request: ResumeRequest | None = None) -> float:
    """Seconds that a run takes in this process."""
    before = time.perf_counter()
    runner.run(spec, store, ["run"], quiet=True, resume=request)
    return time.perf_counter() - before


def saving(folder: Path) -> Section:
    """Time and size of a checkpoint of the 100m profile, and the time to go on from it."""
    path = HERE.parent / "experiments" / "100m_gqa.yaml"
    changes = ["data.dataset=random", "training.compile=false", "training.precision=fp32"]
    changes += ["training.steps=1", "training.seq_len=64", "training.batch_size=1"]
    spec = load_spec(path, [*changes, "evaluation.eval_steps=0"])
    parts = runner.build(spec, Store(folder / "mlruns"))
    list(train(parts.spec, parts.state))
    times, document = [], spec.model_dump(mode="json")
    saved = Path()
    for turn in range(3):
        before = time.perf_counter()
        saved = save_checkpoint(parts.state, folder / str(turn), document, keep=1)
        times.append(time.perf_counter() - before)
    size = sum(one.stat().st_size for one in saved.iterdir())
    count = sum(one.numel() for one in parts.state.model.parameters())
    opening, loading = [], []
    for _ in range(3):
        before = time.perf_counter()
        opened = open_checkpoint(saved)
        opening.append(time.perf_counter() - before)
        before = time.perf_counter()
        restore(parts.state, opened, spec)
        loading.append(time.perf_counter() - before)
    raw = folder / "raw"
    before = time.perf_counter()
    with raw.open("wb") as file:
        for _ in range(math.ceil(size / (1 << 24))):
            file.write(bytes(1 << 24))
        file.flush()
        os.fsync(file.fileno())
    disk = time.perf_counter() - before
    lines = [
        "| 100m profile, AdamW | |",
        "| --- | --- |",
        f"| parameters | {count:,} |",
        f"| size of a checkpoint | {size / 1e9:.3f} GB ({size:,} bytes) |",
        f"| time of a save: written, synced, hashed, renamed | {statistics.median(times):.2f} s "
        f"({min(times):.2f} to {max(times):.2f} of 3) |",
        f"| as many zeros written and synced | {disk:.2f} s |",
        f"| hashes checked on resume | {statistics.median(opening):.2f} s |",
        f"| weights and moments loaded | {statistics.median(loading):.2f} s |",
    ]
    return Section("Checkpoints of the 100m profile", lines, {"size": size})


def following(folder: Path) -> Section:
    """What tracking takes of a step: with rows at their default cadence, and with one for each."""
    default = TelemetrySpec.model_fields["log_steps"].default
    costs = []
    for log_steps, seconds in ((default, 240), (1, 100)):
        (folder / str(log_steps)).mkdir()
        costs.append(tracking_cost.measure(folder / str(log_steps), log_steps, seconds))
    cores = os.cpu_count() or 1
    heads = [f"a row every {cost.log_steps} steps" for cost in costs[:-1]] + ["a row every step"]
    lines = [
        f"| | {' | '.join(heads)} |",
        "| --- " * (len(costs) + 1) + "|",
        *(
            f"| {name} | {' | '.join(map(cell, costs))} |"
            for name, cell in (
                ("time of a step", lambda c: f"{c.step_seconds * 1e3:.1f} ms"),
                (
                    "processor time of tracking, of that of training",
                    lambda c: f"{c.processor_share:.2%}",
                ),
                (f"the same, of {cores} cores", lambda c: f"{c.core_share / cores:.2%}"),
                (
                    "for a row, where it trains",
                    lambda c: (
                        f"{c.row_processor * 1e3:.2f} ms of processors, "
                        f"{c.row_seconds * 1e3:.2f} ms of the clock"
                    ),
                ),
                (
                    "for a row, in the process that feeds MLflow",
                    lambda c: f"{c.fed_processor * 1e3:.2f} ms of processors",
                ),
                ("steps wait for rows, by the clock", lambda c: f"{c.rows_share:.2%}"),
                ("steps lose while MLflow is fed, by the clock", lambda c: lost_words(c.fed)),
                ("the same comparison where nothing is fed", lambda c: lost_words(c.idle)),
            )
        ),
    ]
    usual = costs[0]
    taken = usual.processor_share
    verdict = "under" if taken < MOST_COST else "not under"
    lines += [
        "",
        f"At the default cadence tracking takes {taken:.2%} of the processor time of training: "
        f"{verdict} {MOST_COST:.0%} of the step, even if all of it were taken from the processor "
        "that trains. This is counted time, which what else runs hardly moves. By the clock, steps "
        f"wait {usual.rows_share:.2%} for their rows, and {clock_words(usual)}. A row costs the "
        "same at any cadence, so that steps this short with a row for each pay most.",
        "",
        "Processor time is that of the thread that trains, within what writes a row, and of the "
        "process that feeds a SQLite database of MLflow's. The clock compares the steps during "
        "each burst of feeding with those just before and after it (95 % interval by bootstrap "
        "over bursts), in one run on one thread.",
    ]
    return Section("Step time of tracking", lines, {"cost": taken})


def lost_words(lost: tracking_cost.Lost | None) -> str:
    """A share with its interval."""
    if lost is None:
        return "too few pauses to tell"
    return f"{lost.share:+.2%} ({lost.low:+.2%} to {lost.high:+.2%}, {lost.bursts} bursts)"


def clock_words(cost: tracking_cost.Cost) -> str:
    """Whether the clock shows what the count of processor time says."""
    if cost.fed is None:
        return "what they lose while MLflow is fed could not be told"
    if cost.fed.high + cost.rows_share < MOST_COST:
        return f"with what they lose while MLflow is fed this is under {MOST_COST:.0%} as well"
    return (
        f"what they lose while MLflow is fed is not shown to leave it under {MOST_COST:.0%}: the "
        "interval is as wide as what else ran made it"
    )


def page(found: list[Section], seconds: float) -> str:
    """The report as markdown."""
    by = {one.title: one.figures for one in found}
    faults = sum(one.figures.get("faults", 0) for one in found)
    memory = psutil.virtual_memory().total / 1e9
    head = [
        "# Reliability",
        "",
        "Generated by `make reliability`; do not edit. Where something is lost it writes no page.",
        "",
        f"{by['Kills']['kills']} kills survived, {faults:,} faults injected, "
        f"{by['Faults of a tracking server']['points']:,} points sent and as many read back.",
        "",
        f"Made in {seconds:.0f} s on {platform.machine()} with {os.cpu_count()} cores and "
        f"{memory:.0f} GB, Python {platform.python_version()}, torch {torch.__version__}, load "
        f"average {os.getloadavg()[1]:.1f} over five minutes: times depend on what else ran.",
    ]
    for one in found:
        head += ["", f"## {one.title}", "", *one.lines]
    return "\n".join(head) + "\n"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as name:
        yield Path(name)


def main() -> int:
    """Measures everything, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE.parent / "reports" / "reliability.md")
    parser.add_argument("--damaged", type=int, default=200, help="inputs for each reader")
    parser.add_argument("--only", help="one section, printed and not written")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    for name in ("MLFLOW_TRACKING_URI", "WB_HOME"):
        os.environ.pop(name, None)
    os.environ.update(MLFLOW_HTTP_REQUEST_TIMEOUT="1", MLFLOW_HTTP_REQUEST_MAX_RETRIES="1")
    os.environ["WB_MLFLOW_WAIT"] = "60"
    began, found = time.monotonic(), []
    jobs = {
        "kills": kills,
        "outages": outages,
        "disks": disks,
        "damage": lambda folder: damage(folder, asked.damaged),
        "resuming": resuming,
        "saving": saving,
        "following": following,
    }
    for name, job in jobs.items():
        if asked.only in (None, name):
            print(f"{time.monotonic() - began:5.0f} s  {name}", file=sys.stderr, flush=True)
            with scratch() as folder:
                found.append(job(folder))
    if asked.only:
        print("\n".join(found[0].lines))
        return 0
    asked.out.write_text(page(found, time.monotonic() - began))
    print(f"wrote {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
