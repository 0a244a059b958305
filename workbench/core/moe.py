"""Feed-forward layers: dense SwiGLU, and a shared SwiGLU beside experts chosen by token id.

B batch, S sequence, H hidden, V vocabulary, E experts, K routes of a token, W width of an expert.

Routing by id needs no router: a table [K, V] says which experts a token goes to. All experts are
computed as one SwiGLU of width E*W whose hidden activation is multiplied by the token's weight for
the expert (0 for one it is not routed to). Experts are narrow here, 40 to 768 wide, and one wide
product beats sorting tokens into many thin ones; it also gives every expert a gradient on every
path, an expert without tokens a zero one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.core.layers import Linear
from workbench.core.precision import Precision, linear
from workbench.spec.run import ModelSpec

DISPATCH = "all experts as one wide product, masked by route"

ROUTING_SEED = 0xC0DE
"""Layer l permutes its experts under this seed + l, whatever the seed of the run."""


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), the feed-forward of a dense model."""

    def __init__(self, hidden: int, width: int, precision: Precision) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width, precision)
        self.up_proj = Linear(hidden, width, precision)
        self.down_proj = Linear(width, hidden, precision)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]; the token ids play no part."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class TokenRouted(nn.Module):
    """gate_s * shared(x) + gate_r * sum_k weight_k * expert_k(x), experts chosen by token id.

    The gates are learned scalars, or absent (1). The first route weighs p = `top_k_primary_weight`,
    the others (1 - p) / (K - 1) each; a single route weighs 1.
    """

    topk_token_to_expert: Tensor
    route_weights: Tensor

    def __init__(self, spec: ModelSpec, vocab_size: int, layer: int, precision: Precision) -> None:
        super().__init__()
        assert spec.num_experts
        assert spec.top_k
        assert spec.intermediate_size % spec.num_experts == 0
        hidden, experts = spec.hidden_size, spec.num_experts
        width = spec.intermediate_size // experts
        self.precision = precision
        self.experts = experts

        self.gate_proj_w = nn.Parameter(torch.empty(experts, hidden, width))
        self.up_proj_w = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_proj_w = nn.Parameter(torch.empty(experts, width, hidden))
        self.has_shared = bool(spec.shared_expert)
        self.chunk_tokens = spec.shared_expert_chunk_tokens or 0
        if self.has_shared:
            assert spec.shared_intermediate_size
            self.shared_gate = Linear(hidden, spec.shared_intermediate_size, precision)
            self.shared_up = Linear(hidden, spec.shared_intermediate_size, precision)
            self.shared_down = Linear(spec.shared_intermediate_size, hidden, precision)
        self.has_gates = bool(spec.learn_shared_routed_gates)
        if self.has_gates:
            assert spec.shared_gate_init is not None
            assert spec.routed_gate_init is not None
            self.shared_output_gate = nn.Parameter(torch.tensor(spec.shared_gate_init))
            self.routed_output_gate = nn.Parameter(torch.tensor(spec.routed_gate_init))

        table = modulo_cyclic(vocab_size, experts, spec.top_k, layer)
        self.register_buffer("topk_token_to_expert", table)
        # A tensor, not a Python float: a compiled graph would keep the float it was traced with.
        weights = torch.tensor(mixture(spec.top_k, spec.top_k_primary_weight))
        self.register_buffer("route_weights", weights, persistent=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [B, S, H], ids [B, S] -> [B, S, H]."""
        routed = self.routed(x, ids)
        if not self.has_shared:
            return routed
        shared = self.shared(x)
        if self.has_gates:
            # float32 gates: the sum is computed in float32 and rounded once.
            gated = self.shared_output_gate * shared.float()
            return (gated + self.routed_output_gate * routed.float()).to(x.dtype)
        return shared + routed

    def shared(self, x: Tensor) -> Tensor:
        """The path of every token, in chunks of `chunk_tokens` (0: in one go), [B, S, H]."""
        if not self.chunk_tokens:
            return self._shared(x)
        chunks = torch.split(x.flatten(0, 1), self.chunk_tokens)
        return torch.cat([self._shared(chunk) for chunk in chunks]).view_as(x)

    def _shared(self, x: Tensor) -> Tensor:
        output: Tensor = self.shared_down(F.silu(self.shared_gate(x)) * self.shared_up(x))
        return output

    def routed(self, x: Tensor, ids: Tensor) -> Tensor:
        """The weighted sum over each token's experts, [B, S, H]."""
        gate, up = (w.transpose(1, 2).flatten(0, 1) for w in (self.gate_proj_w, self.up_proj_w))
        down = self.down_proj_w.flatten(0, 1).t()  # [H, E*W]
        activation = F.silu(linear(x, gate, self.precision)) * linear(x, up, self.precision)
        # Weighted in float32: a weight such as 0.85 has no bfloat16 of its own.
        by_expert = activation.view(*x.shape[:-1], self.experts, -1)  # [B, S, E, W]
        weighted = by_expert * self.expert_weights(ids).unsqueeze(-1)
        return linear(weighted.flatten(-2).to(x.dtype), down, self.precision)

    def expert_weights(self, ids: Tensor) -> Tensor:
        """What each expert counts for each token, 0 where it is not routed: [..., E], float32."""
        routes = self.topk_token_to_expert[:, ids]  # [K, B, S]
        experts = torch.arange(self.experts, device=ids.device, dtype=routes.dtype)
        weights = self.route_weights.view(-1, *[1] * (ids.ndim + 1))
        return ((routes[..., None] == experts) * weights).sum(dim=0)

    def expert_counts(self, ids: Tensor) -> Tensor:
        """Over how many routes each expert is reached from the tokens `ids`: [E], int64."""
        return torch.bincount(
            self.topk_token_to_expert[:, ids].flatten().long(), minlength=self.experts
        )


def mixture(top_k: int, primary_weight: float | None) -> list[float]:
    """The K weights of a token's routes: p, then (1 - p) / (K - 1) each; they sum to 1."""
    if top_k == 1:
        return [1.0]
    assert primary_weight is not None
    return [primary_weight] + [(1 - primary_weight) / (top_k - 1)] * (top_k - 1)


def modulo_cyclic(vocab_size: int, experts: int, top_k: int, layer: int) -> Tensor:
    """The route table of a layer, [K, V] int16, from token ids alone.

    A token's first expert is `permutation[id mod E]`, the k-th one (first + k) mod E.
    """
    generator = torch.Generator(device="cpu").manual_seed(ROUTING_SEED + layer)
    permutation = torch.randperm(experts, generator=generator, device="cpu")
    first = permutation[torch.arange(vocab_size, device="cpu") % experts]
    steps = torch.arange(top_k, device="cpu")[:, None]
    return ((first + steps) % experts).to(torch.int16)
