"""The encoded corpus: every document's token ids and hashes, built once and memory-mapped.

    <cache>/<key>/tokens.bin           ids, little-endian uint16 or uint32 by vocabulary size:
                                       per document the end-of-document id, then its tokens
    <cache>/<key>/offsets.npy          int64 [N + 1], where each document's id run starts
    <cache>/<key>/byte_counts.npy      int64 [N], UTF-8 bytes of each document's text
    <cache>/<key>/content_sha256.npy   uint8 [N, 32], of the text
    <cache>/<key>/split_sha256.npy     uint8 [N, 32], of the text lower-cased, blanks made single
    <cache>/<key>/groups.npy           int64 [N], each document's group of near-duplicates
    <cache>/<key>/index.json           counts, and size and SHA-256 of each file; written last

The key covers the text, the tokenizer and this format, so an entry never goes stale. It is built
in a folder of its own and renamed: the first of several processes that build it at once wins, the
others take what it built. An entry that does not hold what its index says is built again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.core.data import atomic
from workbench.core.data.corpus import Corpus
from workbench.core.data.errors import DataError
from workbench.core.data.near_duplicates import NearDuplicates
from workbench.core.data.tokenizer import Ids, Tokenizer, token_dtype
from workbench.errors import storing
from workbench.json_files import read_json

FORMAT = "workbench-encoded-corpus-v2"
BATCH_CHARACTERS, BATCH_DOCUMENTS = 8 << 20, 8192  # text held while it is encoded
FULL_CHECK_BYTES = 256 << 20  # tokens.bin up to this size is hashed on every start, else its size

# ASCII in lower case, its blanks (as str.split knows them) as spaces
_PLAIN = bytes(32 if chr(byte).isspace() else ord(chr(byte).lower()) for byte in range(128)).ljust(
    256
)
_ARRAYS = ("offsets", "byte_counts", "content_sha256", "split_sha256", "groups")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EncodedCorpus:
    """N documents as one array of ids; see the module's head for the layout.

    Without `groups` every document is one of its own.
    """

    tokens: Ids
    offsets: npt.NDArray[np.int64]
    byte_counts: npt.NDArray[np.int64]
    content_sha256: npt.NDArray[np.uint8]
    split_sha256: npt.NDArray[np.uint8]
    skipped_empty: int
    groups: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.byte_counts)

    def document(self, index: int) -> Ids:
        """The tokens of a document, without the end-of-document id before it."""
        return self.tokens[self.offsets[index] + 1 : self.offsets[index + 1]]


def encode_corpus(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path) -> EncodedCorpus:
    """The corpus under this tokenizer, from `cache_dir` or built into it.

    Documents without text (empty, or blanks only) are left out and counted.

    Raises:
        DataError: a file of the corpus cannot be used, or no document has text.
        StoreError: the cache cannot be written. Nothing half-written stays.
    """
    identity = {"format": FORMAT, "corpus": corpus.key, "tokenizer": tokenizer.content_sha256}
    key = _sha256(_canonical(identity))
    final = cache_dir / key[:32]
    found = _open(final, key)
    if isinstance(found, EncodedCorpus):
        return found
    if found is not None:
        _log.warning("the encoded corpus %s is damaged (%s) and is built again", final, found)
    with storing(cache_dir):  # what is wrong with a file of the corpus is no OSError any more
        cache_dir.mkdir(parents=True, exist_ok=True)
        for leftover in atomic.remove_leftovers(cache_dir):
            _log.info("removed %s, left by a process that died", leftover)
        temporary = atomic.temporary_name(final)
        try:
            temporary.mkdir()
            with corpus.placing():
                _build(corpus, tokenizer, temporary, key, identity)
            return _publish(temporary, final, key)
        except BaseException:
            atomic.remove(temporary)
            raise


def _publish(temporary: Path, final: Path, key: str) -> EncodedCorpus:
    """Rename what was built into its place, or take what another process put there meanwhile."""
    for _ in range(10):
        found = _open(final, key)
        if isinstance(found, EncodedCorpus):
            atomic.remove(temporary)
            return found
        if found is not None:
            aside = atomic.temporary_name(final)
            try:
                final.rename(aside)
            except FileNotFoundError:
                continue
            atomic.remove(aside)
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
            continue  # another process was first: look at what it put there
        atomic.sync_folder(final.parent)
        temporary = final
        found = _open(final, key)
        if isinstance(found, EncodedCorpus):
            return found
    raise OSError(f"{final}: the encoded corpus keeps changing or does not read back as written")


def _build(
    corpus: Corpus, tokenizer: Tokenizer, folder: Path, key: str, identity: dict[str, str]
) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    offsets, byte_counts = [0], []
    content: list[bytes] = []
    split: list[bytes] = []
    documents = 0
    near = NearDuplicates()
    with (folder / "tokens.bin").open("wb") as file:
        for texts, read in batches(corpus.read()):
            documents += read
            near.add_texts(texts)
            for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
                run = np.empty(len(ids) + 1, dtype)
                run[0] = tokenizer.eod_id
                run[1:] = checked_ids(ids, tokenizer.vocab_size)
                file.write(run.tobytes())
                raw = text.encode("utf-8")
                offsets.append(offsets[-1] + len(run))
                byte_counts.append(len(raw))
                content.append(hashlib.sha256(raw).digest())
                split.append(split_hash(text))
        file.flush()
        os.fsync(file.fileno())
    if not byte_counts:
        problem = f"no text: {documents:,} documents, all of them empty or blanks"
        allowed = "at least one document with text in it"
        raise DataError.at(corpus.place, problem, corpus.given, allowed)
    arrays = {
        "offsets": np.array(offsets, "<i8"),
        "byte_counts": np.array(byte_counts, "<i8"),
        "content_sha256": np.frombuffer(b"".join(content), np.uint8).reshape(-1, 32),
        "split_sha256": np.frombuffer(b"".join(split), np.uint8).reshape(-1, 32),
        "groups": near.groups().numbers,
    }
    for name, array in arrays.items():
        with (folder / f"{name}.npy").open("wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())
    names = ["tokens.bin", *(f"{name}.npy" for name in arrays)]
    header = {
        **identity,
        "key": key,
        "dtype": dtype.str,
        "documents": len(byte_counts),
        "skipped_empty": documents - len(byte_counts),
        "ids": offsets[-1],
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": _file_sha256(folder / name)}
            for name in names
        },
    }
    index = {"header": header, "sha256": _sha256(_canonical(header))}
    atomic.write_synced(folder / "index.json", _canonical(index) + b"\n")
    atomic.sync_folder(folder)


def _open(folder: Path, key: str) -> EncodedCorpus | str | None:
    """The entry in `folder`, what is wrong with it, or None when there is none."""
    if not folder.exists():
        return None
    try:
        index: dict[str, Any] = read_json(folder / "index.json")
        header = index["header"]
        if index["sha256"] != _sha256(_canonical(header)):
            return "index.json does not match its own hash"
        if header["key"] != key:
            return "it belongs to another corpus"
        for name, written in header["files"].items():
            size = (folder / name).stat().st_size
            if size != written["bytes"]:
                return f"{name} has {size:,} bytes instead of {written['bytes']:,}"
            if size <= FULL_CHECK_BYTES and _file_sha256(folder / name) != written["sha256"]:
                return f"the content of {name} does not match its hash"
        arrays = {name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in _ARRAYS}
        # a plain view: slices of it stay mapped, without the cost of the memmap class
        tokens = np.asarray(np.memmap(folder / "tokens.bin", np.dtype(header["dtype"]), mode="r"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return EncodedCorpus(tokens=tokens, skipped_empty=header["skipped_empty"], **arrays)


def checked_ids(ids: Ids, vocab_size: int) -> Ids:
    """`ids`, all of them in [0, vocab_size).

    Raises:
        ValueError: an id outside, which a cast to a smaller type would wrap into a valid one.
    """
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(f"token id {worst:,} is outside the vocabulary of {vocab_size:,}")
    return ids


def normalised(text: str) -> str:
    """The text without differences of case and of blanks: what the split treats as the same."""
    if not text.isascii():
        return " ".join(text.casefold().split())
    # The same for ASCII, nine times as fast.
    plain = text.encode("ascii").translate(_PLAIN).strip(b" ")
    while b"  " in plain:
        plain = plain.replace(b"  ", b" ")
    return plain.decode("ascii")


def split_hash(text: str) -> bytes:
    """The SHA-256 that decides which side of the split a document stands on."""
    return hashlib.sha256(normalised(text).encode("utf-8")).digest()


def batches(texts: Iterator[str], most: int = BATCH_CHARACTERS) -> Iterator[tuple[list[str], int]]:
    """Documents with text in batches of about `most` characters, and how many were read for each
    batch."""
    batch: list[str] = []
    read = characters = 0
    for text in texts:
        read += 1
        if not text.strip():
            continue
        batch.append(text)
        characters += len(text)
        if characters >= most or len(batch) >= BATCH_DOCUMENTS:
            yield batch, read
            batch, read, characters = [], 0, 0
    if read:
        yield batch, read


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
