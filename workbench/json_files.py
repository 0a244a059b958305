"""Reads JSON that somebody else may have damaged: the document, or an error that says why not.

Stricter than the standard library: a name that stands twice, a number that is not finite, half of a
surrogate pair and a file without end are errors, not values that fail later and elsewhere.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 256 << 20
"""Longer than any document of this package by far; what is longer is a damaged file."""

_MOST_DIGITS = 308  # of a whole number: what is longer is beyond any float, and fails in a division


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """The document in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, too long, or no strict JSON.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > most_bytes:
        raise ValueError(f"{status.st_size:,} bytes are more than such a file ever has")
    return parse_json(path.read_bytes())


def parse_json(raw: bytes) -> Any:
    """The document of a text in UTF-8.

    Raises:
        ValueError: it is no strict JSON.
    """
    text = raw.decode("utf-8")
    try:
        found = json.loads(
            text,
            object_pairs_hook=_once,
            parse_float=_finite,
            parse_int=_whole,
            parse_constant=_refuse,
        )
        if "\\ud" in text.lower():  # the beginning of every surrogate
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"the number {text[:40]} is too large")
    return int(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
