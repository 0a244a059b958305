"""Brings MLflow up to the state of a run folder: the only module that imports MLflow.

The folder is the truth and MLflow is fed from it. `Feed.push` may be called at any time, from any
process, as often as one likes: what has been sent is noted in `mlflow.json` beside the metrics,
and where that note may be wrong (a new process, an error half way) the server is asked first.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import storing
from workbench.track import mlflow_fields as fields
from workbench.track import mlflow_models as models
from workbench.track import moved_store, parents
from workbench.track.comparisons import comparison_tags, notes_of, report_files
from workbench.track.description import NOTE_TAG, OWN_NOTE_TAG, description, is_ours, with_digest
from workbench.track.feeder import MlflowTracker, tracking_address
from workbench.track.file_lock import exclusive
from workbench.track.journal import Row, Tail
from workbench.track.mlflow_experiment import find_or_create
from workbench.track.position import POSITION, Position, read_position
from workbench.track.provenance import redact
from workbench.track.record import RunRecord, read_record, write_json
from workbench.track.server_files import is_fetched, send_list
from workbench.track.store import METRICS, RECORD, Store, effective_status

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_LOCK = ".mlflow.lock"
_ASIDE = ".mlflow-new-"
_METRICS_PER_CALL = 1000
_FIELDS_PER_CALL = 100
HEARTBEAT_SECONDS = 60.0
HEARTBEAT_TAG = "workbench.heartbeat"

# Beside the record and the metrics, these files of a run folder are sent when it has ended.
_ARTIFACTS = ("*.parquet", "*/*.parquet", "*.diff")


@dataclass(frozen=True)
class Target:
    """One experiment on one server or database."""

    client: MlflowClient
    experiment_id: str
    uri: str  # without credentials


def connect(uri: str | None, store: Store, experiment: str) -> Target:
    """Opens the server or, where `uri` is None, the store's own database, made where missing.

    Raises:
        mlflow.exceptions.MlflowException and others: it cannot be reached or used.
        StoreError: the store cannot be written.
    """
    _before_import()
    from mlflow.tracking import MlflowClient

    address = tracking_address(uri, store)
    if _is_database(address):
        import mlflow.store.db.utils as databases

        # It would try for 100 s before it says that a database is away; who calls us tries again.
        databases.MAX_RETRY_COUNT = 1
    with store_database(store) if address == store.tracking_uri else contextlib.nullcontext():
        client = MlflowClient(address)
        # A server knows where its artifacts go. A database's default is a folder relative to the
        # directory that happens to be the current one.
        location = store.artifacts.as_uri() if _is_database(address) else None
        return Target(client, find_or_create(client, experiment, location), redact(address))


def open_client(address: str) -> MlflowClient:
    """A client that reads what is at an address; nothing is made there.

    Raises:
        mlflow.exceptions.MlflowException and others: it cannot be used.
    """
    _before_import()
    from mlflow.tracking import MlflowClient

    return MlflowClient(address)


def _is_database(address: str) -> bool:
    """Whether MLflow writes there by itself, in place of asking a server to."""
    return address.split(":")[0].split("+")[0] in ("sqlite", "postgresql", "mysql")


def _before_import() -> None:
    """MLflow reads these when it is imported."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    # Else it prints a line for people on standard output, where answers of programs belong.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    for name, value in (("REQUEST_TIMEOUT", "10"), ("REQUEST_MAX_RETRIES", "1")):
        os.environ.setdefault(f"MLFLOW_HTTP_{name}", value)


@contextlib.contextmanager
def store_database(store: Store) -> Iterator[None]:
    """The store's database exists; while this lasts no other process sets anything up in it.

    Raises:
        mlflow.exceptions.MlflowException and others: it cannot be created.
        StoreError: the store cannot be written.
        TimeoutError: another process kept the lock for a minute.
    """
    with storing(store.home):
        store.artifacts.mkdir(parents=True, exist_ok=True)
    with exclusive(store.home / _LOCK):
        with storing(store.database):
            exists = store.database.exists() and store.database.stat().st_size > 0
        if exists:
            moved_store.follow(store)
        else:
            _create_database(store)
        yield


def _create_database(store: Store) -> None:
    """Builds the database aside and gives it its name when it is whole.

    MLflow builds it in many transactions and refuses one that holds only some of its tables: a
    full disk or a kill on the way would leave a store that never works again.
    """
    _before_import()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with storing(store.home):
        for leftover in store.home.glob(f"{_ASIDE}*"):  # we hold the lock: its maker is dead
            shutil.rmtree(leftover, ignore_errors=True)
        folder = tempfile.TemporaryDirectory(dir=store.home, prefix=_ASIDE)
    with folder as name:
        new = Path(name, store.database.name)
        address = f"sqlite:///{new}"
        try:
            SqlAlchemyStore(address, store.artifacts.as_uri())  # type: ignore[no-untyped-call]
        finally:
            # It keeps its connections by address, and with them the room of a file removed.
            engines = getattr(SqlAlchemyStore, "_engine_map", {})
            if engine := engines.pop(address, None):
                engine.dispose()
        with storing(store.database):
            handle = os.open(new, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            new.replace(store.database)


class Feed:
    """Feeds one run to one target. Use it from one thread."""

    def __init__(self, folder: Path, target: Target) -> None:
        self._folder = folder
        self._target = target
        self._tail = Tail(folder / METRICS)
        self._position: Position | None = None
        self._asked = False  # whether the server said what it has, since the last error
        self._waiting: list[Row] = []
        self._parent: str | None = None
        self._beat = -math.inf  # when the server last heard that the run is alive

    def push(self) -> Position:
        """Sends what is missing. Returns the position then reached; an ended run is complete.

        Raises:
            mlflow.exceptions.MlflowException and others: the server did not take it; call again.
            UserError: the record or the metrics of the run cannot be read.
            TimeoutError: another process is feeding the same run.
        """
        with exclusive(self._folder / _LOCK):
            try:
                return self._push()
            except BaseException:
                self._asked = False
                raise

    def _push(self) -> Position:
        record = read_record(self._folder)
        status = effective_status(self._folder, record)
        position = self._position = self._locate(record)
        if not self._asked and not self._ask(position, status):
            position = self._position = self._locate(record)
            self._ask(position, status)
        if not position.params:
            self._send_params(position, record)
            position.params = True
            self._note(position)
        self._send_datasets(position, record)
        self._send_rows(position, record)
        self._send_additions(position, record)
        odd = fields.renamed([*self._tail.names, *fields.added_names(record)])
        odd |= fields.renamed_sets(record)
        tags = fields.tags_of(record, status, odd) | self._parent_tag(record)
        compared = notes_of(self._folder)
        tags |= fields.tag_values(comparison_tags(compared))
        note = redact(description(record, status, compared))
        self._send_tags(position, tags | with_digest(note))
        if status == "RUNNING":
            self._beat_heart(position)
        try:
            self._send_artifacts(position, record, ended=status != "RUNNING")
            self._send_model(position, record)
        finally:
            # Artifacts that find no room must not leave a run that has ended as a running one.
            if status not in ("RUNNING", position.status):
                ended = fields.milliseconds(record.ended) or self._last_moment(record)
                ended = max(ended, fields.milliseconds(record.started) or 0)
                # MLflow has no word for an end of which an imported run's source says nothing.
                theirs = "KILLED" if status == "UNKNOWN" else status
                self._target.client.set_terminated(position.run_id, theirs, ended)
                position.status = status
                self._note(position)
        return position

    def _locate(self, record: RunRecord) -> Position:
        """The MLflow run of this run: as noted, else as the server knows it, else a new one."""
        known = self._position or read_position(self._folder)
        target = self._target
        if known and (known.uri, known.experiment_id) == (target.uri, target.experiment_id):
            return known
        # A process may have died between creating the run and noting so.
        query = f"tags.`{fields.RUN_ID_TAG}` = '{record.id.replace(chr(39), '')}'"
        found = target.client.search_runs([target.experiment_id], query, max_results=1)
        if found:
            run_id = found[0].info.run_id
        else:
            run = target.client.create_run(
                target.experiment_id,
                start_time=fields.milliseconds(record.started),
                tags={fields.RUN_ID_TAG: record.id},
                run_name=record.name,
            )
            run_id = run.info.run_id
        position = Position(uri=target.uri, experiment_id=target.experiment_id, run_id=run_id)
        self._note(position)
        return position

    def _ask(self, position: Position, status: str) -> bool:
        """Asks the server how far it is, and opens its run again where ours goes on.

        False: it does not know the run that was noted (its database was removed).
        """
        from mlflow.exceptions import MlflowException

        client, run_id = self._target.client, position.run_id
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._position = None
            (self._folder / POSITION).unlink(missing_ok=True)
            return False
        history = client.get_metric_history(run_id, fields.ANCHOR)
        position.last_step = max((point.step for point in history), default=-1)
        if status == "RUNNING":
            if run.info.status != "RUNNING":
                client.update_run(run_id, "RUNNING")
            position.status = None
        self._tail, self._waiting = Tail(self._folder / METRICS), []
        self._asked = True
        return True

    def _send_params(self, position: Position, record: RunRecord) -> None:
        """Those that are not there: they are written once; cut shorter where that is needed."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        client, run_id = self._target.client, position.run_id
        for limit in fields.PARAM_LIMITS:
            there = client.get_run(run_id).data.params
            params = fields.params_of(record, limit).items()
            missing = [Param(key, value) for key, value in params if key not in there]
            try:
                for start in range(0, len(missing), _FIELDS_PER_CALL):
                    batch = missing[start : start + _FIELDS_PER_CALL]
                    client.log_batch(run_id, params=batch, synchronous=True)
                return
            except MlflowException as error:
                if (
                    limit == fields.PARAM_LIMITS[-1]
                    or error.error_code != "INVALID_PARAMETER_VALUE"
                ):
                    raise

    def _send_tags(self, position: Position, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        digest = hashlib.sha256(repr(sorted(tags.items())).encode()).hexdigest()
        if position.tags_sha256 == digest:
            return
        if not is_ours(self._target.client.get_run(position.run_id).data.tags):
            tags = {key: tags[key] for key in tags if key not in (NOTE_TAG, OWN_NOTE_TAG)}
        every = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, len(every), _FIELDS_PER_CALL):
            batch = every[start : start + _FIELDS_PER_CALL]
            self._target.client.log_batch(position.run_id, tags=batch, synchronous=True)
        position.tags_sha256 = digest
        self._note(position)

    def _parent_tag(self, record: RunRecord) -> dict[str, str]:
        """The run's place under its study; nothing, where no study planned it."""
        folder = parents.folder_of_study(record, self._folder)
        if folder is None:
            return {}
        if self._parent is None:
            with exclusive(folder / _LOCK):
                client, experiment = self._target.client, self._target.experiment_id
                self._parent = parents.find_or_create(client, experiment, folder)
        return {parents.PARENT_TAG: self._parent}

    def _beat_heart(self, position: Position) -> None:
        """Tells the server that the run is alive: one that says RUNNING and has not been heard of
        for minutes has died with its machine."""
        now = time.monotonic()
        if now - self._beat >= HEARTBEAT_SECONDS:
            moment = datetime.now(UTC).isoformat(timespec="seconds")
            self._target.client.set_tag(position.run_id, HEARTBEAT_TAG, moment)
            self._beat = now

    def _send_datasets(self, position: Position, record: RunRecord) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs, sent = [], []
        for one in fields.datasets_of(record):
            if (mark := f"{one.name}:{one.digest}") not in position.datasets:
                dataset = Dataset(one.name, one.digest, "local", one.source, profile=one.profile)
                tags = [InputTag("mlflow.data.context", one.context)]
                inputs.append(DatasetInput(dataset, tags))
                sent.append(mark)
        if inputs:
            self._target.client.log_inputs(position.run_id, inputs)
            position.datasets += sent
            self._note(position)

    def _send_rows(self, position: Position, record: RunRecord) -> None:
        """Whole rows in each call, so that a step is there with all its metrics or not at all."""
        while True:
            self._waiting = self._waiting or self._tail.rows()
            if not self._waiting:
                return
            self._waiting = [r for r in self._waiting if (r["step"] or 0) > position.last_step]
            while self._waiting:
                self._send_some_rows(position, record)

    def _send_some_rows(self, position: Position, record: RunRecord) -> None:
        from mlflow.entities import Metric

        metrics: list[Metric] = []
        count, step = 0, position.last_step
        for row in self._waiting:
            values = fields.metrics_of(row)
            if metrics and len(metrics) + len(values) > _METRICS_PER_CALL:
                break
            step, moment = int(row["step"] or 0), fields.row_milliseconds(row, record)
            metrics += [Metric(key, value, moment, step) for key, value in values.items()]
            count += 1
        self._target.client.log_batch(position.run_id, metrics=metrics, synchronous=True)
        position.last_step = step
        del self._waiting[:count]
        self._note(position)

    def _send_additions(self, position: Position, record: RunRecord) -> None:
        from mlflow.entities import Metric

        for one in fields.additions_of(record):
            if one.mark not in position.additions:
                metrics = [Metric(k, v, one.moment, one.step) for k, v in one.metrics.items()]
                self._target.client.log_batch(position.run_id, metrics=metrics, synchronous=True)
                position.additions.append(one.mark)
                self._note(position)

    def _send_artifacts(self, position: Position, record: RunRecord, ended: bool) -> None:
        """The resolved spec at once; the files of the run when it has ended."""
        client, run_id = self._target.client, position.run_id
        if fields.SPEC_FILE not in position.artifacts:
            text = fields.spec_yaml(record)
            client.log_text(run_id, text, fields.SPEC_FILE)
            position.artifacts[fields.SPEC_FILE] = hashlib.sha256(text.encode()).hexdigest()
            self._note(position)
        own = self._artifacts() if ended else []
        for path, name in [*own, *report_files(self._folder)] if ended else ():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            if position.artifacts.get(name) != content:
                client.log_artifact(run_id, str(path), name.rpartition("/")[0] or None)
                position.artifacts[name] = content
                self._note(position)
        if own and not is_fetched(self._folder):
            hashes = {name: position.artifacts[name] for _, name in own}
            position.files_sha256 = send_list(client, run_id, hashes, position.files_sha256)
            self._note(position)

    def _send_model(self, position: Position, record: RunRecord) -> None:
        """The model of a run that has finished, by reference to its checkpoint."""
        import mlflow.entities as entities

        client, folder = self._target.client, self._folder
        where = (position.experiment_id, position.run_id)
        if made := models.send(client, entities, *where, folder, record, position.models):
            position.models[made[0]] = made[1]
            self._note(position)

    def _artifacts(self) -> list[tuple[Path, str]]:
        """The files of the run; names as in MLflow."""
        paths = [self._folder / RECORD, self._folder / METRICS]
        for pattern in _ARTIFACTS:
            paths += sorted(self._folder.glob(pattern))
        return [(p, p.relative_to(self._folder).as_posix()) for p in paths if p.is_file()]

    def _last_moment(self, record: RunRecord) -> int:
        """When a run that died was last seen: when its metrics last changed."""
        metrics = self._folder / METRICS
        if metrics.exists():
            return round(metrics.stat().st_mtime * 1000)
        return fields.milliseconds(record.started) or 0

    def _note(self, position: Position) -> None:
        write_json(self._folder / POSITION, position.model_dump())


__all__ = ["POSITION", "Feed", "MlflowTracker", "Position", "Target", "connect", "read_position"]
