"""Several processes that train one model of which each holds a part (FSDP2).

R processes. Every parameter, its gradient and its optimizer state are split over the processes;
a block's weights are gathered for its forward and its backward pass, and dropped after each. Only
scalars (the gates of a routed feed-forward) are whole everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from workbench.core.device import DeviceName
from workbench.core.failures import notice_lost_machines
from workbench.core.model import TrainingForward, Transformer
from workbench.core.parallel import Ranks
from workbench.core.sharding import is_split, part

T = TypeVar("T")


class Shards(Ranks):
    """Several processes over `torch.distributed`, each with a part of the model (FSDP2)."""

    is_sharded = True

    def __init__(self, device_name: DeviceName) -> None:
        """As `Ranks`."""
        super().__init__(device_name)
        from torch.distributed.device_mesh import init_device_mesh

        kind = "cuda" if self.backend == "nccl" else "cpu"
        self._mesh: Any = init_device_mesh(kind, (self.size,))
        notice_lost_machines()
        self._model: Any = None

    @property
    def mode(self) -> str:
        """How the model is trained: an effective fact of a run."""
        return f"fsdp, {self.size} processes"

    def place(self, model: Transformer, device: torch.device) -> Transformer:
        """Splits the model, block by block, before anything is in its matrices: a process never
        holds more than its part and one block."""
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
        split: dict[str, Any] = {
            "mesh": self._mesh,
            "shard_placement_fn": self._placement,
            "ignored_params": scalars,
        }
        for block in model.layers:
            fully_shard(block, **split)
        fully_shard(model, **split)
        register_fsdp_forward_method(model, "through")
        parts: list[Any] = [*model.layers, model]
        for module in parts:
            # The objective is divided by the tokens of all processes: gradients add up.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._model = model.to(device)
        return model

    def _placement(self, parameter: nn.Parameter) -> Any:
        """The dimension that a parameter is split in: of a stack of experts the experts, where
        every process gets as many; else rows, where those are even."""
        from torch.distributed.tensor import Shard

        uneven = parameter.ndim == 3 and parameter.shape[0] % self.size
        return Shard(1 if uneven and not parameter.shape[1] % self.size else 0)

    def through(self, model: Transformer, forward: TrainingForward) -> TrainingForward:
        """The forward pass to train through: the model's own gathers what it needs."""
        return forward

    def accumulating(self, *, last: bool) -> Any:
        """Around a micro-batch. Each one's gradients are summed and split at once: kept until the
        last one they would be those of the whole model."""
        return super().accumulating(last=True)

    def complete_gradients(self, model: Transformer) -> None:
        """Sums over processes the gradients that are not split."""
        alone = [p for p in model.parameters() if not is_split(p) and p.grad is not None]
        if not alone:
            return
        sums = self.total(np.array([float(_grad(p)) for p in alone]))
        for parameter, value in zip(alone, sums, strict=True):
            _grad(parameter).fill_(float(value))

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """The L2 norm over all of them, those that are not split counted once."""
        own = [part(one) for one in gradients if is_split(one) or self.is_first]
        squares = [one.square().sum(dtype=torch.float64) for one in own]
        value = float(torch.stack(squares).sum()) if squares else 0.0
        return math.sqrt(float(self.total(np.array([value]))[0]))

    def over_parts(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """Values of this process's parts of the model, put together with those of the others."""
        together = values.detach().clone()
        op = self._dist.ReduceOp.SUM if how == "sum" else self._dist.ReduceOp.MAX
        self._dist.all_reduce(together, op=op)
        return together

    def share(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """An item for this process to work on, and whether it is its own: all work on as many,
        since each needs the parts of the others on the way."""
        rest = iter(items)
        while turn := list(islice(rest, self.size)):
            mine = self.rank < len(turn)
            yield turn[self.rank if mine else 0], mine

    def side_by_side(self, work: Callable[[], T]) -> T:
        """Work for which the processes meet on the way: one that fails ends them all."""
        try:
            return work()
        finally:
            if self._model is not None:
                self._model.reshard()

    def ask(self, between: Callable[[], None]) -> None:
        """Asks within work for which the processes meet: where one gives up, all do."""
        self.agreed(between)

    def leave(self) -> None:
        """Ends the work together; more than once is fine."""
        self._model = None
        self._mesh = None
        super().leave()


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
