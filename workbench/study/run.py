"""`wb study run`: freezes the plan, trains what is missing, and keeps what happened.

Nothing that has finished is trained again, and nothing that was trained is lost: every run is a
process of its own that saves when it is stopped and goes on from there the next time.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import Fault, RefusedError, StoreError, UserError
from workbench.study import processes
from workbench.study.check import check_study
from workbench.study.launchers import Handle, Launcher, Order, Processes
from workbench.study.ledger import Ledger, job_of
from workbench.study.lock import study_lock
from workbench.study.machine import Share
from workbench.study.mlflow import tell_mlflow
from workbench.study.plan import (
    FrozenPlan,
    document_of_study,
    folder_of,
    plan_differences,
    read_plan,
    version_of,
    write_plan,
)
from workbench.study.spec import PlannedRun, Study
from workbench.study.states import STOPPED_ITSELF, RunState, mlflow_status, states_of
from workbench.track.store import Store

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 2.0

Say = Callable[[str], None]


class Stops(Protocol):
    """Whether a signal has asked to stop, and which."""

    number: int | None


class Display(Protocol):
    """Shows the states of all runs while they train."""

    def show(self, states: Sequence[RunState], at_once: int) -> None:
        """Shows the states as they are now."""

    def say(self, line: str) -> None:
        """A line that stays."""


@dataclass
class StudyOutcome:
    """How a `wb study run` ended."""

    plan: FrozenPlan
    folder: Path
    states: list[RunState]
    trained: list[str] = field(default_factory=list)
    stopped_by: int | None = None
    store_failed: bool = False

    @property
    def exit_code(self) -> int:
        """0 when all is trained, 4 with a failed run, 74 for the store, 128 + n for a signal."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.store_failed:
            return StoreError.exit_code
        ended = ("failed", "stopped")  # a run that was killed did not come to its end either
        failed = any(one.state in ended and not one.dropped for one in self.states)
        return STOPPED_ITSELF if failed else 0

    @property
    def status(self) -> str:
        """As MLflow shows it: FINISHED, FAILED, KILLED by a signal, or RUNNING elsewhere."""
        if self.stopped_by is not None:
            return "KILLED"
        return mlflow_status(self.states)

    def to_json(self) -> dict[str, Any]:
        """The document that `wb study run --json` prints."""
        return {
            "study": self.plan.name,
            "plan_sha256": self.plan.latest.sha256,
            "folder": str(self.folder),
            "trained": self.trained,
            "runs": [state.to_json() for state in self.states],
            "exit_code": self.exit_code,
        }


def run_study(
    study: Study,
    store: Store,
    stops: Stops,
    display: Display,
    *,
    amend: str | None = None,
    at_once: int | None = None,
    launcher: Launcher | None = None,
    take_over: bool = False,
) -> StudyOutcome:
    """Trains every run of the plan that is not finished.

    Args:
        stops: set by the first signal; then no further run begins, and those that train save.
        amend: the reason for a change of plan after the first run.
        at_once: the most runs at a time; None: as many as the machine takes.
        launcher: what begins them; None: processes of this machine.
        take_over: train also runs whose job in a queue cannot be asked.

    Raises:
        UserError: the study is not valid, or a run of a planned name is not the planned run.
        RefusedError: arms differ in more than the treatment; the plan was changed and no reason is
            given; or the study is being run by another process.
        StoreError: the store cannot be written.
    """
    check_study(study, store).require()
    launcher = launcher or Processes()
    folder = folder_of(study.name, store)
    with study_lock(folder) as lock:
        plan = read_plan(folder)
        ledger = Ledger(folder)
        plan, share = _settled(
            study, plan, store, ledger, folder, amend, at_once, launcher, display.say
        )
        states = states_of(plan, store, ledger, study)
        _require_own(states)
        runner = _Runner(study, store, folder, plan, share, ledger, lock, stops, display, launcher)
        followed = runner.follow(states, take_over)
        _note_what_moved([s for s in states if s.run not in followed], ledger, display.say)
        return runner.run(states)


def require_same_plan(study: Study, plan: FrozenPlan) -> None:
    """Does nothing where the study file says what was frozen.

    Raises:
        RefusedError: it was changed; with every difference.
    """
    differences = plan_differences(plan.latest.document, document_of_study(study))
    if not differences:
        return
    allowed = "the plan as it was frozen; --amend REASON, which the report will show"
    faults = [Fault(str(study.path), f"changed since {plan.latest.when}: {d}") for d in differences]
    message = f"the plan was frozen on {plan.first.when}, before its first run, and has changed"
    raise RefusedError(Fault(str(study.path), message, None, allowed), *faults)


def _settled(
    study: Study,
    plan: FrozenPlan | None,
    store: Store,
    ledger: Ledger,
    folder: Path,
    amend: str | None,
    at_once: int | None,
    launcher: Launcher,
    say: Say,
) -> tuple[FrozenPlan, Share]:
    """The plan that holds from here on, frozen now where it is the first, and the share of each
    run."""
    if amend is not None and not amend.strip():
        raise UserError.at("--amend", "a change of plan needs its reason, which the report shows")
    if plan is None:
        if amend is not None:
            message = "there is nothing to change: the plan is not frozen before its first run"
            raise UserError.at("--amend", message, amend)
        share = launcher.share([run.spec for run in study.runs], store, None, at_once)
        plan = FrozenPlan(
            id=uuid.uuid4().hex,
            name=study.name,
            question=study.spec.question,
            file=str(study.path.resolve()),
            threads=share.threads,
            versions=[version_of(study)],
        )
        write_plan(folder, plan)
        say(f"the plan is frozen: {plan.first.when}, sha256 {plan.first.sha256[:16]}")
        return plan, share
    if plan_differences(plan.latest.document, document_of_study(study)):
        if amend is None:
            require_same_plan(study, plan)
        states = states_of(plan, store, ledger)
        finished = sum(state.state == "finished" for state in states)
        changed = version_of(study, amend, finished)
        amended = plan.model_copy(update={"versions": [*plan.versions, changed]})
        _require_own(states_of(amended, store, ledger, study))
        plan = amended
        write_plan(folder, plan)
        say(f"the plan has changed, {finished} runs being finished: {amend}")
    # Also what may change freely is kept as it is now.
    free = {"file": str(study.path.resolve()), "question": study.spec.question}
    if any(getattr(plan, name) != value for name, value in free.items()):
        plan = plan.model_copy(update=free)
        write_plan(folder, plan)
    share = launcher.share([run.spec for run in study.runs], store, plan.threads, at_once)
    return plan, share


def _require_own(states: Sequence[RunState]) -> None:
    """Does nothing where each folder of a planned name holds the planned run.

    Raises:
        UserError: with every one that does not.
    """
    faults = [
        Fault(
            str(state.entry.folder if state.entry else state.run),
            f"this is not the planned run: {state.detail}; it is never overwritten",
            None,
            "another name for the arm or the study, or the folder moved out of the store",
        )
        for state in states
        if state.state == "foreign" and not state.dropped
    ]
    if faults:
        raise UserError(*faults)


def _note_what_moved(states: Sequence[RunState], ledger: Ledger, say: Say) -> None:
    """Says, and notes once, what was deleted or renamed since."""
    for state in states:
        events = ledger.of(state.run)
        last = events[-1] if events else None
        record = state.entry.record if state.entry else None
        if state.state == "deleted" and not state.dropped:
            say(f"warning: {state.run}: {state.detail}: it is trained again")
            if last is None or last.kind != "missed":
                ledger.add("missed", state.run, detail=state.detail)
        elif state.entry is not None and state.entry.name != state.run:
            say(f"warning: {state.run}: {state.detail}; it is not trained again")
            detail = f"now {state.entry.name}"
            if not any(e.kind == "renamed" and e.detail == detail for e in events):
                ledger.add("renamed", state.run, id=record and record.id, detail=detail)
        if record and record.id not in ledger.ids(state.run) and state.state != "foreign":
            # A process that was killed could not note what its runs came to.
            ledger.add(
                "ended",
                state.run,
                id=record.id,
                status=state.entry and state.entry.status,
                detail=record.error or "",
            )


class _Runner:
    """One `wb study run`, from the frozen plan to the last process."""

    def __init__(
        self,
        study: Study,
        store: Store,
        folder: Path,
        plan: FrozenPlan,
        share: Share,
        ledger: Ledger,
        lock: int,
        stops: Stops,
        display: Display,
        launcher: Launcher,
    ) -> None:
        self._study, self._store, self._folder = study, store, folder
        self._plan, self._share, self._ledger = plan, share, ledger
        self._lock, self._stops, self._display = lock, stops, display
        self._launcher = launcher
        self._running: list[Handle] = []
        self._told: int | None = None
        self._outcome = StudyOutcome(plan, folder, [])

    def run(self, states: Sequence[RunState]) -> StudyOutcome:
        """Trains what is open, so many at once, until all has been tried once or a signal comes."""
        waiting = self._in_turn(states)
        followed = [one.run for one in self._running]
        waiting = [run for run in waiting if run.name not in followed]
        going = [s.run for s in states if s.state == "running" and s.run not in followed]
        for name in going:
            self._display.say(f"{name} is being trained by another process: left to it")
        if waiting:
            share = self._share
            at_once = min(share.at_once, len(waiting))
            self._display.say(
                f"{len(waiting)} of {len(states)} runs to train, {at_once} at once "
                f"({share.why}), {share.words} each"
            )
            detail = f"{len(waiting)} runs, {at_once} at once, {share.words} each"
            self._ledger.add("began", detail=detail)
        began = bool(waiting or followed)
        try:
            self._work(waiting, {state.run: state for state in states})
        except KeyboardInterrupt:
            self._launcher.stop_all(self._running, signal.SIGINT)
            raise
        except BaseException:
            self._launcher.stop_all(self._running, signal.SIGTERM)
            raise
        self._outcome.states = self._look()
        if began:
            self._display.show(self._outcome.states, self._share.at_once)
            self._close()
        return self._outcome

    def _close(self) -> None:
        """Notes how it ended, and tells MLflow."""
        said = summary(self._outcome.states)
        self._ledger.add("over", detail=said)
        tracking = self._study.runs[0].spec.tracking
        status, say = self._outcome.status, self._display.say
        where = tracking.experiment, tracking.uri
        tell_mlflow(self._folder, where, status, said, [], say)

    def _in_turn(self, states: Sequence[RunState]) -> list[PlannedRun]:
        """The runs to train: seed by seed, so that what is there early can be paired."""
        is_open = {state.run for state in states if state.is_open}
        runs = [run for run in self._study.runs if run.name in is_open]
        seeds = self._study.spec.seeds
        return sorted(runs, key=lambda run: seeds.index(run.seed))

    def _work(self, waiting: list[PlannedRun], states: dict[str, RunState]) -> None:
        looked = 0.0
        while waiting or self._running:
            self._hear()
            self._collect()
            may_begin = self._stops.number is None and not self._outcome.store_failed
            if not may_begin:
                waiting.clear()
            room = self._share.at_once - len(self._running)
            if waiting and room > 0:
                batch, waiting[:] = waiting[:room], waiting[room:]
                self._begin(batch, states)
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                self._display.show(self._look(), self._share.at_once)
            time.sleep(_POLL_SECONDS)

    def follow(self, states: Sequence[RunState], take_over: bool) -> list[str]:
        """Takes in hand the jobs that an earlier `wb study run` submitted and that are not over;
        returns their runs.

        Raises:
            UserError: one cannot be asked, and is not to be taken over.
        """
        for state in states:
            job = job_of(self._ledger.of(state.run))
            if job is None or not (state.is_open or state.state == "running"):
                continue
            from workbench.study.cluster import JOBS, attach

            folder = state.entry.folder if state.entry else self._store.runs / state.run
            try:
                found = attach(job, state.run, self._log(state.run), folder, self._folder / JOBS)
            except UserError:
                if not take_over:
                    raise
                found = None
            if found is None:
                detail = "nobody saw how its job ended"
                self._ledger.add("ended", state.run, detail=detail, job=job)
            else:
                self._running.append(found)
                self._display.say(f"{state.run}: {job} has it")
        return [one.run for one in self._running]

    def _log(self, run: str) -> Path:
        return self._folder / "logs" / f"{run}.log"

    def _begin(self, runs: Sequence[PlannedRun], states: dict[str, RunState]) -> None:
        orders = []
        for run in runs:
            entry = states[run.name].entry
            go_on = entry.name if entry is not None and entry.name != run.name else None
            path = processes.write_spec(run.spec, self._folder / "specs")
            orders.append(Order(run.spec, path, go_on, self._share.threads, self._log(run.name)))
        for handle in self._launcher.start(orders, self._store, self._lock):
            self._running.append(handle)
            self._ledger.add("started", handle.run, job=handle.job)
            self._display.say(f"{handle.run}: {handle.job or 'training'}")

    def _collect(self) -> None:
        """Notes the processes that have ended."""
        for process in list(self._running):
            code = process.ended()
            if code is None:
                continue
            self._running.remove(process)
            state = next(one for one in self._look() if one.run == process.run)
            record = state.entry.record if state.entry else None
            detail = "" if code == 0 else process.last_words(code)
            status = state.entry.status if state.entry else None
            self._ledger.add(
                "ended",
                process.run,
                id=record.id if record else None,
                status=status,
                exit_code=code,
                detail=detail,
            )
            if code == StoreError.exit_code:
                self._outcome.store_failed = True
                self._display.say("the store cannot be written: no further run begins")
            if status == "FINISHED":
                self._outcome.trained.append(process.run)
                self._display.say(f"{process.run}: finished")
            else:
                self._display.say(f"{process.run}: {detail or 'not finished'} (log: {process.log})")

    def _hear(self) -> None:
        """Passes a signal on to the runs, once: they save and end."""
        number = self._stops.number
        if number is None or self._told is not None:
            return
        self._told = self._outcome.stopped_by = number
        name = signal.Signals(number).name
        if self._launcher.hear(self._running, number):
            self._display.say(f"{name}: the runs save and end; once more to end at once")
            self._ledger.add("interrupted", detail=f"by {name}")
            return
        left = ", ".join(one.job or one.run for one in self._running)
        said = f"{len(self._running)} jobs go on in the queue ({left})"
        self._display.say(f"{name}: {said}; wb study run follows them again, scancel ends them")
        self._ledger.add("interrupted", detail=f"by {name}: {said}")
        self._running.clear()

    def _look(self) -> list[RunState]:
        return states_of(self._plan, self._store, self._ledger, self._study)


def summary(states: Sequence[RunState]) -> str:
    """Such as "10 of 12 runs finished, 1 failed, 1 stopped"."""
    planned = [state for state in states if not state.dropped]
    counts: dict[str, int] = {}
    for state in planned:
        counts[state.state] = counts.get(state.state, 0) + 1
    finished = counts.pop("finished", 0)
    words = {"planned": "not begun"}
    rest = "".join(f", {count} {words.get(name, name)}" for name, count in counts.items())
    return f"{finished} of {len(planned)} runs finished{rest}"
