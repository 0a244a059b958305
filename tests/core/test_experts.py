"""The learned router and its balance loss, expert diversity, and the watch over frozen experts."""

from __future__ import annotations

import itertools
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import ROUTED, tiny_parts, tiny_spec, untracked_run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench import run as runner
from workbench.cli import _guarded
from workbench.compare import check_specs
from workbench.core import terms
from workbench.core import train as training
from workbench.core.checkpoint import checkpoints
from workbench.core.model import Transformer, build_model
from workbench.core.moe import EXPERT_STACKS, LearnedRouted, RoutedFeedForward, TokenRouted
from workbench.core.parallel import Team
from workbench.core.precision import FLOAT32, Precision
from workbench.core.routing import route_table
from workbench.core.telemetry import ExpertWatch, Routes
from workbench.core.terms import diversity as diversity_of
from workbench.core.train import StepResult, clip_gradients, train
from workbench.errors import TrainingStoppedError
from workbench.foresee import foresee
from workbench.run import Components
from workbench.spec.run import ModelSpec
from workbench.track.events import NullTracker
from workbench.track.record import read_record
from workbench.track.store import Store

VOCAB = 257
LEARNED = {"mlp_type": "learned_router"}


def model_spec(**fields: Any) -> ModelSpec:
    return ModelSpec.model_validate({**ROUTED, **fields})


def model_of(seed: int = 7, **fields: Any) -> Transformer:
    return build_model(model_spec(**fields), VOCAB, seed, FLOAT32)


def train_all(parts: Components, **options: Any) -> list[StepResult]:
    return list(train(parts.spec, parts.state, parts.forward, **options))


def gradients_of_first_step(parts: Components) -> tuple[StepResult, dict[str, Tensor]]:
    """The first update and the gradients that it was made of, before clipping."""
    found: dict[str, Tensor] = {}

    def kept(model: nn.Module, max_norm: float, team: Team) -> float:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()
        return clip_gradients(model, max_norm, team)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "clip_gradients", kept)
        result = next(train(parts.spec, parts.state, parts.forward))
    return result, found


# -- the arms differ in the router alone


def test_a_learned_router_adds_its_matrix_and_changes_no_other_bit() -> None:
    routed = dict(model_of().named_parameters())
    learned = dict(model_of(**LEARNED).named_parameters())
    routers = {f"layers.{layer}.mlp.router.weight" for layer in range(2)}
    assert learned.keys() - routed.keys() == routers
    assert not routed.keys() - learned.keys()
    assert all(torch.equal(routed[name], learned[name]) for name in routed)
    assert all(learned[name].shape == (4, 64) for name in routers)
    assert not torch.equal(*(learned[name] for name in sorted(routers)))


def test_the_backbone_of_a_dense_arm_is_bit_identical() -> None:
    arms = [
        dict(model_of(**fields).named_parameters())
        for fields in (LEARNED, {"mlp_type": "dense", "shared_intermediate_size": None})
    ]
    backbones = [{name for name in arm if ".mlp." not in name} for arm in arms]
    assert backbones[0] == backbones[1]
    assert len(backbones[0]) == 1 + 2 * (2 + 4 + 2) + 1  # per layer: norms, attention, q/k norms
    assert all(torch.equal(arms[0][name], arms[1][name]) for name in backbones[0])


def test_the_router_of_the_100m_profile_has_384_x_4_parameters_a_layer() -> None:
    with torch.device("meta"):
        sizes = [
            sum(
                parameter.numel()
                for parameter in build_model(
                    ModelSpec.model_validate({"profile": "100m", "mlp_type": kind}),
                    1000,
                    0,
                    FLOAT32,
                ).parameters()
            )
            for kind in ("learned_router", "token_routed")
        ]
    assert sizes[0] - sizes[1] == 10 * 384 * 4


# -- the learned router against its definition


def learned_layer(precision: Precision = FLOAT32, **fields: Any) -> LearnedRouted:
    layer = LearnedRouted(model_spec(**LEARNED, **fields), precision)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim:
                parameter.normal_(0, 0.3, generator=generator)
    return layer


def hidden_states() -> Tensor:
    return torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_the_learned_router_equals_a_loop_over_tokens(top_k: int, shared: bool) -> None:
    """The K largest probabilities, renormalised; a single one as it is."""
    fields: dict[str, Any] = {} if shared else {"shared_intermediate_size": None}
    layer, x = learned_layer(top_k=top_k, shared_expert=shared, **fields), hidden_states()
    layer.requires_grad_(False)

    def swiglu(v: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(v @ gate) * (v @ up)) @ down

    output, extras = layer(x, torch.zeros(2, 7, dtype=torch.int64))
    hits, summed = [0] * 4, torch.zeros(4)
    for b, s in itertools.product(range(2), range(7)):
        scores = [math.exp(float(row @ x[b, s])) for row in layer.router.weight]
        probabilities = [score / sum(scores) for score in scores]
        chosen = sorted(range(4), key=lambda e: -probabilities[e])[:top_k]
        total = sum(probabilities[e] for e in chosen) if top_k > 1 else 1.0
        expected = torch.zeros(64)
        for e in chosen:
            hits[e] += 1
            one = swiglu(x[b, s], layer.gate_proj_w[e], layer.up_proj_w[e], layer.down_proj_w[e])
            expected += probabilities[e] / total * one
        if shared:
            matrices = (layer.shared_gate.weight, layer.shared_up.weight, layer.shared_down.weight)
            expected = expected + swiglu(x[b, s], *(w.t() for w in matrices))
        summed += torch.tensor(probabilities)
        torch.testing.assert_close(output[b, s], expected, rtol=1e-4, atol=1e-4)
    assert extras["route_hits"].tolist() == hits
    torch.testing.assert_close(extras["route_probability"], summed)


def test_the_router_computes_in_float32_whatever_the_run_does() -> None:
    """Two experts whose scores differ by less than a bfloat16 can tell stay in their order."""
    layer = learned_layer(Precision(torch.bfloat16, "upcast"), top_k=1)
    with torch.no_grad():
        layer.router.weight[:] = -1.0
        layer.router.weight[1] = 1.0
        layer.router.weight[3] = 1.0 + 2**-12
    x = torch.ones(1, 3, 64, dtype=torch.bfloat16)
    weights, _ = layer.expert_weights(x, torch.zeros(1, 3, dtype=torch.int64))
    assert weights.dtype == torch.float32
    assert weights.argmax(-1).tolist() == [[3, 3, 3]]


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_router_learns_from_the_nll_alone(tmp_path: Path, top_k: int) -> None:
    model = {**LEARNED, "top_k": top_k, "router_aux_loss_weight": 0.0}
    result, gradients = gradients_of_first_step(tiny_parts(tmp_path, model=model))
    assert result.balance is None
    for layer in range(2):
        # A single route whose weight is divided by itself leaves 1e-11 of rounding, and no zero.
        assert bool((gradients[f"layers.{layer}.mlp.router.weight"].abs().amax(1) > 1e-6).all())


# -- the balance loss


def test_the_balance_loss_is_that_of_its_formula(tmp_path: Path) -> None:
    parts = tiny_parts(tmp_path, model={**LEARNED, "router_aux_loss_weight": 0.5})
    seen: list[Tensor] = []
    for layer in parts.state.model.routed_layers:
        assert isinstance(layer, LearnedRouted)
        layer.router.register_forward_hook(lambda _m, _x, y: seen.append(y.detach().double()))
    result = next(train(parts.spec, parts.state, parts.forward))
    assert len(seen) == 2
    expected = 0.0
    for probabilities in seen:
        flat = probabilities.flatten(0, 1)
        chosen = flat.argsort(descending=True)[:, :2].flatten()
        fraction = torch.bincount(chosen, minlength=4) / len(chosen)
        expected += 4 * float((fraction * flat.mean(0)).sum()) / 2
    assert result.balance is not None
    assert result.balance.value == pytest.approx(expected, rel=1e-6)
    assert result.balance.weight == 0.5
    assert result.balance.contribution == pytest.approx(0.5 * expected, rel=1e-6)
    assert result.objective == pytest.approx(result.nll + 0.5 * expected, rel=1e-7)


def test_the_balance_gradient_is_linear_in_the_coefficient(tmp_path: Path) -> None:
    found = {}
    for weight in (0.0, 0.01, 1.0):
        model = {**LEARNED, "router_aux_loss_weight": weight}
        _, found[weight] = gradients_of_first_step(tiny_parts(tmp_path, model=model))
    for name in ("layers.0.mlp.router.weight", "layers.1.mlp.router.weight"):
        small, large = (found[weight][name] - found[0.0][name] for weight in (0.01, 1.0))
        assert large.norm() > 0
        torch.testing.assert_close(
            small * 100, large, rtol=1e-3, atol=float(large.abs().max()) / 1e4
        )


def test_at_coefficient_zero_there_is_no_balance_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*_: Any) -> Any:
        raise AssertionError("the balance loss was computed")

    monkeypatch.setattr(training, "balance_of", called)
    monkeypatch.setattr(terms, "route_hits", called)
    layout = {"batch_size": 2, "gradient_accumulation_steps": 2}
    model = {**LEARNED, "router_aux_loss_weight": 0.0}
    results = train_all(tiny_parts(tmp_path, model=model, training=layout))
    assert [result.balance for result in results] == [None] * 4
    assert [r.objective for r in results] == pytest.approx([r.nll for r in results], rel=1e-7)


def test_accumulation_changes_neither_balance_loss_nor_its_gradient(tmp_path: Path) -> None:
    """The fractions are those of the whole update: a mean of micro-batches' losses is another."""
    model = {**LEARNED, "router_aux_loss_weight": 1.0}
    whole: tuple[StepResult, dict[str, Tensor]] | None = None
    curves = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        layout = {"batch_size": batch, "gradient_accumulation_steps": accumulation, "steps": 8}
        result, gradients = gradients_of_first_step(
            tiny_parts(tmp_path, model=model, training=layout)
        )
        curves.append(train_all(tiny_parts(tmp_path, model=model, training=layout)))
        whole = whole or (result, gradients)
        assert result.balance is not None
        assert whole[0].balance is not None
        assert result.balance.value == pytest.approx(whole[0].balance.value, rel=1e-5)
        assert result.objective == pytest.approx(whole[0].objective, rel=1e-5)
        assert result.grad_norm == pytest.approx(whole[0].grad_norm, rel=1e-5)
        for name, gradient in gradients.items():
            scale = float(whole[1][name].abs().max())
            torch.testing.assert_close(gradient, whole[1][name], rtol=1e-4, atol=1e-5 * scale)
    for name in ("nll", "objective"):
        first, *others = ([getattr(r, name) for r in results] for results in curves)
        for other in others:
            assert other == pytest.approx(first, rel=1e-5), name


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradient_checkpointing_changes_no_bit_of_a_learned_router(
    tmp_path: Path, accumulation: int
) -> None:
    found = []
    for checkpointing in (False, True):
        layout = {
            "grad_ckpt": checkpointing,
            "batch_size": 4 // accumulation,
            "gradient_accumulation_steps": accumulation,
        }
        model = {**LEARNED, "router_aux_loss_weight": 0.1}
        parts = tiny_parts(tmp_path, model=model, training=layout)
        results = train_all(parts)
        found.append((results, dict(parts.state.model.named_parameters())))
    (plain, weights), (checkpointed, others) = found
    for one, other in zip(plain, checkpointed, strict=True):
        assert (one.nll, one.objective, one.balance) == (other.nll, other.objective, other.balance)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


# -- expert diversity


def penalty_by_hand(layers: list[RoutedFeedForward], names: tuple[str, ...]) -> Tensor:
    """The mean over layers and pairs of squared cosines, in float64, pair by pair."""
    found = []
    for layer in layers:
        vectors = [
            torch.cat([getattr(layer, name)[e].double().flatten() for name in names])
            for e in range(layer.experts)
        ]
        pairs = list(itertools.permutations(vectors, 2))
        cosines = [(a @ b) / (a.norm() * b.norm()) for a, b in pairs]
        found.append(torch.stack(cosines).square().mean())
    return torch.stack(found).mean()


@pytest.mark.parametrize(("target", "names"), [("down", ("down_proj_w",)), ("all", EXPERT_STACKS)])
@pytest.mark.parametrize("width", [32, 4096])
def test_diversity_is_the_mean_squared_cosine(
    target: str, names: tuple[str, ...], width: int
) -> None:
    """Also of wide experts, which at the start are orthogonal but for a few parts in 10,000."""
    layers = model_of(intermediate_size=width).routed_layers
    value = diversity_of(layers, target)
    expected = penalty_by_hand(layers, names)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    parameters = [getattr(layer, name) for layer in layers for name in names]
    found = torch.autograd.grad(value, parameters)
    for ours, theirs in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-3 * theirs.abs().max())


def test_equal_and_opposite_experts_are_penalised_alike() -> None:
    (layer, *_) = model_of(num_experts=2).routed_layers
    with torch.no_grad():
        layer.down_proj_w[1] = -2 * layer.down_proj_w[0]
    assert diversity_of([layer], "down").item() == pytest.approx(1.0)
    with torch.no_grad():
        layer.down_proj_w[0, :, ::2] = 0
        layer.down_proj_w[1, :, 1::2] = 0
    assert diversity_of([layer], "down").item() == pytest.approx(0.0, abs=1e-12)


def test_the_diversity_gradient_is_added_with_its_weight(tmp_path: Path) -> None:
    model = {"expert_diversity_schedule_ratio": 0.0}  # no ramp: whole from the first update
    base, plain = gradients_of_first_step(tiny_parts(tmp_path))
    for weight in (0.5, 50.0):
        parts = tiny_parts(tmp_path, model={**model, "expert_diversity_lambda": weight})
        expected = penalty_by_hand(parts.state.model.routed_layers, ("down_proj_w",))
        expected.backward()  # type: ignore[no-untyped-call]
        stacks = [layer.down_proj_w for layer in parts.state.model.routed_layers]
        penalties = [stack.grad for stack in stacks]
        for stack in stacks:
            stack.grad = None
        result, gradients = gradients_of_first_step(parts)
        assert result.nll == base.nll
        assert result.diversity is not None
        assert result.diversity.weight == weight
        assert result.diversity.value == pytest.approx(expected.item(), rel=1e-5)
        assert result.objective == pytest.approx(base.nll + weight * expected.item(), rel=1e-6)
        for index, penalty in enumerate(penalties):
            assert penalty is not None
            name = f"layers.{index}.mlp.down_proj_w"
            wanted = plain[name] + weight * penalty
            atol = 1e-5 * float(wanted.abs().max())
            torch.testing.assert_close(gradients[name], wanted, rtol=1e-4, atol=atol)
        others = [name for name in plain if not name.endswith("down_proj_w")]
        assert all(torch.equal(plain[name], gradients[name]) for name in others)


def test_diversity_costs_nothing_while_its_weight_is_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args[1])
        return diversity_of(*args)

    monkeypatch.setattr(terms, "diversity", counted)
    results = train_all(tiny_parts(tmp_path, model={"expert_diversity_lambda": 0.0}))
    assert not calls
    assert [result.diversity for result in results] == [None] * 4
    ramped = {"expert_diversity_lambda": 0.3, "expert_diversity_target": "all"}
    ramped |= {"expert_diversity_schedule_steps": 3}
    results = train_all(tiny_parts(tmp_path, model=ramped))
    assert results[0].diversity is None  # the ramp starts at 0
    assert calls == ["all"] * 3
    weights = [result.diversity.weight for result in results if result.diversity]
    assert weights == pytest.approx([0.15, 0.3, 0.3])


# -- frozen and unused experts


def freeze(model: Transformer, layer: int, expert: int, names: tuple[str, ...]) -> None:
    """Cuts the gradient of some matrices of one expert, as a faulty kernel would."""

    def cut(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        kept[expert] = 0
        return kept

    for name in names:
        model.routed_layers[layer].get_parameter(name).register_hook(cut)


@pytest.mark.parametrize("kind", ["token_routed", "learned_router"])
@pytest.mark.parametrize("names", [EXPERT_STACKS, ("up_proj_w",), ("down_proj_w",)])
def test_a_frozen_expert_stops_the_run_in_the_fifth_step(
    tmp_path: Path, kind: str, names: tuple[str, ...]
) -> None:
    # A router left to itself need not send a token to every expert in every update.
    parts = tiny_parts(tmp_path, model={"mlp_type": kind, "top_k": 3}, training={"steps": 9})
    freeze(parts.state.model, 1, 2, names)
    with pytest.raises(TrainingStoppedError, match=r"step 5: layer 1 expert 2 gets tokens") as stop:
        train_all(parts)
    assert stop.value.exit_code == 4
    assert names[0] in str(stop.value)
    assert parts.state.step == 4


def test_a_run_with_a_frozen_expert_is_failed_and_exits_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tiny_spec(tmp_path, training={"steps": 9})

    def broken(*args: Any, **options: Any) -> Transformer:
        model = build_model(*args, **options)
        freeze(model, 0, 3, ("gate_proj_w",))
        return model

    monkeypatch.setattr(runner, "build_model", broken)
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    path = tmp_path / "tiny.yaml"
    path.write_text(spec.model_dump_json())
    assert _guarded(["run", str(path)]) == 4
    shown = capsys.readouterr().err
    assert "layer 0 expert 3" in shown
    assert "Traceback" not in shown
    record = read_record(tmp_path / "mlruns/runs/tiny")
    assert record.status == "FAILED"
    assert "layer 0 expert 3" in str(record.error)
    assert record.effective.budget.finished is False


def without_expert(model: Transformer, layer: int, expert: int) -> None:
    """Sends the tokens of one expert to its neighbours, in one layer."""
    mlp = model.routed_layers[layer]
    assert isinstance(mlp, TokenRouted)
    table = mlp.topk_token_to_expert
    others = [e for e in range(mlp.experts) if e != expert]
    for k in range(len(table)):
        away = table[k] == expert
        table[k, away] = others[k]


def test_an_expert_without_tokens_is_recorded_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def emptied(*args: Any, **options: Any) -> Transformer:
        model = build_model(*args, **options)
        without_expert(model, 1, 3)
        return model

    monkeypatch.setattr(runner, "build_model", emptied)
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    spec = tiny_spec(tmp_path, training={"steps": 7})
    outcome = runner.run(spec, Store(tmp_path / "mlruns"), ["run", "tiny.yaml"])
    assert outcome.record.status == "FINISHED"
    assert outcome.record.results.unused_experts == ["layer 1 expert 3"]
    assert read_record(outcome.folder).results.unused_experts == ["layer 1 expert 3"]
    out, err = capfd.readouterr()
    assert "unused experts" in out + err
    assert "layer 1 expert 3" in out + err


@pytest.mark.parametrize("kind", ["primary weight 1", "routed gate 0", "saturated router"])
def test_tokens_of_weight_zero_do_not_make_an_expert_frozen(tmp_path: Path, kind: str) -> None:
    model: dict[str, Any] = {
        "primary weight 1": {"top_k_primary_weight": 1.0},
        "routed gate 0": {"learn_shared_routed_gates": True, "routed_gate_init": 0.0},
        "saturated router": {**LEARNED, "top_k": 4},
    }[kind]
    parts = tiny_parts(tmp_path, model=model, training={"steps": 8})
    layers = parts.state.model.routed_layers
    with torch.no_grad():
        for index, mlp in enumerate(layers):
            if isinstance(mlp, LearnedRouted):
                # The last expert's probability is 0 in float32, whatever the token.
                mlp.router.requires_grad_(False)
                parts.state.model.layers[index].post_attention_layernorm.requires_grad_(False)
                mlp.router.weight.zero_()
                mlp.router.forward = (
                    lambda x: torch.tensor([0.5, 0.25, 0.25, 0.0]).expand(  # type: ignore[method-assign]
                        *x.shape[:-1], 4
                    )
                )
            elif kind == "routed gate 0":
                mlp.routed_output_gate.requires_grad_(False)
            else:
                without_expert(parts.state.model, index, 3)
                assert isinstance(mlp, TokenRouted)
                mlp.topk_token_to_expert[1] = 3
    assert len(train_all(parts)) == 8
    assert parts.state.watch.unused == []


def test_the_watch_counts_updates_with_tokens_only() -> None:
    model = model_of()
    watch = ExpertWatch(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.routed_layers[0].down_proj_w.grad[1] = 0  # type: ignore[index]
    with_tokens, without = (np.full((2, 4), 9), np.full((2, 4), 9))
    without[0, 1] = 0
    for step in range(1, 5):
        watch.check(2 * step - 1, Routes(with_tokens, with_tokens))
        watch.check(2 * step, Routes(with_tokens, without))
    saved = watch.state_dict()
    with pytest.raises(TrainingStoppedError, match="step 9: layer 0 expert 1"):
        watch.check(9, Routes(with_tokens, with_tokens))
    again = ExpertWatch(model)
    again.load_state_dict(saved)
    with pytest.raises(TrainingStoppedError, match="step 9: layer 0 expert 1"):
        again.check(9, Routes(with_tokens, with_tokens))


# -- route strategies in a run


STRATEGIES = (
    "modulo_cyclic",
    "round_robin",
    "random",
    "token_id_balanced_hash",
    "token_id_multi_hash",
)


def test_each_strategy_is_known_by_its_tables(tmp_path: Path) -> None:
    """In the record by their hash, in the checkpoint by value."""
    store = Store(tmp_path / "mlruns")
    hashes = {}
    for strategy in STRATEGIES:
        model = {"routing_strategy": strategy}
        spec = tiny_spec(tmp_path, strategy, model=model, training={"steps": 1})
        outcome = untracked_run(spec, store)
        hashes[strategy] = outcome.record.effective.model.route_tables_sha256
        saved = load_file(checkpoints(outcome.folder / "checkpoints")[-1] / "model.safetensors")
        for layer in range(2):
            table = saved[f"layers.{layer}.mlp.topk_token_to_expert"]
            assert torch.equal(table, route_table(strategy, VOCAB, 4, 2, layer))
    assert len(set(hashes.values())) == len(STRATEGIES)
    assert all(isinstance(found, str) for found in hashes.values())


def test_two_strategies_differ_in_the_model_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "mlruns")
    specs = [
        tiny_spec(tmp_path, strategy, model={"routing_strategy": strategy})
        for strategy in ("modulo_cyclic", "token_id_multi_hash")
    ]
    check = check_specs(*specs, *(foresee(spec, store) for spec in specs))
    rules = check.to_json()["rules"]
    found = {rule["rule"] for rule in rules if rule["outcome"] in ("studied", "differs")}
    assert found == {"model"}
    leaves = {leaf["path"]: leaf["outcome"] for rule in rules for leaf in rule["leaves"]}
    assert {path for path, outcome in leaves.items() if outcome in ("studied", "differs")} == {
        "model.routing_strategy"
    }
    assert leaves["effective.model.route_tables_sha256"] == "follows"


# -- chunks of the shared path


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.held += storage.nbytes()
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.held)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


@pytest.mark.parametrize("precision", [FLOAT32, Precision(torch.bfloat16, "upcast")])
@pytest.mark.parametrize("trains", [True, False])
def test_chunks_of_the_shared_path_take_less_memory_for_the_same_result(
    precision: Precision, trains: bool
) -> None:
    peaks, outputs = [], []
    for chunk in (0, 32):
        sizes = {"shared_intermediate_size": 512, "shared_expert_chunk_tokens": chunk}
        mlp = model_of(**sizes).routed_layers[0]
        mlp.precision = precision
        for name in ("shared_gate", "shared_up", "shared_down"):
            getattr(mlp, name).precision = precision
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 256, 64, generator=generator).to(precision.compute)
        ids = torch.randint(VOCAB, (2, 256), generator=generator)
        x.requires_grad_(trains)
        with torch.set_grad_enabled(trains), PeakMemory() as peak:
            output, _ = mlp(x, ids)
            if trains:
                output.float().sum().backward()
        peaks.append(peak.most)
        outputs.append(output.detach().float())
    torch.testing.assert_close(
        outputs[0], outputs[1], rtol=1e-6, atol=1e-6 * outputs[0].abs().max()
    )
    assert peaks[1] < (0.7 if trains else 0.5) * peaks[0], peaks
