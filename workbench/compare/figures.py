"""Which figures a comparison has, and what each says in words to whoever cannot see it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.compare import difference_plots, plots
from workbench.compare.document import Figure, Figures
from workbench.compare.numbers import decimals, write, write_interval
from workbench.compare.results import Number, Results, Series

if TYPE_CHECKING:
    from workbench.compare.pair import Comparison

_LEAST_PACES = 5  # of steps, for their spread to be shown
_HIGHEST_SHARE = 3.0  # times an equal share, from where on a map of routes is black


def draw(comparison: Comparison, folder: Path) -> dict[str, Figures]:
    """Writes the figures that this comparison's verdict permits.

    Returns:
        Where in the report they belong (answer, curves, documents, cost, routes) -> the figures.
    """
    results = comparison.results
    if results is None:
        return {}
    with plots.styled():
        found = {
            "answer": _answer(comparison, results, folder),
            "curves": _curves(comparison, results, folder),
            "documents": _documents(results, folder),
            "cost": _cost(comparison, results, folder),
            "routes": _routes(comparison, results, folder),
        }
    return {place: Figures(tuple(drawn)) for place, drawn in found.items() if drawn}


def score_of(results: Results | None) -> str | None:
    """The score that has curves: NLL, or bits per byte where NLL is refused."""
    if results is None:
        return None
    with_points = [metric for metric, series in results.series.items() if series.tokens]
    scores = [metric.rpartition("/")[2] for metric in with_points]
    return next((score for score in ("nll", "bits_per_byte") if score in scores), None)


def series_of(results: Results, score: str) -> dict[str, Series]:
    """Evaluation set -> its curve of this score, held-out sets first."""
    return {
        metric.rpartition("/")[0]: series
        for metric, series in results.series.items()
        if metric.endswith(f"/{score}") and series.tokens
    }


def _answer(comparison: Comparison, results: Results, folder: Path) -> list[Figure]:
    score = score_of(results)
    if score is None:
        return []
    found: list[Figure] = []
    for name, series in series_of(results, score).items():
        values = [math.nan if value is None else value for value in series.difference]
        intervals = [None if one is None else one.interval for one in series.documents]
        counted = next((one.n for one in reversed(series.documents) if one), 0)
        between = f"95 % interval over {counted:,} documents, these two runs alone"
        figure = difference_plots.difference(
            series.tokens,
            values,
            intervals,
            axis=plots.AXES[score],
            title=f"{_titled(name)}\nbelow zero: B is lower, which is better",
            between=between,
            size=plots.HALF if found else plots.WIDE,
        )
        metric = f"{name}/{score}"
        alt = _difference_words(metric, series, results.numbers[metric])
        caption = f"B - A of {metric} at every evaluation of both runs" + (
            f"; bars: {between}." if counted else "."
        )
        file = "difference.png" if not found else f"difference-{_file(name)}.png"
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found


def _difference_words(metric: str, series: Series, number: Number) -> str:
    digits = decimals(number)
    first, last = (
        "not finite" if value is None else write(metric, value, digits, sign=True)
        for value in (series.difference[0], series.difference[-1])
    )
    said = f"Difference of {metric}, B minus A, over training: "
    if len(series.tokens) > 1:
        said += f"{first} at {series.tokens[0]:,} tokens, "
    said += f"{last} {series.unit} at {series.tokens[-1]:,} tokens, the last point"
    found = series.documents[-1]
    if found is None:
        return f"{said}, where there is no interval."
    low, high = found.interval
    zero = "holds zero" if low <= 0 <= high else "does not hold zero"
    interval = write_interval(found.interval, digits)
    return f"{said}, where the 95 % interval over {found.n:,} documents, {interval}, {zero}."


def _curves(comparison: Comparison, results: Results, folder: Path) -> list[Figure]:
    score = score_of(results)
    if score is None:
        return []
    panels: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {
        name: [(series.tokens, values) for values in (series.a, series.b)]
        for name, series in series_of(results, score).items()
    }
    if score == "nll":
        panels["train"] = [_train(metrics, comparison.at) for metrics in comparison.metrics]
    shown = [value for pair in panels.values() for _, values in pair for value in values]
    limits = _limits(shown)
    found = []
    for name, pair in panels.items():
        lines = [
            plots.Curve(label, side, tokens, values)
            for label, side, (tokens, values) in zip("AB", comparison.names, pair, strict=True)
        ]
        figure = plots.curves(lines, axis=plots.AXES[score], title=_titled(name), limits=limits)
        file = f"curves-{_file(name)}.png"
        ends = [
            f"{line.label} goes from {line.values[0]:.3f} to {line.values[-1]:.3f}"
            for line in lines
            if len(line.values)
        ]
        said = "; ".join(ends)
        alt = f"{name}/{score} of both runs over training, in {_UNITS[score]}: {said}."
        caption = (
            f"{name}/{score} of A and B on one scale with the other sets; one run each, so no band."
        )
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found


def _limits(values: Sequence[float]) -> tuple[float, float] | None:
    """One scale for all panels; None: nothing finite."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    room = 0.04 * (max(known) - min(known)) or 0.1
    return min(known) - room, max(known) + room


def _train(
    metrics: Mapping[str, Sequence[float | None]], at: int | None
) -> tuple[list[float], list[float]]:
    tokens, values = plots.measured(metrics, "train/nll")
    kept = [place for place, count in enumerate(tokens) if count <= (at or count)]
    return [tokens[i] for i in kept], [values[i] for i in kept]


def _documents(results: Results, folder: Path) -> list[Figure]:
    pairs = results.details.documents
    if pairs is None or len(pairs.weight) < 2:
        return []
    change = pairs.b - pairs.a
    if not np.isfinite(change).all():
        return []
    number = results.numbers[pairs.metric]
    interval = None if number.documents is None else number.documents.interval
    name, _, score = pairs.metric.rpartition("/")
    figure = plots.documents(
        pairs.a,
        pairs.b,
        pairs.weight,
        interval,
        axis=plots.AXES[score],
        title=f"{_titled(name)}, by document",
    )
    lower, higher = int((change < 0).sum()), int((change > 0).sum())
    alt = (
        f"Of {len(change):,} documents {lower:,} cost B less than A and {higher:,} more; the"
        f" differences of single documents reach from {change.min():+.3g} to {change.max():+.3g}"
        f" {number.unit}."
    )
    caption = (
        f"Each document of {pairs.metric.rpartition('/')[0]}: below zero, B predicts it better."
    )
    file = "documents.png"
    return [Figure(file, alt, caption, plots.save(figure, folder / file))]


def _cost(comparison: Comparison, results: Results, folder: Path) -> list[Figure]:
    found = []
    labels = [f"{label}: {name}" for label, name in zip("AB", comparison.names, strict=True)]
    for name, axis, scale, title, file in _COSTS:
        number = results.numbers.get(name)
        if number is None or number.a is None or number.b is None:
            continue
        values = [number.a, number.b]
        if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
            continue
        paces = results.details.paces if name == "tokens_per_s" else ((), ())
        spans = [_span(pace) for pace in paces]
        unit = "" if name == "peak_memory_bytes" else f" {number.unit}"
        said = [write(name, value, size=max(values)) + unit for value in values]
        figure = plots.bars(
            labels,
            [value * scale for value in values],
            said,
            spans,
            axis=axis,
            title=title,
        )
        alt = f"{title}: A {said[0]}, B {said[1]}."
        caption = f"{number.what[:1].upper()}{number.what[1:]}."
        if any(spans):
            caption += " Line: the middle 80 % of the timed steps that were logged."
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found


def _span(paces: Sequence[float]) -> tuple[float, float] | None:
    if len(paces) < _LEAST_PACES:
        return None
    low, high = np.quantile(paces, [0.1, 0.9])
    return float(low), float(high)


def _routes(comparison: Comparison, results: Results, folder: Path) -> list[Figure]:
    found = []
    known = [one for one in results.details.routes if one is not None]
    highest = max(
        [_HIGHEST_SHARE / one.shares.shape[1] for one in known]
        + [float(one.shares.max()) for one in known],
        default=1.0,
    )
    for label, name, routes in zip("AB", comparison.names, results.details.routes, strict=True):
        if routes is None:
            continue
        figure = plots.shares(
            routes.layers,
            routes.shares,
            title=f"{label}: {plots.short(name, 30)}",
            highest=min(1.0, highest),
        )
        layer, expert = np.unravel_index(routes.shares.argmax(), routes.shares.shape)
        low_layer, low_expert = np.unravel_index(routes.shares.argmin(), routes.shares.shape)
        experts = routes.shares.shape[1]
        alt = (
            f"Shares of routes of {label} by layer and expert; an equal share is"
            f" {100 / experts:.3g} %. The largest is {routes.shares.max():.1%} (layer"
            f" {routes.layers[layer]}, expert {expert}), the smallest {routes.shares.min():.1%}"
            f" (layer {routes.layers[low_layer]}, expert {low_expert})."
        )
        caption = f"Routes of {routes.updates:,} logged updates up to the point compared."
        file = f"routes-{label.lower()}.png"
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found


def _titled(name: str) -> str:
    kind, _, rest = name.partition(".")
    said = plots.TITLES.get(kind, kind)
    return f"{plots.short(name)}: {said.partition(': ')[2]}" if rest and ": " in said else said


def _file(name: str) -> str:
    return "".join(one if one.isalnum() and one.isascii() else "_" for one in name)[:60]


_UNITS = {"nll": "nats/token", "bits_per_byte": "bits/byte"}
_COSTS: tuple[tuple[str, str, float, str, str], ...] = (
    ("tokens_per_s", "tokens/s", 1.0, "Throughput", "throughput.png"),
    ("peak_memory_bytes", "GB", 1e-9, "Peak memory", "memory.png"),
)
