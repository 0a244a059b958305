"""The errors a user can cause: each with its place, value, what is allowed, and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where, what was found, what is allowed, in a sentence."""

    place: str
    message: str
    value: Any = None
    allowed: str | None = None

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}"
        if self.value is not None:
            text += f" (got {self.value!r})"
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        return text


class UserError(ValueError):
    """A mistake in a spec, an option or an input. Carries every fault found, not only the first."""

    exit_code = 2

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))

    @classmethod
    def at(cls, place: str, message: str, value: Any = None, allowed: str | None = None) -> Self:
        """The error of a single fault."""
        return cls(Fault(place, message, value, allowed))


class TrainingStoppedError(UserError):
    """Training ended itself: a loss or gradient that is not finite."""

    exit_code = 4


class StoreError(UserError):
    """The store could not be read or written: disk full, read-only, unreachable."""

    exit_code = 74


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None when none is like it."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing."""
    match = nearest(word, known)
    return f" Did you mean {match!r}?" if match else ""
