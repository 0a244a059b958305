"""A report's folder: written whole or not at all, and replaced by the same comparison only."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from workbench.errors import StoreError, UserError

MARKDOWN, PAGE = "report.md", "report.html"
DATA, TABLE = "results.json", "results.csv"


def put_report(folder: Path, key: str, make: Callable[[Path], None]) -> None:
    """Lets `make` write the files of a report into a new folder, which then takes its place.

    Args:
        key: of what is compared and how; `make` writes it into the report's data.

    Raises:
        UserError: something else stands in its place.
        StoreError: it cannot be written.
    """
    reports = folder.parent
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=reports, prefix=".report-") as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            make(new)
            with _alone_in(reports):
                _replace(folder, new, Path(temporary, "old"), key)
    except OSError as error:
        raise StoreError.at(str(folder), f"the report cannot be written: {error}") from None


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes each text to the file of its name.

    Raises:
        OSError: one cannot be written.
    """
    for name, text in texts.items():
        # Half of a surrogate pair is no text: it is written as its number.
        (folder / name).write_bytes(text.encode("utf-8", "backslashreplace"))


def report_lines(folder: Path) -> list[str]:
    """Where a report is, for the terminal: the text, and the page for a browser."""
    return [f"report: {folder / MARKDOWN}", f"        {folder / PAGE}"]


def safe(name: str) -> str:
    """A name as part of a folder's name: no separators, no leading dot, of bounded length."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:100] or "run"


def _key_of(folder: Path) -> str | None:
    try:
        document = json.loads((folder / DATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("key") if isinstance(document, dict) else None


def _replace(folder: Path, new: Path, old: Path, key: str) -> None:
    """Puts the new folder in place of one with the same key; that comes back if this fails."""
    if not folder.exists():
        new.rename(folder)
        return
    if _key_of(folder) != key:
        message = "this is not an earlier report of the same, so it is left alone"
        raise UserError.at(str(folder), message, None, "move it away")
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise


@contextmanager
def _alone_in(reports: Path) -> Iterator[None]:
    """Holds a lock on the folder of reports, where its file system has locks."""
    handle = os.open(reports, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
