"""How many runs of a store may have tuned the model of an arm, beside those that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.track.store import RunEntry


def tuning_runs(
    arm: Sequence[RunEntry], compared: Sequence[RunEntry], entries: Sequence[RunEntry]
) -> int:
    """How many other runs of the store have the experiment and the model of one of the arm's."""
    mine = [_tuned(entry) for entry in arm]
    used = {entry.folder for entry in compared}
    return sum(
        1 for one in entries if one.folder not in used and one.record and _tuned(one) in mine
    )


def _tuned(entry: RunEntry) -> tuple[Any, Any]:
    assert entry.record
    spec = entry.record.spec
    return (spec.get("tracking") or {}).get("experiment"), spec.get("model")
