"""Writes a checkpoint whole or not at all, and finds the newest one that is whole.

A checkpoint is a folder `step_00000250` with weights and optimizer state as safetensors, the rest
as JSON, and a manifest of sizes and hashes that is written last. The folder gets its name by a
rename when everything in it has reached the disk: what has no valid manifest does not exist.
Where several processes hold a part of the model each, they write their parts beside one another
(see `shard_files`), into the same folder and under the same manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from workbench.core.random_states import random_states
from workbench.core.sharding import part
from workbench.core.train import TrainState
from workbench.errors import StoreError, free_bytes, shortage
from workbench.json_files import read_json

_NAME = re.compile(r"step_(\d{8})")
FORMAT = 1
WEIGHTS, MOMENTS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (WEIGHTS, MOMENTS, STATE)
SHARD = "shard-"
"""What the names of files with one process's part begin with."""


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds: tensors by name, and the rest as what JSON can hold."""

    step: int
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    document: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [*self.weights.values(), *self.moments.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def copied(self) -> Snapshot:
        """With tensors of its own, in the memory of this machine: training may go on."""
        weights, moments = (
            {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            for tensors in (self.weights, self.moments)
        )
        return replace(self, weights=weights, moments=moments)


def snapshot(state: TrainState, spec: dict[str, Any]) -> Snapshot:
    """The state as it is now. Its tensors are those that train, until `copied`."""
    # By parameter name, not by position: two experts of equal shape can never swap their moments.
    moments: dict[str, torch.Tensor] = {}
    for name, parameter in state.model.named_parameters():
        for optimizer in state.optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                moments[f"{name}/{key}"] = torch.as_tensor(value).detach()
    weights = {name: tensor.detach() for name, tensor in state.model.state_dict().items()}
    document = {
        "format": 1,
        "step": state.step,
        "tokens": state.tokens,
        "stream": state.stream.state_dict(),
        "order_digest": state.digest.state_dict(),
        "lr_trace": state.trace.hexdigest(),
        "expert_watch": state.watch.state_dict(),
        "random_states": random_states(),
        "spec": spec,
    }
    return Snapshot(state.step, unshared(weights), moments, document)


def save_checkpoint(state: TrainState, folder: Path, spec: dict[str, Any], keep: int) -> Path:
    """Saves the state under `folder`, then removes all but the newest `keep` checkpoints.

    Raises:
        StoreError: the disk is full or cannot be written; earlier checkpoints are untouched.
    """
    return write_checkpoint(snapshot(state, spec), folder, keep)


def write_checkpoint(taken: Snapshot, folder: Path, keep: int) -> Path:
    """`save_checkpoint` of a state that was taken before.

    Raises:
        StoreError: the disk is full or cannot be written; earlier checkpoints are untouched.
    """
    final = path_of(folder, taken.step)
    if is_whole(final):
        return final
    temporary = temporary_of(final)
    try:
        begin(temporary)
        _write_files(taken, temporary)
        publish(temporary, final)
    except (OSError, SafetensorError) as error:  # safetensors writes, and fails, by its own means
        shutil.rmtree(temporary, ignore_errors=True)
        raise unwritten(final, taken.nbytes, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    thin_out(folder, keep)
    return final


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def temporary_of(final: Path) -> Path:
    """Where this process writes a checkpoint until it is whole."""
    return final.with_name(f".{final.name}.{os.getpid()}")


def begin(temporary: Path) -> None:
    """An empty folder to write into."""
    # Left by a process that died while saving: its number may have come round again.
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def publish(temporary: Path, final: Path) -> None:
    """Gives a checkpoint whose files are all written its manifest, and then its name."""
    _seal(temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    _sync(final.parent)


def unwritten(final: Path, nbytes: int, error: BaseException) -> StoreError:
    """That a checkpoint of so many bytes could not be written, and why."""
    reason = getattr(error, "strerror", None) or str(error)
    message = f"could not write the checkpoint of step {int(final.name[5:])} ({reason}); "
    return StoreError.at(str(final), message + shortage(nbytes, free_bytes(final.parent)))


def thin_out(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    for old in checkpoints(folder)[:-keep]:
        _remove(old)


def _remove(checkpoint: Path) -> None:
    """Takes the name first: a process killed meanwhile leaves no half of a checkpoint behind it,
    only what the next resume clears away as it does half-written ones."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # an old one too many harms nobody
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and is_whole(p)]
    return sorted(found, key=lambda path: path.name)


def is_whole(checkpoint: Path) -> bool:
    """Whether every file that the manifest names is there with its size.

    Hashes are left to whoever loads: they cost a full read.
    """
    try:
        hashes(checkpoint)
    except (OSError, ValueError):
        return False
    return True


def hashes(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of every file, as the manifest says; each is there with its size.

    Raises:
        OSError: a file is not there, or cannot be read.
        ValueError: the manifest cannot be used, or a file has another size.
    """
    manifest = read_json(checkpoint / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError("not a manifest of this format")
    entries = manifest.get("files")
    if not isinstance(entries, dict) or not (entries.keys() >= set(FILES) or _is_split(entries)):
        raise ValueError(f"a manifest without {', '.join(FILES)}")
    for name, entry in entries.items():
        is_entry = isinstance(entry, dict) and Path(name).name == name
        if not is_entry or (type(entry.get("bytes")), type(entry.get("sha256"))) != (int, str):
            raise ValueError(f"the manifest does not say size and hash of {name}")
        if (size := (checkpoint / name).stat().st_size) != entry["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
    return {name: entry["sha256"] for name, entry in entries.items()}


def _write_files(taken: Snapshot, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(taken.weights, folder / "model.safetensors")
    save_file(taken.moments, folder / "optimizer.safetensors")
    write_state(taken, folder)


def write_state(taken: Snapshot, folder: Path) -> None:
    """The part of a checkpoint that is not tensors."""
    text = json.dumps(taken.document, indent=1, sort_keys=True) + "\n"
    (folder / STATE).write_text(text)


def _is_split(entries: Iterable[str]) -> bool:
    names = list(entries)
    return STATE in names and any(name.startswith(SHARD) for name in names)


def _seal(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=1) + "\n")
    _sync(manifest)
    _sync(folder)


def unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without second names of one storage (a tied head): safetensors holds a tensor once."""
    first_names: dict[int | str, str] = {}
    for name, tensor in tensors.items():
        own = part(tensor)
        # Parts of which a process holds nothing have no storage to tell them by.
        first_names.setdefault(own.data_ptr() or name, name)
    return {name: tensors[name].contiguous() for name in first_names.values()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
