"""The training loop: one update after another, each yielded with what it measured.

N sequences of an update over all processes, S sequence length, T tokens of a micro-batch (batch x
sequence) of one process, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from workbench.core.data.batches import TokenDigest, TrainStream
from workbench.core.loss_settings import LossSettings
from workbench.core.losses import LossSums, linear_cross_entropy
from workbench.core.model import TrainingForward, Transformer, training_forward
from workbench.core.optim import rates, set_learning_rates
from workbench.core.parallel import ALONE, Team
from workbench.core.precision import Precision
from workbench.core.schedules import (
    RateTrace,
    is_last,
    is_logged,
    last_step,
    learning_rate,
    model_values,
)
from workbench.core.sharding import is_split, part
from workbench.core.telemetry import ExpertReport, ExpertWatch, RouteCounter, report
from workbench.core.terms import (
    Term,
    balance_of,
    balance_term,
    diversity_term,
    route_fractions,
)
from workbench.core.workspace import Workspace
from workbench.errors import TrainingStoppedError
from workbench.spec.run import RunSpec

Loss = Callable[[Tensor, Tensor, Tensor, LossSettings, Precision, Workspace], LossSums]
"""A loss backend: sums over one micro-batch, see `losses.linear_cross_entropy`."""


LEARNED_NLL = 1e-3
"""Nats per token above which something is left to learn, so that there must be a gradient."""


@dataclass(frozen=True)
class StepResult:
    """What one update measured. Losses are means over all its tokens, in nats per token.

    `nll` is the plain negative log-likelihood; `objective` is what was optimised: nll + smoothing
    + z_loss + the contributions of `balance` and `diversity` (None: not part of it). `grad_norm` is
    the global L2 norm before clipping. `rates` are the learning rates of the parameter groups.
    `experts` is the expert telemetry, where it was due. `seconds` covers the update alone: data,
    forward, backward, optimizer; not evaluation, saving or logging. `is_last`: the run ends here.
    """

    step: int
    tokens: int
    learning_rate: float
    rates: dict[str, float]
    nll: float
    objective: float
    smoothing: float
    z_loss: float
    balance: Term | None
    diversity: Term | None
    grad_norm: float
    experts: ExpertReport | None
    seconds: float
    is_last: bool = False


@dataclass
class TrainState:
    """All that moves while a run trains; what a checkpoint has to hold."""

    model: Transformer
    optimizers: list[torch.optim.Optimizer]
    stream: TrainStream
    digest: TokenDigest
    trace: RateTrace
    watch: ExpertWatch
    step: int = 0
    tokens: int = 0


def train(
    spec: RunSpec,
    state: TrainState,
    forward: TrainingForward | None = None,
    loss: Loss = linear_cross_entropy,
    clock: Callable[[], float] = time.perf_counter,
    team: Team = ALONE,
) -> Iterator[StepResult]:
    """Trains from `state.step` to the last step, yielding after each update.

    What the caller does between two results (evaluate, save, log) is outside the clock. `forward`
    is the callable to train through, the model's own unless it was compiled; `loss` the backend.
    All processes of the `team` yield the same results, but for the seconds.

    Raises:
        TrainingStoppedError: a loss or a gradient is not finite, there is no gradient, or an expert
            gets tokens and none; the weights are those before the update.
    """
    training = spec.training
    model, optimizers = state.model, state.optimizers
    forward = team.through(model, forward or training_forward(model, None))
    device = model.head_weight.device
    settings = loss_settings(spec)
    workspace = Workspace(direct=not team.reduces)
    tied = model.lm_head is None
    model.embed_tokens.sparse_gradient = tied and workspace.direct and device.type == "cpu"
    model.observe(spec.telemetry.moe)
    counter = RouteCounter(model, team)
    steps = last_step(spec, state.stream)
    ended = read_together(state, team, lambda: is_last(spec, state.stream, state.step, steps))

    while not ended:
        began = clock()
        step = state.step + 1
        set_learning_rates(optimizers, spec, step)
        values = model_values(spec, step)
        model.set_values(values)
        ended = read_together(state, team, partial(read_ahead, spec, state, step, steps))
        windows = state.stream.next_batch(spec.sequences_per_update)  # [N, S + 1]
        scored = windows.shape[0] * training.seq_len
        micro_batches = [
            torch.from_numpy(micro).to(device)
            for micro in np.split(team.rows(windows), training.gradient_accumulation_steps)
        ]
        fractions = route_fractions(spec, forward, micro_batches, team)

        # Every micro-batch weighs as many tokens as it has: sums, divided by the whole update's,
        # over all processes.
        sums: list[Tensor] = []  # of each micro-batch, [5] on the device
        extras = []
        for number, batch in enumerate(micro_batches, 1):
            with team.accumulating(last=number == len(micro_batches)):
                hidden, found = forward(batch[:, :-1])
                extras.append(found)
                parts = loss(
                    hidden.flatten(0, 1),
                    model.head_weight,
                    batch[:, 1:].flatten(),
                    settings,
                    model.precision,
                    workspace,
                )
                objective = parts.objective / scored
                term = torch.zeros_like(parts.objective)
                if spec.model.router_aux_loss_weight:
                    term = balance_of(found, fractions, scored, team)
                    objective = objective + spec.model.router_aux_loss_weight * term
                objective.backward()
            each = (parts.nll, parts.objective, parts.smoothing, parts.z, term)
            sums.append(torch.stack([part.detach() for part in each]))
        team.complete_gradients(model)
        # Read once, when all is under way: every read makes a GPU run out of work.
        *parts_of_loss, balance = team.total(np.sum(torch.stack(sums).tolist(), axis=0)).tolist()
        nll, total, smoothing, z_loss = (part / scored for part in parts_of_loss)
        terms = [
            balance_term(spec, balance),
            diversity_term(model, values.diversity_lambda),
        ]
        total += sum(term.contribution for term in terms if term)

        routes = counter.count(windows[:, :-1], extras)
        experts = None
        if spec.telemetry.moe and is_logged(spec, step, step if ended else None):
            experts = report(model, routes, extras, scored, team)
        norm = clip_gradients(model, training.max_grad_norm, team)
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise not_finite(model, step, total, norm, team)
        if norm == 0 and nll > LEARNED_NLL and not has_gradient(model, team):
            raise no_gradient(step, nll)
        state.watch.check(step, routes, team)
        for optimizer in optimizers:
            optimizer.step()
        workspace.reclaim(model.head_weight)
        for optimizer in optimizers:
            optimizer.zero_grad()
        synchronize(device)

        rate = learning_rate(spec, step)
        state.step = step
        state.tokens += scored
        state.digest.update(windows)
        state.trace.update(state.tokens, rate)
        yield StepResult(
            step=step,
            tokens=state.tokens,
            learning_rate=rate,
            rates=rates(optimizers),
            nll=nll,
            objective=total,
            smoothing=smoothing,
            z_loss=z_loss,
            balance=terms[0],
            diversity=terms[1],
            grad_norm=norm,
            experts=experts,
            seconds=clock() - began,
            is_last=ended,
        )


def read_ahead(spec: RunSpec, state: TrainState, step: int, last: int | None) -> bool:
    """Reads what this step trains on; returns whether the run ends with it."""
    state.stream.require(spec.sequences_per_update)
    return is_last(spec, state.stream, step, last, unread=1)


def read_together(state: TrainState, team: Team, read: Callable[[], bool]) -> bool:
    """Reads what is to be trained on, and takes nothing of it yet: where the stream cannot be read,
    or a signal ends the wait for it, in one process of the team, no process has begun the step and
    the state of all is whole.
    """
    # Other data are there already: nothing that one process waits for.
    return team.agreed(read) if state.stream.is_open_ended else read()


def loss_settings(spec: RunSpec) -> LossSettings:
    """What the spec asks of the loss."""
    training = spec.training
    return LossSettings(
        block_vocab=training.loss_block_vocab,
        chunk_tokens=training.loss_chunk_tokens,
        label_smoothing=training.label_smoothing,
        z_loss=training.z_loss,
    )


def clip_gradients(model: nn.Module, max_norm: float, team: Team = ALONE) -> float:
    """Scales all gradients together to a global L2 norm of at most `max_norm` (0: never).

    Returns the norm before clipping. Gradients whose norm is not finite are left as they are.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    value = team.gradient_norm(gradients)
    if max_norm > 0 and math.isfinite(value) and value > max_norm:
        torch._foreach_mul_([part(one) for one in gradients], max_norm / value)
    return value


def not_finite(
    model: nn.Module, step: int, objective: float, norm: float, team: Team = ALONE
) -> TrainingStoppedError:
    """The error that names what was not finite, and where it shows first."""
    what = f"the loss is {objective}" if not math.isfinite(objective) else f"its norm is {norm}"
    own = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(part(parameter.grad)).all())
    ]
    broken = list(dict.fromkeys(chain.from_iterable(team.gathered(own))))
    where = f"; gradients not finite in {', '.join(broken[:3])}" if broken else ""
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    return TrainingStoppedError.at(
        f"step {step}",
        f"loss or gradient is not finite ({what}{where}{more}); stopped before the update",
    )


def has_gradient(model: nn.Module, team: Team = ALONE) -> bool:
    """Whether any gradient is not zero. The norm does not say: its squares may be too small."""
    gradients = (part(p.grad) for p in model.parameters() if p.grad is not None)
    return any(team.highest(int(any(bool(one.any()) for one in gradients))))


def no_gradient(step: int, nll: float) -> TrainingStoppedError:
    """The error of an update that would change nothing, with a loss that is not small."""
    return TrainingStoppedError.at(
        f"step {step}",
        f"the gradient of all parameters is exactly zero at {nll:.4g} nats per token, so that "
        "nothing is learned (weights too large or too small for float32 do that)",
    )


def require_finite_weights(state: TrainState, team: Team = ALONE) -> None:
    """Checks what an update has made of the weights, before they are scored or saved.

    Raises:
        TrainingStoppedError: a weight is not finite; loss and gradients before it were. Or the
            processes of the team have come apart, in weights or in the order of their data.
    """
    sums, broken = [], None
    for name, parameter in state.model.named_parameters():
        own = part(parameter.detach())
        if not math.isfinite(float(own.sum(dtype=torch.float64))):
            broken = name
            break
        if not is_split(parameter):
            # Of the bits: a sum of integers has no rounding, which differs with the threads.
            sums.append(int(own.contiguous().view(torch.int32).sum(dtype=torch.int64)))
    if found := [one for one in team.gathered(broken) if one]:
        message = f"the update left weights that are not finite, first in {found[0]}"
        raise TrainingStoppedError.at(f"step {state.step}", message)
    team.require_same("the state", (state.step, state.digest.hexdigest(), sums))


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a clock read next measures work and not its launch."""
    match device.type:
        case "cuda":
            torch.cuda.synchronize(device)
        case "mps":
            torch.mps.synchronize()
