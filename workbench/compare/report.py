"""The report of a comparison: a folder with `report.md`, its figures, and the numbers as JSON."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from workbench.compare import sections
from workbench.compare.held_out import held_out_section
from workbench.compare.markdown import block, text
from workbench.compare.pair import Comparison
from workbench.compare.plots import CURVES, DIFFERENCE, draw
from workbench.compare.sentences import headline, statement, title
from workbench.compare.words import why
from workbench.errors import StoreError, UserError
from workbench.track.record import strict

DATA = "comparison.json"


def write_report(comparison: Comparison, reports: Path) -> Comparison:
    """Writes the report folder whole or not at all, and says in the comparison where it is.

    A report is replaced by the same comparison only: the same runs, treatment, allowances, claims
    and point.

    Raises:
        UserError: something else stands in its place.
        StoreError: it cannot be written.
    """
    first, second = (_safe(name) for name in comparison.names)
    folder = reports / f"{first}--{second}--{comparison.key[:8]}"
    comparison = replace(comparison, report=folder)
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=reports, prefix=".report-") as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            figures = draw(comparison, new)
            (new / "report.md").write_text(render_markdown(comparison, figures), encoding="utf-8")
            data = json.dumps(_data(comparison), indent=1, allow_nan=False)
            (new / DATA).write_text(data + "\n", encoding="utf-8")
            with _alone_in(reports):
                _replace(folder, new, Path(temporary, "old"), comparison.key)
    except OSError as error:
        raise StoreError.at(str(folder), f"the report cannot be written: {error}") from None
    return comparison


def render_markdown(
    comparison: Comparison, figures: Sequence[str] = (), *, today: datetime | None = None
) -> str:
    """The report as Markdown; lines of tables are at most 100 wide."""
    today = today or datetime.now(UTC)
    first, second = (text(name) for name in comparison.names)
    parts = [
        f"# {title(comparison)}",
        f"A: {first}  \nB: {second}  \n{_status_line(comparison, today)}",
        _overrides(comparison),
        headline(comparison),
    ]
    if comparison.results is None:
        parts += [_what_to_do(comparison)]
    else:
        if DIFFERENCE in figures:
            parts.append(f"![Difference of the evaluation over training]({DIFFERENCE})")
        parts += [sections.numbers(comparison), statement(comparison)]
        parts += [sections.evaluations(comparison)]
        if CURVES in figures:
            parts.append(f"![Loss curves of both runs]({CURVES})")
        if comparison.verdict == "refused":
            parts.append(_what_to_do(comparison))
    parts += [
        "## Checklist",
        sections.checklist(comparison),
        "## Held out",
        held_out_section({"A": comparison.a.record, "B": comparison.b.record}),
        "## What differs",
        sections.spec_difference(comparison),
        "## Runs",
        sections.runs(comparison),
        "## Reproduce",
        sections.reproduce(comparison),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _status_line(comparison: Comparison, today: datetime) -> str:
    judgement = comparison.judgement
    treatment = ", ".join(text(name) for name in judgement.treatment) or "none"
    if judgement.treatment:
        treatment += " (inferred, not declared)" if judgement.inferred else " (declared)"
    at = "no common point" if comparison.at is None else f"{comparison.at:,} tokens"
    overridden = ", ".join(judgement.allow) or "none"
    return (
        f"treatment: {treatment} · overrides: {overridden} · compared at: {at} · "
        f"ruleset {judgement.ruleset} · {today:%Y-%m-%d}"
    )


def _overrides(comparison: Comparison) -> str:
    return "\n".join(
        f"- **override** of `{rule}`: {text(reason)}"
        for rule, reason in comparison.judgement.allow.items()
    )


def _what_to_do(comparison: Comparison) -> str:
    judgement, asked = comparison.judgement, comparison.asked
    refusing = [ruling for ruling in judgement.rules if ruling.over(asked) == "refused"]
    lines = ["The two runs do not answer one question:", ""]
    lines += [f"- **{ruling.rule}**: {text(why(ruling))}" for ruling in refusing]
    lines += ["", "To compare them:", ""]
    remedies = sections.remedies(comparison)
    lines += [f"- {text(remedies[ruling.rule])}" for ruling in refusing]
    lines += ["", block(sections.matching_commands(comparison))]
    return "\n".join(lines)


def _data(comparison: Comparison) -> object:
    results = comparison.results
    series = {} if results is None else results.series
    curves = {
        metric: {
            "unit": one.unit,
            "tokens": one.tokens,
            "a": one.a,
            "b": one.b,
            "difference": one.difference,
            "documents": [d and {"n": d.n, "interval": d.interval} for d in one.documents],
        }
        for metric, one in series.items()
    }
    runs = [{"id": side.record.id, "name": side.name} for side in (comparison.a, comparison.b)]
    document = comparison.to_json() | {"key": comparison.key, "runs": runs, "series": curves}
    return strict(document)


def _key_of(folder: Path) -> str | None:
    try:
        document = json.loads((folder / DATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("key") if isinstance(document, dict) else None


def _replace(folder: Path, new: Path, old: Path, key: str) -> None:
    """Puts the new folder in place of one with the same key; that comes back if this fails."""
    if not folder.exists():
        new.rename(folder)
        return
    if _key_of(folder) != key:
        message = "this is not an earlier report of the same comparison, so it is left alone"
        raise UserError.at(str(folder), message, None, "move it away")
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise


@contextmanager
def _alone_in(reports: Path) -> Iterator[None]:
    """Holds a lock on the folder of reports, where its file system has locks."""
    handle = os.open(reports, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _safe(name: str) -> str:
    """A name as part of a folder's name: no separators, no leading dot, of bounded length."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:100] or "run"
