"""The training order: which window of tokens is sequence i of a run, and the proof of those read.

Sequence i is a function of the data, the seed and i alone. Batch size, accumulation and the number
of processes only decide who reads which i and when, so they cannot change the order, and a run
resumes by one number. Random numbers are the raw output of PCG64 and Philox, which numpy keeps
unchanged over its versions (its shuffles and bounded integers may change).

Shapes: N sequences, S sequence length. A window has S + 1 ids: inputs [:-1], targets [1:].
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from workbench.core.data.errors import DataError
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.tokenizer import Ids

Order = Literal["shuffled", "sequential", "random"]
Windows = npt.NDArray[np.int64]  # [N, S + 1]

_START = hashlib.sha256(b"workbench tokens v1").digest()


class WindowSource(Protocol):
    """Windows by sequence number."""

    seq_len: int
    windows_per_epoch: int | None  # None: the source has no end

    @property
    def identity(self) -> dict[str, Any]:
        """What the order depends on; a cursor is only good for a source with the same."""

    def window(self, sequence: int) -> Ids:
        """The ids of a sequence [S + 1]."""


@dataclass(eq=False)
class TokenWindows:
    """Windows over a token array: S + 1 ids each, a new one every S ids, the last part left out.

    `segments` [G, 2] are the ranges of `tokens` that, joined, are the training stream.

    - `shuffled`: every window once per epoch, in an order drawn from (seed, epoch);
    - `sequential`: every window once per epoch, as they stand;
    - `random`: S + 1 ids from any place, drawn from (seed, i), with replacement.

    Raises:
        DataError: the stream is shorter than one window.
    """

    tokens: Ids | StoredIds
    segments: npt.NDArray[np.int64]
    seq_len: int
    order: Order
    seed: int
    content_sha256: str
    windows_per_epoch: int | None = field(init=False)
    dropped_tokens: int = field(init=False)  # of the last, partial window; 0 for `random`
    _starts: npt.NDArray[np.int64] = field(init=False, repr=False)
    _windows: int = field(init=False, repr=False)
    _permutation: tuple[int, npt.NDArray[np.int64]] | None = field(
        init=False, repr=False, default=None
    )

    def __post_init__(self) -> None:
        lengths = self.segments[:, 1] - self.segments[:, 0]
        self._starts = np.r_[0, np.cumsum(lengths)]
        if self.stream_tokens < self.seq_len + 1:
            problem = (
                f"the training text has {self.stream_tokens:,} tokens, and one window takes "
                f"{self.seq_len + 1:,} (seq_len + 1): use more text or a shorter seq_len"
            )
            raise DataError.at("training.seq_len", problem, self.seq_len)
        self._windows = (self.stream_tokens - 1) // self.seq_len
        is_random = self.order == "random"
        self.windows_per_epoch = None if is_random else self._windows
        left = self.stream_tokens - 1 - self._windows * self.seq_len
        self.dropped_tokens = 0 if is_random else left

    @property
    def stream_tokens(self) -> int:
        """Ids of the stream, end-of-document ids included."""
        return int(self._starts[-1])

    @property
    def identity(self) -> dict[str, Any]:
        """Content, order, seed and sequence length."""
        return {
            "content_sha256": self.content_sha256,
            "stream_tokens": self.stream_tokens,
            "order": self.order,
            "seed": self.seed,
            "seq_len": self.seq_len,
        }

    def window(self, sequence: int) -> Ids:
        """The ids of a sequence [S + 1]."""
        if self.order == "random":
            spread = self.stream_tokens - self.seq_len
            drawn = int(_philox(self.seed, "starts", sequence).random_raw())
            return self._read((drawn * spread) >> 64)
        epoch, position = divmod(sequence, self._windows)
        if self.order == "shuffled":
            position = int(self._order_of(epoch)[position])
        return self._read(position * self.seq_len)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """The order of the windows in an epoch [W]: sorting random keys makes a fair shuffle."""
        if self._permutation is None or self._permutation[0] != epoch:
            bits = np.random.PCG64(np.random.SeedSequence([_unsigned(self.seed), epoch]))
            keys = bits.random_raw(self._windows)
            self._permutation = epoch, np.argsort(keys, kind="stable")
        return self._permutation[1]

    def _read(self, start: int) -> Ids:
        """Ids [start, start + S + 1) of the stream, gathered from the segments that hold them."""
        end = start + self.seq_len + 1
        out = np.empty(end - start, self.tokens.dtype)
        segment = int(np.searchsorted(self._starts, start, side="right")) - 1
        at = start
        while at < end:
            stop = min(end, int(self._starts[segment + 1]))
            first = int(self.segments[segment, 0]) + at - int(self._starts[segment])
            out[at - start : stop - start] = self.tokens[first : first + stop - at]
            at = stop
            segment += 1
        return out


@dataclass
class RandomWindows:
    """Uniform random ids below `vocab_size`, a function of (seed, sequence): for smoke tests."""

    vocab_size: int
    seq_len: int
    seed: int
    stream: str = "train"  # another name is another, independent stream
    windows_per_epoch: int | None = field(init=False, default=None)

    @property
    def identity(self) -> dict[str, Any]:
        """Vocabulary, stream, seed and sequence length."""
        return {
            "random_ids_below": self.vocab_size,
            "stream": self.stream,
            "seed": self.seed,
            "seq_len": self.seq_len,
        }

    def window(self, sequence: int) -> Ids:
        """The ids of a sequence [S + 1]."""
        raw = _philox(self.seed, self.stream, sequence).random_raw(self.seq_len + 1)
        # The high half of each word, scaled: exact in 64 bits, uniform within 2^-32 x V.
        scaled = (raw >> np.uint64(32)) * np.uint64(self.vocab_size)
        ids: Ids = (scaled >> np.uint64(32)).astype(np.int64)
        return ids


class TrainStream(Protocol):
    """What a run reads its updates from."""

    is_open_ended: bool  # there is an end, known only when it is reached
    sequence: int  # the next one of the global order

    @property
    def seq_len(self) -> int:
        """Inputs per sequence."""

    @property
    def windows_per_epoch(self) -> int | None:
        """Sequences per epoch; None: there is no end, or it is not known."""

    def has_next(self, count: int) -> bool:
        """Whether there are `count` more windows."""

    def require(self, count: int) -> None:
        """Reads on until `count` more windows are there, so that `next_batch` only takes them.

        Raises:
            DataError: there are not so many, or they cannot be read.
        """

    def next_batch(self, count: int) -> Windows:
        """The next `count` windows [count, S + 1]; the stream moves on."""

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """`check` is called while a server is waited for, and may raise."""

    def found(self) -> StreamFacts | None:
        """What only reading shows, so far; None: all is known before training."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as JSON can hold it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""


@dataclass(frozen=True)
class StreamFacts:
    """What a stream has shown: counts, and by evaluation set the overlap with what was consumed."""

    counts: dict[str, int]
    passed: dict[str, dict[str, Any]]


class WindowStream:
    """Reads a source in order and knows where it stands."""

    is_open_ended = False

    def __init__(self, source: WindowSource) -> None:
        self.source = source
        self.sequence = 0  # the next one of the global order

    @property
    def seq_len(self) -> int:
        """Inputs per sequence."""
        return self.source.seq_len

    @property
    def windows_per_epoch(self) -> int | None:
        """Sequences per epoch, None where the source has no end."""
        return self.source.windows_per_epoch

    @property
    def epoch(self) -> float:
        """How often the text has been read so far; 0 where the source has no end."""
        return self.sequence / self.windows_per_epoch if self.windows_per_epoch else 0.0

    def has_next(self, count: int) -> bool:
        """Always: after the last window comes the first."""
        return True

    def require(self, count: int) -> None:
        """They are always there."""

    def interrupt_by(self, check: Callable[[], None]) -> None:
        """It never waits."""

    def found(self) -> None:
        """All is known before training."""
        return

    def sequences(self, numbers: Sequence[int]) -> Windows:
        """The windows of these sequence numbers [N, S + 1], without moving on."""
        batch = np.empty((len(numbers), self.seq_len + 1), np.int64)
        for row, number in enumerate(numbers):
            batch[row] = self.source.window(number)
        return batch

    def next_batch(self, count: int) -> Windows:
        """The next `count` windows [count, S + 1]; the stream moves on."""
        batch = self.sequences(range(self.sequence, self.sequence + count))
        self.sequence += count
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as JSON can hold it."""
        return {"sequence": self.sequence, "identity": self.source.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: the state belongs to another order or other data; names the differences.
        """
        require_same_data(state["identity"], self.source.identity)
        self.sequence = int(state["sequence"])


def require_same_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Nothing, where a cursor's identity is that of the data.

    Raises:
        DataError: names the differences.
    """
    names = sorted(then.keys() | now.keys())
    changed = [n for n in names if then.get(n) != now.get(n)]
    if changed:
        listed = "; ".join(f"{n}: then {then.get(n)!r}, now {now.get(n)!r}" for n in changed)
        raise DataError.at("data cursor", f"was saved for other data: {listed}")


class TokenDigest:
    """A rolling SHA-256 over the windows consumed: equal digests prove equal ids in equal order.

    Chained per sequence, `d <- SHA-256(d || ids as little-endian uint32)`, so that it depends on
    the sequences and their order and not on how they were batched.

    `bytes` are the UTF-8 bytes of text behind the targets so far, special tokens without any: what
    runs of two tokenizers have in common. None: no tokenizer says it.
    """

    def __init__(self, byte_lengths: npt.NDArray[np.int64] | None = None) -> None:
        """`byte_lengths` are the text bytes of each id [V]."""
        self._digest = _START
        self._byte_lengths = byte_lengths
        self.sequences = 0
        self.bytes: int | None = None if byte_lengths is None else 0

    def update(self, windows: npt.NDArray[np.integer]) -> None:
        """Chain the windows [N, S + 1] in order."""
        for window in np.asarray(windows, dtype="<u4"):
            self._digest = hashlib.sha256(self._digest + window.tobytes()).digest()
            self.sequences += 1
        if self._byte_lengths is not None and self.bytes is not None:
            self.bytes += int(self._byte_lengths[windows[:, 1:]].sum())

    def hexdigest(self) -> str:
        """The digest so far, 64 hexadecimal characters."""
        return self._digest.hex()

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON can hold it."""
        return {"sha256": self.hexdigest(), "sequences": self.sequences, "bytes": self.bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; one without a count of bytes leaves them unknown."""
        self._digest = bytes.fromhex(state["sha256"])
        self.sequences = int(state["sequences"])
        self.bytes = state.get("bytes")


def _philox(seed: int, stream: str, sequence: int) -> np.random.Philox:
    """A generator whose whole output is a function of its arguments.

    The lowest counter word counts its own output (2^64 blocks), the next one the sequence.
    """
    material = f"workbench {stream} {_unsigned(seed)}".encode()
    key = np.frombuffer(hashlib.sha256(material).digest()[:16], "<u8")
    return np.random.Philox(key=key, counter=[0, sequence, 0, 0])


def _unsigned(seed: int) -> int:
    return seed % 2**64
