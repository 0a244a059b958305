"""The text behind stretches of token ids, for those who look for passages in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from workbench.core.data.ngrams import MOST_UNITS
from workbench.core.data.overlap import Passages
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.tokenizer import Ids, Tokenizer

DECODED_AT_ONCE = 1 << 20  # ids; bounds the memory of one long document beside its text
READ_AT_ONCE = 1 << 20


def texts_of(tokens: Ids, ranges: npt.NDArray[np.int64], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of each range [M, 2]; an end-of-document id inside it becomes a line feed.

    Documents are encoded as they stand, so this is the very text that they were made of; a
    character that the edge of a range cuts becomes U+FFFD.
    """
    for start, end in ranges.tolist():
        ids = tokens[start:end]
        ends = np.flatnonzero(ids == tokenizer.eod_id)
        parts = [
            _decoded(part[1:] if number else part, tokenizer)
            for number, part in enumerate(np.split(ids, ends))
        ]
        yield "\n".join(parts)


def documents_of(
    tokens: Ids, segments: npt.NDArray[np.int64], eod_id: int
) -> Iterator[npt.NDArray[np.int64]]:
    """The documents in each segment [G, 2], as one array of ranges [D, 2] for each: what stands
    between end-of-document ids, nothing empty."""
    for start, end in segments.tolist():
        ends = np.flatnonzero(tokens[start:end] == eod_id) + start
        ranges = np.stack([np.r_[start, ends + 1], np.r_[ends, end]], axis=1)
        yield ranges[ranges[:, 0] < ranges[:, 1]]


def passages_of_documents(
    tokens: Ids,
    ranges: npt.NDArray[np.int64],
    sha256: npt.NDArray[np.uint8],
    tokenizer: Tokenizer,
) -> Passages:
    """Whole documents [M, 2] with the hashes of their texts [M, 32]; no tokenizer changes them."""
    identity = f"documents {hashlib.sha256(sha256.tobytes()).hexdigest()}"
    return Passages(identity, sha256, lambda: texts_of(tokens, ranges, tokenizer))


def passages_of_ids(
    tokens: Ids, ranges: npt.NDArray[np.int64], sha256: str, tokenizer: Tokenizer
) -> Passages:
    """Stretches [M, 2] of no whole documents, known by the hash of their ids."""
    identity = f"ids {sha256} of {tokenizer.content_sha256}"
    return Passages(identity, None, lambda: texts_of(tokens, ranges, tokenizer))


def passages_of_shard(
    tokens: StoredIds,
    ranges: npt.NDArray[np.int64],
    sha256: npt.NDArray[np.uint8] | None,
    identity: str,
    in_parts: bool = False,
) -> Passages:
    """Stretches [M, 2] of a file of ids, as ids; `in_parts`: none read into memory at once."""

    def read() -> Iterator[Ids]:
        for start, end in ranges.tolist():
            yield tokens[start : min(end, start + READ_AT_ONCE)] if in_parts else tokens[start:end]
            for at in range(start + READ_AT_ONCE, end if in_parts else 0, READ_AT_ONCE):
                # from so far back on that no n-gram is lost between two parts
                yield tokens[at - MOST_UNITS : min(end, at + READ_AT_ONCE)]

    return Passages(identity, sha256, read_ids=read)


def _decoded(ids: Ids, tokenizer: Tokenizer) -> str:
    parts = range(0, len(ids), DECODED_AT_ONCE)
    raw = b"".join(tokenizer.decode_bytes(ids[i : i + DECODED_AT_ONCE].tolist()) for i in parts)
    return raw.decode("utf-8", "replace")
