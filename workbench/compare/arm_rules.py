"""The judge of two arms: every run against every other, and the seeds of the two as sets.

Within an arm the runs must match in all but the seed; across arms the checklist holds as for a pair
of runs. Runs whose judged facts are the same are judged once, for all of them: the judge is a pure
function of facts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, get_args

from workbench.compare.budgets import BYTES, COUNTED, TOKENS, same_in_bytes
from workbench.compare.facts import ORDER_DIGEST, Facts, same
from workbench.compare.rules import Judgement, Leaf, Outcome, Ruling, Verdict, judge
from workbench.compare.seeds import Design
from workbench.spec.checklist import CLAIMS, RULES, Claim, Effect, tag_of

SEED = "seed"

# What a run reads in another order under another seed.
_READ = (ORDER_DIGEST, BYTES)
_TOKENIZER = "effective.tokenizer.sha256"

# What an arm is: a difference in these within an arm leaves nothing that a mean could be of.
_IDENTITY = ("model", "parameters", "tokenizer")

_SEVERITY: tuple[Outcome, ...] = get_args(Outcome)
_WORST: tuple[Effect | None, ...] = (None, "flag", "refuse")


@dataclass(frozen=True)
class Judged:
    """One run as the judge sees it: its name, and its facts at the point compared."""

    name: str
    facts: Facts


@dataclass(frozen=True)
class SeedSets:
    """What the seeds of two arms permit: how they are paired, the outcome, and why."""

    design: Design
    outcome: Outcome
    effect: Effect | None
    why: str


def judge_arms(
    a: Sequence[Judged],
    b: Sequence[Judged],
    *,
    treatment: Sequence[str] = (),
    allow: Mapping[str, str] | None = None,
    planned: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
) -> tuple[Judgement, SeedSets]:
    """Judges all pairs of runs of two arms, and makes one judgement of it.

    A leaf that counts in some pairs only names the two runs; its rule's outcome and effects are the
    worst over all pairs.

    Args:
        planned: the seeds that each arm was planned with, where that is known.

    Raises:
        UserError: a treatment or an allowance names nothing, or gives no reason.
    """
    allow = dict(allow or {})
    across = _judge_pairs(a, b, list(product(a, b)), treatment, allow)
    within = [
        judged
        for arm in (a, b)
        for judged in _judge_pairs(arm, arm, list(combinations(arm, 2)), [SEED], allow)
    ]
    sets = seed_sets([one.facts for one in a], [one.facts for one in b], treatment, planned)
    rules = [_merged(name, across, within, allow) for name in RULES]
    seeds = _seeds_ruling(sets, a, b, allow, rules[list(RULES).index("seeds")])
    rules = [seeds if rule.rule == "seeds" else rule for rule in rules]
    asked = {leaf.path: leaf for one in across for leaf in one.judgement.asked}
    first = across[0].judgement
    inferred = next((one.judgement for one in across if one.judgement.inferred), first)
    names = tuple(dict.fromkeys(treatment)) or inferred.treatment
    whole = replace(
        first,
        rules=tuple(rules),
        treatment=names,
        inferred=inferred.inferred,
        asked=tuple(asked.values()),
    )
    return whole, sets


def seed_sets(
    a: Sequence[Facts],
    b: Sequence[Facts],
    treatment: Sequence[str] = (),
    planned: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
) -> SeedSets:
    """How the seeds of two arms stand to each other.

    The same set pairs. Disjoint sets of equal size, two or more, are flagged and not paired; as the
    treatment they are what is studied. A seed twice, a planned seed left out, sets that overlap in
    part or are of unequal size refuse, whatever is studied.
    """
    found = [[facts.get(SEED) for facts in arm] for arm in (a, b)]
    if any(seed is None for arm in found for seed in arm):
        return SeedSets("unpaired", "missing", "refuse", "a seed is not recorded")
    for arm in found:
        twice = [seed for seed in dict.fromkeys(arm) if arm.count(seed) > 1]
        if twice:
            said = f"seed {_listed(twice)} stands twice in one arm: a rerun is no further seed"
            return SeedSets("unpaired", "differs", "refuse", said)
    for arm, plan in zip(found, planned, strict=True):
        left_out = [seed for seed in plan or () if seed not in arm]
        if left_out:
            said = f"planned seed {_listed(left_out)} is left out"
            return SeedSets("unpaired", "differs", "refuse", said)
    first, second = set(found[0]), set(found[1])
    if first == second:
        return SeedSets("paired", "match", None, "the same seeds in both arms")
    listed = f"{{{_listed(sorted(first))}}} against {{{_listed(sorted(second))}}}"
    if len(first) != len(second):
        return SeedSets("unpaired", "differs", "refuse", f"unequal numbers of seeds: {listed}")
    if first & second:
        return SeedSets("unpaired", "differs", "refuse", f"seeds overlap in part: {listed}")
    if SEED in treatment or "rule:seeds" in treatment:
        return SeedSets("unpaired", "studied", None, f"{listed}: what is studied")
    if len(first) < 2:
        return SeedSets(
            "unpaired", "differs", "refuse", f"one seed each, and not the same: {listed}"
        )
    return SeedSets("unpaired", "differs", "flag", f"no seed in common, so not paired: {listed}")


@dataclass(frozen=True)
class _Pairs:
    """A judgement that holds for these pairs of runs, by name."""

    judgement: Judgement
    runs: tuple[tuple[str, str], ...]


def _judge_pairs(
    a: Sequence[Judged],
    b: Sequence[Judged],
    pairs: Sequence[tuple[Judged, Judged]],
    treatment: Sequence[str],
    allow: Mapping[str, str],
) -> list[_Pairs]:
    """The judgements of all pairs, those between the most common runs first."""
    kinds = {run.name: _kind(run.facts) for run in (*a, *b)}
    common = list(kinds.values())
    groups: dict[tuple[Any, ...], list[tuple[Judged, Judged]]] = {}
    for first, second in pairs:
        key = (kinds[first.name], kinds[second.name], *_of_pair(first.facts, second.facts))
        groups.setdefault(key, []).append((first, second))
    found = []
    for group in sorted(
        groups.values(),
        key=lambda group: -sum(common.count(kinds[run.name]) for run in group[0]),
    ):
        first, second = group[0]
        if kinds[first.name] != kinds[second.name] and _rarer(first, second, kinds, common):
            group = [(y, x) for x, y in group] if a is b else group  # the odd one stands second
            first, second = group[0]
        judgement = judge(
            first.facts, _same_seed(first.facts, second.facts), treatment=treatment, allow=allow
        )
        names = tuple((x.name, y.name) for x, y in group)
        found.append(_Pairs(judgement, names))
    return found


def _rarer(first: Judged, second: Judged, kinds: Mapping[str, str], common: Sequence[str]) -> bool:
    return common.count(kinds[first.name]) < common.count(kinds[second.name])


def _kind(facts: Facts) -> str:
    """All that the judge sees of a run, but for its seed and what follows from that."""
    apart = (SEED, *_READ)
    seen = {
        leaf: value
        for leaf, value in facts.items()
        if leaf not in apart and tag_of(leaf).kind != "free"
    }
    seen["unknown"] = [leaf for leaf in apart if facts.get(leaf) is None]
    return json.dumps(seen, sort_keys=True, default=str)


def _of_pair(a: Facts, b: Facts) -> tuple[bool | None, ...]:
    """All that the judge sees of two runs in what is left out of their kinds."""
    one_seed, changed = same(a.get(SEED), b.get(SEED)), _same_seed(a, b)
    read = [same(a.get(leaf), changed.get(leaf)) for leaf in _READ]
    return one_seed, *read, *(same_in_bytes(a, changed, leaf) for leaf in COUNTED)


def _same_seed(a: Facts, b: Facts) -> Facts:
    """The facts of the second run as they would be under the seed of the first.

    Runs of one seed are left as they are: their order must be proven to be the same. So are the
    bytes of two tokenizers, or of other tokens: they are more than a matter of the order.
    """
    if same(a.get(SEED), b.get(SEED)):
        return b
    as_many = all(same(a.get(leaf), b.get(leaf)) for leaf in (TOKENS, _TOKENIZER))
    changed = dict(b)
    for leaf in (SEED, ORDER_DIGEST, *((BYTES,) if as_many else ())):
        if a.get(leaf) is not None and b.get(leaf) is not None:
            changed[leaf] = a[leaf]
    return changed


def _merged(
    name: str, across: Sequence[_Pairs], within: Sequence[_Pairs], allow: Mapping[str, str]
) -> Ruling:
    """One ruling out of those of all pairs: each leaf as it is worst, the effects the worst."""
    leaves: dict[str, tuple[tuple[int, int], Leaf]] = {}
    total = sum(len(pairs.runs) for pairs in across)
    found: Counter[tuple[str, Outcome]] = Counter()
    for pairs in across:
        for leaf in pairs.judgement.ruling(name).leaves:
            found[leaf.path, leaf.outcome] += len(pairs.runs)
    effects: dict[Claim, Effect | None] = dict.fromkeys(CLAIMS)
    first = across[0].judgement.ruling(name)
    outcome, allowed = first.outcome, first.allowed
    unproven: dict[str, None] = {}
    for pairs, inside in [*((p, False) for p in across), *((p, True) for p in within)]:
        ruling = pairs.judgement.ruling(name)
        forced = inside and name in _IDENTITY and bool(ruling.counted)
        if inside and ruling.outcome == "studied":
            continue  # the seed
        outcome = max(outcome, ruling.outcome, key=_SEVERITY.index)
        allowed = allowed or ruling.allowed
        unproven |= dict.fromkeys(ruling.unproven)
        for claim in CLAIMS:
            effect = ruling.effects[claim]
            if forced:
                effect = "flag" if name in allow else "refuse"
                allowed = allow.get(name)
            effects[claim] = max(effects[claim], effect, key=_WORST.index)
        for leaf in ruling.leaves:
            everywhere = not inside and found[leaf.path, leaf.outcome] == total
            rank = (_SEVERITY.index(leaf.outcome), 2 if everywhere else int(inside))
            if leaf.path not in leaves or rank > leaves[leaf.path][0]:
                where = None if everywhere or leaf.outcome == "match" else pairs.runs[0]
                leaves[leaf.path] = rank, replace(leaf, runs=where)
    return Ruling(
        name,
        outcome,
        tuple(leaf for _, leaf in leaves.values()),
        effects,
        allowed,
        any(one.judgement.ruling(name).inferred for one in across),
        tuple(unproven),
        first.both_best,
    )


def _seeds_ruling(
    sets: SeedSets,
    a: Sequence[Judged],
    b: Sequence[Judged],
    allow: Mapping[str, str],
    judged: Ruling,
) -> Ruling:
    """The ruling on the seeds as sets; what the pairs of runs say of a missing one stays."""
    if judged.counted:
        return judged
    first, second = ([run.facts.get(SEED) for run in arm] for arm in (a, b))
    leaf = Leaf(SEED, "seeds", sets.outcome, first, second, note=sets.why)
    guarded = RULES["seeds"].effects
    effects: dict[Claim, Effect | None] = {
        claim: sets.effect if claim in guarded else None for claim in CLAIMS
    }
    allowed = None
    if sets.effect == "refuse" and "seeds" in allow:
        allowed = allow["seeds"]
        effects = {claim: effect and "flag" for claim, effect in effects.items()}
    shown = () if sets.outcome == "match" else (leaf,)
    return Ruling("seeds", sets.outcome, shown, effects, allowed)


def worst_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of them; comparable where there are none."""
    order: tuple[Verdict, ...] = get_args(Verdict)
    return max(verdicts, key=order.index, default="comparable")


def _listed(seeds: Sequence[Any]) -> str:
    return ", ".join(map(str, seeds))
