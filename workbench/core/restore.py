"""Reads a checkpoint that is whole, and puts a run's state back to where it was saved.

Nothing is unpickled: tensors come from safetensors, the rest from JSON. Every file is checked
against the hash in the manifest before a byte of it is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from workbench.core.checkpoint import (
    FORMAT,
    MOMENTS,
    WEIGHTS,
    checkpoints,
    hashes,
    is_whole,
    unshared,
)
from workbench.core.random_states import set_random_states
from workbench.core.schedules import RateTrace, model_values
from workbench.core.shard_files import OF_MOMENTS, OF_WEIGHTS, read_shards
from workbench.core.sharding import is_split, lay_out
from workbench.core.train import TrainState
from workbench.errors import UserError
from workbench.json_files import read_json
from workbench.spec.run import RunSpec

# What a state of another form makes of this package, numpy and torch.
_DAMAGED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


@dataclass(frozen=True, eq=False)
class Saved:
    """A checkpoint whose content was checked; `state` is its JSON, tensors are read when asked."""

    path: Path
    sha256: str  # of the manifest, and so of everything in it
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The update it was saved after."""
        return int(self.state["step"])

    def weights(self, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Parameters and buffers by name; of a tied head only one name.

        A tensor that is split in `like` comes split as there: this process's part of it alone.
        """
        return self._tensors(WEIGHTS, OF_WEIGHTS, lambda name: (like or {}).get(name))

    def moments(self, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Optimizer state as `<parameter>/<key>`; `like` are parameters, as in `weights`."""
        return self._tensors(
            MOMENTS, OF_MOMENTS, lambda name: (like or {}).get(name.rpartition("/")[0])
        )

    def _tensors(
        self, file: str, begins: str, like: Callable[[str], Tensor | None]
    ) -> dict[str, Tensor]:
        if (self.path / file).exists():
            found = _tensors(self.path / file)
            return {name: _laid_out(one, like(name)) for name, one in found.items()}

        def place(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            model = like(name)
            if model is None or model.shape != shape or not is_split(model):
                return torch.empty(shape, dtype=dtype)
            return torch.empty_like(model.detach(), dtype=dtype)

        try:
            return read_shards(self.path, begins, place)
        except (SafetensorError, OSError, *_DAMAGED) as error:
            raise UserError.at(str(self.path), f"not the parts of a model: {error}") from None


def open_checkpoint(path: Path) -> Saved:
    """Opens a checkpoint and checks the content of every file against the manifest.

    Raises:
        UserError: it is not there, not whole, of another format, or its content has changed.
    """
    place, allowed = str(path), "a checkpoint as it was saved"
    try:
        raw = (path / "manifest.json").read_bytes()
    except OSError:
        raise UserError.at(
            place, "there is no checkpoint here: no manifest", None, allowed
        ) from None
    try:
        wanted = hashes(path)
    except (OSError, ValueError) as error:
        message = f"the checkpoint is not whole: {error}"
        raise UserError.at(place, message, None, allowed) from None
    for name, sha256 in wanted.items():
        try:
            with (path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError.at(str(path / name), f"cannot be read: {error.strerror}") from None
        if found != sha256:
            message = "the content is not what the manifest says: the file is damaged"
            raise UserError.at(str(path / name), message, found, sha256)
    return Saved(path, hashlib.sha256(raw).hexdigest(), _state(path / "state.json"))


def _state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint, with the fields that decide where a run goes on."""
    try:
        state = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError.at(str(path), f"not the state of a run: {error}") from None
    if not isinstance(state, dict):
        raise UserError.at(str(path), "not the state of a run", type(state).__name__)
    if state.get("format") != FORMAT:
        message = "a format that this version does not read"
        raise UserError.at(str(path), message, state.get("format"), str(FORMAT))
    for name in ("step", "tokens"):
        if type(state.get(name)) is not int or not 0 <= state[name] < 2**63:
            message = "not the state of a run"
            raise UserError.at(f"{path}: {name}", message, state.get(name), "a whole number >= 0")
    if not isinstance(state.get("spec"), dict):
        raise UserError.at(f"{path}: spec", "is not the spec of a run", state.get("spec"))
    return state


def newest_checkpoint(folder: Path) -> tuple[Saved | None, list[str]]:
    """The newest checkpoint under `folder` that is whole, and what is wrong with newer ones."""
    problems = [
        f"{path.name} is not whole: passed over"
        for path in sorted(folder.glob("step_*"))
        if path.is_dir() and not is_whole(path)
    ]
    for path in reversed(checkpoints(folder)):
        try:
            return open_checkpoint(path), problems
        except UserError as error:
            problems.append(f"{path.name} is damaged ({error.faults[0].place}): passed over")
    return None, problems


def restore(state: TrainState, saved: Saved, spec: RunSpec) -> None:
    """Puts a freshly built state to where `saved` was taken: the next update is the one after it.

    Raises:
        UserError: the checkpoint is of another model, other optimizers or other data.
    """
    try:
        load_weights(state.model, saved)
        _load_moments(state, saved)
        document = saved.state
        state.stream.load_state_dict(document["stream"])
        state.digest.load_state_dict(document["order_digest"])
        state.trace = RateTrace(document["lr_trace"])
        state.watch.load_state_dict(document["expert_watch"])
        state.step, state.tokens = saved.step, int(document["tokens"])
        set_random_states(document["random_states"])
    except UserError:
        raise
    except _DAMAGED as error:
        raise UserError.at(str(saved.path), f"not the state of this run: {error!r}") from error
    state.model.set_values(model_values(spec, state.step))


def load_weights(model: torch.nn.Module, saved: Saved) -> None:
    """Puts the weights and buffers of a checkpoint into a model of the same shape.

    Raises:
        UserError: a tensor is missing, has another shape or dtype, or the model has none like it.
    """
    # A tied tensor has several names and was saved under the first of them.
    own = unshared({name: tensor.detach() for name, tensor in model.state_dict().items()})
    weights = saved.weights(own)
    path = saved.path / WEIGHTS
    _require_same_names(path, weights, set(own))
    for name, tensor in own.items():
        _copy(path, name, weights[name], tensor)


def _load_moments(state: TrainState, saved: Saved) -> None:
    """By the name of the parameter: two tensors of one shape cannot swap their moments."""
    path = saved.path / MOMENTS
    parameters = dict(state.model.named_parameters())
    moments = saved.moments(parameters)
    owners = {
        parameter: optimizer
        for optimizer in state.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for full_name, value in moments.items():
        name, _, key = full_name.rpartition("/")
        if name not in parameters:
            message = "the optimizer state of a parameter that this model does not have"
            raise UserError.at(str(path), message, name)
        parameter = parameters[name]
        if value.ndim and value.shape != parameter.shape:
            message = "optimizer state of another shape than its parameter"
            allowed = f"{list(parameter.shape)}, or a single number"
            raise UserError.at(str(path), message, f"{full_name}: {list(value.shape)}", allowed)
        if value.ndim:
            own = torch.empty_like(parameter.detach(), dtype=value.dtype).copy_(value)
        else:
            own = value.clone()  # a count of steps: AdamW keeps it on the CPU, unless told
            if own.ndim == 0 and parameter.device.type != "cpu":
                own = own.to(parameter.device)
        owners[parameter].state[parameter][key] = own


def _require_same_names(path: Path, found: dict[str, Tensor], wanted: set[str]) -> None:
    for names, what in ((wanted - found.keys(), "lacks"), (found.keys() - wanted, "has beyond")):
        if names:
            listed = ", ".join(sorted(names)[:3])
            raise UserError.at(str(path), f"the checkpoint {what} this model's tensors", listed)


def _copy(path: Path, name: str, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        found = f"{name}: {list(source.shape)} {source.dtype}"
        allowed = f"{list(target.shape)} {target.dtype}"
        raise UserError.at(str(path), "a tensor of another shape or type", found, allowed)
    target.copy_(source)


def _laid_out(tensor: Tensor, like: Tensor | None) -> Tensor:
    """A tensor that is whole, or this process's part of it where `like` is split."""
    if like is None or tensor.shape != like.shape or not is_split(like):
        return tensor
    return lay_out(tensor, like)


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError.at(str(path), f"not a safetensors file: {error}") from None
