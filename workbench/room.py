"""Whether the store has room for the checkpoints of a run: asked before the run begins."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from workbench.core.footprint import checkpoint_bytes, whole_weights_bytes
from workbench.errors import StoreError, shortage
from workbench.spec.run import RunSpec
from workbench.track.store import Store

# Metrics, scores and the record of a short run, with what a file system needs for itself.
OTHER_BYTES = 1 << 20


def require_room(
    spec: RunSpec,
    vocab_size: int,
    steps: int | None,
    store: Store,
    say: Callable[[str], None],
    *,
    in_parts: bool = False,
) -> None:
    """Lets a run begin whose first checkpoint fits; says so where those that it keeps do not.

    `in_parts`: each process saves its part of the model, and the last checkpoint has the weights in
    one file beside them.

    Raises:
        StoreError: not even one checkpoint fits: the run would be lost at its first save.
    """
    one = checkpoint_bytes(spec, vocab_size)
    at_last = whole_weights_bytes(spec, vocab_size) if in_parts else 0
    saves = _saves(spec, steps)
    first = one + (at_last if saves == 1 else 0)
    try:
        home = next(path for path in (store.home, *store.home.parents) if path.exists())
        free = shutil.disk_usage(home).free
    except OSError:
        return  # whoever writes there will say why that cannot be
    if free < first + OTHER_BYTES:
        message = f"there is no room for a checkpoint: {shortage(first + OTHER_BYTES, free)}"
        raise StoreError.at(str(store.home), message, None, "another place, by WB_HOME")
    # The new one is whole before the oldest goes.
    kept = min(spec.checkpoint.save_total_limit + 1, saves)
    if free < kept * one + at_last + OTHER_BYTES:
        beside = f", the last with {at_last:,} more for its weights in one file" if at_last else ""
        say(
            f"warning: {store.home} has room for {free // one} checkpoints of {one:,} bytes, and "
            f"up to {kept} will be there at once{beside}"
        )


def _saves(spec: RunSpec, steps: int | None) -> int:
    """The most checkpoints that the run can come to save."""
    every = spec.checkpoint.save_steps
    if steps is None:
        return spec.checkpoint.save_total_limit + 1
    if spec.checkpoint.save_minutes:
        return steps
    return 1 + (steps - 1) // every if every else 1
