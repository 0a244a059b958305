"""What begins the runs of a study: processes of this machine, or jobs of a cluster's queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workbench.spec.run import RunSpec
from workbench.study import processes
from workbench.study.machine import Share, share_machine
from workbench.track.store import Store


@dataclass(frozen=True)
class Order:
    """A run that is to be trained. `path` is its spec file; `go_on` the name of its folder, if it
    has one that is not its own; `log` is where it says what it does."""

    spec: RunSpec
    path: Path
    go_on: str | None
    threads: int
    log: Path


class Handle(Protocol):
    """A run that is being trained, or waits for it. `job` names a job of a queue."""

    @property
    def run(self) -> str:
        """The planned name."""

    @property
    def log(self) -> Path:
        """What it says."""

    @property
    def job(self) -> str | None:
        """Such as "slurm:1234_5"; None for a process."""

    def ended(self) -> int | None:
        """Its exit code (128 + n for a signal), or None while it goes on or waits."""

    def last_words(self, code: int) -> str:
        """Why it ended."""


class Launcher(Protocol):
    """Begins runs."""

    def share(
        self, specs: Sequence[RunSpec], store: Store, threads: int | None, most: int | None
    ) -> Share:
        """How many runs may go on at once, with how many threads each; see `share_machine`."""

    def start(self, orders: Sequence[Order], store: Store, lock: int) -> Iterator[Handle]:
        """Begins them. `lock` is the open file by which their study is locked.

        Raises:
            StoreError: the store cannot be written, or no process begun.
        """

    def hear(self, running: Sequence[Handle], number: int) -> bool:
        """Passes on a signal that asks to stop; whether the runs then end."""

    def stop_all(self, running: Sequence[Handle], number: int) -> None:
        """Ends what must not outlive this process."""


class Processes:
    """Processes of this machine, which end with the study."""

    def share(
        self, specs: Sequence[RunSpec], store: Store, threads: int | None, most: int | None
    ) -> Share:
        """As many as its cores and memory take."""
        return share_machine(specs, store, threads, most)

    def start(self, orders: Sequence[Order], store: Store, lock: int) -> Iterator[Handle]:
        """One after the other."""
        for one in orders:
            yield processes.start(one.spec, one.path, one.go_on, store, one.threads, one.log, lock)

    def hear(self, running: Sequence[Handle], number: int) -> bool:
        """They save and end."""
        for process in running:
            if isinstance(process, processes.Process):
                process.tell(number)
        return True

    def stop_all(self, running: Sequence[Handle], number: int) -> None:
        """All of them, at once."""
        own = [one for one in running if isinstance(one, processes.Process)]
        processes.stop_all(own, number)
