"""The ledger of a study: what happened to its runs, one line of JSON for each event, only appended.

A run that was deleted, renamed, or tried again leaves its trace here although its folder does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import storing
from workbench.study.plan import now

LEDGER = "ledger.jsonl"

EventKind = Literal[
    "began", "started", "ended", "missed", "renamed", "removed", "restored", "interrupted", "over"
]


class Event(BaseModel):
    """One thing that happened. `run` is None for events of the study as a whole.

    `began` and `over`: a `wb study run`; `started` and `ended`: a run's process; `missed`: a run
    was no longer in the store; `renamed`: its folder has another name; `removed` and `restored`: to
    the trash and from it; `interrupted`: by a signal.
    `job` is what has a started run in hand where that is a job of a queue.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    when: str
    kind: EventKind
    run: str | None = None
    id: str | None = None
    status: str | None = None
    exit_code: int | None = None
    detail: str = ""
    job: str | None = None


class Ledger:
    """The events of one study."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER
        self.events: list[Event] = _read(self._path)

    def add(self, kind: EventKind, run: str | None = None, **facts: Any) -> None:
        """Appends an event and syncs it.

        Raises:
            StoreError: the store cannot be written.
        """
        event = Event(when=now(), kind=kind, run=run, **facts)
        line = json.dumps(event.model_dump(mode="json", exclude_none=True)) + "\n"
        with storing(self._path):
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                # A line that a kill cut short must not swallow this one.
                if os.fstat(handle).st_size and not _ends_with_newline(self._path):
                    line = "\n" + line
                os.write(handle, line.encode())
                os.fsync(handle)
            finally:
                os.close(handle)
        self.events.append(event)

    def of(self, run: str) -> list[Event]:
        """The events of one planned run."""
        return [event for event in self.events if event.run == run]

    def ids(self, run: str) -> list[str]:
        """The ids that this planned run has had, the newest last."""
        return list(dict.fromkeys(event.id for event in self.of(run) if event.id))


def job_of(events: Iterable[Event]) -> str | None:
    """The job that a run was given to and of which nobody has seen the end; None: there is none."""
    for event in reversed(list(events)):
        if event.kind in ("started", "ended"):
            return event.job if event.kind == "started" else None
    return None


def exit_code_of(events: Iterable[Event]) -> int | None:
    """How the last process of a run ended; None: it has not, or nobody saw it."""
    for event in reversed(list(events)):
        if event.kind == "ended":
            return event.exit_code
        if event.kind == "started":
            return None
    return None


def _read(path: Path) -> list[Event]:
    """The events of a file; a line that a kill cut short is passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            events.append(Event.model_validate_json(line))
        except ValidationError:
            continue
    return events


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
