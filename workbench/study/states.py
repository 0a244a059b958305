"""Where every run of a study stands: planned, running, stopped, failed, finished, or gone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from workbench.errors import UserError
from workbench.study.ledger import Ledger, exit_code_of
from workbench.study.plan import PATHS, FrozenPlan, PlannedName, deciding_leaves
from workbench.study.spec import Study
from workbench.track.journal import read_metrics
from workbench.track.record import RunRecord
from workbench.track.store import METRICS, RunEntry, Store

State = Literal["planned", "running", "stopped", "failed", "finished", "deleted", "foreign"]

# The exit code of a run whose training stopped itself: it would stop there again.
STOPPED_ITSELF = 4
_SIGNALLED = 128  # and above: a signal ended it


@dataclass(frozen=True)
class RunState:
    """One run that the plan names, as it stands.

    `step` and `steps` are what it has trained and is to train (None: to the end of a stream);
    `entry` is its folder, which may have another name than planned.
    """

    planned: PlannedName
    state: State
    detail: str = ""
    step: int = 0
    steps: int | None = None
    seconds: float | None = None
    entry: RunEntry | None = None
    dropped: bool = False
    is_final: bool = False  # failed, and would fail there again

    @property
    def run(self) -> str:
        """The name that the plan gives it."""
        return self.planned.run

    @property
    def is_open(self) -> bool:
        """Whether there is something left to train."""
        if self.dropped or self.is_final:
            return False
        return self.state in ("planned", "stopped", "deleted", "failed")

    def to_json(self) -> dict[str, Any]:
        """As `wb study status --json` prints it."""
        return {
            "run": self.run,
            "arm": self.planned.arm,
            "seed": self.planned.seed,
            "state": self.state,
            "detail": self.detail,
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
            "folder": str(self.entry.folder) if self.entry else None,
            "id": self.entry.record.id if self.entry and self.entry.record else None,
            "dropped": self.dropped,
        }


def states_of(
    plan: FrozenPlan, store: Store, ledger: Ledger, study: Study | None = None
) -> list[RunState]:
    """The state of every run that any version of the plan names, in the plan's order.

    With the present `study`, a run that was trained under other settings is `foreign`.
    """
    entries = store.list_runs()
    by_name = {entry.name: entry for entry in entries}
    by_id = {entry.record.id: entry for entry in entries if entry.record}
    found = []
    for planned in plan.runs:
        dropped = plan.is_dropped(planned)
        entry = by_name.get(planned.run)
        if entry is not None:
            state = _of_entry(entry, planned, plan, ledger, None if dropped else study)
        else:
            state = _elsewhere(planned, by_id, plan, ledger, None if dropped else study)
        found.append(replace(state, dropped=dropped))
    return found


def _of_entry(
    entry: RunEntry, planned: PlannedName, plan: FrozenPlan, ledger: Ledger, study: Study | None
) -> RunState:
    record = entry.record
    if record is None:
        if not any(path.name != ".lock" for path in entry.folder.iterdir()):
            return RunState(planned, "planned")  # claimed, and ended before it began
        return RunState(planned, "foreign", f"its record is damaged: {entry.fault}", entry=entry)
    if reason := _foreign(record, planned, plan, study):
        return RunState(planned, "foreign", reason, entry=entry)
    step = _step(entry.folder)
    total, per_step = record.total_tokens, record.tokens_per_step
    steps = total // per_step if total and per_step else None
    stop = record.spec.get("training", {}).get("stop_at_step")
    steps = stop or steps
    seconds = record.results.seconds
    renamed = "" if entry.name == planned.run else f"its folder is now {entry.name}"

    def state(name: State, detail: str = "", final: bool = False) -> RunState:
        said = "; ".join(filter(None, (detail, renamed)))
        return RunState(planned, name, said, step, steps, seconds, entry, is_final=final)

    if entry.status == "RUNNING":
        return state("running")
    if entry.status == "FINISHED":
        return state("finished")
    error = record.error or ("it died without a word" if entry.died else "")
    if record.status == "FAILED":
        return state("failed", error, final=_stopped_itself(record, ledger.of(planned.run)))
    return state("stopped", error)


def _elsewhere(
    planned: PlannedName,
    by_id: dict[str, RunEntry],
    plan: FrozenPlan,
    ledger: Ledger,
    study: Study | None,
) -> RunState:
    """Of a run whose folder does not have its planned name."""
    ids = ledger.ids(planned.run)
    for known in reversed(ids):
        if known in by_id:
            return _of_entry(by_id[known], planned, plan, ledger, study)
    events = ledger.of(planned.run)
    if ids:
        last = next(event for event in reversed(events) if event.id)
        what = {"FINISHED": "it had finished"}.get(last.status or "", "it had begun")
        detail = f"{what} ({last.when}, id {ids[-1][:8]}), and is no longer in the store"
        return RunState(planned, "deleted", detail)
    if 0 < (exit_code_of(events) or 0) < _SIGNALLED:
        ended = next(event for event in reversed(events) if event.kind == "ended")
        return RunState(planned, "failed", ended.detail)
    return RunState(planned, "planned")


def _foreign(
    record: RunRecord, planned: PlannedName, plan: FrozenPlan, study: Study | None
) -> str | None:
    """Why a run of the planned name is not the planned run; None: it is."""
    if record.study != (plan.name, planned.arm):
        return "a run of this name exists that is not this study's"
    if record.spec.get("seed") != planned.seed:
        return f"it was trained with the seed {record.spec.get('seed')}"
    if study is None or planned.arm not in study.arm_specs:
        return None
    folder = study.path.resolve().parent
    wanted = deciding_leaves(study.arm_specs[planned.arm].model_dump(mode="json"), folder)
    has = deciding_leaves(record.spec, folder)
    # A project may be moved; what its files hold is compared by the rules, by content.
    leaves = [leaf for leaf in dict.fromkeys([*wanted, *has]) if leaf not in PATHS]
    other = [leaf for leaf in leaves if wanted.get(leaf) != has.get(leaf)]
    if not other:
        return None
    leaf = other[0]
    more = f", and {len(other) - 1} more" if len(other) > 1 else ""
    return f"it was trained with {leaf} {has.get(leaf)!r}, planned is {wanted.get(leaf)!r}{more}"


def _stopped_itself(record: RunRecord, events: Sequence[Any]) -> bool:
    """Whether training ended itself, so that it would do so again."""
    code = exit_code_of(events)
    return code == STOPPED_ITSELF or (record.error or "").startswith("TrainingStoppedError")


def _step(folder: Path) -> int:
    """The last logged step; 0 where nothing is logged."""
    try:
        steps = read_metrics(folder / METRICS)["step"]
    except (UserError, KeyError):
        return 0
    return int(max((step or 0 for step in steps), default=0))


def mlflow_status(states: Sequence[RunState]) -> str:
    """How the study stands as MLflow names it: FAILED where a run failed or was not finished,
    RUNNING where one still is."""
    found = {state.state for state in states if not state.dropped}
    if "running" in found:
        return "RUNNING"
    return "FINISHED" if found <= {"finished"} else "FAILED"


def seconds_left(states: Sequence[RunState], at_once: int) -> float | None:
    """How long the rest will take at the pace of what has been trained; None: nothing tells."""
    paces = [s.seconds / s.step for s in states if s.seconds and s.step]
    if not paces:
        return None
    pace = statistics.fmean(paces)
    left = 0.0
    known = [state.steps for state in states if state.steps]
    for state in states:
        if not (state.is_open or state.state == "running"):
            continue
        steps = state.steps or (known[0] if known else None)
        if steps is None:
            return None
        done = 0 if state.state == "deleted" else state.step
        left += max(0, steps - done) * pace
    return left / max(1, at_once)
