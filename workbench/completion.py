"""What the shell offers for an argument: runs and studies of the store, and specs beside them.

Names of folders are read and nothing else, so that a key press is answered at once; a store that
cannot be read offers nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def runs(incomplete: str) -> list[str]:
    """The runs of the store whose name begins so."""
    return _matching(_folders("runs"), incomplete)


def studies(incomplete: str) -> list[str]:
    """The studies that have begun, and study files."""
    return [*_matching(_folders("studies"), incomplete), *specs(incomplete)]


def specs_and_runs(incomplete: str) -> list[str]:
    """Specs in files, and runs of the store."""
    return [*specs(incomplete), *runs(incomplete)]


def specs(incomplete: str) -> list[str]:
    """YAML files, and the folders on the way to them."""
    folder, _, start = incomplete.rpartition("/")
    prefix = f"{folder}/" if folder or incomplete.startswith("/") else ""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(prefix or "."):
            if entry.name.startswith(".") and not start:
                continue
            if entry.is_dir():
                found.append(f"{prefix}{entry.name}/")
            elif entry.name.endswith((".yaml", ".yml")):
                found.append(f"{prefix}{entry.name}")
    return _matching(found, incomplete)


def _folders(part: str) -> Iterable[str]:
    from workbench.errors import UserError
    from workbench.track.store import Store

    with contextlib.suppress(OSError, UserError):
        return [path.name for path in Path(Store().home, part).iterdir() if path.is_dir()]
    return []


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
