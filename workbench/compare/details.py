"""What figures show beside the numbers: single documents, the pace of steps, shares of routes.

D documents, L layers with experts, E experts of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.compare.imported import UNTOUCHED
from workbench.compare.measurements import RunData
from workbench.compare.scores import BYTES, NLL_SUM, TOKENS
from workbench.compare.stats import Floats
from workbench.errors import UserError
from workbench.spec.checklist import Claim

_ROUTE_FILES = ("telemetry.parquet", "telemetry/step_*.parquet")


@dataclass(frozen=True)
class DocumentPairs:
    """What each document of one evaluation set costs both runs: [D] each, `weight` in scored
    tokens (bytes, where the score is bits per byte)."""

    metric: str
    documents: tuple[str, ...]
    weight: Floats
    a: Floats
    b: Floats


@dataclass(frozen=True)
class Routes:
    """Shares of the routes that reached each expert, [L, E], over the updates that were logged."""

    layers: tuple[int, ...]
    shares: Floats
    updates: int


@dataclass(frozen=True)
class Details:
    """What both runs have of it; None or empty where a claim is refused or nothing was kept."""

    documents: DocumentPairs | None = None
    paces: tuple[tuple[float, ...], ...] = ((), ())  # tokens/s of the timed steps that were logged
    routes: tuple[Routes | None, ...] = (None, None)


def details_of(
    a: RunData, b: RunData, tokens: int, refused: Mapping[Claim, str], sets: Sequence[str]
) -> Details:
    """The details of two runs at `tokens`.

    Args:
        sets: the evaluation sets of both, that of the main number first.

    Raises:
        UserError: a telemetry file is not what it should be.
    """
    pairs = None
    if sets and not {"nll", "bpb"} <= refused.keys():
        pairs = _documents(a, b, tokens, sets[0], "nll" if "nll" not in refused else "bpb")
    paces = ((), ()) if "throughput" in refused else (_pace(a), _pace(b))
    return Details(pairs, paces, (routes_of(a, tokens), routes_of(b, tokens)))


def _documents(
    a: RunData, b: RunData, tokens: int, name: str, claim: Claim
) -> DocumentPairs | None:
    rows = []
    for run in (a, b):
        step = next((point.step for point in run.record.points if point.tokens == tokens), None)
        scores = run.scores.get(step, {}).get(name) if step is not None else None
        if scores is None:
            return None
        rows.append(scores.clusters())
    first, second = rows
    if first.keys() != second.keys():
        return None
    keys = tuple(sorted(first))
    column, unit = (TOKENS, 1.0) if claim == "nll" else (BYTES, 1 / math.log(2))
    one, two = (np.array([found[key] for key in keys]).reshape(-1, 3) for found in rows)
    if not np.array_equal(one[:, column], two[:, column]):
        return None
    weight = one[:, column]
    keep = np.isfinite(weight) & (weight > 0)
    values = [found[keep, NLL_SUM] * unit / weight[keep] for found in (one, two)]
    metric = f"{name}/{'nll' if claim == 'nll' else 'bits_per_byte'}"
    kept = tuple(key for key, one in zip(keys, keep, strict=True) if one)
    return DocumentPairs(metric, kept, weight[keep], *values)


def _pace(run: RunData) -> tuple[float, ...]:
    """Tokens per second of every step that was logged and timed."""
    interval = run.record.effective.interval
    first, last = interval.first_step, interval.last_step
    paces = run.metrics.get("tokens_per_s")
    if paces is None or not (isinstance(first, int) and isinstance(last, int)):
        return ()
    rows = zip(run.metrics["step"], paces, strict=True)
    return tuple(
        pace
        for step, pace in rows
        if step is not None and pace is not None and first <= step <= last and math.isfinite(pace)
    )


def routes_of(run: RunData, tokens: int) -> Routes | None:
    """The shares by layer up to the point compared; None where they were not recorded."""
    import pyarrow.compute as pc
    import pyarrow.parquet as parquet

    counts: dict[tuple[int, int], float] = {}
    updates: set[int] = set()
    for path in _files(run.folder):
        try:
            with parquet.ParquetFile(path) as file:
                table = file.read(columns=["step", "tokens", "layer", "expert", "metric", "value"])
            wanted = pc.and_(
                pc.equal(table["metric"], "route_count"), pc.less_equal(table["tokens"], tokens)
            )
            rows = table.filter(wanted).to_pydict()
        except Exception as error:  # pyarrow raises many kinds for a damaged file
            message = f"not a table of telemetry: {error}"
            raise UserError.at(str(path), message, None, UNTOUCHED) from None
        updates |= set(rows["step"])
        keys = zip(rows["layer"], rows["expert"], rows["value"], strict=True)
        for layer, expert, value in keys:
            counts[layer, expert] = counts.get((layer, expert), 0.0) + value
    layers = sorted({layer for layer, _ in counts})
    experts = sorted({expert for _, expert in counts})
    if not layers:
        return None
    found = np.array([[counts.get((layer, expert), 0.0) for expert in experts] for layer in layers])
    totals = found.sum(axis=1, keepdims=True)
    if not (totals > 0).all():
        return None
    return Routes(tuple(layers), found / totals, len(updates))


def _files(folder: Path) -> list[Path]:
    return [path for pattern in _ROUTE_FILES for path in sorted(folder.glob(pattern))]
