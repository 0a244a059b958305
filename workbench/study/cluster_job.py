"""The work of one job in a queue: `wb run SPEC --resume`, which saves when the machine is taken.

submitit pickles a `RunJob` and calls it in the job. When the job is preempted or its time is up, it
calls `checkpoint` and queues the job again; the run then goes on from what it saved, to the same
bits as without the break. Nothing heavy is imported: the child trains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

_NEVER = -1
_WAIT_FOR_REQUEUE = 120.0
"""Seconds in which a scheduler that has ended a run may say whether it wants the job again."""


@dataclass
class RunJob:
    """A run as a job: its command, what to set in its environment, and its log."""

    command: list[str]
    environment: dict[str, str]
    log: str
    wait_for_requeue: float = _WAIT_FOR_REQUEUE
    _child: int = field(default=_NEVER, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_child": _NEVER}  # a process is of one job alone

    def __call__(self) -> int:
        """Trains; returns the exit code of the run, 128 + n where a signal ended it.

        Slurm ends every process of a job it preempts by SIGTERM, the run among them, and says by
        another signal that the job is to be queued again: that one is waited for.
        """
        alone = os.environ.get("SUBMITIT_EXECUTOR") == "local"
        if alone:  # nobody else would tell the run; submitit itself ignores it
            signal.signal(signal.SIGTERM, self._pass_on)
        Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        with Path(self.log).open("ab") as words:
            child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env={**os.environ, **self.environment},
                process_group=0,
            )
        self._child = child.pid
        try:
            self._wait()
        except KeyboardInterrupt:
            self._tell(signal.SIGTERM)
            raise
        code = child.wait()
        code = code if code >= 0 else 128 - code
        if code > 128 and not alone:
            time.sleep(self.wait_for_requeue)  # a requeue ends this process
        return code

    def checkpoint(self) -> Any:
        """Lets the run save and end; returns what is to be queued in place of this job."""
        from submitit.helpers import DelayedSubmission

        self._tell(signal.SIGTERM)
        self._wait()
        return DelayedSubmission(self)

    def _wait(self) -> None:
        """Until the child has ended. It is not reaped: `checkpoint`, which interrupts this, waits
        for it, too."""
        with contextlib.suppress(ChildProcessError):
            if self._child != _NEVER:
                os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)

    def _tell(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._child != _NEVER:
                os.kill(self._child, number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._tell(number)
