"""Adds numbers to the record of a run that has ended; nothing that was there is changed.

One name stands for one content: a name that is used can be added again only for the same content,
which changes nothing, or at another step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.errors import UserError, storing
from workbench.spec.held_out import logged_name
from workbench.track.record import Addition, RunRecord, read_record, write_record
from workbench.track.store import RECORD, lock_run, release_run

SET_PREFIXES = ("held_out.", "contaminated.", "unproven.")
_LOCK_SECONDS = 30.0

# Writes the scores of an addition into a file, whole or not at all.
Write = Callable[[Path], None]


def plain_name(name: str) -> str:
    """The name without what tells whether the set was shown to be held out."""
    for prefix in SET_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def scores_file(name: str, step: int) -> str:
    """Where the scores of an addition are kept, below the run's folder."""
    return f"evaluations/step_{step:08d}.{name.replace('/', '.')}.parquet"


def find_addition(record: RunRecord, name: str, sha256: str, step: int) -> Addition | None:
    """What the record holds of this content at this step already; None: it may be added.

    Raises:
        UserError: the name stands for another content, or for a set of the run itself.
    """
    plain, allowed = plain_name(name), "another name; what was recorded is never changed"
    evaluated = record.effective.evaluation.items()
    for own in [logged_name(name, facts.status) for name, facts in evaluated]:
        if plain == plain_name(own):
            message = f"the run itself evaluates {own}, and its numbers are in the record"
            raise UserError.at(record.name, message, name, allowed)
    found = None
    for added in record.results.additions:
        if plain_name(added.name) != plain:
            continue
        if added.sha256 != sha256:
            message = f"this name stands for another content since {added.when}"
            raise UserError.at(record.name, message, added.name, allowed)
        if added.step == step:
            found = added
    return found


def add_to_record(folder: Path, additions: Sequence[tuple[Addition, Write]]) -> RunRecord:
    """Writes the scores, then the record with the additions in it, and returns that.

    What another process has added meanwhile stays; what it has added alike is not added again.

    Raises:
        UserError: another process has the run, or has used a name for another content.
        StoreError: the store cannot be written; the record is as it was.
    """
    _lock(folder)
    try:
        record = read_record(folder)
        new = [
            (added, write)
            for added, write in additions
            if find_addition(record, added.name, added.sha256, added.step) is None
        ]
        for added, write in new:
            if added.scores:
                write(folder / added.scores)
        if new:
            record.results.additions = [*record.results.additions, *(added for added, _ in new)]
            with storing(folder / RECORD):
                write_record(record, folder)
        return record
    finally:
        release_run(folder)


def _lock(folder: Path) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while not lock_run(folder):
        if time.monotonic() > deadline:
            message = "another process has this run: it goes on, or is being evaluated"
            raise UserError.at(str(folder), message, None, "a run that has ended")
        time.sleep(0.1)
