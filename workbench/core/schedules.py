"""What follows from the run's position: its end and cadences, learning rates, ramps, the trace."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

from workbench.core.data.batches import TrainStream
from workbench.errors import UserError
from workbench.spec.profiles import RAMPS
from workbench.spec.run import RunSpec

# Steps whose time is not counted: compilation, first touches of memory, caches filling. A run with
# too few beside them has no throughput, and the interval stays unknown: it could have had one.
WARM_UP_STEPS = 10
LEAST_TIMED_STEPS = 5


def last_step(spec: RunSpec, stream: TrainStream) -> int | None:
    """The step after which the run ends: its plan, or before it (`training.stop_at_step`).

    None: where the stream ends, or before it; see `is_last`.
    """
    planned = planned_steps(spec, stream)
    if planned is None:
        return None
    return min(planned, spec.training.stop_at_step or planned)


def is_last(
    spec: RunSpec, stream: TrainStream, step: int, last: int | None, unread: int = 0
) -> bool:
    """Whether the run ends after this step; `last` is its `last_step`.

    A stream is asked whether it holds one more update than the `unread` ones up to `step`.
    """
    if last is not None:
        return step >= last
    if spec.training.stop_at_step and step >= spec.training.stop_at_step:
        return True
    return not stream.has_next((unread + 1) * spec.sequences_per_update)


def planned_steps(spec: RunSpec, stream: TrainStream) -> int | None:
    """The step at which schedules end: as planned, or where one pass over the data does.

    None: a stream whose length is only known when it has been read.
    """
    if spec.training.steps:
        return spec.training.steps
    if stream.is_open_ended:
        return None
    assert stream.windows_per_epoch is not None
    steps = stream.windows_per_epoch // spec.sequences_per_update
    if not steps:
        raise UserError.at(
            "training.steps",
            f"one pass over the data has {stream.windows_per_epoch} windows, and one update takes "
            f"{spec.sequences_per_update}",
            0,
            "a smaller batch, or more text",
        )
    return steps


def is_evaluated(spec: RunSpec, step: int, last: int | None) -> bool:
    """Whether the run is evaluated after this step; `last` is the step at which it ends (None: not
    known yet)."""
    every = spec.evaluation.eval_steps
    return step in (0, last) or (every > 0 and step % every == 0)


def timed_steps(start: int, last: int) -> tuple[int, int] | None:
    """The first and the last step over which throughput is measured, of those after `start`.

    None: too few are left beside the warm-up.
    """
    warm = start + WARM_UP_STEPS
    return (warm + 1, last) if last - warm >= LEAST_TIMED_STEPS else None


def is_logged(spec: RunSpec, step: int, last: int | None) -> bool:
    """Whether this step leaves a row of metrics."""
    return step == 1 or step % spec.telemetry.log_steps == 0 or is_evaluated(spec, step, last)


def learning_rate(spec: RunSpec, step: int, peak: float | None = None) -> float:
    """The learning rate at which update `step` (from 1) is made; `peak` defaults to AdamW's.

    Linear warm-up reaches the peak at step `warmup_steps`: the first step trains at peak / warm-up,
    not at 0. The decay then reaches `min_lr_ratio` x peak at the last step, so that the whole
    range is used.
    """
    peak = spec.optimizer.lr if peak is None else peak
    floor = spec.schedule.min_lr_ratio
    warmup, steps = spec.warmup_steps, spec.training.steps
    if step <= warmup:
        return peak * step / warmup
    if spec.schedule.decay == "constant":  # the only one of a run without a planned end
        return peak
    progress = (step - warmup) / (steps - warmup)
    match spec.schedule.decay:
        case "linear":
            return peak * (1.0 - (1.0 - floor) * progress)
        case "cosine":
            return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class ModelValues:
    """The scheduled values of the model at one update; a shift is relative to the initial value."""

    primary_weight: float | None
    shared_gate_shift: float
    routed_gate_shift: float
    diversity_lambda: float


def model_values(spec: RunSpec, step: int) -> ModelValues:
    """The model's values at update `step`; before the first update (0) those of its start."""
    model = spec.model
    primary = model.top_k_primary_weight
    if primary is not None and model.top_k_primary_weight_final is not None:
        end = model.top_k_primary_weight_final
        primary = ramp(primary, end, ramp_steps(spec, "top_k_primary_weight_schedule"), step)

    def shift(start: float | None, end: float | None) -> float:
        if start is None or end is None:
            return 0.0
        return ramp(start, end, ramp_steps(spec, "gate_schedule"), step) - start

    penalty = model.expert_diversity_lambda or 0.0
    if penalty:
        penalty = ramp(0.0, penalty, ramp_steps(spec, "expert_diversity_schedule"), step)
    return ModelValues(
        primary,
        shift(model.shared_gate_init, model.shared_gate_final),
        shift(model.routed_gate_init, model.routed_gate_final),
        penalty,
    )


def ramp(start: float, end: float, steps: int, step: int) -> float:
    """Half a cosine from `start`, at update 1 and before, to `end`, at update `steps` and after."""
    if step == 0:
        return start
    if step >= steps:
        return end
    progress = (step - 1) / (steps - 1)
    return start + (end - start) * (0.5 - 0.5 * math.cos(math.pi * progress))


def ramp_steps(spec: RunSpec, prefix: str) -> int:
    """The length in updates of the ramp whose fields begin with `prefix`."""
    given: int | None = getattr(spec.model, f"{prefix}_steps")
    if given is not None:
        return given
    ratio: float = getattr(spec.model, f"{prefix}_ratio")
    # A product a rounding above a whole number (0.07 * 100) is that number.
    return math.ceil(round(ratio * spec.training.steps, 6))


def ramp_tokens(spec: RunSpec) -> dict[str, int] | dict[str, str]:
    """Token counts at which the ramps of the model end, by the prefix of their fields."""
    values = spec.model.model_dump()
    ends = {
        prefix: ramp_steps(spec, prefix) * spec.tokens_per_step
        for prefix, one in RAMPS.items()
        if one.is_on(values)
    }
    return ends or {"not_applicable": "no value of the model is ramped"}


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


def planned_trace(spec: RunSpec, steps: int) -> str:
    """The trace that `steps` updates of the spec will leave."""
    trace = RateTrace()
    for step in range(1, steps + 1):
        trace.update(step * spec.tokens_per_step, learning_rate(spec, step))
    return trace.hexdigest()
