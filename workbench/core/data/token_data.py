"""From token shards to what a run reads: training stream, evaluation sets, and the tokenizer.

With `eval_tokens_path` a whole shard is held out and the other trains. Else the shard is split (see
`shard_split`). Further sets are text (`data.held_out`): the tokenizer of the shards encodes it.

Shards are known by their content, never by their paths. A tokenizer whose hash no shard knows is
known by the shards' own: the same shards have the same tokenizer, and of others nobody can say so.

Overlap is measured on the words of the decoded ids, so that it depends on no tokenizer; on the ids
themselves only where nothing decodes them.

Shapes: M stretches that are scored, G stretches that train.
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
from workbench.core.data.evaluation_sets import EvaluationSet, from_spans
from workbench.core.data.further_sets import from_files, some_of
from workbench.core.data.judged import JudgedSet, judge, of_training, settings_of
from workbench.core.data.overlap import Passages
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.shard_split import (
    Cutting,
    ShardSplit,
    Spans,
    document_hashes,
    part_of_training,
    size_of,
    split_shard,
    whole_shard,
)
from workbench.core.data.shard_tokenizer import (
    ShardText,
    Vocabulary,
    tokenizer_of_shards,
    vocabulary_of,
)
from workbench.core.data.shards import TokenShard, open_shard
from workbench.core.data.sides import Int64, first_of_each
from workbench.core.data.tokenizer import Ids, Tokenizer

if TYPE_CHECKING:
    from workbench.spec.run import RunSpec


@dataclass(frozen=True, eq=False)
class TokenData:
    """What shards bring; `facts` are those of the training data, `byte_lengths` the text bytes of
    each id [V] where they are known."""

    vocabulary: Vocabulary
    windows: TokenWindows
    sets: dict[str, JudgedSet]
    facts: dict[str, Any]
    training: Passages
    byte_lengths: Int64 | None


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
    data = spec.data
    shards = open_shards(spec, store / "cache/shards")
    train, held_out_shard = shards[0], shards[-1]
    text = _text_of(spec, shards, store)
    seq_len, settings = spec.training.seq_len, settings_of(data)
    how = Cutting(data.held_out_ratio or 0.0, seq_len, settings, text, store / "cache")
    split = split_shard(train, how)
    held_out = split.held_out
    if held_out_shard is not train:
        held_out = whole_shard(held_out_shard, text)
        size = size_of(held_out)
        split = replace(split, train_split=part_of_training(train, split.segments, size, text))
    if held_out is not None and not len(held_out.ranges):
        message = "the documents that are held out hold no ids"
        raise DataError.at("data.eval_tokens_path", message, str(held_out_shard.path))
    windows = TokenWindows(
        train.tokens,
        split.segments,
        seq_len,
        data.order or "shuffled",
        seed,
        split.sha256,
    )
    training = _training_passages(train, split, text)
    overlaps = store / "cache/overlap"
    sets: dict[str, JudgedSet] = {}
    for name in spec.evaluation.sets:
        if name == "train_split":
            sets[name] = of_training(_evaluation_set(name, train, _some(split.train_split, spec)))
            continue
        if name != "held_out":
            assert not isinstance(text.tokenizer, str), "_text_of has seen to it"
            tokens, found, passages = from_files(spec, name, text.tokenizer, store / "cache")
            one = from_spans(name, tokens, some_of(found, spec), text.tokenizer.eod_id)
        elif held_out is None:
            problem = "held_out_ratio 0 leaves no documents to hold out"
            raise DataError.at("evaluation.sets", problem, name, "train_split")
        else:
            one = _evaluation_set(name, held_out_shard, _some(held_out, spec))
            passages = _passages(held_out_shard, held_out, text)
        sets[name] = judge(one, passages, training, settings, overlaps)
    facts = {
        "source": f"tokens: {train.format}, {len(train.tokens):,} ids",
        "train_sha256": split.sha256,
        **{f"train_{key}": split.counts[key] for key in ("documents", "tokens", "bytes")},
        "split": split.rule,
        "counts": _counts(split, train, held_out, windows),
    }
    return TokenData(vocabulary_of(shards), windows, sets, facts, training, text.byte_lengths)


def open_shards(spec: RunSpec, memory: Path) -> list[TokenShard]:
    """The training shard of a spec, and the one that is held out where it names one.

    Raises:
        DataError: a shard that cannot be used, or that is the training shard once more.
        StoreError: `memory` cannot be written.
    """
    train = _open(spec, "tokens_path", memory)
    if spec.data.eval_tokens_path is None:
        return [train]
    evaluation = _open(spec, "eval_tokens_path", memory)
    _require_apart(train, evaluation)
    return [train, evaluation]


def tokenizer_by_shards(spec: RunSpec, store: Path, sha256: str) -> Tokenizer | str:
    """The tokenizer of a spec's shards, which are known by `sha256` alone; or why it is not known.

    Raises:
        DataError: a shard that cannot be used any more.
        StoreError: the store cannot be written.
    """
    shards = open_shards(spec, store / "cache/shards")
    if (now := vocabulary_of(shards).content_sha256) != sha256:
        return f"the shards are others now: {now}, not {sha256}"
    return tokenizer_of_shards(shards, spec.tokenizer.path, store / "cache/tiktoken", True)


def _text_of(spec: RunSpec, shards: list[TokenShard], store: Path) -> ShardText:
    """The text of the shards. Where text beside them is to be encoded as they are, it has to be
    there."""
    needed = [one.set_name for one in spec.data.held_out if one.set_name in spec.evaluation.sets]
    path, cache = spec.tokenizer.path, store / "cache/tiktoken"
    found = tokenizer_of_shards(shards, path, cache, may_download=bool(needed))
    if needed and isinstance(found, str):
        message = f"text cannot be encoded as the shard is: {found}"
        allowed = "shards of a tokenizer that is known (tokenizer.name), or no text beside them"
        raise DataError.at("data.held_out", message, needed, allowed)
    return ShardText(shards, found)


def _some(spans: Spans, spec: RunSpec) -> Spans:
    return spans.first(spec.evaluation.eval_documents or len(spans.ranges))


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


def _evaluation_set(name: str, shard: TokenShard, spans: Spans) -> EvaluationSet:
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


def _passages(shard: TokenShard, spans: Spans, text: ShardText) -> Passages:
    """Stretches that are scored."""
    digest = hashlib.sha256(spans.ranges.tobytes() + spans.sha256.tobytes()).hexdigest()
    hashes = spans.sha256 if spans.unit == "document" else None
    return text.passages(shard, spans.ranges, hashes, f"stretches {digest}")


def _training_passages(shard: TokenShard, split: ShardSplit, text: ShardText) -> Passages:
    """What trains, in documents where their ends are known."""
    ranges, hashes = split.segments, None
    if shard.documents is not None:
        rows = shard.documents
        bounds = np.searchsorted(rows["start"], split.segments)
        chosen = np.concatenate([np.arange(first, end) for first, end in bounds.tolist()])
        ends = np.minimum(rows["end"][chosen], split.segments[-1, 1])  # a tail may start inside one
        ranges = np.stack([rows["start"][chosen], ends], axis=1)
        hashes = document_hashes(shard)[chosen]
    digest = hashlib.sha256(ranges.tobytes()).hexdigest()
    return text.passages(shard, ranges, hashes, f"training stretches {digest}", in_parts=True)


def _counts(
    split: ShardSplit, shard: TokenShard, held_out: Spans | None, windows: TokenWindows
) -> dict[str, int]:
    counts = {"shard_tokens": len(shard.tokens), "stream_tokens": windows.stream_tokens}
    if shard.documents is not None:
        hashes = document_hashes(shard)
        counts["documents"] = len(hashes)
        counts["exact_duplicates"] = len(hashes) - len(first_of_each(hashes))
    for name in ("near_duplicate_groups", "moved_to_training"):
        if name in split.counts:
            counts[name] = split.counts[name]
    if held_out is not None:
        kind = "documents" if held_out.unit == "document" else "blocks"
        counts[f"held_out_{kind}"] = len(held_out.ranges)
        counts["held_out_tokens"] = size_of(held_out)
        if held_out.bytes is not None:
            counts["held_out_bytes"] = int(held_out.bytes.sum())
    if windows.windows_per_epoch is not None:
        counts["windows_per_epoch"] = windows.windows_per_epoch
        counts["dropped_tokens"] = windows.dropped_tokens
    return counts
