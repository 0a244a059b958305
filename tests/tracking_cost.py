"""What following a run costs its steps: `python tests/tracking_cost.py [SECONDS]`.

Two kinds of numbers, each good enough to show one per cent on a machine that others use too.
Processor time counts what tracking itself uses, whatever else runs. The clock tells what steps
lose: MLflow is fed in short bursts, one every few seconds, so the steps during a burst are compared
with those just before and after it, which met the same machine. The same comparison half way
between two bursts, where nothing is fed, shows what noise alone gives.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_runs import sections

from workbench import run as runner
from workbench.recorder import Recorder
from workbench.spec.run import RunSpec
from workbench.track import feeder
from workbench.track.feeder import POLL_SECONDS, MlflowTracker
from workbench.track.mlflow_store import read_position
from workbench.track.store import Store

# As a run that goes on for long is fed, from its start; that start is over after some seconds.
_TURN_SECONDS = POLL_SECONDS * feeder.LONGEST_POLLS
_START_SECONDS = 10.0
_LEAST_NEIGHBOURS = 12
_LEAST_BURSTS = 5
_DRAWS = 4000


@dataclass
class Noted:
    """What was noted of a run, step by step and row by row, in seconds."""

    steps: list[float] = field(default_factory=list)  # of the clock, all between two updates
    trained: list[float] = field(default_factory=list)  # of processors, in the same time
    fed: list[float] = field(default_factory=list)  # of processors, by the feeder in that time
    rows: list[float] = field(default_factory=list)  # of the clock, to write and tell a row
    rows_processor: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Lost:
    """What steps lose to bursts of work beside them, as a share of their time."""

    share: float
    low: float  # 95 %
    high: float
    bursts: int


@dataclass(frozen=True)
class Cost:
    """What tracking costs where a row is logged every `log_steps` steps; times in seconds."""

    log_steps: int
    step_seconds: float  # the median
    row_seconds: float  # the median, of the clock, to write and tell a row where training waits
    row_processor: float  # the mean, of processors, for the same
    fed_processor: float  # the mean, of processors, that the feeder takes for a row
    rows_share: float  # `row_seconds` of the time of the steps
    core_share: float  # all processor time of tracking, of one core while the steps last
    processor_share: float  # the same, of the processor time that the steps take
    fed: Lost | None  # what steps lose while the feeder works; None: it never rested
    idle: Lost | None  # the same comparison where it rests


def measure(folder: Path, log_steps: int, seconds: float) -> Cost:
    """Trains for so long with a row every `log_steps` steps, followed by the store's database."""
    noted, store = Noted(), Store(folder / "mlruns")
    tracker = MlflowTracker(None, store, "workbench", poll_seconds=_TURN_SECONDS)

    class Noting(Recorder):
        def step(self, result: Any, logged: bool) -> None:
            super().step(result, logged)
            if result.step == 1:
                wait_for_position(tracker._folder)
            now = time.perf_counter(), time.process_time(), processor_seconds(tracker)
            if result.step > 1:
                for kind, after, before in zip(
                    (noted.steps, noted.trained, noted.fed), now, self.before, strict=True
                ):
                    kind.append(after - before)
            self.before = now

        def flush(self) -> None:
            clock, processor = time.perf_counter(), time.thread_time()
            wrote = bool(self._row)
            super().flush()
            if wrote:
                noted.rows_processor.append(time.thread_time() - processor)
                noted.rows.append(time.perf_counter() - clock)

    spec = RunSpec.model_validate(
        {
            "name": "followed",
            "seed": 1,
            **sections(
                folder,
                model={"hidden_size": 192, "num_hidden_layers": 2},
                training={"steps": 1_000_000, "batch_size": 4, "seq_len": 64},
                evaluation={"eval_steps": 0},
                telemetry={"log_steps": log_steps},
            ),
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Recorder", Noting)
        patch.setattr(runner, "tracker_for", lambda spec, store: tracker)
        patch.setattr(runner, "train", for_a_while(runner.train, seconds))
        runner.run(spec, store, ["run"], quiet=True)
    assert read_position(store.runs / "followed") is not None
    return cost_of(noted, log_steps)


def for_a_while(train: Any, seconds: float) -> Any:
    """`train` that ends so many seconds after the start of the feeder is over."""

    def trained(*arguments: Any, **options: Any) -> Any:
        end = math.inf
        for result in train(*arguments, **options):
            yield result
            if result.step == 1:
                end = time.monotonic() + _START_SECONDS + seconds
            if time.monotonic() > end:
                return

    return trained


def processor_seconds(tracker: MlflowTracker) -> float:
    """What the feeder's main thread has used, to the nanosecond."""
    assert tracker._child is not None
    return int(Path(f"/proc/{tracker._child.pid}/schedstat").read_text().split()[0]) / 1e9


def wait_for_position(folder: Path) -> None:
    """Until the feeder has reached the database."""
    deadline = time.monotonic() + 600  # it has a low priority, and what else runs goes first
    while read_position(folder) is None:
        assert time.monotonic() < deadline, "MLflow was never reached"
        time.sleep(0.05)


def cost_of(noted: Noted, log_steps: int) -> Cost:
    """The cost of what was noted, without the start of the feeder."""
    begin = int(np.searchsorted(np.cumsum(noted.steps), _START_SECONDS))
    steps, trained, fed = (
        np.array(values[begin:]) for values in (noted.steps, noted.trained, noted.fed)
    )
    is_busy = fed > 1e-5
    bursts = bursts_of(is_busy)
    # Whole turns of the feeder; all there is, where it works without a rest.
    whole = slice(bursts[0].stop, bursts[-1].stop) if len(bursts) > 1 else slice(0, len(steps))
    rows, processor = (
        np.array(values[begin // log_steps :][whole.start // log_steps : whole.stop // log_steps])
        for values in (noted.rows, noted.rows_processor)
    )
    middles = [(a.stop + b.start) // 2 for a, b in itertools.pairwise(bursts)]
    idle = [slice(m, m + one.stop - one.start) for m, one in zip(middles, bursts, strict=False)]
    step, row = float(np.median(steps)), float(np.median(rows))
    fed_seconds, spent = fed[whole].sum(), processor.sum()
    return Cost(
        log_steps=log_steps,
        step_seconds=step,
        row_seconds=row,
        row_processor=float(processor.mean()),
        fed_processor=float(fed_seconds / len(rows)),
        rows_share=row / (step * log_steps),
        core_share=float((fed_seconds + spent) / steps[whole].sum()),
        processor_share=float((fed_seconds + spent) / (trained[whole].sum() - spent)),
        fed=lost_to(bursts, steps, is_busy),
        idle=lost_to(idle, steps, is_busy),
    )


def lost_to(
    bursts: list[slice], steps: NDArray[np.float64], is_busy: NDArray[np.bool_]
) -> Lost | None:
    """What steps lose to the bursts, with an interval by bootstrap over them."""
    if len(bursts) < _LEAST_BURSTS:
        return None
    lost = np.array([excess(steps, is_busy, burst) for burst in bursts])
    share = lost * len(lost) / steps.sum()
    draws = np.random.default_rng(7).choice(share, (_DRAWS, len(share))).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Lost(float(share.mean()), float(low), float(high), len(share))


def bursts_of(is_busy: NDArray[np.bool_]) -> list[slice]:
    """The whole stretches of steps during which the feeder worked."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_busy, [False]]).astype(int)))
    found: list[slice] = []
    for start, stop in edges.reshape(-1, 2):
        if found and start - found[-1].stop < _LEAST_NEIGHBOURS:  # a short pause in one turn
            found[-1] = slice(found[-1].start, int(stop))
        else:
            found.append(slice(int(start), int(stop)))
    return [one for one in found if one.start > 0 and one.stop < len(is_busy)]


def excess(steps: NDArray[np.float64], is_busy: NDArray[np.bool_], burst: slice) -> float:
    """Seconds that the steps of a stretch take beyond as many like those around it."""
    reach = max(_LEAST_NEIGHBOURS, 2 * (burst.stop - burst.start))
    around = slice(max(0, burst.start - reach), burst.stop + reach)
    mask = ~is_busy[around]
    mask[burst.start - around.start : burst.stop - around.start] = False
    inside, outside = steps[burst], steps[around][mask]
    return float(len(inside) * (np.median(inside) - np.median(outside)))


if __name__ == "__main__":
    for cadence in (10, 1):
        with tempfile.TemporaryDirectory() as name:
            print(measure(Path(name), cadence, float((sys.argv[1:] or ["60"])[0])))
