"""A run's `metrics.csv` as columns of numbers, read at once; lists of a column only on demand.

L rows. What the fast reader does not take is left to the journal's own, which names the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workbench.compare.arrow import column_of
from workbench.compare.stats import Floats
from workbench.track.journal import ORIGINAL_COLUMNS, read_metrics

Column = list[float | None]


class Table(Mapping[str, Column]):
    """Column name -> its values; None is "not measured", NaN a measured NaN."""

    def __init__(self, numbers: Mapping[str, Floats], known: Mapping[str, npt.NDArray[np.bool_]]):
        self._numbers, self._known = dict(numbers), dict(known)
        self._lists: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        if name not in self._lists:
            values: Column = self._numbers[name].tolist()
            for line in np.flatnonzero(~self._known[name]).tolist():
                values[line] = None
            self._lists[name] = values
        return self._lists[name]

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, name: str) -> Floats:
        """[L] the values; NaN also where nothing was measured."""
        return self._numbers[name]

    def known(self, name: str) -> npt.NDArray[np.bool_]:
        """[L] where something was measured."""
        return self._known[name]


def read_table(path: Path) -> Table:
    """Every column of a `metrics.csv`, as `workbench.track.journal.read_metrics` reads it.

    Raises:
        UserError: the file is missing, unreadable, or not a table of numbers with steps.
    """
    return _read_fast(path) or _from_lists(read_metrics(path))


def _read_fast(path: Path) -> Table | None:
    """The table by pyarrow; None where anything is not as a journal writes it."""
    import pyarrow as pa
    from pyarrow import csv

    try:
        text = path.read_bytes()
    except OSError:
        return None
    complete = text[: text.rfind(b"\n") + 1]
    try:
        head = complete[: complete.find(b"\n")].decode("utf-8").rstrip("\r").split(",")
    except UnicodeDecodeError:
        return None
    plain = b'"' not in complete and len(set(head)) == len(head) and "step" in head
    if not plain or tuple(head) == ORIGINAL_COLUMNS or complete.count(b"\n") < 2:
        return None
    as_numbers = csv.ConvertOptions(
        column_types=dict.fromkeys(head, pa.float64()), null_values=[""], strings_can_be_null=True
    )
    try:
        found = csv.read_csv(pa.BufferReader(complete), convert_options=as_numbers)
    except pa.ArrowException:
        return None
    if found.column_names != head or found.num_rows != complete.count(b"\n") - 1:
        return None  # an empty line, which is not skipped there
    numbers, known = {}, {}
    for name in head:
        numbers[name], known[name] = column_of(found.column(name))
    return Table(numbers, known)


def _from_lists(columns: Mapping[str, Column]) -> Table:
    known = {n: np.array([v is not None for v in column], bool) for n, column in columns.items()}
    numbers = {
        name: np.array([np.nan if v is None else v for v in column], np.float64)
        for name, column in columns.items()
    }
    return Table(numbers, known)
