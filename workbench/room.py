"""Whether the store has room for the checkpoints of a run: asked before the run begins."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from workbench.core.footprint import checkpoint_bytes
from workbench.errors import StoreError, shortage
from workbench.spec.run import RunSpec
from workbench.track.store import Store

# Metrics, scores and the record of a short run, with what a file system needs for itself.
OTHER_BYTES = 1 << 20


def require_room(
    spec: RunSpec, vocab_size: int, steps: int | None, store: Store, say: Callable[[str], None]
) -> None:
    """Lets a run begin whose first checkpoint fits; says so where those that it keeps do not.

    Raises:
        StoreError: not even one checkpoint fits: the run would be lost at its first save.
    """
    one = checkpoint_bytes(spec, vocab_size)
    try:
        home = next(path for path in (store.home, *store.home.parents) if path.exists())
        free = shutil.disk_usage(home).free
    except OSError:
        return  # whoever writes there will say why that cannot be
    if free < one + OTHER_BYTES:
        message = f"there is no room for a checkpoint: {shortage(one + OTHER_BYTES, free)}"
        raise StoreError.at(str(store.home), message, None, "another place, by WB_HOME")
    # The new one is whole before the oldest goes.
    kept = min(spec.checkpoint.save_total_limit + 1, _saves(spec, steps))
    if free < kept * one + OTHER_BYTES:
        say(
            f"warning: {store.home} has room for {free // one} checkpoints of {one:,} bytes, and "
            f"up to {kept} will be there at once"
        )


def _saves(spec: RunSpec, steps: int | None) -> int:
    """The most checkpoints that the run can come to save."""
    every = spec.checkpoint.save_steps
    if spec.checkpoint.save_minutes or steps is None:
        return spec.checkpoint.save_total_limit + 1
    return 1 + (steps - 1) // every if every else 1
