"""How often an update makes the host wait for the device: counted, and the same at any depth.

Every read of a tensor's value drains the queue of a GPU. On a CPU the same reads happen, and cost
nothing: they are counted here by name.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_parts
from torch.overrides import TorchFunctionMode

from workbench.core.losses import LossSums, linear_cross_entropy
from workbench.core.train import train

READS = {"item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__", "is_nonzero"}


class Reads(TorchFunctionMode):
    """Counts the reads of values by name, apart for the loss and all else."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.in_loss: Counter[str] = Counter()
        self._counts = self.found

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (name := getattr(function, "__name__", "")) in READS:
            self._counts[name] += 1
        return function(*args, **(kwargs or {}))

    def loss(self, *given: Any) -> LossSums:
        self._counts = self.in_loss
        try:
            return linear_cross_entropy(*given)
        finally:
            self._counts = self.found


def reads_of_an_update(folder: Path, **changes: Any) -> tuple[int, int]:
    """Of one update: outside the loss, and in it."""
    parts = tiny_parts(folder, **changes)
    reads = Reads()
    results = train(parts.spec, parts.state, loss=reads.loss)
    counts = []
    with reads:
        for _ in range(3):
            next(results)
            counts.append((reads.found.total(), reads.in_loss.total()))
    # The first one reads the route tables, once in a run.
    second, third = (
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(counts)
    )
    assert second == third
    return third


GATES = {"learn_shared_routed_gates": True, "shared_gate_final": 0.5, "routed_gate_final": 1.5}
BALANCE = {"mlp_type": "learned_router", "router_aux_loss_weight": 0.1}
DIVERSITY = {"expert_diversity_lambda": 0.1}

# Of one update, without telemetry: the sums of the loss; the norm of the gradients; and of experts
# the route weights, and the gradients of those that are watched. Gates are one more, diversity too.
PLAIN = {
    "dense": ({"mlp_type": "dense"}, 2),
    "table": ({}, 4),
    "table, gates, diversity": (GATES | DIVERSITY, 6),
    "router, balance": (BALANCE, 5),
}
# With it: the norms of the paths, what they add, and the gates where there are some.
MORE = {"dense": 2, "table": 2, "table, gates, diversity": 3, "router, balance": 2}


@pytest.mark.parametrize("kind", PLAIN)
def test_an_update_reads_as_often_at_any_depth(tmp_path: Path, kind: str) -> None:
    model, expected = PLAIN[kind]
    for layers, telemetry in ((1, False), (3, False), (3, True)):
        outside, in_loss = reads_of_an_update(
            tmp_path,
            model={**model, "num_hidden_layers": layers},
            training={"steps": 4, "batch_size": 2, "gradient_accumulation_steps": 2},
            telemetry={"moe": telemetry, "log_steps": 1},
        )
        assert outside == expected + (MORE[kind] if telemetry else 0), (layers, telemetry)
        assert in_loss <= 2 * 4  # of two micro-batches


def test_the_reads_are_seen() -> None:
    with Reads() as reads:
        one = torch.ones(2)
        float(one[0]), bool(one[0]), int(one[0]), one[0].item(), one.tolist(), one.cpu().numpy()
    assert reads.found.total() == 6
