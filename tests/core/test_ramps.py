"""Values of the model that move over a run: by their formula, in every forward pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import ROUTED, tiny_parts, tiny_spec, untracked_run
from torch import Tensor

from workbench.core.model import Transformer, build_model
from workbench.core.moe import TokenRouted
from workbench.core.precision import FLOAT32
from workbench.core.schedules import model_values, ramp, ramp_steps, ramp_tokens
from workbench.core.train import StepResult, train
from workbench.run import Components
from workbench.spec.run import ModelSpec, RunSpec
from workbench.track.store import Store

GATES = {"learn_shared_routed_gates": True, "shared_gate_init": 0.9, "routed_gate_init": 0.2}


def train_all(parts: Components, **options: Any) -> list[StepResult]:
    return list(train(parts.spec, parts.state, parts.forward, **options))


def spec(steps: int = 101, **model: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "ramps",
            "model": {**ROUTED, **model},
            "data": {"dataset": "random"},
            "training": {"steps": steps, "batch_size": 2, "seq_len": 8},
        }
    )


def half_cosine(start: float, end: float, steps: int, step: int) -> float:
    """The value at update `step` of a ramp over the updates 1 to `steps`."""
    if step >= steps:
        return end
    return start + (end - start) * (0.5 - 0.5 * math.cos(math.pi * (step - 1) / (steps - 1)))


# -- values


def test_the_primary_weight_at_its_first_middle_and_last_update() -> None:
    run = spec(top_k_primary_weight=0.85, top_k_primary_weight_final=0.45)
    assert ramp_steps(run, "top_k_primary_weight_schedule") == 51  # half of 101, rounded up
    found = {step: model_values(run, step).primary_weight for step in range(102)}
    assert (found[0], found[1]) == (0.85, 0.85)
    assert found[26] == pytest.approx(0.65)
    assert (found[51], found[52], found[101]) == (0.45, 0.45, 0.45)
    for step in range(1, 102):
        assert found[step] == pytest.approx(half_cosine(0.85, 0.45, 51, step), rel=1e-12)


def test_the_primary_weight_stays_unless_a_final_one_is_given() -> None:
    run = spec(top_k_primary_weight=0.85)
    assert {model_values(run, step).primary_weight for step in range(102)} == {0.85}
    assert run.model.top_k_primary_weight_schedule_ratio is None
    assert "not_applicable" in ramp_tokens(run)


def test_gates_shift_by_as_much_as_their_ramp_has_moved() -> None:
    run = spec(**GATES, shared_gate_final=0.5, gate_schedule_steps=11)
    assert model_values(run, 1).shared_gate_shift == 0
    assert model_values(run, 6).shared_gate_shift == pytest.approx(-0.2)
    assert model_values(run, 11).shared_gate_shift == pytest.approx(-0.4)
    assert model_values(run, 101).shared_gate_shift == pytest.approx(-0.4)
    assert {model_values(run, step).routed_gate_shift for step in range(102)} == {0.0}


def test_the_diversity_weight_rises_over_seven_tenths_of_the_run() -> None:
    run = spec(steps=100, expert_diversity_lambda=0.4)
    weights = [model_values(run, step).diversity_lambda for step in range(101)]
    assert (weights[0], weights[1]) == (0, 0)
    assert weights[70:] == [0.4] * 31
    assert weights[69] < 0.4
    for step in range(1, 101):
        assert weights[step] == pytest.approx(half_cosine(0, 0.4, 70, step), abs=1e-15)
    off = spec(expert_diversity_lambda=0.0)
    assert {model_values(off, step).diversity_lambda for step in range(102)} == {0.0}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_ramps_begin_and_end_where_they_should(steps: int) -> None:
    values = [ramp(2.0, 3.0, steps, step) for step in range(5)]
    assert values[0] == 2.0  # before the first update
    assert values[steps:] == [3.0] * (5 - steps)
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("ratio", "steps", "expected"),
    [
        (0.07, 100, 7),
        (0.55, 100, 55),
        (0.29, 100, 29),
        (0.5, 101, 51),
        (0.001, 100, 1),
        (1.0, 7, 7),
    ],
)
def test_a_ratio_is_taken_as_it_is_written(ratio: float, steps: int, expected: int) -> None:
    """0.07 x 100 is a little above 7 in binary, and is 7 updates all the same."""
    run = spec(
        steps=steps,
        top_k_primary_weight_final=0.9,
        top_k_primary_weight_schedule_ratio=ratio,
    )
    assert ramp_steps(run, "top_k_primary_weight_schedule") == expected
    assert ramp_tokens(run) == {"top_k_primary_weight_schedule": expected * 16}


def test_a_ratio_of_zero_is_the_final_value_from_the_first_update_on() -> None:
    run = spec(
        top_k_primary_weight=0.5,
        top_k_primary_weight_final=0.9,
        top_k_primary_weight_schedule_ratio=0.0,
    )
    assert [model_values(run, step).primary_weight for step in (0, 1, 2)] == [0.5, 0.9, 0.9]


# -- in the model


def test_every_forward_pass_has_the_value_of_its_update(tmp_path: Path) -> None:
    model = {
        **GATES,
        "shared_gate_final": 0.4,
        "routed_gate_final": 1.0,
        "gate_schedule_steps": 5,
        "top_k_primary_weight": 1.0,
        "top_k_primary_weight_final": 0.5,
        "top_k_primary_weight_schedule_steps": 5,
    }
    parts = tiny_parts(tmp_path, model=model, training={"steps": 6})
    layers = parts.state.model.routed_layers
    for mlp in layers:
        mlp.shared_output_gate.requires_grad_(False)
        mlp.routed_output_gate.requires_grad_(False)
    seen: list[list[float]] = []

    def note(mlp: TokenRouted, *_: Any) -> None:
        gates = [float(gate.detach()) for gate in mlp.gates()]
        seen.append([float(mlp.route_weights[0]), float(mlp.route_weights.sum()), *gates])

    layers[1].register_forward_hook(note)
    train_all(parts)
    expected = [
        [
            half_cosine(1.0, 0.5, 5, step),
            1.0,
            half_cosine(0.9, 0.4, 5, step),
            half_cosine(0.2, 1.0, 5, step),
        ]
        for step in range(1, 7)
    ]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))


def test_a_ramped_gate_is_learned_and_shifted(tmp_path: Path) -> None:
    model = {**GATES, "routed_gate_final": 0.6, "gate_schedule_steps": 3}
    parts = tiny_parts(tmp_path, model=model, training={"steps": 5}, optimizer={"lr": 1e-2})
    train_all(parts)
    for mlp in parts.state.model.routed_layers:
        learned = float(mlp.routed_output_gate.detach()) - 0.2
        assert 1e-3 < abs(learned) < 0.1
        shared, routed = (float(gate.detach()) for gate in mlp.gates())
        assert routed == pytest.approx(0.6 + learned, rel=1e-6)
        assert shared == pytest.approx(float(mlp.shared_output_gate.detach()), rel=1e-6)
    state = parts.state.model.state_dict()
    assert not [name for name in state if "shift" in name or "route_weights" in name]


def gradients_at(**fields: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model = build_model(ModelSpec.model_validate({**ROUTED, **fields}), 257, 0, FLOAT32)
    ids = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(1))
    logits = model.logits(ids[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_a_gate_at_an_end_point_still_learns(top_k: int, gate: float) -> None:
    fields = {"learn_shared_routed_gates": True, "top_k": top_k}
    logits, gradients = gradients_at(**fields, shared_gate_init=1.0, routed_gate_init=gate)
    for layer in range(2):
        prefix = f"layers.{layer}.mlp."
        assert gradients[f"{prefix}routed_output_gate"] != 0
        assert gradients[f"{prefix}shared_output_gate"] != 0
        assert bool(gradients[f"{prefix}down_proj_w"].any()) == (gate != 0)
    if gate == 1:
        plain, _ = gradients_at(top_k=top_k)
        torch.testing.assert_close(logits, plain, rtol=1e-6, atol=1e-6)


def test_primary_weights_at_the_end_points_are_single_routes() -> None:
    single, _ = gradients_at(top_k=1)
    first, gradients = gradients_at(top_k=2, top_k_primary_weight=1.0)
    torch.testing.assert_close(first, single, rtol=1e-6, atol=1e-6)
    assert all(bool(g.any()) for n, g in gradients.items() if n.endswith("down_proj_w"))
    second, _ = gradients_at(top_k=2, top_k_primary_weight=0.0)
    assert not torch.allclose(second, single)


def test_values_reach_a_run_and_its_record(tmp_path: Path) -> None:
    """The last evaluation is made with the final values: the run ends as one that began there."""
    model = {
        "top_k_primary_weight": 0.5,
        "top_k_primary_weight_final": 0.9,
        "top_k_primary_weight_schedule_steps": 2,
        "expert_diversity_lambda": 0.5,
        "expert_diversity_schedule_steps": 4,
    }
    run = tiny_spec(tmp_path, model=model)
    record = untracked_run(run, Store(tmp_path / "mlruns")).record
    assert record.effective.budget.ramp_tokens == {
        "top_k_primary_weight_schedule": 2 * 128,
        "expert_diversity_schedule": 4 * 128,
    }


# -- under torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gates", "primary weight", "learned router with gates"])
def test_a_compiled_run_follows_the_ramps_without_a_second_graph(tmp_path: Path, kind: str) -> None:
    from torch._dynamo.utils import counters

    model: dict[str, Any] = {
        "gates": {**GATES, "shared_gate_final": 0.0, "routed_gate_final": 1.0},
        "primary weight": {"top_k_primary_weight": 0.0, "top_k_primary_weight_final": 1.0},
        "learned router with gates": {
            **GATES,
            "mlp_type": "learned_router",
            "shared_gate_final": 0.0,
            "routed_gate_final": 1.0,
        },
    }[kind]
    ramped = "gate" if "gates" in kind else "top_k_primary_weight"
    model |= {f"{ramped}_schedule_steps": 12}
    # More layers and updates than dynamo's limit of recompilations.
    model |= {"num_hidden_layers": 10}
    curves = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        layout = {"steps": 12, "compile": compiled}
        parts = tiny_parts(tmp_path, model=model, training=layout, optimizer={"lr": 1e-3})
        curves[compiled] = [r.nll for r in train_all(parts)]
        assert counters["stats"].get("unique_graphs", 0) == int(compiled)
    assert curves[True] == pytest.approx(curves[False], rel=2e-5)
    # A value that stayed as it was at first would show: the ramp matters more than the tolerance.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "set_values", lambda self, values: None)
        layout = {"steps": 12}
        parts = tiny_parts(tmp_path, model=model, training=layout, optimizer={"lr": 1e-3})
        stale = [r.nll for r in train_all(parts)]
    assert abs(stale[-1] - curves[False][-1]) > 20 * 2e-5 * curves[False][-1]
