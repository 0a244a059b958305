"""Which optimizer setting each parameter gets, and the optimizer built from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import torch
from torch import nn

from workbench.spec.run import OptimizerSpec


@dataclass(frozen=True)
class ParameterRow:
    """One row of the parameter table: what a parameter is and how it is trained."""

    name: str
    shape: tuple[int, ...]
    optimizer: str
    group: str
    lr_scale: float
    weight_decay: float


def parameter_table(model: nn.Module, spec: OptimizerSpec) -> list[ParameterRow]:
    """How each trainable parameter is trained; a tied parameter stands once.

    Matrices (embeddings and expert stacks included) decay; norms, biases and scalar gains, all of
    fewer than two dimensions, do not. The rule asks for dimensions, not names, so that a new
    module cannot slip into the wrong group.
    """
    rows = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim >= 2
        group, decay = ("decay", spec.weight_decay) if decays else ("no_decay", 0.0)
        rows.append(ParameterRow(name, tuple(parameter.shape), spec.name, group, 1.0, decay))
    return rows


def table_sha256(rows: list[ParameterRow]) -> str:
    """Hash of the parameter table."""
    text = json.dumps([asdict(row) for row in rows], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def build_optimizer(
    model: nn.Module, spec: OptimizerSpec, rows: list[ParameterRow]
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over the groups of the parameter table."""
    parameters = dict(model.named_parameters())
    groups = []
    for name in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == name]
        groups.append(
            {
                "params": [(row.name, parameters[row.name]) for row in members],
                "weight_decay": members[0].weight_decay,
                "name": name,
            }
        )
    beta1, beta2 = spec.betas
    device = next(iter(parameters.values())).device
    fused = device.type in ("cpu", "cuda", "mps")
    return torch.optim.AdamW(groups, lr=spec.lr, betas=(beta1, beta2), eps=spec.eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group the rate of the coming update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
