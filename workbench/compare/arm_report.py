"""The report of a comparison of arms: verdict first, then figures, numbers, rules and runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.compare import arm_sections, markdown, page, sections
from workbench.compare.arm_figures import draw
from workbench.compare.arm_sentences import (
    difference_sentence,
    disturbed,
    documents_sentence,
    power_sentence,
    selection,
    title,
    verdict_sentence,
)
from workbench.compare.arm_tidy import figures_json, tidy_arms_csv
from workbench.compare.arms import ArmPair, ArmsComparison
from workbench.compare.document import (
    Block,
    Facts,
    Figures,
    Heading,
    Strong,
    Words,
    bullets,
    paragraph,
)
from workbench.compare.held_out import held_out_section
from workbench.compare.report_folder import (
    DATA,
    MARKDOWN,
    PAGE,
    TABLE,
    put_report,
    safe,
    write_texts,
)
from workbench.compare.sentences import document_method, how_judged, verdicts
from workbench.compare.words import why
from workbench.track.record import strict


def write_arms_report(comparison: ArmsComparison, reports: Path) -> ArmsComparison:
    """Writes the report folder whole or not at all, and says in the comparison where it is.

    Raises:
        UserError: something else stands in its place.
        StoreError: it cannot be written.
    """
    names = "--".join(safe(name)[:40] for name in comparison.names[:3])
    folder = reports / f"{names}--{comparison.key[:8]}"
    comparison = replace(comparison, report=folder)

    def make(new: Path) -> None:
        blocks = compose(comparison, draw(comparison, new))
        html = page.render(blocks, title(comparison), new)
        data = json.dumps(_data(comparison), indent=1, allow_nan=False)
        texts = {MARKDOWN: markdown.render(blocks), PAGE: html, DATA: f"{data}\n"}
        texts[TABLE] = tidy_arms_csv(comparison)
        write_texts(new, texts)

    put_report(folder, comparison.key, make)
    return comparison


def compose(
    comparison: ArmsComparison,
    figures: Mapping[str, Figures],
    *,
    differences: Sequence[float] = (),
    today: datetime | None = None,
) -> list[Block]:
    """The report as blocks, in the order in which it is read.

    Args:
        figures: those that were drawn, by their places; see `arm_figures.draw`.
        differences: those of which the report says how many seeds they need, beside the one seen.
    """
    blocks: list[Block] = [
        Heading(title(comparison), 1),
        Facts(tuple(_title_block(comparison, today or datetime.now(UTC)))),
    ]
    several = len(comparison.pairs) > 1
    for pair in comparison.pairs:
        if several:
            blocks.append(Heading(f"{pair.b.name} against {pair.a.name}"))
        blocks += _pair(pair, figures, differences)
    blocks += _shown(figures, "Curves", "curves")
    blocks += _cost(comparison, figures)
    blocks += _shown(figures, "Routes to the experts", "routes")
    blocks += [Heading("What was chosen"), bullets(selection(comparison))]
    for pair in comparison.pairs:
        name = f": {pair.b.name}" if several else ""
        blocks += [Heading(f"Checklist{name}"), *sections.checklist(pair)]
    blocks += [Heading("Held out"), *held_out_section(_records(comparison))]
    for pair in comparison.pairs:
        name = f": {pair.b.name}" if several else ""
        blocks += [Heading(f"What differs{name}"), *sections.spec_difference(pair)]
    blocks += [Heading("Runs"), *arm_sections.runs(comparison)]
    blocks += [Heading("Reproduce"), *arm_sections.reproduce(comparison)]
    return blocks


def render_arms_markdown(comparison: ArmsComparison, *, today: datetime | None = None) -> str:
    """The report as Markdown, without its figures."""
    return markdown.render(compose(comparison, {}, today=today))


def _pair(
    pair: ArmPair, figures: Mapping[str, Figures], differences: Sequence[float]
) -> Iterator[Block]:
    yield verdicts(pair.judgement)
    if pair.results is None:
        yield from _what_to_do(pair)
        return
    if not pair.deciding:
        yield paragraph(Strong("The number asked for was not measured in all runs at this point."))
    for name in pair.deciding:
        said = [difference_sentence(pair, name), documents_sentence(pair, name)]
        if name == "tokens_per_s":
            said.append(disturbed((pair.a, pair.b)))
        said.append(power_sentence(pair, name))
        said += [power_sentence(pair, name, one) for one in differences]
        yield paragraph(Strong(verdict_sentence(pair, name)), " " + " ".join(filter(None, said)))
    yield from _shown(figures, "", f"answer:{pair.b.name}")
    yield from arm_sections.numbers(pair)
    yield from _how(pair)
    yield from arm_sections.by_seed(pair)
    yield from arm_sections.evaluations(pair)
    yield from _shown(figures, "", f"documents:{pair.b.name}")
    if pair.verdict == "refused":
        yield from _what_to_do(pair)


def _shown(figures: Mapping[str, Figures], heading: str, place: str) -> list[Block]:
    if place not in figures:
        return []
    return [*([Heading(heading)] if heading else []), figures[place]]


def _cost(comparison: ArmsComparison, figures: Mapping[str, Figures]) -> list[Block]:
    """The figures of speed and memory, under what forbids to read speed out of them."""
    shown = [pair for pair in comparison.pairs if pair.results is not None]
    said = disturbed(comparison.arms) if shown else ""
    heading = "Throughput and memory"
    drawn = _shown(figures, heading, "cost") or ([Heading(heading)] if said else [])
    return [*drawn[:1], *([paragraph(Strong(said))] if said else []), *drawn[1:]]


def _title_block(comparison: ArmsComparison, today: datetime) -> Iterator[tuple[str, Words]]:
    judgement = comparison.pairs[0].judgement
    for arm in (comparison.baseline, *comparison.others):
        role = " (baseline)" if arm is comparison.baseline else ""
        seeds = ", ".join(map(str, arm.seeds))
        yield f"{arm.name}{role}", (f"{len(arm.runs)} runs, seeds {seeds}",)
    yield from how_judged(judgement, comparison.at, today)


def _how(pair: ArmPair) -> Iterator[Block]:
    """How the intervals were made, and what they do not cover."""
    assert pair.results is not None
    design = "paired by seed" if pair.seeds.design == "paired" else "not paired (Welch)"
    over_seeds = (
        f"Over seeds: t intervals, {design}. They cover the luck of initial weights and of order,"
        " at this budget, on these documents."
    )
    counts = [one.documents.n for one in pair.results.numbers.values() if one.documents]
    together = "both arms together, each the mean of its seeds"
    over_documents = (
        f"{document_method(counts, together)} They cover which documents were"
        " drawn, for these trained models alone."
    )
    neither = "Neither covers other text, another budget, or how well an arm was tuned."
    tested = any(one.seeds for one in pair.results.numbers.values())
    said = [over_seeds] * tested + [over_documents] * bool(counts)
    if said:
        yield paragraph(" ".join([*said, neither]))


def _what_to_do(pair: ArmPair) -> list[Block]:
    refusing = [rule for rule in pair.judgement.rules if rule.over(pair.asked) == "refused"]
    remedies = sections.remedies(pair)
    return [
        paragraph("The two arms do not answer one question:"),
        bullets((Strong(rule.rule), f": {why(rule)}") for rule in refusing),
        paragraph("To compare them:"),
        bullets(remedies[rule.rule] for rule in refusing if rule.rule in remedies),
    ]


def _records(comparison: ArmsComparison) -> dict[str, Any]:
    """A run of each arm: its sets are those of all, or the checklist says where they are not."""
    return {arm.name: arm.runs[0].record for arm in (comparison.baseline, *comparison.others)}


def _data(comparison: ArmsComparison) -> object:
    place = comparison.report.name if comparison.report else None  # wherever the folder is moved
    about = {"report": place, "key": comparison.key}
    return strict(comparison.to_json() | about | figures_json(comparison))
