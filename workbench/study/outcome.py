"""What a study came to: its finished runs as arms, compared with the baseline as it was planned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.compare.arm_results import ArmNumber
from workbench.compare.arms import ArmsComparison, compare_arms
from workbench.compare.words import why
from workbench.study.check import claim_of
from workbench.study.states import RunState
from workbench.study.status import StudyStatus
from workbench.track.store import Store
from workbench.track.tuning import tuning_runs


@dataclass(frozen=True)
class Decision:
    """What the decision rule of the plan makes of one arm against the baseline or another.

    `better` is the arm that is better, None where none is; `words` say it, or why nothing can be
    said.
    """

    arm: str
    against: str
    better: str | None
    refused: bool
    words: str
    number: ArmNumber | None = None

    def label(self, baseline: str) -> str:
        """What the comparison is called: the arm, or both where the other is not the baseline."""
        return self.arm if self.against == baseline else f"{self.arm} - {self.against}"


@dataclass(frozen=True)
class StudyResult:
    """A study as it stands, and the comparison of its arms where enough runs have finished.

    `compared` are the states of the runs that went into it; `missing` says of each arm of the plan
    that has no finished run, or why nothing is compared.
    """

    status: StudyStatus
    metric: str
    baseline: str
    comparison: ArmsComparison | None
    decisions: tuple[Decision, ...]
    compared: tuple[RunState, ...]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms of the present plan, the baseline first."""
        every = dict.fromkeys(run.arm for run in self.status.plan.latest.runs)
        return (self.baseline, *(arm for arm in every if arm != self.baseline))

    @property
    def complete(self) -> bool:
        """Whether every run of the present plan has finished."""
        planned = [state for state in self.status.states if not state.dropped]
        return all(state.state == "finished" for state in planned)

    @property
    def verdict(self) -> str:
        """`comparable`, `flagged` or `refused`: the worst over all arms."""
        if self.comparison is None or any(one.refused for one in self.decisions):
            return "refused"
        return self.comparison.verdict

    @property
    def contrasts(self) -> tuple[Decision, ...]:
        """The decisions on pairs that the baseline is no part of."""
        return tuple(one for one in self.decisions if one.against != self.baseline)


def outcome_of(status: StudyStatus) -> StudyResult:
    """Compares the finished runs of a study, as its plan says.

    A planned seed of an arm that has not finished, failed, or is gone refuses that arm's
    comparison; so does one that a later version of the plan dropped.

    Raises:
        UserError: a record or its metrics are damaged.
    """
    plan = status.plan
    document = plan.latest.document
    metric = document["primary"]["metric"]
    baseline = document.get("baseline") or plan.latest.runs[0].arm
    arms = list(dict.fromkeys(run.arm for run in plan.latest.runs))
    contrasts = [(one["against"], one["arm"]) for one in document.get("contrasts", [])]
    compared = [(baseline, arm) for arm in arms if arm != baseline] + contrasts
    finished: dict[str, list[RunState]] = {}
    for state in status.states:
        if state.state == "finished" and state.planned.arm in arms:
            finished.setdefault(state.planned.arm, []).append(state)
    planned = {
        arm: [run.seed for run in plan.runs if run.arm == arm] for arm in arms if arm in finished
    }
    comparison = None
    if baseline in finished and len(finished) > 1:
        folders = {
            arm: [_folder(state) for state in finished[arm]] for arm in arms if arm in finished
        }
        comparison = compare_arms(
            folders,
            baseline=baseline,
            contrasts=[pair for pair in contrasts if set(pair) <= finished.keys()],
            family=len(compared),
            treatment=document["treatment"],
            claims=[claim_of(metric)],
            at=_tokens(status, finished[baseline][0]),
            primary=metric,
            level=document["decision"]["confidence"],
            planned=planned,
            tuning=_tuning(status, finished),
            statuses={_folder(state): "FINISHED" for one in finished.values() for state in one},
        )
    used = [state for arm in arms for state in finished.get(arm, ())] if comparison else []
    outcome = StudyResult(status, metric, baseline, comparison, (), tuple(used))
    decisions = tuple(_decide(outcome, arm, against) for against, arm in compared)
    return StudyResult(status, metric, baseline, comparison, decisions, tuple(used))


def _tuning(status: StudyStatus, finished: dict[str, list[RunState]]) -> dict[str, int]:
    """Arm -> how many runs of its model, none of the study's, the store has beside it."""
    entries = Store(status.folder.parent.parent).list_runs()
    own = [state.entry for state in status.states if state.entry is not None]
    arms = {name: [one.entry for one in found if one.entry] for name, found in finished.items()}
    return {name: tuning_runs(group, own, entries) for name, group in arms.items()}


def _folder(state: RunState) -> Path:
    assert state.entry is not None, "a finished run has a folder"
    return state.entry.folder


def _tokens(status: StudyStatus, state: RunState) -> int | None:
    point = status.plan.latest.document["primary"]
    assert state.entry is not None
    assert state.entry.record is not None
    step: int | None = point["step"]
    tokens: int | None = point["tokens"]
    return step * (state.entry.record.tokens_per_step or 0) if step else tokens


def _decide(outcome: StudyResult, arm: str, base: str) -> Decision:
    """The decision rule of the plan, applied to one arm against another."""
    pair = outcome.comparison.pair(arm, base) if outcome.comparison else None
    if pair is None:
        needed = dict.fromkeys((outcome.baseline, base, arm))
        lacking = [one for one in needed if not _has_runs(outcome, one)]
        said = f"no run of {' and '.join(lacking)} has finished" if lacking else "nothing compared"
        return Decision(arm, base, None, True, f"{arm} against {base}: {said}")
    if pair.verdict == "refused":
        refusing = [rule for rule in pair.judgement.rules if rule.over(pair.asked) == "refused"]
        said = "; ".join(f"{rule.rule}: {why(rule)}" for rule in refusing)
        return Decision(arm, base, None, True, f"{arm} and {base} are not comparable: {said}")
    number = pair.results.numbers.get(outcome.metric) if pair.results else None
    if number is None or number.difference is None:
        said = f"{arm} against {base}: {outcome.metric} was not measured in every run"
        return Decision(arm, base, None, True, said)
    if number.seeds is None:
        said = f"{arm} against {base}: no winner is named, since {number.no_seeds}"
        return Decision(arm, base, None, False, said, number)
    rule: dict[str, Any] = outcome.status.plan.latest.document["decision"]
    p = number.p_adjusted
    agrees = p is not None and p < 1 - rule["confidence"] and number.seeds.excludes_zero
    if not agrees:
        said = f"{arm} is not distinguishable from {base} at this budget"
        return Decision(arm, base, None, False, said, number)
    if abs(number.difference) < rule["smallest_difference"]:
        said = f"{arm} differs from {base} by less than the plan counts"
        return Decision(arm, base, None, False, said, number)
    better = arm if number.difference < 0 else base
    worse = base if better == arm else arm
    return Decision(arm, base, better, False, f"{better} is better than {worse}", number)


def _has_runs(outcome: StudyResult, arm: str) -> bool:
    states = outcome.status.states
    return any(state.planned.arm == arm and state.state == "finished" for state in states)
