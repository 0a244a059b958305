"""Parts of a corpus that is being prepared: encoded, hashed and kept on disk, each whole or not.

    <folder>/part-000000.safetensors   of n documents in a row: ids (per document the
                                       end-of-document id, then its tokens), lengths [n],
                                       byte_counts [n], content_sha256 and split_sha256 [n, 32],
                                       and the sample for near-duplicates
    <folder>/words-000000.npy          uint64 [W], the hash of every word of these documents

A part depends on its documents and the tokenizer alone, whoever builds it; so those that stand
there when a killed process starts again are taken as they are, once their checksums hold.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from workbench.core.data import atomic
from workbench.core.data.encoded import checked_ids, split_hash
from workbench.core.data.near_duplicates import Sample, sample_of
from workbench.core.data.ngrams import BATCH_CHARACTERS, Ragged, ngrams, word_hashes
from workbench.core.data.tokenizer import Ids, Tokenizer, load_tokenizer, token_dtype

Int64 = npt.NDArray[np.int64]


class TokenizerName(NamedTuple):
    """What a worker loads its tokenizer by."""

    name: str
    path: str | None
    cache_dir: Path


class Task(NamedTuple):
    """The documents of part `number`; None where the part stands there already."""

    folder: Path
    tokenizer: TokenizerName
    words: int  # of an n-gram
    number: int
    texts: list[str] | None
    halvings: int  # the rate of the sample for near-duplicates, 2^-halvings


@dataclass(frozen=True, eq=False)
class Part:
    """What is known of the n documents of a part, but for their ids and words."""

    lengths: Int64
    byte_counts: Int64
    content_sha256: npt.NDArray[np.uint8]
    split_sha256: npt.NDArray[np.uint8]
    word_offsets: Int64  # [n + 1], into its words
    sample: Sample | None

    def without_sample(self) -> Part:
        """The same, when the sample has been taken."""
        return replace(self, sample=None)


@lru_cache(maxsize=1)
def tokenizer_of(name: TokenizerName) -> Tokenizer:
    """The tokenizer, loaded once in a process (and in those that are forked from it)."""
    return load_tokenizer(*name)


def build_part(task: Task) -> int:
    """Encodes and keeps a part; returns its index.

    Raises:
        DataError: a document that the tokenizer cannot take.
        OSError: the folder cannot be written.
    """
    if task.texts is None:
        return task.number
    tokenizer, texts = tokenizer_of(task.tokenizer), task.texts
    ids: list[Ids] = []
    eod = np.array([tokenizer.eod_id], np.uint32)
    lengths, byte_counts, content, split = [], [], [], []
    for text in texts:  # by itself: the tables of the tokenizer fill the processor's cache
        found = tokenizer.encode(text)
        ids += [eod, found]
        lengths.append(len(found) + 1)
    for text in texts:
        raw = text.encode("utf-8")
        byte_counts.append(len(raw))
        content.append(hashlib.sha256(raw).digest())
        split.append(split_hash(text))
    joined = checked_ids(np.concatenate(ids), tokenizer.vocab_size)
    units, sample = _words(texts, task.words, task.halvings)
    arrays: dict[str, Any] = {
        "ids": joined.astype(token_dtype(tokenizer.vocab_size)),
        "lengths": np.array(lengths, np.int64),
        "byte_counts": np.array(byte_counts, np.int64),
        "content_sha256": np.frombuffer(b"".join(content), np.uint8).reshape(-1, 32),
        "split_sha256": np.frombuffer(b"".join(split), np.uint8).reshape(-1, 32),
        "word_offsets": units.offsets,
        "hashes": sample.hashes,
        "documents": sample.documents,
        "fingerprints": sample.fingerprints,
    }
    arrays["checksum"] = np.array([_checksum(arrays, units.values)], np.int64)
    atomic.write_file(_words_path(task.folder, task.number), _npy(units.values), sync=False)
    # Last: a part whose own file stands there has its words too.
    atomic.write_file(_part_path(task.folder, task.number), save(arrays), sync=False)
    return task.number


def is_whole(folder: Path, index: int) -> bool:
    """Whether a part stands there and reads back as it was written."""
    if not _part_path(folder, index).exists():
        return False
    try:
        with _opened(folder, index) as arrays:
            found = {name: arrays.get_tensor(name) for name in arrays.keys()}  # noqa: SIM118
        checksum = found.pop("checksum").tolist()
        return bool([_checksum(found, stored_words(folder, index))] == checksum)
    except (OSError, ValueError, KeyError, EOFError, SafetensorError):
        return False


def read_part(folder: Path, index: int) -> Part:
    """What is known of a part."""
    with _opened(folder, index) as arrays:
        get = arrays.get_tensor
        return Part(
            get("lengths"),
            get("byte_counts"),
            get("content_sha256"),
            get("split_sha256"),
            get("word_offsets"),
            Sample(get("hashes"), get("documents"), get("fingerprints")),
        )


def stored_ids(folder: Path, index: int) -> Ids:
    """The ids of a part."""
    with _opened(folder, index) as arrays:
        ids: Ids = arrays.get_tensor("ids")
        return ids


def stored_words(folder: Path, index: int) -> npt.NDArray[np.uint64]:
    """The word hashes of a part, memory-mapped."""
    path = _words_path(folder, index)
    words: npt.NDArray[np.uint64] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    return words


def _words(texts: Sequence[str], n: int, halvings: int) -> tuple[Ragged, Sample]:
    """The words of the documents, and the sample of their n-grams."""
    rows: list[Ragged] = []
    samples: list[Sample] = []
    start = characters = 0
    for end, text in enumerate(texts, 1):  # in batches that the processor's cache holds
        characters += len(text)
        if characters >= BATCH_CHARACTERS or end == len(texts):
            rows.append(word_hashes(texts[start:end]))
            found = sample_of(ngrams(rows[-1], n), halvings)
            samples.append(replace(found, documents=found.documents + np.int32(start)))
            start, characters = end, 0
    lengths = np.concatenate([row.lengths for row in rows])
    units = Ragged(
        np.concatenate([row.values for row in rows]),
        np.r_[0, np.cumsum(lengths)].astype(np.int64),
    )
    sample = Sample(
        np.concatenate([one.hashes for one in samples]),
        np.concatenate([one.documents for one in samples]),
        np.concatenate([one.fingerprints for one in samples]),
    )
    return units, sample


def _npy(values: npt.NDArray[np.uint64]) -> bytes:
    packed = io.BytesIO()
    np.save(packed, values)
    return packed.getvalue()


def _checksum(arrays: dict[str, Any], words: npt.NDArray[np.uint64]) -> int:
    checksum = zlib.crc32(_bytes_of(words))
    for name in sorted(arrays):
        checksum = zlib.crc32(_bytes_of(arrays[name]), checksum)
    return checksum


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _opened(folder: Path, index: int) -> Any:
    return safe_open(_part_path(folder, index), framework="np")


def _part_path(folder: Path, index: int) -> Path:
    return folder / f"part-{index:06d}.safetensors"


def _words_path(folder: Path, index: int) -> Path:
    return folder / f"words-{index:06d}.npy"
