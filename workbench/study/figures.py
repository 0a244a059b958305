"""The figures of a study's report, and what each says in words to whoever cannot see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from workbench.compare import difference_plots, plots
from workbench.compare.arm_cost import cost_figures, route_figures
from workbench.compare.arm_figures import seeds_of
from workbench.compare.arm_sentences import difference_digits
from workbench.compare.arms import Arm, ArmPair
from workbench.compare.document import Figure, Figures
from workbench.compare.numbers import write, write_interval
from workbench.study.outcome import StudyResult
from workbench.study.sections import mean_digits

_PANEL = (4.6, 4.3)  # inches


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
            "cost": cost_figures(pairs, folder, shared=True),
            "routes": route_figures(_arms(outcome, pairs), _at(outcome), folder),
        }
    return {place: Figures(tuple(drawn)) for place, drawn in found.items() if drawn}


def _arms(outcome: StudyResult, pairs: list[ArmPair]) -> list[Arm]:
    """The arms of the pairs, in the order of the plan."""
    found = {arm.name: arm for pair in pairs for arm in (pair.a, pair.b)}
    return [found[name] for name in outcome.arms if name in found]


def _at(outcome: StudyResult) -> int | None:
    return outcome.comparison.at if outcome.comparison else None


def _answer(outcome: StudyResult, pairs: list[ArmPair], folder: Path) -> list[Figure]:
    """The difference of every arm from the baseline at the point that decides."""
    rows = []
    contrasts = False
    for pair in pairs:
        assert pair.results is not None
        number = pair.results.numbers.get(outcome.metric)
        if number is None or number.difference is None:
            continue
        digits = difference_digits(number)
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
        written = (
            write(outcome.metric, number.difference, digits, sign=True),
            write_interval(seeds, digits) if seeds else "-",
        )
        row = difference_plots.Effect(
            label, number.difference, seeds, documents, tuple(each), written
        )
        rows.append(row)
    if not rows:
        return []
    name, score = outcome.metric.rpartition("/")[0], outcome.metric.rpartition("/")[2]
    level = f"{100 * _level(pairs):.4g} %"
    minus = "difference" if contrasts else f"arm - {outcome.baseline}"
    further = ", and the contrasts as written" if contrasts else ""
    figure = difference_plots.effects(
        rows,
        axis=f"{minus}, {plots.AXES.get(score, outcome.metric)}",
        title=f"{plots.TITLES.get(name, name)}\n"
        f"left of zero: better than {outcome.baseline}"
        + (", or the first of two than the second" if contrasts else ""),
        level=level,
    )
    said = "; ".join(
        f"{row.name} {row.written[0]}"
        + (f", interval over seeds {row.written[1]}" if row.seeds else "")
        for row in rows
    )
    alt = f"Difference of {outcome.metric} of every arm from {outcome.baseline}{further}: {said}."
    caption = (
        f"{outcome.metric} of every arm minus that of {outcome.baseline}{further}, with the"
        f" {level} interval over seeds (line; an arrow where it goes on beyond the picture) and"
        " over documents (box); crosses: single seeds."
    )
    return [Figure("answer.png", alt, caption, plots.save(figure, folder / "answer.png"))]


def _short(arm: Arm) -> str:
    return plots.short(arm.name, 22)


def _level(pairs: list[ArmPair]) -> float:
    results = [pair.results for pair in pairs if pair.results is not None]
    return next((n.level for one in results for n in one.numbers.values()), 0.95)


def _curves(outcome: StudyResult, pairs: list[ArmPair], folder: Path) -> list[Figure]:
    """The deciding number over training: of every arm, and its differences from the baseline."""
    metric = outcome.metric
    found: list[Figure] = []
    lines: list[plots.Curve] = []
    digits_by_arm: dict[str, int] = {}
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
            digits_by_arm[name] = mean_digits(values[-1].tolist())
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
        f"{line.name} from {line.values[0]:.{digits_by_arm[line.name]}f}"
        f" to {line.values[-1]:.{digits_by_arm[line.name]}f}"
        for line in lines
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
        digits = difference_digits(pair.results.numbers[metric])
        intervals: list[plots.Interval | None] = [
            (float(low), float(high)) if np.isfinite([low, high]).all() else None
            for low, high in series.interval[known]
        ]
        noise, end = seeds_of(pair, series), intervals[-1]
        if noise is not None:
            noise = replace(noise, each=noise.each[known])
        between = f"{100 * series.level:.4g} % interval over seeds"
        arm = _short(pair.b)
        figure = difference_plots.difference(
            [series.tokens[at] for at in known],
            [float(series.difference[at]) for at in known],
            intervals,
            axis=axis,
            title=f"{arm} against {_short(pair.a)}\nbelow zero: {arm} is better",
            between=between,
            names=(pair.a.name, pair.b.name),
            size=_PANEL,
            seeds=noise,
            last=write_interval(end, digits) if end else "",
        )
        file = f"difference-{index + 1}.png"
        last = float(series.difference[known[-1]])
        alt = (
            f"Difference of {metric}, {pair.b.name} minus {pair.a.name}, over training:"
            f" {last:+.{digits}f} {series.unit} at {series.tokens[known[-1]]:,} tokens, the last"
            f" point{f', {between} {write_interval(end, digits)}' if end else ''}."
        )
        caption = (
            f"{pair.b.name} - {pair.a.name} at every evaluation; bars: {between}, pointwise; the"
            " verdict is of the last point."
        )
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
            title=f"{_short(pair.b)} - {_short(pair.a)}",
            names=(_short(pair.a), _short(pair.b)),
            level=f"{100 * number.level:.4g} %",
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
