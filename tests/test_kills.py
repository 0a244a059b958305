"""A run that is killed outright, at any instant, and resumed leaves what an unbroken one leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from track.tracked_runs import assert_equal_to_file

from workbench.track.store import Store

HARNESS = Path(__file__).parent / "kills.py"


def survive(folder: Path, kills: int, seed: int, *options: str) -> dict[str, Any]:
    """In a process of its own: one that has computed with torch must not be forked."""
    arguments = [str(kills), "--seed", str(seed), "--folder", str(folder), *options]
    done = subprocess.run(
        [sys.executable, str(HARNESS), *arguments], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    assert outcome["differences"] == []
    assert sum(outcome["kills"].values()) == kills
    assert max(outcome["resumed_from"]) > 0, "no kill came after a checkpoint"
    return outcome


def test_a_killed_run_loses_nothing(tmp_path: Path) -> None:
    survive(tmp_path, 5, 3, "--steps", "28")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "optimizer"), [(1, "adamw"), (2, "muon_tr")])
def test_a_run_killed_at_every_moment_loses_nothing(
    tmp_path: Path, seed: int, optimizer: str
) -> None:
    outcome = survive(tmp_path, 30, seed, "--optimizer", optimizer)
    assert len(outcome["kills"]) == 6, "not every moment was met"


@pytest.mark.slow
def test_what_mlflow_follows_of_a_killed_run_is_whole(tmp_path: Path) -> None:
    from workbench.track.mlflow_store import connect

    survive(tmp_path, 8, 5, "--tracked")
    store = Store(tmp_path / "broken")
    target = connect(store.tracking_uri, store, "workbench")
    assert_equal_to_file(target, store.runs / "killed")
