"""How matrix products are computed: which means is chosen, and what it rounds."""

from __future__ import annotations

import platform

import pytest
import torch

from workbench.core.precision import (
    FLOAT32,
    Precision,
    bf16_products,
    choose_precision,
    linear,
    operands,
    takes_float32,
)

CPU = torch.device("cpu")
UPCAST = Precision(torch.bfloat16, "upcast")
NATIVE = Precision(torch.bfloat16, "native")


def two_matrices() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(5, 64, generator=draw), torch.randn(7, 64, generator=draw)


def test_float32_is_a_plain_product() -> None:
    x, w = two_matrices()
    assert torch.equal(linear(x, w, FLOAT32), x @ w.T)
    assert choose_precision("fp32", CPU) == FLOAT32


@pytest.mark.parametrize("precision", [UPCAST, NATIVE])
def test_bf16_rounds_operands_and_result_and_sums_in_float32(precision: Precision) -> None:
    x, w = two_matrices()
    exact = x.bfloat16().double() @ w.bfloat16().double().T
    found = linear(x.bfloat16(), w, precision)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place of a bfloat16 (2^-9 relative), and the float32 sum's own error.
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-5)
    assert not torch.equal(found.float(), linear(x, w, FLOAT32))


def test_gradients_reach_the_float32_masters() -> None:
    x, w = two_matrices()
    w.requires_grad_()
    linear(x.bfloat16(), w, UPCAST).float().sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32
    torch.testing.assert_close(w.grad[0], x.bfloat16().float().sum(0), rtol=2.0**-7, atol=1e-2)


def test_operands_are_rounded_whatever_holds_them() -> None:
    x, _ = two_matrices()
    (upcast,) = operands(UPCAST, x)
    (native,) = operands(NATIVE, x)
    assert (upcast.dtype, native.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(upcast, native.float())
    assert not torch.equal(upcast, x)


def cpu(
    monkeypatch: pytest.MonkeyPatch, machine: str, *, onednn: bool, avx512_bf16: bool, amx: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    ops = torch.ops.mkldnn
    monkeypatch.setattr(ops, "_is_mkldnn_bf16_supported", lambda: onednn, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)


@pytest.mark.parametrize(
    ("machine", "onednn", "avx512_bf16", "amx", "means", "float32_too"),
    [
        ("x86_64", False, False, False, UPCAST, False),
        # oneDNN takes bfloat16 on any AVX512 CPU, and multiplies float32 there.
        ("x86_64", True, False, False, UPCAST, False),
        ("x86_64", True, True, False, NATIVE, False),
        ("x86_64", True, True, True, NATIVE, True),
        ("aarch64", True, False, False, NATIVE, True),
        ("arm64", False, False, False, UPCAST, False),
    ],
)
def test_bf16_on_a_cpu_takes_its_instructions_or_rounds_itself(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    onednn: bool,
    avx512_bf16: bool,
    amx: bool,
    means: Precision,
    float32_too: bool,
) -> None:
    cpu(monkeypatch, machine, onednn=onednn, avx512_bf16=avx512_bf16, amx=amx)
    assert choose_precision("bf16", CPU) == means
    assert takes_float32(means, CPU) is float32_too
    assert not takes_float32(FLOAT32, CPU)


def test_float32_matrices_are_rounded_by_the_product_exactly_where_it_is_said() -> None:
    """On this CPU, whichever it is: a rounded product differs from a float32 one by far more than
    the order of sums does."""
    x, w = (matrix.repeat(8, 8) for matrix in two_matrices())
    precision = choose_precision("bf16", CPU)
    with bf16_products(precision, CPU):
        found = x @ w.T
    expected = x.bfloat16().double() @ w.bfloat16().double().T
    rounded = float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    assert rounded is takes_float32(precision, CPU)


def test_each_means_has_a_phrase_of_its_own_for_the_record() -> None:
    phrases = {p.describe(CPU) for p in (FLOAT32, UPCAST, NATIVE)}
    assert len(phrases) == 3
    # Where the head's logits are multiplied by float32 units the results differ, and it is told.
    assert NATIVE.describe(torch.device("mps")) != NATIVE.describe(torch.device("cuda"))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="xpu is not supported"):
        choose_precision("bf16", torch.device("xpu"))
