"""The numbers that `wb eval` added to every run compared, side by side where they may stand so.

Shown are those of one name, one content, one context policy and one precision, measured at the
point compared. The difference is paired: over the documents of a set, over the items of a task.
D documents, or items.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from workbench.compare.imported import UNTOUCHED
from workbench.compare.measurements import RunData
from workbench.compare.scores import BYTES, NLL_SUM, TOKENS, read_scores
from workbench.compare.stats import LEVEL, Floats, document_interval
from workbench.errors import UserError
from workbench.spec.checklist import Claim
from workbench.track.record import Addition

INTERVAL_SEED = 20_250
_ALIKE = ("context",)  # of `facts`
_RAN_ALIKE = ("compute_dtype", "matmul")
_SETS = {"nll": TOKENS, "bits_per_byte": BYTES}
_HITS = {"acc": "right", "acc_norm": "right_norm"}

# What one number of both runs is: values, unit, claim, interval with its size, and notes.
Added = dict[str, Any]


@dataclass(frozen=True)
class AddedNumber:
    """One added number of two arms: its value in every run, those of the first arm first.

    `blank` says why the values may not be shown. `documents` is how many documents or items an
    interval is over, and its ends; `no_documents` why there is none.
    """

    values: tuple[float | None, ...]
    unit: str
    claim: Claim
    what: str
    blank: str | None = None
    documents: tuple[int, tuple[float, float]] | None = None
    no_documents: str | None = None


def added_numbers(
    a: RunData, b: RunData, tokens: int, refused: Mapping[Claim, str]
) -> dict[str, Added]:
    """Name -> the fields of a `results.Number`.

    Raises:
        UserError: a file of scores is damaged, or contradicts the record.
    """
    found: dict[str, Added] = {}
    for name, one in added_to_arms([a], [b], tokens, refused).items():
        fields: Added = {"a": one.values[0], "b": one.values[1], "unit": one.unit}
        fields |= {"claim": one.claim, "what": one.what}
        fields |= {"blank": one.blank} if one.blank else {}
        fields |= {"no_interval": one.no_documents} if one.no_documents else {}
        fields |= {"documents": one.documents} if one.documents else {}
        found[name] = fields
    return found


def added_to_arms(
    a: Sequence[RunData],
    b: Sequence[RunData],
    tokens: int,
    refused: Mapping[Claim, str],
    *,
    level: float = LEVEL,
    over_documents: bool = True,
) -> dict[str, AddedNumber]:
    """Name -> the number of every run of two arms, where all of them have it.

    Args:
        refused: claim -> the rules that refuse it.
        level: of the intervals over documents, in which every arm is the mean of its runs.
        over_documents: whether to draw them.

    Raises:
        UserError: a file of scores is damaged, or contradicts the record.
    """
    runs = [*a, *b]
    found: dict[str, AddedNumber] = {}
    names = dict.fromkeys(one.name for one in a[0].record.results.additions)
    others = [{one.name for one in run.record.results.additions} for run in runs[1:]]
    for name in (name for name in names if all(name in other for other in others)):
        every = [_at(run, name, tokens) for run in runs]
        unlike = (_unlike(every[0], one, tokens) for one in every[1:])
        why = next(filter(None, unlike), None)
        rows: list[Mapping[str, Floats] | None] = []
        if why is None and over_documents:
            rows = [_rows(run.folder, one) for run, one in zip(runs, every, strict=True)]
        for metric in _metrics(name, runs):
            full, claim = f"{name}/{metric}", _claim(name, metric)
            blank = f"refused: {refused[claim]}" if claim in refused else why
            values = tuple(None if blank else one.values.get(full) for one in every)
            number = AddedNumber(values, _unit(metric), claim, _what(name, every[0]), blank)
            if rows and not blank:
                interval = _interval(rows[: len(a)], rows[len(a) :], metric, level)
                if isinstance(interval, str):
                    number = replace(number, no_documents=interval)
                else:
                    number = replace(number, documents=interval)
            found[full] = number
    return found


def _at(run: RunData, name: str, tokens: int) -> Addition:
    """What the run has under this name at the point compared; else what it has elsewhere."""
    mine = [one for one in run.record.results.additions if one.name == name]
    return next((one for one in mine if one.tokens == tokens), mine[0])


def _unlike(a: Addition, b: Addition, tokens: int) -> str | None:
    """Why two additions of one name may not stand side by side."""
    if a.sha256 != b.sha256:
        return "the runs scored another content under this name"
    if {a.tokens, b.tokens} != {tokens}:
        return f"not both were scored at {tokens:,} tokens"
    if any(a.facts.get(key) is None or a.facts.get(key) != b.facts.get(key) for key in _ALIKE):
        return "the runs scored it in another context"
    if any(a.ran.get(key) is None or a.ran.get(key) != b.ran.get(key) for key in _RAN_ALIKE):
        return "the runs scored it in another precision"
    return None


def _metrics(name: str, runs: Sequence[RunData]) -> list[str]:
    """The numbers of one name that all runs have, without errors and counts."""
    keys = [
        {key for one in run.record.results.additions if one.name == name for key in one.values}
        for run in runs
    ]
    shared = sorted(key.removeprefix(f"{name}/") for key in set.intersection(*keys))
    return [key for key in shared if not ("stderr" in key or key == "items")]


def _claim(name: str, metric: str) -> Claim:
    # Whether a choice is right depends on no unit of tokens: what refuses bits per byte refuses it.
    return "bpb" if name.startswith("downstream/") or metric == "bits_per_byte" else "nll"


def _unit(metric: str) -> str:
    return {"nll": "nats/token", "clean_nll": "nats/token", "bits_per_byte": "bits/byte"}.get(
        metric, "1"
    )


def _what(name: str, one: Addition) -> str:
    facts = one.facts
    if name.startswith("downstream/"):
        return f"{facts.get('items', 0):,} items, added by wb eval; an interval is one over items"
    proof = "" if name.startswith("held_out.") else " not shown to be disjoint from training,"
    return f"{facts.get('documents', 0):,} documents,{proof} added by wb eval"


def _rows(folder: Path, one: Addition) -> Mapping[str, Floats] | None:
    """The scores behind an addition by the column they stand in; None: no such file, or one of the
    harness, which keeps what each task defines."""
    path = folder / (one.scores or "")
    if not path.is_file() or one.name.startswith("downstream/lm-eval."):
        return None
    if one.name.startswith("downstream/"):
        return _items(path, one)
    scores = (read_scores(path) or {}).get(one.name)
    if scores is None or scores.sha256 != one.sha256 or _differ(scores.nll, one, "nll"):
        raise UserError.at(str(path), f"not the scores of {one.name}", None, UNTOUCHED)
    return {"set": scores.rows}


def _items(path: Path, one: Addition) -> Mapping[str, Floats]:
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            table = file.read(columns=["item", *_HITS.values()]).to_pydict()
        rows = {metric: np.array(table[column], np.float64) for metric, column in _HITS.items()}
        identity = hashlib.sha256("\n".join(table["item"]).encode()).hexdigest()
    except Exception as error:  # pyarrow raises many kinds for a damaged file
        raise UserError.at(str(path), f"not a table of items: {error}", None, UNTOUCHED) from None
    wrong = any(_differ(float(hits.mean()), one, metric) for metric, hits in rows.items())
    if identity != one.sha256 or wrong:
        raise UserError.at(str(path), f"not the items of {one.name}", None, UNTOUCHED)
    return rows


def _differ(value: float, one: Addition, metric: str) -> bool:
    recorded = one.values.get(f"{one.name}/{metric}")
    if recorded is None or (math.isnan(value) and math.isnan(recorded)):
        return recorded is None
    return not math.isclose(value, recorded, rel_tol=1e-9)


_Rows = Sequence[Mapping[str, Floats] | None]


def _interval(
    a: _Rows, b: _Rows, metric: str, level: float
) -> tuple[int, tuple[float, float]] | str:
    """How many documents or items, and the interval of the paired difference; or why there is
    none."""
    sums: list[Floats] = []
    weight: Floats | None = None
    for rows in (*a, *b):
        if rows is None:
            return "the scores of single documents or items are not at hand"
        scored = _scored(rows, metric)
        if scored is None:
            return "it is no mean over documents or items"
        if weight is not None and not np.array_equal(weight, scored[1]):
            return "the runs scored other parts of the documents"
        sums.append(scored[0])
        weight = scored[1]
    assert weight is not None
    difference = np.mean(sums[len(a) :], axis=0) - np.mean(sums[: len(a)], axis=0)
    rng = np.random.default_rng(INTERVAL_SEED)
    interval = document_interval(difference, weight, rng, level=level)
    if interval is None:
        return "there are fewer than two, or some that nothing can be drawn from"
    return len(weight), interval


def _scored(rows: Mapping[str, Floats], metric: str) -> tuple[Floats, Floats] | None:
    """The sum of every document or item [D] and its weight [D]; None: there are none of it."""
    if metric in _SETS and "set" in rows:
        unit = math.log(2) if metric == "bits_per_byte" else 1.0
        return rows["set"][:, NLL_SUM] / unit, rows["set"][:, _SETS[metric]]
    if metric in rows:
        return rows[metric], np.ones(len(rows[metric]))
    return None
