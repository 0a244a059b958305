"""Which settings belong to which kind of run, and that a resolved spec loads to itself."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from workbench.errors import UserError
from workbench.spec.load import load_spec
from workbench.spec.profiles import DENSE_NULLS, MUON_KINDS, RAMPS
from workbench.spec.run import LARGEST, ModelSpec, OptimizerSpec, RunSpec, spec_hash

MLPS = ("token_routed", "learned_router", "dense")
SCOPES = ("expert", "expert_shared", "all")

MODEL_FIELDS = {
    "shared_expert": True,
    "shared_intermediate_size": 64,
    "shared_expert_chunk_tokens": 0,
    "num_experts": 4,
    "top_k": 2,
    "top_k_primary_weight": 0.5,
    "top_k_primary_weight_final": 0.6,
    "top_k_primary_weight_schedule_ratio": 0.5,
    "top_k_primary_weight_schedule_steps": 10,
    "routing_strategy": "random",
    "router_aux_loss_weight": 0.0,
    "learn_shared_routed_gates": False,
    "shared_gate_init": 1.0,
    "routed_gate_init": 0.0,
    "shared_gate_final": 0.0,
    "routed_gate_final": 0.0,
    "gate_schedule_ratio": 0.5,
    "gate_schedule_steps": 10,
    "expert_diversity_lambda": 0.0,
    "expert_diversity_target": "down",
    "expert_diversity_schedule_ratio": 0.5,
    "expert_diversity_schedule_steps": 10,
}
"""Every field of an expert model, with a value that is valid by itself."""

PRIMARY = {
    "top_k_primary_weight",
    "top_k_primary_weight_final",
    "top_k_primary_weight_schedule_ratio",
    "top_k_primary_weight_schedule_steps",
}
GATES = {"shared_gate_init", "routed_gate_init", "shared_gate_final", "routed_gate_final"}
GATE_RAMP = {"gate_schedule_ratio", "gate_schedule_steps"}
DIVERSITY_RAMP = {"expert_diversity_schedule_ratio", "expert_diversity_schedule_steps"}
SHARED = {"shared_intermediate_size", "shared_expert_chunk_tokens"}
PLAIN = {"data": {"dataset": "random"}}


def load(folder: Path, document: dict[str, Any]) -> RunSpec:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**PLAIN, **document}))
    return load_spec(path)


def refusals(folder: Path, document: dict[str, Any]) -> dict[str, str]:
    """Place -> fault, of a document that has some."""
    with pytest.raises(UserError) as caught:
        load(folder, document)
    found = {f.place.rpartition(" ")[2]: f"{f.message}; {f.allowed}" for f in caught.value.faults}
    assert len(found) == len(caught.value.faults), "a field is named once"
    return found


def reloads(folder: Path, spec: RunSpec) -> bool:
    """Whether the dumped spec, read from YAML, is the same and has the same hash."""
    again = load(folder, spec.model_dump(mode="json"))
    return again == spec and spec_hash(again) == spec_hash(spec)


# -- what does not apply


def test_the_fields_of_an_expert_model_are_all_known_here() -> None:
    """A new field has to be entered above, and is then refused where it does not apply."""
    assert set(MODEL_FIELDS) == set(DENSE_NULLS)
    null = ModelSpec.model_validate({"mlp_type": "dense"}).model_dump()
    assert {key for key, value in null.items() if value is None} == set(MODEL_FIELDS)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ({"mlp_type": "dense"}, set(MODEL_FIELDS)),
        (
            {"mlp_type": "learned_router"},
            PRIMARY | {"routing_strategy"} | GATES | {"expert_diversity_target"} | DIVERSITY_RAMP,
        ),
        (
            {"mlp_type": "token_routed"},
            {"router_aux_loss_weight", "expert_diversity_target"} | GATES | DIVERSITY_RAMP,
        ),
        (
            {"mlp_type": "token_routed", "top_k": 1},
            PRIMARY
            | {"router_aux_loss_weight", "expert_diversity_target"}
            | GATES
            | DIVERSITY_RAMP,
        ),
        (
            {"shared_expert": False},
            SHARED | GATES | DIVERSITY_RAMP | {"router_aux_loss_weight", "expert_diversity_target"},
        ),
        (
            {"mlp_type": "token_routed", "expert_diversity_lambda": 0.5},
            {"router_aux_loss_weight"} | GATES,
        ),
        (
            {"mlp_type": "token_routed", "learn_shared_routed_gates": True},
            {"router_aux_loss_weight", "expert_diversity_target"} | DIVERSITY_RAMP,
        ),
    ],
)
def test_each_field_is_refused_alone_where_it_does_not_apply(
    tmp_path: Path, kind: dict[str, Any], refused: set[str]
) -> None:
    gated, finals = bool(kind.get("learn_shared_routed_gates")), {"top_k_primary_weight_final"}
    finals |= {"shared_gate_final", "routed_gate_final"}
    for field, value in MODEL_FIELDS.items():
        if field in kind:
            continue
        model = kind | {field: value}
        # A ramp's length needs something to ramp beside it.
        without_ramp = field in GATE_RAMP | PRIMARY - finals - {"top_k_primary_weight"}
        if field in refused or without_ramp:
            found = refusals(tmp_path, {"model": model})
            assert set(found) == {f"model.{field}"}
            assert "null (unset it)" in found[f"model.{field}"]
        else:
            spec = load(tmp_path, {"model": model})
            assert getattr(spec.model, field) == value
            assert reloads(tmp_path, spec)
    assert gated == ("shared_gate_final" not in refused)


@pytest.mark.parametrize(
    ("prefix", "switch"),
    [
        ("top_k_primary_weight_schedule", {"top_k_primary_weight_final": 0.7}),
        ("gate_schedule", {"learn_shared_routed_gates": True, "shared_gate_final": 0.2}),
        ("gate_schedule", {"learn_shared_routed_gates": True, "routed_gate_final": 0.2}),
        ("expert_diversity_schedule", {"expert_diversity_lambda": 0.1}),
    ],
)
def test_a_ramp_has_one_length_and_that_lies_in_the_run(
    tmp_path: Path, prefix: str, switch: dict[str, Any]
) -> None:
    ratio, steps = f"{prefix}_ratio", f"{prefix}_steps"
    by_default = load(tmp_path, {"model": switch}).model
    assert getattr(by_default, ratio) == RAMPS[prefix].ratio
    assert getattr(by_default, steps) is None
    given = load(tmp_path, {"model": switch | {steps: 250}}).model
    assert (getattr(given, ratio), getattr(given, steps)) == (None, 250)
    assert reloads(tmp_path, load(tmp_path, {"model": switch | {steps: 250}}))
    assert set(refusals(tmp_path, {"model": switch | {steps: 251}})) == {f"model.{steps}"}
    assert set(refusals(tmp_path, {"model": switch | {steps: 9, ratio: 0.5}})) == {f"model.{steps}"}
    for value in (-0.1, 1.1):
        assert set(refusals(tmp_path, {"model": switch | {ratio: value}})) == {f"model.{ratio}"}
    assert set(refusals(tmp_path, {"model": switch | {steps: 0}})) == {f"model.{steps}"}


@pytest.mark.parametrize(
    ("model", "place"),
    [
        ({"num_experts": 4, "top_k": 5}, "model.top_k"),
        ({"num_experts": 4, "top_k": 0}, "model.top_k"),
        ({"num_experts": 0}, "model.num_experts"),
        ({"intermediate_size": 130}, "model.intermediate_size"),
        ({"top_k_primary_weight": 1.1}, "model.top_k_primary_weight"),
        ({"top_k_primary_weight_final": -0.1}, "model.top_k_primary_weight_final"),
        ({"top_k_primary_weight": float("nan")}, "model.top_k_primary_weight"),
        ({"routing_strategy": "token_id"}, "model.routing_strategy"),
        ({"shared_expert_chunk_tokens": -1}, "model.shared_expert_chunk_tokens"),
        ({"expert_diversity_lambda": -1.0}, "model.expert_diversity_lambda"),
        (
            {"expert_diversity_lambda": 1.0, "expert_diversity_target": "up"},
            "model.expert_diversity_target",
        ),
        (
            {"expert_diversity_lambda": 1.0, "num_experts": 1, "top_k": 1},
            "model.expert_diversity_lambda",
        ),
        (
            {"mlp_type": "learned_router", "router_aux_loss_weight": -0.1},
            "model.router_aux_loss_weight",
        ),
        ({"mlp_type": "learned_router", "num_experts": 1, "top_k": 1}, "model.num_experts"),
        (
            {"shared_expert": False, "learn_shared_routed_gates": True},
            "model.learn_shared_routed_gates",
        ),
        (
            {"learn_shared_routed_gates": True, "routed_gate_init": float("inf")},
            "model.routed_gate_init",
        ),
    ],
)
def test_values_that_no_model_has_are_refused(
    tmp_path: Path, model: dict[str, Any], place: str
) -> None:
    assert set(refusals(tmp_path, {"model": model})) == {place}


# -- optimizers

MUON_FIELDS = {
    "muon_scope": "expert",
    "muon_lr": 1e-3,
    "muon_momentum": 0.9,
    "muon_nesterov": False,
    "muon_ns_steps": 3,
    "muon_orthogonal_blend": 1.0,
    "muon_max_update_rms": 0.0,
}


def test_every_muon_field_is_refused_under_adamw_and_kept_under_muon(tmp_path: Path) -> None:
    assert set(MUON_FIELDS) == {f for f in OptimizerSpec.model_fields if f.startswith("muon_")}
    adamw = load(tmp_path, {}).optimizer
    for field, value in MUON_FIELDS.items():
        assert getattr(adamw, field) is None
        place = f"optimizer.{field}"
        assert set(refusals(tmp_path, {"optimizer": {field: value}})) == {place}
        spec = load(tmp_path, {"optimizer": {"name": "muon_tr", field: value}})
        assert getattr(spec.optimizer, field) == value
        assert reloads(tmp_path, spec)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("muon_scope", "shared"),
        ("muon_lr", 0.0),
        ("muon_momentum", 1.0),
        ("muon_ns_steps", 0),
        ("muon_ns_steps", 100),
        ("muon_orthogonal_blend", 1.5),
        ("muon_max_update_rms", -1.0),
        ("expert_weight_decay", -0.1),
        ("shared_weight_decay", float("inf")),
    ],
)
def test_muon_settings_out_of_range_are_refused(tmp_path: Path, field: str, value: object) -> None:
    found = refusals(tmp_path, {"optimizer": {"name": "muon_tr", field: value}})
    assert set(found) == {f"optimizer.{field}"}


@pytest.mark.parametrize("scale", ["expert_lr_scale", "shared_lr_scale"])
def test_scales_apply_where_adamw_trains_the_matrices(tmp_path: Path, scale: str) -> None:
    kind = scale.partition("_")[0]
    for value in (0.0, -1.0):
        assert set(refusals(tmp_path, {"optimizer": {scale: value}})) == {f"optimizer.{scale}"}
    for scope in SCOPES:
        muon = {"name": "muon_tr", "muon_scope": scope}
        if kind in MUON_KINDS[scope]:
            assert getattr(load(tmp_path, {"optimizer": muon}).optimizer, scale) is None
            found = refusals(tmp_path, {"optimizer": {**muon, scale: 2.0}})
            assert set(found) == {f"optimizer.{scale}"}
        else:
            spec = load(tmp_path, {"optimizer": {**muon, scale: 2.0}})
            assert getattr(spec.optimizer, scale) == 2.0


def test_expert_and_shared_settings_need_experts_and_a_shared_path(tmp_path: Path) -> None:
    without = {"dense": ("expert", "shared"), "no shared path": ("shared",)}
    for model, kinds in (
        ({"mlp_type": "dense"}, without["dense"]),
        ({"shared_expert": False}, without["no shared path"]),
    ):
        resolved = load(tmp_path, {"model": model}).optimizer
        for kind, (setting, value) in product(kinds, (("lr_scale", 1.0), ("weight_decay", 0.1))):
            assert getattr(resolved, f"{kind}_{setting}") is None
            document = {"model": model, "optimizer": {f"{kind}_{setting}": value}}
            assert set(refusals(tmp_path, document)) == {f"optimizer.{kind}_{setting}"}


def test_decays_follow_the_weight_decay_under_adamw_and_are_small_under_muon(
    tmp_path: Path,
) -> None:
    adamw = load(tmp_path, {"optimizer": {"weight_decay": 0.3}}).optimizer
    assert (adamw.expert_weight_decay, adamw.shared_weight_decay) == (0.3, 0.3)
    muon = {"name": "muon_tr", "muon_scope": "expert_shared", "weight_decay": 0.3}
    both = load(tmp_path, {"optimizer": muon}).optimizer
    assert (both.expert_weight_decay, both.shared_weight_decay) == (0.005, 0.01)
    alone = load(tmp_path, {"optimizer": {**muon, "muon_scope": "expert"}}).optimizer
    assert (alone.expert_weight_decay, alone.shared_weight_decay) == (0.005, 0.3)


@pytest.mark.parametrize(
    ("model", "scope"),
    [
        ({"mlp_type": "dense"}, "expert"),
        ({"mlp_type": "dense"}, "expert_shared"),
        ({"shared_expert": False}, "expert_shared"),
    ],
)
def test_a_scope_needs_matrices_to_train(tmp_path: Path, model: dict[str, Any], scope: str) -> None:
    document = {"model": model, "optimizer": {"name": "muon_tr", "muon_scope": scope}}
    assert set(refusals(tmp_path, document)) == {"optimizer.muon_scope"}


# -- runs without a planned end

OPEN: dict[str, Any] = {
    "data": {"dataset": "sample", "order": "sequential"},
    "training": {"steps": 0},
    "schedule": {"decay": "constant", "warmup_steps": 10},
}


@pytest.mark.parametrize(
    ("section", "change", "place"),
    [
        ("schedule", {"decay": "cosine"}, "schedule.decay"),
        ("schedule", {"decay": "linear"}, "schedule.decay"),
        ("schedule", {"warmup_steps": None}, "schedule.warmup_steps"),
        ("data", {"order": "shuffled"}, "data.order"),
        ("data", {"order": "random"}, "data.order"),
        ("data", {"order": None}, "data.order"),
        ("model", {"top_k_primary_weight_final": 0.7}, "model.top_k_primary_weight_schedule_ratio"),
        (
            "model",
            {"learn_shared_routed_gates": True, "routed_gate_final": 0.5},
            "model.gate_schedule_ratio",
        ),
        ("model", {"expert_diversity_lambda": 0.1}, "model.expert_diversity_schedule_ratio"),
    ],
)
def test_what_needs_a_planned_end_is_refused_without_one(
    tmp_path: Path, section: str, change: dict[str, Any], place: str
) -> None:
    spec = load(tmp_path, OPEN)
    assert spec.total_tokens is None
    assert reloads(tmp_path, spec)
    document = OPEN | {section: OPEN.get(section, {}) | change}
    assert set(refusals(tmp_path, document)) == {place}


def test_ramps_of_a_run_without_a_planned_end_are_given_in_steps(tmp_path: Path) -> None:
    model = {"learn_shared_routed_gates": True, "routed_gate_final": 0.5, "gate_schedule_steps": 9}
    model |= {"expert_diversity_lambda": 0.1, "expert_diversity_schedule_steps": 10**6}
    model |= {"top_k_primary_weight_final": 1.0, "top_k_primary_weight_schedule_steps": 1}
    assert reloads(tmp_path, load(tmp_path, {**OPEN, "model": model}))


# -- specs load to themselves


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("optimizer", ["adamw", *SCOPES])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_every_combination_resolves_and_loads_again_to_itself(
    tmp_path: Path, mlp: str, optimizer: str, top_k: int
) -> None:
    chosen: dict[str, Any] = {"name": "adamw"}
    if optimizer != "adamw":
        chosen = {"name": "muon_tr", "muon_scope": "all" if mlp == "dense" else optimizer}
    model: dict[str, Any] = {"mlp_type": mlp}
    if mlp != "dense":
        model["top_k"] = top_k
    spec = load(tmp_path, {"model": model, "optimizer": chosen})
    assert spec.model.top_k == (None if mlp == "dense" else top_k)
    primary = spec.model.top_k_primary_weight
    assert (primary is None) == (mlp != "token_routed" or top_k == 1)
    assert (spec.model.routing_strategy is None) == (mlp != "token_routed")
    assert (spec.model.router_aux_loss_weight is None) == (mlp != "learned_router")
    assert reloads(tmp_path, spec)
    assert spec == RunSpec.model_validate(spec.model_dump()), "also from Python, nulls and all"


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model.attention_type": st.sampled_from(["mha", "gqa", "mqa"]),
    "model.mlp_type": st.sampled_from(MLPS),
    "model.shared_expert": st.booleans(),
    "model.shared_intermediate_size": st.integers(1, 999),
    "model.shared_expert_chunk_tokens": st.integers(0, 999),
    "model.num_experts": st.sampled_from([1, 2, 4, 8]),
    "model.top_k": st.integers(1, 8),
    "model.top_k_primary_weight": st.floats(0, 1),
    "model.top_k_primary_weight_final": st.floats(0, 1),
    "model.top_k_primary_weight_schedule_ratio": st.floats(0, 1),
    "model.top_k_primary_weight_schedule_steps": st.integers(1, 99),
    "model.routing_strategy": st.sampled_from(["random", "token_id_multi_hash"]),
    "model.router_aux_loss_weight": st.floats(0, 9),
    "model.learn_shared_routed_gates": st.booleans(),
    "model.shared_gate_init": st.floats(-9, 9),
    "model.routed_gate_final": st.floats(-9, 9),
    "model.gate_schedule_ratio": st.floats(0, 1),
    "model.gate_schedule_steps": st.integers(1, 99),
    "model.expert_diversity_lambda": st.sampled_from([0, 0.0, 1, 1e-9, 3.5]),
    "model.expert_diversity_target": st.sampled_from(["down", "all"]),
    "model.expert_diversity_schedule_ratio": st.floats(0, 1),
    "model.expert_diversity_schedule_steps": st.integers(1, 99),
    "model.tie_word_embeddings": st.booleans(),
    "training.steps": st.sampled_from([0, 1, 99, 10**6]),
    "training.compile": st.booleans(),
    "training.label_smoothing": st.floats(0, 0.99),
    "training.z_loss": st.floats(0, 1),
    "training.max_grad_norm": st.sampled_from([0, 0.0, 1, 1e-30]),
    "training.loss_backend": st.sampled_from(["auto", "chunked", "liger"]),
    "data.order": st.sampled_from(["shuffled", "sequential", "random"]),
    "schedule.decay": st.sampled_from(["cosine", "constant", "linear"]),
    "schedule.warmup_steps": st.integers(0, 99),
    "optimizer.name": st.sampled_from(["adamw", "muon_tr"]),
    "optimizer.lr": st.floats(1e-300, LARGEST),
    "optimizer.weight_decay": st.floats(0, 1),
    "optimizer.expert_lr_scale": st.floats(0.01, 99),
    "optimizer.shared_weight_decay": st.floats(0, 1),
    "optimizer.muon_scope": st.sampled_from(SCOPES),
    "optimizer.muon_orthogonal_blend": st.floats(0, 1),
    "optimizer.muon_nesterov": st.booleans(),
    "telemetry.moe": st.booleans(),
}


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(st.data())
def test_whatever_is_valid_loads_again_to_itself(tmp_path: Path, data: st.DataObject) -> None:
    """A faulty field is taken out, until the document is valid: every fault names its field."""
    keys = data.draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=14))
    document: dict[str, Any] = {"name": "fuzz", "data": {"dataset": "sample"}}
    for key in keys:
        section, _, field = key.partition(".")
        document.setdefault(section, {})[field] = data.draw(VALUES[key], label=key)
    for _ in range(30):
        try:
            spec = RunSpec.model_validate(document)
            break
        except ValidationError as error:
            (cause,) = (item["ctx"]["error"] for item in error.errors())
            assert isinstance(cause, UserError), "each value is valid by itself"
            for fault in cause.faults:
                section, _, field = fault.place.partition(".")
                if field not in document.get(section, {}):
                    # A default, or a ramp's ratio, that something else has made a fault.
                    assume(False)
                del document[section][field]
    assert reloads(tmp_path, spec)
    dumped = spec.model_dump()
    assert RunSpec.model_validate(dumped) == spec
    for section in ("model", "training", "optimizer", "schedule", "data"):
        for field, value in document.get(section, {}).items():
            assert dumped[section][field] == value, "what was given was kept"
