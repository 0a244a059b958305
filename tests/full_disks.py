"""A disk without room, for tests: a small one, or a limit on the size of files in its place."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """While entered, this process cannot make a file longer than `size` bytes (Python ignores the
    signal of it, so that the write fails like one to a full disk)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, hidden ones too, with the content of the files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def on_a_disk_of(size: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process that alone sees a tmpfs of `size` at `folder`.

    The disk is gone with the process, so what is to be known of it must be printed.
    """
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "$2" -c "$3"'
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    paths = os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [
            "unshare",
            *as_root,
            "--mount",
            "sh",
            "-c",
            mount,
            "sh",
            str(folder),
            sys.executable,
            code,
        ],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
