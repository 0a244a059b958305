"""A Slurm of scripts: `sbatch`, `srun`, `scontrol`, `sacct`, `squeue` in a folder for the PATH.

It runs every task of an array at once as a process of this machine, tells states as `sacct` does,
and queues a task again where `scontrol requeue` asks for it. What submitit writes and calls is
real.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

COMMANDS = ("sbatch", "srun", "scontrol", "sacct", "squeue")


def install(folder: Path) -> Path:
    """Puts the commands into a folder, and their state beside them; returns the folder."""
    folder.mkdir()
    for name in COMMANDS:
        path = folder / name
        text = f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "{folder}" "$@"\n'
        path.write_text(text)
        path.chmod(0o755)
    return folder


def submissions(folder: Path) -> list[str]:
    """The batch files that were submitted."""
    return [path.read_text() for path in sorted(folder.glob("*.batch"))]


def pids(folder: Path, task: str) -> list[psutil.Process]:
    """The processes of a task, from its shell on."""
    shell = psutil.Process(int((folder / f"{task}.pid").read_text()))
    return [shell, *shell.children(recursive=True)]


def preempt(folder: Path, task: str) -> None:
    """As Slurm does it: SIGTERM to every process of the job, then the signal that was asked for."""
    for process in pids(folder, task)[1:]:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    for process in pids(folder, task)[1:]:
        with contextlib.suppress(psutil.Error):
            if "submitit.core._submit" in process.cmdline():
                process.send_signal(signal.SIGUSR2)


def cancel(folder: Path, task: str) -> None:
    """Ends a task and all its processes."""
    (folder / f"{task}.state").write_text("CANCELLED by 0")
    for process in pids(folder, task):
        with contextlib.suppress(psutil.Error):
            process.kill()


def sbatch(folder: Path, arguments: list[str]) -> int:
    text = Path(arguments[-1]).read_text()
    number = str(100 + len(submissions(folder)))
    (folder / f"{number}.batch").write_text(text)
    array = [line for line in text.splitlines() if line.startswith("#SBATCH --array=")]
    last = int(array[0].partition("=0-")[2].partition("%")[0]) if array else None
    for index in range(1 if last is None else last + 1):
        task = number if last is None else f"{number}_{index}"
        (folder / f"{task}.state").write_text("PENDING")
        subprocess.Popen(
            [sys.executable, __file__, "node", str(folder), task, arguments[-1]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    print(f"Submitted batch job {number}")
    return 0


def node(folder: Path, arguments: list[str]) -> int:
    """What a machine of the cluster does with a task."""
    task, script = arguments
    number, _, index = task.partition("_")
    variables = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    if index:
        variables |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
    again = folder / f"{task}.requeue"
    while True:
        shell = subprocess.Popen(["bash", script], env=os.environ | variables)
        (folder / f"{task}.pid").write_text(str(shell.pid))
        (folder / f"{task}.state").write_text("RUNNING")
        code = shell.wait()
        if not again.exists():
            break
        again.unlink()
        (folder / f"{task}.state").write_text("REQUEUED")
    if (folder / f"{task}.state").read_text() == "RUNNING":
        (folder / f"{task}.state").write_text("FAILED" if code else "COMPLETED")
    return 0


def srun(folder: Path, arguments: list[str]) -> int:
    command = arguments[next(i for i, word in enumerate(arguments) if not word.startswith("-")) :]
    if "--output" in arguments:  # options with their value apart
        command = arguments[arguments.index(sys.executable) :]
    os.execv(command[0], command)


def scontrol(folder: Path, arguments: list[str]) -> int:
    assert arguments[0] == "requeue"
    (folder / f"{arguments[1]}.requeue").touch()
    with (folder / "requeues").open("a") as file:
        file.write(f"{arguments[1]}\n")
    return 0


def sacct(folder: Path, arguments: list[str]) -> int:
    if (folder / "no-accounting").exists():
        return 1
    print("JobID|State|NodeList")
    for path in sorted(folder.glob("*.state")):
        print(f"{path.stem}|{path.read_text()}|here")
    return 0


def squeue(folder: Path, arguments: list[str]) -> int:
    path = folder / f"{arguments[arguments.index('-j') + 1]}.state"
    if path.read_text() in ("PENDING", "RUNNING", "REQUEUED"):
        print(path.read_text())
    return 0


if __name__ == "__main__":
    name, where, *given = sys.argv[1:]
    sys.exit(globals()[name](Path(where), given))
