"""The language-model loss by Liger's fused kernel: where it runs, and what it must be told.

T tokens, H hidden, V vocabulary. The contract and the terms are those of `workbench.core.losses`.
Liger computes some rows of logits at a time, has one kernel turn them into their own gradient and
multiplies that into those of hidden states and head, all in the forward pass: three products, not
the four of `losses`, and a [V, H] kept until the backward pass.

What liger-kernel 0.8.5 does, and what is done about it here:

- Logits have the dtype of the operands, and bfloat16 logits blur the reported NLL. So it always
  gets float32 operands; in a bf16 run they hold values rounded to bfloat16, whose products TF32
  computes exactly (8 bits of mantissa in 11): CUDA's matrix units take them, with float32 sums.
- The loss it returns contains z whether or not z is returned too: the NLL is their difference.
- With label smoothing it returns no plain NLL: refused.
- Wrong targets make it read outside the logits (checked here), ignored tokens are multiplied all
  the same, and zero times infinity is NaN (left out here).
- Its backward pass scales the kept gradients in place, and a second one scales twice: they are
  taken at once, for scale 1, and scaled here.
- By default a chunk holds T x H logits, for V >> H a few tokens, and each chunk is a pass over the
  head and its gradient: it is asked for as many tokens as a tile of `losses` has.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.core.loss_settings import LossSettings
from workbench.core.losses import (
    IGNORED,
    LossSums,
    check_inputs,
    scored_tokens,
    writes_directly,
)
from workbench.core.precision import FLOAT32, Precision
from workbench.core.workspace import Workspace
from workbench.errors import UserError

LossBackend = Literal["chunked", "liger"]

_NO_NLL = "Liger returns no plain NLL beside a smoothed loss"


def choose_loss_backend(
    asked: Literal["auto", "chunked", "liger"], device: torch.device, label_smoothing: float
) -> LossBackend:
    """The loss that will run; `auto` takes Liger where it runs and gives a plain NLL. Whether it
    runs is tried on `device` once per process (import and compilation of a kernel: seconds).

    Raises:
        UserError: `liger` is asked for where it cannot run, or with label smoothing.
    """
    if asked == "chunked":
        return "chunked"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run in numpy, for tests
    fault: str | None = f"Liger needs a CUDA or ROCm device, this run is on {device.type}"
    if label_smoothing:
        fault = f"{_NO_NLL} (label_smoothing is {label_smoothing})"
    elif asked == "auto" and interpreted:
        return "chunked"
    elif device.type == "cuda" or (device.type == "cpu" and interpreted):
        fault = _fault(device)
    if fault and asked == "liger":
        raise UserError.at("training.loss_backend", fault, asked, "auto, chunked")
    return "chunked" if fault else "liger"


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: LossSettings,
    precision: Precision,
    workspace: Workspace | None = None,
) -> LossSums:
    """As `workbench.core.losses.linear_cross_entropy`, by Liger's kernel.

    hidden [T, H] in the compute dtype, weight [V, H] float32 master, targets [T] int64, exactly as
    given, or `IGNORED`. Chunks of logits span the vocabulary: `block_vocab` does not count.

    Raises:
        ValueError: as there, and for label smoothing.
    """
    if settings.label_smoothing:
        raise ValueError(f"label_smoothing is {settings.label_smoothing}, must be 0: {_NO_NLL}")
    check_inputs(hidden, weight, targets, precision)
    run: Any = _LigerCrossEntropy.apply
    return LossSums(*run(hidden, weight, targets, settings, precision, workspace or Workspace()))


class _LigerCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *how: Any
    ) -> tuple[Any, ...]:
        settings, precision, ctx.workspace = how
        kept = scored_tokens(targets)
        rows, labels = hidden, targets
        if kept is not None:
            rows, labels = hidden.index_select(0, kept), targets.index_select(0, kept)
        total, z, of_hidden, of_weight = _fused(rows, weight, labels, settings, precision)
        ctx.save_for_backward(hidden, weight, kept, of_hidden, of_weight)
        nll, smoothing = total - z, torch.zeros_like(total)
        ctx.mark_non_differentiable(nll, smoothing, z)
        ctx.set_materialize_grads(False)
        return total.float(), nll, smoothing, z, len(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        hidden, weight, kept, of_hidden, of_weight = ctx.saved_tensors
        hidden_grad = weight_grad = None
        if scale is not None and ctx.needs_input_grad[0]:
            hidden_grad = (of_hidden * scale).to(hidden.dtype)
            if kept is not None:
                hidden_grad = torch.zeros_like(hidden).index_copy_(0, kept, hidden_grad)
        if scale is not None and ctx.needs_input_grad[1]:
            direct = writes_directly(ctx.workspace, weight)
            if direct and weight.grad is not None:
                weight.grad.addcmul_(of_weight, scale)
            else:
                weight_grad = torch.mul(of_weight, scale, out=ctx.workspace.gradient(weight))
                if direct:
                    weight.grad, weight_grad = weight_grad, None
        return hidden_grad, weight_grad, None, None, None, None


def _fused(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: LossSettings, precision: Precision
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums over tokens that are all scored: nll + z, z, and float32 gradients of the former."""
    hidden, weight = (x.detach().to(precision.compute).float() for x in (hidden, weight))
    none = hidden.new_zeros((), dtype=torch.float64)
    if not len(targets):  # Liger would divide by zero
        return none, none.clone(), torch.zeros_like(hidden), torch.zeros_like(weight)

    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    # bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z
    terms = (None, None, IGNORED, settings.z_loss, 0.0, "sum", None, settings.z_loss > 0)
    # accum_dtype (the operands': float32), token scaling, accuracy, predictions, kernels
    defaults = (None, False, False, False, None, None)
    factor = _chunk_factor(len(targets), len(weight), weight.shape[1], settings.tile_tokens)
    with torch.enable_grad(), _tf32(precision.compute != torch.float32):
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        total, z, *_ = LigerFusedLinearCrossEntropyFunction.apply(
            *leaves, targets, *terms, *defaults, factor
        )
        of_hidden, of_weight = torch.autograd.grad(total, leaves)
    z = none if z is None else z.detach().double()
    return total.detach().double(), z, of_hidden, of_weight


def _chunk_factor(tokens: int, entries: int, width: int, most: int) -> int:
    """The largest `chunk_mem_const` with which Liger takes at most `most` tokens at a time, or 1.

    It cuts the tokens in ceil(entries / (factor * width)) parts, sizes rounded up to powers of 2.
    """
    parts = math.ceil(tokens / (1 << (most.bit_length() - 1)))
    if parts == 1:
        return math.ceil(entries / width)
    return max(1, math.ceil(entries / ((parts - 1) * width)) - 1)


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """Within it, CUDA may multiply float32 matrices as TF32: a setting of the whole process."""
    place: Any = torch.backends.cuda.matmul
    before = place.fp32_precision
    if wanted:
        place.fp32_precision = "tf32"
    try:
        yield
    finally:
        place.fp32_precision = before


@functools.cache
def _fault(device: torch.device) -> str | None:
    """Why Liger does not run on `device`, found by running it; None where it does."""
    try:
        weight, targets = torch.zeros(3, 4, device=device), torch.tensor([0, 2], device=device)
        how = LossSettings(z_loss=1.0)
        nll = float(linear_cross_entropy(weight[:2], weight, targets, how, FLOAT32).nll)
    except ImportError as error:
        return f"Liger cannot be imported: {error}"
    except Exception as error:  # no C compiler, an old GPU, another Triton, another Liger
        return f"Liger does not run on this {device.type} device: {type(error).__name__}: {error}"
    right = 2 * math.log(3)  # logits of zero
    return None if math.isclose(nll, right, rel_tol=1e-5) else f"Liger gives {nll} for {right}"
