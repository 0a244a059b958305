"""What a user declares of a comparison: what is meant to differ, and which refusals are allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.compare.facts import spec_leaves
from workbench.errors import Fault, UserError, did_you_mean
from workbench.spec.checklist import RULES, matches, tag_of

FINISHED = "effective.budget.finished"


def declared_leaves(treatment: Sequence[str], leaves: Sequence[str]) -> set[str]:
    """The leaves that the declared treatments name, requested ones as what they became."""
    declared: set[str] = set()
    faults = []
    for name in treatment:
        patterns = _treatment_patterns(name)
        if isinstance(patterns, Fault):
            faults.append(patterns)
        elif name.startswith("rule:"):
            # That a run broke off is an accident of it, and nobody's treatment.
            chosen = (path for path in leaves if tag_of(path).rule in patterns)
            declared.update(path for path in chosen if path != FINISHED)
        else:
            declared.update(path for path in leaves if matches(path, patterns))
    if faults:
        raise UserError(*faults)
    return declared


def _treatment_patterns(name: str) -> tuple[str, ...] | Fault:
    place = "--treatment"
    if name.startswith("rule:"):
        rule = name.removeprefix("rule:")
        if rule in RULES:
            return (rule,)
        hint = did_you_mean(rule, RULES)
        return Fault(place, f"the checklist has no such rule.{hint}", name, ", ".join(RULES))
    sections = dict.fromkeys(leaf.partition(".")[0] for leaf in spec_leaves() if "." in leaf)
    known = [leaf for leaf in spec_leaves() if name in (leaf, leaf.partition(".")[0])]
    if not known:
        hint = did_you_mean(name, [*spec_leaves(), *sections])
        message = f"a run spec has no such field or section.{hint}"
        allowed = "a dotted field or a section of the spec, or rule:NAME"
        return Fault(place, message, name, allowed)
    patterns: list[str] = []
    for leaf in known:
        tag = tag_of(leaf)
        if tag.kind == "judged":
            patterns.append(leaf)
        elif tag.kind == "requested":
            patterns += tag.becomes
    if not patterns:
        message = "this is never compared, so it cannot be what is studied"
        return Fault(place, message, name, "a field that a rule guards")
    return tuple(patterns)


def check_allow(allow: Mapping[str, str]) -> None:
    faults = []
    for rule, reason in allow.items():
        if rule not in RULES:
            hint = did_you_mean(rule, RULES)
            message = f"the checklist has no such rule.{hint}"
            faults.append(Fault("--allow", message, rule, ", ".join(RULES)))
        elif not reason.strip():
            message = "an allowance needs its reason"
            faults.append(Fault("--allow", message, rule, f"{rule}=why it may be"))
    if faults:
        raise UserError(*faults)
