"""`wb verify`, `wb sync`, `wb doctor`: runs had again, MLflow brought up, the machine looked at."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench import completion
from workbench.answers import Answer, AsJson, Debug, readable, say
from workbench.errors import StoreError, UserError


def verify(
    run: Annotated[
        str,
        typer.Argument(help="A run: name, id, or unique prefix.", autocompletion=completion.runs),
    ],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many; default: all it made.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative difference that still counts as the same.")
    ] = 1e-5,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Train a run again from its record: are the losses the same, and from which step not?

    Example: wb verify quickstart --steps 20
    """
    from workbench.process import prepare_process

    prepare_process()  # before torch is loaded
    from workbench import verify as verifying
    from workbench.track.server_runs import find_run
    from workbench.track.store import Store

    store = Store()
    entry = readable(find_run(store, run, whole=True))
    if entry.status == "RUNNING":
        raise UserError.at(entry.name, "this run is still going", None, "a run that has ended")
    assert entry.record is not None
    found = verifying.verify(entry.folder, entry.record, store, steps, tolerance, say)
    return Answer(found.to_json() if as_json else verifying.render(found), found.exit_code)


def sync(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Runs: name, id, or unique prefix. Default: all.", autocompletion=completion.runs
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Send MLflow what it does not have yet of runs that have ended, and of studies.

    Example: wb sync quickstart
    """
    from workbench.track.feeder import send_run
    from workbench.track.parents import send_study
    from workbench.track.server_runs import find_own
    from workbench.track.store import Store
    from workbench.track.trash import in_trash, tell_removed

    store = Store()
    why = "which has all that was sent"
    entries = [find_own(store, name, why) for name in runs] if runs else store.list_runs()
    done: dict[str, str] = {}
    for entry in entries:
        if entry.record is None and not runs:
            continue
        readable(entry)
        if entry.status == "RUNNING":
            done[entry.name] = "still going: its own process sends it"
        elif reason := send_run(entry.folder):
            done[entry.name] = f"not sent: {reason}"
        else:
            done[entry.name] = "complete"
    for folder in () if runs else sorted(store.studies.glob("*/plan.json")):
        reason = send_study(folder.parent)
        name = f"study {folder.parent.name}"
        done[name] = f"not sent: {reason}" if reason else "complete"
    for one in () if runs else in_trash(store):
        if one.note.owed:
            reason = tell_removed(one, store)
            name = f"{one.note.name} (in the trash)"
            done[name] = f"not sent: {reason}" if reason else "marked deleted"
    failed = [name for name, said in done.items() if said.startswith("not sent")]
    code = StoreError.exit_code if failed else 0
    if as_json:
        return Answer({"runs": done}, code)
    lines = [f"{name}  {said}" for name, said in done.items()]
    return Answer("\n".join(lines) or "no runs", code)


def doctor(as_json: AsJson = False, debug: Debug = False) -> Answer:
    """Say what this machine has, what is broken, and what will be slow and why.

    Example: wb doctor
    """
    from workbench.process import prepare_process

    prepare_process()  # before torch is loaded
    from workbench import doctor as examining
    from workbench.track.store import Store

    facts, found = examining.examine(Store())
    page = examining.document(facts, found) if as_json else examining.render(facts, found)
    return Answer(page, examining.exit_code(found))
