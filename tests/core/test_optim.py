"""Which parameter gets which optimizer setting, by what a step with a zero gradient does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import DENSE, ROUTED, tiny_spec
from torch import nn

from workbench.core.model import Transformer, build_model
from workbench.core.optim import (
    build_optimizers,
    kind_of,
    parameter_table,
    rates,
    set_learning_rates,
    table_sha256,
)
from workbench.core.precision import FLOAT32
from workbench.core.schedules import learning_rate
from workbench.spec.profiles import complete_optimizer
from workbench.spec.run import ModelSpec, OptimizerSpec


def settings(model: dict[str, Any], **fields: Any) -> OptimizerSpec:
    """A resolved optimizer section, for the kind of model that is given."""
    return OptimizerSpec.model_validate(complete_optimizer(fields, model))


ADAMW = settings(ROUTED, lr=0.1, weight_decay=0.1)
ADAMW_DENSE = settings(DENSE, lr=0.1, weight_decay=0.1)


def tiny_model(**fields: Any) -> Transformer:
    base = DENSE if fields.get("mlp_type") == "dense" else ROUTED
    return build_model(ModelSpec.model_validate({**base, **fields}), 257, 0, FLOAT32)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"mlp_type": "dense"},
    {"mlp_type": "learned_router"},
    {"tie_word_embeddings": False},
    {"learn_shared_routed_gates": True},
    {"attention_type": "mha", "num_key_value_heads": 4},
]


@pytest.mark.parametrize("fields", VARIANTS)
def test_with_a_zero_gradient_only_matrices_shrink(fields: dict[str, Any]) -> None:
    model = tiny_model(**fields)
    spec = settings(fields, lr=0.1, weight_decay=0.1)
    (optimizer,) = build_optimizers(model, spec, parameter_table(model, spec))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        last = name.removesuffix(".weight").rpartition(".")[2]
        is_gain = last.endswith(("norm", "_output_gate"))
        factor = 1.0 if is_gain else 0.99
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)


@pytest.mark.parametrize("fields", VARIANTS)
def test_every_parameter_is_in_exactly_one_group(fields: dict[str, Any]) -> None:
    model = tiny_model(**fields)
    spec = settings(fields, lr=0.1, weight_decay=0.1)
    (optimizer,) = build_optimizers(model, spec, parameter_table(model, spec))
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(set(grouped)) == len(grouped)
    assert set(grouped) == {id(p) for p in model.parameters()}
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    kinds = {"vocabulary": 0.1, "matrix": 0.1, "no_decay": 0.0}
    if fields.get("mlp_type") != "dense":
        kinds |= {"expert": 0.1, "shared": 0.1}
    if fields.get("mlp_type") == "learned_router":
        kinds |= {"router": 0.1}
    assert decays == {f"adamw/{kind}": decay for kind, decay in kinds.items()}


def test_a_tied_matrix_stands_in_the_table_once() -> None:
    tied = [row.name for row in parameter_table(tiny_model(), ADAMW)]
    untied = [row.name for row in parameter_table(tiny_model(tie_word_embeddings=False), ADAMW)]
    assert tied.count("embed_tokens.weight") == 1
    assert "lm_head.weight" not in tied
    assert set(untied) == {*tied, "lm_head.weight"}


def test_the_table_says_what_each_parameter_gets() -> None:
    rows = {row.name: row for row in parameter_table(tiny_model(), ADAMW)}
    experts = rows["layers.0.mlp.down_proj_w"]
    assert (experts.shape, experts.group, experts.weight_decay) == ((4, 8, 64), "adamw/expert", 0.1)
    norm = rows["layers.1.input_layernorm.weight"]
    assert (norm.shape, norm.group, norm.weight_decay) == ((64,), "adamw/no_decay", 0.0)
    assert {row.optimizer for row in rows.values()} == {"adamw"}


def test_a_frozen_parameter_is_not_trained() -> None:
    model = tiny_model()
    model.norm.weight.requires_grad_(False)
    assert "norm.weight" not in [row.name for row in parameter_table(model, ADAMW)]


def test_the_hash_of_the_table_knows_every_setting() -> None:
    def digest(spec: OptimizerSpec, **fields: Any) -> str:
        return table_sha256(parameter_table(tiny_model(**fields), spec))

    assert digest(ADAMW) == digest(ADAMW)
    other = settings(ROUTED, lr=0.1, weight_decay=0.2)
    assert len({digest(ADAMW), digest(other), digest(ADAMW, hidden_size=32)}) == 3


def test_groups_get_the_settings_and_the_rate_of_the_step(tmp_path: Path) -> None:
    optimizer = {"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "expert_lr_scale": 0.5}
    spec = tiny_spec(tmp_path, optimizer=optimizer, schedule={"warmup_steps": 4})
    model = tiny_model()
    table = parameter_table(model, spec.optimizer)
    (adamw,) = build_optimizers(model, spec.optimizer, table)
    set_learning_rates([adamw], spec, step=1)
    assert len(adamw.param_groups) == 5
    for group in adamw.param_groups:
        rate = 0.0125 if group["name"] == "adamw/expert" else 0.025
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.9), 1e-6, rate)


MUON_KINDS = [
    ("expert", {"expert"}),
    ("expert_shared", {"expert", "shared"}),
    ("all", {"expert", "shared", "matrix"}),
]


@pytest.mark.parametrize(("scope", "kinds"), MUON_KINDS)
@pytest.mark.parametrize("fields", [{}, {"mlp_type": "learned_router"}])
def test_muon_gets_the_matrices_of_its_scope_and_no_other(
    scope: str, kinds: set[str], fields: dict[str, Any]
) -> None:
    """Embeddings, head, norms, gates and the router are AdamW's in every scope."""
    given = {"learn_shared_routed_gates": True, "tie_word_embeddings": False, **fields}
    model = tiny_model(**given)
    spec = settings(given, name="muon_tr", muon_scope=scope)
    rows = parameter_table(model, spec)
    assert {row.kind for row in rows if row.optimizer == "muon"} == kinds
    adamw, muon = build_optimizers(model, spec, rows)
    grouped = [id(p) for one in (adamw, muon) for g in one.param_groups for p in g["params"]]
    assert len(set(grouped)) == len(grouped) == len(list(model.parameters()))
    by_name = {row.name: row for row in rows}
    for name in ("embed_tokens.weight", "lm_head.weight", "layers.0.mlp.routed_output_gate"):
        assert by_name[name].optimizer == "adamw"
    decays = {group["name"]: group["weight_decay"] for group in muon.param_groups}
    expected = {"expert": 0.005, "shared": 0.01, "matrix": 0.1}
    assert decays == {f"muon/{kind}": expected[kind] for kind in kinds}


def test_muon_and_adamw_follow_one_schedule_used_once(tmp_path: Path) -> None:
    optimizer = {"name": "muon_tr", "lr": 1e-3, "muon_lr": 0.02}
    spec = tiny_spec(tmp_path, optimizer=optimizer, training={"steps": 10})
    model = tiny_model()
    optimizers = build_optimizers(model, spec.optimizer, parameter_table(model, spec.optimizer))
    for step in range(1, 11):
        set_learning_rates(optimizers, spec, step)
        found = rates(optimizers)
        assert found["adamw/matrix"] == learning_rate(spec, step)
        assert found["muon/expert"] == pytest.approx(20 * learning_rate(spec, step), rel=1e-12)


def test_wrappers_of_a_model_change_no_kind() -> None:
    model = tiny_model()
    for prefix in ("module.", "_orig_mod."):
        for name, parameter in model.named_parameters():
            assert kind_of(prefix + name, parameter) == kind_of(name, parameter)


def test_a_norm_in_a_new_module_does_not_decay() -> None:
    """The rule asks for dimensions, so it needs to know no names."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    rows = parameter_table(model, ADAMW)
    decaying = [row.name for row in rows if row.weight_decay]
    assert decaying == ["0.weight"]
