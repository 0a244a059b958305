"""The drawing of figures from plain numbers: every picture of a report, and that of one run.

Readable in grey and without telling colours apart: what belongs to one arm has a line style, a
marker and a label of its own beside its colour. Intervals are drawn, axes have units, bars begin at
zero.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.compare.stats import Floats

Interval = tuple[float, float]
Points = Sequence[float]

WIDE, HALF = (6.2, 3.9), (4.6, 3.5)  # inches
DOTS = 170  # of the file, an inch
_PIXELS = 100  # of a page, an inch

# Of Okabe and Ito's palette, in an order of unequal lightness: distinct for every kind of colour
# vision, and beside each the line style and marker that tell them apart without it.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o", "markersize": 4},
    {"color": "#D55E00", "linestyle": "--", "marker": "s", "fillstyle": "none", "markersize": 7},
    {"color": "#009E73", "linestyle": "-.", "marker": "^", "markersize": 5},
    {"color": "#000000", "linestyle": ":", "marker": "D", "fillstyle": "none", "markersize": 5},
    {"color": "#CC79A7", "linestyle": (0, (8, 2)), "marker": "v", "markersize": 5},
    {"color": "#56B4E9", "linestyle": (0, (1, 1)), "marker": "x", "markersize": 5},
)
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")
GREY, BAND = "#666666", "#BFBFBF"  # of the zero line, of an interval

AXES = {"nll": "NLL (nats/token)", "bits_per_byte": "bits per byte"}
TITLES = {
    "train": "train: the optimised stream",
    "train_split": "train_split: fixed training text",
    "held_out": "held_out: never trained on",
    "contaminated": "contaminated: overlaps the training text",
    "unproven": "unproven: not shown to be held out",
}


@dataclass(frozen=True)
class Curve:
    """The values of one arm over training; `low` and `high` are the ends of its band."""

    label: str  # at the end of its line
    name: str  # in the legend
    tokens: Points
    values: Points
    low: Points | None = None
    high: Points | None = None


def curves(lines: Sequence[Curve], *, axis: str, title: str, limits: Interval | None = None) -> Any:
    """The curves of arms over training, each with its band where it has one."""
    figure = figure_of(HALF)
    axes = figure.add_subplot()
    ends = []
    for line, style in zip(lines, _styles(len(lines)), strict=True):
        marks = {"markevery": max(1, len(line.tokens) // 8)}
        axes.plot(
            line.tokens, line.values, label=f"{line.label}: {short(line.name)}", **style, **marks
        )
        if line.low is not None and line.high is not None:
            look = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
            axes.fill_between(line.tokens, line.low, line.high, **look)
        if len(line.values) and math.isfinite(line.values[-1]):
            ends.append((line.tokens[-1], line.values[-1], line.label, style["color"]))
    if limits:
        axes.set_ylim(limits)
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel(axis)
    axes.set_title(title, loc="left")
    tidy(axes)
    _label_ends(axes, ends)
    columns = 1 if len(lines) <= 3 else 2
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def documents(
    a: Floats,
    b: Floats,
    weight: Floats,
    interval: Interval | None,
    *,
    axis: str,
    title: str,
    level: str = "95 %",
    names: tuple[str, str] | None = None,
) -> Any:
    """One circle for each document, its area by its length: what it costs A, and what B adds.

    Args:
        names: of the two, where the report calls them by their names and not A and B.
    """
    figure = figure_of(HALF)
    axes = figure.add_subplot()
    axes.axhline(0, color=GREY, linewidth=1.2, linestyle=(0, (6, 3)), label="no difference")
    mean = float((b - a) @ weight / weight.sum())
    if interval is not None:
        look = {"color": BAND, "alpha": 0.5, "linewidth": 0}
        axes.axhspan(*interval, label=f"its {level} interval", **look)
    axes.axhline(mean, color="black", linewidth=1.2, label="mean by length")
    area = 12 + 140 * weight / weight.max()
    look = {"facecolors": "#0072B255", "edgecolors": "black", "linewidths": 0.6}
    axes.scatter(a, b - a, s=area, label="one document", **look)
    axes.set_xlabel(f"{names[0] if names else 'A'}, {axis}")
    axes.set_ylabel(f"{'difference' if names else 'B - A'}, {axis}")
    axes.set_title(title, loc="left")
    tidy(axes, tokens=False)
    axes.locator_params(axis="x", nbins=6)
    legend = figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    for handle in legend.legend_handles:
        if hasattr(handle, "set_sizes"):
            handle.set_sizes([40])
    return figure


def bars(
    labels: Sequence[str],
    values: Sequence[float],
    written: Sequence[str],
    spans: Sequence[Interval | None],
    *,
    axis: str,
    title: str,
) -> Any:
    """One bar for each arm, from zero; `spans` are drawn over their ends."""
    names = [short(label, 24) for label in labels]
    figure = figure_of((HALF[0] + 0.06 * max(map(len, names)) - 0.5, 1.5 + 0.45 * len(labels)))
    axes = figure.add_subplot()
    for row, (value, style) in enumerate(zip(values, _styles(len(labels)), strict=True)):
        look = {"facecolor": style["color"] + "55", "edgecolor": style["color"]}
        axes.barh(row, value, height=0.6, hatch=_HATCHES[row % len(_HATCHES)], **look)
    furthest = [
        max(value, span[1] if span else value) for value, span in zip(values, spans, strict=True)
    ]
    for row, span in enumerate(spans):
        if span is not None:
            axes.errorbar(
                [(span[0] + span[1]) / 2],
                [row],
                xerr=[(span[1] - span[0]) / 2],
                fmt="none",
                ecolor="black",
                elinewidth=1,
                capsize=4,
            )
        axes.annotate(
            written[row],
            (furthest[row], row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(labels)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(furthest))  # room for what is written beside the bars
    axes.set_xlabel(axis)
    axes.set_title(title, loc="left")
    tidy(axes, tokens=False)
    axes.grid(visible=False)
    return figure


def shares(layers: Sequence[int], found: Floats, *, title: str, highest: float) -> Any:
    """Shares [L, E] of routes as a map in grey, each written in its cell where there is room."""
    rows, experts = found.shape
    figure = figure_of((HALF[0], min(7.0, 1.3 + 0.3 * rows)))
    axes = figure.add_subplot()
    image = axes.imshow(found * 100, cmap="Greys", vmin=0, vmax=highest * 100, aspect="auto")
    if experts <= 10 and rows <= 20:
        for row, expert in np.ndindex(rows, experts):
            dark = found[row, expert] > 0.6 * highest
            look = {"color": "white" if dark else "black", "fontsize": 8}
            share = f"{found[row, expert]:.1%}".replace("%", "")
            axes.text(expert, row, share, ha="center", va="center", **look)
    axes.set_xticks(range(experts) if experts <= 16 else range(0, experts, experts // 8))
    step = max(1, rows // 12)
    axes.set_yticks(range(0, rows, step), [str(layer) for layer in layers[::step]])
    axes.set_xlabel(f"expert (an equal share is {100 / experts:.3g} %)")
    axes.set_ylabel("layer")
    axes.set_title(title, loc="left")
    axes.tick_params(labelsize=9)
    figure.colorbar(image, label="share of routes (%)")
    return figure


def draw_run(metrics: Mapping[str, Sequence[float | None]], path: Path) -> bool:
    """Draws the NLL of one run over its training. False: nothing was measured, nothing is drawn."""
    lines = {
        name: points for name in TITLES if len((points := measured(metrics, f"{name}/nll"))[0]) > 1
    }
    if not lines:
        return False
    with styled():
        figure = figure_of((6.4, 3.8))
        axes = figure.add_subplot()
        styles: tuple[dict[str, Any], ...] = ({"color": "#999999", "linewidth": 1}, *STYLES)
        for (name, (tokens, values)), style in zip(lines.items(), styles, strict=False):
            axes.plot(tokens, values, label=TITLES[name], **style)
        axes.set_xlabel("tokens trained on")
        axes.set_ylabel(AXES["nll"])
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
        save(figure, path)
    return True


def measured(
    metrics: Mapping[str, Sequence[float | None]], name: str
) -> tuple[list[float], list[float]]:
    """Token counts and values of a metric, where it was measured."""
    rows = zip(metrics.get("tokens", ()), metrics.get(name, ()), strict=False)
    kept = [(tokens, value) for tokens, value in rows if tokens is not None and value is not None]
    return [tokens for tokens, _ in kept], [value for _, value in kept]


@contextmanager
def styled() -> Iterator[None]:
    """The settings in which a figure is to be made and saved: letters that no font has are drawn
    as boxes without a word, and no text is taken for mathematics."""
    import matplotlib

    with (
        matplotlib.rc_context({"text.parse_math": False, "font.size": 10, "axes.titlesize": 10}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield


def save(figure: Any, path: Path) -> tuple[int, int]:
    """Writes the figure; returns its size on a page, in CSS pixels."""
    figure.savefig(path, dpi=DOTS, metadata={"Software": None})
    width, height = figure.get_size_inches()
    return round(width * _PIXELS), round(height * _PIXELS)


def short(name: str, width: int = 40) -> str:
    """A name for a legend, its middle left out where it is long."""
    clean = "".join(one if one.isprintable() else " " for one in name[: 50 * width])
    if len(clean) <= width:
        return clean
    return f"{clean[: width // 2 - 1]}…{clean[-width // 2 :]}"


def figure_of(size: tuple[float, float]) -> Any:
    """An empty figure of this size in inches."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    return Figure(figsize=size, layout="constrained")


def _styles(count: int) -> list[dict[str, Any]]:
    return [STYLES[index % len(STYLES)] for index in range(count)]


def short_count(tokens: float) -> str:
    """`1.54k`: a number of tokens in three digits, as the ticks of an axis are written."""
    from matplotlib.ticker import EngFormatter

    short = f"{tokens:.3g}"
    return str(EngFormatter(sep="")(float(short)))


def tidy(axes: Any, tokens: bool = True) -> None:
    """The looks that all axes share; `tokens`: those along the axis are counts of tokens."""
    from matplotlib.ticker import EngFormatter

    if tokens:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Each line's label at its end, moved apart where ends lie close together."""
    low, high = axes.get_ylim()
    gap = 0.07 * (high - low)
    placed: list[float] = []
    for tokens, value, label, color in sorted(ends, key=lambda end: end[1]):
        height = max(value, placed[-1] + gap) if placed else value
        placed.append(height)
        look = {"color": color, "fontweight": "bold", "va": "center", "annotation_clip": False}
        axes.annotate(label, (tokens, value), xytext=(tokens + 0.03 * tokens, height), **look)
