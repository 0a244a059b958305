"""Starts the processes of one run on this machine, as torchrun does, and says which of them ended.

Also tells a process which torchrun has started it, and would start it again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import psutil

from workbench.errors import Fault, UserError
from workbench.signals import STOPPING

# How long the processes of a run that was told to stop may take to save, in seconds.
PATIENCE = 3600


class EndedRankError(UserError):
    """A process of the run was ended by a signal."""

    def __init__(self, *faults: Fault, exit_code: int = 128 + signal.SIGKILL) -> None:
        super().__init__(*faults)
        self.exit_code = exit_code


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Runs `wb` with these arguments in so many processes; returns the exit code of the first that
    failed, else 0. What asks a run to stop is passed on to all of them, which save before they end.

    Raises:
        EndedRankError: one was ended by a signal that nobody sent to all.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What went wrong is said by the process that it went wrong in.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
        signals_to_handle=",".join(_passed_on()),
        shutdown_timeout=PATIENCE,
    )
    command = [sys.executable, "-m", "workbench", *arguments]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        return _exit_code(failed.failures, as_json="--json" in arguments)
    return 0


def _passed_on() -> list[str]:
    """The signals that the processes get, too; what is ignored from outside (nohup) stays so."""
    signals = map(signal.Signals, (*STOPPING, signal.SIGQUIT))
    return [one.name for one in signals if signal.getsignal(one) != signal.SIG_IGN]


def _exit_code(failures: dict[int, Any], as_json: bool) -> int:
    """Of the process that failed first; those that went after it had the same cause."""
    # torch ends by SIGTERM whoever is still there when the first has failed: no cause of anything.
    own = {rank: one for rank, one in failures.items() if one.exitcode != -signal.SIGTERM}
    rank, first = min(
        (own or failures).items(), key=lambda item: (item[1].exitcode > 0, item[1].timestamp)
    )
    if first.exitcode > 0:
        return int(first.exitcode)
    number = -int(first.exitcode)
    if as_json and (0 not in own or own[0].exitcode > 0):
        return 128 + number  # rank zero has written the one document
    message = f"was ended by {signal.Signals(number).name}, and the run with it"
    allowed = "--resume goes on from its last checkpoint"
    raise EndedRankError(Fault(f"rank {rank}", message, None, allowed), exit_code=128 + number)


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """The arguments of each process: those of the command, without the number of processes."""
    kept = []
    given = iter(arguments)
    for word in given:
        if word == "--nproc":
            next(given, None)
        elif not word.startswith("--nproc="):
            kept.append(word)
    return kept


def launcher() -> str | None:
    """The torchrun of this machine that started this process: it stays the same over restarts, and
    no other launch has it. None: this process was not started by torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent = psutil.Process(os.getppid())
    run_id, machine = os.environ["TORCHELASTIC_RUN_ID"], socket.gethostname()
    return f"{run_id} {machine} {agent.pid} {agent.create_time()}"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
