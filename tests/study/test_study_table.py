"""What stands on the terminal while a study trains: a table, or a line every half minute."""

from __future__ import annotations

import os
import re
import select
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.study import table
from workbench.study.plan import PlannedName
from workbench.study.states import RunState
from workbench.study.table import StudyDisplay, progress_line


def states() -> list[RunState]:
    """Of four planned runs one finished and one trains; a fifth is no longer planned."""

    def planned(arm: str, seed: int) -> PlannedName:
        return PlannedName(run=f"s-{arm}-s{seed}", arm=arm, seed=seed)

    return [
        RunState(planned("dense", 1), "finished", step=80, steps=80, seconds=160.0),
        RunState(planned("dense", 2), "running", step=40, steps=80, seconds=80.0),
        RunState(planned("routed", 1), "planned", steps=80),
        RunState(planned("routed", 2), "failed", "[red]not finite", 5, 80, is_final=True),
        RunState(planned("old", 1), "finished", dropped=True),
    ]


def test_the_line_says_what_is_done_what_trains_and_what_is_left() -> None:
    said = progress_line(states(), 1)
    # 2 s a step; 40 steps of one and 80 of another are left, those of the failed run are not.
    assert said == "1 of 4 finished; s-dense-s2 40/80; about 4 min 0 s left"
    assert progress_line(states(), 2).endswith("about 2 min 0 s left")
    assert progress_line([replace(one, state="planned", seconds=None) for one in states()], 1) == (
        "0 of 4 finished"
    )


def test_on_a_terminal_there_is_one_table_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, there = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(there, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with StudyDisplay() as display:
            display.show(states(), 1)
            first = _read(terminal)
            later = [replace(one, state="finished", step=80) for one in states()[:2]]
            display.show([*later, *states()[2:]], 1)
            display.say("the run s-dense-s2 has finished")
        second = _read(terminal)
        monkeypatch.undo()
    os.close(terminal)
    for words in ("dense   1     finished", "dense   2     running", "routed  1     planned"):
        assert words in first
    assert "routed  2     failed" in first
    assert "[red]not finite" in first  # an error is text
    assert "1 of 4 finished; s-dense-s2 40/80" in first
    assert "running" not in second
    assert "2 of 4 finished; about" in second
    assert "the run s-dense-s2 has finished" in second


def test_elsewhere_there_is_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(table.time, "monotonic", lambda: now[0])
    with StudyDisplay() as display:
        for moment in (100.0, 129.0, 131.0, 140.0, 162.0):
            now[0] = moment
            display.show(states(), 1)
    assert capsys.readouterr().err.splitlines() == [progress_line(states(), 1)] * 2
    with StudyDisplay(quiet=True) as display:
        now[0] = 1e6
        display.show(states(), 1)
    assert capsys.readouterr().err == ""


def test_a_terminal_that_is_gone_does_not_end_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_LINE_SECONDS", -1.0)
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 -- closing it fails
    monkeypatch.setattr(sys, "stderr", full)
    with StudyDisplay() as display:
        display.show(states(), 1)
        display.show(states(), 1)
    with pytest.raises(OSError, match="No space left"):
        full.close()


def _read(terminal: int) -> str:
    """What has been written, without the codes that colour it and move the cursor."""
    found = b""
    while select.select([terminal], [], [], 0.1)[0]:
        found += os.read(terminal, 65536)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found.decode())
