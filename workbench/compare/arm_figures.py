"""Which figures a comparison of arms has, and what each says to whoever cannot see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

import numpy as np

from workbench.compare import difference_plots, plots
from workbench.compare.arm_cost import cost_figures, route_figures
from workbench.compare.arm_results import ArmResults, ArmSeries
from workbench.compare.arm_sentences import difference_digits
from workbench.compare.arms import Arm, ArmPair, ArmsComparison
from workbench.compare.difference_plots import Seeds
from workbench.compare.document import Figure, Figures
from workbench.compare.numbers import write, write_interval
from workbench.compare.stats import Floats

_LARGE, _SMALL = (6.2, 4.3), (4.6, 4.3)  # inches
_MOST_POINTS = 400  # of a training curve; each is then the mean of the steps that it stands for


def draw(comparison: ArmsComparison, folder: Path) -> dict[str, Figures]:
    """Writes the figures that the verdicts permit.

    Returns:
        `answer:NAME` and `documents:NAME` for each arm that is compared, and `curves`, `cost` and
        `routes` of all of them -> figures.
    """
    found: dict[str, list[Figure]] = {}
    with plots.styled():
        for index, pair in enumerate(comparison.pairs):
            if pair.results is not None:
                found[f"answer:{pair.b.name}"] = _answer(pair, pair.results, folder, index)
                found[f"documents:{pair.b.name}"] = _documents(pair, pair.results, folder, index)
        shown = [pair for pair in comparison.pairs if pair.results is not None]
        if shown:
            found["curves"] = _curves(comparison, shown, folder)
            found["cost"] = cost_figures(shown, folder)
            arms = {arm.name: arm for pair in shown for arm in (pair.a, pair.b)}
            found["routes"] = route_figures(list(arms.values()), comparison.at, folder)
    return {place: Figures(tuple(drawn)) for place, drawn in found.items() if drawn}


def metrics_of(results: ArmResults) -> list[str]:
    """The evaluation numbers that have curves: NLL, or bits per byte where that is refused."""
    for score in ("nll", "bits_per_byte"):
        named = [
            metric
            for metric, series in results.series.items()
            if metric.endswith(f"/{score}") and series.tokens
        ]
        if named:
            return named
    return []


def _answer(pair: ArmPair, results: ArmResults, folder: Path, index: int) -> list[Figure]:
    found: list[Figure] = []
    for place, metric in enumerate(metrics_of(results)):
        series, number = results.series[metric], results.numbers[metric]
        name, _, score = metric.rpartition("/")
        intervals: list[plots.Interval | None] = [
            (float(low), float(high)) if math.isfinite(low) else None
            for low, high in series.interval
        ]
        level = f"{100 * series.level:.4g} %"
        between = f"{level} interval over {len(pair.a.runs)} seeds, pointwise"
        if not any(intervals) and number.documents is not None:
            intervals[-1] = number.documents.interval
            between = f"{level} interval over documents, these models held fixed"
        # The answer first and large; a name in the title may be as long as that leaves room for.
        size, width = (_LARGE, 40) if place == 0 else (_SMALL, 24)
        digits = difference_digits(number)
        last = intervals[-1]
        figure = difference_plots.difference(
            series.tokens,
            series.difference.tolist(),
            intervals,
            axis=plots.AXES[score],
            title=f"{_titled(name)}\nbelow zero: {plots.short(pair.b.name, width)} is lower",
            between=between,
            names=(plots.short(pair.a.name, 16), plots.short(pair.b.name, 16)),
            size=size,
            seeds=seeds_of(pair, series),
            last=write_interval(last, digits) if last else "",
        )
        said = write(metric, float(series.difference[-1]), digits, sign=True)
        alt = (
            f"{metric}: {pair.b.name} minus {pair.a.name} is {said} {series.unit} at"
            f" {series.tokens[-1]:,} tokens"
            + (f", {level} interval {write_interval(last, digits)}." if last else ".")
        )
        caption = f"{pair.b.name} - {pair.a.name} in {metric}; the verdict is of the last point."
        file = f"difference-{index}-{place}.png"
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found


def seeds_of(pair: ArmPair, series: ArmSeries) -> Seeds | None:
    """The differences between the seeds of two arms over training; None: there is one of each."""
    if series.a.shape[1] < 2 or series.b.shape[1] < 2:
        return None
    if pair.seeds.design == "paired":
        return Seeds(series.b - series.a, paired=True)
    every = series.b[:, :, None] - series.a[:, None, :]
    return Seeds(every.reshape(len(every), -1), paired=False)


def _curves(comparison: ArmsComparison, shown: Sequence[ArmPair], folder: Path) -> list[Figure]:
    """The curves of all arms whose pair may be shown, each with the range of its seeds."""
    results = shown[0].results
    assert results is not None
    arms = [shown[0].a, *(pair.b for pair in shown)]
    found = []
    for place, metric in enumerate(metrics_of(results)):
        tables = [results.series[metric].a]
        tokens = [results.series[metric].tokens]
        for pair in shown:
            if pair.results is not None and metric in pair.results.series:
                tables.append(pair.results.series[metric].b)
                tokens.append(pair.results.series[metric].tokens)
        if len(tables) == len(arms):
            name, _, score = metric.rpartition("/")
            title = _titled(name)
            file = f"curves-{place}.png"
            found.append(
                _curve(arms, tokens, tables, plots.AXES[score], title, metric, folder / file)
            )
    if metrics_of(results)[:1] and metrics_of(results)[0].endswith("/nll"):
        streams = [_training(arm, comparison.at or 0) for arm in arms]
        if all(len(points) for points, _ in streams):
            points, tables = [s[0] for s in streams], [s[1] for s in streams]
            path = folder / "curves-train.png"
            title, axis = plots.TITLES["train"], plots.AXES["nll"]
            found.append(_curve(arms, points, tables, axis, title, "train/nll", path))
    return found


def _curve(
    arms: Sequence[Arm],
    tokens: Sequence[Sequence[float]],
    tables: Sequence[Floats],
    axis: str,
    title: str,
    metric: str,
    path: Path,
) -> Figure:
    lines = []
    for index, (arm, points, table) in enumerate(zip(arms, tokens, tables, strict=True)):
        several = table.shape[1] > 1
        lines.append(
            plots.Curve(
                ascii_uppercase[index % 26],
                arm.name,
                points,
                table.mean(axis=1).tolist(),
                table.min(axis=1).tolist() if several else None,
                table.max(axis=1).tolist() if several else None,
            )
        )
    figure = plots.curves(lines, axis=axis, title=title)
    said = "; ".join(
        f"{arm.name} {float(table[0].mean()):.4g} to {float(table[-1].mean()):.4g}"
        for arm, table in zip(arms, tables, strict=True)
    )
    caption = f"{metric}: the mean over the seeds of each arm; shaded: lowest to highest seed."
    alt = f"{metric} over training: {said}."
    return Figure(path.name, alt, caption, plots.save(figure, path))


def _training(arm: Arm, at: int) -> tuple[list[float], Floats]:
    """Tokens [P] and the optimised stream of an arm's runs [P, n], where all of them logged it."""
    found = [plots.measured(data.metrics, "train/nll") for data in arm.data]
    shared = set.intersection(*(set(tokens) for tokens, _ in found))
    kept = [token for token in found[0][0] if token in shared and token <= at]
    columns = []
    for tokens, values in found:
        wanted = set(kept)
        columns.append([v for token, v in zip(tokens, values, strict=True) if token in wanted])
    table = np.array(columns, np.float64).T.reshape(len(kept), len(columns))
    pieces = np.array_split(np.arange(len(kept)), min(len(kept), _MOST_POINTS)) if kept else []
    means = [table[piece].mean(axis=0) for piece in pieces]
    ends = [float(kept[piece[-1]]) for piece in pieces]
    return ends, np.array(means, np.float64).reshape(len(pieces), len(columns))


def _documents(pair: ArmPair, results: ArmResults, folder: Path, index: int) -> list[Figure]:
    metric = next((one for one in pair.deciding if one in results.documents), None)
    if metric is None:
        return []
    means, number = results.documents[metric], results.numbers[metric]
    if not (np.isfinite(means.a).all() and np.isfinite(means.b).all() and means.weight.min() > 0):
        return []
    name, _, score = metric.rpartition("/")
    a, b = means.a / means.weight, means.b / means.weight
    figure = plots.documents(
        a,
        b,
        means.weight,
        number.documents.interval if number.documents else None,
        axis=plots.AXES[score],
        title=f"{_titled(name)}, by document\n"
        f"{plots.short(pair.b.name, 22)} - {plots.short(pair.a.name, 22)}",
        level=f"{100 * number.level:.4g} %",
        names=(plots.short(pair.a.name, 22), plots.short(pair.b.name, 22)),
    )
    change = b - a
    lower, higher = int((change < 0).sum()), int((change > 0).sum())
    alt = (
        f"Of {len(change):,} documents {lower:,} cost {pair.b.name} less than {pair.a.name} on the"
        f" mean over seeds, and {higher:,} more; the differences reach from {change.min():+.3g} to"
        f" {change.max():+.3g} {number.unit}."
    )
    caption = f"Each document, mean over the seeds: {pair.b.name} - {pair.a.name}."
    file = f"documents-{index}.png"
    return [Figure(file, alt, caption, plots.save(figure, folder / file))]


def _titled(name: str) -> str:
    return plots.TITLES.get(name, plots.short(name))
