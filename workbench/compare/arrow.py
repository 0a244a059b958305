"""Columns of arrow tables as arrays of numbers, without pandas, which arrow's own way imports."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.compare.stats import Floats


def floats_of(column: Any) -> Floats:
    """[M] the numbers of a column; NaN where there is none."""
    import pyarrow as pa

    found = np.array(_buffer(_whole(column).cast(pa.float64()), np.float64), np.float64)
    found[~known_of(column)] = np.nan
    return found


def known_of(column: Any) -> npt.NDArray[np.bool_]:
    """[M] where a column has a value."""
    import pyarrow as pa

    array = _whole(column).is_valid().cast(pa.uint8())
    return np.array(_buffer(array, np.uint8), np.bool_)


def _whole(column: Any) -> Any:
    """One array out of the pieces of a column."""
    import pyarrow as pa

    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


def _buffer(array: Any, kind: type) -> Any:
    if not len(array):
        return np.zeros(0, kind)
    return np.frombuffer(array.buffers()[1], kind)[array.offset : array.offset + len(array)]
