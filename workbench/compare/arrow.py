"""Columns of arrow tables as arrays of numbers, without pandas, which arrow's own way imports."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.compare.stats import Floats


def floats_of(column: Any) -> Floats:
    """[M] the numbers of a column; NaN where there is none."""
    return column_of(column)[0]


def column_of(column: Any) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """[M] the numbers of a column, and where it has one."""
    import pyarrow as pa

    if column.null_count == len(column):
        return np.full(len(column), np.nan), np.zeros(len(column), dtype=bool)
    whole = _whole(column)
    found = np.array(_buffer(whole.cast(pa.float64()), np.float64), np.float64)
    known = np.ones(len(column), dtype=bool)
    if column.null_count:
        known = np.array(_buffer(whole.is_valid().cast(pa.uint8()), np.uint8), np.bool_)
        found[~known] = np.nan
    return found, known


def _whole(column: Any) -> Any:
    """One array out of the pieces of a column."""
    import pyarrow as pa

    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


def _buffer(array: Any, kind: type) -> Any:
    if not len(array):
        return np.zeros(0, kind)
    return np.frombuffer(array.buffers()[1], kind)[array.offset : array.offset + len(array)]
