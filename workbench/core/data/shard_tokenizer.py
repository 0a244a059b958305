"""The tokenizer of token shards: what is known of it, by content or by the shards themselves.

Shards train without it. It is looked for on this machine, for the text behind the ids.

Shapes: M stretches of a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.core.data.errors import DataError
from workbench.core.data.overlap import Passages
from workbench.core.data.passages import passages_of_shard
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.shard_index import Header
from workbench.core.data.shards import TokenShard, known_vocab_size, read_header
from workbench.core.data.sides import Hashes, Int64
from workbench.core.data.tokenizer import Ids, Tokenizer, load_tokenizer
from workbench.spec.datasets import BY_SHARDS

if TYPE_CHECKING:
    from workbench.spec.run import RunSpec

UNNAMED = "unnamed"
SAMPLE, AGREEING = 8192, 0.95  # ids of a shard that are encoded again, and the share that must stay


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


def vocabulary_of(shards: Sequence[TokenShard]) -> Vocabulary:
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


def tokenizer_of_shards(
    shards: Sequence[TokenShard], path: str | None, cache_dir: Path, may_download: bool = False
) -> Tokenizer | str:
    """What decodes shards that agree with one another, or why nothing does.

    A tokenizer is the one that wrote them when its content has the hash that they name. Where they
    name none, it is when `SAMPLE` ids, decoded and encoded again, stay what they are to `AGREEING`:
    a wrong vocabulary makes a text of them that is cut otherwise.

    Args:
        path: of the rank file, for the tokenizer `file`.
        may_download: whether the network may be asked for it.

    Raises:
        DataError: the file at `path` cannot be used, or is not that tokenizer.
    """
    wanted = vocabulary_of(shards)
    if wanted.name == UNNAMED:
        return "nothing names the tokenizer"
    if wanted.name == "file" and path is None:
        return "the tokenizer is a file, and tokenizer.path does not name it"
    given = path if wanted.name == "file" else None
    try:
        found = load_tokenizer(wanted.name, given, cache_dir, may_download=may_download)
    except DataError as error:
        if given is not None:
            raise
        return f"the tokenizer {wanted.name!r} is not here: {error.faults[0].message}"
    fault = _fault_of(found, wanted, shards)
    if fault is not None and given is not None:
        raise DataError.at("tokenizer.path", f"is not the tokenizer of the shard: {fault}", given)
    return found if fault is None else f"{wanted.name!r} is not its tokenizer: {fault}"


def _fault_of(found: Tokenizer, wanted: Vocabulary, shards: Sequence[TokenShard]) -> str | None:
    """What shows that a tokenizer did not write the shards; None where it did."""
    if not wanted.content_sha256.startswith(BY_SHARDS):
        same = found.content_sha256 == wanted.content_sha256
        return None if same else f"SHA-256 {found.content_sha256}, not {wanted.content_sha256}"
    highest = max(shard.tokens.content(None).highest for shard in shards)
    if found.vocab_size > wanted.vocab_size or highest >= found.vocab_size:
        return f"{found.vocab_size:,} entries beside {wanted.vocab_size:,}, ids up to {highest:,}"
    agreeing = min(_agreeing(found, shard) for shard in shards)
    if agreeing < AGREEING:
        return f"of its ids only {agreeing:.0%} stay the same when their text is encoded again"
    return None


def _agreeing(tokenizer: Tokenizer, shard: TokenShard) -> float:
    """The share of the first `SAMPLE` ids that stand at the same bytes when their text is encoded
    again: by whole documents, the last of which may be cut."""
    ids = shard.tokens[:SAMPLE].astype(np.int64)
    same = counted = 0
    for part in np.split(ids, np.flatnonzero(ids == tokenizer.eod_id)):
        before = part[part != tokenizer.eod_id]
        text = tokenizer.decode_bytes(before.tolist(), b"\xff").decode("utf-8", "replace")
        after = tokenizer.encode(text).astype(np.int64)
        same += len(np.intersect1d(_places(before, tokenizer), _places(after, tokenizer)))
        counted += len(before)
    return same / max(counted, 1)


def _places(ids: Int64, tokenizer: Tokenizer) -> Int64:
    """One number for each id and the byte that it ends at."""
    found: Int64 = np.cumsum(tokenizer.byte_lengths[ids]) * tokenizer.vocab_size + ids
    return found


class ShardText:
    """The text of shards that agree, where it can be had."""

    def __init__(self, shards: Sequence[TokenShard], tokenizer: Tokenizer | str) -> None:
        self.tokenizer = tokenizer
        self._is_by_content = not vocabulary_of(shards).content_sha256.startswith(BY_SHARDS)

    @property
    def byte_lengths(self) -> Int64 | None:
        """Text bytes of each id [V]; None where they are not known, which takes the hash of the
        tokenizer."""
        if isinstance(self.tokenizer, str) or not self._is_by_content:
            return None
        return self.tokenizer.byte_lengths

    def byte_counts(self, shard: TokenShard, ranges: Int64) -> Int64 | None:
        """UTF-8 bytes of the text of each stretch [M]; None where they are not known."""
        if (lengths := self.byte_lengths) is None:
            return None
        sums = [_sum(lengths, shard.tokens, start, end) for start, end in ranges.tolist()]
        return np.array(sums, np.int64)

    def passages(
        self,
        shard: TokenShard,
        ranges: Int64,
        sha256: Hashes | None,
        identity: str,
        in_parts: bool = False,
    ) -> Passages:
        """Stretches [M, 2] of one of the shards; see `passages_of_shard`."""
        known = f"{identity} of ids {shard.sha256}"
        return passages_of_shard(shard.tokens, ranges, sha256, known, self.tokenizer, in_parts)


def _sum(lengths: Int64, tokens: StoredIds, start: int, end: int) -> int:
    return sum(int(lengths[ids].sum()) for ids in parts(tokens, start, end))


def parts(tokens: StoredIds, start: int, end: int) -> Iterator[Ids]:
    """The ids of a stretch, a million at a time."""
    for at in range(start, end, 1 << 20):
        yield tokens[at : min(at + (1 << 20), end)]
