"""The tracker protocol: the five things that a run tells whoever follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from workbench.track.record import RunRecord

# One logged row: values by the names of the metrics; None is "not measured".
Values = Mapping[str, float | int | None]

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Says nothing."""


def never() -> bool:
    """Nobody wants the wait to end early."""
    return False


class Tracker(Protocol):
    """Follows one run. No method may raise, or wait longer than it says."""

    def start(self, record: RunRecord, folder: Path) -> None:
        """The run begins; its record lies in `folder`."""

    def log(self, values: Values) -> None:
        """One row (`step` among its values) was measured and is in `metrics.csv`."""

    def update(self, record: RunRecord) -> None:
        """The record in the folder has changed (facts became known)."""

    def finish(
        self, record: RunRecord, say: Say = silent, hurried: Callable[[], bool] = never
    ) -> str | None:
        """The run has ended, as its record says. Returns what is still pending, or None.

        `say` takes a line for the person who waits; once `hurried` says so, it waits no longer.
        """

    def close(self) -> None:
        """Lets go of everything at once, whether or not the run has finished."""


class NullTracker:
    """Follows nothing."""

    def start(self, record: RunRecord, folder: Path) -> None:
        """Does nothing."""

    def log(self, values: Values) -> None:
        """Does nothing."""

    def update(self, record: RunRecord) -> None:
        """Does nothing."""

    def finish(
        self, record: RunRecord, say: Say = silent, hurried: Callable[[], bool] = never
    ) -> str | None:
        """Nothing is ever pending."""
        return None

    def close(self) -> None:
        """Does nothing."""


class MemoryTracker:
    """Keeps what it is told: for tests and notebooks."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.records: list[RunRecord] = []
        self.rows: list[dict[str, float | int | None]] = []
        self.finished = False
        self.closed = False

    def start(self, record: RunRecord, folder: Path) -> None:
        """Keeps the folder and a copy of the record."""
        self.folder = folder
        self.records.append(record.model_copy(deep=True))

    def log(self, values: Values) -> None:
        """Keeps a copy of the row."""
        self.rows.append(dict(values))

    def update(self, record: RunRecord) -> None:
        """Keeps a copy of the record."""
        self.records.append(record.model_copy(deep=True))

    def finish(
        self, record: RunRecord, say: Say = silent, hurried: Callable[[], bool] = never
    ) -> str | None:
        """Keeps a copy of the last record."""
        self.records.append(record.model_copy(deep=True))
        self.finished = True
        return None

    def close(self) -> None:
        """Remembers that it was closed."""
        self.closed = True
