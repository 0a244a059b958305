"""Token files of other trainers, read as they are; which of them a file is, its signature says.

- `llmc` (llm.c and modded-nanogpt): 256 little-endian int32, of which the first three are a mark,
  a version and the number of ids; then the ids. 20240520 and 1 stand for uint16 (GPT-2), 20240801
  and 7 for uint32 (Llama 3).
- `megatron` (Megatron-LM): NAME.bin holds ids alone. NAME.idx holds `MMIDIDX\\0\\0`, uint64 version
  1, uint8 code of the type, uint64 number of sequences S, uint64 number of document indices D + 1,
  int32 lengths [S], int64 offsets [S] in bytes, int64 document indices [D + 1] into the sequences;
  all little-endian. What follows (modes of multimodal data) is not read.
- `nanogpt`: uint16 ids and nothing else. It has no signature, so it is read where it is named.

None of them says its vocabulary or its tokenizer.

Shapes: S sequences, D documents.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workbench.core.data.errors import DataError
from workbench.core.data.shard_files import TokenFile
from workbench.core.data.shard_index import (
    DOCUMENT,
    INDEX,
    Documents,
    Format,
    Header,
    read_json,
    require_ranges,
    require_size,
)
from workbench.errors import reason_of

LLMC_KINDS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # by mark: version and type
LLMC_HEADER = 256 * 4
MEGATRON_MAGIC, MEGATRON_VERSION = b"MMIDIDX\x00\x00", 1
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NO_INTEGERS = {6: "float64", 7: "float32"}

Int64 = npt.NDArray[np.int64]


def format_of(path: Path, place: str) -> Format:
    """Which format stands at a path, by signature.

    Raises:
        DataError: nothing there, or nothing with a signature.
    """
    if path.is_dir():
        if (path / INDEX).exists():
            return "complexity"
        message = f"the folder holds no {INDEX}; files of other formats are named one by one"
        raise DataError.at(place, message, str(path), "a token shard")
    if megatron_paths(path)[1].exists():
        return "megatron"
    if not path.exists():
        raise DataError.at(place, "no such file or folder", str(path), "a token shard")
    if _is_of_index(path):
        return "complexity"
    head = _read(_file(path, place), 4)
    if not head:
        raise DataError.at(str(path), "the shard is empty", "0 bytes", "at least one id")
    if head in {struct.pack(order + "i", mark) for mark in LLMC_KINDS for order in "<>"}:
        return "llmc"
    message = "has no signature, and what is in a raw file is not guessed"
    allowed = "data.tokens_format (--format) nanogpt, if these are uint16 ids and nothing else"
    raise DataError.at(place, message, str(path), allowed)


def _is_of_index(path: Path) -> bool:
    """Whether the index beside a file was written for it."""
    index = path.with_name(INDEX)
    return index.exists() and (path.name == INDEX or read_json(index).get("bin") == path.name)


def read_llmc(path: Path, place: str) -> Header:
    """The header of an llm.c file.

    Raises:
        DataError: it is none, or not as long as it says.
    """
    raw = _read(_file(path, place), LLMC_HEADER)
    if len(raw) < LLMC_HEADER:
        raise DataError.at(
            str(path), "is too short for its header", f"{len(raw)} bytes", f"{LLMC_HEADER} bytes"
        )
    mark, version, count = struct.unpack_from("<3i", raw)
    if mark not in LLMC_KINDS:
        problem = "does not start with the mark of an llm.c file of ids"
        if struct.unpack_from(">i", raw)[0] in LLMC_KINDS:
            problem = "is a big-endian llm.c file, and little-endian ones are read"
        raise DataError.at(str(path), problem, mark, " or ".join(map(str, LLMC_KINDS)))
    known, dtype = LLMC_KINDS[mark]
    if version != known:
        raise DataError.at(str(path), "another version of the format", version, str(known))
    if count < 1:
        raise DataError.at(str(path), "holds no ids, as its header says", count, "at least 1")
    file = TokenFile(path, np.dtype(dtype), LLMC_HEADER, count)
    require_size(file, f"its header says {count:,} ids")
    return Header("llmc", path, file, None, None, None, None)


def read_nanogpt(path: Path, place: str) -> Header:
    """The header that nanoGPT's raw files do not have.

    Raises:
        DataError: it is empty, or no file of uint16.
    """
    _file(path, place)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {reason_of(error)}") from None
    if size == 0:
        raise DataError.at(str(path), "the shard is empty", "0 bytes", "at least one id")
    if size % 2:
        message = "is no file of uint16 ids"
        raise DataError.at(str(path), message, f"{size:,} bytes", "a multiple of 2 bytes")
    file = TokenFile(path, np.dtype("<u2"), 0, size // 2)
    return Header("nanogpt", path, file, None, None, None, None)


def megatron_paths(path: Path) -> tuple[Path, Path]:
    """The .bin and .idx files of a pair, named by either or by what they share."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return stem.with_name(stem.name + ".bin"), stem.with_name(stem.name + ".idx")


def read_megatron(path: Path, place: str) -> Header:
    """The header of a Megatron pair, with its documents.

    Raises:
        DataError: there is no pair, or what one file says does not fit the other.
    """
    bin_path, index_path = megatron_paths(path)
    for one in (bin_path, index_path):
        if not one.exists():
            raise DataError.at(place, "no such file", str(one), "NAME.bin and NAME.idx")
    raw = _read(index_path, None)
    at = str(index_path)
    if not raw.startswith(MEGATRON_MAGIC):
        raise DataError.at(
            at, "does not start with the mark of a Megatron index", raw[:9], str(MEGATRON_MAGIC)
        )
    if len(raw) < _MEGATRON_HEAD.size:
        allowed = f"{_MEGATRON_HEAD.size} bytes"
        raise DataError.at(at, "is too short for its header", f"{len(raw)} bytes", allowed)
    _, version, code, sequences, boundaries = _MEGATRON_HEAD.unpack_from(raw)
    if version != MEGATRON_VERSION:
        raise DataError.at(at, "another version of the format", version, str(MEGATRON_VERSION))
    if code not in _MEGATRON_TYPES:
        kinds = ", ".join(f"{key} ({value})" for key, value in _MEGATRON_TYPES.items())
        shown = f"{code} ({_NO_INTEGERS.get(code, 'unknown')})"
        raise DataError.at(at, "this type holds no token ids", shown, kinds)
    if not sequences:
        raise DataError.at(at, "the shard is empty: no sequences", 0, "at least 1")
    need = _MEGATRON_HEAD.size + 12 * sequences + 8 * boundaries
    if len(raw) < need:
        message = f"is too short for {sequences:,} sequences and {boundaries:,} document indices"
        raise DataError.at(at, message, f"{len(raw):,} bytes", f"{need:,} bytes")
    start = _MEGATRON_HEAD.size
    lengths = np.frombuffer(raw, "<i4", sequences, start).astype(np.int64)
    offsets = np.frombuffer(raw, "<i8", sequences, start + 4 * sequences)
    indices = np.frombuffer(raw, "<i8", boundaries, start + 12 * sequences)
    dtype = np.dtype(_MEGATRON_TYPES[code])
    ends = np.cumsum(lengths)
    wanted = (ends - lengths) * dtype.itemsize
    if (wrong := np.flatnonzero((lengths < 0) | (offsets != wanted))).size:
        row = int(wrong[0])
        message = f"sequence {row} does not start where the one before it ends"
        found = f"length {lengths[row]}, byte {offsets[row]}"
        raise DataError.at(at, message, found, f"byte {wanted[row]}")
    count = int(ends[-1])
    if not count:
        raise DataError.at(at, "the shard is empty: no ids", 0, "at least 1")
    file = TokenFile(bin_path, dtype, 0, count)
    require_size(file, f"{index_path.name} says {count:,} ids")
    rows = _documents(index_path, indices, np.r_[0, ends])
    return Header("megatron", bin_path, file, None, None, None, None, rows)


def _documents(path: Path, indices: Int64, places: Int64) -> Documents:
    """The table of documents; of their text nothing is known.

    Args:
        path: of the index, for errors.
        indices: [D + 1], the first sequence of each document, and the number of sequences.
        places: [S + 1], where each sequence starts, in ids, and the number of ids.
    """
    sequences = len(places) - 1
    is_whole = len(indices) > 1 and indices[0] == 0 and indices[-1] == sequences
    if not is_whole or (np.diff(indices) < 0).any():
        message = "its document indices do not run over its sequences"
        raise DataError.at(str(path), message, indices[:4].tolist(), f"from 0 up to {sequences}")
    rows = np.zeros(len(indices) - 1, DOCUMENT)
    rows["start"], rows["end"] = places[indices[:-1]], places[indices[1:]]
    rows["bytes"] = -1
    require_ranges(path, rows["start"], rows["end"], int(places[-1]))
    return rows


def _file(path: Path, place: str) -> Path:
    if not path.is_file():
        raise DataError.at(place, "no such file", str(path), "a file of token ids")
    return path


def _read(path: Path, size: int | None) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {reason_of(error)}") from None
