"""What the experts do: exact route counts, the watch over frozen experts, and expert telemetry.

L layers, E experts, K routes of a token, N sequences of an update, S sequence, T = N * S tokens.

Counts of a token-routed model are taken from the token ids of the update, outside the model, and
those of a learned router from its own forward pass: no evaluation, no padding and no recomputation
can enter them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from workbench.core.model import Transformer
from workbench.core.moe import (
    EXPERT_STACKS,
    SHARED_MATRICES,
    Extras,
    RoutedFeedForward,
    SwiGLU,
    TokenRouted,
)
from workbench.core.parallel import ALONE, Team
from workbench.core.sharding import by_expert, part
from workbench.errors import TrainingStoppedError

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

STRIKES = 5
"""Updates in which an expert may have tokens and no gradient before the run stops."""

# Columns of the replaced runner hold so many experts; those beyond stand in the table by layer.
EXPERT_COLUMNS = 4

PATHS = ("shared", "routed")

Row = dict[str, Any]


@dataclass(frozen=True)
class Routes:
    """How many routes of one update reached each expert, [L, E] each.

    `live` are those of a weight other than zero: only they give an expert a gradient.
    """

    hits: Int64
    live: Int64


@dataclass(frozen=True)
class ExpertReport:
    """The telemetry of one update: totals by column, and rows by layer and expert.

    A row has `layer`, `expert` (None: the whole layer), `metric` and `value`.
    """

    totals: dict[str, float]
    rows: list[Row]


class RouteCounter:
    """Counts the routes of updates."""

    def __init__(self, model: Transformer, team: Team = ALONE) -> None:
        self._layers, self._team = model.routed_layers, team
        self._tables = [
            layer.topk_token_to_expert.cpu().numpy()
            for layer in self._layers
            if isinstance(layer, TokenRouted)
        ]

    def count(self, ids: Int64, extras: Sequence[list[Extras]]) -> Routes:
        """The routes of the update's inputs `ids` [N, S], those of all processes; `extras` are
        those of this one's micro-batches, each a list over layers."""
        if not self._layers:
            none = np.zeros((0, 0), np.int64)
            return Routes(none, none)
        gates = [routed != 0 for _, routed in _gates(self._layers)] or [True] * len(self._layers)
        if not self._tables:
            own = [_summed(extras, name) for name in ("route_hits", "route_live")]
            hits, live = self._team.total(np.stack(own))
            return Routes(hits, live * np.array(gates)[:, None])
        flat, experts = ids.ravel(), self._layers[0].experts
        hits = np.zeros((len(self._tables), experts), np.int64)
        live = np.zeros_like(hits)
        weights = torch.stack(
            [layer.route_weights for layer in self._layers if isinstance(layer, TokenRouted)]
        ).tolist()
        for index, table in enumerate(self._tables):
            for weight, routes in zip(weights[index], table, strict=True):
                reached = np.bincount(routes[flat], minlength=experts)
                hits[index] += reached
                if weight != 0 and gates[index]:
                    live[index] += reached
        return Routes(hits, live)


class ExpertWatch:
    """Remembers which experts ever got a token, and stops a run whose experts are frozen."""

    def __init__(self, model: Transformer) -> None:
        self._layers = model.routed_layers
        shape = (len(self._layers), self._layers[0].experts if self._layers else 0)
        self._seen = np.zeros(shape, np.int64)
        self._strikes = np.zeros((*shape, len(EXPERT_STACKS)), np.int64)

    def check(self, step: int, routes: Routes, team: Team = ALONE) -> None:
        """To be called with the update's gradients in place, before it is made.

        Raises:
            TrainingStoppedError: in the last five updates that gave an expert tokens of non-zero
                weight, the gradient of one of its matrices was exactly zero.
        """
        if not self._layers:
            return
        self._seen += routes.hits
        # One transfer from the device for all layers, [L, E, stacks].
        largest = torch.stack([_largest_gradients(layer) for layer in self._layers])
        zero = (team.over_parts(largest, "max") == 0).cpu().numpy()
        live = (routes.live > 0)[:, :, None]
        # A gradient clears: a healthy expert may meet a zero now and then in a long run.
        self._strikes = np.where(live, (self._strikes + 1) * zero, self._strikes)
        frozen = np.argwhere(self._strikes >= STRIKES)
        if len(frozen):
            layer, expert, stack = frozen[0]
            tokens = routes.live[layer, expert]
            more = f", and {len(frozen) - 1} more matrices" if len(frozen) > 1 else ""
            raise TrainingStoppedError.at(
                f"step {step}",
                f"layer {layer} expert {expert} gets tokens ({tokens:,} routes in this update) but "
                f"the gradient of its {EXPERT_STACKS[stack]} was exactly zero in {STRIKES} "
                f"updates{more}: it would stay as it was initialised",
            )

    @property
    def unused(self) -> list[str]:
        """Experts that no token has reached so far, such as "layer 3 expert 1"."""
        return [f"layer {layer} expert {expert}" for layer, expert in np.argwhere(self._seen == 0)]

    def state_dict(self) -> dict[str, Any]:
        """The counts, as JSON can hold them."""
        return {"seen": self._seen.tolist(), "strikes": self._strikes.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from saved counts."""
        self._seen = np.array(state["seen"], np.int64).reshape(self._seen.shape)
        self._strikes = np.array(state["strikes"], np.int64).reshape(self._strikes.shape)


def report(
    model: Transformer,
    routes: Routes,
    extras: Sequence[list[Extras]],
    tokens: int,
    team: Team = ALONE,
) -> ExpertReport:
    """The telemetry of an update of `tokens` tokens, its gradients in place and not yet clipped;
    `extras` are those of this process's micro-batches, all else is of all processes.

    RMS are those of what each path adds to the residual stream, route weights and gates included,
    over all tokens and channels. Norms are L2. Totals are over all layers: shares and the entropy
    (nats) of summed counts, the dead experts of each layer counted, root mean squares of RMS, means
    of gates, L2 norms over layers. A dense model has the shared path only.
    """
    rows: list[Row] = []

    def note(layer: int, metric: str, value: float, expert: int | None = None) -> None:
        rows.append({"layer": layer, "expert": expert, "metric": metric, "value": value})

    width = tokens * model.spec.hidden_size
    squares = _squared_norms(model.feed_forwards, team)
    added = team.total(_added(extras))
    gates = _gates(model.routed_layers)
    for index, mlp in enumerate(model.feed_forwards):
        for path, total in zip(PATHS, added[index].tolist(), strict=True):
            if f"{path}_square" in extras[0][index]:
                note(index, f"{path}_rms", math.sqrt(total / width))
        norms = squares[index]
        if "shared" in norms:
            note(index, "shared_grad_norm", math.sqrt(norms["shared"][0]))
        if not isinstance(mlp, RoutedFeedForward):
            continue
        note(index, "routed_grad_norm", math.sqrt(sum(norms["experts"])))
        if mlp.has_gates:
            for path, gate in zip(PATHS, gates[index], strict=True):
                note(index, f"{path}_gate", gate)
        hits = routes.hits[index]
        note(index, "route_entropy", entropy(hits))
        note(index, "dead_experts", float((hits == 0).sum()))
        for expert, count in enumerate(hits.tolist()):
            note(index, "route_count", float(count), expert)
            note(index, "route_share", count / int(hits.sum()), expert)
            note(index, "expert_grad_norm", math.sqrt(norms["experts"][expert]), expert)
    return ExpertReport(_totals(rows, routes), rows)


def _added(extras: Sequence[list[Extras]]) -> Float64:
    """Summed squares of what each path of each layer has added in all micro-batches, [L, paths]; 0
    for a path that is not there. One transfer from the device, as below."""
    none = torch.zeros_like(next(iter(extras[0][0].values())), dtype=torch.float32)
    found = [
        torch.stack([one.get(f"{path}_square", none) for one in micro for path in PATHS])
        for micro in extras
    ]
    by_micro_batch = np.array(torch.stack(found).tolist())
    added: Float64 = by_micro_batch.sum(0).reshape(-1, len(PATHS))
    return added


def _gates(layers: Sequence[RoutedFeedForward]) -> list[list[float]]:
    """The present gates of the paths, by layer; none where no layer has any."""
    if not (layers and layers[0].has_gates):
        return []
    pairs: list[list[float]] = torch.stack([torch.stack(one.gates()) for one in layers]).tolist()
    return pairs


def entropy(counts: Int64) -> float:
    """The entropy, in nats, of a distribution given by counts; at most log E."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0


def _summed(extras: Sequence[list[Extras]], name: str) -> Int64:
    """Counts of an update, from those of its micro-batches, [L, E]."""
    found = sum(torch.stack([one[name] for one in micro]) for micro in extras)
    assert isinstance(found, Tensor)
    counts: Int64 = found.round().to(torch.int64).cpu().numpy()
    return counts


def _totals(rows: list[Row], routes: Routes) -> dict[str, float]:
    def of(metric: str, expert: int | None = None) -> list[float]:
        found = (row for row in rows if row["metric"] == metric and row["expert"] == expert)
        return [row["value"] for row in found]

    totals: dict[str, float] = {}
    for path in PATHS:
        if values := of(f"{path}_rms"):
            totals[f"{path}_rms"] = math.sqrt(sum(v * v for v in values) / len(values))
        if values := of(f"{path}_gate"):
            totals[f"{path}_gate"] = sum(values) / len(values)
        if values := of(f"{path}_grad_norm"):
            totals[f"{path}_grad_norm"] = math.hypot(*values)
    if not routes.hits.size:
        return totals
    counts = routes.hits.sum(0)
    totals["expert_dead_count"] = sum(of("dead_experts"))
    totals["route_entropy"] = entropy(counts)
    for expert in range(min(len(counts), EXPERT_COLUMNS)):
        totals[f"expert_{expert}_share"] = int(counts[expert]) / int(counts.sum())
        totals[f"expert_{expert}_grad_norm"] = math.hypot(*of("expert_grad_norm", expert))
    return totals


def _squared_norms(
    layers: Sequence[SwiGLU | RoutedFeedForward], team: Team
) -> list[dict[str, list[float]]]:
    """Per layer the squared gradient norms of the shared path and of each expert: one transfer from
    the device for all of them."""
    pending: list[tuple[int, str, Tensor]] = []
    for index, mlp in enumerate(layers):
        present = [
            parameter.grad
            for name, parameter in mlp.named_parameters()
            if parameter.grad is not None
            and (isinstance(mlp, SwiGLU) or name.split(".")[0] in SHARED_MATRICES)
        ]
        if present:
            norms = torch.stack([part(grad).square().sum() for grad in present])
            pending.append((index, "shared", norms.sum().reshape(1)))
        if isinstance(mlp, RoutedFeedForward):
            stacks = [by_expert(_gradient(mlp, name), _squares) for name in EXPERT_STACKS]
            pending.append((index, "experts", torch.stack(stacks).sum(0)))
    together = torch.cat([value for _, _, value in pending]) if pending else torch.zeros(0)
    values = team.over_parts(together, "sum").tolist()
    found: list[dict[str, list[float]]] = [{} for _ in layers]
    for index, name, value in pending:
        found[index][name], values = values[: len(value)], values[len(value) :]
    return found


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(1)


def _largest_gradients(layer: RoutedFeedForward) -> Tensor:
    """The largest magnitude in the gradient of each matrix of each expert, [E, stacks]; 0 without
    one."""
    found = [
        by_expert(_gradient(layer, name), lambda rows: rows.abs().amax(1)) for name in EXPERT_STACKS
    ]
    return torch.stack(found, dim=1)


def _gradient(layer: nn.Module, name: str) -> Tensor:
    parameter: nn.Parameter = getattr(layer, name)
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
