"""Kills `wb run` with SIGKILL at random instants and resumes it, until it has finished.

What is left must be, byte for byte, what an unbroken run leaves. `python tests/kills.py N` makes N
kills and prints one JSON document with what was found; it exits 1 where anything differs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tiny_runs import sections

from workbench.track.journal import MEASURED_COLUMNS

STEPS = 60
# Where a run is when a file of this name appears or grows; a kill waits for one of them.
MOMENTS = {
    "start": "run_config.json",
    "metrics": "metrics.csv",
    "evaluation": "evaluations/*",
    "saving": "checkpoints/.step_*/*",
    "saved": "checkpoints/step_*",
    "telemetry": "telemetry/*",
}
SPEC: dict[str, Any] = {
    "model": {"learn_shared_routed_gates": True, "routed_gate_final": 1.0},
    "training": {"steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2},
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


def write_spec(folder: Path, optimizer: str = "adamw") -> Path:
    """The spec that is killed: every part of a run's state moves in it."""
    path = folder / "killed.yaml"
    changes = {**SPEC, "optimizer": {"lr": 3e-3, "name": optimizer}}
    path.write_text(json.dumps({"name": "killed", "seed": 42, **sections(folder, **changes)}))
    return path


def start(spec: Path, home: Path, *options: str) -> subprocess.Popen[bytes]:
    """`wb run` in a process of its own, on one thread: other counts round otherwise."""
    variables = {"WB_HOME": str(home), "OMP_NUM_THREADS": "1", "WB_MLFLOW_WAIT": "0"}
    variables["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:9"  # nobody listens there
    return subprocess.Popen(
        [sys.executable, "-m", "workbench", "run", str(spec), *options],
        env=os.environ | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    """Waits for a run that is to end by itself."""
    said = process.communicate()[1].decode()
    assert process.returncode == 0, said


def kill_at_random(spec: Path, home: Path, kills: int, seed: int) -> Outcome:
    """Kills and resumes until `kills` have been made, then lets the run finish."""
    draw, outcome = random.Random(seed), Outcome()
    folder = home / "runs" / "killed"
    began = time.monotonic()
    while sum(outcome.kills.values()) < kills:
        if finished(folder):  # too few steps for so many kills: once more from the start
            rewind_to_start(folder)
        process = start(spec, home, "--resume")
        moment = draw.choice(list(MOMENTS))
        try:
            if wait_for_change(folder, MOMENTS[moment], process, draw):
                time.sleep(draw.expovariate(1 / 0.004))
                process.kill()
                outcome.kills[moment] = outcome.kills.get(moment, 0) + 1
        finally:
            process.communicate()
    finish(start(spec, home, "--resume"))
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
    import shutil

    path = folder / "run_config.json"
    document = json.loads(path.read_text())
    document["status"] = "RUNNING"
    path.write_text(json.dumps(document))
    shutil.rmtree(folder / "checkpoints")


def wait_for_change(
    folder: Path, pattern: str, process: subprocess.Popen[bytes], draw: random.Random
) -> bool:
    """Whether, before the run ended, files of this pattern changed a random number of times."""
    changes, last = draw.randint(1, 4), sizes(folder, pattern)
    deadline = time.monotonic() + 120
    while process.poll() is None:
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


def survive(folder: Path, kills: int, seed: int, optimizer: str = "adamw") -> Outcome:
    """An unbroken run and one that is killed, compared."""
    spec = write_spec(folder, optimizer)
    straight = start(spec, folder / "straight")
    outcome = kill_at_random(spec, folder / "broken", kills, seed)
    finish(straight)
    outcome.differences = differences(
        folder / "straight/runs/killed", folder / "broken/runs/killed"
    )
    return outcome


def main(arguments: list[str], survive: Callable[..., Outcome] = survive) -> int:
    """Prints what came of so many kills."""
    kills, seed = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 1
    with tempfile.TemporaryDirectory() as name:
        outcome = survive(Path(name), kills, seed)
    print(json.dumps(outcome.__dict__))
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
