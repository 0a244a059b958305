"""Checkpoints of a model that several processes hold parts of, by `torch.distributed.checkpoint`.

Each process writes its parts into a safetensors file of its own, with where in the whole they lie;
nothing is pickled. Any number of processes reads them again, each only what it needs: so a run goes
on with another number, and one process alone puts the whole together. The last checkpoint of a run
also has the weights in one file, as those of one process have.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from workbench.core.checkpoint import (
    SHARD,
    WEIGHTS,
    begin,
    is_whole,
    path_of,
    publish,
    snapshot,
    temporary_of,
    thin_out,
    unwritten,
    write_state,
)
from workbench.core.parallel import Team
from workbench.core.train import TrainState

OF_WEIGHTS, OF_MOMENTS = "weights/", "moments/"
"""What the names of tensors begin with."""

Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Where a tensor of this name, shape and dtype is to go."""


def save_shards(
    state: TrainState, folder: Path, spec: dict[str, Any], keep: int, team: Team, *, last: bool
) -> Path:
    """Saves the state under `folder`, which all processes of the team reach; each its part of it.
    Then removes all but the newest `keep` checkpoints. `last`: also the weights in one file.

    Raises:
        StoreError: the disk is full or cannot be written; earlier checkpoints are untouched.
    """
    taken = snapshot(state, spec)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in taken.weights.values())
    nbytes = taken.nbytes + (weights if last else 0)
    final = path_of(folder, taken.step)
    if team.first(lambda: is_whole(final)):
        return final
    temporary = team.first(lambda: _begun(final, nbytes))
    try:
        tensors = {OF_WEIGHTS + name: tensor for name, tensor in taken.weights.items()}
        tensors |= {OF_MOMENTS + name: tensor for name, tensor in taken.moments.items()}
        try:
            _write(tensors, temporary)
        except (OSError, SafetensorError) as error:
            raise unwritten(final, nbytes, error) from error

        def finish() -> None:
            try:
                if last:
                    _write_whole(temporary)
                write_state(taken, temporary)
                publish(temporary, final)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(temporary, ignore_errors=True)
                raise unwritten(final, nbytes, error) from error
            thin_out(folder, keep)

        team.first(finish)
    finally:
        if team.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _begun(final: Path, nbytes: int) -> Path:
    temporary = temporary_of(final)
    try:
        begin(temporary)
    except OSError as error:
        raise unwritten(final, nbytes, error) from error
    return temporary


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    """Every process's parts, each into a file of its own; one that fails fails all.

    Raises:
        OSError: what the first process that could not write found.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with _quiet():
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save(tensors, storage_writer=writer)
    except CheckpointException as error:
        for failure in error.failures.values():
            found = failure[0] if isinstance(failure, tuple) else failure
            if isinstance(found, OSError | SafetensorError):
                raise found from error
        raise


def _write_whole(folder: Path) -> None:
    """The weights in one file; they are in the memory of this process for as long."""
    from safetensors.torch import save_file

    save_file(read_shards(folder, OF_WEIGHTS, _whole), folder / WEIGHTS)


def _whole(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def read_shards(folder: Path, begins: str, place: Place = _whole) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning; each process reads for itself.

    `place` says where each goes: a tensor that is split gets this process's part alone.

    Raises:
        OSError, SafetensorError, ValueError, KeyError: the files are not what was saved.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = _reader(folder)
    found: dict[str, Tensor] = {}
    for name, entry in sorted(reader.read_metadata().state_dict_metadata.items()):
        if name.startswith(begins):
            found[name] = place(name.removeprefix(begins), entry.size, entry.properties.dtype)
    if found:
        try:
            with _quiet():
                load(dict(found), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise ValueError(str(error)) from error
    return {name.removeprefix(begins): tensor for name, tensor in found.items()}


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    class Shards(FileSystem):
        def ls(self, path: Any) -> list[str]:
            return sorted(str(one) for one in Path(path).glob(f"{SHARD}*"))

    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = Shards()
    return reader


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice of torch to who calls it: that there is one process, or no `.metadata`."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
