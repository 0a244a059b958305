"""Token shards: text that was encoded before, as ids on disk, read where they are and written.

    <folder>/tokens.bin         the ids, little-endian, uint16 up to 65,536 entries, else uint32
    <folder>/tokens.idx.json    what they are: dtype, count, largest id, SHA-256, tokenizer
    <folder>/tokens.docs.npy    where documents are known: one row of DOCUMENT each, in their order
    <folder>/tokens.docs.json   of what that file was written, and with which tokenizer

The first two are the format of the runner that this package replaces, which does not look at the
others. `foreign_shards` reads what other trainers write.

Shapes: T ids, N documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from workbench.core.data import atomic
from workbench.core.data.encoded import checked_ids
from workbench.core.data.errors import DataError
from workbench.core.data.foreign_shards import (
    format_of,
    read_llmc,
    read_megatron,
    read_nanogpt,
)
from workbench.core.data.shard_files import StoredIds
from workbench.core.data.shard_index import (
    BIN,
    DOCUMENT,
    DOCUMENTS,
    DOCUMENTS_FORMAT,
    DOCUMENTS_INDEX,
    FORMAT,
    INDEX,
    Documents,
    Format,
    Header,
    read_index,
    read_sidecar,
)
from workbench.core.data.tokenizer import Ids, token_dtype
from workbench.errors import storing

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenShard:
    """A shard whose ids were found to be what it says. `sha256` is over the ids as uint32.

    `documents` is None where their boundaries are not known; their `bytes` and `sha256` are only
    known where `has_text_facts`.
    """

    tokens: StoredIds
    vocab_size: int
    tokenizer: str | None
    tokenizer_sha256: str | None
    eod_id: int | None
    sha256: str
    documents: Documents | None
    has_text_facts: bool
    format: Format
    path: Path


_READERS: dict[str, Callable[[Path, str], Header]] = {
    "complexity": read_index,
    "llmc": read_llmc,
    "megatron": read_megatron,
    "nanogpt": read_nanogpt,
}
FORMATS = ("auto", *_READERS)


def open_shard(
    path: str | Path,
    format: str = "auto",
    *,
    place: str = "data.tokens_path",
    vocab_size: int | None = None,
    tokenizer: str | None = None,
    memory: Path | None = None,
) -> TokenShard:
    """The shard in a folder, or of a `.bin` file, with all its ids checked.

    Args:
        path: the folder or the file of the ids.
        format: of `FORMATS`, or `auto`: by its signature; see `foreign_shards`.
        place: what names the path, for errors.
        vocab_size: for a shard that does not say it; else it must be the same.
        tokenizer: likewise, its name.
        memory: a folder where the outcome of the check is kept, so that the same file is hashed
            once: `<store>/cache/shards`.

    Raises:
        DataError: the shard does not hold what it says, or ids outside the vocabulary.
        StoreError: `memory` cannot be written.
    """
    header = read_header(path, format, place=place, vocab_size=vocab_size, tokenizer=tokenizer)
    vocab = known_vocab_size(header)
    tokens = StoredIds(header.file)
    found = tokens.content(memory)
    at = str(header.path)
    if header.sha256 is not None and found.sha256 != header.sha256:
        message = f"holds other ids than its index was written for ({INDEX}: sha256)"
        raise DataError.at(at, message, found.sha256, f"SHA-256 {header.sha256}")
    if found.lowest < 0 or found.highest >= vocab:
        worst = found.lowest if found.lowest < 0 else found.highest
        message = f"holds a token id outside the vocabulary of {vocab:,} entries"
        raise DataError.at(at, message, worst, f"0 to {vocab - 1}")
    if header.max_token_id is not None and found.highest != header.max_token_id:
        message = f"its largest id is not the one in its index ({INDEX}: max_token_id)"
        raise DataError.at(at, message, found.highest, str(header.max_token_id))
    sidecar = read_sidecar(header, found.sha256) if header.format == "complexity" else None
    if memory is not None:
        tokens.remember(memory)
    return TokenShard(
        tokens,
        vocab,
        header.tokenizer,
        sidecar and sidecar.tokenizer_sha256,
        sidecar and sidecar.eod_id,
        found.ids_sha256,
        sidecar.documents if sidecar is not None else header.documents,
        sidecar is not None,
        header.format,
        header.path,
    )


def read_header(
    path: str | Path,
    format: str = "auto",
    *,
    place: str = "data.tokens_path",
    vocab_size: int | None = None,
    tokenizer: str | None = None,
) -> Header:
    """What a shard says of itself, without a look at its ids. For arguments see `open_shard`.

    Raises:
        DataError: there is no shard, its index cannot be used or does not match the size of its
            file, or it says another vocabulary or tokenizer than is given.
    """
    where = Path(path).expanduser()
    header = _READERS[format_of(where, place) if format == "auto" else format](where, place)
    for name, said, given in (
        ("tokenizer.vocab_size", header.vocab_size, vocab_size),
        ("tokenizer.name", header.tokenizer, tokenizer),
    ):
        if said is not None and given is not None and said != given:
            message = f"the shard {header.path} says another"
            raise DataError.at(name, message, given, f"null or {said}")
    return replace(
        header,
        vocab_size=header.vocab_size if header.vocab_size is not None else vocab_size,
        tokenizer=header.tokenizer if header.tokenizer is not None else tokenizer,
    )


def known_vocab_size(header: Header) -> int:
    """How many ids the shard's tokenizer has.

    Raises:
        DataError: neither the shard nor the spec says it.
    """
    if header.vocab_size is not None:
        return header.vocab_size
    message = f"the {header.format} file {header.path} does not say it"
    allowed = "the number of ids, such as 50257 (tokenizer.vocab_size, --vocab-size)"
    raise DataError.at("tokenizer.vocab_size", message, None, allowed)


class ShardWriter:
    """Writes a shard into a folder that appears whole, at `finish`, or not at all.

        with ShardWriter(folder, tokenizer="o200k_base", vocab_size=200_019, ...) as writer:
            for ...: writer.append(ids, bytes, sha256)
            writer.finish(counts)

    The files depend on nothing but the arguments, to the byte.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: str,
        vocab_size: int,
        tokenizer_sha256: str | None = None,
        eod_id: int | None = None,
        side: str | None = None,
        rule: str | None = None,
    ) -> None:
        """Nothing is written before the `with`.

        Args:
            folder: must not be there.
            tokenizer: the name of what made the ids.
            vocab_size: how many ids it has.
            tokenizer_sha256: its `content_sha256`, where known.
            eod_id: written before each document, where there is one.
            side: of a split, such as `train`, and
            rule: how it was split; both stand in the documents' index.
        """
        self._folder = folder
        self._tokenizer = tokenizer
        self._tokenizer_sha256 = tokenizer_sha256
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._eod_id = eod_id
        self._split = {"side": side, "rule": rule}
        self._digest = hashlib.sha256()
        self._count = 0
        self._highest = 0
        self._has_documents: bool | None = None
        self._rows = bytearray()
        self._temporary: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        """Makes a temporary folder beside the final one.

        Raises:
            DataError: the final one is there already.
            StoreError: nothing can be written there.
        """
        self._require_free()
        parent = self._folder.absolute().parent
        with storing(self._folder):
            parent.mkdir(parents=True, exist_ok=True)
            atomic.remove_leftovers(parent)
            self._temporary = atomic.temporary_name(self._folder.absolute())
            self._temporary.mkdir()
            self._file = (self._temporary / BIN).open("wb")
        return self

    def append(self, ids: Ids, bytes: int | None = None, sha256: bytes | None = None) -> None:
        """Add a document [n], the end-of-document id before it; `bytes` of its text, and its hash.

        Documents without `bytes` and `sha256` are joined: no boundaries are kept of them.

        Raises:
            ValueError: an id outside the vocabulary, or boundaries of some documents only.
            StoreError: the disk is full.
        """
        lead = [] if self._eod_id is None else [self._eod_id]
        run = np.concatenate([np.array(lead, np.int64), ids])
        lengths = np.array([len(run)])
        if bytes is None or sha256 is None:
            self.extend(run, lengths)
        else:
            rows = np.frombuffer(sha256, np.uint8)[None]
            self.extend(run, lengths, np.array([bytes]), rows)

    def extend(
        self,
        ids: Ids,
        lengths: Int64,
        bytes: Int64 | None = None,
        sha256: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Add n documents at once; raises what `append` does.

        Args:
            ids: of all of them in a row, each after its end-of-document id where there is one.
            lengths: ids of each [n], the end-of-document id counted.
            bytes: [n] and
            sha256: [n, 32], as for `append`.
        """
        assert self._file is not None, "a writer is used in a `with`"
        is_known = bytes is not None and sha256 is not None
        if self._has_documents not in (None, is_known):
            raise ValueError("boundaries are kept of all documents or of none")
        self._has_documents = is_known
        run = checked_ids(ids, self._vocab_size).astype(self._dtype, copy=False)
        raw = run.tobytes()
        with storing(self._folder):
            self._file.write(raw)
        self._digest.update(raw)
        if len(run):
            self._highest = max(self._highest, int(run.max()))
        if is_known:
            rows = np.zeros(len(lengths), DOCUMENT)
            rows["end"] = self._count + np.cumsum(lengths)
            rows["start"] = rows["end"] - lengths + (self._eod_id is not None)
            rows["bytes"], rows["sha256"] = bytes, sha256
            self._rows += rows.tobytes()
        self._count += len(run)

    def finish(self, counts: dict[str, int] | None = None) -> Path:
        """Write the indexes and give the folder its name; `counts` are kept in them.

        Raises:
            DataError: nothing was appended, or the folder has come to be meanwhile.
            StoreError: the disk is full.
        """
        assert self._file is not None
        assert self._temporary is not None
        if not self._count:
            raise DataError.at(str(self._folder), "a shard needs at least one token")
        with storing(self._folder):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            bin_sha256 = self._digest.hexdigest()
            index = {
                "bin": BIN,
                "dtype": self._dtype.str,
                "format": FORMAT,
                "max_token_id": self._highest,
                "num_tokens": self._count,
                "sha256": bin_sha256,
                "tokenizer": self._tokenizer,
                "vocab_size": self._vocab_size,
            }
            if self._has_documents:
                self._write_documents(bin_sha256, counts or {})
            atomic.write_synced(self._temporary / INDEX, _json(index))
            atomic.sync_folder(self._temporary)
            self._require_free()
            self._temporary.rename(self._folder.absolute())
            self._temporary = None
            atomic.sync_folder(self._folder.absolute().parent)
        return self._folder

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes what is not finished."""
        if self._temporary is not None:
            atomic.remove(self._temporary)
        if self._file is not None and not self._file.closed:
            with contextlib.suppress(OSError):  # a full disk: the error that led here says it
                self._file.close()

    def _write_documents(self, bin_sha256: str, counts: dict[str, int]) -> None:
        assert self._temporary is not None
        rows = np.frombuffer(self._rows, DOCUMENT)
        buffer = io.BytesIO()
        np.save(buffer, rows, allow_pickle=False)
        raw = buffer.getvalue()
        atomic.write_synced(self._temporary / DOCUMENTS, raw)
        index = {
            "format": DOCUMENTS_FORMAT,
            "documents": len(rows),
            "sha256": hashlib.sha256(raw).hexdigest(),
            "bin_sha256": bin_sha256,
            "tokenizer": {"name": self._tokenizer, "sha256": self._tokenizer_sha256},
            "eod_id": self._eod_id,
            "split": self._split,
            "counts": counts,
        }
        atomic.write_synced(self._temporary / DOCUMENTS_INDEX, _json(index))

    def _require_free(self) -> None:
        if self._folder.exists() or self._folder.is_symlink():
            message = "is there already, and a shard is never written over"
            raise DataError.at(str(self._folder), message, None, "a folder that is not there")


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
