"""Writes a run's weights and a configuration for others, who need nothing of this package."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workbench.core.data.atomic import sync_folder, temporary_name
from workbench.core.layers import EPSILON
from workbench.core.load_model import LoadedModel, load_model
from workbench.core.moe import RoutedFeedForward, TokenRouted
from workbench.errors import StoreError, UserError, storing
from workbench.track.record import RunRecord, write_json

FORMAT = "workbench safetensors export 1"
CONFIG, WEIGHTS, CODE = "config.json", "model.safetensors", "model.py"
_SOURCE = Path(__file__).with_name("exported_model.py")
_SIZES = (
    "attention_type",
    "mlp_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "shared_expert",
    "shared_intermediate_size",
    "num_experts",
    "top_k",
    "routing_strategy",
    "learn_shared_routed_gates",
    "max_position_embeddings",
    "rope_theta",
    "qk_norm",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Exported:
    """What was written where."""

    folder: Path
    step: int
    parameters: int
    weights_sha256: str

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "folder": str(self.folder),
            "files": [CONFIG, WEIGHTS, CODE],
            "step": self.step,
            "parameters": self.parameters,
            "weights_sha256": self.weights_sha256,
        }


def export(run: Path, record: RunRecord, out: Path, step: int | None = None) -> Exported:
    """Writes the model of a run's newest checkpoint, or of that of `step`, into a new folder.

    Args:
        run: the run's folder.
        out: the folder, which appears whole or not at all.

    Raises:
        UserError: there is something at `out`, or no such checkpoint, or it is damaged.
        StoreError: it cannot be written.
    """
    with storing(out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            message = "there is something here; what is there is never overwritten"
            raise UserError.at("--out", message, str(out), "a new or an empty folder")
    loaded = load_model(run, step, "cpu")
    tensors = _tensors(loaded)
    temporary = temporary_name(out.resolve())
    need = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        with storing(out, need):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            try:
                save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
            except SafetensorError as error:
                raise StoreError.at(str(out), f"the weights cannot be written: {error}") from None
            sha256 = _sha256(temporary / WEIGHTS)
            write_json(temporary / CONFIG, _config(loaded, record, tensors, sha256))
            shutil.copyfile(_SOURCE, temporary / CODE)
            sync_folder(temporary)
            if out.exists():
                out.rmdir()
            temporary.rename(out)
            sync_folder(out.resolve().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    names = {name for name, _ in loaded.model.named_parameters()}
    count = sum(tensor.numel() for name, tensor in tensors.items() if name in names)
    return Exported(out, loaded.step, count, sha256)


def _tensors(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Every tensor by name, a tied head once. Gates as they are at this step: what their schedule
    adds to the learned values is in them."""
    tensors = {name: tensor.detach() for name, tensor in loaded.model.state_dict().items()}
    if loaded.spec.model.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for layer, mlp in enumerate(loaded.model.feed_forwards):
        if isinstance(mlp, RoutedFeedForward) and mlp.has_gates:
            for part, gate in zip(("shared", "routed"), mlp.gates(), strict=True):
                tensors[f"layers.{layer}.mlp.{part}_output_gate"] = gate.detach()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _config(
    loaded: LoadedModel, record: RunRecord, tensors: dict[str, torch.Tensor], sha256: str
) -> dict[str, Any]:
    """All that it takes to build the model again, and which run it is from. No license is named:
    that is for whoever gives the weights away."""
    model = loaded.spec.model
    sizes = {**model.model_dump(mode="json"), "head_dim": model.head_dim}
    routed = [one for one in loaded.model.routed_layers if isinstance(one, TokenRouted)]
    tokenizer = record.effective.tokenizer
    return {
        "format": FORMAT,
        "architecture": "decoder-only transformer: pre-norm RMSNorm, rotary attention, SwiGLU",
        **{name: sizes[name] for name in _SIZES},
        "vocab_size": loaded.model.embed_tokens.weight.shape[0],
        "norm_eps": EPSILON,
        "hidden_act": "silu",
        "compute_dtype": str(loaded.model.precision.compute).removeprefix("torch."),
        "weights_dtype": "float32",
        "route_weights": routed[0].route_weights.tolist() if routed else None,
        "tokenizer": {
            "name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.sha256,
        },
        "step": loaded.step,
        "tokens": loaded.tokens,
        "seq_len": loaded.spec.training.seq_len,
        "run": {"name": record.name, "id": record.id, "checkpoint_sha256": loaded.sha256},
        "results": record.results.final if _is_last(loaded, record) else {},
        "weights": {"file": WEIGHTS, "sha256": sha256, "tensors": _shapes(tensors)},
        "code": {"file": CODE, "sha256": _sha256(_SOURCE)},
    }


def _is_last(loaded: LoadedModel, record: RunRecord) -> bool:
    return bool(record.points) and record.points[-1].step == loaded.step


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')}{json.dumps(list(tensor.shape))}"
        for name, tensor in sorted(tensors.items())
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
