"""Variants of the committed run of the original runner, each with some of its values changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ORIGINAL = Path(__file__).parents[1] / "data" / "legacy_run_gqa"

Document = dict[str, Any]


def legacy_run(
    folder: Path,
    change: Callable[[Document], None] = lambda document: None,
    table: Callable[[list[str]], list[str]] = lambda lines: lines,
) -> Path:
    """A folder as that runner left it, its record and the lines of its metrics changed."""
    folder.mkdir(parents=True)
    document = json.loads((ORIGINAL / "run_config.json").read_text())
    change(document)
    (folder / "run_config.json").write_text(json.dumps(document))
    lines = table((ORIGINAL / "metrics.csv").read_text().splitlines())
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder
