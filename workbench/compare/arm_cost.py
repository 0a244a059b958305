"""The figures of what arms cost and of where their tokens go: speed, memory, shares of routes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from workbench.compare import plots
from workbench.compare.arms import Arm, ArmPair
from workbench.compare.details import routes_of
from workbench.compare.document import Figure
from workbench.compare.numbers import write

_COSTS = (
    ("tokens_per_s", "tokens/s", 1.0, "Throughput", "throughput.png"),
    ("peak_memory_bytes", "GB", 1e-9, "Peak memory", "memory.png"),
)
_HIGHEST_SHARE = 2.0  # times an equal share, from where on a map of routes is black


def cost_figures(pairs: Sequence[ArmPair], folder: Path, *, shared: bool = False) -> list[Figure]:
    """Throughput and peak memory of every arm whose pair may show them.

    Args:
        pairs: those with results.
        shared: whether the runs shared the machine, which the title then says.
    """
    found = []
    for name, axis, scale, title, file in _COSTS:
        values = _of_arms(pairs, name)
        if len(values) < 2:
            continue
        if shared and name == "tokens_per_s":
            title += ", runs sharing the machine"
        means = [math.fsum(one) / len(one) for one in values.values()]
        unit = "" if name == "peak_memory_bytes" else f" {axis}"
        said = [write(name, mean, size=max(means)) + unit for mean in means]
        several = any(len(one) > 1 for one in values.values())
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
        line = "Mean over seeds; line: from the lowest seed to the highest."
        caption = line if several else "One run of each arm."
        found.append(Figure(file, f"{title}: {told}.", caption, plots.save(figure, folder / file)))
    return found


def _of_arms(pairs: Sequence[ArmPair], name: str) -> dict[str, tuple[float, ...]]:
    """Arm -> the number of each of its runs, where all have it, it is permitted and can be drawn
    as a bar."""
    values: dict[str, tuple[float, ...]] = {}
    for pair in pairs:
        number = pair.results.numbers.get(name) if pair.results else None
        if number is None or number.blank:
            continue
        for arm, given in ((pair.a.name, number.a), (pair.b.name, number.b)):
            known = tuple(one for one in given if one is not None and math.isfinite(one))
            if len(known) == len(given) and known and min(known) >= 0 and max(known) > 0:
                values.setdefault(arm, known)
    return values


def route_figures(arms: Sequence[Arm], at: int | None, folder: Path) -> list[Figure]:
    """The shares of routes of every arm with experts, of its first seed, on one scale.

    Raises:
        UserError: a telemetry file is not what it should be.
    """
    if at is None:
        return []
    known = [(arm, routes) for arm in arms if (routes := routes_of(arm.data[0], at)) is not None]
    highest = max(
        [_HIGHEST_SHARE / routes.shares.shape[1] for _, routes in known]
        + [float(routes.shares.max()) for _, routes in known],
        default=1.0,
    )
    found = []
    for index, (arm, routes) in enumerate(known):
        title = plots.short(arm.name, 30)
        figure = plots.shares(routes.layers, routes.shares, title=title, highest=min(1.0, highest))
        experts, plural = routes.shares.shape[1], "s" * (routes.updates != 1)
        alt = (
            f"Shares of routes of {arm.name} by layer and expert; an equal share is"
            f" {100 / experts:.3g} %, the largest is {routes.shares.max():.1%}, the smallest"
            f" {routes.shares.min():.1%}."
        )
        caption = (
            f"{arm.name}, seed {arm.seeds[0]}: routes of {routes.updates:,} logged update{plural}."
        )
        file = f"routes-{index + 1}.png"
        found.append(Figure(file, alt, caption, plots.save(figure, folder / file)))
    return found
