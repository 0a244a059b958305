"""Puts weights in the original runner's layout into a checkpoint of this package.

The file may hold more than weights (then they are named `state.*`); its configuration is JSON: that
of a model, a document with it under `config`, or that runner's `run_config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from workbench.core.checkpoint import Snapshot, write_checkpoint
from workbench.core.model import Transformer, load_reference_state
from workbench.core.precision import FLOAT32
from workbench.errors import Fault, UserError, reason_of
from workbench.importing.complexity_model import model_settings
from workbench.importing.draft import Draft
from workbench.json_files import read_json
from workbench.spec.load import Source, validate
from workbench.spec.run import RunSpec
from workbench.track.record import without_nulls

_PREFIX = "state."


@dataclass(frozen=True)
class ImportedWeights:
    """A checkpoint that now stands in `folder`, of a model of `parameters` numbers after `step`."""

    folder: Path
    step: int
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {"checkpoint": str(self.folder), "step": self.step, "parameters": self.parameters}


def import_weights(weights: Path, config: Path, out: Path, step: int | None) -> ImportedWeights:
    """Writes the checkpoint `out/checkpoints/step_...`; `load_model(out)` then takes it.

    Gates, route weights and penalties that a run moved stand where its schedule has them at `step`,
    by default the run's last (0 where the configuration is of a model alone). There is no optimizer
    state and no place in any data: the checkpoint is to be scored, not trained on.

    Raises:
        UserError: a file cannot be read, the model has what this package has not, the weights are
            not those of the model, or a checkpoint stands there already.
        StoreError: it cannot be written.
    """
    args, model = _configuration(config)
    spec = _spec(args, model, config, weights)
    at = _step(step, spec, ran="steps" in args)
    vocab_size = model.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise UserError.at(f"{config}: vocab_size", "not a size", vocab_size, "a whole number")
    built = Transformer(spec.model, vocab_size, FLOAT32, grad_checkpointing=False)
    try:
        load_reference_state(built, _tensors(weights))
    except (ValueError, RuntimeError) as error:
        message = f"these are not the weights of this model: {' '.join(str(error).split())}"
        raise UserError.at(str(weights), message, None, f"the model of {config}") from None
    state = {name: tensor.detach() for name, tensor in built.state_dict().items()}
    document = {
        "format": 1,
        "step": at,
        "tokens": at * spec.tokens_per_step,
        "spec": spec.model_dump(mode="json"),
        "imported": str(weights),
    }
    folder = out / "checkpoints"
    if any(folder.glob("step_*")):
        raise UserError.at(str(folder), "there are checkpoints here", None, "a new folder")
    path = write_checkpoint(Snapshot(at, state, {}, document), folder, keep=1)
    return ImportedWeights(path, at, sum(p.numel() for p in built.parameters()))


def _configuration(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The arguments of the run (of a model alone: its configuration), and those of the model."""
    try:
        document = read_json(path)
    except OSError as error:
        raise UserError.at(str(path), reason_of(error), str(path)) from None
    except (ValueError, RecursionError) as error:
        raise UserError.at(str(path), f"not JSON: {error}") from None
    if isinstance(document, dict):
        args, model = document.get("args"), document.get("model_config")
        if isinstance(args, dict) and isinstance(model, dict):
            return args, model
        model = document.get("config", document)
        if isinstance(model, dict) and "mlp_type" in model:
            return model, model
    allowed = "the configuration of a model, or a run_config.json of the original runner"
    raise UserError.at(str(path), "there is no model in it: no mlp_type", None, allowed)


def _spec(
    args: Mapping[str, Any], model: Mapping[str, Any], config: Path, weights: Path
) -> RunSpec:
    """The spec of such a model; the tokenizer and the data that trained it are not known."""
    draft = Draft("imported-weights", "complexity", str(config))
    model_settings(draft, args, model)
    unknown = [one for one in draft.corrections if one.leaf == "model.mlp_type"]
    if unknown:
        message = "the model has what this package has not"
        raise UserError.at(str(config), message, unknown[0].recorded)
    length = model.get("max_position_embeddings")
    given = {
        "name": draft.name,
        "notes": f"weights imported from {weights}; what trained them is not known",
        "model": draft.spec["model"],
        "tokenizer": {"vocab_size": model.get("vocab_size")},
        "data": {"dataset": "random"},
        "training": {
            "steps": args.get("steps", 1),
            "batch_size": args.get("batch_size", 1),
            "seq_len": args.get("seq_len", length),
        },
    }
    try:
        return validate(Source(without_nulls(given)))
    except UserError as error:
        faults = (
            Fault(f"{config}: {f.place}", f.message, f.value, f.allowed) for f in error.faults
        )
        raise UserError(*faults) from None


def _step(step: int | None, spec: RunSpec, ran: bool) -> int:
    last = spec.training.steps if ran else 0
    if step is None:
        return last
    if not 0 <= step <= last:
        raise UserError.at("--step", "the configuration has no such step", step, f"0 to {last}")
    return step


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError.at(str(path), f"not a safetensors file: {error}") from None
    marked = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in found.items()
        if name.startswith(_PREFIX)
    }
    return marked or found
