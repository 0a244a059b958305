"""Near-duplicates among the documents of a token shard: found once, then remembered.

By the words behind the ids where they are known, else by the ids: as overlap is measured.

Shapes: N documents.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from pathlib import Path

import numpy as np

from workbench.core.data import atomic
from workbench.core.data.encoded import split_hash
from workbench.core.data.near_duplicates import NearDuplicates
from workbench.core.data.ngrams import BATCH_CHARACTERS, Int64, ngrams, whole, word_hashes
from workbench.core.data.overlap import Passages, Settings
from workbench.core.data.sides import Hashes
from workbench.errors import storing

FORMAT = "workbench-shard-groups-v1"
_log = logging.getLogger(__name__)


def groups_of(
    documents: Passages, content_sha256: Hashes, settings: Settings, cache_dir: Path
) -> tuple[Int64, Hashes]:
    """The group of each document [N], and the hash that decides on its side [N, 32]: of its
    normalised text where that is known, else `content_sha256`.

    Raises:
        StoreError: the cache cannot be written.
    """
    parts = [FORMAT, documents.identity, settings.ngram, settings.document_share]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    path = cache_dir / f"{key[:32]}.npz"
    if (found := _read(path)) is not None:
        return found
    numbers, hashes = _found(documents, settings)
    split = content_sha256 if hashes is None else hashes
    content = io.BytesIO()
    np.savez(content, numbers=numbers, split=split)
    digest = hashlib.sha256(content.getvalue()).digest()
    with storing(path):
        atomic.write_file(path, content.getvalue() + digest)
    return numbers, split


def _found(documents: Passages, settings: Settings) -> tuple[Int64, Hashes | None]:
    near = NearDuplicates(settings.document_share)
    if documents.read is None:
        for units in documents.documents():
            near.add(ngrams(units, settings.ngram))
        return near.groups().numbers, None
    hashes: list[bytes] = []
    batch: list[str] = []
    characters = 0
    for text in map(whole, documents.read()):
        hashes.append(split_hash(text))
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            near.add(ngrams(word_hashes(batch), settings.ngram))
            batch, characters = [], 0
    near.add(ngrams(word_hashes(batch), settings.ngram))
    return near.groups().numbers, np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)


def _read(path: Path) -> tuple[Int64, Hashes] | None:
    """What the cache holds; None where it holds nothing, or something damaged."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[:-32]).digest() != content[-32:]:
            raise ValueError("it does not match its own hash")
        with np.load(io.BytesIO(content[:-32]), allow_pickle=False) as arrays:
            return arrays["numbers"], arrays["split"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        _log.warning("the groups kept in %s are damaged (%s) and are found again", path, error)
        return None
