"""The numbers that `wb eval` added to both of two runs, side by side where they may stand so.

Shown are those of one name, one content, one context policy and one precision, measured at the
point compared. The difference is paired: over the documents of a set, over the items of a task.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from workbench.compare.imported import UNTOUCHED
from workbench.compare.measurements import RunData
from workbench.compare.scores import BYTES, NLL_SUM, TOKENS, read_scores
from workbench.compare.stats import Floats, document_interval
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


def added_numbers(
    a: RunData, b: RunData, tokens: int, refused: Mapping[Claim, str]
) -> dict[str, Added]:
    """Name -> the fields of a `results.Number`.

    Raises:
        UserError: a file of scores is damaged, or contradicts the record.
    """
    found: dict[str, Added] = {}
    names = dict.fromkeys(one.name for one in a.record.results.additions)
    others = {one.name for one in b.record.results.additions}
    for name in (name for name in names if name in others):
        first, second = (_at(run, name, tokens) for run in (a, b))
        why = _unlike(first, second, tokens)
        rows = None if why else [_rows(run.folder, one) for run, one in ((a, first), (b, second))]
        for metric in _metrics(name, a, b):
            full = f"{name}/{metric}"
            claim = _claim(name, metric)
            fields: Added = {"a": None, "b": None, "unit": _unit(metric), "claim": claim}
            fields["what"] = _what(name, first)
            if claim in refused:
                fields["blank"] = f"refused: {refused[claim]}"
            elif why:
                fields["blank"] = why
            else:
                fields |= {"a": first.values.get(full), "b": second.values.get(full)}
                fields |= _interval(rows, metric)
            found[full] = fields
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


def _metrics(name: str, a: RunData, b: RunData) -> list[str]:
    """The numbers of one name that both runs have, without errors and counts."""
    keys = [
        {key for one in run.record.results.additions if one.name == name for key in one.values}
        for run in (a, b)
    ]
    shared = sorted(key.removeprefix(f"{name}/") for key in keys[0] & keys[1])
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


def _interval(rows: Any, metric: str) -> Added:
    """The interval of the paired difference, or why there is none."""
    a, b = rows
    if a is None or b is None:
        return {"no_interval": "the scores of single documents or items are not at hand"}
    if metric in _SETS and "set" in a:
        weight = a["set"][:, _SETS[metric]]
        if not np.array_equal(weight, b["set"][:, _SETS[metric]]):
            return {"no_interval": "the runs scored other parts of the documents"}
        difference = b["set"][:, NLL_SUM] - a["set"][:, NLL_SUM]
        difference = difference / (math.log(2) if metric == "bits_per_byte" else 1.0)
    elif metric in a:
        difference, weight = b[metric] - a[metric], np.ones(len(a[metric]))
    else:
        return {"no_interval": "it is no mean over documents or items"}
    interval = document_interval(difference, weight, np.random.default_rng(INTERVAL_SEED))
    if interval is None:
        return {"no_interval": "there are fewer than two, or some that nothing can be drawn from"}
    return {"documents": (len(weight), interval)}
