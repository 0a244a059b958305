"""Kills `wb run` with SIGKILL at random instants and resumes it, until it has finished.

What is left must be, byte for byte, what an unbroken run leaves. `python tests/kills.py N` makes N
kills and prints one JSON document with what was found; it exits 1 where anything differs. The runs
are processes of their own, forked from this one, which has torch loaded and has computed nothing:
so a kill costs no start of an interpreter. `--tracked` lets MLflow follow the run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# Set before torch is loaded: another number of threads rounds otherwise, and forks badly.
os.environ["OMP_NUM_THREADS"] = "1"

# What every run would load by itself, each time anew.
import matplotlib.figure  # noqa: F401
import torch._inductor  # noqa: F401
from tiny_runs import sections

from workbench import run as runner
from workbench.cli import main as wb
from workbench.track.events import NullTracker
from workbench.track.journal import MEASURED_COLUMNS

# Where a run is when a file of this name appears or grows; a kill waits for one of them.
MOMENTS = {
    "start": "run_config.json",
    "metrics": "metrics.csv",
    "evaluation": "evaluations/*",
    "saving": "checkpoints/.step_*/*",
    "saved": "checkpoints/step_*",
    "telemetry": "telemetry/*",
}
# Of the checkout, where somebody may commit meanwhile; the hash of the sources is compared.
GIT = ("git_commit", "git_dirty", "git_diff_sha256")
SPEC: dict[str, Any] = {
    "model": {"learn_shared_routed_gates": True, "routed_gate_final": 1.0},
    "training": {"batch_size": 2, "gradient_accumulation_steps": 2},
    "evaluation": {"eval_steps": 7},
    "telemetry": {"log_steps": 3, "moe": True},
    "checkpoint": {"save_steps": 4, "save_total_limit": 2},
}


@dataclass
class Outcome:
    """What a series of kills came to."""

    kills: dict[str, int] = field(default_factory=dict)
    resumed_from: list[int] = field(default_factory=list)
    seconds: float = 0.0
    differences: list[str] = field(default_factory=list)


def write_spec(folder: Path, optimizer: str, steps: int) -> Path:
    """The spec that is killed: every part of a run's state moves in it."""
    path = folder / "killed.yaml"
    training = {**SPEC["training"], "steps": steps}
    changes = {**SPEC, "training": training, "optimizer": {"lr": 3e-3, "name": optimizer}}
    path.write_text(json.dumps({"name": "killed", "seed": 42, **sections(folder, **changes)}))
    return path


def start(spec: Path, home: Path, *options: str, tracked: bool = False) -> ForkProcess:
    """`wb run` in a process of its own, which says what it says to a file in `home`."""
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(home, tracked, ["run", str(spec), *options])
    )
    process.start()
    return process


def _run(home: Path, tracked: bool, arguments: list[str]) -> None:
    home.mkdir(parents=True, exist_ok=True)
    os.environ.update(WB_HOME=str(home), WB_MLFLOW_WAIT="400" if tracked else "0")
    if not tracked:
        runner.tracker_for = lambda spec, store: NullTracker()
    said = os.open(home / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.argv = ["wb", *arguments]
    wb()


def finish(process: ForkProcess, home: Path) -> None:
    """Waits for a run that is to end by itself."""
    process.join()
    assert process.exitcode == 0, (home / "said.txt").read_text()


def kill_at_random(spec: Path, home: Path, kills: int, seed: int, tracked: bool) -> Outcome:
    """Kills and resumes until `kills` have been made, then lets the run finish."""
    draw, outcome = random.Random(seed), Outcome()
    folder = home / "runs" / "killed"
    began = time.monotonic()
    while sum(outcome.kills.values()) < kills:
        if finished(folder):  # too few steps for so many kills: once more from the start
            rewind_to_start(folder)
        process = start(spec, home, "--resume", tracked=tracked)
        moment = draw.choice(list(MOMENTS))
        try:
            if wait_for_change(folder, MOMENTS[moment], process, draw):
                time.sleep(draw.expovariate(1 / 0.004))
                process.kill()
                outcome.kills[moment] = outcome.kills.get(moment, 0) + 1
        finally:
            process.join()
        assert process.exitcode in (0, -signal.SIGKILL), (home / "said.txt").read_text()
    finish(start(spec, home, "--resume", tracked=tracked), home)
    record = json.loads((folder / "run_config.json").read_text())
    outcome.resumed_from = [one["step"] for one in record["resumes"]]
    outcome.seconds = time.monotonic() - began
    return outcome


def finished(folder: Path) -> bool:
    """Whether the run has come to its end."""
    path = folder / "run_config.json"
    return path.exists() and json.loads(path.read_text())["status"] == "FINISHED"


def rewind_to_start(folder: Path) -> None:
    """Forgets that the run has finished, and its later checkpoints: it can be killed again."""
    path = folder / "run_config.json"
    document = json.loads(path.read_text())
    document["status"] = "RUNNING"
    path.write_text(json.dumps(document))
    shutil.rmtree(folder / "checkpoints")


def wait_for_change(folder: Path, pattern: str, process: ForkProcess, draw: random.Random) -> bool:
    """Whether, before the run ended, files of this pattern changed a random number of times."""
    changes, last = draw.randint(1, 4), sizes(folder, pattern)
    deadline = time.monotonic() + 120
    while process.exitcode is None:
        assert time.monotonic() < deadline, "the run hangs"
        now = sizes(folder, pattern)
        if now != last:
            last, changes = now, changes - 1
            if not changes:
                return True
        time.sleep(0.001)
    return False


def sizes(folder: Path, pattern: str) -> dict[str, tuple[int, int]]:
    """Size and age of the files there are."""
    found = {}
    for path in folder.glob(pattern):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found[path.name] = (status.st_size, status.st_mtime_ns)
    return found


def left_behind(folder: Path) -> dict[str, bytes]:
    """All that a run leaves that must be the same bit for bit, by name."""
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    kept = [i for i, name in enumerate(lines[0]) if name not in MEASURED_COLUMNS]
    files = {"metrics.csv": "\n".join(",".join(cells[i] for i in kept) for cells in lines).encode()}
    for pattern in ("evaluations/*", "telemetry*", "checkpoints/*/*.safetensors"):
        for path in sorted(folder.glob(pattern)):
            files[str(path.relative_to(folder))] = path.read_bytes()
    record = json.loads((folder / "run_config.json").read_text())
    for name in ("points", "effective", "parameter_table", "status", "spec"):
        value = record[name]
        if name == "effective":
            value.pop("interval")
            for fact in GIT:
                value["code"].pop(fact, None)
        files[f"run_config.json: {name}"] = json.dumps(value, sort_keys=True).encode()
    files["results"] = json.dumps(record["results"]["final"], sort_keys=True).encode()
    files["stray files"] = "\n".join(sorted(strays(folder))).encode()
    return files


def strays(folder: Path) -> list[str]:
    """Half-written files that nobody will finish."""
    hidden = [path for path in folder.rglob(".*") if not path.name.endswith("lock")]
    return [str(path.relative_to(folder)) for path in hidden]


def differences(straight: Path, killed: Path) -> list[str]:
    """The names of what is not the same."""
    a, b = left_behind(straight), left_behind(killed)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def survive(folder: Path, asked: argparse.Namespace) -> Outcome:
    """An unbroken run and one that is killed, compared."""
    spec = write_spec(folder, asked.optimizer, asked.steps)
    straight, broken = folder / "straight", folder / "broken"
    unbroken = start(spec, straight)
    outcome = kill_at_random(spec, broken, asked.kills, asked.seed, asked.tracked)
    finish(unbroken, straight)
    outcome.differences = differences(straight / "runs/killed", broken / "runs/killed")
    return outcome


def main() -> int:
    """Prints what came of so many kills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tracked", action="store_true")
    parser.add_argument("--folder", type=Path, help="an empty one, to look at afterwards")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        outcome = survive(asked.folder or Path(name), asked)
    print(json.dumps(outcome.__dict__))
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main())
