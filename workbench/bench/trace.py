"""The trace file of `wb bench --profile`: checked before the bench, written whole or not at all."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

from workbench.bench.process import Worker
from workbench.core.data import atomic
from workbench.errors import StoreError, UserError, reason_of

SUFFIXES = (".json", ".json.gz")


def require_place(path: Path) -> None:
    """Checks that a trace can be written under `path`, and overwrites nothing.

    Raises:
        UserError: the name is not one of a trace, or is taken.
        StoreError: the folder cannot be written.
    """
    if not path.name.endswith(SUFFIXES):
        raise UserError.at("--profile", "this is no name of a trace", str(path), "FILE.json[.gz]")
    _require_free(path)
    probe = atomic.temporary_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_trace(worker: Worker, path: Path) -> None:
    """Profiles a step of the worker's arm into `path`, compressed where its name ends in .gz.

    Raises:
        UserError: the name has been taken meanwhile.
        StoreError: the trace could not be written whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "trace.json")
        worker.call("profile", path=str(raw))
        try:
            # The profiler says nothing of a disk that filled up under it.
            data = raw.read_bytes()
            json.loads(data)
        except (OSError, ValueError) as error:
            message = "the profiler did not write its trace whole; is this disk full?"
            raise StoreError.at(str(raw), message) from error
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6)
    _require_free(path)
    try:
        atomic.write_file(path, data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _require_free(path: Path) -> None:
    if path.exists() or path.is_symlink():
        message = "this is there already, and a bench overwrites nothing"
        raise UserError.at("--profile", message, str(path), "a new name")


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError.at(str(path), f"the trace cannot be written: {reason_of(error)}")
