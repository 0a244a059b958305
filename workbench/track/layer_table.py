"""The table by layer and expert, `telemetry.parquet`: what is too much for columns of metrics.

Columns: step, tokens, layer, expert (null: the whole layer), metric, value. While a run goes on,
the rows since the last evaluation lie in a segment of their own, so that a killed run has lost only
those after it; at the end the segments become one file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import UserError, storing

if TYPE_CHECKING:
    import pyarrow as pa

TABLE = "telemetry.parquet"
SEGMENTS = "telemetry"


class LayerTable:
    """Collects rows and writes them under a run's folder; without rows nothing is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[dict[str, Any]] = []

    def add(self, step: int, tokens: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Takes the rows of a step: layer, expert, metric and value of each."""
        self._rows += [{"step": step, "tokens": tokens, **row} for row in rows]

    def flush(self) -> None:
        """Writes the rows taken so far as a segment, named by its last step.

        Raises:
            StoreError: it cannot be written; nothing is left behind.
        """
        if not self._rows:
            return
        import pyarrow as pa

        step = self._rows[-1]["step"]
        table = pa.Table.from_pylist(self._rows, schema=_schema())
        _write(table, self._folder / SEGMENTS / f"step_{step:08d}.parquet")
        self._rows = []

    def close(self) -> None:
        """Joins all segments into one file.

        Raises:
            StoreError: it cannot be written; the segments are still there.
        """
        self.flush()
        segments = sorted((self._folder / SEGMENTS).glob("step_*.parquet"))
        if not segments:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = [pq.ParquetFile(path).read() for path in segments]  # not `read_table`: no pandas
        # One chunk, so that the file does not tell where the segments ended.
        _write(pa.concat_tables(parts).combine_chunks(), self._folder / TABLE)
        shutil.rmtree(self._folder / SEGMENTS, ignore_errors=True)


def rewind_table(folder: Path, step: int) -> None:
    """Removes all rows after `step`; the rows kept are segments again, as while the run went on.

    Raises:
        UserError: a file is damaged.
        OSError: it cannot be read or written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (folder / TABLE, *sorted((folder / SEGMENTS).glob("step_*.parquet"))):
        if not path.exists():
            continue
        try:
            table = pq.ParquetFile(path).read()
            steps = table.column("step").to_numpy()
        except (pa.ArrowException, KeyError) as error:
            message = f"not a table of telemetry: {error}".partition("\n")[0]
            raise UserError.at(str(path), message, None, "the file as it was written") from None
        kept = table.filter(steps <= step)
        if len(kept) == len(table) and path.name != TABLE:
            continue
        if len(kept):
            end = int(kept.column("step").to_numpy().max())
            _write(kept, folder / SEGMENTS / f"step_{end:08d}.parquet")
            if path.name == f"step_{end:08d}.parquet":
                continue
        path.unlink()


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("step", pa.int64()),
            ("tokens", pa.int64()),
            ("layer", pa.int32()),
            ("expert", pa.int32()),
            ("metric", pa.string()),
            ("value", pa.float64()),
        ]
    )


def _write(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    temporary = path.with_name(f".{path.name}.tmp")
    with storing(path):
        path.parent.mkdir(exist_ok=True)
        try:
            pq.write_table(table, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
