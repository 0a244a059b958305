"""Tensors of which a process holds a part: what is computed on the part, and what on the whole.

E experts of a stack [E, R, C]. A tensor that is not split is its own part, and its own whole: the
functions here leave it as it is, and one process needs nothing of `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_split(tensor: Tensor) -> bool:
    """Whether this process may hold only a part of it (a DTensor)."""
    return hasattr(tensor, "to_local")


def part(tensor: Tensor) -> Tensor:
    """What this process holds; it shares memory with the tensor."""
    split: Any = tensor
    return split.to_local() if is_split(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, from all processes, which ask for it together; differentiable."""
    split: Any = tensor
    return split.full_tensor() if is_split(tensor) else tensor


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of `full` that this process would hold if it were split as `like` is; a view."""
    if not is_split(like):
        return full
    for dimension, (first, size) in enumerate(zip(_begin(like), part(like).shape, strict=True)):
        # An empty part lies beyond the end.
        full = full.narrow(dimension, min(first, full.shape[dimension] - size), size)
    return full


def by_expert(stack: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """`measure` (rows [n, R * C] -> values [n]) of each expert, [E]: over the part that is held
    here, 0 for experts of which nothing is."""
    own = part(stack)
    if own is stack:
        return measure(stack.flatten(1))
    values = own.new_zeros(len(stack))
    if own.numel():
        first = _begin(stack)[0]
        values[first : first + len(own)] = measure(own.flatten(1))
    return values


def _begin(tensor: Tensor) -> tuple[int, ...]:
    """Where in the whole this process's part begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    split: Any = tensor
    _, begin = compute_local_shape_and_global_offset(
        split.shape, split.device_mesh, split.placements
    )
    return tuple(begin)


def holds_rows(tensor: Tensor) -> bool:
    """Whether each process holds whole slices of the first dimension, and nothing of others."""
    split: Any = tensor
    return all(placement.is_shard(0) for placement in split.placements)


def filled(own: Tensor, like: Tensor) -> Tensor:
    """A tensor split as `like` is, of which this process holds `own`; it shares its memory."""
    from torch.distributed.tensor import DTensor

    split: Any = like
    return DTensor.from_local(
        own,
        split.device_mesh,
        split.placements,
        run_check=False,
        shape=split.shape,
        stride=split.stride(),
    )


def lay_out(full: Tensor, like: Tensor) -> Tensor:
    """`full` split as `like` is, in memory of its own; every process gives the same."""
    if not is_split(like):
        return full.to(like.device, copy=True)
    result = torch.empty_like(like, dtype=full.dtype, requires_grad=False)
    part(result).copy_(part_of(full, like))
    return result
