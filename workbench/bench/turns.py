"""One arm's turns in `wb bench`: its warm-up, its budget of seconds, and what its steps average to.

A step that reports on the experts (`telemetry.moe`, on steps that leave a row of metrics) takes
longer than the others, and a bench is too short to meet such steps as often as a run does. So
every second step reports, and averages weigh the two kinds as the spec's cadence does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workbench.bench.process import Worker
from workbench.spec.run import RunSpec

Say = Callable[[str], None]
Turn = dict[str, Any]
"""The answer of a worker to `steps`, see `bench.arms.Workbench.steps`."""

# The first step compiles and touches memory for the first time, the second still fills caches.
WARM_UP_STEPS = 2
# Share of an arm's budget after which its warm-up ends early.
WARM_UP_SHARE = 0.25
# `train` must not come to its end.
NO_END = 1_000_000


def benched(spec: RunSpec) -> dict[str, Any]:
    """The spec with random ids for its data, without an end, its reports due at every second step
    (every step, where that is the spec's cadence).

    Raises:
        UserError: the token shard of the spec cannot be read.
    """
    document = spec.model_dump(mode="json")
    document["data"] = {"dataset": "random"}
    document["evaluation"]["sets"] = None
    if spec.data.dataset == "tokens":
        from workbench.core.data.shard_tokenizer import vocab_size_of_shard

        document["tokenizer"] = {"vocab_size": vocab_size_of_shard(spec)}
    document["training"] |= {"steps": NO_END, "stop_at_step": None}
    document["schedule"]["warmup_steps"] = spec.warmup_steps
    document["evaluation"]["eval_steps"] = 0
    document["telemetry"]["log_steps"] = 1 if logged_share(spec) == 1 else 2
    return document


def logged_share(spec: RunSpec) -> float:
    """The share of a run's steps that leave a row of metrics, and so report on the experts."""
    log, evaluate = spec.telemetry.log_steps, spec.evaluation.eval_steps
    if not evaluate:
        return 1 / log
    return 1 / log + 1 / evaluate - 1 / math.lcm(log, evaluate)


class Turns:
    """One arm's measurements."""

    def __init__(self, worker: Worker, spec: RunSpec, say: Say) -> None:
        self.worker, self.spec, self._say = worker, spec, say
        self.facts: dict[str, Any] = {}
        self.turns: list[Turn] = []
        self.parts: dict[str, float] = {}
        self.note: str | None = None
        reports = spec.telemetry.moe and worker.kind == "spec"
        self.reported_share = logged_share(spec) if reports else 0.0
        # A turn needs a step of either kind.
        self.least = 2 if 0 < self.reported_share < 1 else 1

    @property
    def name(self) -> str:
        """What the arm is called."""
        return self.worker.name

    def warm_up(self, budget: float) -> None:
        """Takes the uncounted steps; where one is beyond the budget, it is the measurement."""
        compiles = self.spec.training.compile and self.worker.kind == "spec"
        self._say(f"warming up: {self.name}")
        for number in range(WARM_UP_STEPS):
            last = self.worker.call("steps", count=1)
            self.once = last["seconds"][0]
            if self.once > budget * WARM_UP_SHARE and not (compiles and number == 0):
                break
        if self.once > budget:
            self.note = (
                f"{self.name}: one step took {self.once:.0f} s, over the {budget:.0f} s for "
                "this arm; that step, without a warm-up before it, is the measurement"
            )
            self._say(self.note)
            self.turns.append(last)

    def plan(self, rounds: int, steps: int, budget: float) -> list[int]:
        """Timed steps of each turn to come; none where the measurement is made."""
        if self.turns:
            return []
        affordable = budget / self.once
        turns = max(1, min(rounds, int(affordable / self.least)))
        count = max(1, min(steps, int(affordable / turns)))
        return [math.ceil(count / self.least) * self.least] * turns

    def take(self, count: int) -> None:
        """One turn."""
        self.turns.append(self.worker.call("steps", count=count))

    def split(self, count: int) -> None:
        """Measures the parts of a step apart from its speed, where that disturbs it."""
        count = math.ceil(count / self.least) * self.least
        self.parts = self._part_means([self.worker.call("steps", count=count, exact=True)])

    def step_seconds(self) -> float:
        """Median seconds of a step."""
        seconds = [s for turn in self.turns for s in turn["seconds"]]
        return weighed(seconds, _reported(self.turns), self.reported_share, statistics.median)

    def part_seconds(self) -> dict[str, float]:
        """Mean seconds of the parts of a step."""
        return self.parts or self._part_means(self.turns)

    def turn_seconds(self, turn: Turn) -> float:
        """Mean seconds of a step in one turn."""
        return weighed(turn["seconds"], turn["reported"], self.reported_share, statistics.mean)

    def tokens_per_s(self) -> float:
        """Tokens trained in a second, by the median step."""
        return self.spec.tokens_per_step / self.step_seconds()

    def peak_gb(self) -> float:
        """The most memory that training took so far, in 1e9 bytes."""
        return float(self.turns[-1]["peak_bytes"]) / 1e9

    def _part_means(self, turns: list[Turn]) -> dict[str, float]:
        return {
            part: weighed(
                [s for turn in turns for s in turn["parts"][part]],
                _reported(turns),
                self.reported_share,
                statistics.mean,
            )
            for part in turns[0]["parts"]
        }


def weighed(
    seconds: Sequence[float],
    reported: Sequence[bool],
    share: float,
    average: Callable[[list[float]], float],
) -> float:
    """The average of steps of which `share` report; of those there are where one kind is missing.

    `reported` tells which of the steps did.
    """
    kinds: dict[bool, list[float]] = {True: [], False: []}
    for value, kind in zip(seconds, reported, strict=True):
        kinds[kind].append(value)
    if not (kinds[True] and kinds[False]):
        return average(list(seconds))
    others = average(kinds[False])
    return others + share * (average(kinds[True]) - others)


def pairs(mine: list[Turn], theirs: list[Turn]) -> Iterator[tuple[Turn, Turn]]:
    """The turns of each round; an arm measured by a single step is in every round."""
    for turn in range(max(len(mine), len(theirs))):
        yield mine[min(turn, len(mine) - 1)], theirs[min(turn, len(theirs) - 1)]


def _reported(turns: list[Turn]) -> list[bool]:
    return [kind for turn in turns for kind in turn["reported"]]


def telemetry_cost(watched: Turns, unwatched: Turns) -> dict[str, Any] | None:
    """How much longer a step takes with expert telemetry than without, as a share of the latter.

    `cost` is at the spec's cadence; `of_reporting_step` and `of_other_step` are its two sides (None
    where the spec has no such steps): paths are measured at every step, gradients and routes are
    summed up where a row of metrics is due. Medians over rounds. Writing the rows is outside the
    step, and not in it. None where too few steps were taken to tell.
    """
    share = watched.reported_share
    rounds: dict[str, list[float]] = {"cost": [], "of_reporting_step": [], "of_other_step": []}
    for on, off in pairs(watched.turns, unwatched.turns):
        kinds = set(on["reported"])
        if 0 < share < 1 and len(kinds) < 2:
            return None
        without = statistics.mean(off["seconds"])
        rounds["cost"].append(watched.turn_seconds(on) / without - 1)
        for name, kind in (("of_reporting_step", True), ("of_other_step", False)):
            mine = zip(on["seconds"], on["reported"], strict=True)
            if kind in kinds:
                mean = statistics.mean(s for s, reported in mine if reported == kind)
                rounds[name].append(mean / without - 1)
    return {
        **{name: statistics.median(found) if found else None for name, found in rounds.items()},
        "reporting_share": share,
        "by_round": rounds["cost"],
    }
