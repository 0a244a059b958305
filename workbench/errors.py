"""The errors a user can cause: each with its place, value, what is allowed, and an exit code."""

from __future__ import annotations

import difflib
import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

# What is allowed for a setting that does not apply.
UNSET = "null (unset it)"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where, what was found, what is allowed, in a sentence.

    Of a file that cannot be read, the place is its path, and so is the value.
    """

    place: str
    message: str
    value: Any = None
    allowed: str | None = None

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}"
        if self.value is not None and str(self.value) != self.place:
            text += f" (got {self.value!r})"
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        return text


class UserError(ValueError):
    """A mistake in a spec, an option or an input. Carries every fault found, not only the first."""

    exit_code = 2
    agreed = False
    """Whether all processes of a run end by this same error, so that one of them says it."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))

    def __reduce__(self) -> tuple[type[Self], tuple[Fault, ...], dict[str, Any]]:
        return type(self), self.faults, vars(self)  # so that it comes whole from another process

    @classmethod
    def at(cls, place: str, message: str, value: Any = None, allowed: str | None = None) -> Self:
        """The error of a single fault."""
        return cls(Fault(place, message, value, allowed))


class TrainingStoppedError(UserError):
    """Training ended itself: a loss or gradient that is not finite."""

    exit_code = 4
    agreed = True  # decided from numbers that all processes have alike


class RefusedError(UserError):
    """What was asked is valid, and the workbench will not do it: the numbers would not hold."""

    exit_code = 3


class StoreError(UserError):
    """The store could not be read or written: disk full, read-only, unreachable."""

    exit_code = 74


@contextmanager
def storing(path: Path, need: int | None = None) -> Iterator[None]:
    """Turns an operating system error into the StoreError of `path`, for which `need` bytes are
    written where that is known."""
    try:
        yield
    except OSError as error:
        raise store_error(path, error, need) from error


def store_error(path: Path, error: OSError, need: int | None = None) -> StoreError:
    """What could not be written or read, why, and how much room is missing where it is full."""
    message = f"the store cannot be used: {reason_of(error)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message += f" ({shortage(need, free_bytes(path))})"
    elif error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        message += "; WB_HOME names another place"
    return StoreError(Fault(str(path), message))


def reason_of(error: OSError) -> str:
    """The system's words for an error, as a part of a sentence."""
    return (error.strerror or str(error)).lower()


def shortage(need: int | None, free: int | None) -> str:
    """How much room is missing, in bytes, as far as that is known."""
    left = "an unknown number of" if free is None else f"{free:,}"
    if need is None:
        return f"{left} bytes are free"
    missing = "" if free is None else f", at least {max(need - free, 1):,} more are needed"
    return f"it needs {need:,} bytes, {left} are free{missing}"


def free_bytes(path: Path) -> int | None:
    """The room on the disk of a path, which need not be there; None: it cannot be told."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue  # not there, or not to be looked at
    return None


def out_of_memory(error: BaseException) -> Fault | None:
    """What to say where memory did not suffice, of this machine or of its GPU; None: it is another
    error. Torch's own error is known by name, so that nobody has to load torch for it."""
    named = any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
    words = ("out of memory", "can't allocate memory")
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    if not (isinstance(error, MemoryError) or named or told):
        return None
    cause = str(error).strip().partition("\n")[0]
    message = f"there is too little of it here{f': {cause}' if cause else ''}"
    allowed = "a smaller model, batch or sequence, or training.grad_ckpt; see wb plan"
    return Fault("memory", message, None, allowed)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when none is like it."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing."""
    match = nearest(word, known)
    return f" Did you mean {match!r}?" if match else ""
