"""What several processes do together when they train one model; one process alone does nothing.

R processes, N sequences of an update, S sequence length.

Every process reads the windows of the whole update, whose ids are small beside its work, and trains
the sequences i with i mod R = its rank. So order, digest and route counts of ids are those of one
process by construction. Sums over processes are taken in float64 in the order of ranks: every
process has the same bits, and whatever is decided from them (an update that is not finite, an
expert without a gradient) all decide alike.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from workbench.core.data.batches import Windows
from workbench.core.device import DeviceName, choose_device
from workbench.core.failures import (
    PeerError,
    RollCall,
    is_peer_failure,
    notice_lost_machines,
    portable,
)
from workbench.core.model import Output, TrainingForward, Transformer
from workbench.errors import TrainingStoppedError, UserError
from workbench.launched import is_launched

T = TypeVar("T")
Array = TypeVar("Array", bound=npt.NDArray[Any])

# The longest that one process may keep the others waiting. The first use of a corpus encodes it.
PATIENCE = datetime.timedelta(hours=2)


class Team:
    """The processes that train one model: here one by itself, which costs nothing."""

    rank = 0
    size = 1
    backend: str | None = None
    reduces = False
    """Whether gradients are summed over processes as autograd finds them."""
    is_sharded = False
    """Whether each process holds only a part of the model."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    @property
    def mode(self) -> str:
        """How the model is trained: an effective fact of a run."""
        return "one process"

    def place(self, model: Transformer, device: torch.device) -> Transformer:
        """The model, nothing in its matrices yet, where it is to be trained."""
        return model.to(device)

    def through(self, model: Transformer, forward: TrainingForward) -> TrainingForward:
        """The forward pass to train through."""
        return forward

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch; the gradients of the update are whole after the `last` one."""
        return nullcontext()

    def complete_gradients(self, model: Transformer) -> None:
        """Sums over processes what `accumulating` has not."""

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """The L2 norm over all of them."""
        return float(nn.utils.get_total_norm(gradients))

    def over_parts(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """Values of this process's part of the model, put together with those of the others."""
        return values

    def rows(self, windows: Windows) -> Windows:
        """The windows of an update [N, S + 1] that this process trains."""
        return windows

    def share(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """The items to work on, each with whether it is this process's own; what others own is
        worked on with them, and counts for nothing."""
        return ((item, True) for item in items)

    def side_by_side(self, work: Callable[[], T]) -> T:
        """The work on such items; where it fails on one process, it fails on all."""
        return work()

    def ask(self, between: Callable[[], None]) -> None:
        """Asks, within that work, whether to give up."""
        between()

    def total(self, values: Array) -> Array:
        """The sum over processes, element by element."""
        return values

    def summed(self, counts: Tensor) -> Tensor:
        """The sum over processes of a tensor on the device that trains."""
        return counts

    def highest(self, *values: int) -> tuple[int, ...]:
        """The largest over processes, value by value."""
        return values

    def gathered(self, value: T) -> list[T]:
        """The value of every process, in the order of ranks."""
        return [value]

    def agreed(self, work: Callable[[], T]) -> T:
        """Work that each process does for itself; where it fails on one, it fails on all."""
        return work()

    def first(self, work: Callable[[], T]) -> T:
        """Work that rank zero does for all."""
        return work()

    def in_turn(self, work: Callable[[], T]) -> T:
        """Work of each process, first that of rank zero: what it caches the others find."""
        return work()

    def require_same(self, what: str, value: object) -> None:
        """Checks that processes which should have the same have it.

        Raises:
            TrainingStoppedError: they do not.
        """

    def failing(self) -> AbstractContextManager[None]:
        """Around all that may fail on one process alone: the others are told, by name and cause."""
        return nullcontext()

    def leave(self) -> None:
        """Ends the work together; more than once is fine."""


ALONE = Team()


class Ranks(Team):
    """Several processes over `torch.distributed`, each with the whole model (DDP)."""

    reduces = True

    def __init__(self, device_name: DeviceName) -> None:
        """Meets the other processes. Where GPUs train, each of a machine's takes one of its own.

        Raises:
            UserError: this kind of device cannot, or the others do not come.
        """
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self._dist = dist
        device = choose_device(device_name)
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if device.type not in ("cpu", "cuda"):
            message = "several processes train on CPUs or CUDA devices"
            raise UserError.at("training.device", message, device.type, "cpu or cuda")
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            met, self.rank, self.size = next(rendezvous("env://", timeout=PATIENCE))
            store = _own_store(met, self.rank, self.size)
            # Small facts go over the CPU whatever trains.
            backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backends,
                store=dist.distributed_c10d.PrefixStore("group", store),
                rank=self.rank,
                world_size=self.size,
                timeout=PATIENCE,
            )
        except (RuntimeError, ValueError) as error:
            place = f"rank {os.environ.get('RANK', '?')}"
            raise UserError.at(place, f"the other processes were not met: {error}") from error
        notice_lost_machines()
        self._roll = RollCall(store, self.rank, self.size)
        self._trained: nn.parallel.DistributedDataParallel | None = None

    @property
    def mode(self) -> str:
        """How the model is trained: an effective fact of a run."""
        return f"ddp, {self.size} processes"

    def through(self, model: Transformer, forward: TrainingForward) -> TrainingForward:
        """The forward pass to train through.

        Weights come from the seed and the name, so nothing has to be sent at the start. Every
        parameter has a gradient on every path, experts without tokens a zero one: no search for
        unused parameters, which would hide a dead branch.
        """
        self._trained = nn.parallel.DistributedDataParallel(
            _Trained(model, forward), forward_sync_buffers=False, init_sync=False
        )
        # The objective is divided by the tokens of all processes: gradients add up.
        self._trained.register_comm_hook(None, lambda state, bucket: _add(bucket))
        return self._trained

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch; the gradients of the update are whole after the `last` one."""
        if last or self._trained is None:
            return nullcontext()
        return self._trained.no_sync()

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """The L2 norm over all of them, that of rank zero: its rounding differs with the threads,
        and weights that are scaled by it would part."""
        norm = torch.tensor(super().gradient_norm(gradients), dtype=torch.float64)
        self._dist.broadcast(norm, src=0)
        return float(norm)

    def rows(self, windows: Windows) -> Windows:
        """The windows of an update [N, S + 1] that this process trains."""
        return windows[self.rank :: self.size]

    def share(self, items: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """The items to work on, all of them this process's own."""
        return ((item, True) for item in islice(items, self.rank, None, self.size))

    def side_by_side(self, work: Callable[[], T]) -> T:
        """The work on such items; where it fails on one process, it fails on all."""
        return self.agreed(work)

    def total(self, values: Array) -> Array:
        """The sum over processes, element by element."""
        own = torch.from_numpy(np.ascontiguousarray(values))
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._dist.all_gather(found, own)
        added: Array = np.sum([one.numpy() for one in found], axis=0)
        return added

    def summed(self, counts: Tensor) -> Tensor:
        """The sum over processes of a tensor on the device that trains."""
        added = counts.detach().clone()
        self._dist.all_reduce(added)
        return added

    def highest(self, *values: int) -> tuple[int, ...]:
        """The largest over processes, value by value."""
        found = torch.tensor(values, dtype=torch.int64)
        self._dist.all_reduce(found, op=self._dist.ReduceOp.MAX)
        return tuple(found.tolist())

    def gathered(self, value: T) -> list[T]:
        """The value of every process, in the order of ranks."""
        found: list[Any] = [None] * self.size
        self._dist.all_gather_object(found, value)
        return found

    def agreed(self, work: Callable[[], T]) -> T:
        """Work that each process does for itself; where it fails on one, it fails on all."""
        value: T | None = None
        own: Exception | None = None
        try:
            value = work()
        except Exception as error:
            if is_peer_failure(error):
                raise
            own = error
        errors = self.gathered(own and portable(own))
        if (failed := next(filter(None, errors), None)) is not None:
            # Rank zero says it for all.
            failed.agreed = True  # type: ignore[attr-defined]
            raise failed from own
        return value  # type: ignore[return-value]

    def first(self, work: Callable[[], T]) -> T:
        """Work that rank zero does for all."""
        value = self.agreed(lambda: work() if self.is_first else None)
        found = [value]
        self._dist.broadcast_object_list(found, src=0)
        return value if self.is_first else found[0]  # type: ignore[return-value]

    def in_turn(self, work: Callable[[], T]) -> T:
        """Work of each process, first that of rank zero: what it caches the others find."""
        early = self.agreed(lambda: work() if self.is_first else None)
        late = self.agreed(lambda: None if self.is_first else work())
        return early if self.is_first else late  # type: ignore[return-value]

    def require_same(self, what: str, value: object) -> None:
        """Checks that processes which should have the same have it.

        Raises:
            TrainingStoppedError: they do not.
        """
        found = self.gathered(value)
        others = [rank for rank, one in enumerate(found) if one != found[0]]
        if others:
            message = f"{what} of rank {others[0]} is not that of rank 0: they train apart"
            raise TrainingStoppedError.at(f"rank {others[0]}", message)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Around all that may fail on one process alone: the others are told, by name and cause."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            if is_peer_failure(error):
                raise self._roll.explain(error) from error
            if not getattr(error, "agreed", False):
                self._roll.post(error)
            raise

    def leave(self) -> None:
        """Ends the work together; more than once is fine.

        The wrapped model first: it holds on to the group whose threads end here, and a group that
        the interpreter has to take down at its exit aborts it. What the model reduces gradients by
        is taken out of it, since the traceback of an error may hold the model still: were that the
        last to let go of the group, it would wait for threads that wait for it (for the lock of
        the interpreter), for ever.
        """
        trained, self._trained = self._trained, None
        if trained is not None:
            del trained.reducer, trained.logger
            del trained
        if self._dist.is_initialized():
            self._dist.destroy_process_group()


def join(device: DeviceName, parallel: Literal["ddp", "fsdp"] = "ddp") -> Team:
    """The processes that this one was started with, or itself alone.

    Raises:
        UserError: see `Ranks`.
    """
    if not is_launched():
        return ALONE
    if parallel == "ddp":
        return Ranks(device)
    from workbench.core.shards import Shards

    return Shards(device)


def _own_store(store: Any, rank: int, size: int) -> Any:
    """The part of a store that these processes alone write to.

    torchrun keeps its store when it starts the processes again: what the ones before left there,
    addresses among it, is not to be taken for that of these. Nor do machines count the same
    restarts. So each process shows rank zero a word of its own, and is answered with one for all.
    """
    import torch.distributed as dist

    own = uuid.uuid4().hex
    if rank:
        store.set(f"here/{rank}", own)
        common = store.get(f"welcome/{own}").decode()
        store.set(f"{common}/came/{rank}", "yes")
        return dist.distributed_c10d.PrefixStore(common, store)
    missing = set(range(1, size))
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"{own}/came/{other}"]):
                missing.discard(other)
            elif store.check([f"here/{other}"]):  # perhaps of one before, who will not come
                store.set(f"welcome/{store.get(f'here/{other}').decode()}", own)
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} has not come")
        time.sleep(0.01)
    return dist.distributed_c10d.PrefixStore(own, store)


class _Trained(nn.Module):
    """The model as DDP takes it: what is called is the forward pass of training."""

    def __init__(self, model: Transformer, forward: TrainingForward) -> None:
        super().__init__()
        self.model, self._through = model, forward

    def forward(self, inputs: Tensor) -> Output:
        """inputs [B, S] -> hidden states and extras."""
        return self._through(inputs)


def _add(bucket: Any) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP: the sum of gradients."""
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
