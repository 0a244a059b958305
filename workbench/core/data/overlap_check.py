"""Two sources side by side: how much of the one stands in the other, without a run.

Both are text, or both are token shards. What counts beside documents are the tokens of a shard, or
the UTF-8 bytes of text, which belong to no tokenizer.

Shapes: M documents of the evaluation side, each text once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.data.corpus import Corpus, TextUnit, text_corpus
from workbench.core.data.errors import DataError
from workbench.core.data.overlap import Passages, Settings, measure, outcome
from workbench.core.data.passages import passages_of_shard
from workbench.core.data.shards import TokenShard, open_shard

BLOCK_TOKENS = 1024  # stands for a document where boundaries are not known
SHARD_FILE = "tokens.bin"


class Reading(NamedTuple):
    """How sources are read: text by the first two, token shards by the others."""

    text_field: str = "text"
    text_unit: TextUnit = "auto"
    tokens_format: str = "auto"
    vocab_size: int | None = None


class _Side(NamedTuple):
    passages: Passages
    sizes: npt.NDArray[np.int64]  # [M], bytes of text or tokens
    unit: str


def overlap_of(
    training: str, evaluation: str, reading: Reading, settings: Settings
) -> dict[str, Any]:
    """What a record of a run would hold of this set beside this training text.

    Raises:
        DataError: a source that cannot be read, or text beside token shards.
    """
    kinds = [_is_shard(path) for path in (training, evaluation)]
    if kinds[0] != kinds[1]:
        message = "one is text and the other a token shard: their passages have no common measure"
        raise DataError.at("EVAL", message, evaluation, "two of a kind")
    make = _of_shard if kinds[0] else _of_text
    train = make(training, reading, "TRAIN", False)
    side = make(evaluation, reading, "EVAL", True)
    if not len(side.sizes):
        raise DataError.at("EVAL", "holds no document", evaluation)
    found = measure(side.passages, train.passages, settings.ngram)
    status, facts, rule = outcome(found, side.sizes, settings, side.passages.unit)
    size = "tokens" if kinds[0] else "bytes"
    facts[f"overlapping_{size}"] = facts.pop("overlapping_tokens")
    if not kinds[0]:
        rule = rule.replace("scored tokens", "bytes of text")
    return {
        "training": training,
        "evaluation": evaluation,
        "status": status,
        "unit": side.unit,
        "documents": len(side.sizes),
        size: int(side.sizes.sum()),
        "overlap": facts,
        "overlap_rule": rule,
    }


def _is_shard(path: str) -> bool:
    found = Path(path).expanduser()
    return found.suffix == ".bin" or (found / SHARD_FILE).exists()


def _of_text(path: str, reading: Reading, place: str, each_once: bool) -> _Side:
    corpus = text_corpus(path, reading.text_field, reading.text_unit, place)
    seen: set[bytes] = set()
    hashes, sizes, kept = [], [], []
    for number, text in enumerate(_texts(corpus)):
        raw = text.encode()
        digest = hashlib.sha256(raw).digest()
        if each_once and digest in seen:
            continue
        seen.add(digest)
        hashes.append(digest)
        sizes.append(len(raw))
        kept.append(number)

    def read() -> Iterator[str]:
        chosen = iter(kept)
        following = next(chosen, None)
        for number, text in enumerate(_texts(corpus)):
            if number == following:
                following = next(chosen, None)
                yield text

    table = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
    passages = Passages(f"text {corpus.key}", table, read)
    return _Side(passages, np.array(sizes, np.int64), "document")


def _texts(corpus: Corpus) -> Iterator[str]:
    return (text for text in corpus.read() if text.strip())


def _of_shard(path: str, reading: Reading, place: str, each_once: bool) -> _Side:
    shard = open_shard(path, reading.tokens_format, place=place, vocab_size=reading.vocab_size)
    ranges, hashes, unit = _stretches(shard, each_once)
    identity = f"ids {shard.sha256}"
    passages = passages_of_shard(shard.tokens, ranges, hashes, identity, in_parts=not each_once)
    return _Side(passages, ranges[:, 1] - ranges[:, 0], unit)


def _stretches(
    shard: TokenShard, each_once: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8] | None, str]:
    """The documents of a shard; where they are not known, blocks, or all of it in one."""
    total, rows = len(shard.tokens), shard.documents
    if rows is None and not each_once:
        return np.array([[0, total]], np.int64), None, "shard"
    if rows is None:
        starts = np.arange(0, total, BLOCK_TOKENS, dtype=np.int64)
        ranges = np.stack([starts, np.minimum(starts + BLOCK_TOKENS, total)], axis=1)
        return ranges, None, f"block of {BLOCK_TOKENS} tokens"
    ranges = np.stack([rows["start"], rows["end"]], axis=1).astype(np.int64)
    if not shard.has_text_facts:
        return ranges, None, "document"
    hashes = np.ascontiguousarray(rows["sha256"])
    if each_once:
        first = np.sort(np.unique(hashes.view("S32").ravel(), return_index=True)[1])
        ranges, hashes = ranges[first], hashes[first]
    return ranges, hashes, "document"
