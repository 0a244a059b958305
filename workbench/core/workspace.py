"""Memory that outlives a training step: scratch tensors, and the largest gradient.

Fresh large tensors cost a page fault for every 4 KB, which on a CPU with fast matrix units takes
longer than the arithmetic that fills them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.core.sharding import is_split


class Workspace:
    """The memory of one head weight [V, H] (vocabulary, hidden); for one thread.

    Nothing that a function returns lies in the scratch kept here, so results of earlier steps stay
    as they are. Only the gradient of the weight can be written over, and only after `reclaim`.

    `direct=True` makes the loss write the gradient into `weight.grad` itself (add to it, where one
    is there) and hand autograd none. The gradient of a tied input embedding looked up with
    `F.embedding(ids, weight, sparse=True)` then falls into the same memory, and so do those of
    later micro-batches: no second [V, H] tensor, no pass to add it. `weight.grad` comes out the
    same, but `torch.autograd.grad` and tensor hooks of the weight do not see the head's part;
    hence off by default.
    """

    def __init__(self, *, direct: bool = False) -> None:
        self.direct = direct
        self._scratch: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._spare: Tensor | None = None

    def reclaim(self, weight: Tensor) -> None:
        """Set `weight.grad` to None, as `zero_grad` does, and keep its memory for the next one.

        Who still needs that gradient must have copied it: the next backward pass overwrites it.
        """
        grad, weight.grad = weight.grad, None
        if grad is None or is_split(grad):  # a part is no place for the gradient of the whole
            return
        if grad.layout == torch.strided and grad.is_contiguous():
            self.keep(grad.detach())

    def keep(self, spare: Tensor) -> None:
        """Take a tensor [V, H] that nobody needs any more, for the next gradient."""
        self._spare = spare

    def gradient(self, weight: Tensor) -> Tensor:
        """A tensor for a gradient of `weight`, contents undefined; it leaves the workspace."""
        spare, self._spare = self._spare, None
        if (
            spare is not None
            and spare.shape == weight.shape
            and spare.dtype == weight.dtype
            and spare.device == weight.device
        ):
            return spare
        return torch.empty_like(weight, memory_format=torch.contiguous_format)

    def scratch(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A contiguous tensor [rows, columns], contents undefined, valid until `name` is asked for
        again."""
        rows, columns = shape
        flat = self._scratch.get((name, dtype, device))
        if flat is None or flat.numel() < rows * columns:
            flat = torch.empty(rows * columns, dtype=dtype, device=device)
            self._scratch[name, dtype, device] = flat
        return flat[: rows * columns].view(rows, columns)
