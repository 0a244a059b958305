"""Stands in for `wb run SPEC --resume [RUN]` where only what a study does with its processes is
tested: the same folders, locks, records, signals and exit codes, and nothing is trained.

`STAND_IN` holds JSON: `seconds` of a run, and by run name the exit code it is to end with (`codes`;
2 before anything is written). Each start appends its run's name to the file `starts`. It imports
nothing of the package, so that it starts at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 4


def main() -> int:
    """One run."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, frame: asked.append(n))
    told: dict[str, Any] = json.loads(os.environ["STAND_IN"])
    spec = json.loads(Path(sys.argv[1]).read_text())
    name = sys.argv[3] if len(sys.argv) > 3 else spec["name"]
    with Path(told["starts"]).open("a") as file:
        file.write(f"{name} {os.environ['OMP_NUM_THREADS']}\n")
    code = told.get("codes", {}).get(name, 0)
    if code == 2:
        print("error: data.text_file: it is not there")
        return 2
    folder = Path(os.environ["WB_HOME"], "runs", name)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    record: dict[str, Any] = {
        "id": os.urandom(16).hex(),
        "name": spec["name"],
        "started": "2026-01-01T00:00:00+00:00",
        "spec": spec,
        "spec_sha256": "",
        "tokens_per_step": 128,
        "total_tokens": 128 * STEPS,
        "results": {},
    }
    step = 0
    if (folder / "run_config.json").exists():
        record = json.loads((folder / "run_config.json").read_text())
        step = len((folder / "metrics.csv").read_text().splitlines()) - 1
    else:
        (folder / "metrics.csv").write_text("step,tokens\n")
    write(folder, record | {"status": "RUNNING", "error": None})
    while step < STEPS and not asked:
        step += 1
        with (folder / "metrics.csv").open("a") as file:
            file.write(f"{step},{128 * step}\n")
        time.sleep(told.get("seconds", 0.04) / STEPS)
        if code == 137:
            os.kill(os.getpid(), signal.SIGKILL)
    record["results"]["seconds"] = 1.0
    record |= {"status": "FAILED" if code else "FINISHED", "error": None}
    if asked:
        record |= {"status": "KILLED", "error": f"stopped by signal {asked[0]}"}
        code = 128 + asked[0]
    elif code == 4:
        record["error"] = "TrainingStoppedError: train/nll: the loss is not finite"
        print("error: train/nll: the loss is not finite")
    write(folder, record)
    return code


def write(folder: Path, record: dict[str, Any]) -> None:
    """Puts the record into the folder, whole."""
    (folder / ".new").write_text(json.dumps(record))
    (folder / ".new").replace(folder / "run_config.json")


if __name__ == "__main__":
    sys.exit(main())
