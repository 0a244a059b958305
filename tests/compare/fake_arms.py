"""Arms of several seeds, made without training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import EVERY, full_record, full_spec, points, sha
from fake_runs import write_run as write_synced

from workbench.track.record import RunRecord


def write_run(folder: Path, record: RunRecord, **options: Any) -> Path:
    """`fake_runs.write_run`, without waiting for the disk at every row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        return write_synced(folder, record, **options)


def points_of_seed(seed: int, every: int = EVERY) -> list[Any]:
    """The evaluation points of a run whose windows come in the order of its seed: other text, which
    is not as long."""
    found = points(every=every)
    for point in found:
        point["order_digest"] = sha(f"{seed} {point['tokens']}")
        point["bytes"] += point["step"] * (seed % 5)
    return found


def write_arm(
    home: Path,
    name: str,
    shifts: dict[int, float],
    *,
    record: dict[str, Any] | None = None,
    noise: int | None = None,
    spread: float = 0.002,
    every: int = EVERY,
    **changes: Any,
) -> list[Path]:
    """The folders of an arm's runs.

    Args:
        shifts: seed -> how much the NLL of its run is above that of a run with shift 0.
        record: fields of every run's record.
        noise: draws what single documents cost; by default the seed does.
        spread: the standard deviation of that, in nats per token.
        every: how many steps apart it was evaluated; the spec is to say so too.
        changes: sections of every run's spec.
    """
    folders = []
    for seed, shift in shifts.items():
        run = f"{name}-s{seed}"
        made = full_record(
            run,
            spec=full_spec(seed=seed, name=run, **changes),
            points=points_of_seed(seed, every),
            **(record or {}),
        )
        drawn = seed if noise is None else noise
        folders.append(write_run(home / run, made, shift=shift, seed=drawn, spread=spread))
    return folders


def shifts(seeds: Sequence[int], mean: float, spread: float, draw: int = 0) -> dict[int, float]:
    """Seed -> a normal draw; with one `draw`, the same seed has the same luck in every arm."""
    rng = np.random.default_rng([draw, 77])
    return {seed: mean + spread * float(rng.standard_normal()) for seed in seeds}
