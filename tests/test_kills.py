"""A run that is killed outright, at any instant, and resumed leaves what an unbroken one leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import MOMENTS, survive


@pytest.mark.parametrize(
    ("kills", "seed", "optimizer"),
    [
        (5, 3, "adamw"),
        pytest.param(30, 1, "adamw", marks=pytest.mark.slow),
        pytest.param(30, 2, "muon_tr", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_loses_nothing(tmp_path: Path, kills: int, seed: int, optimizer: str) -> None:
    outcome = survive(tmp_path, kills, seed, optimizer)
    assert outcome.differences == []
    assert sum(outcome.kills.values()) == kills
    if kills > 20:
        assert outcome.kills.keys() == MOMENTS.keys()
    assert max(outcome.resumed_from) > 0, "no kill came after a checkpoint"
