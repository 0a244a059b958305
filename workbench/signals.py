"""Turns the first signal to end into a request to stop, so that a run can save before."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, a scheduler's cancel, a closed terminal, Slurm's warning before it takes the machine."""


class InterruptedRunError(Exception):
    """The run was asked to stop by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple[type[InterruptedRunError], tuple[int]]:
        return type(self), (self.number,)  # so that it comes whole from another process


class EndedError(KeyboardInterrupt):
    """A signal asked the process to end, and no run was there that would save first."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopRequests:
    """While entered, the first of these signals is remembered; a second SIGINT ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        for number in STOPPING:
            # What is ignored from outside (nohup, a shell's background job) stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]

    def forget(self) -> None:
        """What has come so far was answered."""
        self.number = None

    @property
    def has_come(self) -> bool:
        """Whether one has come that was not answered."""
        return self.number is not None

    def check(self) -> None:
        """Raises InterruptedRunError once a signal has come. To be called between units of work."""
        if self.number is not None:
            raise InterruptedRunError(self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
