"""The list of a run's files on a server with their hashes, by which fetched ones are checked.

The list is an artifact of the run; its own hash is a tag. It is sent last, after every file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import UserError
from workbench.json_files import parse_json

FILES = "files.json"
FILES_TAG = "workbench.files_sha256"
FETCHED = "server.json"  # in a folder that was fetched: where from
_SAFE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_fetched(folder: Path) -> bool:
    """Whether a run folder is a copy of what a server has."""
    return (folder / FETCHED).exists()


def list_files(hashes: Mapping[str, str]) -> tuple[str, str]:
    """The text of the list, and its hash."""
    text = json.dumps({"files": dict(hashes)}, indent=1, sort_keys=True) + "\n"
    return text, hashlib.sha256(text.encode()).hexdigest()


def send_list(client: Any, run_id: str, hashes: Mapping[str, str], sent: str | None) -> str:
    """Sends the list where the server has another one; returns its hash.

    Args:
        hashes: name of a file among the artifacts -> SHA-256.
        sent: the hash of the list that is there.
    """
    text, sha256 = list_files(hashes)
    if sha256 != sent:
        client.log_text(run_id, text, FILES)
        client.set_tag(run_id, FILES_TAG, sha256)
    return sha256


def read_list(content: bytes, sha256: str, place: str) -> dict[str, str]:
    """The files that a list names, each with its SHA-256.

    Raises:
        UserError: it is not the list of that hash, or names a file that no run has.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        message = "this is not the list of files that was logged"
        raise UserError.at(f"{place}: {FILES}", message, found, sha256)
    try:
        document = parse_json(content)
        files = document["files"]
        pairs = {str(name): str(value) for name, value in files.items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise UserError.at(f"{place}: {FILES}", f"not a list of files: {error}") from None
    for name, value in pairs.items():
        if not _SAFE.fullmatch(name) or not _SHA256.fullmatch(value):
            message = "no run has a file of this name, or its hash is none"
            raise UserError.at(f"{place}: {FILES}", message, name)
    return pairs
