"""Standard output: lines and JSON documents, written at once or refused with a clear error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, TextIO

from workbench.errors import StoreError, reason_of

PLACE = "standard output"


def write_line(text: str) -> None:
    """Writes a line to standard output, now.

    Raises:
        StoreError: it is full or closed.
        BrokenPipeError: nobody reads it any more.
    """
    if sys.stdout is None:
        raise StoreError.at(PLACE, "it is closed")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StoreError.at(PLACE, reason_of(error)) from error


def write_document(document: Any) -> None:
    """Writes one strict JSON document to standard output. Raises what `write_line` does."""
    from workbench.track.record import strict

    write_line(json.dumps(strict(document), indent=1, allow_nan=False, default=str))


def complain(text: str) -> None:
    """Writes a line to standard error, where that can be."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def abandon_broken_streams() -> None:
    """Drops what standard output or error cannot take, so that the interpreter's end is quiet."""
    streams: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()
