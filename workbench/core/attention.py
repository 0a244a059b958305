"""Causal self-attention with rotary positions: multi-head, grouped-query or multi-query.

B batch, S sequence, H hidden, D head dim, N query heads, G key/value heads (N a multiple of G).
Key/value head g serves the query heads g*N/G to (g+1)*N/G - 1: repeated as 0, 0, 1, 1, not tiled.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.core.layers import Linear, RMSNorm
from workbench.core.precision import Precision, operands
from workbench.spec.run import ModelSpec


class Attention(nn.Module):
    """Self-attention of one block; which of the three kinds follows from the number of heads."""

    def __init__(self, spec: ModelSpec, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.heads, self.kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        hidden, head_dim = spec.hidden_size, spec.head_dim
        self.q_proj = Linear(hidden, self.heads * head_dim, precision)
        self.k_proj = Linear(hidden, self.kv_heads * head_dim, precision)
        self.v_proj = Linear(hidden, self.kv_heads * head_dim, precision)
        self.o_proj = Linear(self.heads * head_dim, hidden, precision)
        self.q_norm = RMSNorm(head_dim) if spec.qk_norm else None
        self.k_norm = RMSNorm(head_dim) if spec.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H], cos and sin [S, D/2] -> [B, S, H]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))  # [B, S, N, D]
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1))  # [B, S, G, D]
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))

        # Normalised and rotated in float32, then rounded once, as operands of the products.
        q = rotate(self.q_norm.normalise(q) if self.q_norm else q.float(), cos, sin)
        k = rotate(self.k_norm.normalise(k) if self.k_norm else k.float(), cos, sin)
        q, k, v = (heads.transpose(1, 2) for heads in operands(self.precision, q, k, v))

        attended = causal_attention(q, k, v)  # [B, N, S, D]
        joined = attended.transpose(1, 2).flatten(2).to(self.precision.compute)  # [B, S, N*D]
        output: Tensor = self.o_proj(joined)
        return output


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D), causal) v for q [B, N, S, D], k and v [B, G, S, D]."""
    grouped = k.shape[1] != q.shape[1]
    if grouped and not grouped_kernel(q.device, q.dtype):
        repeats = q.shape[1] // k.shape[1]
        k, v = (heads.repeat_interleave(repeats, dim=1) for heads in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a fused kernel reads each key/value head for its whole group.

    CPU: as fast as on repeated heads, and without the memory for them. CUDA: the flash kernel,
    which has no float32; the others would fall back to scores of [S, S] held in memory.
    """
    match device.type:
        case "cpu":
            return True
        case "cuda":
            return dtype != torch.float32
        case _:
            return False


def rotary_table(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, D/2], float32, of the rotary embedding (Su et al. 2021)."""
    # In float64 (hence on the CPU): a float32 angle of 2,000 rad is off by up to 6e-5.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    steps = torch.arange(positions, dtype=torch.float64, device="cpu")
    angles = steps[:, None] * theta**-exponents
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pair (i, i + D/2) of every head of x [B, S, heads, D] by its position's angle."""
    cos, sin = cos[:, None], sin[:, None]  # [S, 1, D/2]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
