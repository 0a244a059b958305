"""A file of token ids: its hash checked once and remembered, and reads that notice a change.

A memory map of a file that is cut meanwhile ends the process (SIGBUS), and one of a file that is
written to gives other ids without a word. So what trains and evaluates is read by `pread` from one
open file whose size and time of change are looked at with every read.

Shapes: T ids of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from workbench.core.data import atomic
from workbench.core.data.errors import DataError
from workbench.core.data.tokenizer import Ids
from workbench.errors import reason_of, storing
from workbench.json_files import read_json

FORMAT = "workbench-checked-tokens-v2"
CHUNK_BYTES = 8 << 20
# A file changed so short ago may change again without another time of change: not remembered.
SETTLED_NS = 100_000_000


@dataclass(frozen=True)
class TokenFile:
    """Where the ids of a file stand: `count` of them in `dtype`, `offset` bytes from its start."""

    path: Path
    dtype: np.dtype[np.integer]
    offset: int
    count: int

    @property
    def end(self) -> int:
        """Bytes up to the end of the last id."""
        return self.offset + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Content:
    """What reading all ids of a file has shown."""

    sha256: str  # of the bytes of the ids, as they stand in the file
    ids_sha256: str  # of the ids as little-endian uint32, however they are stored
    lowest: int
    highest: int


@dataclass(frozen=True)
class _Stamp:
    """What tells a file from another, and from itself after a change."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


class StoredIds:
    """The ids of a file, read on demand; `ids[start:end]` is a copy in memory."""

    def __init__(self, file: TokenFile) -> None:
        """Opens the file.

        Raises:
            DataError: it cannot be opened, or is too short for the ids.
        """
        self.file = file
        self.dtype = file.dtype
        try:
            self._handle = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError.at(str(file.path), f"cannot be read: {reason_of(error)}") from None
        weakref.finalize(self, os.close, self._handle)
        self._stamp = self._stamp_now()
        if self._stamp.size < file.end:
            raise self._cut(self._stamp.size)
        self._content: Content | None = None

    def __len__(self) -> int:
        return self.file.count

    def __getitem__(self, part: slice) -> Ids:
        """The ids of a stretch [length].

        Raises:
            DataError: the file was cut or changed since its content was checked.
        """
        start, end, _ = part.indices(len(self))
        size = max(end - start, 0) * self.dtype.itemsize
        raw = self._read(self.file.offset + start * self.dtype.itemsize, size)
        self.require_unchanged()
        return np.frombuffer(raw, self.dtype)

    def content(self, memory: Path | None) -> Content:
        """The hash of the ids and their range: read, or remembered in the folder `memory`.

        Raises:
            DataError: the file changes while it is read.
            StoreError: `memory` cannot be written.
        """
        if self._content is None:
            self._content = self._recall(memory) or self._scan()
        return self._content

    def remember(self, memory: Path) -> None:
        """Keep what reading has shown, for as long as the file stays as it is. Only a content that
        was found right is to be remembered.

        Raises:
            StoreError: `memory` cannot be written.
        """
        now = time.time_ns()
        changed = max(self._stamp.mtime_ns, self._stamp.ctime_ns)
        if self._content is None or now - changed < SETTLED_NS:
            return
        if self._recall(memory) == self._content:
            return
        known = {"format": FORMAT, **self._key(), **asdict(self._content)}
        path = memory / self._name
        with storing(path):
            document = {"known": known, "sha256": _sha256(known)}
            atomic.write_file(path, json.dumps(document, sort_keys=True).encode() + b"\n")

    def require_unchanged(self) -> None:
        """Nothing, where the file is as it was when its content was checked.

        A file whose time of change moved is read again: the same content may stay.

        Raises:
            DataError: the file was cut, or holds something else now.
        """
        now = self._stamp_now()
        if now.size < self.file.end:
            raise self._cut(now.size)
        if (now.size, now.mtime_ns) == (self._stamp.size, self._stamp.mtime_ns):
            return
        before, checked = self._content, self._stamp
        self._stamp = now
        if before is None:
            return  # not checked yet: whoever checks it reads it as it is then
        if now.size == checked.size and (found := self._scan()) == before:
            return
        self._stamp = checked  # the next read notices it again
        message = "was changed while it is read: its ids are no longer those that were checked"
        found_sha = found.sha256 if now.size == checked.size else f"{now.size:,} bytes"
        raise DataError.at(str(self.file.path), message, found_sha, f"SHA-256 {before.sha256}")

    def _scan(self) -> Content:
        digest, of_ids = hashlib.sha256(), hashlib.sha256()
        lowest, highest = 2**63, -(2**63)
        before = self._stamp_now()
        at, end = self.file.offset, self.file.end
        while at < end:
            raw = self._read(at, min(CHUNK_BYTES, end - at))
            digest.update(raw)
            ids = np.frombuffer(raw, self.dtype)
            of_ids.update(ids.astype("<u4").tobytes())
            lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
            at += len(raw)
        after = self._stamp_now()
        if (before.size, before.mtime_ns) != (after.size, after.mtime_ns):
            message = "is written to while it is read: start when it is complete"
            raise DataError.at(str(self.file.path), message)
        self._stamp = after
        return Content(digest.hexdigest(), of_ids.hexdigest(), lowest, highest)

    def _read(self, at: int, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.pread(self._handle, size, at)
            except OSError as error:
                raise DataError.at(
                    str(self.file.path), f"cannot be read: {reason_of(error)}"
                ) from None
            if not part:
                raise self._cut(self._stamp_now().size)
            parts.append(part)
            at += len(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _cut(self, size: int) -> DataError:
        file = self.file
        message = f"is too short for its {file.count:,} ids of {file.dtype.itemsize} bytes each"
        return DataError.at(str(file.path), message, f"{size:,} bytes", f"{file.end:,} bytes")

    def _stamp_now(self) -> _Stamp:
        found = os.fstat(self._handle)
        return _Stamp(
            found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev
        )

    @property
    def _name(self) -> str:
        file = self.file
        place = f"{self._stamp.device} {self._stamp.inode} {file.offset} {file.count} {file.dtype}"
        return hashlib.sha256(place.encode()).hexdigest()[:32] + ".json"

    def _key(self) -> dict[str, object]:
        file = self.file
        return {
            "stamp": asdict(self._stamp),
            "dtype": file.dtype.str,
            "offset": file.offset,
            "count": file.count,
        }

    def _recall(self, memory: Path | None) -> Content | None:
        if memory is None:
            return None
        try:
            document = read_json(memory / self._name)
            known = document["known"]
            if document["sha256"] != _sha256(known) or known["format"] != FORMAT:
                return None
            if any(known[key] != value for key, value in self._key().items()):
                return None
            hashes = str(known["sha256"]), str(known["ids_sha256"])
            return Content(*hashes, int(known["lowest"]), int(known["highest"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # nothing is remembered, or nothing that can be used


def _sha256(known: object) -> str:
    """What tells a note from a damaged one."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
