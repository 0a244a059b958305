"""The drawing of differences with their intervals: over training, and of several arms at one point.

An interval over two seeds may be a hundred times as wide as everything that was measured. Drawn
whole it would leave nothing else to be seen; left out it would claim what is not known. Such a one
runs out of the picture, with an arrow on each end that does and its numbers written beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.compare.plots import (
    BAND,
    GREY,
    WIDE,
    Interval,
    Points,
    figure_of,
    short,
    short_count,
    tidy,
)
from workbench.compare.stats import Floats

_LONGEST_LABEL = 16  # characters of the part before the unit, in the height of a figure
_WIDEST = 6.0  # times what was measured, beyond which an interval runs out of the picture
_ROOM = 0.6  # of what was measured, left free on either side of it then
_BEYOND = "goes on beyond the picture"
_ZERO: dict[str, Any] = {"color": GREY, "linewidth": 1.2, "linestyle": (0, (6, 3))}
_BAR: dict[str, Any] = {"ecolor": "black", "capsize": 3, "fmt": "none"}


def view_of(measured: Iterable[float], intervals: Iterable[Interval | None]) -> Interval | None:
    """The range of an axis that shows what was measured, where whole intervals would hide it.

    Args:
        measured: single values; zero is always among them.
        intervals: those to be drawn.

    Returns:
        None where everything is shown whole.
    """
    known = [value for value in (0.0, *measured) if math.isfinite(value)]
    low, high = min(known), max(known)
    ends = [end for one in intervals if one is not None for end in one if math.isfinite(end)]
    whole = max([high, *ends]) - min([low, *ends])
    if high == low or whole <= _WIDEST * (high - low):
        return None
    room = _ROOM * (high - low)
    return low - room, high + room


@dataclass(frozen=True)
class Seeds:
    """The differences between seeds at every point, [P, N]: of the pairs of equal seeds, which are
    drawn, or of all pairs of seeds, which only say how far noise reaches."""

    each: Floats
    paired: bool


def difference(
    tokens: Points,
    values: Points,
    intervals: Sequence[Interval | None],
    *,
    axis: str,
    title: str,
    between: str,
    names: tuple[str, str] = ("A", "B"),
    size: tuple[float, float] = WIDE,
    seeds: Seeds | None = None,
    last: str = "",
) -> Any:
    """The difference of two arms over training with its interval and the zero line; beside it the
    last point on a scale of its own, which the first ones, often much larger, would hide.

    Args:
        seeds: without them every interval is drawn whole.
        last: the interval at the last point, as it is written where it is not drawn whole.
    """
    figure = figure_of(size)
    alone = len(tokens) < 2
    grid = figure.add_gridspec(1, 1 if alone else 2, width_ratios=[1] if alone else [3, 1])
    axes = figure.add_subplot(grid[0])
    beyond = _difference_over(axes, tokens, values, intervals, between, seeds)
    axes.set_xlabel("tokens trained on")
    # Two long names along the axis would run out of the figure; the title has the arms.
    written = " - ".join(reversed(names))
    axes.set_ylabel(f"{written if len(written) <= _LONGEST_LABEL else 'difference'}, {axis}")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    tidy(axes)
    axes.set_xlim(-0.03 * max(tokens), 1.03 * max(tokens))  # room for the bars of both ends
    handles, labels = axes.get_legend_handles_labels()
    if not alone:
        panel = figure.add_subplot(grid[1])
        at_last = None if seeds is None else Seeds(seeds.each[-1:], seeds.paired)
        beyond |= _difference_over(panel, [0], values[-1:], intervals[-1:], between, at_last)
        panel.set_xlim(-1, 1)
        panel.set_xticks([0], [short_count(tokens[-1])])
        panel.set_title("last point", fontsize=9)
        panel.yaxis.tick_right()
        tidy(panel, tokens=False)
    if beyond:
        labels = [f"{one}, {_BEYOND}" if one == between else one for one in labels]
        if last:
            labels = [
                one.replace(_BEYOND, f"{_BEYOND}\n(at the last point {last})") for one in labels
            ]
    figure.legend(handles, labels, loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    return figure


def _difference_over(
    axes: Any,
    tokens: Points,
    values: Points,
    intervals: Sequence[Interval | None],
    between: str,
    seeds: Seeds | None,
) -> bool:
    """Draws it; returns whether an interval runs out of the picture."""
    view = None
    if seeds is not None:
        view = view_of([*values, *seeds.each.ravel().tolist()], intervals)
    axes.axhline(0, label="no difference", **_ZERO)
    known = [(at, one) for at, one in zip(tokens, intervals, strict=True) if one is not None]
    if known:
        places, ends = [at for at, _ in known], np.array([one for _, one in known])
        axes.fill_between(places, ends[:, 0], ends[:, 1], color=BAND, alpha=0.5, linewidth=0)
        middle = ends.mean(axis=1)
        half = np.ptp(ends, axis=1) / 2
        axes.errorbar(places, middle, yerr=half, label=between, elinewidth=1, **_BAR)
    if seeds is not None and seeds.paired:
        look = {"color": GREY, "linewidth": 0.9, "marker": "x", "markersize": 4}
        for index, line in enumerate(seeds.each.T):
            axes.plot(tokens, line, label="each seed" if index == 0 else None, **look)
    axes.plot(tokens, values, color="black", marker="o", markersize=5, label="difference")
    if view is None:
        return False
    axes.set_ylim(view)
    beyond = False
    for at, (low, high) in known:
        for is_beyond, place, marker in ((low < view[0], 0, "v"), (high > view[1], 1, "^")):
            if is_beyond:
                _arrow(axes, at, place, marker)
                beyond = True
    return beyond


def _arrow(axes: Any, x: float, y: float, marker: str) -> None:
    """The mark of an interval that goes on, inside the edge that it crosses: 0 or 1 is the place of
    that edge."""
    upright = marker in "v^"
    edge = 0.975 if (y if upright else x) else 0.025
    point = ([x], [edge]) if upright else ([edge], [y])
    transform = axes.get_xaxis_transform() if upright else axes.get_yaxis_transform()
    axes.plot(*point, marker=marker, color="black", markersize=7, zorder=4, transform=transform)


@dataclass(frozen=True)
class Effect:
    """The difference of one arm from the baseline; `each` is that of every paired seed, `written`
    the difference and its interval over seeds in figures."""

    name: str
    difference: float
    seeds: Interval | None
    documents: Interval | None
    each: tuple[float, ...] = ()
    written: tuple[str, str] = ("", "")


def effects(rows: Sequence[Effect], *, axis: str, title: str, level: str) -> Any:
    """One row for each arm: its difference with both intervals, the zero line, and its numbers."""
    figure = figure_of((WIDE[0] + 1.6, 1.9 + 0.42 * len(rows)))
    axes = figure.add_subplot()
    axes.axvline(0, label="no difference", **_ZERO)
    measured = [value for row in rows for value in (row.difference, *row.each)]
    measured += [end for row in rows if row.documents is not None for end in row.documents]
    view = view_of(measured, [row.seeds for row in rows])
    if view is not None:
        axes.set_xlim(view)
    said: set[str] = set()
    beyond = False
    for place, row in enumerate(rows):
        if row.documents is not None:
            low, high = row.documents
            look = {"height": 0.5, "facecolor": BAND, "alpha": 0.7, "edgecolor": GREY}
            label = _once(said, f"{level} interval over documents, these models alone")
            axes.barh(place, high - low, left=low, label=label, **look)
        if row.seeds is not None:
            low, high = row.seeds
            label = _once(said, f"{level} interval over seeds")
            half = [(high - low) / 2]
            axes.errorbar(
                [(low + high) / 2], [place], xerr=half, label=label, elinewidth=1.4, **_BAR
            )
            if view is not None:
                beyond |= low < view[0] or high > view[1]
                if low < view[0]:
                    _arrow(axes, 0, place, "<")
                if high > view[1]:
                    _arrow(axes, 1, place, ">")
        if row.each:
            look = {"marker": "x", "color": "black", "s": 36, "linewidths": 1.4, "zorder": 3}
            label = _once(said, "a seed")
            axes.scatter(row.each, [place] * len(row.each), label=label, **look)
        label = _once(said, "mean over seeds")
        axes.plot([row.difference], [place], "o", color="#0072B2", markersize=7, label=label)
    axes.set_yticks(range(len(rows)), [short(row.name, 30) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(axis)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    tidy(axes, tokens=False)
    axes.grid(visible=False)
    _written_beside(axes, rows, level)
    handles, labels = axes.get_legend_handles_labels()
    seeds = f"{level} interval over seeds"
    labels = [f"{one}; arrow: it {_BEYOND}" if beyond and one == seeds else one for one in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    return figure


def _once(said: set[str], label: str) -> str | None:
    """The label where it is used first, for a legend that has every one once."""
    if label in said:
        return None
    said.add(label)
    return label


def _written_beside(axes: Any, rows: Sequence[Effect], level: str) -> None:
    """The numbers of every row at the right of its picture, under their heads."""
    if not any(any(row.written) for row in rows):
        return
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(range(len(rows)), ["  ".join(row.written) for row in rows])
    beside.tick_params(length=0, labelsize=9, pad=8)
    beside.spines["right"].set_visible(False)
    for label in beside.get_yticklabels():
        label.set_fontfamily("monospace")
    heads = f"difference, {level} over seeds"
    axes.annotate(
        heads,
        (1, 1),
        xytext=(8, 0),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        va="bottom",
        color=GREY,
    )
