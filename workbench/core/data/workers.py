"""Work spread over processes, its results in order, with a bounded number of items in flight.

Processes, not threads: only the merging inside tiktoken runs outside the interpreter lock; hashing,
counting words and packing ids do not. They are forked where that is safe, so that a tokenizer that
is loaded already is shared and no process has to read it again (that took two seconds each).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, TypeVar

from workbench.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_FLIGHT = 2  # items per process, so that none waits for the next one


class WorkerDiedError(UserError):
    """A worker process was ended from outside."""

    exit_code = 70


class Workers:
    """A pool of `processes`, or this very process where that is 1; a context manager."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        if self._processes > 1:
            method = "fork" if sys.platform.startswith("linux") else "spawn"
            context = multiprocessing.get_context(method)
            self._pool = ProcessPoolExecutor(self._processes, context, _begin)
            # Started now, while this process has no other thread; not at the first item.
            with self._naming_deaths():
                self._submit(os.getpid).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """`call` of each item, in the order of the items. `items` is read as results are taken.

        Raises:
            WorkerDiedError: a process was killed.
            What `call` or the items raise.
        """
        if self._pool is None:
            yield from map(call, items)
            return
        pending: deque[Future[Result]] = deque()
        with self._naming_deaths():
            for item in items:
                pending.append(self._submit(call, item))
                if len(pending) >= IN_FLIGHT * self._processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    @contextmanager
    def _naming_deaths(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as error:
            message = "a worker process was killed (was the memory full?)"
            raise WorkerDiedError.at(f"{self._processes} processes", message) from error

    def _submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        assert self._pool is not None
        with _no_interrupts():  # a process may be started here
            return self._pool.submit(call, *arguments)


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """A process started meanwhile never sees a Ctrl-C (the terminal sends it to all of them); this
    one sees it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """In a new worker: leave Ctrl-C to the parent, and end with it however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # not the handlers of a command
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
