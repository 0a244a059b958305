"""The page of the ecosystem: its figures are those of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.slow
def test_fidelity_and_the_time_of_the_tutorial(tmp_path: Path) -> None:
    import ecosystem

    lines = ecosystem.fidelity_lines(tmp_path)
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| csv")]
    assert [row[1] for row in rows] == ["nanogpt-gpt-small", "nanogpt-gpt-moe"]
    for row in rows:
        judged, known, missing, corrected = map(int, row[2:])
        assert known + missing == judged
        assert corrected == 0
    assert any("effective.execution.loss_backend" in line for line in lines)  # of the original

    times = tmp_path / "times.json"
    sections = {"Install": 60.0, "A first run": 30.0, "Two runs compared": 30.0, "A study": 120.0}
    times.write_text(json.dumps({"cores": 2, "seconds": sections, "total": 240.0}))
    assert ecosystem.tutorial_lines(times)[-1] == (
        "From install to the comparison: 2.0 minutes. All of its commands take 4.0 minutes on 2"
        " cores, without reading."
    )
