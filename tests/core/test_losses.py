"""The fused head and cross-entropy against plain float64 autograd.

T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from workbench.core import losses
from workbench.core.loss_settings import LEAST_TOKENS, LossSettings
from workbench.core.losses import (
    IGNORED,
    LossSums,
    linear_cross_entropy,
    linear_nll,
)
from workbench.core.precision import FLOAT32, Precision
from workbench.core.workspace import Workspace

DATA = Path(__file__).parents[1] / "data"
UPCAST = Precision(torch.bfloat16, "upcast")
NATIVE = Precision(torch.bfloat16, "native")

# Relative errors: of values, and of gradients as a whole (norm of the error over the norm).
# float32 rounds each logit and each product once: a few 1e-7. bf16 gradients carry the rounding of
# the logits' gradient and, for the hidden states, of the result: 2**-9 = 2e-3 each at most.
VALUE = 1e-6
GRADIENT = 1e-6
BF16_GRADIENT = 5e-3

T, H, V = 53, 24, 211
RAGGED = LossSettings(block_vocab=32, chunk_tokens=16)
TERMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.1, 1e-2), (0.3, 2.0)]


def problem(seed: int = 0, ignore: int = 7, tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H] and weight [V, H] in float32, targets [T] with `ignore` of them ignored."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=rng)
    weight = torch.randn(V, H, generator=rng) * 0.5
    targets = torch.randint(0, V, (tokens,), generator=rng)
    targets[0], targets[1] = 0, V - 1
    targets[torch.randperm(tokens - 2, generator=rng)[:ignore] + 2] = IGNORED
    return hidden, weight, targets


def settings(terms: tuple[float, float], block: int = 32, chunk: int = 16) -> LossSettings:
    return LossSettings(block, chunk, label_smoothing=terms[0], z_loss=terms[1])


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, terms: tuple[float, float] = (0.0, 0.0)
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective's sum and its gradients, by PyTorch's own functions on full float64 logits."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.t()
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=terms[0])
    lse = logits.logsumexp(1)[targets != IGNORED]
    loss = loss + terms[1] * lse.square().sum()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def fused(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    how: LossSettings = RAGGED,
    precision: Precision = FLOAT32,
    workspace: Workspace | None = None,
    scale: float = 1.0,
) -> tuple[LossSums, Tensor, Tensor]:
    """The sums and the gradients of scale x objective."""
    hidden = hidden.detach().to(precision.compute).requires_grad_()
    weight = weight.detach().clone().requires_grad_()
    sums = linear_cross_entropy(hidden, weight, targets, how, precision, workspace)
    (sums.objective * scale).backward()
    sums = sums._replace(objective=sums.objective.detach())
    assert hidden.grad is not None
    assert weight.grad is not None
    return sums, hidden.grad, weight.grad


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("terms", TERMS)
def test_value_and_gradients_equal_plain_cross_entropy(terms: tuple[float, float]) -> None:
    data = problem()
    value, of_hidden, of_weight = plain(*data, terms)
    sums, found_hidden, found_weight = fused(*data, settings(terms))
    assert sums.objective.dtype == torch.float32
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    assert sums.tokens == T - 7
    assert error(found_hidden, of_hidden) < GRADIENT
    assert error(found_weight, of_weight) < GRADIENT
    assert not found_hidden[data[2] == IGNORED].any()


@pytest.mark.parametrize("terms", TERMS)
def test_terms_are_reported_apart(terms: tuple[float, float]) -> None:
    hidden, weight, targets = problem()
    eps = terms[0]
    nll = plain(hidden, weight, targets)[0]
    smoothed = plain(hidden, weight, targets, (eps, 0.0))[0]
    total = plain(hidden, weight, targets, terms)[0]
    sums, _, _ = fused(hidden, weight, targets, settings(terms))
    assert float(sums.nll) == pytest.approx(float(nll), rel=VALUE)
    assert float(sums.smoothing) == pytest.approx(float(smoothed - nll), rel=1e-5, abs=0)
    assert float(sums.z) == pytest.approx(float(total - smoothed), rel=VALUE, abs=0)
    for part in (sums.nll, sums.smoothing, sums.z):
        assert not part.requires_grad


def test_terms_never_touch_the_nll_and_add_nothing_when_off() -> None:
    data = problem()
    off = fused(*data, settings((0.0, 0.0)))[0]
    assert torch.equal(off.objective, off.nll.float())
    assert float(off.smoothing) == 0.0
    assert float(off.z) == 0.0
    for terms in TERMS:
        assert torch.equal(fused(*data, settings(terms))[0].nll, off.nll)


@pytest.mark.parametrize("name", ["tr_gqa", "tr_mha", "dense_gqa"])
def test_definitions_equal_the_reference_values(name: str) -> None:
    """An identity head makes the stored logits [2, 32, 512] the logits of the loss."""
    stored = load_file(DATA / f"{name}.safetensors")
    right = json.loads((DATA / f"{name}.json").read_text())
    logits, targets = stored["logits"].flatten(0, 1), stored["input_ids"][:, 1:].flatten().long()
    head = torch.eye(logits.shape[1])
    how = LossSettings(100, 10, label_smoothing=0.1, z_loss=1e-3)
    sums = linear_cross_entropy(logits, head, targets, how, FLOAT32)
    n = sums.tokens
    assert n == 64
    assert float(sums.nll) / n == pytest.approx(right["nll"], rel=VALUE)
    assert float(sums.nll + sums.smoothing) / n == pytest.approx(
        right["label_smoothing_0.1"], rel=VALUE
    )
    assert float(sums.nll + sums.z) / n == pytest.approx(right["z_loss_1e-3_total"], rel=VALUE)


@pytest.mark.parametrize(
    ("block", "chunk"),
    [(1, 0), (64, 1), (64, 0), (210, 7), (211, 53), (211, 1), (4096, 0), (4096, 1000)],
)
def test_blocks_do_not_change_the_result(block: int, chunk: int) -> None:
    data, terms = problem(), (0.1, 1e-2)
    value, of_hidden, of_weight = plain(*data, terms)
    sums, found_hidden, found_weight = fused(*data, settings(terms, block, chunk))
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    assert error(found_hidden, of_hidden) < GRADIENT
    assert error(found_weight, of_weight) < GRADIENT


def test_more_tokens_than_one_tile() -> None:
    data = problem(tokens=2500)
    value, of_hidden, of_weight = plain(*data)
    sums, found_hidden, found_weight = fused(*data, LossSettings(block_vocab=64))
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    assert error(found_hidden, of_hidden) < GRADIENT
    assert error(found_weight, of_weight) < GRADIENT


@pytest.mark.parametrize("precision", [UPCAST, NATIVE], ids=["upcast", "native"])
def test_bf16_rounds_operands_and_nothing_else_of_the_value(precision: Precision) -> None:
    hidden, weight, targets = problem()
    rounded = hidden.bfloat16(), weight.bfloat16(), targets
    terms = (0.1, 1e-2)
    value, of_hidden, of_weight = plain(*rounded, terms)
    sums, found_hidden, found_weight = fused(hidden, weight, targets, settings(terms), precision)
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    assert found_hidden.dtype == torch.bfloat16
    assert found_weight.dtype == torch.float32
    assert error(found_hidden, of_hidden) < BF16_GRADIENT
    assert error(found_weight, of_weight) < BF16_GRADIENT
    if precision is UPCAST:  # the gradient of the logits is rounded too, as matrix units would
        assert error(found_weight, of_weight) > 1e-4
    # And it really computes in bf16: float32 logits of the unrounded operands differ by far more.
    assert abs(float(sums.nll) / float(plain(hidden, weight, targets)[0]) - 1) > 1e-5


@pytest.mark.parametrize("float32_too", [True, False])
def test_a_cpu_whose_units_take_no_float32_multiplies_bfloat16_for_the_gradients(
    monkeypatch: pytest.MonkeyPatch, float32_too: bool
) -> None:
    """Its logits stay float32 sums: the value is the same, and so are the gradients but for the
    rounding of what each tile adds."""
    monkeypatch.setattr(losses, "takes_float32", lambda *_: float32_too)
    multiplied = []
    mm = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, *r, **k: multiplied.append(a.dtype) or mm(a, *r, **k)
    )
    hidden, weight, targets = problem()
    value, of_hidden, of_weight = plain(hidden.bfloat16(), weight.bfloat16(), targets)
    sums, found_hidden, found_weight = fused(hidden, weight, targets, RAGGED, NATIVE)
    assert (torch.bfloat16 in multiplied) is not float32_too
    assert torch.float32 in multiplied
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    assert error(found_hidden, of_hidden) < BF16_GRADIENT
    assert error(found_weight, of_weight) < BF16_GRADIENT


def test_both_ways_to_bf16_agree() -> None:
    data = problem()
    upcast, native = (fused(*data, precision=precision) for precision in (UPCAST, NATIVE))
    assert float(upcast[0].objective) == pytest.approx(float(native[0].objective), rel=VALUE)
    assert error(upcast[1], native[1].double()) < BF16_GRADIENT
    assert error(upcast[2], native[2].double()) < BF16_GRADIENT


def test_native_products_leave_the_process_settings_alone() -> None:
    place = torch.backends.mkldnn.matmul
    before = place.fp32_precision
    seen = []
    try:
        place.fp32_precision = "ieee"
        hidden, weight, targets = problem()
        hidden = hidden.bfloat16().requires_grad_()
        hidden.register_hook(lambda _: seen.append(place.fp32_precision))
        linear_cross_entropy(hidden, weight, targets, RAGGED, NATIVE).objective.backward()
        seen.append(place.fp32_precision)
        with Fail(), pytest.raises(MemoryError):
            linear_nll(hidden.detach(), weight, targets, RAGGED, NATIVE)
        seen.append(place.fp32_precision)
    finally:
        place.fp32_precision = before
    assert seen == ["ieee", "ieee", "ieee"]


def test_a_confident_bf16_token_keeps_its_gradient() -> None:
    """p - 1 is rounded, not p: near p = 1 the latter would lose the whole gradient."""
    hidden = torch.tensor([[7.0, 0.0]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    target = torch.tensor([0])
    _, right, _ = plain(hidden, weight, target)
    _, found, _ = fused(hidden, weight, target, precision=UPCAST)
    assert error(found, right) < BF16_GRADIENT


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_tied_embedding_gets_both_gradients(sparse: bool, steps: int) -> None:
    _, weight, targets = problem()
    ids = torch.arange(T) % 11
    mix = torch.randn(H, H, generator=torch.Generator().manual_seed(5)) / 4

    exact = weight.double().requires_grad_()
    logits = (F.embedding(ids, exact) @ mix.double()).tanh() @ exact.t()
    (steps * F.cross_entropy(logits, targets, reduction="sum")).backward()

    for direct in (False, True):
        tied = weight.clone().requires_grad_()
        workspace = Workspace(direct=direct)
        for _ in range(steps):
            hidden = (F.embedding(ids, tied, sparse=sparse) @ mix).tanh()
            linear_cross_entropy(
                hidden, tied, targets, RAGGED, FLOAT32, workspace
            ).objective.backward()
        assert tied.grad is not None
        assert tied.grad.layout == torch.strided
        assert exact.grad is not None
        assert error(tied.grad, exact.grad) < GRADIENT


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("terms", TERMS)
def test_two_micro_batches_equal_one(terms: tuple[float, float], direct: bool) -> None:
    """11 and 101 scored tokens, divided by the 112 of the window."""
    hidden, weight, targets = problem(tokens=160, ignore=0)
    targets[11:30] = IGNORED
    targets[131:] = IGNORED
    how = settings(terms)
    whole = fused(hidden, weight, targets, how, scale=1 / 112)

    workspace = Workspace(direct=direct)
    split = weight.clone().requires_grad_()
    leaf = hidden.clone().requires_grad_()
    sums = []
    for part in (slice(0, 20), slice(20, 160)):
        sums.append(linear_cross_entropy(leaf[part], split, targets[part], how, FLOAT32, workspace))
        (sums[-1].objective / 112).backward()
    assert [part.tokens for part in sums] == [11, 101]
    assert sum(float(part.nll) for part in sums) == pytest.approx(float(whole[0].nll), rel=VALUE)
    assert leaf.grad is not None
    assert split.grad is not None
    assert error(leaf.grad, whole[1].double()) < GRADIENT
    assert error(split.grad, whole[2].double()) < GRADIENT


@pytest.mark.parametrize("scale", [-3.0, 0.0, 1e-3])
def test_the_gradient_follows_what_is_done_with_the_objective(scale: float) -> None:
    data, terms = problem(), (0.1, 1e-2)
    _, of_hidden, of_weight = plain(*data, terms)
    _, found_hidden, found_weight = fused(*data, settings(terms), scale=scale)
    assert float((found_hidden - scale * of_hidden).norm()) <= GRADIENT * float(of_hidden.norm())
    assert float((found_weight - scale * of_weight).norm()) <= GRADIENT * float(of_weight.norm())


def test_only_the_gradients_asked_for() -> None:
    hidden, weight, targets = problem()
    _, of_hidden, of_weight = plain(hidden, weight, targets)
    hidden.requires_grad_()
    linear_cross_entropy(hidden, weight, targets, RAGGED, FLOAT32).objective.backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert error(hidden.grad, of_hidden) < GRADIENT
    hidden.requires_grad_(False)
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, targets, RAGGED, FLOAT32).objective.backward()
    assert weight.grad is not None
    assert error(weight.grad, of_weight) < GRADIENT


@pytest.mark.parametrize("terms", TERMS)
def test_nothing_scored_is_zero_and_not_nan(terms: tuple[float, float]) -> None:
    hidden, weight, targets = problem()
    sums, of_hidden, of_weight = fused(
        hidden, weight, torch.full_like(targets, IGNORED), settings(terms)
    )
    assert [float(part) for part in sums] == [0.0, 0.0, 0.0, 0.0, 0]
    assert torch.equal(of_hidden, torch.zeros_like(of_hidden))
    assert torch.equal(of_weight, torch.zeros_like(of_weight))


@pytest.mark.parametrize("bad", [V, -1, -101, 2**40])
def test_a_target_outside_the_vocabulary_is_named(bad: int) -> None:
    hidden, weight, targets = problem()
    targets[17] = bad
    for call in (linear_cross_entropy, linear_nll):
        with pytest.raises(ValueError, match=rf"target {bad} at position 17 .* {V} entries"):
            call(hidden, weight, targets, RAGGED, FLOAT32)


def test_shapes_and_settings_that_cannot_be_are_refused() -> None:
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, targets[1:], RAGGED, FLOAT32)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight[:, 1:], targets, RAGGED, FLOAT32)
    with pytest.raises(ValueError, match=r"hidden is torch\.float32"):
        linear_cross_entropy(hidden, weight, targets, RAGGED, UPCAST)
    for wrong in (
        {"block_vocab": 0},
        {"chunk_tokens": -1},
        {"label_smoothing": 1.0},
        {"z_loss": float("nan")},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LossSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_non_finite_input_is_never_hidden(value: float, where: str) -> None:
    hidden, weight, targets = problem()
    (hidden if where == "hidden" else weight)[5, 3] = value
    targets[5] = 9
    sums, of_hidden, of_weight = fused(hidden, weight, targets)
    assert not sums.objective.isfinite()
    assert not sums.nll.isfinite()
    assert not of_hidden.isfinite().all()
    assert not of_weight.isfinite().all()


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = problem()
    value, of_hidden, _ = plain(hidden * 1000, weight, targets)
    sums, found_hidden, _ = fused(hidden * 1000, weight, targets)
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    # A logit of some thousands carries a rounding error of 1e-4, which its probability takes over.
    assert error(found_hidden, of_hidden) < 1e-3


def test_targets_are_taken_as_given() -> None:
    """An oracle of the target scores 0; one position off, either way, it does not: no shift."""
    tokens = torch.arange(12)
    head = torch.eye(16)
    oracle = 50.0 * head[tokens + 1]
    for offset, right in ((1, True), (0, False), (2, False)):
        nll = linear_nll(oracle, head, tokens + offset, RAGGED, FLOAT32)
        assert bool((nll < 1e-6).all()) is right
        assert right or bool((nll > 10).all())


@pytest.mark.parametrize("precision", [FLOAT32, UPCAST], ids=["float32", "bf16"])
def test_evaluation_is_the_same_nll(precision: Precision) -> None:
    hidden, weight, targets = problem()
    sums, _, _ = fused(hidden, weight, targets, settings((0.1, 1e-2)), precision)
    nll = linear_nll(hidden.to(precision.compute), weight, targets, RAGGED, precision)
    assert nll.shape == (T,)
    assert not nll[targets == IGNORED].any()
    assert bool((nll[targets != IGNORED] > 0).all())
    assert float(nll.sum()) == pytest.approx(float(sums.nll), rel=1e-12)
    if precision is FLOAT32:
        right = F.cross_entropy(hidden.double() @ weight.double().t(), targets, reduction="none")
        assert error(nll, right) < VALUE


class Fail(TorchDispatchMode):
    """Fails in the middle of a pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.out:
            raise MemoryError
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor returned, and of every dense one made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
                if leaf.layout == torch.strided and leaf.data_ptr() not in given:
                    self.made.append(leaf.numel())
        return out


@pytest.mark.parametrize("precision", [FLOAT32, UPCAST, NATIVE], ids=lambda p: p.matmul)
def test_no_tensor_is_larger_than_the_head(precision: Precision) -> None:
    tokens = 400
    assert tokens * V > 10 * V * H
    data = problem(tokens=tokens)
    with Largest() as seen:
        fused(*data, settings((0.1, 1e-2), 64, H), precision)
    assert seen.numel == max(V, tokens) * H
    with Largest() as seen:
        plain(*data)
    assert seen.numel == tokens * V  # the probe sees full logits where they exist


@pytest.mark.parametrize(
    ("width", "compute", "chunk", "tokens"),
    [
        (512, torch.float32, 0, 512),
        (512, torch.bfloat16, 0, 1024),
        (4096, torch.bfloat16, 0, 1024),
        (512, torch.bfloat16, 100, 100),
        (8, torch.float32, 0, 128),
    ],
)
def test_the_softmax_of_a_panel_fits_into_the_gradient_of_the_head(
    width: int, compute: torch.dtype, chunk: int, tokens: int
) -> None:
    found = LossSettings(chunk_tokens=chunk).panel_tokens(width, compute)
    assert found == tokens
    assert found * compute.itemsize <= max(width * 4, LEAST_TOKENS * 4)


def test_gradients_are_handed_over_once() -> None:
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(
        hidden.requires_grad_(), weight.requires_grad_(), targets, RAGGED, FLOAT32
    )
    loss.objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        loss.objective.backward()


def test_the_logits_are_computed_once() -> None:
    """Three products of T x V x H in all, as a plain head takes; one where nothing is trained."""
    hidden, weight, targets = problem(ignore=0)
    in_place = {torch.ops.aten.addmm_: lambda to, a, b, **_: 2 * a[0] * a[1] * b[1]}
    for requires, products in [((True, True), 3), ((True, False), 2), ((False, False), 1)]:
        leaves = [
            x.clone().requires_grad_(r) for x, r in zip((hidden, weight), requires, strict=True)
        ]
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            loss = linear_cross_entropy(leaves[0], leaves[1], targets, RAGGED, FLOAT32)
            if any(requires):
                loss.objective.backward()
        assert counter.get_total_flops() == products * 2 * T * V * H


@pytest.mark.parametrize(("direct", "sparse"), [(False, False), (True, True)])
def test_the_gradient_lands_in_reclaimed_memory(direct: bool, sparse: bool) -> None:
    hidden, weight, targets = problem()
    ids = torch.arange(T) % 11
    workspace = Workspace(direct=direct)
    weight.requires_grad_()
    places, grads = [], []
    for _ in range(3):
        looked_up = F.embedding(ids, weight, sparse=sparse) + hidden
        linear_cross_entropy(
            looked_up, weight, targets, RAGGED, FLOAT32, workspace
        ).objective.backward()
        assert weight.grad is not None
        places.append(weight.grad.data_ptr())
        grads.append(weight.grad.clone())
        workspace.reclaim(weight)
        assert weight.grad is None
    assert len(set(places)) == 1
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_direct_gradients_make_no_third_tensor_of_the_head() -> None:
    hidden, weight, targets = problem()
    ids = torch.arange(T) % 11
    workspace = Workspace(direct=True)
    weight.requires_grad_()
    counts = []
    for _ in range(3):
        looked_up = F.embedding(ids, weight, sparse=True) + hidden
        with Largest() as seen:
            linear_cross_entropy(
                looked_up, weight, targets, RAGGED, FLOAT32, workspace
            ).objective.backward()
        counts.append(sum(numel == V * H for numel in seen.made))
    assert counts == [1, 1, 0]  # `weight.grad`, and one that later micro-batches are added from


@pytest.mark.parametrize("precision", [FLOAT32, UPCAST], ids=["float32", "bf16"])
@pytest.mark.parametrize("ignore", [0, 3])
def test_results_outlive_later_use_of_the_workspace(precision: Precision, ignore: int) -> None:
    workspace = Workspace()
    first = fused(*problem(1, ignore), precision=precision, workspace=workspace)
    kept = [part.clone() for part in (*first[0][:4], *first[1:])]
    for seed, tokens in ((3, 8), (2, 90), (4, T)):
        data = problem(seed, ignore, tokens)
        again = fused(*data, precision=precision, workspace=workspace)
        alone = fused(*data, precision=precision)
        for found, right in zip(
            (*again[0][:4], *again[1:]), (*alone[0][:4], *alone[1:]), strict=True
        ):
            assert torch.equal(found, right)
    for found, right in zip((*first[0][:4], *first[1:]), kept, strict=True):
        assert torch.equal(found, right)


def test_two_losses_may_be_open_at_once() -> None:
    """Both forward passes before either backward pass, with one workspace, by no fixed order."""
    one, two = problem(1), problem(2, tokens=31)
    workspace = Workspace()
    leaves = [(h.requires_grad_(), w.requires_grad_(), t) for h, w, t in (one, two)]
    sums = [linear_cross_entropy(*leaf, RAGGED, FLOAT32, workspace) for leaf in leaves]
    for part in sums:
        part.objective.backward()
    for hidden, weight, targets in leaves:
        _, of_hidden, of_weight = plain(hidden, weight, targets)
        assert hidden.grad is not None
        assert weight.grad is not None
        assert error(hidden.grad, of_hidden) < GRADIENT
        assert error(weight.grad, of_weight) < GRADIENT


@pytest.mark.parametrize("precision", [FLOAT32, UPCAST], ids=["float32", "bf16"])
def test_repeated_runs_are_bit_equal(precision: Precision) -> None:
    data = problem(tokens=300)
    runs = [fused(*data, settings((0.1, 1e-2)), precision) for _ in range(2)]
    for one, two in zip(
        (*runs[0][0][:4], *runs[0][1:]), (*runs[1][0][:4], *runs[1][1:]), strict=True
    ):
        assert torch.equal(one, two)
