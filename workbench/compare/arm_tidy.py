"""The numbers and figures of a comparison of arms as data: a tidy table, and curves as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.compare.arm_documents import DocumentMeans
from workbench.compare.arm_results import ArmNumber, ArmSeries
from workbench.compare.arms import Arm, ArmPair, ArmsComparison
from workbench.compare.details import routes_of
from workbench.compare.stats import Floats
from workbench.compare.tidy import Row, write_rows


def tidy_arms_csv(comparison: ArmsComparison) -> str:
    """Every number of the arms whose pair may be shown, each once: the baseline's too, which belong
    to every pair."""
    return write_rows(_rows(comparison))


def figures_json(comparison: ArmsComparison) -> dict[str, Any]:
    """What the figures show beside the numbers: curves and documents of every pair, by the name of
    its arm (both names where the other is not the baseline), and the routes of every arm."""
    series: dict[str, Any] = {}
    documents: dict[str, Any] = {}
    shown: dict[str, Arm] = {}
    for pair in comparison.pairs:
        base = pair.a.name == comparison.baseline.name
        label = pair.b.name if base else f"{pair.b.name} - {pair.a.name}"
        results = pair.results
        series[label] = {
            metric: {
                "unit": one.unit,
                "tokens": list(one.tokens),
                "a": one.a.tolist(),
                "b": one.b.tolist(),
                "difference": one.difference.tolist(),
                "interval": one.interval.tolist(),
                "level": one.level,
            }
            for metric, one in (results.series if results else {}).items()
        }
        documents[label] = {
            metric: {
                "documents": list(one.documents),
                "weight": one.weight.tolist(),
                "a": _per_unit(one.a, one).tolist(),
                "b": _per_unit(one.b, one).tolist(),
            }
            for metric, one in _deciding_documents(pair)
        }
        shown |= {arm.name: arm for arm in (pair.a, pair.b) if results is not None}
    routes: dict[str, Any] = {}
    for name, arm in shown.items():
        found = routes_of(arm.data[0], comparison.at) if comparison.at is not None else None
        if found is not None:
            routes[name] = {"seed": arm.seeds[0], "layers": list(found.layers)}
            routes[name]["shares"] = found.shares.tolist()
    return {"series": series, "documents": documents, "routes": routes}


def _deciding_documents(pair: ArmPair) -> Iterator[tuple[str, DocumentMeans]]:
    """The documents of the numbers that decide, which are those that a figure may show."""
    for metric in pair.deciding:
        if pair.results is not None and metric in pair.results.documents:
            yield metric, pair.results.documents[metric]


def _per_unit(sums: Floats, means: DocumentMeans) -> Floats:
    """[D] of each document, per token or byte; NaN where none of it was scored."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(means.weight > 0, sums / means.weight, np.nan))


def _rows(comparison: ArmsComparison) -> Iterator[Row]:
    seen: set[tuple[str, str, int | None]] = set()  # arm, metric, tokens whose values were given
    given: set[tuple[str, str]] = set()  # arm, metric whose documents were given
    for pair in comparison.pairs:
        if pair.results is None:
            continue
        for metric, number in pair.results.numbers.items():
            base: Row = {"claim": number.claim, "metric": metric, "tokens": comparison.at}
            base |= {"unit": number.unit, "note": number.blank or ""}
            for arm, values, mean in (
                (pair.a, number.a, number.mean_a),
                (pair.b, number.b, number.mean_b),
            ):
                key = arm.name, metric, comparison.at
                if key in seen or (number.blank and arm is pair.a):
                    continue  # what one pair may not show, another may
                seen.add(key)
                yield from _of_arm(base, arm, values, mean)
            yield from _differences(base, pair, number)
        for metric, series in pair.results.series.items():
            claim = pair.results.numbers[metric].claim
            yield from _of_series(comparison, pair, metric, series, claim, seen)
        yield from _of_documents(comparison, pair, given)


def _of_arm(
    base: Row, arm: Arm, values: tuple[float | None, ...], mean: float | None
) -> Iterator[Row]:
    for side, seed, value in zip(arm.runs, arm.seeds, values, strict=True):
        about: Row = {"arm": arm.name, "run": side.name, "seed": seed}
        yield {**base, **about, "quantity": "value", "value": value}
    if len(arm.runs) > 1:
        yield {**base, "arm": arm.name, "quantity": "mean", "value": mean, "n": len(arm.runs)}


def _differences(base: Row, pair: ArmPair, number: ArmNumber) -> Iterator[Row]:
    row: Row = {**base, "arm": f"{pair.b.name} - {pair.a.name}", "quantity": "difference"}
    row["value"] = number.difference
    spans: list[Row] = []
    if number.seeds is not None:
        low, high = number.seeds.interval
        spans.append({"low": low, "high": high, "level": number.seeds.level, "interval": "seeds"})
        spans[-1] |= {"n": min(number.seeds.n), "p": number.seeds.p}
        spans[-1]["p_adjusted"] = number.p_adjusted
    if number.documents is not None:
        low, high = number.documents.interval
        spans.append({"low": low, "high": high, "level": number.level, "interval": "documents"})
        spans[-1]["n"] = number.documents.n
    why = number.blank or number.no_seeds or number.no_documents or ""
    for span in spans or [{"note": why}]:
        yield {**row, **span}


def _of_series(
    comparison: ArmsComparison,
    pair: ArmPair,
    metric: str,
    series: ArmSeries,
    claim: str | None,
    seen: set[tuple[str, str, int | None]],
) -> Iterator[Row]:
    """The points before the one compared, which is among the numbers."""
    for index, tokens in enumerate(series.tokens):
        if tokens == comparison.at:
            continue
        base: Row = {"claim": claim, "metric": metric, "tokens": tokens, "unit": series.unit}
        for arm, table in ((pair.a, series.a), (pair.b, series.b)):
            if (key := (arm.name, metric, tokens)) in seen:
                continue
            seen.add(key)
            values = tuple(float(value) for value in table[index])
            yield from _of_arm(base, arm, values, float(table[index].mean()))
        low, high = (float(end) for end in series.interval[index])
        row: Row = {**base, "arm": f"{pair.b.name} - {pair.a.name}", "quantity": "difference"}
        row["value"] = float(series.difference[index])
        if low == low:  # NaN: there is no interval over one seed
            row |= {"low": low, "high": high, "level": series.level, "interval": "seeds"}
            row["n"] = min(len(pair.a.runs), len(pair.b.runs))
        yield row


def _of_documents(
    comparison: ArmsComparison, pair: ArmPair, given: set[tuple[str, str]]
) -> Iterator[Row]:
    """Every document of the numbers that decide: its mean over the seeds of each arm."""
    for metric, means in _deciding_documents(pair):
        assert pair.results is not None
        number = pair.results.numbers[metric]
        base: Row = {"claim": number.claim, "metric": metric, "tokens": comparison.at}
        base |= {"unit": number.unit, "quantity": "mean"}
        for arm, sums in ((pair.a, means.a), (pair.b, means.b)):
            if (arm.name, metric) in given:
                continue
            given.add((arm.name, metric))
            scored = zip(means.documents, _per_unit(sums, means), means.weight, strict=True)
            for document, value, weight in scored:
                if weight > 0:
                    row: Row = {"arm": arm.name, "document": document, "value": float(value)}
                    yield {**base, **row, "n": len(arm.runs)}
