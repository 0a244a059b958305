"""Runs that were trained elsewhere, found on a tracking server: fetched, checked by hash, kept.

A fetched run lies in the store's cache as a run folder: its record at once, all else when it is
needed. What is there is checked again against the hashes on the server before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import StoreError, UserError, storing
from workbench.track.feeder import short_reason
from workbench.track.mlflow_fields import RUN_ID_TAG
from workbench.track.position import POSITION, Position
from workbench.track.provenance import redact
from workbench.track.record import RunRecord, read_record, write_json
from workbench.track.server_files import FETCHED, FILES, FILES_TAG, read_list
from workbench.track.store import RECORD, RunEntry, Store

_ID = re.compile(r"[A-Za-z0-9]{8,64}")
_PAGE = 1000


@dataclass(frozen=True)
class ServerRun:
    """A run of this package on a server: its id here and there, and the hash of its files' list."""

    id: str
    name: str
    run_id: str
    experiment_id: str
    files_sha256: str


def server_address() -> str | None:
    """The server that the environment names; None: runs are looked for in the store alone."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


class Server:
    """What a tracking server has of runs of this package that have ended."""

    def __init__(self, uri: str, store: Store) -> None:
        self.uri, self.place, self._store = uri, redact(uri), store
        self._client: Any = None

    def runs(self) -> list[ServerRun]:
        """Every run that has ended and whose files are all there, the newest first.

        Raises:
            StoreError: the server cannot be reached or does not answer as one.
        """
        try:
            experiments = [one.experiment_id for one in self._open().search_experiments()]
            return self._search(experiments) if experiments else []
        except Exception as error:
            raise self._unreachable(error) from error

    def _search(self, experiments: Sequence[str]) -> list[ServerRun]:
        query = f"tags.`{FILES_TAG}` LIKE '%'"
        found: list[ServerRun] = []
        token = None
        while True:
            page = self._open().search_runs(
                experiments, query, max_results=_PAGE, page_token=token,
                order_by=["attributes.start_time DESC"],
            )  # fmt: skip
            for run in page:
                tags, own = run.data.tags, run.data.tags.get(RUN_ID_TAG, "")
                if _ID.fullmatch(own) and run.info.status not in ("RUNNING", "SCHEDULED"):
                    where = (run.info.run_id, run.info.experiment_id, tags[FILES_TAG])
                    found.append(ServerRun(own, run.info.run_name or own, *where))
            token = page.token
            if not token:
                return found

    def entry(self, run: ServerRun, whole: bool) -> RunEntry:
        """A run as those of the store: its record, and all else that was logged where `whole`.

        Raises:
            UserError: a file is not the one whose hash was logged, or is no record of this run.
            StoreError: the server cannot be reached, or the cache not be written.
        """
        folder = self._store.cache / "server" / run.id
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        content = self._get(run, folder, FILES, run.files_sha256)
        files = read_list(content, run.files_sha256, f"{self.place}: run {run.name}")
        if RECORD not in files:
            place = f"{self.place}: run {run.name}"
            raise UserError.at(place, "there is no record among its files", None, RECORD)
        for name in files if whole else (RECORD,):
            self._get(run, folder, name, files[name])
        record = read_record(folder)
        if record.id != run.id:
            place = f"{self.place}: run {run.name}: {RECORD}"
            raise UserError.at(place, "this is the record of another run", record.id, run.id)
        self._note(run, folder, files)
        return RunEntry(record.name, folder, record.status, record)

    def _get(self, run: ServerRun, folder: Path, name: str, sha256: str) -> bytes:
        """A file of a run, from the cache where it is the same there.

        Raises:
            UserError: what the server has is another file than the one that was logged.
        """
        path = folder / name
        try:
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == sha256:
                return content
        except OSError:
            pass
        with storing(folder):
            temporary = tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-")
        with temporary as place:
            try:
                fetched = Path(self._open().download_artifacts(run.run_id, name, place))
            except Exception as error:
                raise self._unreachable(error, f": {name} of run {run.name}") from error
            with storing(path):
                content = fetched.read_bytes()
                found = hashlib.sha256(content).hexdigest()
                if found != sha256:
                    message = "this is not the file that was logged: it was changed since"
                    where = f"{self.place}: run {run.name}: {name}"
                    raise UserError.at(where, message, found, sha256)
                path.parent.mkdir(exist_ok=True)
                shutil.move(fetched, path)
        return content

    def _note(self, run: ServerRun, folder: Path, files: dict[str, str]) -> None:
        """Where the copy is from, and that MLflow has all of it: what is added, it gets there."""
        where = {"uri": self.place, "run_id": run.run_id, "experiment_id": run.experiment_id}
        path = folder / FETCHED
        try:
            if json.loads(path.read_text()) == where:
                return
        except (OSError, ValueError):
            pass
        position = Position(
            uri=self.place,
            experiment_id=run.experiment_id,
            run_id=run.run_id,
            params=True,
            artifacts=files,
        )
        with storing(folder):
            write_json(folder / POSITION, position.model_dump())
            write_json(path, where)

    def _open(self) -> Any:
        if self._client is None:
            from workbench.track.mlflow_store import open_client

            self._client = open_client(self.uri)
        return self._client

    def _unreachable(self, error: Exception, what: str = "") -> StoreError:
        message = f"the server that MLFLOW_TRACKING_URI names cannot be read{what}: "
        return StoreError.at(self.place, message + short_reason(error))


def find_run(
    store: Store, text: str, whole: bool = False, entries: Sequence[RunEntry] | None = None
) -> RunEntry:
    """The run of the store, or of the server that the environment names, with this name or id, or
    the only one whose name or id begins with it. The store is asked first.

    Args:
        whole: all that was logged of it, and not its record alone.
        entries: those of the store, where they were read already.

    Raises:
        UserError: no run is meant, or more than one, or what the server has was changed.
        StoreError: the server cannot be reached.
    """
    try:
        return store.find_run(text, entries)
    except UserError as error:
        address = server_address()
        if address is None or any(_is_meant(e.name, text) for e in store.list_runs()):
            raise
        server = Server(address, store)
        every = server.runs()
        meant = _meant(every, text)
        if not meant:
            fault = error.faults[0]
            message = f"{fault.message}, nor at {server.place}"
            raise UserError.at(fault.place, message, fault.value, fault.allowed) from None
        if len(meant) > 1:
            candidates = ", ".join(sorted(f"{run.name} ({run.id[:8]})" for run in meant))
            message = f"more than one run at {server.place} is meant"
            raise UserError.at("run", message, text, candidates) from None
        return server.entry(meant[0], whole)


def find_own(store: Store, text: str, why: str) -> RunEntry:
    """The run of the store, as `Store.find_run` has it, for what needs more than a server keeps.

    Args:
        why: what is said of a run that the server alone has, such as "its checkpoints are not".

    Raises:
        UserError: no run of the store is meant, or more than one.
    """
    try:
        return store.find_run(text)
    except UserError as error:
        address = server_address()
        if address is None or any(_is_meant(e.name, text) for e in store.list_runs()):
            raise
        server = Server(address, store)
        try:
            elsewhere = _meant(server.runs(), text)
        except StoreError:
            raise error from None
        if not elsewhere:
            raise
        message = f"this run is at {server.place}, {why}"
        allowed = f"where it was trained, or here with its folder in {store.runs}"
        raise UserError.at("run", message, text, allowed) from None


def _meant(runs: Sequence[ServerRun], text: str) -> list[ServerRun]:
    """Those of this name or id, else those whose name or id begins so."""
    exact = [run for run in runs if text in (run.name, run.id)]
    begins = [run for run in runs if run.name.startswith(text) or run.id.startswith(text)]
    return exact or (begins if text else [])


def _is_meant(name: str, text: str) -> bool:
    return bool(text) and name.startswith(text)


def other_runs(
    store: Store,
    known: Sequence[RunEntry],
    whole: Callable[[RunRecord], bool] = lambda record: False,
) -> tuple[list[RunEntry], list[str]]:
    """The runs of the server that the store does not have, and what is wrong with the rest.

    Args:
        known: the runs that the store has.
        whole: of which all that was logged is fetched, and not the record alone.

    Raises:
        StoreError: the server cannot be reached.
    """
    address = server_address()
    if address is None:
        return [], []
    have = {entry.record.id for entry in known if entry.record}
    server = Server(address, store)
    entries: list[RunEntry] = []
    faults: list[str] = []
    for run in server.runs():
        if run.id in have:
            continue
        try:
            entry = server.entry(run, whole=False)
            assert entry.record
            entries.append(server.entry(run, whole=True) if whole(entry.record) else entry)
        except UserError as error:
            faults.append(str(error))
    return entries, faults
