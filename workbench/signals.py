"""Turns the first SIGINT or SIGTERM into a request to stop, so that a run can save first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class InterruptedRunError(Exception):
    """The run was asked to stop by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class StopRequests:
    """While entered, the first SIGINT or SIGTERM is remembered; a second SIGINT ends at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises InterruptedRunError once a signal has come. To be called between units of work."""
        if self.number is not None:
            raise InterruptedRunError(self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
