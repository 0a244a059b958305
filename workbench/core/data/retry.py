"""Asks a server again when a connection drops: bounded, growing waits, each said on standard error.

Waits are 1, 2, 4, 8, 16, 32 and then 60 s three times: ten attempts over about 4 minutes, counted
anew whenever something arrives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from workbench.core.data.errors import DataError

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0)  # seconds
TICK = 0.25  # seconds between two looks at whether the run is to stop

# Where the errors of the libraries come from that talk to servers.
_CLIENTS = ("aiohttp", "fsspec", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub")
_AGAIN = (408, 425, 429)  # of the statuses below 500, those that may pass

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")


@dataclass
class Patience:
    """How long a server is waited for. `between` is called while waiting, and may raise."""

    waits: tuple[float, ...] = WAITS
    between: Callable[[], None] = lambda: None
    failures: int = 0  # in a row

    def arrived(self) -> None:
        """Something came: failures are counted anew."""
        self.failures = 0

    def wait(self, error: Exception, where: str) -> None:
        """Waits after a failure, longer each time.

        Raises:
            DataError: the error is not one that passes, or has not passed.
        """
        error = _cause(error)
        reason = f"{type(error).__name__}: {first_line(error)}"
        if not may_pass(error):
            raise DataError.at(where, f"the server refuses: {reason}") from error
        if self.failures >= len(self.waits):
            problem = f"gave up after {self.failures + 1} attempts: {reason}"
            raise DataError.at(where, problem) from error
        seconds = self.waits[self.failures]
        self.failures += 1
        _log.warning(
            "%s: the connection failed (%s); attempt %d of %d in %g s",
            where,
            reason,
            self.failures + 1,
            len(self.waits) + 1,
            seconds,
        )
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.between()
            time.sleep(min(left, TICK))


def retried(ask: Callable[[], _Found], patience: Patience, where: str) -> _Found:
    """What `ask` returns, asked again while a connection fails.

    Raises:
        DataError: it could not be had; says where, how often it was tried and why.
    """
    while True:
        try:
            found = ask()
        except Exception as error:
            if not is_lost(error):
                raise
            patience.wait(error, where)
        else:
            patience.arrived()
            return found


def is_lost(error: Exception) -> bool:
    """Whether the error comes from a server or the way to it."""
    if isinstance(error, DataError):
        return False
    if isinstance(error, OSError | EOFError | asyncio.TimeoutError):
        return True
    return any(kind.__module__.partition(".")[0] in _CLIENTS for kind in type(error).__mro__)


def may_pass(error: Exception) -> bool:
    """Whether asking again can help: not where the server says that there is nothing."""
    status: Any = getattr(error, "status", None)  # of aiohttp
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status >= 500 or status in _AGAIN
    return not isinstance(error, FileNotFoundError | PermissionError)


def _cause(error: Exception) -> Exception:
    """What a FileNotFoundError stands for: fsspec's word for any error of its first request."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def first_line(error: Exception) -> str:
    """The first line of an error's words, cut at 200 characters."""
    return (str(error).strip().splitlines() or [""])[0][:200]
