"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from workbench.core.train import StepResult
from workbench.live import Display

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Reporter(Display):
    """Shows the steps and evaluations of one run on standard error.

    On a terminal a bar with step, loss, tokens/s and time left stands below the lines; elsewhere
    each logged step is a line of its own, so that a log file reads as one. `steps` None: the end is
    not known.
    """

    _shown: Progress | None

    def __init__(self, steps: int | None, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._steps = steps
        self._task: TaskID | None = None
        self._seconds = 0.0
        self._tokens = 0.0

    def __enter__(self) -> Reporter:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._shown = Progress(
                TextColumn("step {task.completed:.0f}" + self._of()),
                BarColumn(),
                TextColumn("{task.fields[loss]}"),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._shown.add_task("train", total=self._steps, loss="", speed="")
            self._shown.start()
        return self

    def step(self, result: StepResult, logged: bool) -> None:
        """One update has been made."""
        self._seconds = 0.9 * self._seconds + result.seconds if self._seconds else result.seconds
        tokens = result.tokens / result.step
        self._tokens = 0.9 * self._tokens + tokens if self._tokens else tokens
        speed = self._tokens / self._seconds
        if self._shown is not None and self._task is not None:
            loss, rate = f"train nll {result.nll:.4f}", f"{speed:,.0f} tokens/s"
            self._shown.update(self._task, completed=result.step, loss=loss, speed=rate)
        elif logged:
            left = ""
            if self._steps is not None:
                seconds = (self._steps - result.step) * tokens / speed
                left = f"  about {_duration(seconds)} left"
            self.say(
                f"step {result.step}{self._of()}  train/nll {result.nll:.4f}  "
                f"lr {result.learning_rate:.2e}  {speed:,.0f} tokens/s{left}"
            )

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """An evaluation is complete."""
        shown = "  ".join(f"{k} {v:.4f}" for k, v in values.items() if k.endswith("/nll"))
        self.say(f"step {step}{self._of()}  {shown}")

    def _of(self) -> str:
        """The planned end behind a step; nothing where it is not known."""
        return "" if self._steps is None else f"/{self._steps}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
