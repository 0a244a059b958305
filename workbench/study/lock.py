"""The lock of a study: one `wb study run` at a time, and none while runs of an earlier one go on.

The file is locked by the process and by the runs that it starts, which inherit the open file: where
the process is killed and its runs go on, the lock is held until the last of them has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from workbench.errors import Fault, RefusedError, storing
from workbench.track.file_lock import is_held, lock_within

_LOCK = ".lock"


@contextlib.contextmanager
def study_lock(folder: Path) -> Iterator[int]:
    """Holds the lock while entered; gives the file that the runs must inherit.

    Raises:
        RefusedError: another process has it.
        StoreError: the store cannot be written.
    """
    path = folder / _LOCK
    with storing(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not lock_within(handle, seconds=0.5):
            raise RefusedError(Fault(str(folder), _held_by(handle)))
        yield handle
    finally:
        os.close(handle)


def is_being_run(folder: Path) -> bool:
    """Whether a `wb study run`, or a run that one left behind, goes on."""
    return is_held(folder / _LOCK)


def _held_by(handle: int) -> str:
    message = "this study is being run by another process"
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
        pid, host = int(owner["pid"]), str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return message
    if host == socket.gethostname() and not psutil.pid_exists(pid):
        return f"the process that ran this study (pid {pid}) is gone; a run that it began goes on"
    return f"{message} (pid {pid} on {host})"
