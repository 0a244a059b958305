"""Whether this process is one of several that train one model, and which: the environment says."""

from __future__ import annotations

import os

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and whoever starts processes as it does, sets in the environment of each."""


def is_launched() -> bool:
    """Whether this process was started as one of several, by torchrun or in its manner."""
    return all(name in os.environ for name in LAUNCHED)


def rank() -> int:
    """The number of this process among those that were started with it; 0 by itself."""
    given = os.environ["RANK"] if is_launched() else ""
    return int(given) if given.isdecimal() else 0
