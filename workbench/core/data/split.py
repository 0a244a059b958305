"""Which documents train and which evaluate: decided by a hash of their content, never by a seed.

A document is held out when the SHA-256 of its normalised text (case and blanks made alike), read
as a fraction of 2^256, is below the ratio. So equal texts, and texts that differ in case or blanks
only, always fall on the same side, whatever else the corpus holds and whoever asks.

Near-duplicates (see `near_duplicates`) stay together: of a group of different texts the hash of the
smallest of their hashes decides for all, and a group larger than the whole share to be held out
trains. Then it is verified: a held-out document whose n-grams stand in the training text to 20 %
(settable) or more is moved there with its group, until none is. So what is held out here passes the
test of `overlap`.

A text of fewer than 20 documents cannot be split so. Its last part is held out instead, as one
stretch (`contiguous_tail`), and what is scored are fixed blocks of 1,024 tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from workbench.core.data.encoded import EncodedCorpus
from workbench.core.data.errors import DataError
from workbench.core.data.overlap import Passages, Settings
from workbench.core.data.passages import passages_of_documents, passages_of_ids
from workbench.core.data.sides import (
    Documents,
    Hashes,
    Int64,
    as_keys,
    choose_sides,
    first_of_each,
    in_hash_order,
)
from workbench.core.data.tokenizer import Ids, Tokenizer

MIN_DOCUMENTS = 20  # fewer are split as one text
BLOCK_TOKENS = 1024
MIN_TAIL_TOKENS = 2048  # of a contiguous tail, but never more than a fifth of the text
UNMATCHED_RATIO = 0.05  # size of the train_split set where nothing is held out

Unit = Literal["document", "block of 1024 tokens"]


@dataclass(frozen=True, eq=False)
class Spans:
    """M stretches of the encoded corpus in order of their hash; no document twice."""

    unit: Unit
    ranges: Int64  # [M, 2], first id and the one past the last
    byte_counts: Int64  # [M], UTF-8 bytes of the text
    sha256: Hashes  # [M, 32], of the text (documents) or of the ids (blocks)

    def __len__(self) -> int:
        return len(self.ranges)

    @property
    def lengths(self) -> Int64:
        """Tokens of each stretch [M]."""
        return self.ranges[:, 1] - self.ranges[:, 0]

    def first(self, count: int) -> Spans:
        """The first `count` in hash order."""
        return Spans(self.unit, self.ranges[:count], self.byte_counts[:count], self.sha256[:count])


@dataclass(frozen=True, eq=False)
class Split:
    """The two sides of a corpus, as ranges of `tokens`.

    `train_segments` [G, 2] are the id ranges of the training stream in corpus order, each document
    preceded by the end-of-document id. `train_sha256` is the identity of the training text.
    """

    rule: str
    tokens: Ids
    train_segments: Int64
    train_sha256: str
    held_out: Spans
    train_split: Spans
    counts: dict[str, int]
    held_out_passages: Passages
    train_passages: Passages


def split_corpus(
    encoded: EncodedCorpus,
    tokenizer: Tokenizer,
    ratio: float,
    settings: Settings | None = None,
    cache_dir: Path | None = None,
) -> Split:
    """Split by whole documents, or by a contiguous tail where there are fewer than 20.

    `held_out` has each text once (`held_out_dropped` counts the copies left out); training keeps
    copies, as they are part of the text. `train_split` is a set of whole training documents, each
    text once, first in hash order, with about as many bytes as `held_out` (bytes: every tokenizer
    gives the same set), or 5 % of the training text where nothing is held out. What is measured to
    verify the split is kept in `cache_dir`.

    Raises:
        DataError: no split leaves text on both sides.
        StoreError: the cache cannot be written.
    """
    if not 0 <= ratio < 1:
        raise DataError.at("data.held_out_ratio", "is a share of the text", ratio, "0 to below 1")
    if len(encoded) < MIN_DOCUMENTS and ratio > 0:
        return _contiguous_tail(encoded, tokenizer, ratio)
    return _by_document(encoded, tokenizer, ratio, settings or Settings(), cache_dir)


def every_document(encoded: EncodedCorpus) -> Spans:
    """All documents of a corpus in order of their hash, each text once."""
    chosen = in_hash_order(encoded.content_sha256, np.arange(len(encoded), dtype=np.int64))
    return _document_spans(encoded, chosen)


def _by_document(
    encoded: EncodedCorpus,
    tokenizer: Tokenizer,
    ratio: float,
    settings: Settings,
    cache_dir: Path | None,
) -> Split:
    documents = Documents(
        encoded.byte_counts,
        encoded.content_sha256,
        encoded.split_sha256,
        encoded.groups,
        lambda chosen: _passages(encoded, chosen, tokenizer),
    )
    is_held_out, rule, shared, moved = choose_sides(documents, ratio, settings, cache_dir)

    train = np.flatnonzero(~is_held_out)
    held_out_all = np.flatnonzero(is_held_out)
    held_out = in_hash_order(encoded.content_sha256, held_out_all)
    candidates = _document_spans(encoded, in_hash_order(encoded.content_sha256, train))
    held_out_spans = _document_spans(encoded, held_out)
    starts, ends = encoded.offsets[train], encoded.offsets[train + 1]
    segments = merged(np.stack([starts, ends], axis=1))
    stream_tokens = int((ends - starts).sum())

    exact = len(encoded) - _distinct(encoded.content_sha256)
    alike = len(encoded) - _distinct(encoded.split_sha256)
    counts = {
        "documents": len(encoded),
        "skipped_empty": encoded.skipped_empty,
        "exact_duplicates": exact,
        "normalised_duplicates": alike - exact,
        "near_duplicate_groups": shared,
        "moved_to_training": moved,
        "train_exact_duplicates": len(train) - len(candidates),
        "held_out_dropped": len(held_out_all) - len(held_out),
        "train_documents": len(train),
        "train_tokens": stream_tokens - len(train),
        "train_bytes": int(encoded.byte_counts[train].sum()),
        "stream_tokens": stream_tokens,
        **_held_out_counts(held_out_spans),
    }
    return Split(
        rule,
        encoded.tokens,
        segments,
        hashlib.sha256(encoded.content_sha256[train].tobytes()).hexdigest(),
        held_out_spans,
        _of_size(candidates, int(held_out_spans.byte_counts.sum())),
        counts,
        _passages(encoded, held_out, tokenizer),
        _passages(encoded, train, tokenizer),
    )


def _contiguous_tail(encoded: EncodedCorpus, tokenizer: Tokenizer, ratio: float) -> Split:
    """Hold out the last max(2,048, ratio) tokens, at most a fifth of the text.

    Copies of a document (up to case and blanks) are left out after the first: one could stand in
    the tail and the other before it.
    """
    kept = np.sort(first_of_each(encoded.split_sha256))
    tokens = encoded.tokens
    if len(kept) < len(encoded):
        runs = [encoded.tokens[encoded.offsets[i] : encoded.offsets[i + 1]] for i in kept]
        tokens = np.concatenate(runs)
    total = len(tokens)
    tail = min(max(MIN_TAIL_TOKENS, round(ratio * total)), total // 5)
    if tail < 1:
        found = "1 document" if len(encoded) == 1 else f"{len(encoded)} documents"
        problem = f"{found} with {total} tokens in all: too little text to hold any out"
        raise DataError.at("data", problem, allowed="5 tokens or more")
    cut = total - tail
    held_out = _block_spans(tokens, cut, total, tokenizer)
    candidates = _block_spans(tokens, 0, cut, tokenizer)
    exact = len(encoded) - _distinct(encoded.content_sha256)
    separators = int(np.count_nonzero(tokens[:cut] == tokenizer.eod_id))
    counts = {
        "documents": len(encoded),
        "skipped_empty": encoded.skipped_empty,
        "exact_duplicates": exact,
        "normalised_duplicates": len(encoded) - exact - len(kept),
        "duplicates_dropped": len(encoded) - len(kept),
        "train_documents": separators,  # the last of them may go on in the held-out part
        "train_tokens": cut - separators,
        "train_bytes": _text_bytes(tokens[:cut], tokenizer),
        "stream_tokens": cut,
        **_held_out_counts(held_out),
    }
    return Split(
        f"contiguous_tail {ratio}",
        tokens,
        np.array([[0, cut]], np.int64),
        _ids_sha256(tokens[:cut]).hex(),
        held_out,
        _of_size(candidates, int(held_out.byte_counts.sum())),
        counts,
        passages_of_ids(tokens, held_out.ranges, _blocks_sha256(held_out), tokenizer),
        passages_of_ids(tokens, np.array([[0, cut]]), _ids_sha256(tokens[:cut]).hex(), tokenizer),
    )


def _blocks_sha256(spans: Spans) -> str:
    return hashlib.sha256(spans.sha256.tobytes()).hexdigest()


def _passages(encoded: EncodedCorpus, documents: Int64, tokenizer: Tokenizer) -> Passages:
    spans = _document_spans(encoded, documents)
    return passages_of_documents(encoded.tokens, spans.ranges, spans.sha256, tokenizer)


def _held_out_counts(spans: Spans) -> dict[str, int]:
    return {
        "held_out_documents" if spans.unit == "document" else "held_out_blocks": len(spans),
        "held_out_tokens": int(spans.lengths.sum()),
        "held_out_bytes": int(spans.byte_counts.sum()),
    }


def _document_spans(encoded: EncodedCorpus, documents: Int64) -> Spans:
    ranges = np.stack([encoded.offsets[documents] + 1, encoded.offsets[documents + 1]], axis=1)
    return Spans(
        "document", ranges, encoded.byte_counts[documents], encoded.content_sha256[documents]
    )


def _block_spans(tokens: Ids, start: int, end: int, tokenizer: Tokenizer) -> Spans:
    """The ids [start, end) in blocks of 1,024 (the last one shorter), in order of their hash."""
    starts = np.arange(start, end, BLOCK_TOKENS, dtype=np.int64)
    ranges = np.stack([starts, np.minimum(starts + BLOCK_TOKENS, end)], axis=1)
    sums = [_text_bytes(tokens[a:b], tokenizer) for a, b in ranges]
    hashes = b"".join(_ids_sha256(tokens[a:b]) for a, b in ranges)
    table = np.frombuffer(hashes, np.uint8).reshape(-1, 32)
    order = np.argsort(as_keys(table), kind="stable")  # equal blocks stay: all of it is scored
    return Spans("block of 1024 tokens", ranges[order], np.array(sums)[order], table[order])


def _of_size(candidates: Spans, size: int) -> Spans:
    """The first candidates in hash order whose bytes come nearest to `size`, at least one."""
    sums = np.cumsum(candidates.byte_counts)
    wanted = size or round(UNMATCHED_RATIO * int(sums[-1]))
    return candidates.first(int(np.abs(sums - wanted).argmin()) + 1)


def _text_bytes(ids: Ids, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the text of `ids`, end-of-document ids not counted."""
    parts = range(0, len(ids), 1 << 20)
    return sum(int(tokenizer.byte_lengths[ids[start : start + (1 << 20)]].sum()) for start in parts)


def _distinct(hashes: Hashes) -> int:
    return len(first_of_each(hashes))


def merged(ranges: Int64) -> Int64:
    """Neighbouring ranges joined: fewer segments, the same ids."""
    if not len(ranges):
        return ranges
    opens = np.flatnonzero(np.r_[True, ranges[1:, 0] != ranges[:-1, 1]])
    closes = np.r_[opens[1:] - 1, len(ranges) - 1]
    return np.stack([ranges[opens, 0], ranges[closes, 1]], axis=1)


def _ids_sha256(ids: Ids) -> bytes:
    digest = hashlib.sha256()
    for start in range(0, len(ids), 1 << 20):
        digest.update(ids[start : start + (1 << 20)].astype("<u4").tobytes())
    return digest.digest()
