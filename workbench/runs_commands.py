"""The commands of `wb runs`: removing runs to a trash, bringing them back, emptying it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import completion
from workbench.answers import Answer, AsJson, Debug, say
from workbench.errors import Fault, RefusedError

if TYPE_CHECKING:
    from workbench.study.ledger import EventKind
    from workbench.study.plan import FrozenPlan
    from workbench.track.store import RunEntry, Store
    from workbench.track.trash import Trashed

app = typer.Typer(
    name="runs",
    help="Removes runs to a trash, from which they can be brought back.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Removed = Annotated[list[str], typer.Argument(help="Removed runs: name, id, or unique prefix.")]


@app.command("rm")
def remove(
    runs: Annotated[
        list[str],
        typer.Argument(help="Runs: name, id, or unique prefix.", autocompletion=completion.runs),
    ],
    planned: Annotated[
        bool, typer.Option("--planned", help="Also runs that the plan of a study names.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Move runs that have ended into the trash, and mark them deleted in MLflow.

    Example: wb runs rm quickstart-s43
    """
    from workbench.track import trash
    from workbench.track.server_runs import find_own
    from workbench.track.store import Store

    store = Store()
    found = [find_own(store, text, "and is removed there, by MLflow's own means") for text in runs]
    entries = list({entry.folder: entry for entry in found}.values())
    trash.require_removable(entries)
    plans = _plans(entries, store)
    if plans and not planned:
        raise RefusedError(*map(_planned_fault, plans))
    done = []
    for entry in entries:
        removed = trash.remove(entry, store)
        studies = [plan.name for one, plan in plans if one is entry]
        for study in studies:
            say(f"{entry.name}: the plan of the study {study} names it; its ledger notes this")
            _note(study, store, "removed", entry.name, removed)
        reason = trash.tell_removed(removed, store)
        if reason:
            say(f"{entry.name}: {reason}; wb sync tells it later")
        done.append({**removed.to_json(), "studies": studies, "mlflow": reason or "marked deleted"})
    lines = [f"{one['run']}: in the trash ({_size(one['bytes'])})" for one in done]
    lines.append(f"wb runs restore {done[0]['run']} brings it back; wb runs empty deletes for good")
    return Answer({"removed": done} if as_json else "\n".join(lines))


@app.command()
def restore(runs: Removed, as_json: AsJson = False, debug: Debug = False) -> Answer:
    """Bring runs back from the trash, in MLflow too.

    Example: wb runs restore quickstart-s43
    """
    from workbench.track import trash
    from workbench.track.store import Store

    store = Store()
    done: list[dict[str, Any]] = []
    for one in [trash.find(text, store) for text in runs]:
        folder = trash.restore(one, store)
        for study in _studies_of(one.note.name, store):
            _note(study, store, "restored", one.note.name, one)
        reason = trash.tell_mlflow(folder, store, deleted=False)
        if reason:
            say(f"{one.note.name}: {reason}")
        done.append(
            {"run": one.note.name, "folder": str(folder), "mlflow": reason or "marked active"}
        )
    lines = [f"{one['run']}: back in {one['folder']}" for one in done]
    return Answer({"restored": done} if as_json else "\n".join(lines))


@app.command("trash")
def list_trash(as_json: AsJson = False, debug: Debug = False) -> Answer:
    """List what is in the trash, the newest first.

    Example: wb runs trash
    """
    from workbench.track.store import Store
    from workbench.track.trash import in_trash

    rows = [one.to_json() for one in in_trash(Store())]
    return Answer({"trash": rows} if as_json else _table(rows))


@app.command()
def empty(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Removed runs; default: all of them.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete them; without it they are only listed.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Delete removed runs for good; without --yes, say what that would delete.

    MLflow keeps its runs marked deleted until its own `mlflow gc`.

    Example: wb runs empty --yes
    """
    from workbench.track import trash
    from workbench.track.store import Store

    store = Store()
    every = [trash.find(text, store) for text in runs] if runs else trash.in_trash(store)
    rows = [one.to_json() for one in every]
    if yes:
        for one in every:
            trash.delete(one)
    total = sum(row["bytes"] for row in rows)
    if as_json:
        return Answer({"deleted": yes, "runs": rows, "bytes": total})
    if yes:
        return Answer(f"{len(rows)} runs deleted for good, {_size(total)}")
    last = f"{_size(total)} in all; --yes deletes them for good" if rows else ""
    return Answer("\n".join(filter(None, (_table(rows), last))))


def _plans(entries: list[RunEntry], store: Store) -> list[tuple[RunEntry, FrozenPlan]]:
    """Which of these runs a study planned, by its present plan or an earlier one."""
    found = []
    for plan in _every_plan(store):
        names = {run.run for run in plan.runs}
        for entry in entries:
            # A run whose folder was renamed is still the study's.
            record = entry.record
            own = record is not None and record.study is not None and record.study[0] == plan.name
            called = record.name if record and own else entry.name
            if called in names:
                found.append((entry, plan))
    return found


def _studies_of(run: str, store: Store) -> list[str]:
    plans = _every_plan(store)
    return [plan.name for plan in plans if run in {one.run for one in plan.runs}]


def _every_plan(store: Store) -> list[FrozenPlan]:
    """The readable plans of the store. One that is damaged names nothing that could be read."""
    from workbench.errors import UserError
    from workbench.study.plan import PLAN, read_plan

    found = []
    for path in sorted(store.studies.glob(f"*/{PLAN}")):
        try:
            plan = read_plan(path.parent)
        except UserError as error:
            say(f"warning: {error}")
            continue
        if plan is not None:
            found.append(plan)
    return found


def _planned_fault(pair: tuple[RunEntry, FrozenPlan]) -> Fault:
    entry, plan = pair
    message = f"the plan of the study {plan.name} names this run, and its report would miss it"
    return Fault(
        str(entry.folder), message, entry.name, "--planned, which the study's ledger notes"
    )


def _note(study: str, store: Store, kind: EventKind, run: str, one: Trashed) -> None:
    from workbench.study.ledger import Ledger
    from workbench.study.plan import folder_of
    from workbench.track.store import read_entry

    folder = one.folder if one.folder.exists() else store.path_of(run)
    status = read_entry(folder).status
    detail = "to the trash" if kind == "removed" else "from the trash"
    Ledger(folder_of(study, store)).add(kind, run, id=one.id or None, status=status, detail=detail)


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "the trash is empty"
    width = max(len(row["run"]) for row in rows)
    lines = []
    for row in rows:
        when = row["removed"][:16].replace("T", " ")
        run_id = (row["id"] or "")[:8]
        lines.append(f"{row['run']:{width}}  {run_id:8}  {when:16}  {_size(row['bytes'])}")
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
