"""Runs and comparisons as pandas DataFrames: one fixed set of columns for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.compare import ArmsComparison, Comparison
from workbench.compare.stats import LEVEL
from workbench.compare.table import read_table

_RUN = ("id", "status", "seed", "study", "arm", "started", "tokens", "planned_tokens")
_COST = ("tokens_per_s", "peak_memory_bytes")


def of_metrics(path: Path) -> pd.DataFrame:
    """One row for each logged step; columns that nothing was measured in are left out.

    Raises:
        UserError: the file is missing, unreadable, or not a table of numbers with steps.
    """
    table = read_table(path)
    measured = {name: table.numbers(name) for name in table if table.known(name).any()}
    frame = pd.DataFrame(measured, columns=list(measured) or ["step"])
    return frame.astype({"step": "int64"}).set_index("step")


def of_runs(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row for each run under its name: who it is, then its final numbers by name."""
    numbers = [*_COST, *sorted({name for row in rows for name in row if "/" in name})]
    columns = ["run", *_RUN, *numbers]
    frame = pd.DataFrame(
        [{name: row.get(name) for name in columns} for row in rows], None, columns, object
    )
    return frame.astype(dict.fromkeys(numbers, "float64")).set_index("run")


def of_pair(comparison: Comparison) -> pd.DataFrame:
    """One row for each number of two runs; a refused one is blank, and `note` says why."""
    rows = []
    for name, number in (comparison.results.numbers if comparison.results else {}).items():
        documents = number.documents
        low, high = documents.interval if documents else (None, None)
        rows.append(
            {
                "number": name,
                "claim": number.claim,
                "a": number.a,
                "b": number.b,
                "difference": number.difference,
                "unit": number.unit,
                "low": low,
                "high": high,
                "level": LEVEL if documents else None,
                "n": documents.n if documents else None,
                "note": number.blank or number.no_interval,
            }
        )
    columns = ["number", "claim", "a", "b", "difference", "unit", "low", "high", "level", "n"]
    return _typed(rows, [*columns, "note"], ["number"])


def of_arms(comparison: ArmsComparison) -> pd.DataFrame:
    """One row for each arm and number, compared with the arm `against`; intervals over seeds."""
    rows = []
    for pair in comparison.pairs:
        against, arm = pair.names
        for name, number in (pair.results.numbers if pair.results else {}).items():
            test = number.seeds
            low, high = test.interval if test else (None, None)
            rows.append(
                {
                    "arm": arm,
                    "number": name,
                    "against": against,
                    "claim": number.claim,
                    "a": number.mean_a,
                    "b": number.mean_b,
                    "difference": number.difference,
                    "unit": number.unit,
                    "low": low,
                    "high": high,
                    "level": test.level if test else None,
                    "n": min(test.n) if test else None,
                    "p": test.p if test else None,
                    "p_adjusted": number.p_adjusted,
                    "winner": number.winner and {"a": against, "b": arm}[number.winner],
                    "decides": name in pair.deciding,
                    "note": number.blank or number.no_seeds,
                }
            )
    columns = ["arm", "number", "against", "claim", "a", "b", "difference", "unit", "low", "high"]
    columns += ["level", "n", "p", "p_adjusted", "winner", "decides", "note"]
    return _typed(rows, columns, ["arm", "number"])


def _typed(rows: list[dict[str, Any]], columns: list[str], index: list[str]) -> pd.DataFrame:
    """The rows with numbers as float64 and all else as objects, the same where there are none."""
    numbers = {"a", "b", "difference", "low", "high", "level", "p", "p_adjusted"} & set(columns)
    frame = pd.DataFrame(rows, None, columns, dtype=object)
    kinds: dict[str, Any] = dict.fromkeys(numbers, "float64") | {"n": "Int64"}
    return frame.astype(kinds).set_index(index)
