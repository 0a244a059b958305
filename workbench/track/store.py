"""The store: where runs, artifacts, MLflow's database and the cache lie; which runs there are.

A run directory belongs to one process at a time: it holds a lock on the file `.lock` in it, which
the kernel drops when the process dies, however it dies. A record that says RUNNING while nobody
holds the lock is therefore the record of a run that died.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from workbench.errors import UserError, did_you_mean
from workbench.errors import storing as storing
from workbench.spec.consistency import NAME
from workbench.track.file_lock import is_held, lock_within
from workbench.track.record import RunRecord, Status, read_record

FOLDER = "mlruns"
RECORD = "run_config.json"
METRICS = "metrics.csv"
SOURCE_DIFF = "source-*.diff"
_LOCK = ".lock"

# Locks held by this process: they last as long as it does, unless released.
_held: dict[Path, int] = {}


def _forget_locks_after_fork() -> None:
    """A forked child (a data-loading worker) must not keep the lock of a parent that died."""
    for handle in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks_after_fork)


@dataclass(frozen=True)
class RunEntry:
    """One run directory as the listing shows it. `record` is None where `fault` says why."""

    name: str
    folder: Path
    status: Status | None
    record: RunRecord | None
    fault: str | None = None

    @property
    def died(self) -> bool:
        """Whether the run ended without being able to say so."""
        recorded = self.record.status if self.record else None
        return recorded == "RUNNING" and self.status == "KILLED"


class Store:
    """A folder of runs. `home` is absolute, so that a change of directory does not matter."""

    def __init__(self, home: Path | str | None = None) -> None:
        self.home = (Path(home) if home is not None else default_home()).expanduser().resolve()

    @property
    def runs(self) -> Path:
        """One folder for each run."""
        return self.home / "runs"

    @property
    def studies(self) -> Path:
        """One folder for each study: its frozen plan and what happened to its runs."""
        return self.home / "studies"

    @property
    def trash(self) -> Path:
        """Runs that were removed, see `trash`."""
        return self.home / "trash"

    @property
    def artifacts(self) -> Path:
        """MLflow's artifacts."""
        return self.home / "artifacts"

    @property
    def database(self) -> Path:
        """MLflow's SQLite file."""
        return self.home / "mlflow.db"

    @property
    def cache(self) -> Path:
        """Encoded corpora and other things that can be made again."""
        return self.home / "cache"

    @property
    def reports(self) -> Path:
        """Reports of comparisons, beside the store: unlike it, some are kept in git."""
        return self.home.parent / "reports"

    @property
    def tracking_uri(self) -> str:
        """The address of this store for MLflow."""
        # The seconds that a writer waits for another one; SQLite's own default gives up early.
        return f"sqlite:///{self.database}?timeout=60"

    def path_of(self, name: str) -> Path:
        """The folder of the run called `name`, existing or not.

        Raises:
            UserError: the name could lead out of the store.
        """
        path = self.runs / name
        if not NAME.fullmatch(name) or path.parent != self.runs:
            allowed = "letters, digits, '.', '_', '-'; the first a letter or digit"
            raise UserError.at("name", "this cannot be the name of a run", name, allowed)
        return path

    def create_run(self, name: str) -> Path:
        """Claims a new run folder for this process, and locks it.

        Raises:
            UserError: the name is taken or not a name.
            StoreError: the store cannot be written.
        """
        folder = self.path_of(name)
        with storing(folder):
            self.runs.mkdir(parents=True, exist_ok=True)
            try:
                folder.mkdir()
            except FileExistsError:
                if not (folder.is_dir() and _is_unused(folder)):
                    raise _taken(folder) from None
        # Two processes may both have found an abandoned, empty folder: the lock decides.
        if not lock_run(folder):
            raise _taken(folder)
        if not _is_unused(folder):
            release_run(folder)
            raise _taken(folder)
        with storing(folder):
            _clear(folder)
        return folder

    def discard_run(self, folder: Path) -> None:
        """Removes a claimed folder whose run never began, that is, that has no record."""
        assert folder.parent == self.runs, "only folders of this store are removed"
        if not (folder / RECORD).exists():
            shutil.rmtree(folder, ignore_errors=True)
        release_run(folder)

    def list_runs(self) -> list[RunEntry]:
        """Every run folder, the newest first; damaged ones with their fault, at the end."""
        with storing(self.runs):
            if not self.runs.is_dir():
                return []
            folders = [path for path in self.runs.iterdir() if path.is_dir()]
        entries = [read_entry(folder) for folder in sorted(folders)]
        return sorted(entries, key=lambda one: (one.record and one.record.started) or "")[::-1]

    def find_run(self, text: str, entries: Sequence[RunEntry] | None = None) -> RunEntry:
        """The run with this name or id, or the only one whose name or id begins with it.

        Args:
            entries: those of `list_runs`, where they were read already.

        Raises:
            UserError: no run is meant, or more than one.
        """
        entries = self.list_runs() if entries is None else entries
        exact = [e for e in entries if text in (e.name, e.record and e.record.id)]
        matches = exact or [
            entry
            for entry in entries
            if text and (entry.name.startswith(text) or _id_of(entry).startswith(text))
        ]
        if len(matches) == 1:
            return matches[0]
        if matches:
            candidates = ", ".join(sorted(f"{e.name} ({_id_of(e)[:8]})" for e in matches))
            raise UserError.at("run", "more than one run is meant", text, candidates)
        hint = did_you_mean(text, [entry.name for entry in entries])
        message = f"there is no such run in {self.runs}.{hint}".rstrip(".")
        raise UserError.at("run", message, text, "a name, an id, or the beginning of one")


def default_home() -> Path:
    """WB_HOME, else `mlruns` of the nearest parent folder that has one, else `./mlruns`."""
    given = os.environ.get("WB_HOME")
    if given:
        return Path(given)
    with storing(Path()):  # a working directory that was removed
        here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / FOLDER).is_dir():
            return folder / FOLDER
    return here / FOLDER


def read_entry(folder: Path) -> RunEntry:
    """A run folder as the listing shows it; never an error."""
    try:
        record = read_record(folder)
    except (UserError, RecursionError, TypeError, ValueError) as error:
        fault = error.faults[0].message if isinstance(error, UserError) else str(error)
        if not (folder / RECORD).exists():
            fault = "it is starting" if is_locked(folder) else "it ended before it had a record"
        return RunEntry(folder.name, folder, None, None, fault)
    return RunEntry(folder.name, folder, effective_status(folder, record), record)


def effective_status(folder: Path, record: RunRecord | None = None) -> Status:
    """The recorded status; KILLED where the record says RUNNING and no process holds the run.

    Raises:
        UserError: there is no readable record.
    """
    record = record or read_record(folder)
    if record.status != "RUNNING" or is_locked(folder):
        return record.status
    # It may have ended between the reading of the record and that of the lock.
    record = read_record(folder)
    return "KILLED" if record.status == "RUNNING" else record.status


def lock_run(folder: Path) -> bool:
    """Takes the lock of a run folder for the life of this process; False: another has it.

    Raises:
        StoreError: the lock file cannot be written.
    """
    folder = folder.resolve()
    if folder in _held:
        return False
    with storing(folder / _LOCK):
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not lock_within(handle, seconds=0.5):
                os.close(handle)
                return False
        except OSError:
            os.close(handle)
            raise
    _held[folder] = handle
    return True


def release_run(folder: Path) -> None:
    """Gives up the lock of a run folder, where this process has it."""
    handle = _held.pop(folder.resolve(), None)
    if handle is not None:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether a living process holds this run folder."""
    return folder.resolve() in _held or is_held(folder / _LOCK)


def _id_of(entry: RunEntry) -> str:
    return entry.record.id if entry.record else ""


def _is_unused(folder: Path) -> bool:
    """Whether a run was claimed and ended before it began: nothing lies there but what is written
    before the record, a journal without a row among it."""
    return not any(map(_is_worth_keeping, folder.iterdir()))


def _is_worth_keeping(path: Path) -> bool:
    if path.name == METRICS:
        with path.open("rb") as file:
            return file.read().count(b"\n") > 1
    return not (path.name.startswith(".") or fnmatch(path.name, SOURCE_DIFF))


def _clear(folder: Path) -> None:
    """Removes what an unused folder holds, but for its lock."""
    for path in folder.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _taken(folder: Path) -> UserError:
    entry = read_entry(folder)
    state = f"its status is {entry.status}" if entry.status else entry.fault
    message = f"a run of this name exists ({state}) in {folder}; it is never overwritten"
    allowed = f"name=... with another name, such as {_free_name(folder)}"
    return UserError.at("name", message, folder.name, allowed)


def _free_name(folder: Path) -> str:
    number = 2
    while (folder.parent / f"{folder.name}-{number}").exists():
        number += 1
    return f"{folder.name}-{number}"
