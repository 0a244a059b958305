"""What a person sees while data are prepared: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from workbench.core.data.prepare import Progress

SECONDS_BETWEEN_LINES = 10.0


class DataReporter:
    """Shows the steps of a preparation on standard error; a step is a bar, or some lines."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._what: str | None = None
        self._started = self._said = 0.0

    def __enter__(self) -> DataReporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Takes in how far it is."""
        if self._quiet:
            return
        try:
            if sys.stderr.isatty():
                self._draw(progress)
            else:
                self._say(progress)
        except OSError:
            self._quiet = True  # nobody can read it any more: the work goes on silently

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
        if self._task is None or progress.what != self._what:
            self._what = progress.what
            self._task = self._bar.add_task(progress.what, total=progress.total)
        self._bar.update(self._task, completed=progress.done, total=progress.total)

    def _say(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.what != self._what:
            self._what, self._started, self._said = progress.what, now, now
            print(progress.what, file=sys.stderr, flush=True)
        elif now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            speed = progress.done / (now - self._started) / 1e6
            of = "" if progress.total is None else f" of {progress.total / 1e6:,.0f}"
            line = f"{progress.what}: {progress.done / 1e6:,.0f}{of} MB, {speed:,.1f} MB/s"
            print(line, file=sys.stderr, flush=True)
