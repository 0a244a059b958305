"""How matrix products are computed: in which dtype, and by which means.

Weights are float32 masters everywhere. A `bf16` run rounds both operands of every matrix product to
bfloat16, accumulates in float32 and rounds the result to bfloat16. Two ways lead there:

- `native`: the device multiplies bfloat16 itself (AMX or AVX512-BF16 CPUs, Arm's bf16, CUDA, MPS);
- `upcast`: a CPU without such instructions multiplies the rounded operands as float32. Products of
  two bfloat16 numbers are exact in float32, so this is the same arithmetic up to the order of the
  sum, and 10 to 100 times faster than the scalar fallback such CPUs would otherwise take.

Which one ran is an effective fact of the run: the two round sums in different orders.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Matmul = Literal["native", "upcast", "float32"]


@dataclass(frozen=True)
class Precision:
    """The compute dtype of activations and the means by which matrix products run."""

    compute: torch.dtype
    matmul: Matmul

    def describe(self, device: torch.device) -> str:
        """One phrase for records and reports: what `device` makes of it."""
        match self.matmul:
            case "native":
                phrase = "bf16 operands, float32 accumulation, native instructions"
                if device.type == "cuda" or takes_float32(self, device):
                    return phrase
                return f"{phrase} (logits of the loss: float32 instructions)"
            case "upcast":
                return "bf16 operands, float32 accumulation, products by float32 units"
            case "float32":
                return "float32"


FLOAT32 = Precision(torch.float32, "float32")


def choose_precision(name: Literal["bf16", "fp32"], device: torch.device) -> Precision:
    """The way in which `device` computes what the spec asks for.

    Raises:
        ValueError: the device cannot compute the asked-for dtype.
    """
    if name == "fp32":
        return FLOAT32
    match device.type:
        case "cpu":
            return Precision(torch.bfloat16, "native" if _cpu_multiplies_bf16() else "upcast")
        case "cuda":
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                name_ = torch.cuda.get_device_name(device)
                raise ValueError(
                    f"training.precision: bf16 is not computed by {name_}; use fp32 there"
                )
            return Precision(torch.bfloat16, "native")
        case "mps":
            probe = torch.ones(1, device=device)
            try:
                (probe.bfloat16() @ probe.bfloat16()).item()
            except (RuntimeError, TypeError) as error:
                raise ValueError("training.precision: this MPS device has no bf16") from error
            return Precision(torch.bfloat16, "native")
        case other:
            raise ValueError(f"training.device: {other} is not supported (cpu, cuda, mps)")


def _cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions for it. oneDNN takes bfloat16 on every AVX512 CPU, and
    multiplies it as float32 where they are missing."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return not _is_x86() or torch.cpu._is_avx512_bf16_supported() or _has_amx()


def takes_float32(precision: Precision, device: torch.device) -> bool:
    """Whether matrices of rounded values held as float32 are multiplied by bfloat16 instructions
    within `bf16_products`: by AMX and by Arm's. oneDNN has no such product for AVX512-BF16, which
    multiplies bfloat16 tensors alone, into bfloat16."""
    if precision.matmul != "native" or device.type != "cpu":
        return False
    return not _is_x86() or _has_amx()


@contextmanager
def bf16_products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within it, a CPU that `takes_float32` multiplies float32 matrices by bfloat16 instructions.

    Operands are rounded to bfloat16 and the sums kept and returned in float32, which `torch.mm` of
    bfloat16 tensors cannot do on a CPU. Elsewhere it changes nothing. The setting is PyTorch's, for
    the whole process; what it was before is put back.
    """
    if not takes_float32(precision, device):
        yield
        return
    place: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = place.fp32_precision
    place.fp32_precision = "bf16"
    try:
        yield
    finally:
        place.fp32_precision = before


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i686")


def _has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


def linear(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """`x @ weight.T` for x [..., in] and a float32 master weight [out, in], in the compute dtype.

    Gradients take the same roundings as the values: `.to` is differentiated as the reverse cast.
    """
    return F.linear(*operands(precision, x, weight)).to(precision.compute)


def operands(precision: Precision, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as a matrix product takes them: rounded to the compute dtype, held as the
    dtype that the chosen means multiplies."""
    rounded = (tensor.to(precision.compute) for tensor in tensors)
    if precision.matmul == "upcast":
        return tuple(tensor.float() for tensor in rounded)
    return tuple(rounded)
