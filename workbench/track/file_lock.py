"""Locks on files, which the kernel drops when the last process that has the file open ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import storing

_LOCK_SECONDS = 60.0


def lock_within(handle: int, seconds: float) -> bool:
    """Locks an open file and writes into it whose it is; False: another process has it.

    It tries again for so many seconds, since `is_held` holds a lock for the instant of its look.

    Raises:
        OSError: the file cannot be locked.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):  # for people; the lock itself needs no room
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(owner).encode(), 0)
    return True


def is_held(path: Path) -> bool:
    """Whether a process holds the lock on this file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # A shared lock is enough to find out, and does not get in the way of another reader.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock on this file, which is made where needed.

    Raises:
        StoreError: the file cannot be written.
        TimeoutError: another process kept the lock for a minute.
    """
    with storing(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not lock_within(handle, _LOCK_SECONDS):
            raise TimeoutError(f"{path} is locked by another process")
        yield
    finally:
        os.close(handle)
