"""The numbers of a report as data: a tidy table with one row for each number, and JSON.

Empty is what was not measured or may not be shown, and `note` says which; NaN and the infinities
are the words of strict JSON.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from workbench.compare.pair import Comparison
from workbench.compare.results import Documents, Number, Results, Series
from workbench.compare.stats import LEVEL
from workbench.track.record import strict

COLUMNS = (
    "claim",
    "metric",
    "quantity",  # value, mean (over the seeds of an arm), or difference (second arm minus first)
    "arm",
    "run",
    "seed",
    "tokens",
    "document",  # empty: of the whole set or run
    "value",
    "unit",
    "low",
    "high",
    "level",
    "interval",  # what it is drawn over
    "n",
    "p",
    "p_adjusted",
    "note",
)

Row = dict[str, Any]


def tidy_csv(comparison: Comparison) -> str:
    """Every number of the comparison, as CSV with a head; of a refused one the head alone."""
    return write_rows(_rows(comparison))


def write_rows(rows: Iterable[Row]) -> str:
    """The rows as CSV with a head."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in row.items()})
    return out.getvalue()


def series_json(results: Results | None) -> dict[str, Any]:
    """Metric -> its curve in both runs, with the interval of every point."""
    return {
        metric: {
            "unit": one.unit,
            "tokens": one.tokens,
            "a": one.a,
            "b": one.b,
            "difference": one.difference,
            "documents": [d and {"n": d.n, "interval": d.interval} for d in one.documents],
        }
        for metric, one in (results.series if results else {}).items()
    }


def details_json(results: Results | None) -> dict[str, Any] | None:
    """What the figures show beside the numbers."""
    if results is None:
        return None
    pairs, routes = results.details.documents, results.details.routes
    documents = None
    if pairs is not None:
        columns = {"weight": pairs.weight, "a": pairs.a, "b": pairs.b}
        documents = {"metric": pairs.metric, "documents": list(pairs.documents)}
        documents |= {name: column.tolist() for name, column in columns.items()}
    return {
        "documents": documents,
        "routes": {
            side: one and {"layers": list(one.layers), "shares": one.shares.tolist()}
            for side, one in zip("ab", routes, strict=True)
        },
    }


def _rows(comparison: Comparison) -> Iterator[Row]:
    results = comparison.results
    if results is None:
        return
    sides = {
        arm: {"arm": arm, "run": side.name, "seed": facts.get("seed")}
        for arm, side, facts in zip(
            "AB", (comparison.a, comparison.b), comparison.facts, strict=True
        )
    }
    for metric, number in results.numbers.items():
        yield from _of_number(metric, number, comparison.at, sides)
    for metric, series in results.series.items():
        yield from _of_series(metric, series, results.numbers[metric], comparison.at, sides)
    pairs = results.details.documents
    if pairs is not None:
        number = results.numbers[pairs.metric]
        base: Row = {"claim": number.claim, "metric": pairs.metric, "quantity": "value"}
        base |= {"tokens": comparison.at, "unit": number.unit}
        for document, a, b in zip(pairs.documents, pairs.a, pairs.b, strict=True):
            for arm, value in (("A", a), ("B", b)):
                yield {**base, **sides[arm], "document": document, "value": float(value)}


def _of_number(metric: str, number: Number, at: int | None, sides: dict[str, Row]) -> Iterator[Row]:
    note = number.blank or ""
    base = {"claim": number.claim, "metric": metric, "tokens": at, "unit": number.unit}
    for arm, value in (("A", number.a), ("B", number.b)):
        yield {**base, **sides[arm], "quantity": "value", "value": value, "note": note}
    yield {
        **base,
        **_difference(number.difference, number.documents),
        "note": note or number.no_interval or "",
    }


def _of_series(
    metric: str, series: Series, number: Number, at: int | None, sides: dict[str, Row]
) -> Iterator[Row]:
    """The points before the one compared, which is among the numbers."""
    differences = series.difference
    for index, tokens in enumerate(series.tokens):
        if tokens == at:
            continue
        base: Row = {"claim": number.claim, "metric": metric, "tokens": tokens}
        base |= {"unit": series.unit}
        for arm, values in (("A", series.a), ("B", series.b)):
            yield {**base, **sides[arm], "quantity": "value", "value": values[index]}
        yield {**base, **_difference(differences[index], series.documents[index])}


def _difference(value: float | None, documents: Documents | None) -> Row:
    row: Row = {"quantity": "difference", "arm": "B - A", "value": value}
    if documents is not None:
        low, high = documents.interval
        row |= {"low": low, "high": high, "level": LEVEL, "interval": "documents"}
        row["n"] = documents.n
    return row


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, str):
        # A spreadsheet takes what begins so for a formula.
        return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
    return strict(value)
