"""What can be known of a run before it starts, as leaves of the comparison checklist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Foreseen:
    """The effective facts that a spec and its data decide.

    `facts` hold at every point of the run; None is what the run will not have. `points` are the
    token counts after which it is evaluated, in their order, None where its end is not known (a
    stream). `at` gives what is known of one of these points.
    """

    facts: Mapping[str, Any]
    points: tuple[int, ...] | None
    at: Callable[[int], Mapping[str, Any]]
