"""The figures of a study's report, and what each says in words to whoever cannot see it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from workbench.compare import plots
from workbench.compare.arms import ArmPair
from workbench.compare.details import routes_of
from workbench.compare.document import Figure, Figures
from workbench.compare.measurements import RunData
from workbench.compare.numbers import write, write_interval
from workbench.study.outcome import StudyResult

_COSTS = (
    ("tokens_per_s", "tokens/s", 1.0, "Throughput, runs sharing the machine", "throughput.png"),
    ("peak_memory_bytes", "GB", 1e-9, "Peak memory", "memory.png"),
)
_PANEL = (4.6, 4.1)  # inches
_HIGHEST_SHARE = 2.0  # times an equal share, from where on a map of routes is black


def draw(outcome: StudyResult, folder: Path) -> dict[str, Figures]:
    """Writes the figures that the study's verdicts permit.

    Returns:
        Where in the report they belong (answer, curves, documents, cost, routes) -> the figures.
    """
    comparison = outcome.comparison
    if comparison is None:
        return {}
    pairs = [pair for pair in comparison.pairs if pair.results and pair.verdict != "refused"]
    if not pairs:
        return {}
    with plots.styled():
        found = {
            "answer": _answer(outcome, pairs, folder),
            "curves": _curves(outcome, pairs, folder),
            "documents": _documents(outcome, pairs, folder),
            "cost": _cost(pairs, folder),
            "routes": _routes(outcome, pairs, folder),
        }
    return {place: Figures(tuple(drawn)) for place, drawn in found.items() if drawn}


def _answer(outcome: StudyResult, pairs: list[ArmPair], folder: Path) -> list[Figure]:
    """The difference of every arm from the baseline at the point that decides."""
    rows = []
    contrasts = False
    for pair in pairs:
        assert pair.results is not None
        number = pair.results.numbers.get(outcome.metric)
        if number is None or number.difference is None:
            continue
        paired = pair.seeds.design == "paired"
        each = [
            b - a
            for a, b in zip(number.a, number.b, strict=False)
            if paired and a is not None and b is not None
        ]
        seeds = number.seeds.interval if number.seeds else None
        documents = number.documents.interval if number.documents else None
        label = pair.b.name
        if pair.a.name != outcome.baseline:
            label, contrasts = f"{pair.b.name} - {pair.a.name}", True
        rows.append(plots.Effect(label, number.difference, seeds, documents, tuple(each)))
    if not rows:
        return []
    name, score = outcome.metric.rpartition("/")[0], outcome.metric.rpartition("/")[2]
    level = f"{100 * _level(pairs):.4g} %"
    minus = "difference" if contrasts else f"arm - {outcome.baseline}"
    further = ", and the contrasts as written" if contrasts else ""
    figure = plots.effects(
        rows,
        axis=f"{minus}, {plots.AXES.get(score, outcome.metric)}",
        title=f"{plots.TITLES.get(name, name)}\n"
        f"left of zero: better than {outcome.baseline}"
        + (", or the first of two than the second" if contrasts else ""),
        level=level,
    )
    said = "; ".join(
        f"{row.name} {row.difference:+.4f}"
        + (f", interval over seeds {write_interval(row.seeds)}" if row.seeds else "")
        for row in rows
    )
    alt = f"Difference of {outcome.metric} of every arm from {outcome.baseline}{further}: {said}."
    caption = (
        f"{outcome.metric} of every arm minus that of {outcome.baseline}{further}, with the"
        f" {level} interval over seeds (line) and over documents (box); dots: single seeds."
    )
    return [Figure("answer.png", alt, caption, plots.save(figure, folder / "answer.png"))]


def _level(pairs: list[ArmPair]) -> float:
    results = [pair.results for pair in pairs if pair.results is not None]
    return next((n.level for one in results for n in one.numbers.values()), 0.95)


def _curves(outcome: StudyResult, pairs: list[ArmPair], folder: Path) -> list[Figure]:
    """The deciding number over training: of every arm, and its differences from the baseline."""
    metric = outcome.metric
    found: list[Figure] = []
    lines: list[plots.Curve] = []
    drawn: set[str] = set()
    for pair in pairs:
        assert pair.results is not None
        series = pair.results.series.get(metric)
        if series is None or len(series.tokens) < 2:
            continue
        sides = [(pair.a.name, series.a), (pair.b.name, series.b)]
        for name, values in sides:
            if name in drawn:
                continue
            drawn.add(name)
            label = chr(ord("A") + len(lines))
            # Untrained models are all alike, and far above: they would flatten the rest.
            kept = [at for at, count in enumerate(series.tokens) if count > 0]
            tokens, mean = [series.tokens[at] for at in kept], values[kept].mean(axis=1)
            low, high = values[kept].min(axis=1), values[kept].max(axis=1)
            lines.append(plots.Curve(label, name, tokens, list(mean), list(low), list(high)))
    if not lines:
        return []
    name, score = metric.rpartition("/")[0], metric.rpartition("/")[2]
    axis, titled = plots.AXES.get(score, metric), plots.TITLES.get(name, name)
    figure = plots.curves(lines, axis=axis, title=titled)
    ends = "; ".join(
        f"{line.name} from {line.values[0]:.3f} to {line.values[-1]:.3f}" for line in lines
    )
    found.append(
        Figure(
            "curves.png",
            f"{metric} of every arm over training: {ends}.",
            f"{metric} of every arm: mean over seeds; band: from the lowest seed to the highest.",
            plots.save(figure, folder / "curves.png"),
        )
    )
    for index, pair in enumerate(pairs):
        assert pair.results is not None
        series = pair.results.series.get(metric)
        if series is None or not series.tokens:
            continue
        known = [at for at, tokens in enumerate(series.tokens) if tokens > 0]
        intervals = [
            None if not np.isfinite(series.interval[at]).all() else tuple(series.interval[at])
            for at in known
        ]
        between = f"{100 * series.level:.4g} % interval over seeds"
        figure = plots.difference(
            [series.tokens[at] for at in known],
            [float(series.difference[at]) for at in known],
            intervals,
            axis=axis,
            title=f"{pair.b.name} against {pair.a.name}\nbelow zero: {pair.b.name} is better",
            between=between,
            names=("baseline", "arm"),
            size=_PANEL,
        )
        file = f"difference-{index + 1}.png"
        last = float(series.difference[known[-1]])
        alt = (
            f"Difference of {metric}, {pair.b.name} minus {pair.a.name}, over training: {last:+.4f}"
            f" {series.unit} at {series.tokens[known[-1]]:,} tokens, the last point."
        )
        caption = f"{pair.b.name} - {pair.a.name} at every evaluation; bars: {between}."
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found


def _documents(outcome: StudyResult, pairs: list[ArmPair], folder: Path) -> list[Figure]:
    """One picture for each arm: what every document costs it, the mean over its seeds."""
    found = []
    score = outcome.metric.rpartition("/")[2]
    for index, pair in enumerate(pairs):
        assert pair.results is not None
        means = pair.results.documents.get(outcome.metric)
        if means is None:
            continue
        keep = means.weight > 0
        weight = means.weight[keep]
        a, b = means.a[keep] / weight, means.b[keep] / weight
        if len(weight) < 2 or not np.isfinite(b - a).all():
            continue
        number = pair.results.numbers[outcome.metric]
        figure = plots.documents(
            a,
            b,
            weight,
            number.documents.interval if number.documents else None,
            axis=plots.AXES.get(score, outcome.metric),
            title=f"A: {plots.short(pair.a.name, 18)}, B: {plots.short(pair.b.name, 18)}",
        )
        change = b - a
        lower, higher = int((change < 0).sum()), int((change > 0).sum())
        alt = (
            f"Of {len(change):,} documents {lower:,} cost {pair.b.name} less than {pair.a.name} and"
            f" {higher:,} more; differences from {change.min():+.3g} to {change.max():+.3g}."
        )
        caption = f"Each document: below zero, {pair.b.name} predicts it better; means over seeds."
        file = f"documents-{index + 1}.png"
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found


def _cost(pairs: list[ArmPair], folder: Path) -> list[Figure]:
    found = []
    for name, axis, scale, title, file in _COSTS:
        values: dict[str, tuple[float, ...]] = {}
        for pair in pairs:
            assert pair.results is not None
            number = pair.results.numbers.get(name)
            if number is None or number.blank:
                continue
            for arm, given in ((pair.a.name, number.a), (pair.b.name, number.b)):
                known = tuple(one for one in given if one is not None and math.isfinite(one))
                if known and len(known) == len(given):
                    values.setdefault(arm, known)
        if len(values) < 2:
            continue
        means = [math.fsum(one) / len(one) for one in values.values()]
        unit = "" if name == "peak_memory_bytes" else f" {axis}"
        said = [write(name, mean, size=max(means)) + unit for mean in means]
        figure = plots.bars(
            list(values),
            [mean * scale for mean in means],
            said,
            [
                (min(one) * scale, max(one) * scale) if len(one) > 1 else None
                for one in values.values()
            ],
            axis=axis,
            title=title,
        )
        told = "; ".join(f"{arm} {text}" for arm, text in zip(values, said, strict=True))
        caption = "Mean over seeds; line: from the lowest seed to the highest."
        found.append(Figure(file, f"{title}: {told}.", caption, plots.save(figure, folder / file)))
    return found


def _routes(outcome: StudyResult, pairs: list[ArmPair], folder: Path) -> list[Figure]:
    """The shares of routes of every arm with experts, of its first seed."""
    at = outcome.comparison.at if outcome.comparison else None
    if at is None:
        return []
    arms = {arm.name: arm for pair in pairs for arm in (pair.a, pair.b)}
    maps = {}
    for name, arm in arms.items():
        run: RunData = arm.data[0]
        routes = routes_of(run, at)
        if routes is not None:
            maps[name] = (routes, arm.seeds[0])
    if not maps:
        return []
    highest = max(
        [_HIGHEST_SHARE / one.shares.shape[1] for one, _ in maps.values()]
        + [float(one.shares.max()) for one, _ in maps.values()]
    )
    found = []
    for index, (name, (routes, seed)) in enumerate(maps.items()):
        figure = plots.shares(
            routes.layers, routes.shares, title=plots.short(name, 30), highest=min(1.0, highest)
        )
        experts = routes.shares.shape[1]
        alt = (
            f"Shares of routes of {name} by layer and expert; an equal share is"
            f" {100 / experts:.3g} %, the largest is {routes.shares.max():.1%}, the smallest"
            f" {routes.shares.min():.1%}."
        )
        caption = f"{name}, seed {seed}: routes of {routes.updates:,} logged updates."
        file = f"routes-{index + 1}.png"
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found
