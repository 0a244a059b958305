"""The report of a comparison: a folder with Markdown, a page, the figures, and the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from workbench.compare import markdown, page, sections, tidy
from workbench.compare.document import (
    Block,
    Commands,
    Facts,
    Figures,
    Heading,
    Strong,
    Words,
    bullets,
    paragraph,
)
from workbench.compare.figures import draw
from workbench.compare.held_out import held_out_section
from workbench.compare.pair import Comparison
from workbench.compare.report_folder import (
    DATA,
    MARKDOWN,
    PAGE,
    TABLE,
    put_report,
    safe,
    write_texts,
)
from workbench.compare.sentences import headline, how_judged, statement, title, verdicts
from workbench.compare.words import why
from workbench.track.record import strict


def write_report(comparison: Comparison, reports: Path) -> Comparison:
    """Writes the report folder whole or not at all, and says in the comparison where it is.

    A report is replaced by the same comparison only: the same runs, treatment, allowances, claims
    and point.

    Raises:
        UserError: something else stands in its place.
        StoreError: it cannot be written.
    """
    first, second = (safe(name) for name in comparison.names)
    folder = reports / f"{first}--{second}--{comparison.key[:8]}"
    comparison = replace(comparison, report=folder)

    def make(new: Path) -> None:
        blocks = compose(comparison, draw(comparison, new))
        html = page.render(blocks, title(comparison), new)
        texts = {MARKDOWN: markdown.render(blocks), PAGE: html, DATA: _data(comparison)}
        texts[TABLE] = tidy.tidy_csv(comparison)
        write_texts(new, texts)

    put_report(folder, comparison.key, make)
    return comparison


def compose(
    comparison: Comparison, figures: Mapping[str, Figures], *, today: datetime | None = None
) -> list[Block]:
    """The report as blocks, in the order in which it is read.

    Args:
        figures: those that were drawn, by their places; see `figures.draw`.
    """
    today = today or datetime.now(UTC)
    blocks: list[Block] = [
        Heading(title(comparison), 1),
        Facts(tuple(_title_block(comparison, today))),
        verdicts(comparison.judgement),
    ]

    if comparison.results is None:
        blocks += _what_to_do(comparison)
    else:
        blocks += headline(comparison)
        blocks += _shown(figures, "", "answer")
        blocks += [Heading("Numbers"), *sections.numbers(comparison), *statement(comparison)]
        blocks += sections.evaluations(comparison)
        blocks += _shown(figures, "Curves and documents", "curves", "documents")
        blocks += _shown(figures, "Throughput and memory", "cost")
        blocks += _shown(figures, "Routes to the experts", "routes")
        if comparison.verdict == "refused":
            blocks += [Heading("What is refused"), *_what_to_do(comparison)]
    record_of = {"A": comparison.a.record, "B": comparison.b.record}
    for heading, section in (
        ("Checklist", sections.checklist(comparison)),
        ("Held out", held_out_section(record_of)),
        ("What differs", sections.spec_difference(comparison)),
        ("Runs", sections.runs(comparison)),
        ("Reproduce", sections.reproduce(comparison)),
    ):
        blocks += [Heading(heading), *section]
    return blocks


def _shown(figures: Mapping[str, Figures], heading: str, *places: str) -> list[Block]:
    """The figures of these places under their heading; nothing where there are none."""
    found = [one for place in places if place in figures for one in figures[place].figures]
    if not found:
        return []
    return [*([Heading(heading)] if heading else []), Figures(tuple(found))]


def render_markdown(comparison: Comparison, *, today: datetime | None = None) -> str:
    """The report as Markdown, without its figures; lines of tables are at most 100 wide."""
    return markdown.render(compose(comparison, {}, today=today))


def _title_block(comparison: Comparison, today: datetime) -> Iterator[tuple[str, Words]]:
    yield from (("A", (comparison.names[0],)), ("B", (comparison.names[1],)))
    yield from how_judged(comparison.judgement, comparison.at, today)


def _what_to_do(comparison: Comparison) -> list[Block]:
    judgement, asked = comparison.judgement, comparison.asked
    refusing = [ruling for ruling in judgement.rules if ruling.over(asked) == "refused"]
    remedies = sections.remedies(comparison)
    return [
        paragraph("The two runs do not answer one question:"),
        bullets((Strong(ruling.rule), f": {why(ruling)}") for ruling in refusing),
        paragraph("To compare them:"),
        bullets(remedies[ruling.rule] for ruling in refusing),
        Commands(tuple(sections.matching_commands(comparison))),
    ]


def _data(comparison: Comparison) -> str:
    runs = [{"id": side.record.id, "name": side.name} for side in (comparison.a, comparison.b)]
    assert comparison.report is not None
    document = comparison.to_json() | {"key": comparison.key, "runs": runs}
    document["report"] = comparison.report.name  # wherever the folder is moved
    document |= {"series": tidy.series_json(comparison.results)}
    document |= {"details": tidy.details_json(comparison.results)}
    return json.dumps(strict(document), indent=1, allow_nan=False) + "\n"
