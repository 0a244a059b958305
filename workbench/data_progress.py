"""What a person sees while data are prepared: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from workbench.live import Display

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from workbench.core.data.prepare import Progress

SECONDS_BETWEEN_LINES = 10.0


class DataReporter(Display):
    """Shows the steps of a preparation on standard error; a step is a bar, or some lines."""

    _shown: Bar | None

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._task: TaskID | None = None
        self._what: str | None = None
        self._started = self._said = 0.0

    def __call__(self, progress: Progress) -> None:
        """Takes in how far it is."""
        if self._quiet:
            return
        try:
            if sys.stderr.isatty():
                self._draw(progress)
            else:
                self._tell(progress)
        except OSError:
            self._quiet = True  # nobody can read it any more: the work goes on silently

    def _draw(self, progress: Progress) -> None:
        if self._shown is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self._shown = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._shown.start()
        if self._task is None or progress.what != self._what:
            self._what = progress.what
            self._task = self._shown.add_task(progress.what, total=progress.total)
        self._shown.update(self._task, completed=progress.done, total=progress.total)

    def _tell(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.what != self._what:
            self._what, self._started, self._said = progress.what, now, now
            self.say(progress.what)
        elif now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            speed = progress.done / (now - self._started) / 1e6
            of = "" if progress.total is None else f" of {progress.total / 1e6:,.0f}"
            self.say(f"{progress.what}: {progress.done / 1e6:,.0f}{of} MB, {speed:,.1f} MB/s")
