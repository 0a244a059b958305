"""Files and folders that appear under their final name whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from pathlib import Path


def temporary_name(final: Path) -> Path:
    """A name beside `final` that tells who writes it: `.<final>.<host>.<pid>.<random>.tmp`."""
    return final.with_name(f".{final.name}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def write_file(final: Path, data: bytes, sync: bool = True) -> None:
    """Write `data` under `final`: whole and on the disk, or not at all.

    Without `sync` that holds when the process is killed, but not when the power fails. Several
    processes may write the same content at once; the last rename stands.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(final)
    try:
        if sync:
            write_synced(temporary, data)
        else:
            temporary.write_bytes(data)
        temporary.replace(final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(final.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write `data` to `path` and wait until the disk holds it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk holds the names in `folder` (a no-op where folders cannot be synced)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what dead processes of this host left half-written in `folder`; return what it was.

    Files of living processes and of other hosts stay: nobody here can know that they are dead.
    """
    removed = []
    for path in sorted(folder.glob(".*.tmp")):
        parts = path.name.rsplit(".", 4)
        if len(parts) != 5 or parts[1] != _host() or not parts[2].isdigit():
            continue
        if _is_alive(int(parts[2])):
            continue
        remove(path)
        removed.append(path)
    return removed


def remove(path: Path) -> None:
    """Remove a file or a folder, whether or not it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"


def _is_alive(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))
