"""Feed-forward layers: dense SwiGLU, and a shared SwiGLU beside experts that are routed to.

B batch, S sequence, H hidden, V vocabulary, E experts, K routes of a token, W width of an expert.

Two kinds of routing: `TokenRouted` looks the experts of a token id up in a table [K, V], without a
router; `LearnedRouted`, its control, lets a linear map of the hidden state choose. All experts are
computed as one SwiGLU of width E*W whose hidden activation is multiplied by the token's weight for
the expert (0 for one it is not routed to). Experts are narrow here, 40 to 768 wide, and one wide
product beats sorting tokens into many thin ones; it also gives every expert a gradient on every
path, an expert without tokens a zero one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from workbench.core.layers import Linear, silu_product
from workbench.core.precision import Precision, linear
from workbench.core.routing import route_table
from workbench.core.schedules import ModelValues
from workbench.spec.run import ModelSpec

DISPATCH = "all experts as one wide product, masked by route"

EXPERT_STACKS = ("gate_proj_w", "up_proj_w", "down_proj_w")
SHARED_MATRICES = ("shared_gate", "shared_up", "shared_down")

Extras = dict[str, Tensor]
"""What a layer finds on the way, by name; empty where nobody asked.

    route_hits         [E] float32, detached: how many routes reach each expert (learned router)
    route_live         likewise, those of a weight other than zero
    route_probability  [E] float32, differentiable: summed router probabilities (learned router)
    shared_square      float32 scalar, detached: summed squares of what the shared path adds
    routed_square      likewise of what the experts add
"""


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), the feed-forward of a dense model."""

    def __init__(self, hidden: int, width: int, precision: Precision) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width, precision)
        self.up_proj = Linear(hidden, width, precision)
        self.down_proj = Linear(width, hidden, precision)
        self.observes = False

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Extras]:
        """x [B, S, H] -> [B, S, H]; the token ids play no part."""
        output: Tensor = self.down_proj(silu_product(self.gate_proj(x), self.up_proj(x)))
        return output, {"shared_square": _squares(output)} if self.observes else {}


class RoutedFeedForward(nn.Module):
    """gate_s * shared(x) + gate_r * sum_e weight_e * expert_e(x); the subclass weighs the experts.

    The gates are learned scalars, or absent (1); a ramp shifts them, see `set_values`.
    """

    shared_gate_shift: Tensor
    routed_gate_shift: Tensor

    def __init__(self, spec: ModelSpec, precision: Precision) -> None:
        super().__init__()
        assert spec.num_experts
        assert spec.top_k
        assert spec.intermediate_size % spec.num_experts == 0
        hidden, experts = spec.hidden_size, spec.num_experts
        width = spec.intermediate_size // experts
        self.precision = precision
        self.experts, self.top_k = experts, spec.top_k
        self.observes = False

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
            # Tensors, not Python floats: a compiled graph would keep the float it was traced with.
            self.register_buffer("shared_gate_shift", torch.zeros(()), persistent=False)
            self.register_buffer("routed_gate_shift", torch.zeros(()), persistent=False)

    def expert_weights(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Extras]:
        """What each expert counts for each token, 0 where it is not routed: [B, S, E], float32."""
        raise NotImplementedError

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Extras]:
        """x [B, S, H], ids [B, S] -> [B, S, H]."""
        weights, extras = self.expert_weights(x, ids)
        routed = self.routed(x, weights)
        if not self.has_shared:
            return routed, extras | self._observed(None, routed)
        shared = self.shared(x)
        if self.has_gates:
            # float32 gates: the sum is computed in float32 and rounded once.
            by_shared, by_routed = self.gates()
            gated, by_experts = by_shared * shared.float(), by_routed * routed.float()
            output = (gated + by_experts).to(x.dtype)
            return output, extras | self._observed(gated, by_experts)
        return shared + routed, extras | self._observed(shared, routed)

    def gates(self) -> tuple[Tensor, Tensor]:
        """The present gates of the shared and the routed path, float32 scalars."""
        shared = self.shared_output_gate + self.shared_gate_shift
        return shared, self.routed_output_gate + self.routed_gate_shift

    @torch.no_grad()
    def set_values(self, values: ModelValues) -> None:
        """Gives the scheduled values of the coming update, in place.

        A gate is a learned scalar that starts at its initial value; its ramp shifts it by as much
        as the ramp has moved from there. It so reaches the final value where nothing was learned,
        and keeps its gradient all along.
        """
        if self.has_gates:
            self.shared_gate_shift.fill_(values.shared_gate_shift)
            self.routed_gate_shift.fill_(values.routed_gate_shift)

    def shared(self, x: Tensor) -> Tensor:
        """The path of every token, in chunks of `chunk_tokens` (0: in one go), [B, S, H]."""
        tokens = x.shape[0] * x.shape[1]
        if not 0 < self.chunk_tokens < tokens:
            return self._shared(x)
        chunks = torch.split(x.flatten(0, 1), self.chunk_tokens)
        if torch.is_grad_enabled():
            # Computed again in the backward pass: kept for it, the activations of all chunks would
            # be as large as those of one pass, and with each chunk came its own rounded weights.
            outputs = [
                checkpoint(self._shared, chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in chunks
            ]
        else:
            outputs = [self._shared(chunk) for chunk in chunks]
        return torch.cat(outputs).view_as(x)

    def _shared(self, x: Tensor) -> Tensor:
        output: Tensor = self.shared_down(silu_product(self.shared_gate(x), self.shared_up(x)))
        return output

    def routed(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum over the experts, weighted by `weights` [B, S, E]: [B, S, H]."""
        gate, up = (w.transpose(1, 2).flatten(0, 1) for w in (self.gate_proj_w, self.up_proj_w))
        down = self.down_proj_w.flatten(0, 1).t()  # [H, E*W]
        activation = silu_product(linear(x, gate, self.precision), linear(x, up, self.precision))
        # Weighted in float32: a weight such as 0.85 has no bfloat16 of its own.
        by_expert = activation.view(*x.shape[:-1], self.experts, -1)  # [B, S, E, W]
        weighted = by_expert * weights.unsqueeze(-1)
        return linear(weighted.flatten(-2).to(x.dtype), down, self.precision)

    def _observed(self, shared: Tensor | None, routed: Tensor) -> Extras:
        if not self.observes:
            return {}
        extras = {"routed_square": _squares(routed)}
        return extras if shared is None else extras | {"shared_square": _squares(shared)}


class TokenRouted(RoutedFeedForward):
    """Experts chosen by token id, by a table.

    The first route weighs p = `top_k_primary_weight`, the others (1 - p) / (K - 1) each; a single
    route weighs 1.
    """

    topk_token_to_expert: Tensor
    route_weights: Tensor

    def __init__(self, spec: ModelSpec, vocab_size: int, layer: int, precision: Precision) -> None:
        super().__init__(spec, precision)
        assert spec.routing_strategy
        table = route_table(spec.routing_strategy, vocab_size, self.experts, self.top_k, layer)
        self.register_buffer("topk_token_to_expert", table)
        weights = torch.tensor(mixture(self.top_k, spec.top_k_primary_weight))
        self.register_buffer("route_weights", weights, persistent=False)

    def set_values(self, values: ModelValues) -> None:
        """As in the base class; also the weights of the routes."""
        super().set_values(values)
        weights = mixture(self.top_k, values.primary_weight)
        for route, weight in enumerate(weights):  # a copy from the host would wait for the device
            self.route_weights[route].fill_(weight)

    def expert_weights(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Extras]:
        """As in the base class; the hidden state plays no part."""
        routes = self.topk_token_to_expert[:, ids]  # [K, B, S]
        experts = torch.arange(self.experts, device=ids.device, dtype=routes.dtype)
        weights = self.route_weights.view(-1, *[1] * (ids.ndim + 1))
        return ((routes[..., None] == experts) * weights).sum(dim=0), {}


class Router(nn.Module):
    """The linear map of a learned router, in float32 whatever the run computes in: the order of
    close scores must not hang on a rounding."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H] -> probabilities [B, S, E], float32."""
        return F.linear(x.float(), self.weight).softmax(-1)


class LearnedRouted(RoutedFeedForward):
    """The control: experts chosen by the K largest of a softmax over the hidden state.

    Their probabilities are renormalised to sum to 1. A single route keeps its raw probability
    (Fedus et al. 2021): normalised it would be 1, and the router would learn nothing from the loss.
    """

    def __init__(self, spec: ModelSpec, precision: Precision) -> None:
        super().__init__(spec, precision)
        self.router = Router(spec.hidden_size, self.experts)

    def expert_weights(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Extras]:
        """As in the base class; the token ids play no part."""
        probabilities: Tensor = self.router(x)
        chosen = probabilities.topk(self.top_k, dim=-1)
        values = chosen.values
        if self.top_k > 1:
            values = values / values.sum(-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen.indices, values)
        hits = torch.zeros_like(probabilities).scatter(-1, chosen.indices, 1.0)
        return weights, {
            "route_hits": hits.flatten(0, -2).sum(0).detach(),
            "route_live": (weights.detach() != 0).flatten(0, -2).sum(0, dtype=torch.float32),
            "route_probability": probabilities.flatten(0, -2).sum(0),
        }


def mixture(top_k: int, primary_weight: float | None) -> list[float]:
    """The K weights of a token's routes: p, then (1 - p) / (K - 1) each; they sum to 1."""
    if top_k == 1:
        return [1.0]
    assert primary_weight is not None
    return [primary_weight] + [(1 - primary_weight) / (top_k - 1)] * (top_k - 1)


def _squares(x: Tensor) -> Tensor:
    return x.detach().float().square().sum()
