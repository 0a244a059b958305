"""A comparison or a check on the terminal: the verdict, what is not `match`, the one number."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable

from workbench.compare.check import Check
from workbench.compare.pair import Comparison
from workbench.compare.report_folder import report_lines
from workbench.compare.rules import Judgement, Ruling, Verdict
from workbench.compare.sections import matching_commands, remedies
from workbench.compare.sentences import (
    interval_sentence,
    noise_sentence,
    number_sentence,
    verdicts_line,
)
from workbench.compare.words import matching_overrides, remedy, why
from workbench.spec.checklist import Claim
from workbench.spec.held_out import set_words

_WIDTH = 100
_COLORS: dict[Verdict, str] = {"comparable": "32", "flagged": "33", "refused": "31"}


def render_terminal(comparison: Comparison, color: bool = False) -> str:
    """A comparison in about twenty lines."""
    judgement, asked = comparison.judgement, comparison.asked
    lines = head_lines(judgement, asked, comparison.names, color)
    if comparison.at is not None:
        lines.append(f"compared at {comparison.at:,} tokens")
    lines += rule_lines(judgement, color)
    if comparison.results is not None:
        said = [number_sentence(comparison), interval_sentence(comparison)]
        lines += ["", *wrapped(" ".join([*filter(None, said), noise_sentence(comparison)]))]
    lines += _sets(comparison)
    if comparison.verdict == "refused":
        said_by_rule = remedies(comparison)
        refusing = [r.rule for r in judgement.rules if r.over(asked) == "refused"]
        lines += ["", "to compare them:"]
        lines += [line for rule in refusing for line in wrapped(said_by_rule[rule], "  - ")]
        lines += [f"  {command}" for command in matching_commands(comparison)]
    elif judgement.inferred:
        lines += ["", "to declare the treatment: --treatment model"]
    if comparison.report:
        lines += ["", *report_lines(comparison.report)]
    return "\n".join(lines)


def _sets(comparison: Comparison) -> list[str]:
    """What was shown of every evaluation set, once where it is the same of both runs."""
    said: dict[str, list[str]] = {}
    for label, side in zip(comparison.names, (comparison.a, comparison.b), strict=True):
        for name, facts in side.record.effective.evaluation.items():
            if facts.status not in (None, "train_split"):
                words = set_words(name, facts.status, facts.measured, facts.documents)
                said.setdefault(words, []).append(label)
    lines = [
        line
        for words, labels in said.items()
        for line in wrapped(words if len(labels) == 2 else f"{labels[0]}: {words}", "  - ")
    ]
    return ["", "evaluation sets:", *lines] if lines else []


def render_check(check: Check, color: bool = False) -> str:
    """A check: the rules that differ, and what only a run will show."""
    judgement, asked, spec = check.judgement, check.asked, check.paths[1]
    lines = head_lines(judgement, asked, check.names, color)
    if check.at is not None:
        lines.append(f"judged at {check.at:,} tokens, the last point of both")
    lines += rule_lines(judgement, color)
    if check.verdict == "refused":
        lines += ["", "to make them comparable:"]
        for ruling in judgement.rules:
            said = remedy(ruling, judgement, check.names)
            if said and ruling.over(asked) == "refused":
                lines += wrapped(said, "  - ")
        if spec and (overrides := matching_overrides(judgement, asked)):
            lines.append(f"  wb run {shlex.quote(spec)} {' '.join(overrides)}")
    elif judgement.inferred:
        lines += ["", "to declare the treatment: --treatment model"]
    if unknown := judgement.with_outcome("not yet known"):
        rules = dict.fromkeys(leaf.rule for leaf in unknown)
        text = f"not yet known, {len(unknown)} values of: {', '.join(rules)}"
        lines += ["", *wrapped(text)]
        for leaf in unknown:
            if leaf.asked:
                lines += wrapped(f"{leaf.path} may differ: {', '.join(leaf.asked)} does", "  - ")
    return "\n".join(lines)


def head_lines(
    judgement: Judgement, asked: Iterable[Claim], names: tuple[str, str], color: bool
) -> list[str]:
    """The verdict, the treatment, and the verdict on every claim."""
    asked = tuple(asked)
    verdict = judgement.verdict(asked)
    said = _paint(verdict.upper(), _COLORS[verdict], color)
    treatment = ", ".join(judgement.treatment) or "none"
    if judgement.treatment:
        treatment += " (inferred, not declared)" if judgement.inferred else " (declared)"
    lines = [
        f"{said} for {', '.join(asked)}: {names[0]} against {names[1]}",
        f"treatment: {treatment} · ruleset {judgement.ruleset}",
        *wrapped(verdicts_line(judgement)),
    ]
    return lines + [f"override of {rule}: {why}" for rule, why in judgement.allow.items()]


def rule_lines(judgement: Judgement, color: bool) -> list[str]:
    """Every rule that does not match or has an effect, and why."""
    found = [
        ruling
        for ruling in judgement.rules
        if ruling.outcome not in ("match", "not yet known") or any(ruling.effects.values())
    ]
    lines = [""] if found else ["", "every rule of the checklist matches"]
    for ruling in found:
        mark = _paint(f"{ruling.rule:<11}", _COLORS[_worst(ruling)], color)
        first, *rest = wrapped(f"{ruling.outcome}: {why(ruling)}", "", _WIDTH - 12)
        lines += [f"{mark} {first}", *(f"{'':<12}{line}" for line in rest)]
    if found:
        lines.append(f"{'':<12}(wb explain RULE: what it guards, and why)")
    return lines


def _worst(ruling: Ruling) -> Verdict:
    return ruling.over(ruling.effects)


def _paint(text: str, code: str, color: bool) -> str:
    return f"\x1b[1;{code}m{text}\x1b[0m" if color else text


def wrapped(text: str, first: str = "", width: int = _WIDTH) -> list[str]:
    """A sentence in lines of this width, the first after `first`."""
    rest = " " * len(first)
    clean = "".join(char if char.isprintable() else " " for char in text)
    return textwrap.wrap(clean, width, initial_indent=first, subsequent_indent=rest) or [""]
