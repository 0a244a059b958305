"""The tokenizer of token shards: what is known of it, by content or by the shards themselves.

Its files are read only where the bytes of ids are asked for.

Shapes: M stretches of a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.core.data.errors import DataError
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.shard_index import Header
from workbench.core.data.shards import TokenShard, known_vocab_size, read_header
from workbench.core.data.sides import Int64
from workbench.core.data.tokenizer import Ids, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from workbench.spec.run import RunSpec

UNNAMED = "unnamed"
BY_SHARDS = "shards:"  # before a hash that stands for the tokenizer of these shards


@dataclass(frozen=True)
class Vocabulary:
    """What is known of the tokenizer of a shard, whose files are not read."""

    name: str
    vocab_size: int
    eod_id: int | None
    content_sha256: str


def shard_header(spec: RunSpec) -> Header:
    """What the training shard says of itself, without a look at its ids.

    Raises:
        DataError: it cannot be used.
    """
    return _described(spec, "tokens_path")


def vocab_size_of_shard(spec: RunSpec) -> int:
    """How many ids the tokenizer of a spec's shard has.

    Raises:
        DataError: the shard cannot be used, or neither it nor the spec says so.
    """
    return known_vocab_size(shard_header(spec))


def tokenizer_of_shard(spec: RunSpec, cache_dir: Path, keep: bool = True) -> Tokenizer:
    """The tokenizer that a spec's shard names. Without `keep` nothing is written into `cache_dir`.

    Raises:
        DataError: it cannot be had, or has another vocabulary than the shard.
    """
    header = shard_header(spec)
    if header.tokenizer is None:
        message = "neither the shard nor the spec names the tokenizer"
        raise DataError.at("tokenizer.name", message)
    tokenizer = load_tokenizer(header.tokenizer, spec.tokenizer.path, cache_dir, keep)
    if tokenizer.vocab_size != known_vocab_size(header):
        message = f"the tokenizer {tokenizer.name!r} has another vocabulary than the shard"
        raise DataError.at(
            "tokenizer.name", message, tokenizer.vocab_size, f"{header.vocab_size} entries"
        )
    return tokenizer


def _described(spec: RunSpec, field: str) -> Header:
    return read_header(
        getattr(spec.data, field),
        spec.data.tokens_format or "auto",
        place=f"data.{field}",
        vocab_size=spec.tokenizer.vocab_size,
        tokenizer=spec.tokenizer.name,
    )


def vocabulary_of(shards: list[TokenShard]) -> Vocabulary:
    """The tokenizer of shards that agree with one another."""
    train = shards[0]
    known = {shard.tokenizer_sha256 for shard in shards}
    sha256 = known.pop() if len(known) == 1 else None
    if sha256 is None:
        parts = [f"{train.vocab_size}", *(shard.sha256 for shard in shards)]
        digest = hashlib.sha256("\n".join(["workbench token shards v1", *parts]).encode())
        sha256 = BY_SHARDS + digest.hexdigest()
    name = next((shard.tokenizer for shard in shards if shard.tokenizer), UNNAMED)
    return Vocabulary(name, train.vocab_size, train.eod_id, sha256)


class Decoder:
    """The bytes of ids, where the shard's tokenizer is known by content and can be had."""

    def __init__(self, spec: RunSpec, vocabulary: Vocabulary, cache_dir: Path) -> None:
        self._spec, self._vocabulary, self._cache_dir = spec, vocabulary, cache_dir
        self._lengths: Int64 | None = None
        self._is_loaded = False

    def byte_counts(self, shard: TokenShard, ranges: Int64) -> Int64 | None:
        """UTF-8 bytes of the text of each stretch [M], None where they cannot be known."""
        if not self._is_loaded:
            self._is_loaded = True
            self._lengths = self._load()
        if self._lengths is None:
            return None
        lengths = self._lengths
        sums = [_sum(lengths, shard.tokens, start, end) for start, end in ranges.tolist()]
        return np.array(sums, np.int64)

    def _load(self) -> Int64 | None:
        wanted = self._vocabulary
        if wanted.content_sha256.startswith(BY_SHARDS):
            return None
        path = self._spec.tokenizer.path
        if wanted.name == "file" and path is None:
            return None
        tokenizer = load_tokenizer(wanted.name, path, self._cache_dir)
        if tokenizer.content_sha256 != wanted.content_sha256:
            message = f"{wanted.name!r} is not the tokenizer that the shard was written with"
            allowed = f"SHA-256 {wanted.content_sha256}"
            raise DataError.at("tokenizer", message, tokenizer.content_sha256, allowed)
        return tokenizer.byte_lengths


def _sum(lengths: Int64, tokens: StoredIds, start: int, end: int) -> int:
    return sum(int(lengths[ids].sum()) for ids in parts(tokens, start, end))


def parts(tokens: StoredIds, start: int, end: int) -> Iterator[Ids]:
    """The ids of a stretch, a million at a time."""
    for at in range(start, end, 1 << 20):
        yield tokens[at : min(at + (1 << 20), end)]
