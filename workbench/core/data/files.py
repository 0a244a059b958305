"""Files that are read: where they are, what they hold, and whether they are still the same."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from workbench.core.data.errors import DataError
from workbench.errors import reason_of


class State(NamedTuple):
    """What is another one when a file was written to, or another file put in its place."""

    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Stamp:
    """The hash of a file's content, and the state of the file that had it."""

    sha256: str
    state: State

    def require_same(self, path: Path, since: str) -> None:
        """Nothing, where the file is as it was.

        Raises:
            DataError: it changed `since`.
        """
        if state_of(path) != self.state:
            raise DataError.at(str(path), f"the file changed {since}")


def hash_file(path: Path) -> Stamp:
    """The stamp of a file.

    Raises:
        DataError: it is no regular file, cannot be read, or changes meanwhile.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe could wait for ever
            raise DataError.at(str(path), "is not a regular file")
        with path.open("rb") as file:
            before = _state(os.fstat(file.fileno()))
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            stamp = Stamp(digest, _state(os.fstat(file.fileno())))
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {reason_of(error)}") from error
    if stamp.state != before:  # the hash is of no content that the file ever had
        raise DataError.at(str(path), "the file changed while it was read")
    return stamp


def state_of(path: Path) -> State | None:
    """The state of a file; None where there is none."""
    try:
        return _state(path.stat())
    except OSError:
        return None


def _state(status: os.stat_result) -> State:
    return State(status.st_size, status.st_mtime_ns, status.st_ino)


def real_path(path: Path) -> Path:
    """The path without links. Of a link that leads to itself, its own path."""
    return Path(os.path.realpath(path))  # Path.resolve raises at such a link


def walk(root: Path) -> Iterator[Path]:
    """Files below `root`, through links too, each real folder once; without hidden names.

    Raises:
        DataError: a folder that cannot be read.
    """

    def unreadable(error: OSError) -> None:
        raise DataError.at(str(error.filename), f"cannot be read: {reason_of(error)}") from error

    entered = {real_path(root)}
    for folder, folders, names in os.walk(root, onerror=unreadable, followlinks=True):
        kept = []
        for name in sorted(folders):
            real = real_path(Path(folder) / name)
            if not name.startswith(".") and real not in entered:
                entered.add(real)
                kept.append(name)
        folders[:] = kept
        yield from (Path(folder) / name for name in sorted(names) if not name.startswith("."))
