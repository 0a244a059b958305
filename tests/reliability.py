"""Measures what a run survives and what that costs, and writes reports/reliability.md.

`make reliability` runs it; it takes some twenty minutes on two cores. Every number in the report
comes out of this file or of a test that it names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tracking_cost import ROWS_PER_SECOND, tracking_cost

from workbench.core.checkpoint import save_checkpoint
from workbench.core.restore import open_checkpoint, restore
from workbench.core.train import train
from workbench.process import prepare_process
from workbench.run import build
from workbench.spec.load import load_spec
from workbench.track.journal import TWINS, read_metrics
from workbench.track.mlflow_store import connect, read_position
from workbench.track.provenance import code_facts
from workbench.track.store import METRICS, Store

REPOSITORY = Path(__file__).parents[1]
HARNESS = Path(__file__).with_name("kills.py")
# Where faults are injected, and which.
FAULTS = {
    "tests/core/test_checkpoint.py": "a save that ends at every stage of it, a full disk",
    "tests/core/test_restore.py": "checkpoints with a changed, cut, missing or foreign file",
    "tests/core/test_saving.py": "an error while a checkpoint is written beside training",
    "tests/test_full_disk.py": "a file system that fills, wherever a run writes",
    "tests/test_resume.py": "stops at a step, in an evaluation, in a save; changed specs and code",
    "tests/track/test_feeder.py": "a server that refuses, hangs, fails, goes away and comes back",
    "tests/track/test_journal.py": "torn and damaged rows",
    "tests/track/test_store.py": "two processes for one name, locks of dead processes",
}
SMALL = ("training.batch_size=1", "training.seq_len=128", "training.steps=2")
SMALL += ("training.gradient_accumulation_steps=1", "training.precision=fp32")


@dataclass(frozen=True)
class Points:
    """Metric points of a run's journal, and what MLflow holds of them."""

    sent: int
    read_back: int
    differing: int


def kills(count: int, folder: Path, *options: str) -> dict[str, Any]:
    """What the harness says of so many kills, and whether anything differed."""
    command = [sys.executable, str(HARNESS), str(count), "--folder", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def points(folder: Path, store: Store) -> Points:
    """Compares every measured cell of the journal with MLflow's points."""
    target = connect(store.tracking_uri, store, "workbench")
    position = read_position(folder)
    assert position is not None
    table = read_metrics(folder / METRICS)
    sent: Counter[tuple[str, int | float]] = Counter()
    for name in set(table) - {"step", "unix_time", *TWINS}:
        cells = zip(table["step"], table[name], strict=True)
        sent.update((name, step or 0) for step, value in cells if value is not None)
    stored: Counter[tuple[str, int | float]] = Counter()
    for name in target.client.get_run(position.run_id).data.metrics:
        history = target.client.get_metric_history(position.run_id, name)
        stored.update((name, point.step) for point in history)
    differing = sum(((sent - stored) + (stored - sent)).values())
    return Points(sum(sent.values()), sum(stored.values()), differing)


def faults(folder: Path) -> list[tuple[str, int, int]]:
    """Runs the tests that inject faults, the slow ones too: (file, passed, not passed)."""
    found = []
    for name in FAULTS:
        path = folder / "result.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not gpu"]
        subprocess.run(
            [*command, f"--junitxml={path}", name],
            cwd=REPOSITORY,
            capture_output=True,
            check=False,
        )
        (suite,) = ElementTree.parse(path).getroot()
        bad = sum(int(suite.attrib[key]) for key in ("failures", "errors", "skipped"))
        found.append((name, int(suite.attrib["tests"]) - bad, bad))
        path.unlink()
    return found


def checkpoint_times(folder: Path) -> dict[str, float]:
    """Seconds and bytes of a checkpoint of the 100m profile, with the moments of AdamW."""
    spec = load_spec(REPOSITORY / "experiments/100m_mha.yaml", list(SMALL))
    store = Store(folder / "store")
    parts = build(spec, store)
    next(iter(train(parts.spec, parts.state, parts.forward, parts.loss)))
    began = time.monotonic()
    saved = save_checkpoint(parts.state, folder / "checkpoints", {}, keep=1)
    seconds = {"save": time.monotonic() - began}
    del parts
    began = time.monotonic()
    fresh = build(spec, store)
    seconds["build"] = time.monotonic() - began
    began = time.monotonic()
    restore(fresh.state, open_checkpoint(saved), spec)
    seconds["restore"] = time.monotonic() - began
    seconds["bytes"] = sum(path.stat().st_size for path in saved.iterdir())
    return seconds


def page(results: dict[str, Any]) -> str:
    """The report, as markdown."""
    machine, killed, tracked = results["machine"], results["killed"], results["tracked"]
    times, cost = results["checkpoint"], results["cost"]
    lines = [
        "# What a run survives, and what that costs",
        "",
        f"Made by `make reliability` on {machine['when']}: commit `{machine['commit']}`, torch "
        f"{machine['torch']}, {machine['cores']} cores ({machine['processor']}), which other work",
        "may have shared.",
        "",
        "## Kills",
        "",
        f"{sum(killed['kills'].values())} SIGKILLs at random instants, each followed by "
        f"`wb run --resume` ({killed['seconds']:.0f} s in all). Compared with an unbroken",
        "run byte for byte: `metrics.csv` without its measured times, every evaluation, the",
        "telemetry, all weights and moments, and what the record says.",
        "",
        "| killed during | kills |",
        "| --- | ---: |",
        *(f"| {name} | {count} |" for name, count in sorted(killed["kills"].items())),
        "",
        f"Files that differ: **{len(killed['differences'])}**. Resumed from steps "
        f"{min(killed['resumed_from'])} to {max(killed['resumed_from'])}.",
        "",
        "## Points sent, and read back from MLflow",
        "",
        "| run | kills | points in the journal | points in MLflow | missing or double |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| killed and resumed | {sum(tracked['kills'].values())} {_cells(tracked['points'])}",
        f"| unbroken, {ROWS_PER_SECOND} rows a second | 0 {_cells(cost['points'])}",
        "",
        "## Faults injected",
        "",
        "| tests | faults | passed | not passed |",
        "| --- | --- | ---: | ---: |",
        *(f"| `{name}` | {FAULTS[name]} | {ok} | {bad} |" for name, ok, bad in results["faults"]),
        "",
        "## Checkpoints of the 100m profile",
        "",
        "`experiments/100m_mha.yaml` after one update, float32 weights and AdamW's moments.",
        "",
        "| what | value |",
        "| --- | ---: |",
        f"| size | {times['bytes'] / 1e9:.2f} GB |",
        f"| saving: written, synced, hashed, renamed | {times['save']:.1f} s |",
        f"| going on: hashes checked, weights and moments read | {times['restore']:.1f} s |",
        f"| for comparison, what every start takes: data, model, optimizer | "
        f"{times['build']:.1f} s |",
        "",
        "On a CPU a checkpoint is written between two steps, outside the clock of the throughput;",
        "beside another device, while that trains.",
        "",
        "## What MLflow costs",
        "",
        f"With {ROWS_PER_SECOND} rows a second, the process that feeds MLflow takes "
        f"{100 * cost['share']:.2f} % of two cores; a row takes",
        f"{1e6 * cost['seconds_per_row']:.1f} µs where the run is trained.",
    ]
    return "\n".join(lines) + "\n"


def _cells(found: dict[str, int]) -> str:
    return f"| {found['sent']:,} | {found['read_back']:,} | {found['differing']} |"


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "reports/reliability.md")
    asked = parser.parse_args()
    prepare_process()
    os.environ |= {"WB_MLFLOW_WAIT": "400", "MLFLOW_DISABLE_TELEMETRY": "true"}
    results: dict[str, Any] = {
        "machine": {
            "when": datetime.now(UTC).date().isoformat(),
            "commit": (code_facts().git_commit or "unknown")[:12],
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
        }
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cost, run = tracking_cost(Store(folder / "cost"))
        results["cost"] = vars(cost) | {"points": vars(points(run, Store(folder / "cost")))}
        results["checkpoint"] = checkpoint_times(folder / "checkpoint")
        results["killed"] = kills(asked.kills, folder / "killed")
        tracked = folder / "tracked"
        results["tracked"] = kills(8, tracked, "--seed", "5", "--tracked")
        store = Store(tracked / "broken")
        results["tracked"]["points"] = vars(points(store.runs / "killed", store))
        results["faults"] = faults(folder)
    asked.out.write_text(page(results))
    print(f"written: {asked.out}")
    wrong = [*results["killed"]["differences"], *results["tracked"]["differences"]]
    wrong += [name for name, _, bad in results["faults"] if bad]
    sys.exit(f"not as it should be: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
