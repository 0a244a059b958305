"""Runs that another trainer logged to MLflow: of a server, a database or a folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import Fault, StoreError, UserError, did_you_mean
from workbench.importing.draft import Draft
from workbench.importing.foreign import ForeignRun, Reading, pick, unique_names
from workbench.importing.mapped import draft_of
from workbench.importing.mapping import MapFile
from workbench.track.feeder import short_reason
from workbench.track.mlflow_fields import RUN_ID_TAG
from workbench.track.mlflow_store import open_client
from workbench.track.provenance import redact
from workbench.track.record import Status

_STATUSES: dict[str, Status] = {"FINISHED": "FINISHED", "FAILED": "FAILED", "KILLED": "KILLED"}
_PAGE = 1000


def read_mlflow(
    experiment: str,
    uri: str,
    mapping: Path,
    chosen: list[str] | None = None,
    name: str | None = None,
) -> list[Draft]:
    """What is known of the runs of an experiment.

    Args:
        experiment: its name or id.
        uri: where MLflow is: a server, a database, or a folder.
        mapping: the mapping file.
        chosen: only the runs of these names or ids.
        name: what to call the run, where there is one.

    Raises:
        UserError: there is no such experiment or run, one is still going, or the mapping file does
            not fit; with every fault found.
        StoreError: MLflow cannot be reached.
    """
    file = MapFile(mapping)
    place = redact(uri)
    try:
        client = open_client(_address(uri))
        found = _experiment(client, experiment, place)
        every = list(_runs(client, found.experiment_id))
        runs, notes = _foreign(every, f"experiment {found.name}", chosen)
        picked = pick(list(runs), f"experiment {found.name}", _names(chosen, runs), name)
        faults: list[Fault] = []
        drafts = []
        for key in picked:
            run = _read(client, runs[key], file, f"{found.name} at {place}")
            try:
                drafts.append(draft_of(run, file, "mlflow", name))
                drafts[-1].notes += notes
            except UserError as error:
                faults += [fault for fault in error.faults if fault not in faults]
    except UserError:
        raise
    except Exception as error:
        message = f"MLflow cannot be read there: {short_reason(error)}"
        raise StoreError.at(place, message) from error
    if faults:
        raise UserError(*faults)
    return list(unique_names(drafts).values())


def _address(uri: str) -> str:
    """The address as MLflow takes it; what is not there is not made.

    Raises:
        UserError: there is no such database or folder.
    """
    scheme, _, rest = uri.partition(":")
    if scheme == "sqlite":
        path = Path(rest.removeprefix("///").partition("?")[0])
        if not path.is_file():
            raise UserError.at("--uri", "there is no such database", redact(uri))
    elif scheme == "file" or "://" not in uri:
        path = Path(uri.removeprefix("file://").removeprefix("file:"))
        if not any(path.glob("*/meta.yaml")):  # MLflow would make a store of any other folder
            allowed = "http://HOST:PORT, sqlite:///FILE, postgresql://..., or a folder of MLflow's"
            raise UserError.at("--uri", "there are no experiments there", redact(uri), allowed)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it is on its way out there
        return path.resolve().as_uri()
    return uri


def _experiment(client: Any, given: str, place: str) -> Any:
    found = client.get_experiment_by_name(given)
    if found is None and given.isdigit():
        known = {one.experiment_id: one for one in client.search_experiments()}
        found = known.get(given)
    if found is None:
        names = [one.name for one in client.search_experiments()]
        hint = did_you_mean(given, names)
        message = f"there is no such experiment at {place}.{hint}".rstrip(".")
        raise UserError.at("experiment", message, given, ", ".join(names[:40]))
    return found


def _runs(client: Any, experiment_id: str) -> Iterator[Any]:
    """Every run that was not deleted, the oldest first."""
    token = None
    while True:
        page = client.search_runs(
            [experiment_id], max_results=_PAGE, order_by=["attributes.start_time"], page_token=token
        )
        yield from page
        token = page.token
        if not token:
            return


def _foreign(
    every: list[Any], place: str, chosen: list[str] | None
) -> tuple[dict[str, Any], list[str]]:
    """The runs that can be imported by name (a name that several have: with the id), and what was
    passed over.

    Raises:
        UserError: there is none, or one that was asked for cannot be imported.
    """
    names = [run.info.run_name or run.info.run_id for run in every]
    found, own, going = {}, [], []
    for run, name in zip(every, names, strict=True):
        unique = name if names.count(name) == 1 else f"{name}-{run.info.run_id[:8]}"
        asked = bool({name, unique, run.info.run_id} & set(chosen or []))
        if RUN_ID_TAG in run.data.tags:
            own.append(name)
            reason = "this package made this run: wb list shows it"
        elif run.info.status not in _STATUSES:
            going.append(name)
            reason = f"this run is {run.info.status} there"
        else:
            found[unique] = run
            continue
        if asked:
            raise UserError.at("--run", reason, name, "a run of another trainer that has ended")
    notes = [f"passed over, {w}: {', '.join(n)}" for n, w in ((going, "still going"),) if n]
    if not found:
        why = f"; of this package: {len(own)}, still going: {len(going)}" if own or going else ""
        raise UserError.at(place, f"there is no run in it that could be imported{why}")
    return found, notes


def _names(chosen: list[str] | None, runs: dict[str, Any]) -> list[str] | None:
    """What was chosen, by the names used here; an unknown one stays as it is."""
    by_id = {run.info.run_id: name for name, run in runs.items()}
    wanted: list[str] = []
    for one in chosen or []:
        alike = [name for name, run in runs.items() if run.info.run_name == one]
        wanted += [by_id[one]] if one in by_id else alike or [one]
    return wanted or None


def _read(client: Any, run: Any, file: MapFile, place: str) -> ForeignRun:
    """A run with the series that the mapping file names."""
    info, data = run.info, run.data
    tags = {key: value for key, value in data.tags.items() if not key.startswith("mlflow.log-")}
    wanted = [number.metric for _, _, number in file.numbers() if number.metric]
    wanted += [file.map.tokens.metric] if file.map.tokens and file.map.tokens.metric else []
    histories = {
        name: client.get_metric_history(info.run_id, name)
        for name in wanted
        if name in data.metrics
    }
    label = info.run_name or info.run_id
    document = {
        "run_id": info.run_id,
        "experiment_id": info.experiment_id,
        "run_name": info.run_name,
        "status": info.status,
        "start_time": info.start_time,
        "end_time": info.end_time,
        "params": data.params,
        "tags": {key: redact(value) for key, value in tags.items()},
        "metrics": {
            name: [[one.step, repr(one.value), one.timestamp] for one in history]
            for name, history in histories.items()
        },
    }
    text = json.dumps(document, indent=1, sort_keys=True)
    return ForeignRun(
        name=label,
        identity=f"mlflow:{info.run_id}",
        place=place,
        status=_STATUSES[info.status],
        started=_moment(info.start_time),
        ended=_moment(info.end_time),
        names={"param": sorted(data.params), "tag": sorted(tags), "metric": sorted(data.metrics)},
        texts={"param": dict(data.params), "tag": tags},
        series={
            name: _series(history, file, f"{place}: run {label}: {name}")
            for name, history in histories.items()
        },
        originals={"run.json": text.encode()},
    )


def _series(history: list[Any], file: MapFile, place: str) -> list[Reading]:
    """By step; where a later one of a step stands, in the order in which they were logged."""
    by_time = file.map.repeated_steps == "last"
    ordered = sorted(history, key=lambda one: (one.timestamp if by_time else 0, one.step))
    return [Reading(one.step, _value(one.value), f"{place} at step {one.step}") for one in ordered]


def _value(value: float) -> float:
    """What was logged: a database holds the largest number in the place of an infinity."""
    return value * 2 if abs(value) == sys.float_info.max else value


def _moment(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
