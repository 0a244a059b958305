"""A comparison as a notebook shows it: the verdict, what it rests on, and the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from workbench.compare import arm_sections, sections
from workbench.compare.arm_sentences import (
    difference_sentence,
    documents_sentence,
    verdict_sentence,
)
from workbench.compare.arm_sentences import title as arms_title
from workbench.compare.arms import ArmPair, ArmsComparison
from workbench.compare.document import Block, Code, Heading, Strong, Table, bullets, paragraph
from workbench.compare.pair import Comparison
from workbench.compare.rules import Judgement
from workbench.compare.sentences import headline, title, verdicts
from workbench.compare.words import why
from workbench.spec.checklist import Claim

_LEVEL = 4  # of the headings, which stand among those of the notebook


def of_pair(comparison: Comparison) -> list[Block]:
    """Two runs: their verdict, the rules behind it, and every number that may be shown."""
    judgement, asked = comparison.judgement, comparison.asked
    blocks: list[Block] = [Heading(title(comparison), _LEVEL), verdicts(judgement)]
    blocks += headline(comparison)
    blocks += _rules(judgement)
    if comparison.results is not None:
        blocks += _tables(sections.numbers(comparison))
    if comparison.verdict == "refused":
        remedies = sections.remedies(comparison)
        blocks += _to_compare(judgement, asked, remedies)
    return blocks


def of_arms(comparison: ArmsComparison) -> list[Block]:
    """Arms of several seeds: the same of every pair."""
    blocks: list[Block] = [Heading(arms_title(comparison), _LEVEL)]
    for pair in comparison.pairs:
        blocks += _arm_pair(pair, named=len(comparison.pairs) > 1)
    return blocks


def _arm_pair(pair: ArmPair, named: bool) -> Iterator[Block]:
    if named:
        yield Heading(f"{pair.b.name} against {pair.a.name}", _LEVEL + 1)
    yield verdicts(pair.judgement)
    for name in pair.deciding:
        said = [difference_sentence(pair, name), documents_sentence(pair, name)]
        yield paragraph(Strong(verdict_sentence(pair, name)), " " + " ".join(filter(None, said)))
    yield from _rules(pair.judgement)
    if pair.results is not None:
        yield from _tables(arm_sections.numbers(pair))
    if pair.verdict == "refused":
        yield from _to_compare(pair.judgement, pair.asked, sections.remedies(pair))


def _rules(judgement: Judgement) -> Iterator[Block]:
    """The rules that do not match, and why."""
    found = [
        ruling
        for ruling in judgement.rules
        if ruling.outcome != "match" or any(ruling.effects.values())
    ]
    if found:
        yield bullets((Strong(one.rule), f" {one.outcome}: {why(one)}") for one in found)
    else:
        yield paragraph("Every rule of the checklist matches.")


def _to_compare(
    judgement: Judgement, asked: Iterable[Claim], remedies: dict[str, str]
) -> Iterator[Block]:
    refusing = [one.rule for one in judgement.rules if one.over(asked) == "refused"]
    yield paragraph("To compare them:")
    yield bullets((Code(rule), f": {remedies[rule]}") for rule in refusing if rule in remedies)


def _tables(blocks: Iterable[Block]) -> Iterator[Block]:
    """What the numbers are is said in the report; here they stand alone."""
    return (block for block in blocks if isinstance(block, Table))
