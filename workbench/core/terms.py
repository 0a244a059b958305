"""The auxiliary terms of the objective: balance of a learned router, diversity of the experts.

L layers, E experts, B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.core.model import TrainingForward, Transformer
from workbench.core.moe import Extras, RoutedFeedForward
from workbench.core.parallel import ALONE, Team
from workbench.core.sharding import whole
from workbench.spec.run import RunSpec


@dataclass(frozen=True)
class Term:
    """An auxiliary term of the objective: its value, and the coefficient it was weighed with."""

    value: float
    weight: float

    @property
    def contribution(self) -> float:
        """What it adds to the objective."""
        return self.value * self.weight


def route_fractions(
    spec: RunSpec, forward: TrainingForward, micro_batches: list[Tensor], team: Team = ALONE
) -> Tensor | None:
    """The part of the update's routes that reaches each expert, [L, E] float32, before any
    backward pass; None where one forward pass tells it, or nobody asks.

    The balance loss is a product of two means over the whole update, so that its gradient in the
    first micro-batch depends on the routes of the last. A pass without gradients finds them: with
    it, accumulation gives what one large batch gives.
    """
    if not spec.model.router_aux_loss_weight or len(micro_batches) == 1:
        return None
    with torch.no_grad():
        hits = [route_hits(forward(batch[:, :-1]).extras) for batch in micro_batches]
    return normalised(team.summed(torch.stack(hits).sum(0)))


def balance_of(
    extras: list[Extras], fractions: Tensor | None, tokens: int, team: Team = ALONE
) -> Tensor:
    """This micro-batch's part of the balance loss of an update of `tokens` tokens; a scalar."""
    probability = torch.stack([one["route_probability"] for one in extras])
    if fractions is None:
        fractions = normalised(team.summed(route_hits(extras)))
    return balance_terms(probability, fractions, tokens)


def route_hits(extras: list[Extras]) -> Tensor:
    """Routes that reached each expert in one micro-batch, [L, E] float32."""
    return torch.stack([one["route_hits"] for one in extras])


def normalised(hits: Tensor) -> Tensor:
    """Counts [L, E] as fractions of each layer's routes."""
    return hits / hits.sum(-1, keepdim=True)


def balance_term(spec: RunSpec, value: float) -> Term | None:
    """The balance loss as a term of the objective; None where there is none."""
    weight = spec.model.router_aux_loss_weight
    return Term(value, weight) if weight else None


def diversity_term(model: Transformer, weight: float) -> Term | None:
    """Computes the diversity penalty and adds its gradient; None at weight 0, with no work done."""
    if not weight:
        return None
    assert model.spec.expert_diversity_target
    value = diversity(model.routed_layers, model.spec.expert_diversity_target)
    (weight * value).backward()  # type: ignore[no-untyped-call]
    return Term(float(value.detach()), weight)


def balance_terms(probability: Tensor, fraction: Tensor, tokens: int) -> Tensor:
    """The share of these tokens in the balance loss E * sum_e fraction_e * mean probability_e
    (Fedus et al. 2021), averaged over layers; float32 scalar.

    probability [L, E] are probabilities summed over the tokens of a micro-batch, fraction [L, E]
    the part of all routes of the whole update that reached each expert, `tokens` the whole
    update's: the shares of all micro-batches add up to the loss of one large batch.
    """
    return fraction.shape[-1] * (fraction * probability).sum() / (tokens * len(fraction))


def diversity(layers: list[RoutedFeedForward], target: str) -> Tensor:
    """The mean squared cosine between different experts of a layer, averaged over layers: scalar.

    An expert is the vector of its down matrix (`down`) or of all three (`all`).
    """
    total = torch.zeros((), device=layers[0].down_proj_w.device)
    for layer in layers:
        stacks = [whole(layer.down_proj_w)]
        if target == "all":
            stacks += [whole(layer.gate_proj_w), whole(layer.up_proj_w)]
        experts = F.normalize(torch.cat([stack.flatten(1) for stack in stacks], dim=1))
        # Without the ones of the diagonal: the rest may be so small that their sum would hide it.
        cosines = (experts @ experts.t()).fill_diagonal_(0)  # [E, E]
        total = total + cosines.square().sum() / (layer.experts * (layer.experts - 1))
    return total / len(layers)
