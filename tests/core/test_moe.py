"""Feed-forward layers, against naive loops over tokens and against one another."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.core.layers import silu_product
from workbench.core.model import build_model
from workbench.core.moe import SwiGLU, TokenRouted, mixture
from workbench.core.precision import FLOAT32, Precision
from workbench.core.routing import modulo_cyclic
from workbench.spec.run import ModelSpec

UPCAST = Precision(torch.bfloat16, "upcast")
VOCAB = 64


def routed_spec(**fields: Any) -> ModelSpec:
    defaults = {
        "profile": "custom",
        "mlp_type": "token_routed",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "num_experts": 4,
    }
    if fields.get("shared_expert") is not False:
        defaults["shared_intermediate_size"] = 20
    return ModelSpec.model_validate(defaults | fields)


def filled(module: torch.nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim:
                parameter.normal_(0, 0.3, generator=generator)
    return module


def layer(precision: Precision = FLOAT32, index: int = 1, **fields: Any) -> TokenRouted:
    made: TokenRouted = filled(TokenRouted(routed_spec(**fields), VOCAB, index, precision))
    return made


def batch(seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 9, 16, generator=generator)
    return x, torch.randint(VOCAB, (2, 9), generator=generator)


def test_route_table_by_its_definition() -> None:
    for index in (0, 5):
        generator = torch.Generator().manual_seed(0xC0DE + index)
        permutation = torch.randperm(4, generator=generator).tolist()
        expected = [[(permutation[i % 4] + k) % 4 for i in range(10)] for k in range(3)]
        assert modulo_cyclic(10, 4, 3, index).tolist() == expected


def test_with_as_many_routes_as_experts_every_token_reaches_all() -> None:
    table = modulo_cyclic(VOCAB, 8, 8, 2)
    assert table.sort(dim=0).values.tolist() == [[e] * VOCAB for e in range(8)]


@pytest.mark.parametrize(
    ("top_k", "primary", "weights"),
    [(1, None, [1.0]), (2, 0.85, [0.85, 0.15]), (3, 0.5, [0.5, 0.25, 0.25]), (2, 1.0, [1.0, 0.0])],
)
def test_mixture(top_k: int, primary: float | None, weights: list[float]) -> None:
    assert mixture(top_k, primary) == pytest.approx(weights)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_k": 2, "top_k_primary_weight": 0.85},
        {"top_k": 4, "top_k_primary_weight": 0.4},
        {"top_k": 3, "shared_expert": False},
        {
            "learn_shared_routed_gates": True,
            "shared_gate_init": 0.7,
            "routed_gate_init": 0.3,
        },
    ],
)
def test_equals_a_loop_over_tokens_and_experts(fields: dict[str, Any]) -> None:
    mlp, (x, ids) = layer(**fields), batch()
    spec = routed_spec(**fields)
    assert spec.top_k
    weights = mixture(spec.top_k, spec.top_k_primary_weight)

    def swiglu(v: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(v @ gate) * (v @ up)) @ down

    for b, s in ((0, 0), (0, 5), (1, 8)):
        expected = torch.zeros(16)
        for k, weight in enumerate(weights):
            e = int(modulo_cyclic(VOCAB, 4, spec.top_k, 1)[k, ids[b, s]])
            expected += weight * swiglu(
                x[b, s], mlp.gate_proj_w[e], mlp.up_proj_w[e], mlp.down_proj_w[e]
            )
        if spec.learn_shared_routed_gates:
            expected = expected * 0.3
        if spec.shared_expert:
            shared = (mlp.shared_gate.weight, mlp.shared_up.weight, mlp.shared_down.weight)
            gate = 0.7 if spec.learn_shared_routed_gates else 1.0
            expected = expected + gate * swiglu(x[b, s], *(w.t() for w in shared))
        torch.testing.assert_close(mlp(x, ids)[0][b, s], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", [FLOAT32, UPCAST])
def test_one_expert_without_a_shared_path_is_the_dense_layer_bit_for_bit(
    precision: Precision,
) -> None:
    routed = layer(precision, num_experts=1, top_k=1, shared_expert=False)
    dense = SwiGLU(16, 24, precision)
    pairs = (("gate_proj", "gate_proj_w"), ("up_proj", "up_proj_w"), ("down_proj", "down_proj_w"))
    with torch.no_grad():
        for ours, theirs in pairs:
            dense.get_parameter(f"{ours}.weight").copy_(routed.get_parameter(theirs)[0].t())
    x, ids = batch()
    results = []
    for mlp in (routed, dense):
        leaf = x.to(precision.compute).requires_grad_()
        y, _ = mlp(leaf, ids)
        (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results.append((y, leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    for ours, theirs in pairs:
        gradient = routed.get_parameter(theirs).grad
        assert gradient is not None
        assert torch.equal(dense.get_parameter(f"{ours}.weight").grad, gradient[0].t())


@pytest.mark.parametrize("chunk", [1, 4, 18, 1000])
def test_chunks_of_the_shared_path_change_nothing(chunk: int) -> None:
    x, ids = batch()
    whole, chunked = layer(), layer(shared_expert_chunk_tokens=chunk)
    sizes = []
    chunked.shared_down.register_forward_hook(
        lambda _m, args, _y: sizes.append(args[0].shape[:-1].numel())
    )
    (a, _), (b, _) = whole(x, ids), chunked(x, ids)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert max(sizes) == min(chunk, 18)
    a.sum().backward()
    b.sum().backward()
    for one, other in zip(whole.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_an_expert_without_tokens_has_a_zero_gradient_not_none() -> None:
    mlp, (x, _) = layer(top_k=1), batch()
    ids = torch.full((2, 9), 6)
    mlp(x, ids)[0].sum().backward()
    hit = int(mlp.topk_token_to_expert[0, 6])
    for name in ("gate_proj_w", "up_proj_w", "down_proj_w"):
        gradient = mlp.get_parameter(name).grad
        assert gradient is not None
        assert [bool(g.abs().sum() > 0) for g in gradient] == [e == hit for e in range(4)]


@pytest.mark.parametrize("top_k", [1, 2])
def test_gates_learn_whatever_the_number_of_routes(top_k: int) -> None:
    mlp, (x, ids) = layer(top_k=top_k, learn_shared_routed_gates=True), batch()
    mlp(x, ids)[0].pow(2).sum().backward()
    for name in ("shared_output_gate", "routed_output_gate"):
        gate = mlp.get_parameter(name)
        assert gate.shape == ()
        assert gate.grad is not None
        assert gate.grad.abs() > 0


def test_route_weights_are_not_rounded_to_bfloat16() -> None:
    """With identical experts the mixture is exact: p + (1 - p) = 1."""
    x, ids = batch()
    outputs = []
    for fields in ({"top_k": 1}, {"top_k": 4, "top_k_primary_weight": 0.85}):
        mlp = layer(UPCAST, shared_expert=False, **fields)
        with torch.no_grad():
            for parameter in mlp.parameters():
                parameter.copy_(parameter[:1].expand_as(parameter).clone())
        outputs.append(mlp(x.bfloat16(), ids)[0].float())
    # Roundings of activations scatter and cancel; weights rounded to bfloat16 would sum to 1.0017.
    single, several = outputs
    scale = (single * several).sum() / (single * single).sum()
    assert abs(scale.item() - 1) < 5e-4


def untrained_experts(steps: int = 5) -> list[str]:
    """Routed experts (name, index) that get no gradient in some step, or do not move."""
    model = build_model(routed_spec(), VOCAB, 0, FLOAT32)
    experts = {k: p for k, p in model.named_parameters() if k.endswith("_proj_w")}
    before = {k: p.detach().clone() for k, p in experts.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(VOCAB).view(4, 16)
    idle = set()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        for name, parameter in experts.items():
            for e in range(len(parameter)):
                if parameter.grad is None or not parameter.grad[e].abs().sum() > 0:
                    idle.add(f"{name}[{e}]")
        optimizer.step()
    for name, parameter in experts.items():
        idle |= {f"{name}[{e}]" for e in range(4) if torch.equal(parameter[e], before[name][e])}
    return sorted(idle)


def test_every_routed_expert_trains() -> None:
    assert untrained_experts() == []


def test_a_detached_expert_path_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    routed = TokenRouted.routed
    monkeypatch.setattr(TokenRouted, "routed", lambda self, x, ids: routed(self, x, ids).detach())
    assert len(untrained_experts()) == 2 * 3 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_of_a_swiglu_equals_its_two_operations_and_keeps_less(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(64, 32, generator=generator).to(dtype) for _ in range(3))
    found, kept = [], []
    for function in (silu_product, lambda g, u: F.silu(g) * u):
        leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
        saved: set[int] = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.add(t.data_ptr()), t)[1], lambda t: t
        ):
            y = function(*leaves)
        y.backward(grad)
        found.append((y.detach(), leaves[0].grad, leaves[1].grad))
        kept.append(len(saved))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert kept == [2, 3]
