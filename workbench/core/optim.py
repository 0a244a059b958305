"""Which optimizer setting each parameter gets, and the optimizers built from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from workbench.core.moe import EXPERT_STACKS, SHARED_MATRICES
from workbench.core.muon import Muon
from workbench.core.schedules import learning_rate
from workbench.core.sharding import is_split
from workbench.spec.run import OptimizerSpec, RunSpec

Kind = Literal["vector", "vocabulary", "router", "expert", "shared", "matrix"]


@dataclass(frozen=True)
class ParameterRow:
    """One row of the parameter table: what a parameter is and how it is trained.

    Its rate is `lr_scale` times the scheduled rate of its optimizer.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    optimizer: Literal["adamw", "muon"]
    lr_scale: float
    weight_decay: float

    @property
    def group(self) -> str:
        """The parameters trained alike."""
        return f"{self.optimizer}/{'no_decay' if self.kind == 'vector' else self.kind}"


def parameter_table(model: nn.Module, spec: OptimizerSpec) -> list[ParameterRow]:
    """How each trainable parameter is trained; a tied parameter stands once.

    Matrices (embeddings and expert stacks included) decay; norms, biases and scalar gains, all of
    fewer than two dimensions, do not, and are AdamW's like embeddings, head and router.
    """
    return [
        _row(name, parameter, spec)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _row(name: str, parameter: nn.Parameter, spec: OptimizerSpec) -> ParameterRow:
    kind, shape = kind_of(name, parameter), tuple(parameter.shape)
    match kind:
        case "vector":
            return ParameterRow(name, shape, kind, "adamw", 1.0, 0.0)
        case "expert":
            scale, decay = spec.expert_lr_scale, spec.expert_weight_decay
        case "shared":
            scale, decay = spec.shared_lr_scale, spec.shared_weight_decay
        case _:
            scale, decay = 1.0, spec.weight_decay
    assert decay is not None
    if kind in ("expert", "shared", "matrix") and spec.uses_muon_for(kind):
        return ParameterRow(name, shape, kind, "muon", 1.0, decay)
    assert scale is not None
    return ParameterRow(name, shape, kind, "adamw", scale, decay)


def kind_of(name: str, parameter: torch.Tensor) -> Kind:
    """What a parameter is, by its dimensions and the last parts of its name.

    Prefixes that wrappers put before a name (`module.`, `_orig_mod.`) play no part.
    """
    if parameter.ndim < 2:
        return "vector"
    *_, owner, own = ("", *name.split("."))
    if own in EXPERT_STACKS:
        return "expert"
    if owner in SHARED_MATRICES:
        return "shared"
    if owner in ("embed_tokens", "lm_head"):
        return "vocabulary"
    return "router" if owner == "router" else "matrix"


def table_sha256(rows: list[ParameterRow]) -> str:
    """Hash of the parameter table."""
    text = json.dumps([asdict(row) for row in rows], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def build_optimizers(
    model: nn.Module, spec: OptimizerSpec, rows: list[ParameterRow]
) -> list[torch.optim.Optimizer]:
    """AdamW (Loshchilov and Hutter 2019), and Muon where the table has parameters for it.

    Every group also holds `peak` and `lr_scale`, from which `set_learning_rates` makes its rate.
    """
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device

    def groups(optimizer: str, peak: float) -> list[dict[str, Any]]:
        made: dict[tuple[str, bool], dict[str, Any]] = {}
        for row in rows:
            if row.optimizer != optimizer:
                continue
            # One kernel updates a whole group: it takes no tensors that are split beside others.
            group = made.setdefault(
                (row.group, is_split(parameters[row.name])),
                {
                    "params": [],
                    "weight_decay": row.weight_decay,
                    "name": row.group,
                    "peak": peak,
                    "lr_scale": row.lr_scale,
                },
            )
            group["params"].append((row.name, parameters[row.name]))
        return list(made.values())

    beta1, beta2 = spec.betas
    fused = device.type in ("cpu", "cuda", "mps")
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            groups("adamw", spec.lr), lr=spec.lr, betas=(beta1, beta2), eps=spec.eps, fused=fused
        )
    ]
    if any(row.optimizer == "muon" for row in rows):
        assert spec.muon_lr is not None
        assert spec.muon_momentum is not None
        assert spec.muon_nesterov is not None
        assert spec.muon_ns_steps is not None
        assert spec.muon_orthogonal_blend is not None
        assert spec.muon_max_update_rms is not None
        optimizers.append(
            Muon(
                groups("muon", spec.muon_lr),
                lr=spec.muon_lr,
                momentum=spec.muon_momentum,
                nesterov=spec.muon_nesterov,
                ns_steps=spec.muon_ns_steps,
                blend=spec.muon_orthogonal_blend,
                max_update_rms=spec.muon_max_update_rms,
            )
        )
    return optimizers


def set_learning_rates(optimizers: list[torch.optim.Optimizer], spec: RunSpec, step: int) -> None:
    """Gives every group its rate of update `step`: one schedule for both optimizers, used once."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step, group["peak"]) * group["lr_scale"]


def rates(optimizers: list[torch.optim.Optimizer]) -> dict[str, float]:
    """The present rate of every group, by its name (such as `adamw/expert`)."""
    return {
        group["name"]: float(group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
    }
