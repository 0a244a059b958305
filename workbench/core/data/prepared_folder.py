"""The folder that a preparation writes: it stands there whole, or its parts wait beside it.

<out>/train, <out>/held_out   the shards
<out>/prepare.json            what they were made of, and their hashes
.<out>.prepare/               while it works: a lock, what it works on, and its parts
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.core.data import atomic
from workbench.core.data.errors import DataError
from workbench.core.data.shards import TokenShard, open_shard
from workbench.errors import StoreError, reason_of
from workbench.json_files import read_json

FORMAT = "workbench-prepared-v1"
MANIFEST = "prepare.json"
REMEDY = "a new folder, or an empty one"


def require_replaceable(out: Path) -> None:
    """Nothing, where a folder can take the place of `out`: known at the start, not after hours.

    Raises:
        DataError: it is the root, a mount point, or no folder.
    """
    if out.exists() and not out.is_dir():
        raise DataError.at("--out", "is not a folder", str(out), REMEDY)
    if out.is_mount():
        message = "is a mount point, whose place no folder can take"
        raise DataError.at("--out", message, str(out), "a folder in it that is not there yet")


def standing(out: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of an output that is there already, whole and of these inputs.

    Raises:
        DataError: there is something else, or a shard that is not as it was written.
    """
    try:
        if not out.exists() or not any(out.iterdir()):
            return None
        manifest: dict[str, Any] = read_json(out / MANIFEST)
        if manifest["format"] != FORMAT:
            raise TypeError
        differing = [key for key, value in inputs.items() if manifest["inputs"].get(key) != value]
        if differing:
            message = f"holds shards of another preparation ({', '.join(differing)} differ)"
            raise DataError.at("--out", message, str(out), REMEDY)
        for side, shard in manifest["shards"].items():
            require_as_written(out / Path(side).name, shard)
    except DataError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise StoreError.at(str(out), f"cannot be read: {reason_of(error)}") from error
        message = "holds something else, which is not overwritten"
        raise DataError.at("--out", message, str(out), REMEDY) from None
    except (KeyError, TypeError, AttributeError, ValueError):
        message = "holds something else, which is not overwritten"
        raise DataError.at("--out", message, str(out), REMEDY) from None
    return manifest


def require_as_written(folder: Path, written: Mapping[str, Any]) -> TokenShard:
    """The shard of a prepared folder, where it is the one that the manifest names.

    Args:
        folder: of a side.
        written: what the manifest says of it.

    Raises:
        DataError: it cannot be used, or is another one.
    """
    shard = open_shard(folder, place=str(folder))
    found = {
        "sha256": shard.tokens.content(None).sha256,
        "documents": None if shard.documents is None else len(shard.documents),
    }
    for name, value in found.items():
        if value != written.get(name):
            message = f"is not the shard that {folder.parent / MANIFEST} names ({name})"
            raise DataError.at(str(folder), message, value, str(written.get(name)))
    return shard


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """While entered, no other process prepares this output.

    Raises:
        DataError: another process does.
    """
    path = work / "lock"
    while True:
        work.mkdir(parents=True, exist_ok=True)
        with path.open("a") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise DataError.at(str(work), "another process is preparing this output") from None
            # One that was removed by whoever had it locks nothing.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                yield
                return


def begin(work: Path, inputs: dict[str, Any]) -> None:
    """Keeps what an ended process left when it is of the same inputs, else removes it."""
    path = work / "inputs.json"
    known = json.dumps({"format": FORMAT, **inputs}, sort_keys=True).encode()
    folder = work / "parts"
    if not path.exists() or path.read_bytes() != known:
        path.unlink(missing_ok=True)
        atomic.remove(folder)
        folder.mkdir()
        atomic.write_file(path, known)
    folder.mkdir(exist_ok=True)
    atomic.remove_leftovers(folder)


def publish(work: Path, out: Path, manifest: dict[str, Any]) -> None:
    shards = work / "out"
    atomic.write_synced(
        shards / MANIFEST, json.dumps(manifest, indent=2, sort_keys=True).encode() + b"\n"
    )
    atomic.sync_folder(shards)
    try:
        os.rename(shards, out)  # noqa: PTH104  (an empty folder of that name is replaced)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            message = "holds something that was not there at the start"
            raise DataError.at("--out", message, str(out), "a new folder") from None
        raise
    atomic.sync_folder(out.parent)
