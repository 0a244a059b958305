"""How the runs of a study share the machine: so many at once, each with the same threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from workbench.errors import UserError
from workbench.plan import expected_device, plan
from workbench.spec.run import RunSpec
from workbench.track.store import Store

# Of the memory that is free now; the rest is for what the prediction does not know.
_SHARE = 0.9


@dataclass(frozen=True)
class Share:
    """`at_once` runs at a time on `threads` threads each, and why not more."""

    at_once: int
    threads: int
    why: str

    @property
    def words(self) -> str:
        """Such as "2 threads"."""
        return "1 thread" if self.threads == 1 else f"{self.threads} threads"


def cores() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_machine(
    specs: Sequence[RunSpec], store: Store, threads: int | None, most: int | None
) -> Share:
    """How many of these runs to train at once.

    Args:
        threads: of each run, where that is frozen already: results of other thread counts differ
            in their last digits, and their speeds are not comparable.
        most: the most at once that the user wants; None: as many as cores and memory take.

    Raises:
        UserError: OMP_NUM_THREADS is no count.
    """
    count = cores()
    given = threads or threads_of_environment()
    on_cpu = all(expected_device(spec) == "cpu" for spec in specs)
    limits = {f"{len(specs)} runs": max(1, len(specs))}
    limits[f"{count} CPUs"] = max(1, count // (given or 1))
    if most is not None:
        limits["as asked for"] = most
    if not on_cpu:
        limits["one device"] = 1
    at_once = min(limits.values())
    if at_once > 1:
        each = max(plan(spec, store)["memory_gb"] for spec in specs)
        free = psutil.virtual_memory().available / 1e9
        limits[f"{free:.1f} GB free, {each:.2f} GB a run"] = max(1, int(_SHARE * free / each))
        at_once = min(limits.values())
    why = next(name for name, limit in limits.items() if limit == at_once)
    return Share(at_once, given or max(1, count // at_once), why)


def threads_of_environment() -> int | None:
    """OMP_NUM_THREADS, where it is set.

    Raises:
        UserError: it is no count.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    if given is None:
        return None
    if not given.isdigit() or int(given) < 1:
        raise UserError.at("OMP_NUM_THREADS", "the threads of a run", given, "a count from 1 on")
    return int(given)
