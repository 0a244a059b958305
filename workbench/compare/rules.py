"""The judge: which differences between two fact mappings count, and what they do to each claim.

Everything here is a pure function of facts, a declared treatment and allowances. What a rule guards
and what explains a difference stands in the tags of `workbench.spec.checklist`.

A differing leaf *follows* when another differing leaf explains it and that one is itself studied,
counted, or follows: it is then listed, and counts once, there. Leaves that explain each other in a
circle all count: no difference can hide behind one that hides behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from glob import escape
from typing import Any, Literal, get_args

from workbench.compare.budgets import BYTES, COUNTED
from workbench.compare.declared import FINISHED, check_allow, declared_leaves
from workbench.compare.facts import (
    PROOF,
    Facts,
    all_leaves,
    equal_in_effect,
    known_at,
    same,
    set_of,
    value_of,
)
from workbench.errors import Fault, UserError, did_you_mean
from workbench.spec.checklist import (
    CLAIMS,
    RULES,
    RULESET_VERSION,
    Claim,
    Effect,
    Tag,
    matches,
    tag_of,
)

Outcome = Literal["match", "not yet known", "follows", "studied", "missing", "differs"]
Verdict = Literal["comparable", "flagged", "refused"]
Planned = tuple[bool, bool]

_SEVERITY: tuple[Outcome, ...] = get_args(Outcome)
_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_COUNTED = ("differs", "missing")
_UNKNOWN = ("missing", "not yet known")

# Shown with both values also where they match.
_ALWAYS_SHOWN = "effective.parameters.total"


@dataclass(frozen=True)
class Leaf:
    """One value of each side, and what was made of the pair.

    `follows` names the leaves that explain a difference; `asked` the requested settings that differ
    and become this leaf. Of arms, `runs` are the two that differ where not all pairs do, and `note`
    says what was found.
    """

    path: str
    rule: str
    outcome: Outcome
    a: Any
    b: Any
    follows: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    runs: tuple[str, str] | None = None
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether the leaf has its rule's effect."""
        return self.outcome in _COUNTED


@dataclass(frozen=True)
class Ruling:
    """One rule's outcome for this pair, and its effect on each claim (None: none).

    `leaves` are those that do not match, and those that are shown nonetheless.
    """

    rule: str
    outcome: Outcome
    leaves: tuple[Leaf, ...]
    effects: dict[Claim, Effect | None]
    allowed: str | None = None  # the reason for which a refusal became a flag
    inferred: bool = False  # the treatment was taken from the differences, not declared
    unproven: tuple[str, ...] = ()  # sets that neither run has shown to be held out
    both_best: bool = False  # both runs stand for a checkpoint chosen by its own result

    @property
    def counted(self) -> tuple[Leaf, ...]:
        """The leaves that have the rule's effect."""
        return tuple(leaf for leaf in self.leaves if leaf.counts)

    def over(self, claims: Iterable[Claim]) -> Verdict:
        """The worst this rule does to any of the claims."""
        return _worst(_verdict_of(self.effects[claim]) for claim in claims)


@dataclass(frozen=True)
class Judgement:
    """Every rule's outcome, in the order of the checklist."""

    rules: tuple[Ruling, ...]
    treatment: tuple[str, ...]
    inferred: bool
    allow: dict[str, str]
    planned: Planned  # which of the two have yet to run
    asked: tuple[Leaf, ...] = ()  # requested settings that differ; judged by what they became
    ruleset: int = field(default=RULESET_VERSION)

    @cached_property
    def claims(self) -> dict[Claim, Verdict]:
        """The verdict for each claim."""
        return {claim: _worst(rule.over([claim]) for rule in self.rules) for claim in CLAIMS}

    def verdict(self, claims: Iterable[Claim]) -> Verdict:
        """The worst verdict of the claims asked for."""
        return _worst(self.claims[claim] for claim in claims)

    def ruling(self, rule: str) -> Ruling:
        """The outcome of one rule."""
        return next(ruling for ruling in self.rules if ruling.rule == rule)

    def with_outcome(self, *outcomes: Outcome) -> list[Leaf]:
        """The leaves with one of these outcomes, in the order of the checklist."""
        return [leaf for rule in self.rules for leaf in rule.leaves if leaf.outcome in outcomes]


def judge(
    a: Facts,
    b: Facts,
    *,
    treatment: Sequence[str] = (),
    allow: Mapping[str, str] | None = None,
    planned: Planned = (False, False),
) -> Judgement:
    """Judges two fact mappings.

    Args:
        treatment: spec fields or sections that are meant to differ; `rule:X` for a whole rule.
        allow: rule -> reason; turns its refusals into flags.
        planned: which of the two are specs: an effective leaf that such a mapping leaves out is
            not yet known, and without effect. A leaf that is there and None will never be known.

    Raises:
        UserError: a treatment or an allowance names nothing, or gives no reason.
    """
    allow = dict(allow or {})
    check_allow(allow)
    leaves = all_leaves(a, b)
    declared = declared_leaves(treatment, leaves)
    inferred = False
    judged = _judge_leaves(a, b, leaves, declared, planned)
    model = {leaf.path for leaf in judged if leaf.outcome == "differs" and _is_of_model(leaf.path)}
    if model and not treatment:
        as_treatment = _judge_leaves(a, b, leaves, model, planned)
        if _is_confined(as_treatment):
            judged, inferred = as_treatment, True

    rulings = tuple(
        _rule(name, [leaf for leaf in judged if leaf.rule == name], allow, inferred)
        for name in RULES
    )
    asked = tuple(
        Leaf(path, str(tag_of(path).rule), "differs", value_of(a, path)[1], value_of(b, path)[1])
        for path in leaves
        if tag_of(path).kind == "requested" and _asked_differs(a, b, path)
    )
    names = ("model",) if inferred else tuple(dict.fromkeys(treatment))
    return Judgement(rulings, names, inferred, allow, planned, asked)


def check_claims(claims: Iterable[str]) -> tuple[Claim, ...]:
    """The claims asked for, in the checklist's order; `nll` when there are none.

    Raises:
        UserError: one of them is unknown.
    """
    asked = list(claims) or ["nll"]
    faults = [
        Fault("--claim", f"unknown claim.{did_you_mean(name, CLAIMS)}", name, ", ".join(CLAIMS))
        for name in asked
        if name not in CLAIMS
    ]
    if faults:
        raise UserError(*faults)
    return tuple(claim for claim in CLAIMS if claim in asked)


def _judge_leaves(
    a: Facts, b: Facts, leaves: Sequence[str], treatment: set[str], planned: Planned
) -> list[Leaf]:
    """Every judged leaf with its outcome."""
    tags = {path: tag_of(path) for path in leaves}
    outcomes: dict[str, Outcome] = {
        path: _compare(a, b, path, planned) for path, tag in tags.items() if tag.kind == "judged"
    }
    asked = {
        path: tag
        for path, tag in tags.items()
        if tag.kind == "requested" and _asked_differs(a, b, path)
    }
    differing = [path for path, outcome in outcomes.items() if outcome == "differs"]
    in_one = {path for path in differing if None in (a.get(path), b.get(path))}
    unknown = [path for path, outcome in outcomes.items() if outcome in _UNKNOWN]
    explain = _Explanations(tags, asked, differing, treatment, in_one, unknown)
    outcomes |= explain.outcomes
    follows = {path: explain.roots(path) for path in explain.outcomes}
    for path, outcome in outcomes.items():
        if outcome == "not yet known" and (roots := explain.roots(path)):
            outcomes[path], follows[path] = "follows", roots
    return [
        Leaf(
            path,
            str(tags[path].rule),
            outcome,
            value_of(a, path)[1],
            value_of(b, path)[1],
            follows[path] if outcome == "follows" else (),
            tuple(name for name, tag in asked.items() if matches(path, tag.becomes)),
        )
        for path, outcome in outcomes.items()
    ]


class _Explanations:
    """Which differing leaf is studied, which follows from which, and which counts.

    A leaf is decided once everything that could explain it is decided. What is left in circles
    follows if something decided explains it, and counts otherwise.
    """

    def __init__(
        self,
        tags: dict[str, Tag],
        asked: dict[str, Tag],
        differing: list[str],
        treatment: set[str],
        in_one: set[str],
        unknown: list[str],
    ) -> None:
        """`in_one` are the settings that only one of the two has."""
        self._tags, self._asked, self._differing, self._in_one = tags, asked, differing, in_one
        self._unknown = unknown
        self.outcomes: dict[str, Outcome] = {
            path: "studied" for path in differing if path in treatment
        }
        pending = [path for path in differing if path not in self.outcomes]
        depends = {path: self._depends(path) for path in pending}
        while pending:
            ready = [path for path in pending if not depends[path] & set(pending)]
            ready = ready or [path for path in pending if self.roots(path)] or pending
            decided: dict[str, Outcome] = {
                path: "follows" if self.roots(path) else "differs" for path in ready
            }
            self.outcomes |= decided
            pending = [path for path in pending if path not in decided]

    def roots(self, path: str) -> tuple[str, ...]:
        """The decided leaves, and requested settings that count or are studied, that explain it."""
        follows, _ = self._patterns(path)
        return tuple(
            name
            for name in self._candidates(path)
            if self._is_grounded(name, only_studied=not matches(name, follows))
        )

    def _candidates(self, path: str) -> list[str]:
        known = [*self._asked, *self._differing]
        unless = self._tags[path].unless
        if unless and any(matches(name, unless) for name in (*known, *self._unknown)):
            return []
        follows, under = self._patterns(path)
        return [name for name in known if name != path and matches(name, (*follows, *under))]

    def _patterns(self, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        own_set = escape(set_of(path) or "")
        tag = self._tags[path]
        follows = tuple(name.replace("<set>", own_set) for name in tag.follows)
        return follows + (tag.exists_by if path in self._in_one else ()), tag.under

    def _is_grounded(self, name: str, *, only_studied: bool) -> bool:
        if name in self._asked:
            became = {self.outcomes.get(leaf) for leaf in self._became(name)}
            return "studied" in became or ("differs" in became and not only_studied)
        return self.outcomes.get(name) == "studied" if only_studied else name in self.outcomes

    def _became(self, name: str) -> list[str]:
        return [path for path in self._differing if matches(path, self._asked[name].becomes)]

    def _depends(self, path: str) -> set[str]:
        depends: set[str] = set()
        for name in self._candidates(path):
            depends.update(self._became(name) if name in self._asked else [name])
        return depends - {path}


def _compare(a: Facts, b: Facts, path: str, planned: Planned) -> Outcome:
    if path.endswith(f".{PROOF}") and set_of(path):
        return "missing"
    first, second = a.get(path), b.get(path)
    plain = type(first) is type(second) in (str, int, float) and path not in COUNTED
    if plain and first == second:
        return "match"  # of what follows, where nearly every leaf ends
    known = [known_at(facts, path) for facts in (a, b)]
    values = [value_of(facts, path)[1] for facts in (a, b)]
    if path == FINISHED and any(values[i] is not True for i in (0, 1) if known[i]):
        return "differs"  # also two that broke off
    if all(known):
        return "match" if equal_in_effect(a, b, path) else "differs"
    if (other := tag_of(path).instead_of) and _compare(a, b, other, planned) == "match":
        return "match"
    may_come = [
        is_plan and path.startswith("effective.") and not value_of(facts, path)[0]
        for facts, is_plan in zip((a, b), planned, strict=True)
    ]
    later = all(one or other for one, other in zip(known, may_come, strict=True))
    return "not yet known" if later else "missing"


def _asked_differs(a: Facts, b: Facts, path: str) -> bool:
    (present_a, value_a), (present_b, value_b) = value_of(a, path), value_of(b, path)
    return present_a != present_b or not same(value_a, value_b)


def _is_of_model(path: str) -> bool:
    return path.startswith("model.") and tag_of(path).rule == "model"


def _is_confined(judged: list[Leaf]) -> bool:
    """Whether nothing counts beside the model; total parameters are expected to differ with it."""
    beside = [leaf.path for leaf in judged if leaf.counts and leaf.path != _ALWAYS_SHOWN]
    unknown = any(leaf.path == _ALWAYS_SHOWN and leaf.outcome == "missing" for leaf in judged)
    return not beside and not unknown and any(leaf.outcome == "studied" for leaf in judged)


def _rule(name: str, judged: list[Leaf], allow: Mapping[str, str], inferred: bool) -> Ruling:
    rule = RULES[name]
    inferred = inferred and name == "model"
    found = {leaf.outcome for leaf in judged}
    if "match" in found:
        found.discard("not yet known")  # what is known matches; the rest is listed
    outcome: Outcome = max(found, key=_SEVERITY.index, default="match")
    differs = outcome in _COUNTED
    both_best = name == "evaluation" and any(
        leaf.path == "evaluation.select" and leaf.a == leaf.b == "best" for leaf in judged
    )
    unproven = tuple(
        leaf.path.removesuffix(".status")
        for leaf in judged
        if set_of(leaf.path) and leaf.path.endswith(".status") and leaf.a == leaf.b == "unproven"
    )
    effects: dict[Claim, Effect | None] = {}
    for claim in CLAIMS:
        effect = rule.effects.get(claim)
        another_unit = outcome in ("studied", "follows") and claim in rule.unit_of
        if differs or another_unit or inferred:
            effects[claim] = effect
        else:
            effects[claim] = "flag" if (both_best or unproven) and effect else None
    allowed = None
    if name in allow and "refuse" in effects.values():
        allowed = allow[name]
        effects = {claim: "flag" if effect else None for claim, effect in effects.items()}
    shown = tuple(leaf for leaf in judged if leaf.outcome != "match" or _is_shown(leaf))
    return Ruling(name, outcome, shown, effects, allowed, inferred, unproven, both_best)


def _is_shown(leaf: Leaf) -> bool:
    """Whether a leaf that matches is shown with both values: bytes may match and not be equal."""
    return leaf.path == _ALWAYS_SHOWN or (leaf.path == BYTES and not same(leaf.a, leaf.b))


def _verdict_of(effect: Effect | None) -> Verdict:
    if effect is None:
        return "comparable"
    return "refused" if effect == "refuse" else "flagged"


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_VERDICTS.index, default="comparable")
