"""The processes of a study's runs: each is `wb run SPEC --resume`, so that a crash is one run's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from workbench.errors import storing
from workbench.spec.run import RunSpec
from workbench.track.provenance import PACKAGE, redact
from workbench.track.record import write_text
from workbench.track.store import Store

RUN = (sys.executable, "-P", "-m", "workbench", "run")
_TAIL = 4000
_GRACE_SECONDS = 30.0


@dataclass
class Process:
    """A run that is being trained. `run` is its planned name, `log` what it says."""

    run: str
    child: subprocess.Popen[bytes]
    log: Path

    def ended(self) -> int | None:
        """Its exit code (128 + n for a signal), or None while it goes on."""
        code = self.child.poll()
        return code if code is None or code >= 0 else 128 - code

    def tell(self, number: int) -> None:
        """Sends it a signal: in a process group of its own, it hears none of the terminal's."""
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(number)

    @property
    def job(self) -> str | None:
        """None: it is no job of a queue."""
        return None

    def last_words(self, code: int) -> str:
        """Why it ended, from the end of its log."""
        return last_words(self.log, code)


def last_words(log: Path, code: int) -> str:
    """Why a run ended with this exit code, from the end of its log."""
    with contextlib.suppress(OSError):
        text = log.read_bytes()[-_TAIL:].decode(errors="replace")
        said = [line for line in text.splitlines() if line.startswith("error: ")]
        if said:
            return said[-1].removeprefix("error: ")
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def write_spec(spec: RunSpec, folder: Path) -> Path:
    """The resolved spec as the file that its process reads, without credentials.

    Raises:
        StoreError: the store cannot be written.
    """
    document = spec.model_dump(mode="json")
    if spec.tracking.uri and redact(spec.tracking.uri) != spec.tracking.uri:
        document["tracking"]["uri"] = None  # by the environment instead
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{spec.name}.yaml"
    write_text(path, json.dumps(document, indent=1) + "\n")  # which is YAML, too
    return path


def start(
    spec: RunSpec, path: Path, go_on: str | None, store: Store, threads: int, log: Path, lock: int
) -> Process:
    """Starts `wb run` on the spec file `path`; `go_on` is the name of the run's folder, if it has
    one that is not its own.

    Raises:
        StoreError: the store cannot be written, or no process begun.
    """
    environment = dict(os.environ)
    paths = [str(PACKAGE.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["WB_HOME"] = str(store.home)
    if spec.tracking.uri:
        environment["MLFLOW_TRACKING_URI"] = spec.tracking.uri
    command = [*RUN, str(path), "--resume", *([] if go_on is None else [go_on])]
    with storing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as words:
            child = _spawn(command, words, environment, lock)
    return Process(spec.name, child, log)


def _spawn(
    command: list[str], words: IO[bytes], environment: dict[str, str], lock: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=words,
        stderr=words,
        env=environment,
        process_group=0,
        pass_fds=(lock,),
    )


def stop_all(processes: list[Process], number: int) -> None:
    """Sends all a signal and waits for them; those that take too long are killed."""
    for process in processes:
        process.tell(number)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.child.kill()
            process.child.wait()
