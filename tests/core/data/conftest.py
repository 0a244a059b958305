"""Shared pieces: one store per session, tokenizers loaded once, specs and texts in short form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.core.data.corpus import Corpus, sample_corpus
from workbench.core.data.encoded import EncodedCorpus, encode_corpus
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer

REPOSITORY = Path(__file__).parents[3]
RANKS_4096 = REPOSITORY / "configs/tokenizer/o200k-4096.tiktoken"


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def o200k(store: Path) -> Tokenizer:
    return load_tokenizer("o200k_base", None, store / "cache/tiktoken")


@pytest.fixture(scope="session")
def byte_tokenizer(store: Path) -> Tokenizer:
    return load_tokenizer("bytes", None, store)


@pytest.fixture(scope="session")
def small(store: Path) -> Tokenizer:
    """The 4,097 ids of the quickstart."""
    return load_tokenizer("file", RANKS_4096, store)


@pytest.fixture(scope="session")
def sample(o200k: Tokenizer, store: Path) -> EncodedCorpus:
    return encode_corpus(sample_corpus(), o200k, store / "cache/corpus")


@pytest.fixture
def corpus_of() -> Callable[..., Corpus]:
    """A corpus of the given texts; `key` stands for their content."""

    def build(*texts: str, key: str = "k") -> Corpus:
        def read() -> Iterator[str]:
            yield from texts

        return Corpus("test", key, 1, 0, read)

    return build


@pytest.fixture
def encode(
    byte_tokenizer: Tokenizer, tmp_path: Path, corpus_of: Callable[..., Corpus]
) -> Callable[..., EncodedCorpus]:
    """The texts encoded as bytes."""

    def build(*texts: str) -> EncodedCorpus:
        key = repr(texts)
        return encode_corpus(corpus_of(*texts, key=key), byte_tokenizer, tmp_path / "encoded")

    return build


@pytest.fixture(scope="session")
def words() -> Callable[..., list[str]]:
    """Gives that many distinct short documents."""

    def build(count: int, seed: int = 0) -> list[str]:
        rng = np.random.default_rng(seed)
        numbers = rng.integers(0, 999, (count, 12))
        return [f"document {i}: " + " ".join(map(str, row)) for i, row in enumerate(numbers)]

    return build


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., Any]:
    """The part of a run spec that the data read; keys are field names of any section."""

    def build(dataset: str = "text", **given: Any) -> Any:
        is_random = dataset == "random"
        fields: dict[str, dict[str, Any]] = {
            "data": {
                "dataset": dataset,
                "text_file": None,
                "text_field": None,
                "text_unit": None,
                "held_out_ratio": None if is_random else 0.05,
                "order": None if is_random else "shuffled",
                "held_out": [],
                "overlap_ngram": None,
                "overlap_document_share": None,
                "overlap_limit": None,
            },
            "tokenizer": {"name": "bytes", "path": None},
            "training": {"seq_len": 32},
            "evaluation": {
                "sets": ["train_split", "held_out"],
                "eval_documents": 0,
                "stride": None,
            },
        }
        for key, value in given.items():
            section = next(section for section in fields.values() if key in section)
            section[key] = value
        return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in fields.items()})

    return build
