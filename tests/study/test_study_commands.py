"""Every fault of a study as a person meets it: by the command, its exit code and its message."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
from small_studies import ARMS, arms_with, write_study
from test_study_run import Lab, lab, when

from workbench import cli
from workbench.study import run as running
from workbench.study.check import check_study
from workbench.study.ledger import Ledger
from workbench.study.lock import study_lock
from workbench.study.plan import folder_of

__all__ = ["lab"]  # a fixture
Wb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def wb(lab: Lab, capfd: pytest.CaptureFixture[str]) -> Wb:
    """`wb study ...`: its exit code, and what it prints on both streams."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli._guarded(["study", *arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, " ".join(err.split())

    return call


def written(lab: Lab) -> set[str]:
    """What stands in the store."""
    home = lab.store.home
    return {str(path.relative_to(home)) for path in home.rglob("*")} if home.exists() else set()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (
            {"arms": {"routed": ARMS["routed"]}},
            2,
            "arms: one arm answers no question",
        ),
        (
            {"seeds": [1, 2, 1]},
            2,
            "seeds: the seed 1 is given twice: two equal runs are one observation",
        ),
        (
            {"arms": arms_with("dense", training={"stepz": 3})},
            2,
            "(arm dense): training.stepz: there is no such key. Did you mean 'steps'?",
        ),
        (
            {"arms": ARMS | {"again": ARMS["dense"]}},
            2,
            "arms.again: the arms dense and again come to the same spec",
        ),
        (
            {"primary": {"metric": "heldout/nll"}},
            2,
            "primary.metric: no run logs this metric. Did you mean 'held_out/nll'?",
        ),
        (
            {"arms": arms_with("dense", optimizer={"lr": 1.0})},
            3,
            "optimizer.lr: arms differ in more than the treatment (model)",
        ),
    ],
    ids=["one arm", "seed twice", "no such field", "same spec", "no such metric", "more differs"],
)
def test_a_wrong_study_is_one_message_and_nothing_is_begun(
    changes: dict[str, Any],
    code: int,
    words: str,
    lab: Lab,
    wb: Wb,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "check_study", check_study)
    before = written(lab)
    write_study(lab.folder, **changes)
    for command in ("check", "run"):
        found, out, err = wb(command, str(lab.path))
        assert found == code
        assert out == ""
        assert err.count("error:") == 1
        assert words in err
        found, out, _ = wb(command, str(lab.path), "--json")
        assert found == code
        assert json.loads(out)["error" if found == 2 or command == "run" else "verdict"]
    assert lab.starts() == []
    assert {one for one in written(lab) - before if one.startswith(("runs", "studies"))} == set()


def test_a_plan_edited_after_the_first_run(lab: Lab, wb: Wb) -> None:
    """The study file may say something else: nothing is trained by it until that has a reason.
    The frozen plan itself may not."""
    assert wb("run", str(lab.path))[0] == 0
    write_study(lab.folder, seeds=[1, 2, 3])
    code, _, err = wb("run", str(lab.path))
    assert code == 3
    assert "the plan was frozen on" in err
    assert "seeds: [1, 2] -> [1, 2, 3]" in err
    assert "--amend" in err
    assert len(lab.starts()) == 4
    _, out, _ = wb("status", str(lab.path))
    assert "seeds: [1, 2] -> [1, 2, 3]" in out
    assert wb("run", str(lab.path), "--amend", "two say too little")[0] == 0
    assert len(lab.starts()) == 6
    plan = folder_of("small", lab.store) / "plan.json"
    plan.write_text(plan.read_text().replace('"confidence": 0.95', '"confidence": 0.6', 1))
    for command in ("run", "status", "report"):
        code, _, err = wb(command, str(lab.path))
        assert code == 2
        assert "versions[0]: the frozen plan was edited: its hash does not hold" in err
    assert len(lab.starts()) == 6


def test_a_run_deleted_and_one_renamed(lab: Lab, wb: Wb) -> None:
    assert wb("run", str(lab.path))[0] == 0
    shutil.rmtree(lab.store.runs / "small-dense-s1")
    (lab.store.runs / "small-routed-s2").rename(lab.store.runs / "lucky")
    code, out, _ = wb("status", "small")
    said = " ".join(out.split())
    assert code == 0
    assert "deleted" in said
    assert "its folder is now lucky" in said
    code, out, err = wb("run", str(lab.path))
    assert code == 0
    assert "small-dense-s1: it had finished" in err + out
    assert lab.starts()[4:] == ["small-dense-s1"]
    assert not (lab.store.runs / "small-routed-s2").exists()


def test_a_second_run_of_the_same_study(lab: Lab, wb: Wb) -> None:
    with study_lock(folder_of("small", lab.store)):
        code, out, err = wb("run", str(lab.path))
    assert (code, out) == (3, "")
    assert f"this study is being run by another process (pid {os.getpid()}" in err
    assert lab.starts() == []
    assert wb("run", str(lab.path))[0] == 0


def test_ctrl_c_in_the_third_run(lab: Lab, wb: Wb) -> None:
    lab.tell(seconds=0.6)
    third = lab.store.runs / "small-routed-s2" / "metrics.csv"
    thread = when(third.exists, lambda: os.kill(os.getpid(), signal.SIGINT))
    code, out, err = wb("run", str(lab.path), "--at-once", "1")
    thread.join()
    assert code == 130
    assert "2 of 4 runs finished, 1 stopped, 1 not begun" in out + err
    assert f"next: wb study run {lab.path}" in out
    lab.tell()
    code, out, _ = wb("run", str(lab.path))
    assert code == 0
    assert "4 of 4 runs finished" in out
    assert f"next: wb study report {lab.path}" in out
    assert sorted(lab.starts()) == sorted(
        [
            *("small-routed-s1", "small-dense-s1", "small-routed-s2", "small-dense-s2"),
            "small-routed-s2",
        ]
    )
    kinds = [event.kind for event in Ledger(folder_of("small", lab.store)).events]
    assert "interrupted" in kinds


def test_status_shows_arms_seeds_states_and_time_left(lab: Lab, wb: Wb) -> None:
    lab.tell(codes={"small-dense-s2": 2})
    assert wb("run", str(lab.path))[0] == 4
    code, out, _ = wb("status", "small")
    assert code == 0
    for word in ("routed", "dense", "1", "2", "finished", "failed", "about"):
        assert word in out
    code, _, err = wb("status", "smal")
    assert code == 2
    assert "there is no such study in" in err
    assert "Did you mean 'small'" in err
    assert len(lab.starts()) == 4
