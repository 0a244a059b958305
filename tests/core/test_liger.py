"""Liger's loss against plain float64 autograd, and where it is chosen.

T tokens, H hidden, V vocabulary. Functions `kernel_*` run the kernel. They are not collected here:
`test_the_kernel` runs them in a process of their own, where Triton interprets it on the CPU (it
decides so when it is imported), or on a GPU compiles it. None can be skipped unseen.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.core import liger, losses
from workbench.core.liger import choose_loss_backend
from workbench.core.loss_settings import LossSettings
from workbench.core.losses import IGNORED, LossSums
from workbench.core.precision import FLOAT32, Precision
from workbench.core.workspace import Workspace
from workbench.errors import UserError

CPU = torch.device("cpu")
DEVICE = torch.device(os.environ.get("LIGER_TEST_DEVICE", "cpu"))
BF16 = Precision(torch.bfloat16, "native" if DEVICE.type == "cuda" else "upcast")

# Relative errors: of values, and of gradients as a whole (norm of the error over the norm).
# float32 rounds logits, exponentials and sums: a few 1e-7. The gradients of a bf16 run carry the
# rounding of the hidden states' to bfloat16, 2**-9 = 2e-3 at most, and on CUDA of TF32.
VALUE = 1e-6
GRADIENT = 1e-6
BF16_GRADIENT = 5e-3

# Triton's interpreter takes milliseconds for each token.
T, H, V = 21, 24, 211
RAGGED = LossSettings(chunk_tokens=8)
TERMS = [0.0, 1e-4, 2.0]


def problem(ignore: int = 5, tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H] and weight [V, H] in float32, targets [T] with `ignore` of them ignored."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, H, generator=rng)
    weight = torch.randn(V, H, generator=rng) * 0.5
    targets = torch.randint(0, V, (tokens,), generator=rng)
    targets[0], targets[1] = 0, V - 1
    targets[torch.randperm(tokens - 2, generator=rng)[:ignore] + 2] = IGNORED
    return hidden.to(DEVICE), weight.to(DEVICE), targets.to(DEVICE)


def settings(z_loss: float, chunk: int = 8) -> LossSettings:
    return LossSettings(chunk_tokens=chunk, z_loss=z_loss)


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective's sum and its gradients, by PyTorch's own functions on full float64 logits."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.t()
    loss = F.cross_entropy(logits, targets, reduction="sum")
    loss = loss + z_loss * logits.logsumexp(1)[targets != IGNORED].square().sum()
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
    scale: float = 1.0,
    compute: Any = liger.linear_cross_entropy,
) -> tuple[LossSums, Tensor, Tensor]:
    """The sums and the gradients of scale x objective."""
    hidden = hidden.detach().to(precision.compute).requires_grad_()
    weight = weight.detach().clone().requires_grad_()
    sums = compute(hidden, weight, targets, how, precision)
    (sums.objective * scale).backward()
    sums = sums._replace(objective=sums.objective.detach())
    assert hidden.grad is not None
    assert weight.grad is not None
    return sums, hidden.grad, weight.grad


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("z_loss", TERMS)
def kernel_value_and_gradients_equal_plain_cross_entropy(z_loss: float) -> None:
    data = problem()
    value, of_hidden, of_weight = plain(*data, z_loss)
    sums, found_hidden, found_weight = fused(*data, settings(z_loss))
    assert sums.objective.dtype == torch.float32
    assert [part.dtype for part in sums[1:4]] == [torch.float64] * 3
    assert not any(part.requires_grad for part in sums[1:4])
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    assert sums.tokens == T - 5
    assert error(found_hidden, of_hidden) < GRADIENT
    assert error(found_weight, of_weight) < GRADIENT
    assert not found_hidden[data[2] == IGNORED].any()


def kernel_z_is_apart_from_the_nll() -> None:
    data = problem()
    nll = float(plain(*data)[0])
    logits = data[0] @ data[1].t()  # and in float32, as a plain training script has it
    assert float(F.cross_entropy(logits, data[2], reduction="sum")) == pytest.approx(nll, rel=VALUE)
    for z_loss in TERMS:
        sums = fused(*data, settings(z_loss))[0]
        z = float(plain(*data, z_loss)[0]) - nll
        # The difference of two float32 numbers as large as both together.
        assert abs(float(sums.nll) - nll) < VALUE * (nll + z)
        assert float(sums.z) == pytest.approx(z, rel=VALUE, abs=1e-9)
        assert float(sums.smoothing) == 0.0
    off = fused(*data, settings(0.0))[0]
    assert float(off.z) == 0.0
    assert torch.equal(off.objective, off.nll.float())


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("precision", [FLOAT32, BF16], ids=["float32", "bf16"])
def kernel_agrees_with_the_chunked_loss(precision: Precision, z_loss: float) -> None:
    data, how = problem(), settings(z_loss)
    one, other = (
        fused(*data, how, precision, compute=compute)
        for compute in (liger.linear_cross_entropy, losses.linear_cross_entropy)
    )
    for found, right in zip(one[0], other[0], strict=True):
        assert float(found) == pytest.approx(float(right), rel=VALUE, abs=0)
    tolerance = GRADIENT if precision is FLOAT32 else BF16_GRADIENT
    for found, right in zip(one[1:], other[1:], strict=True):
        assert found.dtype == right.dtype
        assert error(found, right.double()) < tolerance


@pytest.mark.parametrize("scale", [1.0, 20.0])
def kernel_bf16_rounds_operands_and_no_logits(scale: float) -> None:
    """bfloat16 logits would change the NLL by some 1e-4."""
    hidden, weight, targets = problem()
    hidden = hidden * scale
    rounded = hidden.bfloat16(), weight.bfloat16(), targets
    value, of_hidden, of_weight = plain(*rounded, 1e-4)
    sums, found_hidden, found_weight = fused(hidden, weight, targets, settings(1e-4), BF16)
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    assert float(sums.nll) == pytest.approx(float(plain(*rounded)[0]), rel=VALUE)
    assert found_hidden.dtype == torch.bfloat16
    assert found_weight.dtype == torch.float32
    assert error(found_hidden, of_hidden) < BF16_GRADIENT
    assert error(found_weight, of_weight) < BF16_GRADIENT
    assert abs(float(sums.nll) / float(plain(hidden, weight, targets)[0]) - 1) > 1e-5


@pytest.mark.parametrize(("chunk", "tokens"), [(0, T), (1, T), (7, 1), (16, 34), (16, 32)])
def kernel_chunks_do_not_change_the_result(chunk: int, tokens: int) -> None:
    hidden, weight, targets = problem(tokens=max(tokens, 3), ignore=0)
    data = hidden[:tokens], weight, targets[:tokens]
    value, of_hidden, of_weight = plain(*data, 1e-4)
    sums, found_hidden, found_weight = fused(*data, settings(1e-4, chunk))
    assert float(sums.objective) == pytest.approx(float(value), rel=VALUE)
    assert error(found_hidden, of_hidden) < GRADIENT
    assert error(found_weight, of_weight) < GRADIENT


@pytest.mark.parametrize(("z_loss", "direct"), [(0.0, False), (1e-4, True)])
def kernel_two_micro_batches_equal_one(z_loss: float, direct: bool) -> None:
    """11 and 101 scored tokens, divided by the 112 of the window."""
    hidden, weight, targets = problem(tokens=160, ignore=0)
    targets[11:30] = IGNORED
    targets[131:] = IGNORED
    how = settings(z_loss)
    nll = float(plain(hidden, weight, targets)[0])
    _, of_hidden, of_weight = plain(hidden, weight, targets, z_loss)

    workspace = Workspace(direct=direct)
    split, leaf = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
    sums = []
    for part in (slice(0, 20), slice(20, 160)):
        sums.append(
            liger.linear_cross_entropy(leaf[part], split, targets[part], how, FLOAT32, workspace)
        )
        (sums[-1].objective / sums[-1].objective.new_tensor(112)).backward()
    assert [part.tokens for part in sums] == [11, 101]
    assert sum(float(part.nll) for part in sums) == pytest.approx(nll, rel=VALUE)
    assert leaf.grad is not None
    assert split.grad is not None
    assert error(leaf.grad, of_hidden / 112) < GRADIENT
    assert error(split.grad, of_weight / 112) < GRADIENT


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def kernel_tied_embedding_gets_both_gradients(sparse: bool, steps: int) -> None:
    _, weight, targets = problem()
    ids = torch.arange(T, device=DEVICE) % 11
    mix = torch.randn(H, H, generator=torch.Generator().manual_seed(5)).to(DEVICE) / 4

    exact = weight.double().requires_grad_()
    logits = (F.embedding(ids, exact) @ mix.double()).tanh() @ exact.t()
    (steps * F.cross_entropy(logits, targets, reduction="sum")).backward()
    assert exact.grad is not None

    for direct in (False, True):
        tied = weight.clone().requires_grad_()
        workspace = Workspace(direct=direct)
        for _ in range(steps):
            hidden = (F.embedding(ids, tied, sparse=sparse) @ mix).tanh()
            liger.linear_cross_entropy(
                hidden, tied, targets, RAGGED, FLOAT32, workspace
            ).objective.backward()
        assert tied.grad is not None
        assert tied.grad.layout == torch.strided
        assert error(tied.grad, exact.grad) < GRADIENT


def kernel_reclaimed_memory_is_used_and_results_are_bit_equal() -> None:
    hidden, weight, targets = problem()
    weight.requires_grad_()
    workspace = Workspace(direct=True)
    places, grads = [], []
    for _ in range(3):
        sums = liger.linear_cross_entropy(hidden, weight, targets, RAGGED, FLOAT32, workspace)
        sums.objective.backward()
        assert weight.grad is not None
        places.append(weight.grad.data_ptr())
        grads.append(weight.grad.clone())
        workspace.reclaim(weight)
    assert len(set(places)) == 1
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@pytest.mark.parametrize("scale", [-3.0, 0.0, 1e-3])
def kernel_the_gradient_follows_what_is_done_with_the_objective(scale: float) -> None:
    data = problem()
    _, of_hidden, of_weight = plain(*data, 1e-2)
    _, found_hidden, found_weight = fused(*data, settings(1e-2), scale=scale)
    assert float((found_hidden - scale * of_hidden).norm()) <= GRADIENT * float(of_hidden.norm())
    assert float((found_weight - scale * of_weight).norm()) <= GRADIENT * float(of_weight.norm())


def kernel_two_backward_passes_scale_once_each() -> None:
    hidden, weight, targets = problem()
    _, of_hidden, of_weight = plain(hidden, weight, targets)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = liger.linear_cross_entropy(*leaves, targets, RAGGED, FLOAT32).objective / 16
    for retain in (True, False):
        found = torch.autograd.grad(loss, leaves, retain_graph=retain)
        assert error(found[0], of_hidden / 16) < GRADIENT
        assert error(found[1], of_weight / 16) < GRADIENT


def kernel_only_the_gradients_asked_for() -> None:
    hidden, weight, targets = problem()
    _, of_hidden, of_weight = plain(hidden, weight, targets)
    hidden.requires_grad_()
    liger.linear_cross_entropy(hidden, weight, targets, RAGGED, FLOAT32).objective.backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert error(hidden.grad, of_hidden) < GRADIENT
    hidden.requires_grad_(False)
    weight.requires_grad_()
    liger.linear_cross_entropy(hidden, weight, targets, RAGGED, FLOAT32).objective.backward()
    assert weight.grad is not None
    assert error(weight.grad, of_weight) < GRADIENT
    with torch.no_grad():
        sums = liger.linear_cross_entropy(hidden, weight, targets, RAGGED, FLOAT32)
    assert not sums.objective.requires_grad


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
def kernel_nothing_scored_is_zero_and_not_nan(z_loss: float) -> None:
    hidden, weight, targets = problem()
    sums, *grads = fused(hidden, weight, torch.full_like(targets, IGNORED), settings(z_loss))
    assert [float(part) for part in sums] == [0.0, 0.0, 0.0, 0.0, 0]
    for grad, of in zip(grads, (hidden, weight), strict=True):
        assert torch.equal(grad, torch.zeros_like(of))


def kernel_targets_are_taken_as_given() -> None:
    """An oracle of the target scores 0; one position off, either way, it does not: no shift."""
    tokens = torch.arange(12, device=DEVICE)
    head = torch.eye(16, device=DEVICE)
    oracle = 50.0 * head[tokens + 1]
    for offset, right in ((1, True), (0, False), (2, False)):
        sums = liger.linear_cross_entropy(oracle, head, tokens + offset, RAGGED, FLOAT32)
        assert (float(sums.nll) < 1e-5) is right
        assert right or float(sums.nll) > 12 * 40


@pytest.mark.parametrize(
    ("value", "where"),
    [(float("nan"), "weight"), (float("inf"), "hidden"), (-float("inf"), "weight")],
)
def kernel_non_finite_input_is_never_hidden(value: float, where: str) -> None:
    hidden, weight, targets = problem()
    (hidden if where == "hidden" else weight)[5, 3] = value
    targets[5] = 9
    sums, of_hidden, of_weight = fused(hidden, weight, targets)
    assert not sums.objective.isfinite()
    assert not sums.nll.isfinite()
    assert not of_hidden.isfinite().all()
    assert not of_weight.isfinite().all()


def kernel_what_is_ignored_reaches_nothing() -> None:
    hidden, weight, targets = problem()
    hidden[targets == IGNORED] = float("inf")
    sums, of_hidden, of_weight = fused(hidden, weight, targets)
    for part in (sums.nll, of_hidden, of_weight):
        assert part.isfinite().all()


def kernel_is_chosen_only_when_asked_for_on_the_cpu() -> None:
    assert choose_loss_backend("liger", DEVICE, 0.0) == "liger"
    assert choose_loss_backend("auto", DEVICE, 0.0) == (
        "liger" if DEVICE.type == "cuda" else "chunked"
    )
    assert choose_loss_backend("auto", DEVICE, 0.1) == "chunked"
    with pytest.raises(UserError, match=r"smoothed loss \(label_smoothing is 0\.1\)"):
        choose_loss_backend("liger", DEVICE, 0.1)


def kernel_gets_chunks_of_the_size_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen by the kernel itself: one program per token of a chunk."""
    from liger_kernel.ops import fused_linear_cross_entropy as module

    sizes: list[int] = []

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            sizes.append(grid[0])
            return lambda **_: None

    monkeypatch.setattr(module, "liger_cross_entropy_kernel", Counted())
    data = problem(tokens=150, ignore=0)
    for chunk, right in ((64, [64, 64, 22]), (100, [64, 64, 22]), (0, [150]), (150, [128, 22])):
        sizes.clear()
        fused(*data, settings(0.0, chunk))
        assert sizes == right


KERNEL_TESTS = 36


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
    ids=["interpreted", "compiled"],
)
def test_the_kernel(device: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"LIGER_TEST_DEVICE": device, "PYTEST_ADDOPTS": "", "COLUMNS": "100"}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    command += ["-o", "python_functions=kernel_*", "--durations=5"]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    summary = re.search(r"^(\d+) passed(?:, \d+ warnings)? in", report, re.MULTILINE)
    assert summary, report
    assert int(summary[1]) == KERNEL_TESTS


def test_chunked_on_this_device_unless_liger_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device in (CPU, torch.device("mps")):
        assert choose_loss_backend("auto", device, 0.0) == "chunked"
        assert choose_loss_backend("chunked", device, 0.1) == "chunked"
        with pytest.raises(UserError) as caught:
            choose_loss_backend("liger", device, 0.0)
        assert str(caught.value) == (
            "training.loss_backend: Liger needs a CUDA or ROCm device, this run is on "
            f"{device.type} (got 'liger'); allowed: auto, chunked"
        )


def test_the_choice_elsewhere_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor imports it: `_fault` does."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(liger, "_fault", lambda _: pytest.fail("tried"))
    for asked, smoothing in (("auto", 0.0), ("auto", 0.1), ("chunked", 0.0)):
        assert choose_loss_backend(asked, CPU, smoothing) == "chunked"  # type: ignore[arg-type]
    assert choose_loss_backend("auto", torch.device("cuda"), 0.1) == "chunked"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    liger._fault.cache_clear()
    with pytest.raises(UserError, match=r"loss_backend: Liger cannot be imported: .*liger_kernel"):
        choose_loss_backend("liger", CPU, 0.0)
    liger._fault.cache_clear()


@pytest.mark.parametrize(
    ("nll", "fault"),
    [
        (2 * math.log(3), None),
        (5.0, r"Liger gives 5\.0 for 2\.197"),
        (float("nan"), r"Liger gives nan for 2\.197"),
        (RuntimeError("no C compiler"), "not run on this cpu device: RuntimeError: no C compiler"),
    ],
)
def test_a_device_is_judged_by_what_liger_computes_on_it(
    nll: float | Exception, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(*_: object) -> LossSums:
        if isinstance(nll, Exception):
            raise nll
        value = torch.tensor(nll, dtype=torch.float64)
        return LossSums(value, value, value, value, 2)

    monkeypatch.setattr(liger, "linear_cross_entropy", compute)
    found = liger._fault.__wrapped__(CPU)
    assert re.search(fault, found) if fault and found else found == fault


def test_a_cuda_device_gets_liger_unless_it_fails_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = torch.device("cuda")
    monkeypatch.setattr(liger, "_fault", lambda _: None)
    for asked in ("auto", "liger"):
        assert choose_loss_backend(asked, device, 0.0) == "liger"  # type: ignore[arg-type]
    assert choose_loss_backend("chunked", device, 0.0) == "chunked"
    assert choose_loss_backend("auto", device, 0.1) == "chunked"
    with pytest.raises(UserError, match=r"smoothed loss \(label_smoothing is 0\.1\)"):
        choose_loss_backend("liger", device, 0.1)
    monkeypatch.setattr(liger, "_fault", lambda _: "it fails")
    assert choose_loss_backend("auto", device, 0.0) == "chunked"
    with pytest.raises(UserError, match="it fails"):
        choose_loss_backend("liger", device, 0.0)
    monkeypatch.setattr(liger, "_fault", lambda _: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # an interpreted kernel is no reason to choose it
    assert choose_loss_backend("auto", device, 0.0) == "chunked"


def test_smoothing_and_wrong_input_are_refused() -> None:
    hidden, weight, targets = problem()
    smoothed = LossSettings(label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing is 0\.1, must be 0"):
        liger.linear_cross_entropy(hidden, weight, targets, smoothed, FLOAT32)
    with pytest.raises(ValueError, match=r"hidden is torch\.float32"):
        liger.linear_cross_entropy(hidden, weight, targets, RAGGED, BF16)
    for bad in (V, -1, 2**40):
        targets[12] = bad
        with pytest.raises(ValueError, match=rf"target {bad} at position 12 .* {V} entries"):
            liger.linear_cross_entropy(hidden, weight, targets, RAGGED, FLOAT32)


def test_tf32_is_on_only_inside_and_only_for_bf16() -> None:
    place = torch.backends.cuda.matmul
    before = place.fp32_precision
    for wanted in (False, True):
        with liger._tf32(wanted):
            assert place.fp32_precision == ("tf32" if wanted else before)
        assert place.fp32_precision == before


@pytest.mark.parametrize("tokens", [1, 53, 1000, 1024, 1025, 8192, 16384])
@pytest.mark.parametrize("entries", [211, 32_000, 200_019])
@pytest.mark.parametrize("most", [1, 100, 1024])
def test_chunks_are_as_large_as_asked_for(tokens: int, entries: int, most: int) -> None:
    width = 768

    def chunk(factor: int) -> int:
        part = math.ceil(tokens / math.ceil(entries / (factor * width)))
        return min(1 << (part - 1).bit_length(), tokens)

    factor = liger._chunk_factor(tokens, entries, width, most)
    assert factor == 1 or chunk(factor) <= most
    assert chunk(factor) == tokens or chunk(factor + 1) > most
