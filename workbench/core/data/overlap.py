"""How much of an evaluation set stands in the training text: the proof that it is held out.

Measured per document: the share of its n-grams (of words; of token ids where no text is known) that
stand anywhere in the training text, and whether the whole document stands there too (by content
hash; then the share is 1). An n-gram counts as often as it stands in the document.

A document of m words, m below n, is looked for as one n-gram of m words: anywhere in the training
text when m is at least 8 (or n), else among whole training documents, since a shorter phrase is
language and no memory of a text. Of a document without words only its copy is found.

Only the evaluation side is indexed; the training side streams past it. Up to `MOST_KEYS` n-grams of
the evaluation side are all looked up: what is counted then is exact, up to the hash (see `ngrams`).
Of more, those whose hash is below 2^64 x rate are (rate: a power of 1/2). The share of a document
of m n-grams is then estimated with a standard error of sqrt(share (1 - share) / (m x rate)), and a
document of which none is looked up counts as 0. Memory: 60 bytes for each n-gram looked up, 1 GB at
most, and one batch of the training side.

Shapes: M evaluation documents, K different n-grams looked up, E n-grams looked up in all.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.core.data import atomic
from workbench.core.data.ngrams import (
    BATCH_CHARACTERS,
    Int64,
    Ragged,
    Text,
    UInt64,
    id_hashes,
    ngrams,
    whole,
    windows,
    word_batches,
    word_hashes,
)
from workbench.core.data.tokenizer import Ids
from workbench.core.data.workers import cores
from workbench.errors import storing
from workbench.spec.held_out import HISTOGRAM, SetStatus, measured_status, overlap_rule

FORMAT = "workbench-overlap-v1"
MOST_KEYS = 16 << 20
LEAST_WORDS = 8  # of a document that is looked for inside others
ID_BATCH = 1 << 18
OF_TEXT = "words of the text"

_Item = TypeVar("_Item", str, Ids)
Bools = npt.NDArray[np.bool_]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """When a document overlaps, and when a set is contaminated; as in the section `data`."""

    ngram: int = 13
    document_share: float = 0.2
    limit: float = 0.01


@dataclass(frozen=True, eq=False)
class Passages:
    """The text of one side, or its ids where no text is known, to be read any number of times.

    `identity` covers what `read` gives; `content_sha256` [D, 32] are the hashes of whole documents
    (None: there are none to compare). An id side is read as arrays of ids. `measured_on` says for
    the record what its n-grams are made of, and why where it is not words.
    """

    identity: str
    content_sha256: npt.NDArray[np.uint8] | None
    read: Callable[[], Iterator[Text]] | None = None
    read_ids: Callable[[], Iterator[Ids]] | None = None
    measured_on: str = OF_TEXT

    @property
    def unit(self) -> str:
        """What its n-grams are made of."""
        return "word" if self.read is not None else "token"

    def documents(self) -> Iterator[Ragged]:
        """The units of every document, a row each, in batches."""
        if self.read is not None:
            for batch in _batches(map(whole, self.read()), BATCH_CHARACTERS):
                yield word_hashes(batch)
        elif self.read_ids is not None:
            for some in _batches(self.read_ids(), ID_BATCH):
                yield id_hashes(some)

    def stream(self, overlap: int) -> Iterator[Ragged]:
        """The units in batches of bounded size; long documents in parts that overlap."""
        if self.read is not None:
            yield from word_batches(self.read(), overlap)
        elif self.read_ids is not None:
            for some in _batches(_id_parts(self.read_ids(), overlap), ID_BATCH):
                yield id_hashes(some)


@dataclass(frozen=True, eq=False)
class Overlap:
    """What was found of M documents: n-grams looked up, those found in training, and copies."""

    ngrams: Int64
    found: Int64
    copies: Bools
    rate: float

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """The share of each document's n-grams that stand in training [M]; 1 for a copy."""
        shares = self.found / np.maximum(self.ngrams, 1)
        return np.where(self.copies, 1.0, shares)

    def first(self, count: int) -> Overlap:
        """That of the first `count` documents."""
        parts = (self.ngrams[:count], self.found[:count], self.copies[:count])
        return Overlap(*parts, self.rate)


def measure(evaluation: Passages, training: Passages, n: int) -> Overlap:
    """The overlap of every evaluation document with the training side."""
    index = NgramIndex(evaluation.documents(), n)
    with ThreadPoolExecutor(cores()) as pool:  # numpy works outside the interpreter lock
        pending: deque[Future[None]] = deque()
        for units in training.stream(n - 1):
            pending.append(pool.submit(index.see, units))
            if len(pending) > 2 * cores():
                pending.popleft().result()
        for one in pending:
            one.result()
    copies = np.zeros(index.count, bool)
    if evaluation.content_sha256 is not None and training.content_sha256 is not None:
        copies = np.isin(_keys(evaluation.content_sha256), _keys(training.content_sha256))
    return Overlap(index.ngrams, index.found(), copies, index.rate)


def measured(
    evaluation: Passages, training: Passages, n: int, cache_dir: Path | None = None
) -> Overlap:
    """`measure`, from the cache or kept there; without a cache it is measured each time.

    Raises:
        StoreError: the cache cannot be written.
    """
    if cache_dir is None:
        return measure(evaluation, training, n)
    identity = {
        "format": FORMAT,
        "evaluation": evaluation.identity,
        "training": training.identity,
        "n": n,
        "unit": evaluation.unit,
        "keys": MOST_KEYS,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    path = cache_dir / f"{key[:32]}.npz"
    if (found := _read(path, key)) is not None:
        return found
    found = measure(evaluation, training, n)
    content = io.BytesIO()
    arrays: dict[str, Any] = {
        "ngrams": found.ngrams,
        "found": found.found,
        "copies": found.copies,
        "rate": np.array(found.rate),
        "key": np.array(key),
    }
    np.savez(content, **arrays)
    digest = hashlib.sha256(content.getvalue()).digest()
    with storing(path):
        atomic.write_file(path, content.getvalue() + digest)
    return found


def overlapping(found: Overlap, settings: Settings) -> Bools:
    """Which documents overlap the training text [M]."""
    share: Bools = found.shares >= settings.document_share
    return share & ((found.found > 0) | found.copies)


def outcome(
    found: Overlap,
    tokens: Int64,
    settings: Settings,
    unit: str = "word",
    measured_on: str = OF_TEXT,
) -> tuple[SetStatus, dict[str, Any], str]:
    """Status, the counts that it rests on, and the rule, as a record holds them.

    Args:
        tokens: scored tokens of each document [M].
        unit: `Passages.unit` of the evaluation side, and
        measured_on: its `measured_on`.
    """
    which = overlapping(found, settings)
    documents, over = len(which), int(which.sum())
    total, over_tokens = int(tokens.sum()), int(tokens[which].sum())
    status = measured_status(documents, over, total, over_tokens, settings.limit)
    looked_up, inside = int(found.ngrams.sum()), int(found.found.sum())
    method = "every n-gram" if found.rate == 1 else f"a sample: 1 in {round(1 / found.rate)}"
    facts = {
        "method": f"{method}, 64-bit hashes",
        "measured_on": measured_on,
        "ngrams": looked_up,
        "ngrams_in_training": inside,
        "share": inside / looked_up if looked_up else 0.0,
        "copies": int(found.copies.sum()),
        "overlapping_documents": over,
        "overlapping_tokens": over_tokens,
        "histogram": histogram(found),
    }
    rule = overlap_rule(settings.ngram, settings.document_share, settings.limit, unit)
    return status, facts, rule


def histogram(found: Overlap) -> list[int]:
    """Documents by the share of their n-grams in training, counted in the classes `HISTOGRAM`."""
    shares = found.shares
    classes = np.minimum(np.floor(shares * 10).astype(np.int64), 9) + 1
    classes[shares == 0] = 0
    classes[shares == 1] = len(HISTOGRAM) - 1
    return [int(count) for count in np.bincount(classes, minlength=len(HISTOGRAM))]


class NgramIndex:
    """The n-grams of the evaluation side, and which of them the training side has brought."""

    def __init__(self, documents: Iterable[Ragged], n: int) -> None:
        self._n, self._least = n, min(LEAST_WORDS, n)
        values, owners, lengths = self._collect(documents)
        self.count = len(lengths)
        self.ngrams = np.bincount(owners, minlength=self.count)
        self._owners = owners
        self._keys, self._which = np.unique(values, return_inverse=True)
        self._seen = np.zeros(len(self._keys), bool)
        short = {int(m) for m in np.unique(lengths) if self._least <= m < n}
        self._windows = [*sorted(short), *([n] if (lengths >= n).any() else [])]
        self._has_whole = bool(((lengths > 0) & (lengths < self._least)).any())
        bits = int(np.clip(np.log2(len(self._keys) + 1) + 5, 16, 27))
        self._shift = np.uint64(64 - bits)
        self._maybe = np.zeros(1 << bits, bool)
        self._maybe[self._keys >> self._shift] = True

    def see(self, units: Ragged) -> None:
        """Marks what stands in these documents of the training side."""
        for m in self._windows:
            self._look_up(windows(units, m).values)
        if self._has_whole:
            grams = ngrams(units, self._least)
            whole = (units.lengths > 0) & (units.lengths < self._least)
            self._look_up(grams.values[grams.offsets[:-1][whole]])

    def found(self) -> Int64:
        """N-grams of each document that were seen [M]."""
        seen = self._owners[self._seen[self._which]]
        return np.bincount(seen, minlength=self.count).astype(np.int64)

    def state(self) -> str:
        """What was seen, as text: one bit for each n-gram, compressed."""
        return base64.b64encode(zlib.compress(np.packbits(self._seen).tobytes())).decode("ascii")

    def load_state(self, state: str) -> None:
        """Goes on from what another index of the same documents had seen.

        Raises:
            ValueError: it was not of the same documents.
        """
        bits = np.frombuffer(zlib.decompress(base64.b64decode(state)), np.uint8)
        if len(bits) != -(-len(self._keys) // 8):
            raise ValueError("the n-grams seen are those of another set")
        self._seen = np.unpackbits(bits, count=len(self._keys)).astype(bool)

    def _collect(self, documents: Iterable[Ragged]) -> tuple[UInt64, Int64, Int64]:
        """The n-grams to look up [E], the document of each [E], and the units of each [M]."""
        values: list[UInt64] = []
        owners: list[Int64] = []
        lengths: list[Int64] = [np.zeros(0, np.int64)]
        halvings = count = entries = 0
        for units in documents:
            grams = ngrams(units, self._n)
            kept = grams.values <= _limit(halvings)
            owner = np.repeat(np.arange(count, count + len(grams)), grams.lengths)
            values.append(grams.values[kept])
            owners.append(owner[kept])
            lengths.append(units.lengths)
            count += len(grams)
            entries += len(values[-1])
            while entries > MOST_KEYS:
                halvings += 1
                parts = [v <= _limit(halvings) for v in values]
                values = [v[k] for v, k in zip(values, parts, strict=True)]
                owners = [o[k] for o, k in zip(owners, parts, strict=True)]
                entries = sum(map(len, values))
        self.rate = 0.5**halvings
        empty, none = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        return (
            np.concatenate([empty, *values]),
            np.concatenate([none, *owners]),
            np.concatenate(lengths),
        )

    def _look_up(self, values: UInt64) -> None:
        values = values[self._maybe[values >> self._shift]]
        if not len(values):
            return
        places = np.minimum(np.searchsorted(self._keys, values), len(self._keys) - 1)
        self._seen[places[self._keys[places] == values]] = True


def _limit(halvings: int) -> np.uint64:
    return np.uint64(2 ** (64 - halvings) - 1)


def _keys(hashes: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(hashes).view("V32").ravel()


def _batches(items: Iterator[_Item], size: int) -> Iterator[list[_Item]]:
    """Items in batches of about `size` characters or ids."""
    batch: list[_Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += len(item) + 1
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _id_parts(documents: Iterator[Ids], overlap: int) -> Iterator[Ids]:
    """Long documents in parts, each from the last `overlap` ids of the part before on."""
    for ids in documents:
        yield ids[:ID_BATCH]
        for start in range(ID_BATCH, len(ids), ID_BATCH):
            yield ids[start - min(overlap, start) : start + ID_BATCH]


def _read(path: Path, key: str) -> Overlap | None:
    """What the cache holds; None where it holds nothing, or something damaged."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[:-32]).digest() != content[-32:]:
            raise ValueError("it does not match its own hash")
        with np.load(io.BytesIO(content[:-32]), allow_pickle=False) as arrays:
            if str(arrays["key"]) != key:
                raise ValueError("it belongs to other data")
            parts = (arrays["ngrams"], arrays["found"], arrays["copies"])
            return Overlap(*parts, float(arrays["rate"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError) as error:
        _log.warning("the overlap kept in %s is damaged (%s) and is measured again", path, error)
        return None
