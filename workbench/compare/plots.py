"""The figures of a report: the difference over training, and the curves of both runs.

Readable in grey and without telling colours apart: the runs differ in line style and marker too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.compare.results import Results, Series

if TYPE_CHECKING:
    from workbench.compare.pair import Comparison

DIFFERENCE, CURVES = "difference.png", "curves.png"

# Blue and vermilion of Okabe and Ito's palette: distinct for every kind of colour vision, and of
# unequal lightness.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o", "markersize": 4},
    {"color": "#D55E00", "linestyle": "--", "marker": "s", "fillstyle": "none", "markersize": 7},
)
_GREY = "#666666"
_AXES = {"nll": "NLL (nats/token)", "bits_per_byte": "bits per byte"}
_TITLES = {
    "train": "train: the optimised stream",
    "train_split": "train_split: fixed training text",
    "held_out": "held_out: never trained on",
    "contaminated": "contaminated: overlaps the training text",
    "unproven": "unproven: not shown to be held out",
}


def draw(comparison: Comparison, folder: Path) -> list[str]:
    """Writes the figures that this comparison's verdict permits.

    Returns:
        The names of the files written.
    """
    results = comparison.results
    score = score_of(results)
    if results is None or score is None:
        return []
    _save(_difference(comparison, results, score), folder / DIFFERENCE)
    _save(_curves(comparison, results, score), folder / CURVES)
    return [DIFFERENCE, CURVES]


def draw_run(metrics: Mapping[str, Sequence[float | None]], path: Path) -> bool:
    """Draws the NLL of one run over its training. False: nothing was measured, nothing is drawn."""
    lines = {
        name: points for name in _TITLES if len((points := _points(metrics, f"{name}/nll"))[0]) > 1
    }
    if not lines:
        return False
    figure = _figure(6.4, 3.8)
    axes = figure.add_subplot()
    styles: tuple[dict[str, Any], ...] = ({"color": "#999999", "linewidth": 1}, *_STYLES)
    for (name, (tokens, values)), style in zip(lines.items(), styles, strict=False):
        axes.plot(tokens, values, label=_TITLES[name], **style)
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel(_AXES["nll"])
    axes.legend(frameon=False, fontsize=8)
    _tidy(axes)
    _save(figure, path)
    return True


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


def _difference(comparison: Comparison, results: Results, score: str) -> Any:
    curves = series_of(results, score)
    ratios = [3.0] + [1.6] * (len(curves) - 1)
    figure = _figure(3.4 + 3.2 * len(curves), 3.8)
    grid = figure.add_gridspec(1, len(curves), width_ratios=ratios)
    shared = None  # one scale, so that the sets can be compared by eye
    for column, (name, series) in enumerate(curves.items()):
        axes = figure.add_subplot(grid[column], sharey=shared)
        shared = shared or axes
        axes.axhline(0, color=_GREY, linewidth=1)
        known = [(at, d) for at, d in zip(series.tokens, series.documents, strict=True) if d]
        if known:
            axes.fill_between(
                [at for at, _ in known],
                [documents.interval[0] for _, documents in known],
                [documents.interval[1] for _, documents in known],
                color="#BBBBBB",
                alpha=0.6,
                linewidth=0,
                label=f"95 % interval over {known[-1][1].n} documents, this seed",
            )
        drawn = [math.nan if value is None else value for value in series.difference]
        axes.plot(series.tokens, drawn, color="black", marker="o", markersize=4)
        axes.set_title(_TITLES.get(name, name), fontsize=9)
        axes.set_xlabel("tokens trained on")
        if column == 0:
            axes.set_ylabel(f"difference of {_AXES[score]}")
            if known:
                axes.legend(loc="best", frameon=False, fontsize=8)
        _tidy(axes)
    first, second = (_short(name) for name in comparison.names)
    figure.suptitle(f"{second} minus {first} (below zero: {second} is lower)", fontsize=10)
    return figure


def _curves(comparison: Comparison, results: Results, score: str) -> Any:
    panels: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {}
    if score == "nll":
        panels["train"] = [_train(metrics, comparison.at) for metrics in comparison.metrics]
    curves = series_of(results, score)
    for name, series in reversed(curves.items()):
        panels[name] = [(series.tokens, values) for values in (series.a, series.b)]
    figure = _figure(3.2 * len(panels) + 0.6, 3.6)
    shared = None
    for column, (name, pair) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), column + 1, sharey=shared)
        shared = shared or axes
        for (tokens, values), style, label in zip(pair, _STYLES, comparison.names, strict=True):
            marks = {} if name != "train" else {"markevery": max(1, len(tokens) // 8)}
            axes.plot(tokens, values, label=_short(label), **style, **marks)
        axes.set_title(_TITLES.get(name, name), fontsize=9)
        axes.set_xlabel("tokens trained on")
        if column == 0:
            axes.set_ylabel(_AXES[score])
            axes.legend(frameon=False, fontsize=8)
        _tidy(axes)
    return figure


def _train(
    metrics: Mapping[str, Sequence[float | None]], at: int | None
) -> tuple[list[float], list[float]]:
    tokens, values = _points(metrics, "train/nll")
    kept = [place for place, count in enumerate(tokens) if count <= (at or count)]
    return [tokens[i] for i in kept], [values[i] for i in kept]


def _points(
    metrics: Mapping[str, Sequence[float | None]], name: str
) -> tuple[list[float], list[float]]:
    """Token counts and values of a metric, where it was measured."""
    rows = zip(metrics.get("tokens", ()), metrics.get(name, ()), strict=False)
    kept = [(tokens, value) for tokens, value in rows if tokens is not None and value is not None]
    return [tokens for tokens, _ in kept], [value for _, value in kept]


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    return Figure(figsize=(width, height), layout="constrained")


def _tidy(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(axis="x", nbins=5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _short(name: str, width: int = 32) -> str:
    # A dollar sign would start mathematics.
    text = name if len(name) <= width else f"{name[: width // 2 - 1]}…{name[-width // 2 :]}"
    return text.replace("$", r"\$")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
