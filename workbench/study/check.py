"""`wb study check`: whether a study's plan can answer its question, before any compute is spent.

Every pair of arms is judged by the rules of `wb check`. A plan holds only where arms differ in the
treatment and in nothing else that a rule guards; total parameters, which never follow from
anything, may differ and are shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from workbench.compare import Check, check_specs
from workbench.compare.rules import Ruling
from workbench.core.schedules import is_evaluated
from workbench.errors import Fault, RefusedError, UserError, did_you_mean
from workbench.foresee import foresee
from workbench.spec.checklist import Claim
from workbench.spec.foreseen import Foreseen
from workbench.spec.held_out import STATUSES, logged_name
from workbench.spec.run import RunSpec
from workbench.study.spec import Study
from workbench.track.journal import kinds_of
from workbench.track.store import Store

# Differences that are shown and never refuse a plan: a study is not decided by throughput.
SHOWN_RULES = ("parameters", "interval")
_NO_INTERVAL = ("perplexity",)  # of these a mean over seeds means nothing


@dataclass(frozen=True)
class Pair:
    """Two arms of a study, judged by their specs."""

    a: str
    b: str
    check: Check

    @property
    def beyond(self) -> tuple[Ruling, ...]:
        """The rules by which the two differ in more than the treatment."""
        rulings = self.check.judgement.rules
        return tuple(one for one in rulings if one.counted and one.rule not in SHOWN_RULES)

    @property
    def is_refused(self) -> bool:
        """Whether the plan does not hold with these two arms."""
        return bool(self.beyond) or self.check.verdict == "refused"

    def to_json(self) -> dict[str, Any]:
        """As `wb study check --json` prints it."""
        return {"a": self.a, "b": self.b, "refused": self.is_refused, **self.check.to_json()}


@dataclass(frozen=True)
class StudyCheck:
    """All pairs of arms of a valid study."""

    study: Study
    pairs: tuple[Pair, ...]
    tokens: int | None  # consumed at the point that decides; None: the last common one
    parameters: Mapping[str, int | None]  # of each arm

    @property
    def refused(self) -> tuple[Pair, ...]:
        """The pairs that the plan does not hold with."""
        return tuple(pair for pair in self.pairs if pair.is_refused)

    @property
    def verdict(self) -> str:
        """The worst of all pairs."""
        if self.refused:
            return "refused"
        flagged = any(pair.check.verdict == "flagged" for pair in self.pairs)
        return "flagged" if flagged else "comparable"

    def require(self) -> None:
        """Does nothing where the plan holds.

        Raises:
            RefusedError: with a fault for each rule and difference that is not the treatment.
        """
        if self.refused:
            raise RefusedError(*refusals(self))

    def to_json(self) -> dict[str, Any]:
        """The document that `wb study check --json` prints; strict JSON."""
        spec = self.study.spec
        return {
            "study": self.study.name,
            "verdict": self.verdict,
            "treatment": list(spec.treatment),
            "arms": {arm: {"parameters": total} for arm, total in self.parameters.items()},
            "seeds": list(spec.seeds),
            "contrasts": [pair.model_dump(mode="json") for pair in spec.contrasts],
            "runs": [run.name for run in self.study.runs],
            "primary": {"metric": spec.primary.metric, "tokens": self.tokens},
            "decision": spec.decision.model_dump(mode="json"),
            "pairs": [pair.to_json() for pair in self.pairs],
        }


def claim_of(metric: str) -> Claim:
    """What a comparison by this metric claims."""
    return "bpb" if metric.endswith("/bits_per_byte") else "nll"


def check_study(study: Study, store: Store) -> StudyCheck:
    """Judges all pairs of arms, under the first seed: the other seeds change nothing else.

    Raises:
        UserError: two arms come to the same spec, the treatment names nothing, the primary metric
            is logged by no run, or its point is no evaluation point of every arm; or the data of an
            arm cannot be read.
    """
    specs = study.arm_specs
    faults = [*_twins(study), *_point_faults(study)]
    foreseen = {arm: _foreseen(study, arm, spec, store) for arm, spec in specs.items()}
    faults += _metric_faults(study, foreseen)
    if faults:
        raise UserError(*faults)
    claim = claim_of(study.spec.primary.metric)
    pairs = []
    for a, b in combinations(specs, 2):
        try:
            judged = check_specs(
                specs[a],
                specs[b],
                foreseen[a],
                foreseen[b],
                treatment=study.spec.treatment,
                claims=[claim],
            )
        except UserError as error:
            raise UserError(*(_in_the_file(fault, study) for fault in error.faults)) from None
        pairs.append(Pair(a, b, judged))
    totals = {arm: one.facts.get("effective.parameters.total") for arm, one in foreseen.items()}
    return StudyCheck(study, tuple(pairs), decisive_tokens(study), totals)


def refusals(check: StudyCheck) -> list[Fault]:
    """Of every difference beyond the treatment, a fault with the values of the arms."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for pair in check.refused:
        rulings = pair.beyond or tuple(
            one for one in pair.check.judgement.rules if one.over(pair.check.asked) == "refused"
        )
        for ruling in rulings:
            for leaf in ruling.counted or ruling.leaves:
                values = found.setdefault((ruling.rule, leaf.path), {})
                values |= {pair.a: leaf.a, pair.b: leaf.b}
    treatment = ", ".join(check.study.spec.treatment)
    return [
        Fault(
            f"{check.study.place('arms')}: {path}",
            f"arms differ in more than the treatment ({treatment}): {_by_value(values)}"
            f" (rule {rule})",
            None,
            f"one value in every arm, or the treatment declared with it (rule:{rule})",
        )
        for (rule, path), values in found.items()
    ]


def decisive_tokens(study: Study) -> int | None:
    """Tokens consumed at the point that decides; None: where no point is named."""
    point, spec = study.spec.primary, next(iter(study.arm_specs.values()))
    return point.step * spec.tokens_per_step if point.step else point.tokens


def _twins(study: Study) -> list[Fault]:
    """Arms that would train the same runs."""
    seen: dict[str, str] = {}
    faults = []
    for arm, spec in study.arm_specs.items():
        document = spec.model_dump(mode="json", exclude={"name", "notes", "tracking", "checkpoint"})
        document["model"].pop("profile")
        key = json.dumps(document, sort_keys=True)
        if key in seen:
            message = f"the arms {seen[key]} and {arm} come to the same spec"
            place = study.place(f"arms.{arm}")
            faults.append(Fault(place, message, None, "arms that differ in the treatment"))
        seen.setdefault(key, arm)
    return faults


def _point_faults(study: Study) -> list[Fault]:
    """What is wrong with the evaluation point that is to decide."""
    point = study.spec.primary
    field = "primary.step" if point.step is not None else "primary.tokens"
    rates = {spec.tokens_per_step for spec in study.arm_specs.values()}
    if point.step is not None and len(rates) > 1:
        message = f"the arms take {_listed(sorted(rates))} tokens a step: a step is no common point"
        return [Fault(study.place(field), message, point.step, "primary.tokens")]
    tokens = decisive_tokens(study)
    if tokens is None:
        return []
    faults = []
    for arm, spec in study.arm_specs.items():
        if spec.end_tokens is None:
            continue  # to the end of a stream
        step, rest = divmod(tokens, spec.tokens_per_step)
        last = spec.end_tokens // spec.tokens_per_step
        if rest or step > last or not is_evaluated(spec, step, last):
            every = spec.evaluation.eval_steps
            points = sorted({*(range(every, last + 1, every) if every else ()), last})
            per = 1 if point.step is not None else spec.tokens_per_step
            message = f"the arm {arm} is not evaluated there"
            allowed = _listed([one * per for one in points])
            value = point.step if point.step is not None else point.tokens
            faults.append(Fault(study.place(field), message, value, allowed))
    return faults


def _foreseen(study: Study, arm: str, spec: RunSpec, store: Store) -> Foreseen:
    try:
        return foresee(spec, store)
    except UserError as error:
        at = study.place(f"arms.{arm}")
        faults = [
            Fault(f"{at}: {one.place}", one.message, one.value, one.allowed) for one in error.faults
        ]
        raise type(error)(*faults) from None


def _metric_faults(study: Study, foreseen: Mapping[str, Foreseen]) -> list[Fault]:
    """Whether every arm logs the primary metric, by the name that its set has earned."""
    metric, place = study.spec.primary.metric, study.place("primary.metric")
    faults = []
    for arm, spec in study.arm_specs.items():
        names = metrics_of(spec, foreseen[arm])
        if metric not in names:
            message = f"no run of the arm {arm} logs this metric.{did_you_mean(metric, names)}"
            faults.append(Fault(place, message.rstrip("."), metric, ", ".join(names)))
    every = {fault.allowed for fault in faults}
    if len(faults) == len(study.arm_specs) and len(every) == 1:
        hint = did_you_mean(metric, metrics_of(next(iter(study.arm_specs.values())), foreseen[arm]))
        message = f"no run logs this metric.{hint}".rstrip(".")
        return [Fault(place, message, metric, faults[0].allowed)]
    return faults


def metrics_of(spec: RunSpec, foreseen: Foreseen) -> list[str]:
    """The numbers of its evaluation sets that a run of the spec will log, as far as is known."""
    names = []
    for asked in spec.evaluation.sets:
        known = foreseen.facts.get(f"effective.evaluation.{asked}.status")
        for status in (known,) if known else STATUSES:
            logged = logged_name(asked, status)
            names += [f"{logged}/{kind}" for kind in kinds_of(logged) if kind not in _NO_INTERVAL]
    return list(dict.fromkeys(names))


def _in_the_file(fault: Fault, study: Study) -> Fault:
    """A fault of the treatment, with its place in the study file."""
    place = study.place("treatment") if fault.place == "--treatment" else fault.place
    return Fault(place, fault.message, fault.value, fault.allowed)


def _by_value(values: Mapping[str, Any]) -> str:
    """Such as "'adamw' in a, b; 'muon_tr' in c"."""
    arms: dict[str, list[str]] = {}
    for arm, value in values.items():
        arms.setdefault(json.dumps(value, sort_keys=True, default=str), []).append(arm)
    shown = {value if len(value) <= 60 else f"{value[:57]}...": who for value, who in arms.items()}
    return "; ".join(f"{value} in {', '.join(who)}" for value, who in shown.items())


def _listed(numbers: list[int]) -> str:
    """Numbers in words; the middle of many is left out."""
    words = [f"{number:,}" for number in numbers]
    if len(words) > 8:
        words = [*words[:3], "...", *words[-2:]]
    return ", ".join(words)


def render(check: StudyCheck) -> str:
    """A study that is valid, for the terminal."""
    study, spec = check.study, check.study.spec
    point = f"at {check.tokens:,} tokens" if check.tokens else "at the last common point"
    arms, seeds = len(spec.arms), len(spec.seeds)
    lines = [
        f"{check.verdict.upper()}: {study.name}, {arms} arms x {seeds} seeds = "
        f"{len(study.runs)} runs",
        f"treatment: {', '.join(spec.treatment)}",
        f"decided by: {decision_words(study)}, {point}",
        *(f"contrast: {pair.arm} against {pair.against}" for pair in spec.contrasts),
        "",
        *_arm_lines(check),
        "",
    ]
    flagged = [pair for pair in check.pairs if pair.check.verdict == "flagged"]
    told = f"{len(check.pairs)} pairs of arms: {len(check.pairs) - len(flagged)} comparable"
    if flagged:
        rules = {
            ruling.rule
            for pair in flagged
            for ruling in pair.check.judgement.rules
            if ruling.over(pair.check.asked) == "flagged"
        }
        told += f", {len(flagged)} flagged (rule {', '.join(sorted(rules))})"
    lines.append(told)
    if seeds == 1:
        lines.append("one seed an arm: nothing can be said about seed noise, no winner is named")
    return "\n".join(lines)


def decision_words(study: Study) -> str:
    """The decision rule of a study as a part of a sentence."""
    decision, metric = study.spec.decision, study.spec.primary.metric
    text = f"{metric}, {decision.confidence * 100:g} % intervals over paired seeds"
    if decision.smallest_difference:
        text += f", differences below {decision.smallest_difference:g} not counted"
    return text


def _arm_lines(check: StudyCheck) -> list[str]:
    width = max(map(len, check.parameters))
    return [
        f"  {arm:{width}}  {'unknown' if total is None else f'{total:,}'} parameters"
        for arm, total in check.parameters.items()
    ]
