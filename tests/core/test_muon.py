"""Muon: against torch's own, against its formula in float64, and stacks against matrices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench.core import muon
from workbench.core.muon import Muon, choose_matmul, orthogonalize
from workbench.core.precision import Matmul

CPU = torch.device("cpu")
Shape = tuple[int, ...]


def draws(shape: Shape, count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def train(start: Tensor, grads: list[Tensor], lr: float = 0.02, **settings: Any) -> Tensor:
    """Where Muon leads from `start`, one step for each gradient."""
    parameter = nn.Parameter(start.clone())
    optimizer = Muon([("w", parameter)], lr, **settings)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


def train_stock(start: Tensor, grads: list[Tensor], **settings: Any) -> Tensor:
    parameter = nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([parameter], lr=0.02, adjust_lr_fn="original", **settings)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (40, 40), (5, 3), (1, 4), (4, 1)])
def test_without_blend_and_clamp_it_is_stock_muon(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, nesterov: bool
) -> None:
    """Bit for bit where products run as stock Muon's do, by torch's own bfloat16 loops.

    Other means sum in another order, so that now and then a bfloat16 rounds the other way. The
    limit is one such rounding (2^-8) of the way gone; 0.002 is the most seen.
    """
    start, *grads = draws(shape, 5)
    settings: dict[str, Any] = {"nesterov": nesterov, "weight_decay": 0.1}
    expected = train_stock(start, grads, **settings)

    def found(matmul: Matmul) -> Tensor:
        monkeypatch.setattr(muon, "choose_matmul", lambda _: matmul)
        return train(start, grads, blend=1.0, max_update_rms=0.0, **settings)

    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert torch.equal(found("native"), expected)
    assert relative(found("native") - start, expected - start) < 2.0**-8
    assert relative(found("upcast") - start, expected - start) < 2.0**-8


@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (16, 16)])
def test_both_ways_to_multiply_orthogonalize_alike(shape: Shape) -> None:
    (m,) = draws((3, *shape), 1)
    native, upcast = (orthogonalize(m, 5, 1e-7, way) for way in ("native", "upcast"))
    assert (native.dtype, upcast.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(upcast, upcast.bfloat16().float())
    assert relative(upcast, native) < 2.0**-8


@pytest.mark.parametrize("native", [True, False])
def test_products_run_natively_where_the_cpu_has_the_instructions(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native, raising=False
    )
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert choose_matmul.__wrapped__(CPU) == ("native" if native else "upcast")


def test_a_device_without_bf16_multiplies_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(muon, "choose_precision", refuse)
    assert choose_matmul.__wrapped__(CPU) == "upcast"


STACKS = [(1, 384, 40), (3, 384, 40), (3, 40, 384), (8, 8, 8), (5, 7, 3), (4, 3, 5), (2, 33, 33)]


@pytest.mark.parametrize("shape", STACKS)
def test_a_stack_gets_exactly_what_its_slices_get(shape: Shape) -> None:
    start, *grads = draws(shape, 3)
    for grad in grads:
        grad *= torch.logspace(-3, 3, shape[0])[:, None, None]  # no norm is shared
    together = train(start, grads, weight_decay=0.1, max_update_rms=0.1)
    for expert in range(shape[0]):
        own = [grad[expert] for grad in grads]
        alone = train(start[expert], own, weight_decay=0.1, max_update_rms=0.1)
        assert torch.equal(together[expert], alone)


def test_the_batched_way_of_accelerators_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All slices at once, as a GPU has them: equal up to the order of sums."""
    start, *grads = draws((4, 24, 8), 4)
    one_by_one = train(start, grads)
    monkeypatch.setattr(muon, "_parts", lambda t: (t if t.ndim == 3 else t.unsqueeze(0),))
    assert relative(train(start, grads) - start, one_by_one - start) < 2.0**-8


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def formula(start: Tensor, grads: list[Tensor], blend: float, clamp: float) -> Tensor:
    """muon_tr on one matrix, in float64 throughout; on singular values, so without iterations."""
    weight, momentum = start.double(), torch.zeros_like(start, dtype=torch.float64)
    rows, columns = start.shape
    for grad in grads:
        momentum = 0.95 * momentum + 0.05 * grad.double()
        m = 0.95 * momentum + 0.05 * grad.double()
        left, values, right = torch.linalg.svd(m, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        u = left @ values.diag() @ right * max(1.0, rows / columns) ** 0.5
        update = blend * u + (1 - blend) * m / rms(m) * rms(u)
        update *= rms(u) / rms(update)
        if clamp and rms(update) > clamp:
            update *= clamp / rms(update)
        weight = weight * (1 - 0.02 * 0.1) - 0.02 * update
    return weight


@pytest.mark.parametrize(("blend", "clamp"), [(1.0, 0.0), (0.5, 1.0), (0.5, 0.05), (0.0, 0.1)])
@pytest.mark.parametrize("shape", [(48, 8), (8, 48), (16, 16)])
def test_it_follows_the_formula_in_float64(shape: Shape, blend: float, clamp: float) -> None:
    """Measured along the way gone. Each of the 15 products of an orthogonalization rounds by up to
    2^-9, which comes to 0.01 at blend 1 and less with more raw momentum; the limit is twice that.
    """
    start, *grads = draws(shape, 4)
    found = train(start, grads, blend=blend, max_update_rms=clamp, weight_decay=0.1)
    expected = formula(start, grads, blend, clamp)
    assert relative(found - start, expected - start.double()) < 0.02


def test_blend_and_clamp_by_hand() -> None:
    """One iteration takes 0.8 to 0.97648 and 0.6 to 1.19327, of RMS 0.77094 over four entries.

    Momentum (4, 3) at that RMS is (1.23351, 0.92513). Their mean (1.10500, 1.05920) has RMS
    0.76533; back at 0.77094 it is (1.11310, 1.06697), clamped to 0.5 (0.72191, 0.69199).
    """
    start, grad = torch.zeros(2, 2), torch.diag(torch.tensor([4.0, 3.0]))
    settings: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "ns_steps": 1}
    free = train(start, [grad], max_update_rms=0.0, **settings)
    clamped = train(start, [grad], max_update_rms=0.5, **settings)
    # Two bfloat16 roundings in a row, 2^-9 each.
    exact: dict[str, Any] = {"rtol": 2.0**-8, "atol": 0.0}
    torch.testing.assert_close(free.diag(), torch.tensor([-1.11310, -1.06697]), **exact)
    torch.testing.assert_close(clamped.diag(), torch.tensor([-0.72191, -0.69199]), **exact)
    assert rms(clamped) == pytest.approx(0.5, rel=1e-6)


def test_the_clamp_bounds_the_update_after_its_scale() -> None:
    """(3, 4) as a column points along (0.6, 0.8); at RMS 0.5 that is (0.42426, 0.56569)."""
    start, grad = torch.zeros(2, 1), torch.tensor([[3.0], [4.0]])
    found = train(start, [grad], lr=1.0, max_update_rms=0.5)
    torch.testing.assert_close(
        found.flatten(), torch.tensor([-0.42426, -0.56569]), rtol=2.0**-8, atol=0.0
    )


def test_a_clamp_above_the_update_changes_nothing() -> None:
    start, *grads = draws((12, 6), 3)
    free = train(start, grads, max_update_rms=0.0)
    assert torch.equal(train(start, grads, max_update_rms=1.0), free)
    assert not torch.equal(train(start, grads, max_update_rms=0.1), free)


@pytest.mark.parametrize("blend", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("clamp", [0.0, 0.1])
def test_a_slice_without_gradient_stays_as_it_is(blend: float, clamp: float) -> None:
    start, grad = draws((3, 6, 4), 2)
    grad[1] = 0
    found = train(start, [grad, grad], blend=blend, max_update_rms=clamp)
    assert torch.equal(found[1], start[1])
    assert found.isfinite().all()
    assert not torch.equal(found[0], start[0])


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_tiny_and_huge_gradients_give_finite_updates(size: float) -> None:
    start, grad = draws((6, 4), 2)
    assert train(start, [grad * size]).isfinite().all()


def test_a_gradient_that_is_not_finite_is_not_hidden() -> None:
    start, grad = draws((6, 4), 2)
    grad[0, 0] = math.nan
    assert train(start, [grad]).isnan().any()


def test_a_continued_run_equals_an_unbroken_one() -> None:
    starts = [draws((3, 8, 4), 1)[0], draws((4, 6), 1, seed=1)[0]]
    steps = [draws(tuple(start.shape), 4, seed=2) for start in starts]

    def build(tensors: list[Tensor]) -> tuple[list[nn.Parameter], Muon]:
        parameters = [nn.Parameter(tensor.clone()) for tensor in tensors]
        return parameters, Muon([("a", parameters[0]), ("b", parameters[1])], 0.02)

    def advance(parameters: list[nn.Parameter], optimizer: Muon, step: int) -> None:
        for parameter, grads in zip(parameters, steps, strict=True):
            parameter.grad = grads[step].clone()
        optimizer.step()

    unbroken, straight = build(starts)
    before, first = build(starts)
    for step in range(2):
        advance(unbroken, straight, step)
        advance(before, first, step)
    saved = copy.deepcopy(first.state_dict())
    assert [set(state) for state in saved["state"].values()] == [{"momentum_buffer"}] * 2
    after, second = build([parameter.detach() for parameter in before])
    second.load_state_dict(saved)
    for step in range(2, 4):
        advance(unbroken, straight, step)
        advance(after, second, step)
    for parameter, expected in zip(after, unbroken, strict=True):
        assert torch.equal(parameter, expected)


def test_each_group_has_its_rate_and_decay() -> None:
    start, grad = draws((6, 4), 2)
    first, second = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    groups = [
        {"params": [("a", first)], "weight_decay": 0.5},
        {"params": [("b", second)], "lr": 0.3},
    ]
    optimizer = Muon(groups, 0.1, weight_decay=0.0)
    first.grad, second.grad = grad.clone(), grad.clone()
    optimizer.step()
    assert torch.equal(first.detach(), train(start, [grad], lr=0.1, weight_decay=0.5))
    assert torch.equal(second.detach(), train(start, [grad], lr=0.3, weight_decay=0.0))


def test_decay_is_decoupled_from_the_gradient() -> None:
    (start,) = draws((6, 4), 1)
    found = train(start, [torch.zeros_like(start)], lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(found, start * 0.95)


def test_the_rate_is_read_at_each_step() -> None:
    start, grad = draws((6, 4), 2)
    parameter = nn.Parameter(start.clone())
    optimizer = Muon([parameter], 0.1)
    parameter.grad = grad.clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(parameter.detach(), start)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(parameter.detach(), start)


def test_a_parameter_without_gradient_is_skipped() -> None:
    kept, moved = (nn.Parameter(start) for start in draws((4, 4), 2))
    optimizer = Muon([kept, moved], 0.1, weight_decay=0.1)
    before = kept.detach().clone()
    moved.grad = torch.ones_like(moved)
    optimizer.step()
    assert torch.equal(kept.detach(), before)
    assert list(optimizer.state) == [moved]


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    dense, sparse = (nn.Parameter(start) for start in draws((4, 4), 2))
    optimizer = Muon([("dense", dense), ("tokens", sparse)], 0.1)
    before = dense.detach().clone()
    dense.grad, sparse.grad = torch.ones(4, 4), torch.eye(4).to_sparse()
    with pytest.raises(RuntimeError, match="tokens"):
        optimizer.step()
    assert torch.equal(dense.detach(), before)
    assert not optimizer.state


WRONG: list[Callable[[], Tensor]] = [
    lambda: torch.zeros(4),
    lambda: torch.zeros(()),
    lambda: torch.zeros(2, 2, 2, 2),
    lambda: torch.zeros(0, 3),
    lambda: torch.zeros(2, 2, dtype=torch.float64),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_other_shapes_are_refused_by_name(wrong: Callable[[], Tensor]) -> None:
    good, bad = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(wrong())
    with pytest.raises(ValueError, match=r"norm\.weight is .*another optimizer"):
        Muon([("q.weight", good), ("norm.weight", bad)], 0.1)
    with pytest.raises(ValueError, match="number 1 is"):
        Muon([good, bad], 0.1)
    optimizer = Muon([("q.weight", good)], 0.1)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        optimizer.add_param_group({"params": [("norm.weight", bad)]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("ns_steps", 0),
        ("ns_steps", 100),
        ("blend", 1.5),
        ("max_update_rms", -1.0),
        ("weight_decay", -0.1),
        ("eps", 0.0),
    ],
)
def test_a_setting_out_of_range_is_refused(key: str, value: float) -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    settings: dict[str, Any] = {"lr": 0.1, key: value}
    with pytest.raises(ValueError, match=f"{key} is {value}"):
        Muon([parameter], **settings)
    with pytest.raises(ValueError, match=f"{key} is {value}"):
        Muon([{"params": [parameter], key: value}], 0.1)
