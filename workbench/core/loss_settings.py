"""What a loss over the vocabulary computes, and in which pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_TOKENS, LEAST_TOKENS = 1024, 128
"""Tokens per tile of logits, at most and where nobody asks for fewer at least. 1,024 are 8 MB at
2,048 entries, which a shared cache holds. Larger tiles were no faster and smaller ones lose matmul
rate."""


@dataclass(frozen=True)
class LossSettings:
    """What the loss computes (smoothing, z) and in which pieces (blocks).

    `block_vocab` and `chunk_tokens` bound the tile of logits that exists at a time: entries and
    tokens (0 = no bound asked for; `TILE_TOKENS` holds in any case). Neither changes the result
    beyond the order of float32 sums.
    """

    block_vocab: int = 2048
    chunk_tokens: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.block_vocab < 1:
            raise ValueError(f"block_vocab is {self.block_vocab}, must be at least 1")
        if self.chunk_tokens < 0:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}, must be 0 (all) or more")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, must be in [0, 1)")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"z_loss is {self.z_loss}, must be a number >= 0")

    @property
    def tile_tokens(self) -> int:
        """The most tokens in one tile of logits."""
        return min(self.chunk_tokens or TILE_TOKENS, TILE_TOKENS)

    def panel_tokens(self, width: int, compute: torch.dtype) -> int:
        """The most tokens whose softmax is held, `width` being that of the hidden states: so many
        that it takes no more memory than the gradient of the head, but not so few that products
        are slow."""
        fitting = torch.float32.itemsize * width // compute.itemsize
        return min(max(fitting, LEAST_TOKENS), self.tile_tokens)
