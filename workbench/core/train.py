"""The training loop: one update after another, each yielded with what it measured.

T tokens of a micro-batch (batch x sequence), H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from workbench.core.data.batches import TokenDigest, WindowStream
from workbench.core.losses import LossSettings, linear_cross_entropy
from workbench.core.model import Transformer
from workbench.core.optim import set_learning_rate
from workbench.core.schedules import RateTrace, learning_rate
from workbench.core.workspace import Workspace
from workbench.errors import TrainingStoppedError
from workbench.spec.run import RunSpec


@dataclass(frozen=True)
class StepResult:
    """What one update measured. Losses are means over all its tokens, in nats per token.

    `nll` is the plain negative log-likelihood; `objective` is what was optimised: nll + smoothing
    + z_loss. `grad_norm` is the global L2 norm before clipping. `seconds` covers the update alone:
    data, forward, backward, optimizer; not evaluation, saving or logging.
    """

    step: int
    tokens: int
    learning_rate: float
    nll: float
    objective: float
    smoothing: float
    z_loss: float
    grad_norm: float
    seconds: float


@dataclass
class TrainState:
    """All that moves while a run trains; what a checkpoint has to hold."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    stream: WindowStream
    digest: TokenDigest
    trace: RateTrace
    step: int = 0
    tokens: int = 0


def train(
    spec: RunSpec,
    state: TrainState,
    forward: Callable[[Tensor], Tensor] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[StepResult]:
    """Trains from `state.step` to `training.steps`, yielding after each update.

    What the caller does between two results (evaluate, save, log) is outside the clock. `forward`
    is the callable that maps ids [B, S] to hidden states [B, S, H], the model itself unless it was
    compiled.

    Raises:
        TrainingStoppedError: a loss or a gradient is not finite; the weights are those before it.
    """
    training = spec.training
    model, optimizer = state.model, state.optimizer
    forward = forward or model
    device = model.head_weight.device
    settings = loss_settings(spec)
    workspace = Workspace(direct=True)
    tied = model.lm_head is None
    model.embed_tokens.sparse_gradient = tied and device.type == "cpu"

    while state.step < training.steps:
        began = clock()
        step = state.step + 1
        rate = learning_rate(spec, step)
        set_learning_rate(optimizer, rate)
        windows = state.stream.next_batch(spec.sequences_per_update)  # [N, S + 1]
        scored = windows.shape[0] * training.seq_len

        # Every micro-batch weighs as many tokens as it has: sums, divided by the whole update's.
        sums = np.zeros(4)
        for micro in np.split(windows, training.gradient_accumulation_steps):
            batch = torch.from_numpy(micro).to(device)
            hidden = forward(batch[:, :-1])
            loss = linear_cross_entropy(
                hidden.flatten(0, 1),
                model.head_weight,
                batch[:, 1:].flatten(),
                settings,
                model.precision,
                workspace,
            )
            (loss.objective / scored).backward()
            parts = (loss.nll, loss.objective.detach(), loss.smoothing, loss.z)
            sums += [float(part) for part in parts]
        nll, objective, smoothing, z_loss = sums / scored

        norm = clip_gradients(model, training.max_grad_norm)
        if not (math.isfinite(objective) and math.isfinite(norm)):
            raise not_finite(model, step, float(objective), norm)
        optimizer.step()
        workspace.reclaim(model.head_weight)
        optimizer.zero_grad()
        synchronize(device)

        state.step = step
        state.tokens += scored
        state.digest.update(windows)
        state.trace.update(state.tokens, rate)
        yield StepResult(
            step=step,
            tokens=state.tokens,
            learning_rate=rate,
            nll=float(nll),
            objective=float(objective),
            smoothing=float(smoothing),
            z_loss=float(z_loss),
            grad_norm=norm,
            seconds=clock() - began,
        )


def loss_settings(spec: RunSpec) -> LossSettings:
    """What the spec asks of the loss."""
    training = spec.training
    return LossSettings(
        block_vocab=training.loss_block_vocab,
        chunk_tokens=training.loss_chunk_tokens,
        label_smoothing=training.label_smoothing,
        z_loss=training.z_loss,
    )


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scales all gradients together to a global L2 norm of at most `max_norm` (0: never).

    Returns the norm before clipping. Gradients whose norm is not finite are left as they are.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    value = float(norm)
    if max_norm > 0 and math.isfinite(value) and value > max_norm:
        torch._foreach_mul_(gradients, max_norm / value)
    return value


def not_finite(model: nn.Module, step: int, objective: float, norm: float) -> TrainingStoppedError:
    """The error that names what was not finite, and where it shows first."""
    what = f"the loss is {objective}" if not math.isfinite(objective) else f"its norm is {norm}"
    broken = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    where = f"; gradients not finite in {', '.join(broken[:3])}" if broken else ""
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    return TrainingStoppedError.at(
        f"step {step}",
        f"loss or gradient is not finite ({what}{where}{more}); stopped before the update",
    )


def require_finite_weights(state: TrainState) -> None:
    """Checks what an update has made of the weights, before they are scored or saved.

    Raises:
        TrainingStoppedError: a weight is not finite; loss and gradients before it were.
    """
    for name, parameter in state.model.named_parameters():
        if not bool(torch.isfinite(parameter.detach().sum(dtype=torch.float64))):
            message = f"the update left weights that are not finite, first in {name}"
            raise TrainingStoppedError.at(f"step {state.step}", message)


def synchronize(device: torch.device) -> None:
    """Waits for the device, so that a clock read next measures work and not its launch."""
    match device.type:
        case "cuda":
            torch.cuda.synchronize(device)
        case "mps":
            torch.mps.synchronize()
