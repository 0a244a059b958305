"""Values that follow the run's position: the learning rate, and the trace that proves it."""

from __future__ import annotations

import hashlib
import math
import struct

from workbench.spec.run import RunSpec


def learning_rate(spec: RunSpec, step: int) -> float:
    """The learning rate at which update `step` (1 to `training.steps`) is made.

    Linear warm-up reaches the peak at step `warmup_steps`: the first step trains at peak / warm-up,
    not at 0. The decay then reaches `min_lr_ratio` x peak at the last step, so that the whole
    range is used.
    """
    peak, floor = spec.optimizer.lr, spec.schedule.min_lr_ratio
    warmup, steps = spec.warmup_steps, spec.training.steps
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / (steps - warmup)
    match spec.schedule.decay:
        case "constant":
            return peak
        case "linear":
            return peak * (1.0 - (1.0 - floor) * progress)
        case "cosine":
            return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


class RateTrace:
    """A digest that chains the learning rate of every update with its token count.

    Two runs with equal traces at equal token counts trained at the same rates all along, whatever
    their schedules are called and however long they go on.
    """

    def __init__(self, state: str | None = None) -> None:
        self._digest = bytes.fromhex(state) if state else hashlib.sha256(b"lr trace 1").digest()

    def update(self, tokens: int, rate: float) -> None:
        """Adds an update made at `rate` that brought the run to `tokens` consumed."""
        link = self._digest + struct.pack("<Qd", tokens, rate)
        self._digest = hashlib.sha256(link).digest()

    def hexdigest(self) -> str:
        """The digest so far; also the state to continue from."""
        return self._digest.hex()


def planned_trace(spec: RunSpec) -> str:
    """The trace that the spec's whole run will leave."""
    trace = RateTrace()
    for step in range(1, spec.training.steps + 1):
        trace.update(step * spec.tokens_per_step, learning_rate(spec, step))
    return trace.hexdigest()
