"""What stands on a terminal while work goes on, and the lines that are said beside it."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress


class Display:
    """Says lines on standard error, above a bar or a table where a subclass has put up one.

    Where nobody can read it any more (a closed terminal, a full disk) the work goes on silently.
    """

    _shown: Live | Progress | None

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._shown = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown is not None:
            with contextlib.suppress(OSError):
                self._shown.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._quiet:
            return
        try:
            if self._shown is not None:
                self._shown.console.print(line, highlight=False, markup=False)
            else:
                print(line, file=sys.stderr, flush=True)
        except OSError:
            self._quiet = True
