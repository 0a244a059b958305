"""The report of a study: what was planned, what came of it, and all that happened on the way."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.compare import markdown, page
from workbench.compare.arm_tidy import figures_json, tidy_arms_csv
from workbench.compare.document import (
    Badge,
    Block,
    Code,
    Facts,
    Figures,
    Fold,
    Heading,
    Inline,
    Words,
)
from workbench.compare.report_folder import (
    DATA,
    MARKDOWN,
    PAGE,
    TABLE,
    put_report,
    write_texts,
)
from workbench.compare.tidy import write_rows
from workbench.compare.words import show
from workbench.spec.checklist import CLAIMS, RULESET_VERSION
from workbench.study import grounds, sections
from workbench.study.figures import draw
from workbench.study.outcome import StudyResult
from workbench.study.places import portable, seen_from
from workbench.study.run import summary
from workbench.track.record import strict

_MOST_FIGURES = 2  # of one kind side by side


def write_study_report(outcome: StudyResult, reports: Path) -> Path:
    """Writes the report folder whole or not at all; returns it.

    It takes the place of an earlier report of the same study only.

    Raises:
        UserError: something else stands in its place.
        StoreError: it cannot be written.
    """
    plan = outcome.status.plan
    folder = reports / f"{plan.name}--study--{plan.id[:8]}"
    project = outcome.status.project

    def make(new: Path) -> None:
        blocks = compose(outcome, draw(outcome, new))
        document = portable(_placed(outcome), project) | {"key": plan.id}
        texts = {
            MARKDOWN: markdown.render(blocks),
            PAGE: page.render(blocks, title(outcome), new),
            DATA: json.dumps(document, indent=1, allow_nan=False) + "\n",
            TABLE: tidy_csv(outcome),
        }
        write_texts(new, texts)

    put_report(folder, plan.id, make)
    return folder


def title(outcome: StudyResult) -> str:
    """The study's name, what it asks, and whether it can answer."""
    plan = outcome.status.plan
    asked = f": {plan.question}" if plan.question else ""
    unfinished = "" if outcome.complete else " (INCOMPLETE)"
    return f"{plan.name}{unfinished}{asked}"


def compose(
    outcome: StudyResult, figures: dict[str, Figures], *, today: datetime | None = None
) -> list[Block]:
    """The report as blocks, in the order in which it is read.

    Args:
        figures: those that were drawn, by their places; see `figures.draw`.
    """
    today = today or datetime.now(UTC)
    blocks: list[Block] = [
        Heading(title(outcome), 1),
        Facts(tuple(_title_block(outcome, today))),
        *sections.answer(outcome),
        *([figures["answer"]] if "answer" in figures else []),
    ]
    for heading, section in (
        ("The arms", sections.arms(outcome)),
        ("Numbers", sections.numbers(outcome)),
    ):
        blocks += [Heading(heading), *section] if section else []
    for heading, section in (
        ("The plan and what happened", grounds.history(outcome)),
        ("Over training", [*_figures(figures, "curves"), *sections.evaluations(outcome)]),
        ("By document", _figures(figures, "documents")),
        ("Throughput and memory", _figures(figures, "cost", fold=False)),
        ("Routes to the experts", _figures(figures, "routes", fold=False)),
        ("What was chosen", sections.chosen(outcome)),
        ("Checklist", grounds.checklist(outcome)),
        ("Held out", sections.held_out(outcome)),
        ("What differs", grounds.differences(outcome)),
        ("Runs", grounds.provenance(outcome)),
        ("Reproduce", grounds.reproduce(outcome)),
    ):
        blocks += [Heading(heading), *section] if section else []
    return blocks


def _figures(figures: dict[str, Figures], place: str, *, fold: bool = True) -> list[Block]:
    """The figures of a place; of more than two the first, the others on demand."""
    if place not in figures:
        return []
    drawn = figures[place].figures
    if not fold or len(drawn) <= _MOST_FIGURES:
        return [figures[place]]
    rest = drawn[1:]
    return [Figures(drawn[:1]), Fold(f"{len(rest)} more figures, one a pair", (Figures(rest),))]


def _title_block(outcome: StudyResult, today: datetime) -> list[tuple[str, Words]]:
    status = outcome.status
    plan, document = status.plan, status.plan.latest.document
    decision, comparison = document["decision"], outcome.comparison
    at = "no common point" if comparison is None else f"{comparison.at:,} tokens"
    family = len(outcome.decisions)
    together = ""
    levels = [one.number.level for one in outcome.decisions if one.number is not None]
    if family > 1 and levels:
        each = f"{levels[0] * 100:.4g}"
        together = f" for {family} comparisons together, so {each} % for each (Bonferroni)"
    rule = f"{decision['confidence'] * 100:g} % intervals over seeds{together}"
    if decision["smallest_difference"]:
        rule += f"; differences below {decision['smallest_difference']:g} are not counted"
    rows: list[tuple[str, Words]] = [
        ("verdict", (Badge(outcome.verdict, outcome.verdict), *_claims(outcome))),
        *_reasons(outcome),
        ("treatment", (f"{', '.join(document['treatment'])} (declared)",)),
        (
            "arms",
            (f"{len(outcome.arms)}, each against ", Code(outcome.baseline), *_further(outcome)),
        ),
        *_unlike(outcome),
        ("seeds", (", ".join(map(str, plan.seeds)),)),
        ("decided by", (Code(outcome.metric), f" at {at}, {rule}")),
        ("runs", (summary(status.states) + grounds.wall_time(status.ledger.events),)),
        (
            "plan",
            (f"frozen {plan.first.when}, before the first run; sha256 {plan.first.sha256[:16]}",),
        ),
    ]
    for version in plan.versions[1:]:
        said = f"{version.when}, {version.finished_runs} runs being finished: {version.reason}"
        rows.append(("PLAN CHANGED", (said,)))
    if status.changes:
        rows.append(("plan", ("the study file has been changed since; see below",)))
    rows.append(("overrides", ("none",)))
    rows.append(("ruleset", (f"{RULESET_VERSION}, {today:%Y-%m-%d}",)))
    return rows


def _further(outcome: StudyResult) -> Words:
    """The contrasts that were planned beside the comparisons with the baseline."""
    if not outcome.contrasts:
        return ()
    named = sections.listed([f"{one.arm} against {one.against}" for one in outcome.contrasts])
    return (f"; {named}",)


def _claims(outcome: StudyResult) -> Words:
    """The verdict of every claim, the worst over all arms."""
    if outcome.comparison is None:
        return ()
    found = outcome.comparison.claims
    return (" (" + " · ".join(f"{claim} {found[claim]}" for claim in CLAIMS) + ")",)


def _reasons(outcome: StudyResult) -> list[tuple[str, Words]]:
    """The rules that the verdict comes from, each with the comparisons that it touches."""
    comparison = outcome.comparison
    touched: dict[str, list[str]] = {}
    for pair in comparison.pairs if comparison else ():
        label = grounds.label(pair, outcome.baseline)
        for ruling in pair.judgement.rules:
            if ruling.over(pair.asked) != "comparable":
                touched.setdefault(ruling.rule, []).append(label)
    said = [f"{rule} ({', '.join(labels)})" for rule, labels in touched.items()]
    return [("because of", (f"{'; '.join(said)}: see Checklist",))] if said else []


def _unlike(outcome: StudyResult) -> list[tuple[str, Words]]:
    """The settings in which the arms differ: those that every arm has by name, the rest counted."""
    document = outcome.status.plan.latest.document["arms"]
    names = [arm for arm in outcome.arms if arm in document]
    different = grounds.different_settings(document, names)
    everywhere = {leaf: values for leaf, values in different.items() if None not in values}
    words: list[Inline] = []
    for leaf, values in everywhere.items():
        shown = ", ".join(dict.fromkeys(map(show, values)))
        words += [*([", "] if words else []), Code(leaf), f" ({shown})"]
    rest = len(different) - len(everywhere)
    if rest:
        words.append(f"{' and ' if words else ''}{rest} more, under What differs")
    return [("they differ in", tuple(words))] if words else []


def data(outcome: StudyResult) -> dict[str, Any]:
    """The report as data; strict JSON."""
    comparison = outcome.comparison
    document = {
        "study": outcome.status.to_json(),
        "plan": outcome.status.plan.model_dump(mode="json"),
        "verdict": outcome.verdict,
        "complete": outcome.complete,
        "baseline": outcome.baseline,
        "metric": outcome.metric,
        "decisions": [
            {
                "arm": one.arm,
                "against": one.against,
                "better": one.better,
                "refused": one.refused,
                "words": one.words,
            }
            for one in outcome.decisions
        ],
        "comparison": comparison.to_json() if comparison else None,
        **(figures_json(comparison) if comparison else {}),
        "events": [event.model_dump(mode="json") for event in outcome.status.ledger.events],
    }
    found = strict(document)
    assert isinstance(found, dict)
    return found


def _placed(outcome: StudyResult) -> dict[str, Any]:
    """The report as data, the study file named as it is seen from the project."""
    document, project = data(outcome), outcome.status.project
    for part in ("study", "plan"):
        document[part]["file"] = seen_from(project, document[part]["file"])
    return document


def tidy_csv(outcome: StudyResult) -> str:
    """Every number of the arms that may be compared, as a report on arms has them; else the head
    alone."""
    return tidy_arms_csv(outcome.comparison) if outcome.comparison else write_rows(())
