"""From the `data` section of a stream to what a run reads: training stream and evaluation sets.

The evaluation sets are collected before training from the head of the stream: `held_out` is its
first `stream_eval_documents` documents on the held-out side, each text once; `train_split` the
first documents that train, as many. No more of the stream is read for them than `LOOK_AHEAD` times
the documents that are expected to hold them, and at least `LEAST_LOOK_AHEAD`; with fewer held-out
documents in there, those make the set. The head of the stream then trains like the rest of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.data.encoded import split_hash
from workbench.core.data.errors import DataError
from workbench.core.data.evaluation_sets import EvaluationSet
from workbench.core.data.judged import settings_of
from workbench.core.data.passing import Passing, Watched
from workbench.core.data.retry import Patience
from workbench.core.data.sides import is_held_out
from workbench.core.data.stream import Documents, DocumentStream
from workbench.core.data.stream_files import (
    StreamSource,
    folder_key,
    folder_source,
    hub_key,
    hub_source,
)
from workbench.core.data.stream_rows import RowReader
from workbench.core.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workbench.spec.run import DataSpec, RunSpec

LOOK_AHEAD = 4
LEAST_LOOK_AHEAD = 1000  # documents

UNREAD = {"not_applicable": "what a stream will bring is not known beforehand"}


@dataclass(frozen=True, eq=False)
class StreamData:
    """What a stream brings; `facts` are those of the training data."""

    sets: dict[str, EvaluationSet]
    facts: dict[str, Any]
    train_stream: Callable[[], DocumentStream]


def load_stream(
    spec: RunSpec, tokenizer: Tokenizer, store: Path, further: Mapping[str, Watched]
) -> StreamData:
    """Opens the stream that a spec names and collects its evaluation sets, beside the `further`.

    Raises:
        DataError: a stream that cannot be read, or whose head holds no document for a set.
        StoreError: the store cannot be written.
    """
    data, patience = spec.data, Patience()
    source = _source(data, store / "cache/stream", patience)
    rows = RowReader(source.files, data.text_field or "text", patience)
    head = _head(rows, data)
    watched = dict(further)
    sets: dict[str, EvaluationSet] = {}
    for name in spec.evaluation.sets:
        if name in further:
            sets[name] = further[name].documents
            continue
        texts = _chosen(head.held_out if name == "held_out" else head.train, spec)
        sets[name] = _set(name, texts, tokenizer)
        if name == "held_out":
            watched[name] = Watched(sets[name], texts)
    facts = _facts(data, source.key) | {
        "source": source.source,
        "order_proof": source.order_proof,
        "counts": {"files": len(source.files), "look_ahead": head.read},
    }
    identity = {"content_sha256": facts["train_sha256"]}
    settings = settings_of(data)

    def train_stream() -> DocumentStream:
        documents = Documents(rows, tokenizer, data.held_out_ratio or 0.0)
        passing = Passing(watched, settings)
        return DocumentStream(documents, spec.training.seq_len, identity, passing)

    return StreamData(sets, facts, train_stream)


def foreseen_facts(data: DataSpec, store: Path) -> dict[str, Any]:
    """The facts of the training data that are known without reading the stream.

    Raises:
        DataError: there is no such folder, or nothing in it to read.
    """
    if data.stream_path is not None:
        key = folder_key(data.stream_path, store / "cache/stream")
    else:
        key = hub_key(data.stream_config or "", data.stream_revision or "")
    return _facts(data, key)


def _facts(data: DataSpec, key: str | None) -> dict[str, Any]:
    rule = f"document hash < {data.held_out_ratio}" if data.held_out_ratio else "none"
    parts = ["workbench stream 1", key, data.text_field, rule]
    sha256 = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return {
        "train_sha256": None if key is None else sha256,
        "train_documents": UNREAD,
        "train_tokens": UNREAD,
        "train_bytes": UNREAD,
        "split": rule,
    }


def _source(data: DataSpec, cache: Path, patience: Patience) -> StreamSource:
    if data.stream_path is not None:
        return folder_source(data.stream_path, data.text_field or "text", cache)
    name, config, revision = data.stream_name, data.stream_config, data.stream_revision
    return hub_source(name or "", config or "", revision or "", cache, patience)


@dataclass(frozen=True)
class _Head:
    """The texts of the sets, and how many rows were read for them."""

    held_out: list[str]
    train: list[str]
    read: int


def _head(rows: RowReader, data: DataSpec) -> _Head:
    ratio, wanted = data.held_out_ratio or 0.0, data.stream_eval_documents or 0
    most = max(LEAST_LOOK_AHEAD, round(LOOK_AHEAD * wanted / (ratio or 1)))
    held_out: dict[bytes, str] = {}
    train: dict[bytes, str] = {}
    read = 0
    for batch in rows.read():
        for row in batch[: most - read]:
            read += 1
            if row.text.strip():
                hashed = split_hash(row.text)
                side = held_out if is_held_out(hashed, ratio) else train
                if len(side) < wanted:
                    side.setdefault(hashed, row.text)
            if len(train) >= wanted and (len(held_out) >= wanted or not ratio):
                break
        else:
            if read < most:
                continue
        break
    if not train or (ratio and not held_out):
        kind = "held-out" if train else "training"
        problem = f"none of the first {read:,} documents of the stream falls on the {kind} side"
        raise DataError.at("data.held_out_ratio", problem, ratio, "another share")
    count = len(held_out) or wanted
    return _Head(list(held_out.values()), list(train.values())[:count], read)


def _chosen(texts: list[str], spec: RunSpec) -> list[str]:
    """In order of their hash, as many as the spec evaluates."""
    ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode("utf-8")).digest())
    return ordered[: spec.evaluation.eval_documents or None]


def _set(name: str, texts: list[str], tokenizer: Tokenizer) -> EvaluationSet:
    raw = [text.encode("utf-8") for text in texts]
    hashes = b"".join(hashlib.sha256(one).digest() for one in raw)
    return EvaluationSet(
        name,
        "document",
        tokenizer.eod_id,
        tokenizer.encode_documents(texts),
        np.array([len(one) for one in raw], np.int64),
        np.frombuffer(hashes, np.uint8).reshape(-1, 32),
    )
