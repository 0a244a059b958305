"""The text behind stretches of token ids, for those who look for passages in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from workbench.core.data.ngrams import MOST_UNITS, LongText, Text
from workbench.core.data.overlap import Passages
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.tokenizer import Ids, Tokenizer

DECODED_AT_ONCE = 1 << 20  # ids; bounds the memory of one long document beside its text
READ_AT_ONCE = 1 << 20


def texts_of(
    tokens: Ids | StoredIds,
    ranges: npt.NDArray[np.int64],
    tokenizer: Tokenizer,
    in_parts: bool = False,
) -> Iterator[Text]:
    """The text of each range [M, 2]; an end-of-document id inside it becomes a line feed.

    Documents are encoded as they stand, so this is the very text that they were made of; a
    character that the edge of a range cuts, and an id that names no token, become U+FFFD.
    `in_parts`: a long range is not decoded at once.
    """
    for start, end in ranges.tolist():
        if in_parts and end - start > DECODED_AT_ONCE:
            yield LongText(partial(_in_pieces, tokens, start, end, tokenizer))
        else:
            parts = range(start, end, DECODED_AT_ONCE)
            raw = (_bytes_of(tokens, at, end, tokenizer) for at in parts)
            yield b"".join(raw).decode("utf-8", "replace")


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
    tokenizer: Tokenizer | str,
    in_parts: bool = False,
) -> Passages:
    """Stretches [M, 2] of a file of ids: their words, or the ids where there is no tokenizer but
    the reason why. `in_parts`: none is read into memory at once."""
    if not isinstance(tokenizer, str):
        known = f"{identity} decoded by {tokenizer.content_sha256}"
        read = partial(texts_of, tokens, ranges, tokenizer, in_parts)
        measured_on = f"words of the decoded ids ({tokenizer.name})"
        return Passages(known, sha256, read, measured_on=measured_on)

    def read_ids() -> Iterator[Ids]:
        for start, end in ranges.tolist():
            yield tokens[start : min(end, start + READ_AT_ONCE)] if in_parts else tokens[start:end]
            for at in range(start + READ_AT_ONCE, end if in_parts else 0, READ_AT_ONCE):
                # from so far back on that no n-gram is lost between two parts
                yield tokens[at - MOST_UNITS : min(end, at + READ_AT_ONCE)]

    return Passages(identity, sha256, read_ids=read_ids, measured_on=f"token ids: {tokenizer}")


def _in_pieces(
    tokens: Ids | StoredIds, start: int, end: int, tokenizer: Tokenizer
) -> Iterator[str]:
    """The text of a long range, cut at blanks; where a piece holds none, between two characters."""
    held = b""
    for at in range(start, end, DECODED_AT_ONCE):
        held += _bytes_of(tokens, at, end, tokenizer)
        cut = max(held.rfind(b" "), held.rfind(b"\n")) + 1 or _character_start(held)
        yield held[:cut].decode("utf-8", "replace")
        held = held[cut:]
    yield held.decode("utf-8", "replace")


def _character_start(raw: bytes) -> int:
    """Where the last character of UTF-8 bytes starts, which may not be there as a whole."""
    at = len(raw) - 1
    while at > 0 and raw[at] & 0xC0 == 0x80:
        at -= 1
    return max(at, 0)


def _bytes_of(tokens: Ids | StoredIds, at: int, end: int, tokenizer: Tokenizer) -> bytes:
    """The bytes of `DECODED_AT_ONCE` ids from `at` on, none from `end` on."""
    ids = tokens[at : min(at + DECODED_AT_ONCE, end)]
    ends = np.flatnonzero(ids == tokenizer.eod_id)
    parts = [part[1:] if number else part for number, part in enumerate(np.split(ids, ends))]
    return b"\n".join(tokenizer.decode_bytes(part.tolist(), b"\xff") for part in parts)
