"""What stands beside the ids of a token shard: its index, and the table of its documents.

Both are believed where they agree with one another and with the size of the file of the ids.

Shapes: N documents.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.data.errors import DataError
from workbench.core.data.shard_files import TokenFile
from workbench.errors import reason_of
from workbench.json_files import read_json as read_strict

FORMAT = "complexity-token-shard-v1"
DOCUMENTS_FORMAT = "workbench-shard-documents-v1"
BIN, INDEX = "tokens.bin", "tokens.idx.json"
DOCUMENTS, DOCUMENTS_INDEX = "tokens.docs.npy", "tokens.docs.json"

# Of each document: the index of its first id (where there is an end-of-document id, it stands
# right before) and the one past its last, the UTF-8 bytes of its text and the SHA-256 of them.
DOCUMENT = np.dtype([("start", "<i8"), ("end", "<i8"), ("bytes", "<i8"), ("sha256", "u1", (32,))])

Format = Literal["complexity", "llmc", "megatron", "nanogpt"]
Documents = npt.NDArray[np.void]  # [N] of DOCUMENT

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True, eq=False)
class Header:
    """What a shard says of itself. What it does not say is None."""

    format: Format
    path: Path  # of the ids
    file: TokenFile
    vocab_size: int | None
    tokenizer: str | None
    sha256: str | None  # of the bytes of the ids
    max_token_id: int | None
    documents: Documents | None = None  # where the index of the ids itself knows them


class Sidecar(NamedTuple):
    """The documents of a shard [N], and what encoded them."""

    documents: Documents
    tokenizer_sha256: str | None
    eod_id: int | None


def read_index(path: Path, place: str) -> Header:
    """The header of a shard in this package's own format."""
    index_path = path / INDEX if path.is_dir() else path.with_name(INDEX)
    if not path.exists():
        raise DataError.at(place, "no such file or folder", str(path), "a token shard")
    index = read_json(index_path)
    if index.get("format") != FORMAT:
        message = "is not the index of a token shard: `format`"
        raise DataError.at(str(index_path), message, index.get("format"), FORMAT)
    kinds: dict[str, type] = {
        "bin": str,
        "dtype": str,
        "max_token_id": int,
        "num_tokens": int,
        "sha256": str,
        "tokenizer": str,
        "vocab_size": int,
    }
    for name, kind in kinds.items():
        if name not in index:
            raise DataError.at(f"{index_path}: {name}", "the key is missing")
        if type(index[name]) is not kind:
            allowed = "a whole number" if kind is int else "a string"
            raise DataError.at(f"{index_path}: {name}", "has another type", index[name], allowed)
    name, vocab, count = index["bin"], index["vocab_size"], index["num_tokens"]
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise DataError.at(f"{index_path}: bin", "leaves the folder", name, "a file beside it")
    if index["dtype"] not in ("<u2", "<u4"):
        message = "ids are read as little-endian uint16 or uint32"
        raise DataError.at(f"{index_path}: dtype", message, index["dtype"], "<u2 or <u4")
    dtype = np.dtype(index["dtype"])
    most = 1 << (8 * dtype.itemsize)
    if not 1 <= vocab <= most:
        message = f"ids of {8 * dtype.itemsize} bits cannot have so many entries"
        raise DataError.at(f"{index_path}: vocab_size", message, vocab, f"1 to {most}")
    if count < 1:
        raise DataError.at(f"{index_path}: num_tokens", "the shard is empty", count, "at least 1")
    bin_path = index_path.with_name(name)
    if path.is_file() and path.name != name:
        message = f"{INDEX} beside it is the index of another file"
        raise DataError.at(place, message, str(path), str(bin_path))
    file = TokenFile(bin_path, dtype, 0, count)
    require_size(file, f"num_tokens {count:,}")
    return Header(
        "complexity",
        bin_path,
        file,
        vocab,
        index["tokenizer"],
        index["sha256"],
        index["max_token_id"],
    )


def require_size(file: TokenFile, said: str) -> None:
    """Nothing, where the file ends with its last id.

    Raises:
        DataError: it is shorter or longer, or no regular file.
    """
    try:
        size = file.path.stat().st_size
    except OSError as error:
        raise DataError.at(str(file.path), f"cannot be read: {reason_of(error)}") from None
    if not file.path.is_file():
        raise DataError.at(str(file.path), "is not a regular file")
    if size != file.end:
        width = file.dtype.itemsize
        ids, rest = divmod(size - file.offset, width)
        message = f"is not the file that its index was written for: {said} of {width} bytes"
        found = f"{size:,} bytes: {ids:,} ids" + (
            f" and {rest} byte{'s' * (rest > 1)}" if rest else ""
        )
        raise DataError.at(str(file.path), message, found, f"{file.end:,} bytes")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        DataError: it cannot be read, or is none.
    """
    try:
        found = read_strict(path)
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {reason_of(error)}") from None
    except ValueError as error:
        raise DataError.at(str(path), f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError.at(str(path), "holds no JSON object", type(found).__name__)
    return found


def read_sidecar(header: Header, bin_sha256: str) -> Sidecar | None:
    """The documents of a shard, where they were written beside it."""
    path = header.path.with_name(DOCUMENTS_INDEX)
    rows_path = header.path.with_name(DOCUMENTS)
    if not path.exists() and not rows_path.exists():
        return None
    index = read_json(path)
    try:
        if index["format"] != DOCUMENTS_FORMAT:
            message = "is not an index of documents: `format`"
            raise DataError.at(str(path), message, index["format"], DOCUMENTS_FORMAT)
        if index["bin_sha256"] != bin_sha256:
            message = f"belongs to another {BIN}: bin_sha256"
            raise DataError.at(str(path), message, index["bin_sha256"], bin_sha256)
        raw = rows_path.read_bytes()
        if (found := hashlib.sha256(raw).hexdigest()) != index["sha256"]:
            message = f"does not hold what {DOCUMENTS_INDEX} says"
            raise DataError.at(str(rows_path), message, found, f"SHA-256 {index['sha256']}")
        rows: Documents = read_array(raw)
        if rows.dtype != DOCUMENT or rows.shape != (index["documents"],):
            message = "is not a table of these documents"
            allowed = f"{index['documents']} rows of {DOCUMENT}"
            raise DataError.at(str(rows_path), message, f"{rows.shape}, {rows.dtype}", allowed)
        eod_id, tokenizer = index["eod_id"], index["tokenizer"]
        is_id = type(eod_id) is int and 0 <= eod_id < (header.vocab_size or 0)
        if eod_id is not None and not is_id:
            raise DataError.at(f"{path}: eod_id", "is outside the vocabulary", eod_id)
        if not isinstance(tokenizer["sha256"], str | None):
            message = "has another type"
            raise DataError.at(f"{path}: tokenizer.sha256", message, tokenizer["sha256"])
        if tokenizer["name"] != header.tokenizer:
            message = f"is not the tokenizer in {INDEX}"
            raise DataError.at(f"{path}: tokenizer", message, tokenizer["name"], header.tokenizer)
        require_ranges(rows_path, rows["start"], rows["end"], header.file.count)
        if (negative := np.flatnonzero(rows["bytes"] < 0)).size:
            row = int(negative[0])
            message = f"document {row} has fewer bytes than none"
            raise DataError.at(str(rows_path), message, int(rows["bytes"][row]), "0 or more")
        return Sidecar(rows, tokenizer["sha256"], eod_id)
    except OSError as error:
        raise DataError.at(str(rows_path), f"cannot be read: {reason_of(error)}") from None
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        message = f"cannot be used: {type(error).__name__} {error}"
        raise DataError.at(str(path), message) from None


def read_array(raw: bytes) -> npt.NDArray[Any]:
    """The array of a .npy file. Unlike `np.load`, it takes no memory for what is not in the file.

    Raises:
        ValueError: it is none, or its header promises another size than it has.
    """
    file = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(file)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a header as Python 2 wrote it
            shape, is_fortran, dtype = _HEADERS[version](file)
        size = math.prod(shape) * dtype.itemsize
    except Exception as error:  # numpy's parser raises many kinds
        raise ValueError(f"not the header of an array: {error}") from None
    rest = raw[file.tell() :]
    if dtype.hasobject or min(shape, default=0) < 0 or size != len(rest):
        raise ValueError(f"{len(rest):,} bytes are not {shape} of {dtype}")
    found = np.frombuffer(rest, dtype)
    return found.reshape(shape, order="F" if is_fortran else "C")


def require_ranges(
    path: Path, starts: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], count: int
) -> None:
    """Nothing, where the documents [start, end) [N] stand in order within `count` ids.

    Raises:
        DataError: they overlap, are turned round or leave the file; names the first that does.
    """
    before = np.r_[0, ends[:-1]]
    if (wrong := np.flatnonzero((starts < before) | (ends < starts) | (ends > count))).size:
        row = int(wrong[0])
        message = f"document {row} does not follow the one before it, or leaves the file"
        allowed = f"within {int(before[row])} to {count}"
        raise DataError.at(str(path), message, [int(starts[row]), int(ends[row])], allowed)
