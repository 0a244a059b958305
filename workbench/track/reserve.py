"""Room kept free in a run's folder, so that its end can still be recorded on a full disk.

A record is replaced as a whole, which takes the room of another one. The reserve is a file of that
size; it is removed when the room is needed, and at the end of the run.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NAME = ".reserve"
LEAST_BYTES = 256 << 10


class Reserve:
    """Takes room for two records, where there is some; without it a run goes on all the same."""

    def __init__(self, folder: Path, record_bytes: int) -> None:
        """`record_bytes`: of the record as it is at the start."""
        self._path = folder / NAME
        size = max(LEAST_BYTES, 2 * record_bytes)
        try:
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.posix_fallocate(handle, 0, size)
            finally:
                os.close(handle)
        except OSError:
            self.release()

    def release(self) -> bool:
        """Gives the room back; whether there was any. More than once is fine."""
        with contextlib.suppress(OSError):
            self._path.unlink()
            return True
        return False
