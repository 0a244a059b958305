"""Which parameter gets which optimizer setting, by what a step with a zero gradient does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import DENSE, ROUTED
from torch import nn

from workbench.core.model import Transformer, build_model
from workbench.core.optim import (
    build_optimizer,
    parameter_table,
    set_learning_rate,
    table_sha256,
)
from workbench.core.precision import FLOAT32
from workbench.spec.run import ModelSpec, OptimizerSpec

ADAMW = OptimizerSpec(lr=0.1, weight_decay=0.1)


def tiny_model(**fields: Any) -> Transformer:
    base = DENSE if fields.get("mlp_type") == "dense" else ROUTED
    return build_model(ModelSpec.model_validate({**base, **fields}), 257, 0, FLOAT32)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"mlp_type": "dense"},
    {"tie_word_embeddings": False},
    {"learn_shared_routed_gates": True},
    {"attention_type": "mha", "num_key_value_heads": 4},
]


@pytest.mark.parametrize("fields", VARIANTS)
def test_with_a_zero_gradient_only_matrices_shrink(fields: dict[str, Any]) -> None:
    model = tiny_model(**fields)
    optimizer = build_optimizer(model, ADAMW, parameter_table(model, ADAMW))
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
    optimizer = build_optimizer(model, ADAMW, parameter_table(model, ADAMW))
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(set(grouped)) == len(grouped)
    assert set(grouped) == {id(p) for p in model.parameters()}
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"decay": 0.1, "no_decay": 0.0}


def test_a_tied_matrix_stands_in_the_table_once() -> None:
    tied = [row.name for row in parameter_table(tiny_model(), ADAMW)]
    untied = [row.name for row in parameter_table(tiny_model(tie_word_embeddings=False), ADAMW)]
    assert tied.count("embed_tokens.weight") == 1
    assert "lm_head.weight" not in tied
    assert set(untied) == {*tied, "lm_head.weight"}


def test_the_table_says_what_each_parameter_gets() -> None:
    rows = {row.name: row for row in parameter_table(tiny_model(), ADAMW)}
    experts = rows["layers.0.mlp.down_proj_w"]
    assert (experts.shape, experts.group, experts.weight_decay) == ((4, 8, 64), "decay", 0.1)
    norm = rows["layers.1.input_layernorm.weight"]
    assert (norm.shape, norm.group, norm.weight_decay) == ((64,), "no_decay", 0.0)
    assert {row.optimizer for row in rows.values()} == {"adamw"}


def test_a_frozen_parameter_is_not_trained() -> None:
    model = tiny_model()
    model.norm.weight.requires_grad_(False)
    assert "norm.weight" not in [row.name for row in parameter_table(model, ADAMW)]


def test_the_hash_of_the_table_knows_every_setting() -> None:
    def digest(spec: OptimizerSpec, **fields: Any) -> str:
        return table_sha256(parameter_table(tiny_model(**fields), spec))

    assert digest(ADAMW) == digest(ADAMW)
    other = OptimizerSpec(lr=0.1, weight_decay=0.2)
    assert len({digest(ADAMW), digest(other), digest(ADAMW, hidden_size=32)}) == 3


def test_groups_get_the_settings_and_the_rate_of_the_step() -> None:
    model = tiny_model()
    spec = OptimizerSpec(lr=0.1, betas=[0.8, 0.9], eps=1e-6)
    optimizer = build_optimizer(model, spec, parameter_table(model, spec))
    set_learning_rate(optimizer, 0.025)
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.9), 1e-6, 0.025)


def test_a_norm_in_a_new_module_does_not_decay() -> None:
    """The rule asks for dimensions, so it needs to know no names."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    rows = parameter_table(model, ADAMW)
    decaying = [row.name for row in rows if row.weight_decay]
    assert decaying == ["0.weight"]
