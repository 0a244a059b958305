"""The plain step: the model, the loss and the objective are those of the package's own step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workbench.core.losses import linear_cross_entropy
from workbench.core.model import build_model, training_forward
from workbench.core.plain import PlainStep, PlainTransformer, left_out
from workbench.core.precision import FLOAT32
from workbench.core.terms import balance_of
from workbench.core.train import loss_settings
from workbench.spec.run import RunSpec

MODEL = {
    "profile": "custom",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_type": "gqa",
    "intermediate_size": 64,
}
DENSE = {**MODEL, "mlp_type": "dense"}
ROUTED = {**MODEL, "mlp_type": "token_routed", "shared_intermediate_size": 96}
LEARNED = {**ROUTED, "mlp_type": "learned_router", "router_aux_loss_weight": 0.5}
ALONE = {**MODEL, "mlp_type": "token_routed", "shared_expert": False}
STRATEGIES = ("round_robin", "random", "token_id_balanced_hash", "token_id_multi_hash")
VOCAB = 257


def tiny(model: dict[str, Any], **training: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "tiny",
            "model": model,
            "data": {"dataset": "random"},
            "training": {"steps": 5, "batch_size": 2, "seq_len": 64, **training},
        }
    )


@pytest.mark.parametrize(
    "model",
    [
        DENSE,
        ROUTED,
        {**ROUTED, "top_k": 1},
        {**ROUTED, "num_experts": 8, "top_k": 3, "top_k_primary_weight": 0.6},
        {**ROUTED, "learn_shared_routed_gates": True, "routed_gate_init": 0.3},
        *({**ROUTED, "routing_strategy": strategy} for strategy in STRATEGIES),
        LEARNED,
        {**LEARNED, "top_k": 1},
        {**LEARNED, "num_experts": 8, "top_k": 3},
        {**LEARNED, "router_aux_loss_weight": 0.0},
        ALONE,
    ],
)
def test_is_the_same_model(model: dict[str, Any]) -> None:
    spec = tiny(model, label_smoothing=0.1)
    ours = build_model(spec.model, VOCAB, 1, FLOAT32)
    plain = PlainTransformer(spec.model, VOCAB)
    count = sum(p.numel() for p in ours.parameters())
    assert sum(p.numel() for p in plain.parameters()) == count
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.ndim >= 2 and name != "embed_tokens.weight":
                parameter.mul_(
                    4
                )  # drawn narrowly, the blocks would hardly show beside the embedding
    plain.load_state_dict(_as_plain(ours.state_dict()), strict=False)

    batch = torch.randint(VOCAB, (2, 65), generator=torch.Generator().manual_seed(3))
    found = training_forward(ours, None)(batch[:, :-1])
    targets = batch[:, 1:].flatten()
    sums = linear_cross_entropy(
        found.hidden.flatten(0, 1), ours.head_weight, targets, loss_settings(spec), FLOAT32
    )
    objective = sums.objective / len(targets)
    if weight := spec.model.router_aux_loss_weight:
        objective = objective + weight * balance_of(found.extras, None, len(targets))
    loss = PlainStep(spec, plain).loss(batch)
    assert float(loss.detach()) == pytest.approx(float(objective.detach()), abs=1e-5)
    torch.testing.assert_close(plain(batch[:, :-1]), found.hidden, atol=1e-5, rtol=1e-5)

    objective.backward()
    loss.backward()
    mine = _as_plain({name: p.grad for name, p in ours.named_parameters() if p.grad is not None})
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:  # an expert that got no token, a router without a loss
            assert name not in mine or not mine[name].any()
        else:
            torch.testing.assert_close(parameter.grad, mine[name], atol=1e-5, rtol=1e-4)


def _as_plain(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of the plain one."""
    plain = {}
    for name, tensor in state.items():
        if name.endswith("_proj_w"):  # [E, in, out]
            head, _, kind = name.removesuffix("_w").rpartition(".")
            for number, weight in enumerate(tensor):
                plain[f"{head}.experts.{number}.{kind}.weight"] = weight.t()
        elif ".shared_" in name and name.endswith(".weight"):
            plain[name.replace(".shared_", ".shared.").replace(".weight", "_proj.weight")] = tensor
        else:
            name = name.replace("shared_output_gate", "shared_gate")
            plain[name.replace("routed_output_gate", "routed_gate")] = tensor
    return plain


@pytest.mark.parametrize("model", [DENSE, {**LEARNED, "router_aux_loss_weight": 0.01}])
def test_learns_the_batch(model: dict[str, Any]) -> None:
    spec = tiny(model, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    step = PlainStep(spec, PlainTransformer(spec.model, VOCAB))
    batch = torch.randint(VOCAB, (4, 65))
    losses = [step.step(batch) for _ in range(5)]
    assert losses[0] == pytest.approx(5.55, abs=0.2)  # ln 257
    assert losses[-1] < losses[0]


def test_says_what_it_leaves_out() -> None:
    assert left_out(tiny(DENSE)) == left_out(tiny(ROUTED)) == left_out(tiny(LEARNED)) == []
    ramped = {**ROUTED, "routed_gate_final": 0.5, "learn_shared_routed_gates": True}
    assert left_out(tiny({**ramped, "expert_diversity_lambda": 0.1}, z_loss=1e-4)) == [
        "z-loss",
        "the diversity penalty",
        "ramps",
    ]
    document = tiny(ROUTED).model_dump(mode="json")
    for optimizer, left in (
        ({"name": "muon_tr"}, ["Muon (it takes AdamW)"]),
        ({"expert_lr_scale": 2.0}, ["rates and decays of experts or the shared path"]),
        ({"shared_weight_decay": 0.0}, ["rates and decays of experts or the shared path"]),
    ):
        document["optimizer"] = optimizer
        assert left_out(RunSpec.model_validate(document)) == left
