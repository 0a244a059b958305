"""Studies of seconds for the tests: two arms of the tiny runs, two seeds, and files that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_runs import DENSE, ROUTED, sections, untracked_run

from workbench.study.run import StudyOutcome
from workbench.study.spec import Study, load_study
from workbench.track.store import Store

ARMS: dict[str, Any] = {"routed": {"model": ROUTED}, "dense": {"model": DENSE}}


def write_study(folder: Path, name: str = "small", **changes: Any) -> Path:
    """A study file beside its base; `changes` replace its keys (None: the key is left out)."""
    base = sections(folder)
    del base["model"]
    (folder / "base.yaml").write_text(json.dumps(base))
    study = {"base": "base.yaml", "treatment": ["model"], "seeds": [1, 2], "arms": ARMS} | changes
    path = folder / f"{name}.study.yaml"
    kept = {key: value for key, value in study.items() if value is not None}
    path.write_text(json.dumps(kept, indent=1))
    return path


def arms_with(arm: str, **settings: Any) -> dict[str, Any]:
    """The two arms, one of them with more settings."""
    return {name: given | (settings if name == arm else {}) for name, given in ARMS.items()}


def train_planned(study: Study, store: Store, *names: str) -> None:
    """Trains runs of a study in this process, as its own processes would; all where none is named.

    What is to be seen of the study must have been frozen before.
    """
    for run in study.runs:
        if not names or run.name in names:
            untracked_run(run.spec, store)


class Lines:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shown = 0

    def say(self, line: str) -> None:
        """Keeps the line."""
        self.lines.append(line)

    def show(self, states: Any, at_once: int) -> None:
        """Counts."""
        self.shown += 1


class NoStop:
    """No signal comes, unless a test sets one."""

    number: int | None = None


__all__ = [
    "ARMS",
    "Lines",
    "NoStop",
    "StudyOutcome",
    "arms_with",
    "load_study",
    "train_planned",
    "write_study",
]
