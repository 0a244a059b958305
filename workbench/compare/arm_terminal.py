"""A comparison of arms on the terminal: verdict, what is not `match`, what decides."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.compare.arm_sentences import (
    difference_sentence,
    disturbed,
    documents_sentence,
    power_sentence,
    selection,
    verdict_sentence,
)
from workbench.compare.arms import ArmPair, ArmsComparison
from workbench.compare.report_folder import report_lines
from workbench.compare.sections import remedies
from workbench.compare.terminal import head_lines, rule_lines, wrapped


def render_arms(
    comparison: ArmsComparison,
    color: bool = False,
    *,
    power: bool = False,
    differences: Sequence[float] = (),
) -> str:
    """A comparison of arms in a few lines for each pair.

    Args:
        power: whether to say what these seeds can find.
        differences: of each, how many seeds it needs.
    """
    verdict = render_verdict(comparison, color, power=power, differences=differences)
    return f"{verdict}\n\n{render_rest(comparison)}"


def render_verdict(
    comparison: ArmsComparison,
    color: bool = False,
    *,
    power: bool = False,
    differences: Sequence[float] = (),
) -> str:
    """What is judged and decided, for which no interval over documents is needed.

    Args:
        power: whether to say what these seeds can find.
        differences: of each, how many seeds it needs.
    """
    lines: list[str] = []
    for pair in comparison.pairs:
        lines += [*([""] if lines else []), *_pair(pair, comparison, color, power, differences)]
    return "\n".join(lines)


def render_rest(comparison: ArmsComparison) -> str:
    """What is known after the verdict: intervals over documents, what was chosen, the report."""
    lines: list[str] = []
    for pair in comparison.pairs:
        of = f"{pair.b.name} against {pair.a.name}: " if len(comparison.pairs) > 1 else ""
        for name in pair.deciding:
            said = documents_sentence(pair, name)
            lines += [*wrapped(f"{of}{said}"), ""] if said else []
    lines += [line for said in selection(comparison) for line in wrapped(said, "  - ")]
    if comparison.pairs[0].judgement.inferred:
        lines += ["", "to declare the treatment: --treatment model"]
    if comparison.report:
        lines += ["", *report_lines(comparison.report)]
    return "\n".join(lines)


def _pair(
    pair: ArmPair,
    comparison: ArmsComparison,
    color: bool,
    power: bool,
    differences: Sequence[float],
) -> list[str]:
    lines = head_lines(pair.judgement, pair.asked, pair.names, color)
    seeds = [", ".join(map(str, arm.seeds)) for arm in (pair.a, pair.b)]
    at = "no common point" if comparison.at is None else f"{comparison.at:,} tokens"
    lines += wrapped(f"compared at {at} · seeds {seeds[0]} against {seeds[1]}")
    lines += rule_lines(pair.judgement, color)
    for name in pair.deciding:
        said = [verdict_sentence(pair, name), difference_sentence(pair, name)]
        if name == "tokens_per_s":
            said.append(disturbed((pair.a, pair.b)))
        if power:
            said += [power_sentence(pair, name, one) for one in (differences or (None,))]
        lines += ["", *wrapped(" ".join(filter(None, said)))]
    if pair.verdict == "refused":
        refusing = [
            rule.rule for rule in pair.judgement.rules if rule.over(pair.asked) == "refused"
        ]
        said_by_rule = remedies(pair)
        lines += ["", "to compare them:"]
        lines += [
            line
            for rule in refusing
            if rule in said_by_rule
            for line in wrapped(said_by_rule[rule], "  - ")
        ]
    return lines
