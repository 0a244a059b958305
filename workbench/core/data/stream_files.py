"""The files of a stream: where they are, in which order, and what pins them.

A stream is a list of parquet files, read in order. Those of a local folder are pinned by the
SHA-256 of each; those of a hub by the commit of the data set, which the hub is trusted to serve.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from workbench.core.data import atomic
from workbench.core.data.errors import DataError
from workbench.core.data.files import Stamp, hash_file, real_path, state_of, walk
from workbench.core.data.retry import Patience, retried
from workbench.core.data.text_files import require_column
from workbench.errors import reason_of, storing
from workbench.json_files import read_json

REMEDY = 'pip install "workbench[fineweb]"'
SPLIT = "train"  # of a hub data set
BLOCK_BYTES = 8 << 20  # fetched at once from a server
SILENCE = 60.0  # seconds without a byte after which a connection counts as dropped

# Up to so many bytes a folder is hashed also where nothing is to be trained (`wb check`).
MOST_HASHED_UNASKED = 1 << 30

# A file is remembered by its time only when that is so old that a later write would change it.
_SETTLED_NS = 2 * 10**9


@dataclass(frozen=True)
class StreamFile:
    """One parquet file. `check` raises a DataError when it is not the file any more that was
    hashed; `remote` files are asked for again when a connection drops."""

    name: str
    open: Callable[[], IO[bytes]]
    check: Callable[[], None] = lambda: None
    remote: bool = False


@dataclass(frozen=True)
class StreamSource:
    """The files of a stream in order. `key` is the identity of what they hold, without any path;
    `order_proof` says what pins content and order."""

    source: str
    key: str
    order_proof: str
    files: tuple[StreamFile, ...]


def folder_source(stream_path: str, field: str, cache: Path) -> StreamSource:
    """The parquet files of a folder and all below it, in order of their path below it.

    Hashes of files are remembered in `cache` by real path, size, time and inode.

    Raises:
        DataError: no folder, no parquet file in it, or one without the text column.
        StoreError: the cache cannot be written.
    """
    paths = folder_files(stream_path)
    for path in paths:
        require_column(path, field)
    stamps = [_stamp(path, cache) for path in paths]
    files = tuple(_local(path, stamp) for path, stamp in zip(paths, stamps, strict=True))
    size = sum(stamp.state.size for stamp in stamps)
    return StreamSource(
        f"a folder of {len(files)} parquet files, {size:,} bytes",
        _folder_key([stamp.sha256 for stamp in stamps]),
        f"proven: SHA-256 of all {len(files)} files, in order of their names",
        files,
    )


def folder_key(stream_path: str, cache: Path) -> str | None:
    """The identity of a folder without reading much of it: None where hashes are not remembered and
    the files are larger than a gigabyte together.

    Raises:
        DataError: no folder, or no parquet file in it.
    """
    paths = folder_files(stream_path)
    unknown = [path for path in paths if _remembered(path, cache) is None]
    states = [state for path in unknown if (state := state_of(path)) is not None]
    if sum(state.size for state in states) > MOST_HASHED_UNASKED:
        return None
    return _folder_key([_stamp(path, cache).sha256 for path in paths])


def folder_files(stream_path: str) -> list[Path]:
    """The parquet files of a folder in order, each real file once.

    Raises:
        DataError: no folder, or none in it.
    """
    place, allowed = "data.stream_path", "a folder of .parquet files"
    folder = Path(stream_path).expanduser()
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "no such folder"
        raise DataError.at(place, problem, stream_path, allowed)
    found = sorted((path.relative_to(folder).as_posix(), path) for path in walk(folder))
    paths: dict[Path, Path] = {}
    for _, path in found:
        if path.suffix.lower() == ".parquet":
            paths.setdefault(real_path(path), path)
    if not paths:
        problem = f"holds no .parquet file ({len(found)} of other kinds)"
        raise DataError.at(place, problem, stream_path, allowed)
    return list(paths.values())


def hub_source(
    name: str, config: str, revision: str, cache: Path, patience: Patience
) -> StreamSource:
    """The training files of a hub data set at a commit, as the package datasets finds them.

    Raises:
        DataError: the package is missing, the hub does not answer, or has no such data set, commit,
            configuration or parquet files.
    """
    urls = retried(lambda: _resolve(name, config, revision, cache), patience, f"the hub, {name}")
    files = tuple(_remote(url) for url in urls)
    return StreamSource(
        f"{name} ({config}), {len(files)} parquet files of commit {revision}",
        hub_key(config, revision),
        f"pinned, not proven: by commit {revision}; the bytes that the hub served were not hashed",
        files,
    )


def hub_key(config: str, revision: str) -> str:
    """The identity of a hub data set: its commit covers all its files, under whatever name."""
    return _sha256(["hub", revision, config])


def urls_source(urls: Sequence[str]) -> StreamSource:
    """Files at any addresses, which nothing pins."""
    return StreamSource(
        f"{len(urls)} parquet files",
        _sha256(["urls", *urls]),
        "not proven: nothing pins the files",
        tuple(_remote(url) for url in urls),
    )


def _resolve(name: str, config: str, revision: str, cache: Path) -> list[str]:
    try:
        from datasets import DownloadConfig, load_dataset_builder
        from datasets.exceptions import DatasetNotFoundError
    except ImportError as error:
        problem = f"a stream from the hub needs the package datasets: {REMEDY}"
        raise DataError.at("data.dataset", problem, "fineweb") from error
    folder = str(cache / "huggingface")
    try:
        builder = load_dataset_builder(
            name,
            config,
            revision=revision,
            cache_dir=folder,
            download_config=DownloadConfig(cache_dir=folder),
        )
    except DatasetNotFoundError as error:
        problem = f"the hub has no such data set at commit {revision}, or it is not public"
        raise DataError.at("data.stream_name", problem, name) from error
    except ValueError as error:  # says which configurations there are
        raise DataError.at("data.stream_config", str(error).splitlines()[0], config) from error
    files = (builder.config.data_files or {}).get(SPLIT, [])
    urls = [str(url) for url in files]
    other = [url for url in urls if not url.lower().endswith(".parquet")]
    if not urls or other:
        problem = f"{name} has no parquet files for training" if not urls else "no parquet file"
        value = other[0] if other else config
        raise DataError.at("data.stream_config", problem, value, "a configuration in parquet")
    return urls


def _remote(url: str) -> StreamFile:
    def opened() -> IO[bytes]:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url, **_options(url))
        handle: IO[bytes] = filesystem.open(path, "rb", block_size=BLOCK_BYTES)
        return handle

    return StreamFile(url, opened, remote=True)


def _options(url: str) -> dict[str, Any]:
    """What a server is asked with; the hub's client has limits of its own."""
    if not url.startswith("http"):
        return {}
    import aiohttp

    # A server that says nothing is a dropped connection; a long answer is none.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
    return {"client_kwargs": {"timeout": timeout}}


def _local(path: Path, stamp: Stamp) -> StreamFile:
    def check() -> None:
        stamp.require_same(path, "since the stream was begun")

    return StreamFile(str(path), lambda: path.open("rb"), check)


def _stamp(path: Path, cache: Path) -> Stamp:
    """The content hash of a file, from memory where it is the same file still."""
    remembered = _remembered(path, cache)
    if remembered is not None:
        return remembered
    stamp = hash_file(path)
    if time.time_ns() - stamp.state.mtime_ns > _SETTLED_NS:
        entry = _entry(path, cache)
        with storing(entry):
            known = {"sha256": stamp.sha256, "check": _check(stamp.sha256, entry)}
            atomic.write_file(entry, json.dumps(known).encode())
    return stamp


def _remembered(path: Path, cache: Path) -> Stamp | None:
    entry = _entry(path, cache)
    try:
        known = read_json(entry)
        sha256 = str(known["sha256"])
        if known["check"] != _check(sha256, entry):
            return None  # damaged
    except (OSError, ValueError, KeyError, TypeError):
        return None
    state = state_of(path)
    return None if state is None else Stamp(sha256, state)


def _check(sha256: str, entry: Path) -> str:
    """What tells a note of a hash from a damaged one, and from that of another file."""
    return _sha256([sha256, entry.name])


def _entry(path: Path, cache: Path) -> Path:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {reason_of(error)}") from error
    times = [found.st_mtime_ns, found.st_ctime_ns]
    what = [real_path(path), found.st_dev, found.st_ino, found.st_size, *times]
    return cache / "hashes" / f"{_sha256([str(part) for part in what])[:32]}.json"


def _folder_key(hashes: Sequence[str]) -> str:
    return _sha256(["folder", *hashes])


def _sha256(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
