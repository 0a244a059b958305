"""The transformer against reference values, and its variants against one another."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import tiny_parts
from torch import Tensor
from torch.nn import functional as F

from workbench.core import attention
from workbench.core.attention import causal_attention, rotary_table, rotate
from workbench.core.counts import count_parameters
from workbench.core.model import (
    Block,
    Transformer,
    build_model,
    load_reference_state,
    route_tables_sha256,
    training_forward,
)
from workbench.core.moe import TokenRouted
from workbench.core.precision import FLOAT32, Precision
from workbench.core.telemetry import RouteCounter
from workbench.core.train import train
from workbench.spec.run import ModelSpec

DATA = Path(__file__).parents[1] / "data"
UPCAST = Precision(torch.bfloat16, "upcast")
NATIVE = Precision(torch.bfloat16, "native")
VOCAB = 96


def tiny(**fields: Any) -> ModelSpec:
    defaults: dict[str, Any] = {
        "profile": "custom",
        "mlp_type": "token_routed",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
    }
    if (defaults | fields)["mlp_type"] == "token_routed":
        defaults["shared_intermediate_size"] = 40
    return ModelSpec.model_validate(defaults | fields)


def build(spec: ModelSpec, seed: int = 0, precision: Precision = FLOAT32) -> Transformer:
    return build_model(spec, VOCAB, seed, precision)


def some_ids(length: int = 24) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def nll(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def gradients(model: Transformer) -> dict[str, Tensor]:
    ids = some_ids()
    model.zero_grad()
    nll(model.logits(ids[:, :-1]), ids[:, 1:]).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in found.values())
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def routed_layers(model: Transformer) -> list[TokenRouted]:
    blocks = [block for block in model.layers if isinstance(block, Block)]
    return [block.mlp for block in blocks if isinstance(block.mlp, TokenRouted)]


# -- reference values


class Golden(NamedTuple):
    expected: dict[str, Any]
    tensors: dict[str, Tensor]
    spec: ModelSpec
    model: Transformer


@pytest.fixture(scope="module", params=["tr_gqa", "tr_mha", "dense_gqa"])
def golden(request: pytest.FixtureRequest) -> Golden:
    expected = json.loads((DATA / f"{request.param}.json").read_text())
    tensors = load_file(DATA / f"{request.param}.safetensors")
    config = expected["config"]
    dense = config["mlp_type"] == "swiglu"
    fields = {key: config[key] for key in ModelSpec.model_fields.keys() & config.keys()}
    fields["mlp_type"] = "dense" if dense else "token_routed"
    fields["learn_shared_routed_gates"] = config["use_shared_routed_gates"]
    gates = {"shared_gate_init", "routed_gate_init"}
    experts = {key for key in fields if "shared" in key or "routed" in key or "top_k" in key}
    if dense:
        for key in experts | gates | {"num_experts", "routing_strategy"}:
            fields.pop(key, None)
    elif not config["use_shared_routed_gates"]:
        for key in gates:
            fields.pop(key)
    spec = ModelSpec.model_validate({"profile": "custom"} | fields)
    model = build_model(spec, config["vocab_size"], 0, FLOAT32)
    state = {key.removeprefix("state."): t for key, t in tensors.items() if "state." in key}
    load_reference_state(model, state)
    return Golden(expected, tensors, spec, model)


def test_golden_logits(golden: Golden) -> None:
    with torch.no_grad():
        logits = golden.model.logits(golden.tensors["input_ids"][:, :-1])
    torch.testing.assert_close(logits, golden.tensors["logits"], rtol=0, atol=2e-5)


def test_golden_nll_and_gradient_norms(golden: Golden) -> None:
    ids = golden.tensors["input_ids"]
    golden.model.zero_grad()
    loss = nll(golden.model.logits(ids[:, :-1]), ids[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(golden.expected["nll"], abs=2e-6)
    norms = {
        k: p.grad.norm().item() for k, p in golden.model.named_parameters() if p.grad is not None
    }
    assert norms == pytest.approx(golden.expected["grad_norm"], rel=1e-4, abs=0)


def test_golden_counts(golden: Golden) -> None:
    vocab = golden.expected["config"]["vocab_size"]
    assert sum(p.numel() for p in golden.model.parameters()) == golden.expected["params"]
    assert count_parameters(golden.spec, vocab).total == golden.expected["params"]


def test_golden_routes_and_expert_counts(golden: Golden) -> None:
    # A model of its own: the tables are to be built, not loaded.
    model = build_model(golden.spec, golden.expected["config"]["vocab_size"], 1, FLOAT32)
    layers = routed_layers(model)
    assert len(layers) == (3 if golden.spec.is_routed else 0)
    ids = golden.tensors["input_ids"][:, :-1]
    routes = RouteCounter(model).count(ids.numpy(), [])
    for index, mlp in enumerate(layers):
        assert mlp.topk_token_to_expert.tolist() == golden.tensors[f"routes.{index}"].tolist()
        counts = golden.expected[f"layer{index}"]["expert_counts"]
        assert routes.hits[index].tolist() == counts


def test_golden_rms_of_both_paths(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[float]] = {"shared": [], "routed": []}

    def watch(path: str) -> None:
        original = getattr(TokenRouted, path)

        def watched(self: TokenRouted, *args: Tensor) -> Tensor:
            result: Tensor = original(self, *args)
            seen[path].append(result.pow(2).mean().sqrt().item())
            return result

        monkeypatch.setattr(TokenRouted, path, watched)

    watch("shared")
    watch("routed")
    with torch.no_grad():
        golden.model(golden.tensors["input_ids"][:, :-1])
    for path, values in seen.items():
        layers = [value for key, value in golden.expected.items() if key.startswith("layer")]
        assert values == pytest.approx([layer[f"{path}_rms"] for layer in layers], rel=1e-5)


def test_saved_route_tables_that_differ_are_refused(golden: Golden) -> None:
    state = dict(golden.model.state_dict())
    tables = [name for name in state if name.endswith("topk_token_to_expert")]
    for name in tables:
        with pytest.raises(ValueError, match=name):
            load_reference_state(golden.model, state | {name: state[name].flip(0)})
    assert bool(tables) == golden.spec.is_routed


# -- attention


def test_grouped_heads_with_copied_weights_equal_multi_head() -> None:
    grouped = build(tiny(), seed=3)
    multi = build(tiny(attention_type="mha", num_key_value_heads=4), seed=4)
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = state[name].view(2, 8, 32)
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)  # 0, 0, 1, 1
    multi.load_state_dict(state)
    torch.testing.assert_close(
        grouped.logits(some_ids()), multi.logits(some_ids()), rtol=0, atol=1e-6
    )
    one, other = gradients(grouped), gradients(multi)
    for name, gradient in one.items():
        found = other[name]
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            found = found.view(2, 2, 8, 32).sum(dim=1).flatten(0, 1)
        torch.testing.assert_close(gradient, found, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_is_the_causal_softmax_by_its_definition(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 4, generator=generator)
    k, v = (torch.randn(2, kv_heads, 5, 4, generator=generator) for _ in range(2))
    found = causal_attention(q, k, v)
    for head in range(6):
        group = head // (6 // kv_heads)
        scores = q[:, head] @ k[:, group].transpose(1, 2) / 2.0
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        expected = scores.softmax(-1) @ v[:, group]
        torch.testing.assert_close(found[:, head], expected, rtol=1e-5, atol=1e-6)


def test_repeated_heads_equal_the_grouped_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 5, 4, generator=generator)
    k, v = (torch.randn(2, 2, 5, 4, generator=generator) for _ in range(2))
    grouped = causal_attention(q, k, v)
    monkeypatch.setattr(attention, "grouped_kernel", lambda *_: False)
    torch.testing.assert_close(causal_attention(q, k, v), grouped, rtol=1e-6, atol=1e-6)


def test_multi_query_has_one_key_value_head() -> None:
    model = build(tiny(attention_type="mqa", num_key_value_heads=None))
    assert model.state_dict()["layers.0.self_attn.k_proj.weight"].shape == (8, 32)
    assert model(some_ids()).shape == (2, 24, 32)


def test_rotation_depends_on_the_distance_alone() -> None:
    cos, sin = rotary_table(40, 8, 10000.0)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator).expand(1, 40, 1, 8) for _ in range(2))
    rotated_q, rotated_k = rotate(q, cos, sin)[0, :, 0], rotate(k, cos, sin)[0, :, 0]
    scores = rotated_q @ rotated_k.t()
    for distance in (0, 3, 11):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert scores[0, 0] != pytest.approx(scores[3, 0].item(), abs=1e-3)


def test_no_token_sees_a_later_one() -> None:
    model, ids = build(tiny()), some_ids()
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % VOCAB
    before, after = model.logits(ids), model.logits(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


# -- initialisation


def test_tensors_shared_by_two_architectures_are_bit_identical() -> None:
    routed = dict(build(tiny(), seed=7).named_parameters())
    others = (
        tiny(mlp_type="dense", intermediate_size=50),
        tiny(attention_type="mha", num_key_value_heads=4),
        tiny(learn_shared_routed_gates=True, tie_word_embeddings=False),
        tiny(num_experts=2),
    )
    for spec in others:
        other = dict(build(spec, seed=7).named_parameters())
        common = {k for k in routed.keys() & other.keys() if routed[k].shape == other[k].shape}
        assert {"embed_tokens.weight", "layers.1.self_attn.o_proj.weight"} <= common
        assert all(torch.equal(routed[name], other[name]) for name in common)


def test_seeds_and_names_draw_differently_and_building_repeats() -> None:
    one, again, other = (dict(build(tiny(), seed=s).named_parameters()) for s in (7, 7, 8))
    for name, parameter in one.items():
        assert torch.equal(parameter, again[name])
        assert (parameter.ndim < 2) == torch.equal(parameter, other[name])
    first, second = (one[f"layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    build(tiny())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("kind", ["dense", "token_routed"])
def test_standard_deviations(kind: str) -> None:
    spec = tiny(mlp_type=kind, hidden_size=128, intermediate_size=256, num_hidden_layers=8)
    for name, parameter in build(spec).named_parameters():
        if parameter.ndim < 2:
            assert bool((parameter == 1).all()), name
            continue
        narrow = ("o_proj.weight", "mlp.down_proj.weight", "shared_down.weight", "down_proj_w")
        expected = 0.02 / 4 if name.endswith(narrow) else 0.02
        # Five standard errors of an estimate from n draws.
        error = 5 / (2 * parameter.numel()) ** 0.5
        assert parameter.std().item() == pytest.approx(expected, rel=error), name
        assert abs(parameter.mean().item()) < 5 * expected / parameter.numel() ** 0.5, name


def test_gates_start_at_the_values_of_the_spec() -> None:
    spec = tiny(learn_shared_routed_gates=True, shared_gate_init=0.9, routed_gate_init=0.2)
    for mlp in routed_layers(build(spec)):
        assert mlp.shared_output_gate.item() == pytest.approx(0.9)
        assert mlp.routed_output_gate.item() == pytest.approx(0.2)


# -- precision, execution, the rest


@pytest.mark.parametrize("kind", ["dense", "token_routed"])
def test_bfloat16_activations_over_float32_weights(kind: str) -> None:
    exact = build(tiny(mlp_type=kind))
    reference = exact.logits(some_ids())
    spread = reference.std()
    results = {}
    for precision in (UPCAST, NATIVE):
        model = build(tiny(mlp_type=kind), precision=precision)
        kinds: set[torch.dtype] = set()
        for block in model.layers:
            block.register_forward_hook(lambda _m, _a, y, kinds=kinds: kinds.add(y[0].dtype))
        hidden = model(some_ids())
        assert kinds | {hidden.dtype} == {torch.bfloat16}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        logits = model.logits(some_ids())
        assert logits.dtype == torch.float32
        results[precision.matmul] = logits
        assert 0 < (logits - reference).abs().max() < 0.05 * spread
        assert {g.dtype for g in gradients(model).values()} == {torch.float32}
    # The same roundings by two means: far closer to one another than to float32.
    difference = (results["native"] - results["upcast"]).std()
    assert difference < 0.7 * (results["native"] - reference).std()


@pytest.mark.parametrize("kind", ["dense", "token_routed"])
def test_gradient_checkpointing_changes_no_bit(kind: str) -> None:
    spec = tiny(mlp_type=kind)
    plain = build_model(spec, VOCAB, 0, FLOAT32)
    checkpointed = build_model(spec, VOCAB, 0, FLOAT32, grad_checkpointing=True)
    calls = []
    checkpointed.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    one, other = gradients(plain), gradients(checkpointed)
    assert len(calls) == 2  # forward, and again for the backward pass
    assert all(torch.equal(one[name], other[name]) for name in one)
    with torch.no_grad():
        checkpointed(some_ids())
    assert len(calls) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "token_routed"])
def test_compiled_blocks_give_the_same_loss_and_one_graph(kind: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    # More layers than dynamo's limit of recompilations: blocks must share one graph.
    model = build(tiny(mlp_type=kind, num_hidden_layers=10))
    forward = training_forward(model, "default")
    ids = some_ids()

    def loss(hidden: Tensor) -> Tensor:
        return nll(F.linear(hidden, model.head_weight), ids[:, 1:])

    eager = gradients(model)
    model.zero_grad()
    compiled = loss(forward(ids[:, :-1]).hidden)
    compiled.backward()
    assert compiled.item() == pytest.approx(loss(model(ids[:, :-1])).item(), abs=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-3, atol=1e-6)
    # A changed mixture reaches the compiled graph, without a new one.
    for mlp in routed_layers(model):
        mlp.route_weights.copy_(torch.tensor([0.9, 0.1]))
    changed = loss(forward(ids[:, :-1]).hidden).item()
    assert changed == pytest.approx(loss(model(ids[:, :-1])).item(), abs=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_the_other_modes_of_compilation_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Both promise other speed and no other numbers; what they do on a GPU is not seen here."""
    curves, modes = [], set()
    plain: Any = torch.compile

    def compiling(block: Any, *, mode: str, **how: Any) -> Any:
        modes.add(mode)
        return plain(block, mode=mode, **how)

    monkeypatch.setattr(torch, "compile", compiling)
    for training in ({}, {"compile": True, "compile_mode": mode}):
        torch._dynamo.reset()
        parts = tiny_parts(tmp_path, training={"steps": 6, **training})
        curves.append([result.nll for result in train(parts.spec, parts.state, parts.forward)])
    assert curves[1] == pytest.approx(curves[0], rel=2e-5)
    assert curves[0][0] - curves[0][-1] > 0.05
    assert modes == {mode}


def test_tied_head_is_the_embedding_and_untied_is_its_own() -> None:
    tied, untied = build(tiny()), build(tiny(tie_word_embeddings=False))
    assert tied.head_weight is tied.embed_tokens.weight
    assert "lm_head.weight" not in tied.state_dict()
    assert untied.head_weight is untied.state_dict(keep_vars=True)["lm_head.weight"]
    with torch.no_grad():
        untied.head_weight.zero_()
    assert bool((untied.logits(some_ids()) == 0).all())


def test_a_sequence_beyond_the_positions_is_refused_with_both_numbers() -> None:
    model = build(tiny())
    assert model(some_ids(32)).shape == (2, 32, 32)
    with pytest.raises(ValueError, match=r"33 tokens .*max_position_embeddings 32"):
        model(some_ids(33))


def test_route_tables_hash() -> None:
    known = route_tables_sha256(build(tiny(), seed=1))
    assert known == route_tables_sha256(build(tiny(), seed=2))
    for other in (tiny(num_experts=2), tiny(top_k=1), tiny(num_hidden_layers=3)):
        assert route_tables_sha256(build(other)) != known
    dense = build(tiny(mlp_type="dense"))
    assert route_tables_sha256(dense) == {"not_applicable": "a dense model"}


def test_route_tables_and_weights_are_all_that_a_checkpoint_holds() -> None:
    model = build(tiny())
    tables = {f"layers.{i}.mlp.topk_token_to_expert" for i in range(2)}
    assert model.state_dict().keys() == dict(model.named_parameters()).keys() | tables


def test_execution_facts() -> None:
    assert build(tiny()).attention_path == "sdpa, grouped key/value heads"
    multi = tiny(attention_type="mha", num_key_value_heads=4, mlp_type="dense")
    assert build(multi).attention_path == "sdpa"
    assert build(multi).dispatch == {"not_applicable": "a dense model"}
    assert "wide" in build(tiny()).dispatch


def test_a_model_on_the_meta_device_holds_no_weights() -> None:
    with torch.device("meta"):
        model = build(tiny())
    assert all(p.is_meta for p in model.parameters())
