"""The parts that every layer of the model is made of: bias-free linear map, RMSNorm, SwiGLU gate.

Both hold float32 master weights and take and give activations in the compute dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.core.precision import Precision, linear

EPSILON = 1e-6
"""Added to the mean square before the root in every RMSNorm."""


class Linear(nn.Module):
    """`x @ weight.T`, weight [out, in], in the run's precision. No bias, no values until filled."""

    def __init__(self, inputs: int, outputs: int, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return linear(x, self.weight, self.precision)


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, the hidden activation of a SwiGLU (Shazeer 2020).

    Values and gradients are those of the two operations, bit for bit; silu(gate), as wide as the
    layer and cheap, is computed again in the backward pass and not kept until then.
    """
    product: Tensor = _SiluProduct.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype; computed in float32, rounded once."""
        return self.normalise(x).to(x.dtype)

    def normalise(self, x: Tensor) -> Tensor:
        """The result before rounding, float32, for a caller that computes on."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, EPSILON)
