"""From a run spec to its data: tokenizer, training stream, evaluation sets, recorded facts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.core.data.batches import RandomWindows, TokenWindows, TrainStream, WindowStream
from workbench.core.data.corpus import Corpus, sample_corpus, text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.errors import DataError
from workbench.core.data.evaluation_sets import EvaluationSet, facts_of, from_spans
from workbench.core.data.further_sets import from_files, some_of
from workbench.core.data.judged import JudgedSet, judge, of_training, passing, settings_of, unproven
from workbench.core.data.ngrams import whole
from workbench.core.data.overlap import Passages
from workbench.core.data.passing import Watched
from workbench.core.data.shard_split import NOT_DECODED
from workbench.core.data.shard_tokenizer import (
    Vocabulary,
    tokenizer_of_shard,
    vocab_size_of_shard,
)
from workbench.core.data.split import BLOCK_TOKENS, Split, split_corpus
from workbench.core.data.token_data import load_shards
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from workbench.spec.run import RunSpec

RANDOM_BLOCKS = 8  # of each evaluation set of random ids
NO_TEXT = {"not_applicable": "random ids stand for no text"}
SMOKE_TEST = "random ids: a smoke test"


@dataclass(frozen=True, eq=False)
class Data:
    """All that a run reads. `facts` are what a comparison needs to know of it.

    Evaluation sets stand under the names that their numbers are logged by: what each has earned.
    `train_passages` is the training side of that measurement; None: there is nothing to look into.
    `byte_lengths` are the text bytes of each id [V]; None: no tokenizer is known that says so.
    """

    tokenizer: Tokenizer | Vocabulary
    evaluation_sets: dict[str, EvaluationSet]
    facts: dict[str, Any]
    train_stream: Callable[[], TrainStream]  # a fresh stream, at its start
    train_passages: Passages | None = None
    byte_lengths: npt.NDArray[np.int64] | None = None


def load_data(spec: RunSpec, store: Path, *, seed: int) -> Data:
    """Load, encode (or take from the store's cache) and split what the spec names.

    `seed` decides the training order alone. Nothing is written outside `<store>/cache`.

    Raises:
        DataError: a file, document or corpus that cannot be used, or a text too short for a window.
        StoreError: the store cannot be written.
    """
    if spec.data.dataset == "tokens":
        return _from_shards(spec, store, seed)
    if (below := _random_below(spec)) is not None:
        sha256 = hashlib.sha256(f"random ids below {below}".encode()).hexdigest()
        return _random(spec, Vocabulary("random ids", below, below - 1, sha256), seed)
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
        case "fineweb":
            return _from_stream(spec, tokenizer, store)


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
    if (below := _random_below(spec)) is not None:
        return below
    return tokenizer_of(spec, cache_dir, keep).vocab_size


def _from_shards(spec: RunSpec, store: Path, seed: int) -> Data:
    found = load_shards(spec, store, seed=seed)
    stream = partial(WindowStream, found.windows)
    data = _data(found.vocabulary, found.facts, found.sets, spec, stream, NOT_DECODED)
    return replace(data, train_passages=found.training, byte_lengths=found.byte_lengths)


def _from_corpus(
    spec: RunSpec, corpus: Corpus, tokenizer: Tokenizer, store: Path, seed: int
) -> Data:
    encoded = encode_corpus(corpus, tokenizer, store / "cache/corpus")
    cache, settings = store / "cache", settings_of(spec.data)
    overlaps = cache / "overlap"
    ratio = spec.data.held_out_ratio or 0.0
    split = split_corpus(encoded, tokenizer, ratio, settings, overlaps)
    windows = TokenWindows(
        split.tokens,
        split.train_segments,
        spec.training.seq_len,
        spec.data.order or "shuffled",
        seed,
        split.train_sha256,
    )
    sets: dict[str, JudgedSet] = {}
    for name in spec.evaluation.sets:
        if name == "train_split":
            spans = some_of(split.train_split, spec)
            sets[name] = of_training(from_spans(name, split.tokens, spans, tokenizer.eod_id))
            continue
        if name == "held_out":
            tokens, spans, passages = split.tokens, split.held_out, split.held_out_passages
        else:
            tokens, spans, passages = from_files(spec, name, tokenizer, cache)
        if not len(spans):
            problem = "held_out_ratio 0 leaves no documents to hold out"
            raise DataError.at("evaluation.sets", problem, name, "train_split")
        one = from_spans(name, tokens, some_of(spans, spec), tokenizer.eod_id)
        sets[name] = judge(one, passages, split.train_passages, settings, overlaps)
    facts = {
        "source": corpus.source,
        "train_sha256": split.train_sha256,
        "train_documents": split.counts["train_documents"],
        "train_tokens": split.counts["train_tokens"],
        "train_bytes": split.counts["train_bytes"],
        "split": split.rule,
        "counts": _counts(corpus, split, windows),
    }
    data = _data(tokenizer, facts, sets, spec, lambda: WindowStream(windows))
    lengths = tokenizer.byte_lengths
    return replace(data, train_passages=split.train_passages, byte_lengths=lengths)


def _from_stream(spec: RunSpec, tokenizer: Tokenizer, store: Path) -> Data:
    """Nobody knows before a stream has passed what of it trains: its sets are unproven."""
    from workbench.core.data.stream_data import load_stream  # with pyarrow: only where it is needed

    further: dict[str, Watched] = {}
    for name in spec.evaluation.sets:
        if name not in ("train_split", "held_out"):
            tokens, spans, passages = from_files(spec, name, tokenizer, store / "cache")
            one = from_spans(name, tokens, some_of(spans, spec), tokenizer.eod_id)
            assert passages.read is not None, "files of text"
            texts = islice(passages.read(), len(one.documents))
            further[name] = Watched(one, list(map(whole, texts)))
    found = load_stream(spec, tokenizer, store, further)
    sets = {
        name: of_training(one) if name == "train_split" else passing(one, settings_of(spec.data))
        for name, one in found.sets.items()
    }
    data = _data(tokenizer, found.facts, sets, spec, found.train_stream)
    return replace(data, byte_lengths=tokenizer.byte_lengths)


def known_facts(spec: RunSpec, store: Path) -> dict[str, Any] | None:
    """What is known of a stream without reading it, as `Data.facts`; None: nothing is a stream.

    Raises:
        DataError: the tokenizer cannot be had, or the folder holds nothing to read.
        StoreError: the store cannot be written.
    """
    if spec.data.dataset != "fineweb":
        return None
    from workbench.core.data.stream_data import foreseen_facts

    tokenizer = tokenizer_of(spec, store / "cache/tiktoken")
    return {**_of_tokenizer(tokenizer), "data": foreseen_facts(spec.data, store), "evaluation": {}}


def _counts(corpus: Corpus, split: Split, windows: TokenWindows) -> dict[str, int]:
    counts = {"files": corpus.files, "skipped_files": corpus.skipped_files, **split.counts}
    if windows.windows_per_epoch is not None:
        counts["windows_per_epoch"] = windows.windows_per_epoch
        counts["dropped_tokens"] = windows.dropped_tokens
    return counts


def _random_below(spec: RunSpec) -> int | None:
    """The bound of random ids of no tokenizer; None: there is a tokenizer."""
    is_random = spec.data.dataset == "random" and spec.tokenizer.name is None
    return spec.tokenizer.vocab_size if is_random else None


def _random(spec: RunSpec, tokenizer: Tokenizer | Vocabulary, seed: int) -> Data:
    """Random ids: `held_out` is a stream of its own that no seed changes, `train_split` the first
    ids of the training stream."""
    seq_len = spec.training.seq_len
    windows = RandomWindows(tokenizer.vocab_size, seq_len, seed)
    sets: dict[str, JudgedSet] = {}
    for name in spec.evaluation.sets:
        blocks = RANDOM_BLOCKS
        if spec.evaluation.eval_documents:
            blocks = min(blocks, spec.evaluation.eval_documents)
        source = windows
        if name == "held_out":
            source = RandomWindows(tokenizer.vocab_size, BLOCK_TOKENS, 0, "held_out")
        one = _random_set(name, source, blocks, tokenizer.eod_id or 0)
        sets[name] = of_training(one) if name == "train_split" else unproven(one, SMOKE_TEST)
    identity = f"random ids v1 below {tokenizer.vocab_size}"
    facts = {
        "source": "uniform random token ids (no text: a smoke test)",
        "train_sha256": hashlib.sha256(identity.encode()).hexdigest(),
        "train_documents": NO_TEXT,
        "train_tokens": NO_TEXT,
        "train_bytes": NO_TEXT,
        "split": "another random stream",
    }
    return _data(tokenizer, facts, sets, spec, lambda: WindowStream(windows))


def _random_set(name: str, source: RandomWindows, blocks: int, eod_id: int) -> EvaluationSet:
    count = -(-blocks * BLOCK_TOKENS // source.seq_len)
    ids = np.concatenate([source.window(i)[:-1] for i in range(count)])[: blocks * BLOCK_TOKENS]
    documents = list(ids.reshape(blocks, BLOCK_TOKENS))
    hashes = b"".join(hashlib.sha256(d.astype("<u4").tobytes()).digest() for d in documents)
    table = np.frombuffer(hashes, np.uint8).reshape(-1, 32)
    return EvaluationSet(name, "block of 1024 tokens", eod_id, documents, None, table)


def _data(
    tokenizer: Tokenizer | Vocabulary,
    data: dict[str, Any],
    sets: dict[str, JudgedSet],
    spec: RunSpec,
    train_stream: Callable[[], TrainStream],
    no_bytes: dict[str, str] = NO_TEXT,
) -> Data:
    """The data with their facts: those of a set stand under the name it was asked for by."""
    seq_len, stride = spec.training.seq_len, spec.evaluation.stride
    facts = {
        **_of_tokenizer(tokenizer),
        "data": data,
        "evaluation": {
            name: facts_of(one.documents, seq_len, stride, no_bytes) | one.facts
            for name, one in sets.items()
        },
    }
    by_logged_name = {one.documents.name: one.documents for one in sets.values()}
    return Data(tokenizer, by_logged_name, facts, train_stream)


def _of_tokenizer(tokenizer: Tokenizer | Vocabulary) -> dict[str, Any]:
    return {
        "tokenizer": {
            "name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.content_sha256,
        }
    }
