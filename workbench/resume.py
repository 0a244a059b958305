"""Takes up a run where a checkpoint was saved: finds it, asks the guard, and trims what came after.

What a resumed run leaves is what the unbroken run would have left: rows, points and scores after
the checkpoint are removed before training goes on, and no step stands twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.core.restore import Saved, newest_checkpoint, open_checkpoint, restore
from workbench.core.schedules import is_evaluated, is_last, is_logged
from workbench.core.train import TrainState
from workbench.errors import UserError
from workbench.guard import Difference, changes, require_no_refusal
from workbench.spec.run import RunSpec
from workbench.track.journal import Journal, Number, read_metrics
from workbench.track.record import (
    COMPILER_COUNTS,
    ExecutionFacts,
    Resumption,
    RunRecord,
    read_record,
)
from workbench.track.rewind import copy_history, rewind
from workbench.track.server_runs import find_own
from workbench.track.store import METRICS, RECORD, Store, effective_status, lock_run, release_run

Say = Callable[[str], None]

# What makes the numbers after a resume others than without a break, though nothing has changed.
KERNELS_TIMED_AGAIN = "kernels picked by timing (max-autotune)"


@dataclass(frozen=True)
class ResumeRequest:
    """What was asked: to go on with a run.

    `source` is a run (name, id, prefix), the path of a checkpoint, or None: the run that the spec
    names. `force` is the reason for going on although the guard refuses. `fork` begins a new run,
    with the name of the spec, from the checkpoint.
    """

    source: str | None = None
    force: str | None = None
    fork: bool = False


@dataclass(frozen=True)
class Beginning:
    """Where a run begins: its locked folder, its record, and what of its next row is known."""

    folder: Path
    record: RunRecord
    row: dict[str, Number | None] | None = None
    nothing_to_do: bool = False
    checkpoint: Path | None = None  # where the state comes from

    @property
    def owes_evaluation(self) -> bool:
        """Whether the present step is to be evaluated before training goes on."""
        return self.checkpoint is None or bool(self.row)

    def journal(self, columns: Sequence[str]) -> Journal:
        """The run's journal, new or gone on with.

        Raises:
            StoreError: it cannot be written.
        """
        path = self.folder / METRICS
        return Journal.reopen(path, columns) if path.exists() else Journal(path, columns)


def was_begun_by(launchers: Collection[str], name: str, store: Store) -> bool:
    """Whether the run of this name was begun, or last gone on with, by one of these torchruns.

    One on each machine starts the processes there. Machines may come and go while a launch lasts,
    and rank zero with them: whichever stays knows the run.
    """
    folder = store.path_of(name)
    if not launchers or not (folder / RECORD).exists():
        return False
    return not set(launchers).isdisjoint(read_record(folder).provenance.get("launchers") or ())


def take_up(
    request: ResumeRequest,
    new: RunRecord,
    spec: RunSpec,
    state: TrainState,
    last: int | None,
    store: Store,
    say: Say,
) -> Beginning | None:
    """Puts `state` to where the run stood, and its folder; None: there is no such run yet.

    `new` is the record that a new run of `spec` would have; `last` the step at which it ends
    (None: at the end of a stream).

    Raises:
        UserError: no such run or checkpoint, a run that is still going, damaged files.
        RefusedError: the guard refuses, see `guard.require_no_refusal`.
        StoreError: the store cannot be written.
    """
    folder, path = _source(request, new.name, store)
    if folder is None:
        say(f"there is no run {new.name} to go on with: it begins at step 0")
        return None
    if request.fork:
        return _fork(request, new, spec, state, last, store, (folder, path), say)
    if not lock_run(folder):
        raise UserError.at(str(folder), "this run is still going", None, "a run that has ended")
    try:
        return _go_on(request, new, spec, state, last, (folder, path), say)
    except BaseException:
        release_run(folder)
        raise


def _go_on(
    request: ResumeRequest,
    new: RunRecord,
    spec: RunSpec,
    state: TrainState,
    last: int | None,
    source: tuple[Path, Path | None],
    say: Say,
) -> Beginning:
    folder, path = source
    old = read_record(folder)
    saved = _checkpoint(folder, path, say)
    found = changes(old, new, saved.state["spec"] if saved else old.spec)
    require_no_refusal(found, old.name, request.force)
    if old.status == "FINISHED" and saved and _is_at_end(old, saved, last):
        say(f"{old.name} is finished, and nothing that matters has changed: nothing to do")
        return Beginning(folder, old, nothing_to_do=True)
    step = saved.step if saved else 0
    if saved:
        restore(state, saved, spec)
        last = _end(spec, state, last)
        say(f"{old.name} goes on from step {step:,} ({saved.path.name})")
    else:
        say(f"{old.name} has no checkpoint: it begins again at step 0")
    record = _continued(old, new, saved, found, request.force, effective_status(folder, old))
    logged = _last_logged(folder)
    record.resumes[-1].replayed_to = logged if logged > step else None
    row = _rewound(folder, record, step, last)
    return Beginning(folder, record, row, checkpoint=saved.path if saved else None)


def _is_at_end(old: RunRecord, saved: Saved, last: int | None) -> bool:
    """Whether a finished run has nothing left to train."""
    if last is not None:
        return saved.step >= last
    return old.total_tokens is not None and old.total_tokens == old.results.tokens


def _end(spec: RunSpec, state: TrainState, last: int | None) -> int | None:
    """The last step, where the run stands at the end of a stream already."""
    return state.step if last is None and is_last(spec, state.stream, state.step, None) else last


def _fork(
    request: ResumeRequest,
    new: RunRecord,
    spec: RunSpec,
    state: TrainState,
    last: int | None,
    store: Store,
    source: tuple[Path, Path | None],
    say: Say,
) -> Beginning:
    parent, path = source
    old = read_record(parent)
    saved = _checkpoint(parent, path, say)
    if saved is None:
        raise UserError.at(str(parent), "there is no checkpoint to fork from")
    found = changes(old, new, saved.state["spec"])
    restore(state, saved, spec)
    last = _end(spec, state, last)
    folder = store.create_run(new.name)
    try:
        copy_history(parent, folder)
        record = _continued(old, new, saved, found, None, old.status)
        record.id, record.name, record.started = new.id, new.name, new.started
        record.results.seconds = None
        record.mlflow = {}
        record.effective.code.forked_from = f"{old.id} at step {saved.step}"
        record.resumes[-1].forked_from = {"id": old.id, "name": old.name}
        row = _rewound(folder, record, saved.step, last)
    except BaseException:
        store.discard_run(folder)
        raise
    say(f"{new.name} goes on from step {saved.step:,} of {old.name}")
    return Beginning(folder, record, row, checkpoint=saved.path)


def _source(request: ResumeRequest, name: str, store: Store) -> tuple[Path | None, Path | None]:
    """The folder of the run that is meant, and the checkpoint where one is named."""
    source = request.source
    if source is None:
        if request.fork:
            message = "a fork needs the run or the checkpoint that it goes on from"
            raise UserError.at("--fork", message, None, "--resume RUN or --resume PATH with it")
        folder = store.path_of(name)
        return (folder if (folder / RECORD).exists() else None), None
    path = Path(source).expanduser()
    if (path / "manifest.json").exists():
        folder = path.resolve().parent.parent
        if not (folder / RECORD).exists():
            message = "this checkpoint does not lie in the folder of a run"
            raise UserError.at(str(path), message, None, "RUN/checkpoints/step_...")
        return folder, path.resolve()
    if "/" in source:
        raise UserError.at("--resume", "there is no checkpoint here", source, "a run, or a path")
    return find_own(store, source, "its checkpoints are not").folder, None


def _checkpoint(folder: Path, path: Path | None, say: Say) -> Saved | None:
    if path is not None:
        return open_checkpoint(path)
    saved, problems = newest_checkpoint(folder / "checkpoints")
    for problem in problems:
        say(f"warning: {problem}")
    return saved


def _continued(
    old: RunRecord,
    new: RunRecord,
    saved: Saved | None,
    found: list[Difference],
    force: str | None,
    status: str,
) -> RunRecord:
    """The record of the run from here on: its identity and past, the facts of this process."""
    counted = [one for one in found if one.effect != "free"]
    entry = Resumption(
        step=saved.step if saved else 0,
        when=new.started or "",
        checkpoint_sha256=saved.sha256 if saved else None,
        status_before=status,
        changes=[one.to_json() for one in found],
        reason=force if any(one.effect == "refuse" for one in found) else None,
        provenance_before=old.provenance,
    )
    record = new.model_copy(deep=True)
    record.id, record.name, record.started = old.id, old.name, old.started
    record.points, record.mlflow = list(old.points), dict(old.mlflow)
    record.resumes = [*old.resumes, entry]
    record.results.seconds = old.results.seconds
    _add_compilations(record.effective.execution, old.effective.execution)
    code, before = record.effective.code, old.effective.code
    code.forked_from = before.forked_from
    code.forced_resume = _joined(before.forced_resume, entry.reason)
    listed = [one.path for one in counted if one.effect == "flag"]
    if saved and record.run_spec.training.compile_mode == "max-autotune":
        listed.append(KERNELS_TIMED_AGAIN)
    at = f"{', '.join(listed)} at step {entry.step}" if listed else None
    code.resumed_with = _joined(before.resumed_with, at)
    return record


def _add_compilations(now: ExecutionFacts, before: ExecutionFacts) -> None:
    """Puts what the run had compiled before to what this process begins with."""
    for name in COMPILER_COUNTS:
        then = getattr(before, name)
        if isinstance(then, int) or (then is None and before.compiled is not False):
            setattr(now, name, then)  # what was not known stays so


def _joined(before: str | None, more: str | None) -> str | None:
    """What is known already, and what comes to it; a fact that was not known stays so."""
    if more is None or before is None:
        return before
    return more if before == "none" else f"{before}; {more}"


def _last_logged(folder: Path) -> int:
    """The last step with a row; 0 where there is none."""
    if not (folder / METRICS).exists():
        return 0
    return int(max((step or 0 for step in read_metrics(folder / METRICS)["step"]), default=0))


def _rewound(
    folder: Path, record: RunRecord, step: int, last: int | None
) -> dict[str, Number | None] | None:
    """Takes the run's files back to `step`; returns the row of that step where it is not whole."""
    spec = record.run_spec
    points = {point.step for point in record.points}
    evaluated = step > 0 and is_evaluated(spec, step, last)
    row = rewind(
        folder,
        step,
        keep_row=step > 0 and is_logged(spec, step, last),
        keep_scores=evaluated and step in points,
        take_row=evaluated and step not in points,
    )
    kept = step if evaluated and step in points else step - 1
    record.points = [point for point in record.points if point.step <= kept]
    return row
