"""The trash of the store: runs that were removed, whole, until it is emptied.

A run's folder is renamed into `trash/`, its record and checkpoints untouched, so that it can be
restored at any time. MLflow's run is marked deleted, which MLflow can take back, too. What a server
that is down could not be told is owed, and `wb sync` tells it later.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import Fault, RefusedError, UserError, storing
from workbench.spec.consistency import NAME
from workbench.track.feeder import short_reason, tracking_address
from workbench.track.position import read_position
from workbench.track.provenance import redact
from workbench.track.record import write_json
from workbench.track.store import RunEntry, Store, lock_run, read_entry, release_run

NOTE = ".trash.json"
"""Beside the record of a removed run: what it was called, when it was removed, what MLflow owes."""


class TrashNote(BaseModel):
    """What is known of a removed run beside its own files. `owed`: MLflow has not been told."""

    model_config = ConfigDict(extra="ignore")

    name: str
    removed: str
    owed: bool = False


@dataclass(frozen=True)
class Trashed:
    """A removed run."""

    folder: Path
    note: TrashNote
    id: str

    def to_json(self) -> dict[str, Any]:
        """As the commands print it."""
        return {
            "run": self.note.name,
            "id": self.id or None,
            "removed": self.note.removed,
            "bytes": size_of(self.folder),
            "folder": str(self.folder),
        }


def require_removable(entries: list[RunEntry]) -> None:
    """Does nothing where none of the runs goes on.

    Raises:
        RefusedError: with every one that does.
    """
    faults = [
        Fault(str(entry.folder), "this run is still going", entry.name, "a run that has ended")
        for entry in entries
        if entry.status == "RUNNING"
    ]
    if faults:
        raise RefusedError(*faults)


def remove(entry: RunEntry, store: Store) -> Trashed:
    """Moves a run into the trash; MLflow is not told here.

    Raises:
        RefusedError: it goes on: another process has its lock.
        StoreError: the store cannot be written.
    """
    if not lock_run(entry.folder):
        require_removable([entry])
        message = "this run is still going"
        raise RefusedError(Fault(str(entry.folder), message, entry.name, "a run that has ended"))
    try:
        entry = read_entry(entry.folder)  # it may have ended a moment ago
        run_id = entry.record.id if entry.record else ""
        now = datetime.now(UTC)
        owed = read_position(entry.folder) is not None
        note = TrashNote(name=entry.name, removed=now.isoformat(timespec="seconds"), owed=owed)
        target = store.trash / f"{entry.name}--{run_id[:8] or now.strftime('%Y%m%d%H%M%S%f')}"
        while target.exists():  # the same run was removed, and brought back by other means
            target = target.with_name(f"{target.name}x")
        with storing(store.trash):
            store.trash.mkdir(parents=True, exist_ok=True)
        write_json(entry.folder / NOTE, note.model_dump())
        with storing(target):
            entry.folder.rename(target)
    finally:
        release_run(entry.folder)
    return Trashed(target, note, run_id)


def in_trash(store: Store) -> list[Trashed]:
    """Every removed run, the newest first."""
    with storing(store.trash):
        if not store.trash.is_dir():
            return []
        folders = [path for path in store.trash.iterdir() if path.is_dir()]
    found = [_trashed(folder) for folder in sorted(folders)]
    return sorted(found, key=lambda one: one.note.removed)[::-1]


def find(text: str, store: Store) -> Trashed:
    """The removed run with this name or id, or the only one whose name or id begins with it.

    Raises:
        UserError: none is meant, or more than one.
    """
    every = in_trash(store)
    exact = [one for one in every if text in (one.note.name, one.id, one.folder.name)]
    matches = exact or [
        one
        for one in every
        if text and (one.folder.name.startswith(text) or one.id.startswith(text))
    ]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(one.folder.name for one in matches or every) or "nothing: it is empty"
    message = "more than one removed run is meant" if matches else "no such run is in the trash"
    raise UserError.at("run", message, text, known)


def restore(one: Trashed, store: Store) -> Path:
    """Brings a run back under its name; MLflow is not told here.

    Raises:
        UserError: a run of this name exists.
        StoreError: the store cannot be written.
    """
    target = store.path_of(one.note.name)
    if target.exists():
        message = "a run of this name exists by now; it is never overwritten"
        raise UserError.at(str(target), message, one.note.name, "that one removed first")
    with storing(target):
        store.runs.mkdir(parents=True, exist_ok=True)
        one.folder.rename(target)
        (target / NOTE).unlink(missing_ok=True)
    return target


def delete(one: Trashed) -> None:
    """Deletes a removed run for good.

    Raises:
        StoreError: its files cannot be deleted.
    """
    with storing(one.folder):
        if one.folder.is_symlink():
            one.folder.unlink()
        else:
            shutil.rmtree(one.folder)


def tell_mlflow(folder: Path, store: Store, *, deleted: bool) -> str | None:
    """Marks the MLflow run of a run's folder deleted, or takes that back; returns why it could not.

    One that MLflow does not know (any more) needs nothing.
    """
    position = read_position(folder)
    if position is None:
        return None
    record = read_entry(folder).record
    tracking = record.spec.get("tracking", {}) if record else {}
    # A recorded address lacks its credentials, so that of the environment goes first.
    uri = os.environ.get("MLFLOW_TRACKING_URI") or tracking.get("uri")
    address = tracking_address(uri, store)
    if redact(address) != position.uri:
        return f"it is at {position.uri}, and MLFLOW_TRACKING_URI does not name that"
    if address == store.tracking_uri and not store.database.exists():
        return None
    from workbench.track.mlflow_store import open_client

    try:
        client = open_client(address)
        active = client.get_run(position.run_id).info.lifecycle_stage == "active"
        if deleted and active:
            client.delete_run(position.run_id)
        elif not deleted and not active:
            client.restore_run(position.run_id)
    except Exception as error:
        if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
            return None
        return f"MLflow at {position.uri} could not be told: {short_reason(error)}"
    return None


def tell_removed(one: Trashed, store: Store) -> str | None:
    """Tells MLflow that a run was removed, and notes whether it knows; returns why it does not."""
    reason = tell_mlflow(one.folder, store, deleted=True)
    note = one.note.model_copy(update={"owed": reason is not None})
    if note != one.note:
        write_json(one.folder / NOTE, note.model_dump())
    return reason


def size_of(folder: Path) -> int:
    """The bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except OSError:
            continue  # gone meanwhile
    return total


def _trashed(folder: Path) -> Trashed:
    entry = read_entry(folder)
    run_id = entry.record.id if entry.record else ""
    try:
        note = TrashNote.model_validate_json((folder / NOTE).read_bytes())
        if not NAME.fullmatch(note.name):
            raise ValueError(note.name)
    except (OSError, ValidationError, ValueError):
        note = TrashNote(name=folder.name.rpartition("--")[0] or folder.name, removed="")
    return Trashed(folder, note, run_id)
