"""When the watch over frozen experts stops a run, and when it lets it go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_parts
from torch import Tensor

from workbench.core.model import Transformer
from workbench.core.moe import EXPERT_STACKS
from workbench.core.train import StepResult, train
from workbench.errors import TrainingStoppedError
from workbench.run import Components


def train_all(parts: Components) -> list[StepResult]:
    return list(train(parts.spec, parts.state, parts.forward))


def freeze(model: Transformer, layer: int, expert: int, stacks: tuple[str, ...]) -> None:
    """Detaches an expert's matrices from the graph, as a kernel without a backward pass does."""
    mlp = model.routed_layers[layer]
    whole = mlp.routed

    def routed(x: Tensor, weights: Tensor) -> Tensor:
        kept = {name: getattr(mlp, name) for name in stacks}
        for name, parameter in kept.items():
            parts = list(parameter.unbind())
            parts[expert] = parts[expert].detach()
            del mlp._parameters[name]
            setattr(mlp, name, torch.stack(parts))
        try:
            return whole(x, weights)
        finally:
            for name, parameter in kept.items():
                delattr(mlp, name)
                mlp.register_parameter(name, parameter)

    mlp.routed = routed  # type: ignore[method-assign]


@pytest.mark.parametrize("arm", ["token_routed", "learned_router"])
@pytest.mark.parametrize("stacks", [EXPERT_STACKS, ("up_proj_w",)])
def test_a_detached_expert_stops_the_run_in_the_fifth_step(
    tmp_path: Path, arm: str, stacks: tuple[str, ...]
) -> None:
    """Also where one matrix alone is frozen, with telemetry off, and under weight decay. The rate
    is small, so that no router turns away from the expert meanwhile."""
    changes: dict[str, Any] = {"training": {"steps": 9}, "optimizer": {"lr": 1e-5}}
    parts = tiny_parts(tmp_path, model={"mlp_type": arm}, **changes)
    freeze(parts.state.model, 1, 2, stacks)
    with pytest.raises(TrainingStoppedError, match=r"step 5: layer 1 expert 2 gets tokens") as stop:
        train_all(parts)
    assert stop.value.exit_code == 4
    assert stacks[0] in str(stop.value)
    assert "layer 0" not in str(stop.value)
    assert parts.state.step == 4


def test_a_gradient_that_returns_clears_an_expert(tmp_path: Path) -> None:
    """What counts is five updates without any gradient between them."""
    parts = tiny_parts(tmp_path, training={"steps": 24})
    mlp = parts.state.model.routed_layers[0]
    calls = [0]

    def intermittent(gradient: Tensor) -> Tensor:
        calls[0] += 1
        kept = torch.ones(4, 1, 1)
        kept[1] = float(calls[0] % 5 == 0)  # four updates without, one with
        return gradient * kept

    mlp.up_proj_w.register_hook(intermittent)
    assert len(train_all(parts)) == 24


def test_a_frozen_expert_behind_a_gate_that_opens_stops_five_steps_after_it(tmp_path: Path) -> None:
    """The first update has the gate at 0 and gives it a gradient; the second opens it."""
    model = {"learn_shared_routed_gates": True, "routed_gate_init": 0.0}
    parts = tiny_parts(tmp_path, model=model, training={"steps": 9})
    freeze(parts.state.model, 0, 1, EXPERT_STACKS)
    with pytest.raises(TrainingStoppedError, match="step 6: layer 0 expert 1"):
        train_all(parts)
