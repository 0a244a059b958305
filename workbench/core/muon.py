"""Muon with a blend of raw momentum and a clamp, for matrices and stacks of experts.

E experts of a stack (1 for a matrix), R rows, C columns, all as stored.

Per slice and step, with `m` the (Nesterov) momentum and `b` the blend:

    u      = NS(m) * sqrt(max(1, R / C))            Muon's own update
    mixed  = b * u + (1 - b) * m * rms(u) / rms(m)  part raw momentum, as large as u
    update = mixed * min(rms(u), max_update_rms) / rms(mixed)

`NS` is the quintic Newton-Schulz iteration of Muon (Jordan et al. 2024, "Muon: An optimizer for
hidden layers in neural networks"); momentum, weight decay and scale are as in `torch.optim.Muon`,
which b = 1 without a clamp reproduces. Blend and clamp belong to this project's `muon_tr`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from workbench.core.precision import Matmul, Precision, choose_precision, operands
from workbench.core.sharding import filled, holds_rows, is_split, part, part_of, whole

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the odd polynomial a*x + b*x^3 + c*x^5 that each iteration applies to the singular
values (Jordan et al. 2024)."""


class Muon(Optimizer):
    """The `muon_tr` optimizer; float32 parameters [R, C] or [E, R, C], each expert on its own.

    Args:
        params: tensors, (name, tensor) pairs, or groups of either with settings of their own.
        lr: learning rate, read from the group at each step.
        momentum: share of the old buffer in the new one, in [0, 1).
        nesterov: look ahead by one momentum step.
        ns_steps: Newton-Schulz iterations.
        blend: share of the orthogonalized update; 1 is plain Muon, 0 momentum of Muon's size.
        max_update_rms: bound on the root mean square of a slice's update before `lr`; 0 for none.
            u's is about 1 / sqrt(C) or less, so a bound of 1 tells only where C is 1.
        weight_decay: decoupled; each step first shrinks weights by lr * weight_decay.
        eps: least Frobenius norm that a slice is divided by.

    Raises:
        ValueError: a parameter of another shape or dtype, or a setting out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        blend: float = 0.5,
        max_update_rms: float = 1.0,
        weight_decay: float = 0.0,
        eps: float = 1e-7,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        settings |= {"blend": blend, "max_update_rms": max_update_rms}
        settings |= {"weight_decay": weight_decay, "eps": eps}
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, or raises the constructor's ValueError and adds nothing."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Raises:
            RuntimeError: a gradient is sparse; nothing has been updated then.
        """
        for name, parameter in (pair for group in self.param_groups for pair in _named(group)):
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise RuntimeError(f"Muon takes no sparse gradients, as {name} has")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                _step(parameter.detach(), parameter.grad, state["momentum_buffer"], group)


def orthogonalize(m: Tensor, steps: int, eps: float, matmul: Matmul) -> Tensor:
    """Newton-Schulz in bfloat16 on each slice of m [E, R, C]: singular values come near 1.

    `native` and `upcast` both round every product to bfloat16, and differ in the order of sums. The
    result holds bfloat16 values, in the dtype that was multiplied; zero slices stay zero.
    """
    a, b, c = NS_COEFFICIENTS
    precision = Precision(torch.bfloat16, matmul)

    def rounded(tensor: Tensor) -> Tensor:
        return operands(precision, tensor)[0]

    tall = m.shape[-2] > m.shape[-1]
    x = (m.mT if tall else m).bfloat16()  # wide, so that the Gram matrix is the smaller one
    x = rounded(x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = rounded(torch.bmm(x, x.mT))
        polynomial = rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        x = rounded(torch.baddbmm(x, polynomial, x, beta=a))
    return x.mT if tall else x


@functools.cache
def choose_matmul(device: torch.device) -> Matmul:
    """`native` where the device multiplies bfloat16 itself, else `upcast`."""
    try:
        return choose_precision("bf16", device).matmul
    except ValueError:  # a float32 run on a device without bfloat16 products
        return "upcast"


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What is updated at once, [E, R, C]: one slice on a CPU, all of them elsewhere.

    On a CPU the order of a sum may depend on the batch and on a slice's alignment in memory; one by
    one, a stack gets bit for bit what its slices get as matrices. An accelerator would spend the
    time on launching kernels instead.
    """
    stack = tensor if tensor.ndim == 3 else tensor.unsqueeze(0)
    return torch.split(stack, 1) if tensor.device.type == "cpu" else (stack,)


def _step(weight: Tensor, grad: Tensor, buffer: Tensor, group: dict[str, Any]) -> None:
    """Updates one parameter and its momentum buffer in place, [R, C] or [E, R, C].

    Where processes hold whole experts of a stack, each updates its own. Of what is split
    otherwise they gather the momentum, one matrix at a time, compute the update alike, and each
    makes it on its part.
    """
    if is_split(weight) and not (weight.ndim == 3 and holds_rows(weight)):
        own_momentum = _momentum(part(grad), part(buffer), group)
        momentum = filled(own_momentum, weight)
        changes = [_direction(m, group) for m in _parts(whole(momentum))]
        update = part_of(torch.cat(changes).view(weight.shape), weight)
        _apply(part(weight), update, group, weight.shape)
        return
    stacks = map(_parts, (part(weight), part(grad), part(buffer)))
    for own, gradient, moments in zip(*stacks, strict=True):
        if own.numel():
            update = _direction(_momentum(gradient, moments, group), group)
            _apply(own, update, group, own.shape)


def _momentum(grad: Tensor, buffer: Tensor, group: dict[str, Any]) -> Tensor:
    """Moves the momentum buffer on; the momentum to be orthogonalized."""
    buffer.lerp_(grad, 1 - group["momentum"])
    return grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def _scale(shape: torch.Size) -> float:
    # Kept out of the tensors up to the last line, as torch.optim.Muon does: same rounding.
    return math.sqrt(max(1, shape[-2] / shape[-1]))


def _apply(weight: Tensor, update: Tensor, group: dict[str, Any], shape: torch.Size) -> None:
    """Decays a weight, or a part of one of `shape`, and moves it; in place."""
    lr = float(group["lr"])
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(update, alpha=-lr * _scale(shape))


def _direction(m: Tensor, group: dict[str, Any]) -> Tensor:
    """What momentum m [E, R, C] comes to before rate and scale."""
    blend, scale = group["blend"], _scale(m.shape)
    u = orthogonalize(m, group["ns_steps"], group["eps"], choose_matmul(m.device)).float()
    size = _rms(u)
    mixed = u if blend == 1 else blend * u + (1 - blend) * _ratio(size, _rms(m)) * m
    limit = group["max_update_rms"] / scale or math.inf
    return mixed * _ratio(size.clamp(max=limit), _rms(mixed))


def _rms(x: Tensor) -> Tensor:
    """Root mean square of each slice of x [E, R, C]: [E, 1, 1]."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return norm / math.sqrt(x.shape[-2] * x.shape[-1])


def _ratio(size: Tensor, of: Tensor) -> Tensor:
    """size / of, and 0 where a zero slice has made `of` 0. A NaN stays one in what it scales."""
    return torch.where(of > 0, size / of, 0.0)


def _named(group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The parameters of a group with their names, or numbers where none were given."""
    names = group.get("param_names") or [f"number {i}" for i, _ in enumerate(group["params"])]
    return list(zip(names, group["params"], strict=True))


def _check_group(group: dict[str, Any]) -> None:
    """Raises the ValueErrors of the constructor."""
    for name, parameter in _named(group):
        shape, dtype = list(parameter.shape), parameter.dtype
        if len(shape) not in (2, 3) or 0 in shape or dtype != torch.float32:
            wanted = "float32 matrices [rows, cols] and stacks [E, rows, cols]"
            found = f"parameter {name} is {dtype} {shape}"
            raise ValueError(f"Muon takes {wanted}; {found}: give it to another optimizer")
    ranges = {
        "lr": (0 <= group["lr"] < math.inf, ">= 0"),
        "momentum": (0 <= group["momentum"] < 1, "in [0, 1)"),
        "ns_steps": (1 <= group["ns_steps"] < 100, "1 to 99"),
        "blend": (0 <= group["blend"] <= 1, "in [0, 1]"),
        "max_update_rms": (0 <= group["max_update_rms"] < math.inf, ">= 0 (0: no clamp)"),
        "weight_decay": (0 <= group["weight_decay"] < math.inf, ">= 0"),
        "eps": (0 < group["eps"] < math.inf, "> 0"),
    }
    for key, (holds, allowed) in ranges.items():
        if not holds:
            raise ValueError(f"Muon: {key} is {group[key]}; it must be {allowed}")
