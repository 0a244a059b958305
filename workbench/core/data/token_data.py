"""From token shards to what a run reads: training stream, evaluation sets, and the tokenizer.

With `eval_tokens_path` a whole shard is held out and the other trains. Else the shard is split: by
the hash of each document where it has at least 20 whose boundaries are known, or its last ids are
held out: `held_out_ratio` of them, at least one window, at most a tenth. Where boundaries are not
known, what is scored are blocks of 1,024 ids.

Shards are known by their content, never by their paths. A tokenizer whose hash no shard knows is
known by the shards' own: the same shards have the same tokenizer, and of others nobody can say so.

Shapes: T ids of a shard, M stretches that are scored, G stretches that train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from workbench.core.data.batches import TokenWindows
from workbench.core.data.errors import DataError
from workbench.core.data.evaluation_sets import EvaluationSet
from workbench.core.data.judged import JudgedSet, judge, of_training, settings_of
from workbench.core.data.overlap import Passages
from workbench.core.data.passages import passages_of_shard
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.shard_tokenizer import Decoder, Vocabulary, parts, vocabulary_of
from workbench.core.data.shards import TokenShard, open_shard
from workbench.core.data.sides import Hashes, Int64, first_of_each, in_hash_order
from workbench.core.data.split import (
    BLOCK_TOKENS,
    MIN_DOCUMENTS,
    UNMATCHED_RATIO,
    Unit,
    merged,
)
from workbench.core.data.tokenizer import Ids

if TYPE_CHECKING:
    from workbench.spec.run import RunSpec

UNKNOWN = {"not_applicable": "the shard does not say it"}
NOT_DECODED = {"not_applicable": "the text of these ids is not known"}


@dataclass(frozen=True, eq=False)
class TokenData:
    """What shards bring; `facts` are those of the training data."""

    vocabulary: Vocabulary
    windows: TokenWindows
    sets: dict[str, JudgedSet]
    facts: dict[str, Any]
    training: Passages


@dataclass(frozen=True, eq=False)
class _Spans:
    """M stretches of a shard in order of their hash."""

    unit: Unit
    ranges: Int64  # [M, 2]
    bytes: Int64 | None  # [M], None where they are not known
    sha256: Hashes  # [M, 32]

    def first(self, count: int) -> _Spans:
        """The first `count` in that order."""
        sums = None if self.bytes is None else self.bytes[:count]
        return _Spans(self.unit, self.ranges[:count], sums, self.sha256[:count])


@dataclass(frozen=True, eq=False)
class _Split:
    rule: str
    segments: Int64  # [G, 2]
    sha256: str  # of what trains
    held_out: _Spans | None
    train_split: _Spans
    counts: dict[str, Any]


class Stretches(Sequence[Ids]):
    """Stretches [M, 2] of a file as arrays of ids, each read when it is asked for."""

    def __init__(self, tokens: StoredIds, ranges: Int64) -> None:
        self._tokens, self._ranges = tokens, ranges.tolist()

    def __len__(self) -> int:
        return len(self._ranges)

    @overload
    def __getitem__(self, index: int) -> Ids: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Ids]: ...
    def __getitem__(self, index: int | slice) -> Ids | Sequence[Ids]:
        """The ids of a stretch."""
        if isinstance(index, slice):
            return [self._tokens[a:b] for a, b in self._ranges[index]]
        start, end = self._ranges[index]
        return self._tokens[start:end]


def load_shards(spec: RunSpec, store: Path, *, seed: int) -> TokenData:
    """Open, check and split the shards that a spec names.

    Raises:
        DataError: a shard that cannot be used, or that is the training shard once more.
        StoreError: the store cannot be written.
    """
    memory = store / "cache/shards"
    data = spec.data
    train = _open(spec, "tokens_path", memory)
    evaluation = None
    if data.eval_tokens_path is not None:
        evaluation = _open(spec, "eval_tokens_path", memory)
        _require_apart(train, evaluation)
    shards = [train] if evaluation is None else [train, evaluation]
    vocabulary = vocabulary_of(shards)
    ratio = data.held_out_ratio or 0.0
    decoder = Decoder(spec, vocabulary, store / "cache/tiktoken")
    split = _split(train, ratio, spec.training.seq_len, memory, decoder)
    held_out, held_out_shard = split.held_out, train
    if evaluation is not None:
        held_out, held_out_shard = _whole(evaluation, decoder), evaluation
        size = _size(held_out)
        split = replace(split, train_split=_part_of_training(train, split.segments, size, decoder))
    windows = TokenWindows(
        train.tokens,
        split.segments,
        spec.training.seq_len,
        data.order or "shuffled",
        seed,
        split.sha256,
    )
    training = _training_passages(train, split)
    sets: dict[str, JudgedSet] = {}
    for name in spec.evaluation.sets:
        spans, shard = (
            (split.train_split, train) if name == "train_split" else (held_out, held_out_shard)
        )
        if name not in ("train_split", "held_out") or spans is None:
            message = "token shards bring no such set"
            raise DataError.at("evaluation.sets", message, name, "train_split, held_out")
        scored = spans.first(spec.evaluation.eval_documents or len(spans.ranges))
        one = _evaluation_set(name, shard, scored)
        if name == "train_split":
            sets[name] = of_training(one)
            continue
        passages = _passages(shard, spans)
        sets[name] = judge(one, passages, training, settings_of(data), store / "cache/overlap")
    facts = {
        "source": f"tokens: {train.format}, {len(train.tokens):,} ids",
        "train_sha256": split.sha256,
        **{f"train_{key}": split.counts[key] for key in ("documents", "tokens", "bytes")},
        "split": split.rule,
        "counts": _counts(split, train, held_out, windows),
    }
    return TokenData(vocabulary, windows, sets, facts, training)


def _open(spec: RunSpec, field: str, memory: Path) -> TokenShard:
    return open_shard(
        getattr(spec.data, field),
        spec.data.tokens_format or "auto",
        place=f"data.{field}",
        vocab_size=spec.tokenizer.vocab_size,
        tokenizer=spec.tokenizer.name,
        memory=memory,
    )


def _require_apart(train: TokenShard, evaluation: TokenShard) -> None:
    """Nothing, where one shard may be held out from the other."""
    place = "data.eval_tokens_path"
    if evaluation.sha256 == train.sha256:
        message = "holds the ids of the training shard, so nothing would be held out"
        raise DataError.at(place, message, f"SHA-256 {train.sha256}", "another shard")
    for name in ("vocab_size", "tokenizer", "tokenizer_sha256"):
        one, other = getattr(train, name), getattr(evaluation, name)
        if one is not None and other is not None and one != other:
            message = f"was encoded with another tokenizer than the training shard: {name}"
            raise DataError.at(place, message, other, str(one))


def _split(shard: TokenShard, ratio: float, seq_len: int, memory: Path, decoder: Decoder) -> _Split:
    has_documents = shard.documents is not None and len(shard.documents) >= MIN_DOCUMENTS
    if ratio == 0:
        segments = np.array([[0, len(shard.tokens)]], np.int64)
        spans = _part_of_training(shard, segments, None, decoder)
        sha256, counts = _of_whole(shard)
        return _Split("none", segments, sha256, None, spans, counts)
    return (
        _by_document(shard, ratio)
        if has_documents
        else _by_tail(shard, ratio, seq_len, memory, decoder)
    )


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


def _by_document(shard: TokenShard, ratio: float) -> _Split:
    """Equal documents are on one side; the first 8 of the 32 bytes of their hash decide which."""
    assert shard.documents is not None
    hashes = _document_hashes(shard)
    position = hashes[:, :8].copy().view(">u8").ravel().astype(np.uint64)
    held = position < np.uint64(int(ratio * 2.0**64))
    rule = f"document content hash < {ratio}"
    if not held.any():
        held = position == position.min()
        rule = f"lowest document content hash (none below {ratio})"
    if held.all():
        message = f"no document of {len(held):,} is left to train"
        raise DataError.at("data.held_out_ratio", message, ratio)
    train = np.flatnonzero(~held)
    held_out = _documents(shard, hashes, np.flatnonzero(held))
    rows = shard.documents[train]
    lead = int(shard.eod_id is not None)
    segments = merged(np.stack([rows["start"] - lead, rows["end"]], axis=1))
    return _Split(
        rule,
        segments,
        hashlib.sha256(hashes[train].tobytes()).hexdigest(),
        held_out,
        _of_size(_documents(shard, hashes, train), _size(held_out)),
        _document_counts(shard, train),
    )


def _by_tail(
    shard: TokenShard, ratio: float, seq_len: int, memory: Path, decoder: Decoder
) -> _Split:
    """The last ids are held out: `ratio` of them, at least seq_len + 1, at most a tenth."""
    total = len(shard.tokens)
    tail = min(max(seq_len + 1, round(ratio * total)), total // 10)
    if tail < 1:
        message = f"a shard of {total} ids is too small to hold any out"
        raise DataError.at("data.held_out_ratio", message, ratio)
    cut = total - tail
    segments = np.array([[0, cut]], np.int64)
    held_out = _blocks(shard, np.arange(cut, total, BLOCK_TOKENS), total, decoder)
    kept = StoredIds(replace(shard.tokens.file, count=cut))
    sha256 = kept.content(memory).ids_sha256
    kept.remember(memory)
    shard.tokens.require_unchanged()  # both opened the same file
    return _Split(
        f"last {tail} of {total} ids",
        segments,
        sha256,
        held_out,
        _part_of_training(shard, segments, _size(held_out), decoder),
        {"documents": UNKNOWN, "tokens": cut, "bytes": NOT_DECODED},
    )


def _whole(shard: TokenShard, decoder: Decoder) -> _Spans:
    """All of a shard, each document once."""
    if shard.documents is not None:
        everything = np.arange(len(shard.documents))
        return _documents(shard, _document_hashes(shard), everything)
    total = len(shard.tokens)
    return _blocks(shard, np.arange(0, total, BLOCK_TOKENS), total, decoder)


def _part_of_training(
    shard: TokenShard, segments: Int64, size: int | None, decoder: Decoder
) -> _Spans:
    """A part of what trains, as large as what is held out, or 5 % of it: the first documents in
    order of their hash, or blocks that stand equally far apart."""
    if shard.documents is not None and len(shard.documents) >= MIN_DOCUMENTS:
        everything = np.arange(len(shard.documents))
        return _of_size(_documents(shard, _document_hashes(shard), everything), size)
    total = int(segments[-1, 1])
    blocks = -(-total // BLOCK_TOKENS)
    wanted = total * UNMATCHED_RATIO if size is None else size
    count = min(max(round(wanted / BLOCK_TOKENS), 1), blocks)
    starts = np.arange(count) * blocks // count * BLOCK_TOKENS
    return _blocks(shard, starts, total, decoder)


def _documents(shard: TokenShard, hashes: Hashes, chosen: Int64) -> _Spans:
    """The chosen documents in order of their hash, each once, none of them empty."""
    assert shard.documents is not None
    rows = shard.documents
    lead = int(shard.eod_id is None and len(rows) > 0)  # the first id has none before it
    chosen = in_hash_order(hashes, chosen)
    starts = np.maximum(rows["start"], lead)
    chosen = chosen[rows["end"][chosen] > starts[chosen]]
    ranges = np.stack([starts[chosen], rows["end"][chosen]], axis=1)
    sums = rows["bytes"][chosen] if shard.has_text_facts else None
    return _Spans("document", ranges, sums, hashes[chosen])


def _blocks(shard: TokenShard, starts: Int64, total: int, decoder: Decoder) -> _Spans:
    """The blocks that start there, in order of their hash; none goes beyond `total`."""
    ranges = np.stack([starts, np.minimum(starts + BLOCK_TOKENS, total)], axis=1)
    if shard.eod_id is None:
        ranges[:, 0] = np.maximum(ranges[:, 0], 1)  # the first id has none before it
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    table = _hashes(shard, ranges)
    order = np.argsort(table.view("S32").ravel(), kind="stable")
    sums = decoder.byte_counts(shard, ranges[order])
    return _Spans("block of 1024 tokens", ranges[order], sums, table[order])


def _document_hashes(shard: TokenShard) -> Hashes:
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


def _sizes(spans: _Spans) -> Int64:
    return spans.ranges[:, 1] - spans.ranges[:, 0]


def _size(spans: _Spans) -> int:
    return int(_sizes(spans).sum())


def _of_size(candidates: _Spans, size: int | None) -> _Spans:
    """The first candidates in order of hash whose tokens come nearest to `size`, at least one."""
    sums = np.cumsum(_sizes(candidates))
    wanted = round(UNMATCHED_RATIO * int(sums[-1])) if size is None else size
    return candidates.first(int(np.abs(sums - wanted).argmin()) + 1)


def _evaluation_set(name: str, shard: TokenShard, spans: _Spans) -> EvaluationSet:
    contexts = None
    if shard.eod_id is None:
        before = [shard.tokens[start - 1 : start] for start in spans.ranges[:, 0].tolist()]
        contexts = np.concatenate(before).astype(np.int64)
    return EvaluationSet(
        name,
        spans.unit,
        shard.eod_id,
        Stretches(shard.tokens, spans.ranges),
        spans.bytes,
        spans.sha256,
        contexts,
    )


def _passages(shard: TokenShard, spans: _Spans) -> Passages:
    """Stretches that are scored, as ids: what they stand for need not be known to find them."""
    digest = hashlib.sha256(spans.ranges.tobytes() + spans.sha256.tobytes()).hexdigest()
    identity = f"stretches {digest} of ids {shard.sha256}"
    hashes = spans.sha256 if spans.unit == "document" else None
    return passages_of_shard(shard.tokens, spans.ranges, hashes, identity)


def _training_passages(shard: TokenShard, split: _Split) -> Passages:
    """What trains, in documents where their ends are known."""
    ranges, hashes = split.segments, None
    if shard.documents is not None:
        rows = shard.documents
        bounds = np.searchsorted(rows["start"], split.segments)
        chosen = np.concatenate([np.arange(first, end) for first, end in bounds.tolist()])
        ranges = np.stack([rows["start"][chosen], rows["end"][chosen]], axis=1)
        hashes = _document_hashes(shard)[chosen]
    digest = hashlib.sha256(ranges.tobytes()).hexdigest()
    identity = f"training stretches {digest} of ids {shard.sha256}"
    return passages_of_shard(shard.tokens, ranges, hashes, identity, in_parts=True)


def _counts(
    split: _Split, shard: TokenShard, held_out: _Spans | None, windows: TokenWindows
) -> dict[str, int]:
    counts = {"shard_tokens": len(shard.tokens), "stream_tokens": windows.stream_tokens}
    if shard.documents is not None:
        hashes = _document_hashes(shard)
        counts["documents"] = len(hashes)
        counts["exact_duplicates"] = len(hashes) - len(first_of_each(hashes))
    if held_out is not None:
        kind = "documents" if held_out.unit == "document" else "blocks"
        counts[f"held_out_{kind}"] = len(held_out.ranges)
        counts["held_out_tokens"] = _size(held_out)
        if held_out.bytes is not None:
            counts["held_out_bytes"] = int(held_out.bytes.sum())
    if windows.windows_per_epoch is not None:
        counts["windows_per_epoch"] = windows.windows_per_epoch
        counts["dropped_tokens"] = windows.dropped_tokens
    return counts
