"""What a command was given: a run spec in a file, or a run of the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.answers import readable
from workbench.errors import UserError
from workbench.spec.load import load_spec
from workbench.spec.run import RunSpec
from workbench.track.server_runs import find_run, server_address

if TYPE_CHECKING:
    from workbench.compare import PlannedRun, Side
    from workbench.track.store import RunEntry, Store


def spec_or_entry(given: str, store: Store) -> RunSpec | RunEntry:
    """The spec of a file that is there or is called .yaml, else the run of that name.

    Raises:
        UserError: the spec is wrong, there is neither, or the run has no readable record.
    """
    path = Path(given)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return load_spec(path)
    try:
        return readable(find_run(store, given))
    except UserError as error:
        if server_address() or any(entry.name == given for entry in store.list_runs()):
            raise
        (fault, *_) = error.faults
        message = f"there is no such file, and {fault.message}"
        raise UserError.at(fault.place, message, given, fault.allowed) from None


def run_or_plan(given: str, store: Store) -> PlannedRun | Side:
    """What `wb check` judges: a run with its status, or a spec with what is foreseen of it.

    Raises:
        UserError: as `spec_or_entry`, or the data or tokenizer of the spec cannot be read.
    """
    from workbench.compare import PlannedRun, Side
    from workbench.foresee import foresee

    found = spec_or_entry(given, store)
    if isinstance(found, RunSpec):
        return PlannedRun(found, given, foresee(found, store))
    assert found.record
    return Side(found.record.name, found.folder, found.record, found.status or "RUNNING")
