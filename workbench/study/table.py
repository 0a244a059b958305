"""The states of a study's runs for a person: one table while they train, and `wb study status`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.live import Display
from workbench.plan import duration
from workbench.study.states import RunState, seconds_left

if TYPE_CHECKING:
    from rich.live import Live

_LINE_SECONDS = 30.0
_STYLES = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "deleted": "red",
    "foreign": "red",
    "stopped": "yellow",
}


class StudyDisplay(Display):
    """Shows the runs of a study on standard error: a table on a terminal, lines elsewhere."""

    _shown: Live | None

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._said = time.monotonic()

    def __enter__(self) -> StudyDisplay:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._shown = Live(console=Console(stderr=True), auto_refresh=False)
            self._shown.start()
        return self

    def show(self, states: Sequence[RunState], at_once: int) -> None:
        """The table as it is now; elsewhere than on a terminal a line every half minute."""
        if self._quiet:
            return
        try:
            if self._shown is not None:
                self._shown.update(_rich_table(states, at_once), refresh=True)
            elif time.monotonic() - self._said > _LINE_SECONDS:
                self._said = time.monotonic()
                self.say(progress_line(states, at_once))
        except OSError:
            self._quiet = True


def progress_line(states: Sequence[RunState], at_once: int) -> str:
    """Such as "3 of 12 finished; a-s42 40/80, b-s42 38/80; about 6 min left"."""
    planned = [state for state in states if not state.dropped]
    done = sum(state.state == "finished" for state in planned)
    running = [f"{state.run} {_steps(state)}" for state in planned if state.state == "running"]
    parts = [f"{done} of {len(planned)} finished"]
    if running:
        parts.append(", ".join(running))
    if left := time_left(states, at_once):
        parts.append(left)
    return "; ".join(parts)


def time_left(states: Sequence[RunState], at_once: int) -> str | None:
    """Such as "about 6 min left"; None where nothing is left, or nothing tells."""
    seconds = seconds_left(states, at_once)
    return f"about {duration(seconds)} left" if seconds else None


def state_rows(states: Sequence[RunState]) -> list[list[str]]:
    """A row for each run: arm, seed, state, steps, time trained, and what is to be said of it."""
    return [
        [
            state.planned.arm,
            str(state.planned.seed),
            state.state + (" (no longer planned)" if state.dropped else ""),
            _steps(state),
            duration(state.seconds) if state.seconds else "",
            state.detail,
        ]
        for state in states
    ]


HEADS = ("arm", "seed", "state", "step", "trained", "")


def text_table(states: Sequence[RunState]) -> str:
    """The rows as aligned columns."""
    rows = [list(HEADS), *state_rows(states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS) - 1)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    )


def _rich_table(states: Sequence[RunState], at_once: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(caption=progress_line(states, at_once), box=None, pad_edge=False)
    for head in HEADS:
        table.add_column(head)
    for state, row in zip(states, state_rows(states), strict=True):
        table.add_row(*(Text(cell, style=_STYLES.get(state.state, "")) for cell in row))
    return table


def _steps(state: RunState) -> str:
    if not state.steps:
        return f"{state.step:,}" if state.step else ""
    return f"{state.step:,}/{state.steps:,}"
