"""How matrix products are computed: which means is chosen, and what it rounds."""

from __future__ import annotations

import pytest
import torch

from workbench.core.precision import FLOAT32, Precision, choose_precision, linear, operands

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


@pytest.mark.parametrize("native", [True, False])
def test_bf16_on_a_cpu_takes_its_instructions_or_rounds_itself(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    ops = torch.ops.mkldnn
    monkeypatch.setattr(ops, "_is_mkldnn_bf16_supported", lambda: native, raising=False)
    assert choose_precision("bf16", CPU) == (NATIVE if native else UPCAST)


def test_each_means_has_a_phrase_of_its_own_for_the_record() -> None:
    assert len({p.describe() for p in (FLOAT32, UPCAST, NATIVE)}) == 3


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="xpu is not supported"):
        choose_precision("bf16", torch.device("xpu"))
