"""The rows of a stream from any position on: each once and in order, over drops of the connection.

A position is a file and a row in it. Reading begins at the row group that holds the row: what
stands before it in the file is neither fetched nor decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from workbench.core.data.errors import DataError
from workbench.core.data.retry import Patience, first_line, is_lost
from workbench.core.data.stream_files import StreamFile
from workbench.core.data.text_files import ROWS_PER_BATCH, column_text, require_text_column


class Position(NamedTuple):
    """The next row to be read: `row` of `file`, both counted from 0."""

    file: int = 0
    row: int = 0


class Row(NamedTuple):
    """A text, and where its row stands."""

    at: Position
    text: str


@dataclass
class RowReader:
    """Reads the column `field` of the files of a stream."""

    files: Sequence[StreamFile]
    field: str
    patience: Patience

    def read(self, at: Position = Position()) -> Iterator[list[Row]]:  # noqa: B008
        """Batches of rows from a position to the end of the stream.

        Raises:
            DataError: a file that cannot be read, has changed, or whose column is missing or holds
                no text; a server that does not answer. Says where.
        """
        for index in range(at.file, len(self.files)):
            row = at.row if index == at.file else 0
            for texts in self._file(index, row):
                yield [Row(Position(index, row + i), text) for i, text in enumerate(texts)]
                row += len(texts)

    def describe(self, at: Position) -> str:
        """A position in words: the file and the row, counted from 1."""
        if at.file >= len(self.files):
            return "the end of the stream"
        name = self.files[at.file].name
        return f"{name} (file {at.file + 1} of {len(self.files)}), row {at.row + 1}"

    def _file(self, index: int, row: int) -> Iterator[list[str]]:
        file = self.files[index]
        while True:
            batches = self._batches(file, row)
            try:
                # What the reader of the rows does is outside: its errors are not the connection's.
                for texts in batches:
                    self.patience.arrived()
                    row += len(texts)
                    yield texts
            except pa.ArrowException as error:
                if not file.remote:
                    problem = f"not a readable parquet file: {first_line(error)}"
                    raise DataError.at(file.name, problem) from error
                self.patience.wait(error, self.describe(Position(index, row)))
            except Exception as error:
                if not is_lost(error):
                    raise
                if not file.remote:
                    reason = getattr(error, "strerror", None) or str(error)
                    raise DataError.at(file.name, f"cannot be read: {reason}") from error
                self.patience.wait(error, self.describe(Position(index, row)))
            else:
                return

    def _batches(self, file: StreamFile, row: int) -> Iterator[list[str]]:
        file.check()
        with file.open() as handle, pq.ParquetFile(handle) as opened:
            require_text_column(opened, file.name, self.field)
            first = 0  # row of the file with which the group begins
            for group in range(opened.num_row_groups):
                count = opened.metadata.row_group(group).num_rows
                if first + count > row:
                    yield from self._group(opened, file, group, first, row)
                first += count

    def _group(
        self, opened: Any, file: StreamFile, group: int, first: int, row: int
    ) -> Iterator[list[str]]:
        """The texts of a row group from `row` on; the group begins with the row `first`."""
        batches = opened.iter_batches(
            batch_size=ROWS_PER_BATCH, row_groups=[group], columns=[self.field]
        )
        for batch in batches:
            file.check()
            skip = max(0, row - first)
            if skip < len(batch):
                texts = batch.column(0)[skip:]
                yield [
                    column_text(value, f"{file.name}, row {first + skip + i + 1}", self.field)
                    for i, value in enumerate(texts)
                ]
            first += len(batch)
