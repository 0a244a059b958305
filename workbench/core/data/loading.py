"""From a run spec to its data: tokenizer, training stream, evaluation sets, recorded facts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.data.batches import RandomWindows, TokenWindows, WindowStream
from workbench.core.data.corpus import Corpus, sample_corpus, text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.errors import DataError
from workbench.core.data.evaluation_sets import EvaluationSet, facts_of, from_spans
from workbench.core.data.shard_tokenizer import (
    Vocabulary,
    tokenizer_of_shard,
    vocab_size_of_shard,
)
from workbench.core.data.split import BLOCK_TOKENS, Split, split_corpus
from workbench.core.data.token_data import NOT_DECODED, load_shards
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from workbench.spec.run import RunSpec

RANDOM_BLOCKS = 8  # of each evaluation set of random ids
NO_TEXT = {"not_applicable": "random ids stand for no text"}


@dataclass(frozen=True, eq=False)
class Data:
    """All that a run reads. `facts` are what a comparison needs to know of it."""

    tokenizer: Tokenizer | Vocabulary
    evaluation_sets: dict[str, EvaluationSet]
    facts: dict[str, Any]
    train_stream: Callable[[], WindowStream]  # a fresh stream, at its start


def load_data(spec: RunSpec, store: Path, *, seed: int) -> Data:
    """Load, encode (or take from the store's cache) and split what the spec names.

    `seed` decides the training order alone. Nothing is written outside `<store>/cache`.

    Raises:
        DataError: a file, document or corpus that cannot be used, or a text too short for a window.
        StoreError: the store cannot be written.
    """
    if spec.data.dataset == "tokens":
        return _from_shards(spec, store, seed)
    tokenizer = tokenizer_of(spec, store / "cache/tiktoken")
    match spec.data.dataset:
        case "sample":
            return _from_corpus(spec, sample_corpus(), tokenizer, store, seed)
        case "text":
            data = spec.data
            corpus = text_corpus(
                data.text_file, data.text_field or "text", data.text_unit or "auto"
            )
            return _from_corpus(spec, corpus, tokenizer, store, seed)
        case "random":
            return _random(spec, tokenizer, seed)
        case other:
            allowed = "sample, text, tokens, random"
            raise DataError.at("data.dataset", "is not built yet", other, allowed)


def tokenizer_of(spec: RunSpec, cache_dir: Path, keep: bool = True) -> Tokenizer:
    """The tokenizer that a spec asks for. Without `keep` nothing is written into `cache_dir`.

    Raises:
        DataError: it cannot be had.
    """
    if spec.tokenizer.name is None or spec.data.dataset == "tokens":
        return tokenizer_of_shard(spec, cache_dir, keep)
    return load_tokenizer(spec.tokenizer.name, spec.tokenizer.path, cache_dir, keep)


def vocab_size_of(spec: RunSpec, cache_dir: Path, keep: bool = True) -> int:
    """How many ids a spec's tokens have, without reading its data.

    Raises:
        DataError: the tokenizer cannot be had, or the shard that says it.
    """
    if spec.data.dataset == "tokens":
        return vocab_size_of_shard(spec)
    return tokenizer_of(spec, cache_dir, keep).vocab_size


def _from_shards(spec: RunSpec, store: Path, seed: int) -> Data:
    found = load_shards(spec, store, seed=seed)
    facts = _facts(found.vocabulary, found.facts, found.sets, spec, NOT_DECODED)
    return Data(found.vocabulary, found.sets, facts, lambda: WindowStream(found.windows))


def _from_corpus(
    spec: RunSpec, corpus: Corpus, tokenizer: Tokenizer, store: Path, seed: int
) -> Data:
    encoded = encode_corpus(corpus, tokenizer, store / "cache" / "corpus")
    ratio, cache = spec.data.held_out_ratio or 0.0, store / "cache/overlap"
    split = split_corpus(encoded, tokenizer, ratio, cache_dir=cache)
    windows = TokenWindows(
        split.tokens,
        split.train_segments,
        spec.training.seq_len,
        spec.data.order or "shuffled",
        seed,
        split.train_sha256,
    )
    sets: dict[str, EvaluationSet] = {}
    for name in spec.evaluation.sets:
        spans = split.held_out if name == "held_out" else split.train_split
        if not len(spans):
            problem = "held_out_ratio 0 leaves no documents to hold out"
            raise DataError.at("evaluation.sets", problem, name, "train_split")
        if spec.evaluation.eval_documents:
            spans = spans.first(spec.evaluation.eval_documents)
        sets[name] = from_spans(name, split.tokens, spans, tokenizer.eod_id)
    facts = {
        "source": corpus.source,
        "train_sha256": split.train_sha256,
        "train_documents": split.counts["train_documents"],
        "train_tokens": split.counts["train_tokens"],
        "train_bytes": split.counts["train_bytes"],
        "split": split.rule,
        "counts": _counts(corpus, split, windows),
        "overlap": "near-duplicates are on one side: see split",
    }
    return Data(
        tokenizer, sets, _facts(tokenizer, facts, sets, spec), lambda: WindowStream(windows)
    )


def _counts(corpus: Corpus, split: Split, windows: TokenWindows) -> dict[str, int]:
    counts = {"files": corpus.files, "skipped_files": corpus.skipped_files, **split.counts}
    if windows.windows_per_epoch is not None:
        counts["windows_per_epoch"] = windows.windows_per_epoch
        counts["dropped_tokens"] = windows.dropped_tokens
    return counts


def _random(spec: RunSpec, tokenizer: Tokenizer, seed: int) -> Data:
    """Random ids: `held_out` is a stream of its own that no seed changes, `train_split` the first
    ids of the training stream."""
    seq_len = spec.training.seq_len
    windows = RandomWindows(tokenizer.vocab_size, seq_len, seed)
    sets: dict[str, EvaluationSet] = {}
    for name in spec.evaluation.sets:
        blocks = RANDOM_BLOCKS
        if spec.evaluation.eval_documents:
            blocks = min(blocks, spec.evaluation.eval_documents)
        source = windows
        if name == "held_out":
            source = RandomWindows(tokenizer.vocab_size, BLOCK_TOKENS, 0, "held_out")
        sets[name] = _random_set(name, source, blocks, tokenizer.eod_id)
    identity = f"random ids v1 below {tokenizer.vocab_size}"
    facts = {
        "source": "uniform random token ids (no text: a smoke test)",
        "train_sha256": hashlib.sha256(identity.encode()).hexdigest(),
        "train_documents": NO_TEXT,
        "train_tokens": NO_TEXT,
        "train_bytes": NO_TEXT,
        "split": "another random stream",
    }
    return Data(
        tokenizer, sets, _facts(tokenizer, facts, sets, spec), lambda: WindowStream(windows)
    )


def _random_set(name: str, source: RandomWindows, blocks: int, eod_id: int) -> EvaluationSet:
    count = -(-blocks * BLOCK_TOKENS // source.seq_len)
    ids = np.concatenate([source.window(i)[:-1] for i in range(count)])[: blocks * BLOCK_TOKENS]
    documents = list(ids.reshape(blocks, BLOCK_TOKENS))
    hashes = b"".join(hashlib.sha256(d.astype("<u4").tobytes()).digest() for d in documents)
    table = np.frombuffer(hashes, np.uint8).reshape(-1, 32)
    return EvaluationSet(name, "block of 1024 tokens", eod_id, documents, None, table)


def _facts(
    tokenizer: Tokenizer | Vocabulary,
    data: dict[str, Any],
    sets: dict[str, EvaluationSet],
    spec: RunSpec,
    no_bytes: dict[str, str] = NO_TEXT,
) -> dict[str, Any]:
    return {
        "tokenizer": {
            "name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.content_sha256,
        },
        "data": data,
        "evaluation": {
            name: facts_of(one, spec.training.seq_len, spec.evaluation.stride, no_bytes)
            for name, one in sets.items()
        },
    }
