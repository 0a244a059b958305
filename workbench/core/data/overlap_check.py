"""Two sources side by side: how much of the one stands in the other, without a run.

Each is text or a token shard. Of a shard the decoded ids are text; where nothing decodes them, they
are measured beside another shard of ids alone. What counts beside documents are the tokens of a
shard, or the UTF-8 bytes of text, which belong to no tokenizer.

Shapes: M documents of the evaluation side, each text once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.data.corpus import Corpus, text_corpus
from workbench.core.data.errors import DataError
from workbench.core.data.overlap import Passages, Settings, measure, outcome
from workbench.core.data.passages import passages_of_shard
from workbench.core.data.shard_tokenizer import tokenizer_of_shards
from workbench.core.data.shards import TokenShard, open_shard
from workbench.core.data.text_files import TextUnit
from workbench.core.data.tokenizer import Tokenizer

BLOCK_TOKENS = 1024  # stands for a document where boundaries are not known
SHARD_FILE = "tokens.bin"


class Reading(NamedTuple):
    """How sources are read: text by the first two, token shards by the others."""

    text_field: str = "text"
    text_unit: TextUnit = "auto"
    tokens_format: str = "auto"
    vocab_size: int | None = None
    tokenizer: str | None = None  # of shards that do not say it
    tokenizer_path: str | None = None  # of the rank file, for the tokenizer `file`


class _Side(NamedTuple):
    passages: Passages
    sizes: npt.NDArray[np.int64]  # [M], bytes of text or tokens
    unit: str


def overlap_of(
    training: str, evaluation: str, reading: Reading, settings: Settings, cache_dir: Path
) -> dict[str, Any]:
    """What a record of a run would hold of this set beside this training text.

    Args:
        cache_dir: of the files of tokenizers.

    Raises:
        DataError: a source that cannot be read, or ids that nothing decodes beside text or beside
            those of another tokenizer.
    """
    shards = {
        place: _open(path, reading, place)
        for place, path in (("TRAIN", training), ("EVAL", evaluation))
        if _is_shard(path)
    }
    decoders = {
        place: tokenizer_of_shards([shard], reading.tokenizer_path, cache_dir)
        for place, shard in shards.items()
    }
    reasons = {place: found for place, found in decoders.items() if isinstance(found, str)}
    if reasons:
        _require_ids(shards, reasons)
        reason = next(iter(reasons.values()))
        decoders = dict.fromkeys(shards, reason)
    train, side = (
        _of_shard(shards[place], decoders[place], is_evaluation)
        if place in shards
        else _of_text(path, reading, place, is_evaluation)
        for place, path, is_evaluation in (("TRAIN", training, False), ("EVAL", evaluation, True))
    )
    if not len(side.sizes):
        raise DataError.at("EVAL", "holds no document", evaluation)
    found = measure(side.passages, train.passages, settings.ngram)
    passages = side.passages
    status, facts, rule = outcome(found, side.sizes, settings, passages.unit, passages.measured_on)
    size = "tokens" if "EVAL" in shards else "bytes"
    facts[f"overlapping_{size}"] = facts.pop("overlapping_tokens")
    if size == "bytes":
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


def _require_ids(shards: Mapping[str, TokenShard], reasons: Mapping[str, str]) -> None:
    """Nothing, where the ids of two shards stand for the same."""
    place, reason = next(iter(reasons.items()))
    allowed = "--tokenizer, or two shards of one tokenizer"
    if len(shards) < 2:
        message = f"is a token shard beside text, and its ids cannot be decoded: {reason}"
        raise DataError.at(place, message, str(shards[place].path), allowed)
    for name in ("vocab_size", "tokenizer", "tokenizer_sha256"):
        one, other = (getattr(shard, name) for shard in shards.values())
        if one is not None and other is not None and one != other:
            message = f"ids of another tokenizer ({name}), which cannot be decoded: {reason}"
            raise DataError.at("EVAL", message, other, str(one))


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


def _open(path: str, reading: Reading, place: str) -> TokenShard:
    return open_shard(
        path,
        reading.tokens_format,
        place=place,
        vocab_size=reading.vocab_size,
        tokenizer=reading.tokenizer,
    )


def _of_shard(shard: TokenShard, decoder: Tokenizer | str, each_once: bool) -> _Side:
    ranges, hashes, unit = _stretches(shard, each_once)
    identity = f"ids {shard.sha256}"
    passages = passages_of_shard(
        shard.tokens, ranges, hashes, identity, decoder, in_parts=not each_once
    )
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
