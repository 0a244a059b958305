"""Training windows from a stream of documents: read as they are needed, resumed where they stood.

Sequence i is a function of the stream and i alone: the documents that train, each after the
end-of-document id, in the order of the stream, cut into windows of S + 1 ids, a new one every S
ids. So several processes that train one model read all the windows of an update, and each trains
those that are its own (`parallel.Team.rows`).

Between two windows one document is open at most: the position of its row and how many of its ids
are used are all that a checkpoint needs, beside what was counted.

Shapes: N sequences, S sequence length.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from workbench.core.data.batches import StreamFacts, Windows, require_same_data
from workbench.core.data.encoded import split_hash
from workbench.core.data.errors import DataError, UnencodableError
from workbench.core.data.passing import Passing
from workbench.core.data.sides import Int64, is_held_out
from workbench.core.data.stream_rows import Position, Row, RowReader
from workbench.core.data.tokenizer import Ids, Tokenizer


class Document(NamedTuple):
    """A document that trains, and what was passed over since the one before it."""

    at: Position
    text: str
    ids: Int64  # the end-of-document id, then its tokens
    empty: int
    held_out: int


@dataclass
class Counts:
    """What a run has consumed: documents begun, and what stood between them in the stream."""

    documents: int = 0
    tokens: int = 0  # of those documents, without the end-of-document ids
    bytes: int = 0  # UTF-8
    empty: int = 0
    held_out: int = 0  # documents on the held-out side: passed over

    def add(self, one: Document) -> None:
        """Counts a document that is begun."""
        self.documents += 1
        self.tokens += len(one.ids) - 1
        self.bytes += len(one.text.encode("utf-8"))
        self.empty += one.empty
        self.held_out += one.held_out


@dataclass
class Documents:
    """The documents of a stream that train, from any position on, encoded a batch at a time."""

    rows: RowReader
    tokenizer: Tokenizer
    ratio: float

    def read(self, at: Position = Position()) -> Iterator[list[Document]]:  # noqa: B008
        """Batches of documents from a row to the end of the stream.

        Raises:
            DataError: see `RowReader.read`; or a text that the tokenizer cannot take.
        """
        empty = held_out = 0
        for batch in self.rows.read(at):
            kept: list[tuple[Row, int, int]] = []
            for row in batch:
                if not row.text.strip():
                    empty += 1
                elif is_held_out(split_hash(row.text), self.ratio):
                    held_out += 1
                else:
                    kept.append((row, empty, held_out))
                    empty = held_out = 0
            encoded = self._encoded([row for row, _, _ in kept])
            yield [
                Document(
                    row.at,
                    row.text,
                    np.r_[np.int64(self.tokenizer.eod_id), ids.astype(np.int64)],
                    *passed,
                )
                for (row, *passed), ids in zip(kept, encoded, strict=True)
            ]

    def _encoded(self, rows: list[Row]) -> list[Ids]:
        try:
            return self.tokenizer.encode_documents([row.text for row in rows])
        except UnencodableError as error:
            for row in rows:
                if hashlib.sha256(row.text.encode("utf-8")).digest() == error.sha256:
                    raise error.standing_at(self.rows.describe(row.at)) from error
            raise


@dataclass(eq=False)
class DocumentStream:
    """Reads windows in order and knows where it stands; a `TrainStream`.

    `identity` is what the order depends on beside S. `passing` sees every document that is begun.
    """

    documents: Documents
    seq_len: int
    identity: dict[str, Any]
    passing: Passing
    sequence: int = field(init=False, default=0)  # the next one
    counts: Counts = field(init=False, default_factory=Counts)

    windows_per_epoch: int | None = field(init=False, default=None)
    is_open_ended = True  # there is an end, and it is not known before it is reached

    def __post_init__(self) -> None:
        self._start(Position())

    @property
    def epoch(self) -> float:
        """Not known, as the length of the stream is not."""
        return 0.0

    def has_next(self, count: int) -> bool:
        """Whether the stream holds `count` more windows; reads on to tell.

        Raises:
            DataError: the stream cannot be read on, or has changed.
        """
        needed = count * self.seq_len + 1
        while len(self._open) + self._ahead_ids < needed:
            batch = next(self._reading, None)
            if batch is None:
                return False
            self._ahead.extend(batch)
            self._ahead_ids += sum(len(one.ids) for one in batch)
        return True

    def require(self, count: int) -> None:
        """Reads on until `count` more windows are there.

        Raises:
            DataError: the stream ends before, cannot be read on, or has changed.
        """
        if not self.has_next(count):
            problem = f"the stream ends after {self.sequence:,} sequences and a part of an update"
            allowed = "fewer training.steps, or 0: to the end of the stream"
            raise DataError.at("data (fineweb)", problem, None, allowed)

    def next_batch(self, count: int) -> Windows:
        """The next `count` windows [count, S + 1]; the stream moves on.

        Raises:
            DataError: see `require`.
        """
        self.require(count)
        batch = np.empty((count, self.seq_len + 1), np.int64)
        begun: list[str] = []
        for row in range(count):
            batch[row] = self._window(begun)
        self.sequence += count
        self.passing.see(begun)
        return batch

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """`check` is called while a server is waited for, and may raise."""
        self.documents.rows.patience.between = check

    def found(self) -> StreamFacts:
        """What was consumed so far, and the overlap of the watched sets with it."""
        counts = {f"consumed_{name}": value for name, value in vars(self.counts).items()}
        return StreamFacts(counts, self.passing.found(self.counts.documents))

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as JSON can hold it."""
        return {
            "sequence": self.sequence,
            "identity": self._identity(),
            "open": list(self._at),
            "used": self._used,
            "counts": vars(self.counts).copy(),
            "passing": self.passing.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; what stands before is not read.

        Raises:
            DataError: the state belongs to another stream (names the differences), or the stream
                cannot be read on.
        """
        require_same_data(state["identity"], self._identity())
        self.passing.load_state_dict(state["passing"])
        self.counts = Counts(**state["counts"])
        self.sequence = int(state["sequence"])
        self._start(Position(*state["open"]))
        if not self.sequence:
            return
        if not self.has_next(0) or self._ahead[0].at != self._at:
            where = self.documents.rows.describe(self._at)
            raise DataError.at(where, "the document that was open is not there any more")
        document = self._ahead.popleft()
        self._ahead_ids -= len(document.ids)
        self._used = int(state["used"])
        self._open = document.ids[self._used :].astype(np.int64)

    def _start(self, at: Position) -> None:
        """Reads from `at` on, with nothing open and nothing read ahead."""
        self._reading = self.documents.read(at)
        self._ahead: deque[Document] = deque()
        self._ahead_ids = 0
        self._at = at  # of the open document
        self._open = np.zeros(0, np.int64)  # what is left of it
        self._used = 0  # ids of it before that

    def _window(self, begun: list[str]) -> Ids:
        """The ids of the next window; adds the texts of the documents that begin in it."""
        parts = [self._open]
        have = len(self._open)
        while have < self.seq_len + 1:
            document = self._ahead.popleft()
            self._ahead_ids -= len(document.ids)
            self.counts.add(document)
            begun.append(document.text)
            parts.append(document.ids)
            have += len(document.ids)
            self._at, self._used = document.at, 0
        joined = np.concatenate(parts)
        # The last id is the first of the next window: it stands in the last document.
        left = have - self.seq_len
        self._used += len(parts[-1]) - left
        self._open = joined[self.seq_len :]
        return joined[: self.seq_len + 1]

    def _identity(self) -> dict[str, Any]:
        return {**self.identity, "seq_len": self.seq_len}
