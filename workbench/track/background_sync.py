"""Brings a growing file to the disk from a thread, so that its writer does not wait for the disk.

What is written survives the death of the process at once, and that of the machine a moment later.
"""

from __future__ import annotations

import contextlib
import os
import threading

# How often the thread looks whether there is something to sync. Nobody wakes it: a thread that is
# woken takes the interpreter from the one that trains.
PAUSE_SECONDS = 0.5


class BackgroundSync:
    """Syncs one open file. `synced` bytes of it, from its start, are known to be on the disk."""

    def __init__(self, handle: int) -> None:
        """Nothing is synced yet, and no thread runs before the first `ask`."""
        self._handle = handle
        self._wanted, self._closing = False, threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self.synced = 0

    @property
    def failed(self) -> bool:
        """Whether the disk did not take something."""
        return self._error is not None

    def ask(self) -> None:
        """What the file holds now is to reach the disk soon.

        Raises:
            OSError: what it held before did not.
        """
        self._tell()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="journal-sync", daemon=True)
            self._thread.start()
        self._wanted = True

    def wait(self) -> None:
        """Returns when all that the file holds is on the disk.

        Raises:
            OSError: it did not get there.
        """
        # The system tells of a failure once: the lock lets no failure of the thread slip through.
        self._sync()
        self._tell()

    def close(self) -> None:
        """Ends the thread, and syncs what is left as far as that can be done."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            if os.fstat(self._handle).st_size != self.synced:
                os.fsync(self._handle)

    def _tell(self) -> None:
        if self._error is not None:
            raise self._error

    def _sync(self) -> None:
        with self._lock:
            if self._error is not None:
                return
            size = os.fstat(self._handle).st_size
            try:
                os.fsync(self._handle)
            except OSError as error:
                self._error = error
            else:
                self.synced = size

    def _work(self) -> None:
        while not self._closing.wait(PAUSE_SECONDS) and self._error is None:
            if self._wanted:
                self._wanted = (
                    False  # before the sync: what is written meanwhile is asked for again
                )
                self._sync()
