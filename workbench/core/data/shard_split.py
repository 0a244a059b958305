"""Which ids of a token shard train and which are held out, and the stretches that are scored.

By whole documents, by the rule of a text (see `split`), where the shard has at least 20 whose
boundaries are known; else its last ids are held out: `held_out_ratio` of them, at least one window,
at most a tenth. Where boundaries are not known, what is scored are blocks of 1,024 ids.

Shapes: T ids of a shard, M stretches that are scored, G stretches that train.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.core.data.errors import DataError
from workbench.core.data.overlap import Passages, Settings
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.shard_groups import groups_of
from workbench.core.data.shard_tokenizer import ShardText, parts
from workbench.core.data.shards import TokenShard
from workbench.core.data.sides import Documents, Hashes, Int64, choose_sides, in_hash_order
from workbench.core.data.split import (
    BLOCK_TOKENS,
    MIN_DOCUMENTS,
    UNMATCHED_RATIO,
    Unit,
    merged,
)

UNKNOWN = {"not_applicable": "the shard does not say it"}
NOT_DECODED = {"not_applicable": "the text of these ids is not known"}


@dataclass(frozen=True, eq=False)
class Spans:
    """M stretches of a shard in order of their hash."""

    unit: Unit
    ranges: Int64  # [M, 2]
    bytes: Int64 | None  # [M], None where they are not known
    sha256: Hashes  # [M, 32]

    def first(self, count: int) -> Spans:
        """The first `count` in that order."""
        sums = None if self.bytes is None else self.bytes[:count]
        return Spans(self.unit, self.ranges[:count], sums, self.sha256[:count])


@dataclass(frozen=True, eq=False)
class ShardSplit:
    rule: str
    segments: Int64  # [G, 2]
    sha256: str  # of what trains
    held_out: Spans | None
    train_split: Spans
    counts: dict[str, Any]


class Cutting(NamedTuple):
    """What decides how a shard is split, and where what is found of it is kept."""

    ratio: float
    seq_len: int
    settings: Settings
    text: ShardText
    cache: Path  # <store>/cache


def split_shard(shard: TokenShard, how: Cutting) -> ShardSplit:
    """Both sides of a shard; with a ratio of 0 all of it trains.

    Raises:
        DataError: no split leaves ids on both sides.
        StoreError: the cache cannot be written.
    """
    if how.ratio == 0:
        segments = np.array([[0, len(shard.tokens)]], np.int64)
        spans = part_of_training(shard, segments, None, how.text)
        sha256, counts = _of_whole(shard)
        return ShardSplit("none", segments, sha256, None, spans, counts)
    if shard.documents is not None and len(shard.documents) >= MIN_DOCUMENTS:
        return _by_document(shard, how)
    return _by_tail(shard, how)


def _of_whole(shard: TokenShard) -> tuple[str, dict[str, Any]]:
    """The identity and size of a shard that trains as it stands."""
    if shard.documents is None:
        tokens = len(shard.tokens)
        return shard.sha256, {"documents": UNKNOWN, "tokens": tokens, "bytes": NOT_DECODED}
    everything = np.arange(len(shard.documents))
    counts = _document_counts(shard, everything)
    if not shard.has_text_facts:
        return shard.sha256, counts
    return hashlib.sha256(shard.documents["sha256"].tobytes()).hexdigest(), counts


def _document_counts(shard: TokenShard, chosen: Int64) -> dict[str, Any]:
    assert shard.documents is not None
    rows = shard.documents[chosen]
    return {
        "documents": len(rows),
        "tokens": int((rows["end"] - rows["start"]).sum()),
        "bytes": int(rows["bytes"].sum()) if shard.has_text_facts else NOT_DECODED,
    }


def _by_document(shard: TokenShard, how: Cutting) -> ShardSplit:
    """As a text is split (see `split`): near-duplicates on one side, and none of the held-out
    documents overlaps the training side."""
    assert shard.documents is not None
    rows, hashes = shard.documents, document_hashes(shard)
    ranges = np.stack([rows["start"], rows["end"]], axis=1)

    def passages(chosen: Int64) -> Passages:
        digest = hashlib.sha256(ranges[chosen].tobytes()).hexdigest()
        return how.text.passages(shard, ranges[chosen], hashes[chosen], f"documents {digest}")

    everything = passages(np.arange(len(rows)))
    groups, split_hashes = groups_of(everything, hashes, how.settings, how.cache / "shards")
    sizes = rows["bytes"] if shard.has_text_facts else rows["end"] - rows["start"]
    documents = Documents(sizes, hashes, split_hashes, groups, passages)
    sides = choose_sides(documents, how.ratio, how.settings, how.cache / "overlap", everything.unit)
    train = np.flatnonzero(~sides.is_held_out)
    held_out = _documents(shard, hashes, np.flatnonzero(sides.is_held_out))
    lead = int(shard.eod_id is not None)
    segments = merged(np.stack([rows["start"][train] - lead, rows["end"][train]], axis=1))
    return ShardSplit(
        sides.rule,
        segments,
        hashlib.sha256(hashes[train].tobytes()).hexdigest(),
        held_out,
        _of_size(_documents(shard, hashes, train), size_of(held_out)),
        _document_counts(shard, train)
        | {"near_duplicate_groups": sides.shared_groups, "moved_to_training": sides.moved},
    )


def _by_tail(shard: TokenShard, how: Cutting) -> ShardSplit:
    """The last ids are held out: `ratio` of them, at least seq_len + 1, at most a tenth."""
    total = len(shard.tokens)
    tail = min(max(how.seq_len + 1, round(how.ratio * total)), total // 10)
    if tail < 1:
        message = f"a shard of {total} ids is too small to hold any out"
        raise DataError.at("data.held_out_ratio", message, how.ratio)
    cut = total - tail
    segments = np.array([[0, cut]], np.int64)
    held_out = _blocks(shard, np.arange(cut, total, BLOCK_TOKENS), total, how.text)
    kept, memory = StoredIds(replace(shard.tokens.file, count=cut)), how.cache / "shards"
    sha256 = kept.content(memory).ids_sha256
    kept.remember(memory)
    shard.tokens.require_unchanged()  # both opened the same file
    return ShardSplit(
        f"last {tail} of {total} ids",
        segments,
        sha256,
        held_out,
        part_of_training(shard, segments, size_of(held_out), how.text),
        {"documents": UNKNOWN, "tokens": cut, "bytes": NOT_DECODED},
    )


def whole_shard(shard: TokenShard, text: ShardText) -> Spans:
    """All of a shard, each document once."""
    if shard.documents is not None:
        everything = np.arange(len(shard.documents))
        return _documents(shard, document_hashes(shard), everything)
    total = len(shard.tokens)
    return _blocks(shard, np.arange(0, total, BLOCK_TOKENS), total, text)


def part_of_training(
    shard: TokenShard, segments: Int64, size: int | None, text: ShardText
) -> Spans:
    """A part of what trains, as large as what is held out, or 5 % of it: the first documents in
    order of their hash, or blocks that stand equally far apart."""
    is_whole = segments.tolist() == [[0, len(shard.tokens)]]
    if shard.documents is not None and is_whole:
        everything = np.arange(len(shard.documents))
        return _of_size(_documents(shard, document_hashes(shard), everything), size)
    total = int(segments[-1, 1])
    blocks = -(-total // BLOCK_TOKENS)
    wanted = total * UNMATCHED_RATIO if size is None else size
    count = min(max(round(wanted / BLOCK_TOKENS), 1), blocks)
    starts = np.arange(count) * blocks // count * BLOCK_TOKENS
    return _blocks(shard, starts, total, text)


def _documents(shard: TokenShard, hashes: Hashes, chosen: Int64) -> Spans:
    """The chosen documents in order of their hash, each once, none of them empty."""
    assert shard.documents is not None
    rows = shard.documents
    lead = int(shard.eod_id is None and len(rows) > 0)  # the first id has none before it
    chosen = in_hash_order(hashes, chosen)
    starts = np.maximum(rows["start"], lead)
    chosen = chosen[rows["end"][chosen] > starts[chosen]]
    ranges = np.stack([starts[chosen], rows["end"][chosen]], axis=1)
    sums = rows["bytes"][chosen] if shard.has_text_facts else None
    return Spans("document", ranges, sums, hashes[chosen])


def _blocks(shard: TokenShard, starts: Int64, total: int, text: ShardText) -> Spans:
    """The blocks that start there, in order of their hash; none goes beyond `total`."""
    ranges = np.stack([starts, np.minimum(starts + BLOCK_TOKENS, total)], axis=1)
    if shard.eod_id is None:
        ranges[:, 0] = np.maximum(ranges[:, 0], 1)  # the first id has none before it
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    table = _hashes(shard, ranges)
    order = np.argsort(table.view("S32").ravel(), kind="stable")
    sums = text.byte_counts(shard, ranges[order])
    return Spans("block of 1024 tokens", ranges[order], sums, table[order])


def document_hashes(shard: TokenShard) -> Hashes:
    """Of their text where it is known, else of their ids [N, 32]."""
    assert shard.documents is not None
    rows = shard.documents
    if shard.has_text_facts:
        return np.ascontiguousarray(rows["sha256"])
    return _hashes(shard, np.stack([rows["start"], rows["end"]], axis=1))


def _hashes(shard: TokenShard, ranges: Int64) -> Hashes:
    """The hash of the ids of each stretch, as little-endian uint32 [M, 32]."""
    table = np.empty((len(ranges), 32), np.uint8)
    for row, (start, end) in enumerate(ranges.tolist()):
        digest = hashlib.sha256()
        for ids in parts(shard.tokens, start, end):
            digest.update(ids.astype("<u4").tobytes())
        table[row] = np.frombuffer(digest.digest(), np.uint8)
    return table


def _sizes(spans: Spans) -> Int64:
    return spans.ranges[:, 1] - spans.ranges[:, 0]


def size_of(spans: Spans) -> int:
    return int(_sizes(spans).sum())


def _of_size(candidates: Spans, size: int | None) -> Spans:
    """The first candidates in order of hash whose tokens come nearest to `size`, at least one."""
    sums = np.cumsum(_sizes(candidates))
    wanted = round(UNMATCHED_RATIO * int(sums[-1])) if size is None else size
    return candidates.first(int(np.abs(sums - wanted).argmin()) + 1)
