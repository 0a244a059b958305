"""How one of several processes ends and the others learn of it: its rank and its cause, by name."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import time
from typing import Any

import psutil

from workbench.errors import Fault, UserError, out_of_memory

# How long the survivors of a process that says nothing more wait for one another.
ROLL_CALL_SECONDS = 3.0

# After how much silence the kernel asks the other end of a connection whether it is there, how
# often, in seconds, and how often in vain until it gives the connection up.
_SILENCE, _PAUSE, _ASKED = 10, 5, 4

_CAUSE = "cause"


class PeerError(UserError):
    """Another process of the run has ended: this one cannot go on without it."""

    exit_code = 74

    def __init__(self, *faults: Fault, agreed: bool = False, exit_code: int = 74) -> None:
        """`agreed`: rank zero is there to say it."""
        super().__init__(*faults)
        self.agreed, self.exit_code = agreed, exit_code


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error is that of a connection between the processes."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def notice_lost_machines() -> None:
    """Has the kernel break the connections of this process to a machine that answers no more.

    A process that dies closes its connections; a machine that loses its power or its network says
    nothing, and whoever waits for it would wait until the time limit of the group. The kernel
    answers for a process that is merely busy or stopped.
    """
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status != psutil.CONN_ESTABLISHED or connection.fd < 0:
            continue
        try:
            own = socket.socket(fileno=os.dup(connection.fd))
        except OSError:  # closed since
            continue
        with own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # macOS has another name for the first, and none for the last.
            idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
            settings = {
                idle: _SILENCE,
                getattr(socket, "TCP_KEEPINTVL", None): _PAUSE,
                getattr(socket, "TCP_KEEPCNT", None): _ASKED,
                # For what was sent: TCP would try for a quarter of an hour.
                getattr(socket, "TCP_USER_TIMEOUT", None): 1000 * (_SILENCE + _PAUSE * _ASKED),
            }
            for name, value in settings.items():
                if name is not None:
                    own.setsockopt(socket.IPPROTO_TCP, name, value)


def portable(error: Exception) -> Exception:
    """The error as another process can take it: itself, or its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class RollCall:
    """Tells why a process ends, and finds out who did, through the store that all met at."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def post(self, error: BaseException) -> None:
        """Leaves word of what ends this process; the first of several words stays."""
        is_known, shortage = isinstance(error, UserError), out_of_memory(error)
        cause = {
            "rank": self._rank,
            "cause": str(error) if is_known else f"{type(error).__name__}: {error}",
            "exit_code": getattr(error, "exit_code", UserError.exit_code if shortage else 70),
        }
        # Without the store the others only see that the connection is gone.
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_CAUSE, "", json.dumps(cause))

    def explain(self, error: BaseException) -> PeerError:
        """What has ended which process, as far as anybody knows."""
        try:
            return self._explained()
        except RuntimeError:  # the store was at rank zero, or at a machine that is lost
            # Nobody can be asked who else is left: each says it.
            place, it = ("rank 0", "it") if self._rank else ("the other processes", "them")
            return PeerError(Fault(place, f"the connection to {it} is lost"), agreed=False)

    def _explained(self) -> PeerError:
        self._store.set(f"alive/{self._rank}", "yes")
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        while True:
            if self._store.check([_CAUSE]):
                found = json.loads(self._store.get(_CAUSE))
                fault = Fault(f"rank {found['rank']}", f"has ended: {found['cause']}")
                return PeerError(fault, agreed=True, exit_code=found["exit_code"])
            silent = [
                rank for rank in range(self._size) if not self._store.check([f"alive/{rank}"])
            ]
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if not silent:
            fault = Fault("the processes", "a connection between them broke, and all are there")
            return PeerError(fault, agreed=True)
        names = ", ".join(f"rank {rank}" for rank in silent)
        message = "has ended without a word: killed, out of memory, or its machine is lost"
        left = [rank for rank in range(self._size) if rank not in silent]
        return PeerError(Fault(names, message), agreed=self._rank != min(left, default=self._rank))
