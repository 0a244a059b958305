"""The model of a checkpoint, built from the checkpoint alone, to be scored and not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.core.device import DeviceName, choose_device
from workbench.core.model import Transformer
from workbench.core.precision import choose_precision
from workbench.core.restore import Saved, load_weights, open_checkpoint
from workbench.core.schedules import model_values
from workbench.errors import Fault, UserError, storing
from workbench.spec.load import Source, validate
from workbench.spec.run import RunSpec


@dataclass(frozen=True)
class LoadedModel:
    """A model as it was after `step` updates, on its device, with the spec that trained it.

    `sha256` is the identity of the checkpoint: of its manifest, which holds the hash of every file.
    """

    model: Transformer
    spec: RunSpec
    step: int
    tokens: int
    folder: Path
    sha256: str


def load_model(
    place: Path, step: int | None = None, device: DeviceName | None = None
) -> LoadedModel:
    """The model of a checkpoint, or of a run folder's newest one or the one of `step`.

    It scores as the run's own evaluation at that step did, bit for bit on the same machine:
    weights, route tables and scheduled values are those of the step. `device` defaults to the
    spec's.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it was written by a version of
            workbench whose spec or model is another one.
        StoreError: the folder cannot be read.
    """
    saved = open_checkpoint(find_checkpoint(place, step))
    if saved.path.name != _name_of(saved.step):
        message = "the folder has the name of another step than the checkpoint in it"
        raise UserError.at(str(saved.path), message, saved.step)
    spec = _spec(saved)
    chosen = choose_device(device or spec.training.device)
    try:
        precision = choose_precision(spec.training.precision, chosen)
    except ValueError as error:
        raise UserError.at(str(saved.path), str(error)) from None
    vocab_size = len(saved.weights().get("embed_tokens.weight", " "))  # none: told below
    model = Transformer(spec.model, vocab_size, precision, grad_checkpointing=False)
    load_weights(model, saved)
    model.requires_grad_(False)
    model.to(chosen)
    model.set_values(model_values(spec, saved.step))
    tokens = saved.step * spec.tokens_per_step
    return LoadedModel(
        model, spec, saved.step, int(saved.state.get("tokens", tokens)), saved.path, saved.sha256
    )


def find_checkpoint(place: Path, step: int | None = None) -> Path:
    """The folder of a checkpoint: `place` itself, or a run folder's newest or that of `step`.

    The newest one stands whatever state it is in: an older one in its place would be another model.

    Raises:
        UserError: there is none.
    """
    if (place / "manifest.json").exists():
        if step is not None and place.name != _name_of(step):
            raise UserError.at(str(place), "this is the checkpoint of another step", step)
        return place
    folder = place / "checkpoints"
    with storing(folder):
        found = [path for path in folder.glob("step_*") if path.is_dir()]
    by_step = {int(p.name[5:]): p for p in found if p.name[5:].isdigit()}
    if not by_step:
        message = "there is no checkpoint here; a run that ended before its first update has none"
        raise UserError.at(str(folder), message)
    if step is None:
        return by_step[max(by_step)]
    if step not in by_step:
        kept = ", ".join(map(str, sorted(by_step)))
        raise UserError.at(str(folder), "there is no checkpoint of this step", step, kept)
    return by_step[step]


def _name_of(step: int) -> str:
    return f"step_{step:08d}"


def _spec(saved: Saved) -> RunSpec:
    given = saved.state.get("spec")
    place = saved.path / "state.json"
    if not isinstance(given, dict):
        raise UserError.at(f"{place}: spec", "is not the spec of a run", given)
    try:
        return validate(Source(given))
    except UserError as error:
        allowed = "the version of workbench that saved this checkpoint"
        faults = (
            Fault(f"{place}: spec.{fault.place}", fault.message, fault.value, allowed)
            for fault in error.faults
        )
        raise UserError(*faults) from None
