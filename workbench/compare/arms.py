"""Compares arms of several seeds: every arm with the baseline, and further pairs where planned.

comparison = compare_arms({"mha": [...], "gqa": [...]}, treatment=["model"])
comparison.pairs[0].results.numbers["held_out/nll"].seeds.interval
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.compare.arm_results import ArmNumber, ArmResults, Values, arm_results
from workbench.compare.arm_rules import Judged, SeedSets, judge_arms, worst_verdict
from workbench.compare.evidence import check_record
from workbench.compare.facts import Facts, facts_of_record
from workbench.compare.held_out import SMOKE_TEST
from workbench.compare.measurements import RunData, read_run
from workbench.compare.pair import Side, document, exit_of, not_finite, refusing, require_ended
from workbench.compare.pair import points as points_of
from workbench.compare.rules import Judgement, Verdict, check_claims
from workbench.compare.seeds import bonferroni_level, holm
from workbench.compare.sentences import main_name
from workbench.compare.stats import LEVEL
from workbench.errors import Fault, UserError
from workbench.spec.checklist import CLAIMS, Claim
from workbench.spec.held_out import is_smoke_test
from workbench.track.record import Status, read_record, strict


@dataclass(frozen=True)
class Arm:
    """One arm: its runs in the order of their seeds, and how many other runs tuned its model."""

    name: str
    runs: tuple[Side, ...]
    data: tuple[RunData, ...] = field(repr=False)
    tuning: int | None = None

    @property
    def seeds(self) -> tuple[Any, ...]:
        """The seed of each run."""
        return tuple(side.record.spec.get("seed") for side in self.runs)

    def evaluations(self, tokens: int | None) -> tuple[int, ...]:
        """How often each run was evaluated up to a point, its start left out."""
        return tuple(
            sum(1 for point in side.record.points if 0 < point.tokens <= (tokens or point.tokens))
            for side in self.runs
        )

    def to_json(self) -> dict[str, Any]:
        """Who the runs of the arm are."""
        runs = [{"id": side.record.id, "name": side.record.name} for side in self.runs]
        return {"runs": runs, "seeds": list(self.seeds), "tuning_runs": self.tuning}


@dataclass(frozen=True)
class ArmPair:
    """One arm against the baseline or another (`a`): the verdict, and the numbers it permits."""

    a: Arm
    b: Arm
    judgement: Judgement
    seeds: SeedSets
    asked: tuple[Claim, ...]
    facts: tuple[Facts, Facts]
    results: ArmResults | None
    primary: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        """What the two arms are called."""
        return self.a.name, self.b.name

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the claims asked for."""
        return self.judgement.verdict(self.asked)

    @property
    def deciding(self) -> tuple[str, ...]:
        """The numbers by which a winner may be named: one for each claim asked for."""
        if self.results is None:
            return ()
        shown = [name for name, one in self.results.numbers.items() if _is_shown(one)]
        if self.primary is not None:
            return (self.primary,) if self.primary in shown else ()
        refused = refusing(self.judgement)
        names = [main_name(shown, claim) for claim in self.asked if claim not in refused]
        return tuple(name for name in names if name is not None)

    def to_json(self) -> dict[str, Any]:
        """Verdict, rules and results, as `wb compare --json` prints them for two runs."""
        found = document(self.judgement, self.asked, self.names)
        numbers = None
        if self.results is not None:
            numbers = {name: number.to_json() for name, number in self.results.numbers.items()}
        names = {"a": self.a.name, "b": self.b.name, "design": self.seeds.design}
        return found | names | {"deciding": list(self.deciding), "results": strict(numbers)}


@dataclass(frozen=True)
class ArmsComparison:
    """Every arm against the baseline, then the contrasts, at one point that all runs have.

    `at` is the token count compared, None when the runs have no evaluation point in common; `level`
    is that of all intervals together, `family` the number of comparisons that it is shared by.
    """

    arms: tuple[Arm, ...]
    baseline: Arm
    pairs: tuple[ArmPair, ...]
    asked: tuple[Claim, ...]
    at: int | None
    at_given: bool
    level: float
    primary: str | None = None
    report: Path | None = None
    family: int = 1

    @property
    def contrasts(self) -> tuple[ArmPair, ...]:
        """The pairs that the baseline is no part of."""
        return tuple(pair for pair in self.pairs if pair.a is not self.baseline)

    def pair(self, arm: str, against: str) -> ArmPair | None:
        """The comparison of an arm with another; None: it is not one of this."""
        named = (one for one in self.pairs if one.names == (against, arm))
        return next(named, None)

    @property
    def names(self) -> tuple[str, ...]:
        """What the arms are called, the baseline first."""
        return tuple(arm.name for arm in (self.baseline, *self.others))

    @property
    def others(self) -> tuple[Arm, ...]:
        """The arms that are compared with the baseline."""
        return tuple(arm for arm in self.arms if arm is not self.baseline)

    @property
    def claims(self) -> dict[Claim, Verdict]:
        """The worst verdict of all pairs for each claim."""
        return {
            claim: worst_verdict([pair.judgement.claims[claim] for pair in self.pairs])
            for claim in CLAIMS
        }

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all pairs, of the claims asked for."""
        return worst_verdict([pair.verdict for pair in self.pairs])

    @property
    def key(self) -> str:
        """SHA-256 of what was compared and how; the report of another key is never replaced."""
        judgement = self.pairs[0].judgement
        what: dict[str, Any] = {
            "arms": {arm.name: [side.record.id for side in arm.runs] for arm in self.arms},
            "baseline": self.baseline.name,
            "treatment": [] if judgement.inferred else sorted(judgement.treatment),
            "allow": judgement.allow,
            "at": self.at if self.at_given else None,
            "claims": list(self.asked),
            "level": self.level,
            "primary": self.primary,
        }
        if self.contrasts:
            what["contrasts"] = [pair.names for pair in self.contrasts]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def exit_code(self, strict: bool = False) -> int:
        """0 comparable or flagged, 1 flagged with `strict`, 3 refused."""
        return exit_of(self.verdict, strict)

    def to_json(self) -> dict[str, Any]:
        """The document that `wb compare --json` prints; strict JSON.

        Of two arms it is that of their pair, with the arms beside it; of more, `pairs` holds one
        for each arm that is not the baseline.
        """
        arms = {arm.name: arm.to_json() for arm in self.arms}
        about = {"arms": arms, "baseline": self.baseline.name, "at": self.at, "level": self.level}
        about["report"] = str(self.report) if self.report else None
        pairs = [pair.to_json() for pair in self.pairs]
        if len(pairs) == 1:
            return pairs[0] | about
        whole = {"verdict": self.verdict, "claims": self.claims, "asked": list(self.asked)}
        whole |= {key: pairs[0][key] for key in ("treatment", "ruleset")}
        return whole | about | {"pairs": pairs}

    def _repr_html_(self) -> str:
        from workbench.compare import page, shown

        return page.fragment(shown.of_arms(self))

    def _repr_markdown_(self) -> str:
        from workbench.compare import markdown, shown

        return markdown.render(shown.of_arms(self))


def compare_arms(
    arms: Mapping[str, Sequence[Path | str]],
    *,
    baseline: str | None = None,
    contrasts: Sequence[tuple[str, str]] = (),
    family: int | None = None,
    treatment: Sequence[str] = (),
    allow: Mapping[str, str] | None = None,
    claims: Iterable[str] = ("nll",),
    at: int | None = None,
    primary: str | None = None,
    level: float = LEVEL,
    planned: Mapping[str, Sequence[int]] | None = None,
    tuning: Mapping[str, int] | None = None,
    statuses: Mapping[Path, Status] | None = None,
    over_documents: bool = True,
) -> ArmsComparison:
    """Compares arms of finished runs, every one with the baseline, and the contrasts.

    Args:
        arms: name -> the folders of its runs, one for each seed; two arms or more.
        baseline: the arm that the others are compared with; by default the first. Differences are
            the other arm minus the baseline.
        contrasts: further pairs of arms, (against, arm): the second is compared with the first.
        family: how many comparisons were planned, where not all of them can be made now: intervals
            and p are adjusted for all of them.
        treatment: what is meant to differ: spec fields or sections, `rule:X` for a whole rule.
        allow: rule -> reason; turns a refusal by that rule into a flag.
        claims: what the comparison is used for; these alone set the verdict.
        at: the token count to compare at; by default the last where all runs were evaluated.
        primary: the number that decides, such as `held_out/nll`; by default that of each claim.
        level: of all intervals of the deciding number together.
        planned: arm -> the seeds it was planned with; one that is left out refuses.
        tuning: arm -> how many other runs there are of its model.
        statuses: folder -> the status of its run now, where the caller knows better than the record
            (a run that died still says RUNNING).
        over_documents: whether to draw the intervals over documents too, which decide nothing, and
            to read and check the scores of every evaluation, which takes longest; else those of the
            point compared alone.

    Raises:
        UserError: there are fewer than two arms or an empty one, a folder holds no run record, a
            run stands twice or is still going, an option names nothing, `at` is no common point, or
            record, metrics and scores are damaged or contradict one another.
    """
    asked = check_claims(claims)
    _check_names(arms, baseline, planned, tuning, *(dict.fromkeys(c) for c in contrasts))
    sides = {name: _sides(folders, statuses or {}) for name, folders in arms.items()}
    _check_runs(sides)
    every = [side for group in sides.values() for side in group]
    for side in every:
        check_record(side.folder, side.record)
    tokens = _common_point(every, at)
    scored_at = None if over_documents else () if tokens is None else (tokens,)
    data = {id(side): read_run(side.folder, side.record, scored_at) for side in every}
    facts = _facts(every, data, tokens)

    built = {
        name: Arm(name, group, tuple(data[id(side)] for side in group), (tuning or {}).get(name))
        for name, group in sides.items()
    }
    base = built[baseline] if baseline is not None else next(iter(built.values()))
    others = [arm for arm in built.values() if arm is not base]
    compared = [(base, other) for other in others]
    compared += [(built[against], built[arm]) for against, arm in contrasts]
    family = max(len(compared), family or 0)
    adjusted = bonferroni_level(family, level)
    pairs = []
    for one, other in compared:
        judged = [[Judged(side.name, facts[id(side)]) for side in arm.runs] for arm in (one, other)]
        plans = [(planned or {}).get(arm.name) for arm in (one, other)]
        judgement, sets = judge_arms(
            judged[0],
            judged[1],
            treatment=treatment,
            allow=allow,
            planned=(plans[0], plans[1]),
        )
        results = None
        if tokens is not None and any(judgement.claims[claim] != "refused" for claim in asked):
            blanked = refusing(judgement)
            if any(is_smoke_test(side.record.spec) for side in (*one.runs, *other.runs)):
                blanked |= dict.fromkeys(("nll", "bpb"), SMOKE_TEST)  # whatever is allowed
            results = arm_results(
                one.data, other.data, tokens, blanked, sets.design, adjusted, over_documents
            )
        shown = tuple({**runs[0].facts, "seed": _seeds_shown(runs)} for runs in judged)
        pairs.append(
            ArmPair(one, other, judgement, sets, asked, (shown[0], shown[1]), results, primary)
        )
    arms_in_order = tuple(built.values())
    decided = _decided(pairs, family)
    given = at is not None
    return ArmsComparison(
        arms_in_order, base, decided, asked, tokens, given, level, primary, family=family
    )


def _check_names(
    arms: Mapping[str, Sequence[Path | str]],
    baseline: str | None,
    *by_arm: Mapping[str, Any] | None,
) -> None:
    named = ", ".join(arms)
    faults = []
    if len(arms) < 2:
        faults.append(Fault("arms", "one arm is compared with nothing", named, "two or more"))
    faults += [
        Fault(f"arm {name}", "there are no runs in it", None, "one run for each seed")
        for name, folders in arms.items()
        if not folders
    ]
    if baseline is not None and baseline not in arms:
        faults.append(Fault("--baseline", "there is no such arm", baseline, named))
    for values in by_arm:
        for name in values or {}:
            if name not in arms:
                faults.append(Fault("arms", "there is no such arm", name, named))
    if faults:
        raise UserError(*faults)


def _sides(folders: Sequence[Path | str], statuses: Mapping[Path, Status]) -> tuple[Side, ...]:
    """The runs of an arm, in the order of their seeds."""
    sides = []
    for folder in map(Path, folders):
        record = read_record(folder)
        status = statuses.get(folder, record.status)
        record = record.model_copy(update={"status": status})
        sides.append(Side(record.name, folder, record, status))
    return tuple(sorted(sides, key=lambda side: (str(type(_seed(side))), _seed(side), side.name)))


def _seed(side: Side) -> Any:
    seed = side.record.spec.get("seed")
    return seed if isinstance(seed, int | str) else str(seed)


def _check_runs(sides: dict[str, tuple[Side, ...]]) -> None:
    """Every run stands once, has ended, and has a name of its own."""
    seen: dict[str, str] = {}
    names: dict[str, int] = {}
    for arm, group in sides.items():
        for side in group:
            require_ended(side)
            for key in (side.record.id, str(side.folder.resolve())):
                if key in seen:
                    message = f"this is the same run twice, in {seen[key]} and {arm}"
                    raise UserError.at(str(side.folder), message, side.record.id, "another run")
            seen |= dict.fromkeys((side.record.id, str(side.folder.resolve())), arm)
            names[side.name] = names.get(side.name, 0) + 1
    for arm, group in sides.items():
        sides[arm] = tuple(
            replace(side, name=f"{side.name} ({side.record.id[:8]})")
            if names[side.name] > 1
            else side
            for side in group
        )


def _common_point(sides: Sequence[Side], at: int | None) -> int | None:
    common = set.intersection(*(set(points_of(side.record)) for side in sides))
    if at is not None and at not in common:
        allowed = ", ".join(map(str, sorted(common)))
        allowed = allowed or "the runs have no evaluation point in common"
        raise UserError.at("--at", "all runs must have been evaluated there", at, allowed)
    return at if at is not None else max(common, default=None)


def _facts(
    sides: Sequence[Side], data: Mapping[int, RunData], tokens: int | None
) -> dict[int, dict[str, Any]]:
    """The facts of every run at the point, with what is not finite there."""
    facts = {}
    unknown: dict[int, dict[str, None]] = {}
    for side in sides:
        point = points_of(side.record)[tokens] if tokens else None
        facts[id(side)] = facts_of_record(side.record, point)
        unknown[id(side)] = not_finite(data[id(side)], tokens) if tokens else {}
    known = dict.fromkeys((leaf for leaves in unknown.values() for leaf in leaves), True)
    return {key: {**found, **known, **unknown[key]} for key, found in facts.items()}


def _seeds_shown(runs: Sequence[Judged]) -> Any:
    seeds = [run.facts.get("seed") for run in runs]
    return seeds[0] if len(seeds) == 1 else seeds


def _decided(pairs: Sequence[ArmPair], family: int) -> tuple[ArmPair, ...]:
    """The pairs with their adjusted p and winners: of each number that decides, over all pairs.

    A pair without a test, or that is not there, counts in the adjustment as one that found nothing.
    """
    found = list(pairs)
    for name in dict.fromkeys(name for pair in pairs for name in pair.deciding):
        tested = [
            (index, number.seeds.p)
            for index, pair in enumerate(pairs)
            if pair.results is not None
            and name in pair.deciding
            and (number := pair.results.numbers[name]).seeds is not None
        ]
        adjusted = holm([p for _, p in tested], family=family)
        for (index, _), p in zip(tested, adjusted, strict=True):
            results = found[index].results
            assert results is not None
            numbers = {**results.numbers, name: results.numbers[name].decided(name, p)}
            found[index] = replace(found[index], results=replace(results, numbers=numbers))
    return tuple(found)


def _is_shown(number: ArmNumber) -> bool:
    """Whether both arms have the number, under every seed."""
    return number.blank is None and not _lacks(number.a) and not _lacks(number.b)


def _lacks(values: Values) -> bool:
    return not values or any(value is None for value in values)
