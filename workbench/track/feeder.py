"""Feeds MLflow from a run folder in a process of its own, so that training never waits for it.

MLflow takes seconds to import, seconds more to create a database, and may hang for as long as a
server does. In a thread that would hold the interpreter's lock against training; a child process
at low priority does not. It reads the files that the run writes, is told of the run's end by the
end of its standard input, and outlives the run by at most `GRACE_SECONDS`, however the run ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from workbench.track.events import Values
from workbench.track.provenance import PACKAGE, redact
from workbench.track.record import RunRecord
from workbench.track.store import Store

GRACE_SECONDS = 60.0
POLL_SECONDS = 5.0
_LONGEST_WAIT = 60.0
_NICENESS = 10
_TRIES_AT_END = 3

logger = logging.getLogger("workbench.track")


def tracking_address(uri: str | None, store: Store) -> str:
    """Where MLflow is: as given, else MLFLOW_TRACKING_URI, else the store's own database."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or store.tracking_uri


class MlflowTracker:
    """A tracker that feeds MLflow through a child process. Nothing here raises into training.

    The methods cost microseconds, but for `finish`, which waits for at most `grace_seconds`.
    """

    def __init__(
        self,
        uri: str | None,
        store: Store,
        experiment: str,
        grace_seconds: float = GRACE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._request = {
            "uri": tracking_address(uri, store),
            "home": str(store.home),
            "experiment": experiment,
            "grace_seconds": grace_seconds,
            "poll_seconds": poll_seconds,
        }
        self._grace_seconds = grace_seconds
        self._folder = Path()
        self._child: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._pending: str | None = "it has not answered"
        self._warned = False

    def start(self, record: RunRecord, folder: Path) -> None:
        """Starts the feeder."""
        self._folder = folder
        environment = dict(os.environ)
        paths = [str(PACKAGE.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["OMP_NUM_THREADS"] = "1"
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "workbench.track.feeder"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # may name credentials; what matters comes by stdout
                text=True,
                env=environment,
                # A group of its own: Ctrl-C on the terminal is for the run, which tells the feeder.
                process_group=0,
            )
            assert self._child.stdin is not None
            # By the pipe, since an argument may hold credentials and everyone sees those.
            self._child.stdin.write(json.dumps({**self._request, "folder": str(folder)}) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            self._pending = f"the process that feeds it could not be started: {error}"
            self._warn(self._pending)
            return
        self._listener = threading.Thread(
            target=self._listen, args=(self._child.stdout,), name="mlflow-feeder", daemon=True
        )
        self._listener.start()

    def log(self, values: Values) -> None:
        """Nothing to do: the feeder reads `metrics.csv`."""

    def update(self, record: RunRecord) -> None:
        """Nothing to do: the feeder reads `run_config.json`."""

    def finish(self, record: RunRecord) -> str | None:
        """Waits until MLflow has everything, at most `grace_seconds`; else says what is pending."""
        child = self._child
        if child is None:
            return self._pending
        late = False
        try:
            self._hang_up()
            child.wait(self._grace_seconds + 1.0)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            self.close()
        if late or child.returncode == -signal.SIGALRM:
            self._pending = f"it did not take everything within {self._grace_seconds:g} s"
        elif child.returncode and not self._pending:
            self._pending = f"the process that feeds it ended with {child.returncode}"
        if self._pending:
            self._warn(self._pending, again=True)
        return self._pending

    def close(self) -> None:
        """Ends the feeder now. What was not sent can be sent later."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            child.kill()
        child.wait()
        if self._listener is not None:
            self._listener.join(timeout=1.0)
        self._hang_up(child)
        if child.stdout is not None:
            child.stdout.close()

    def _hang_up(self, child: subprocess.Popen[str] | None = None) -> None:
        child = child or self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()

    def _listen(self, lines: IO[str]) -> None:
        """In a thread that sleeps until the feeder says something."""
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                message = json.loads(line)
                self._pending = message.get("pending")
                if self._pending:
                    self._warn(self._pending)

    def _warn(self, why: str, again: bool = False) -> None:
        if self._warned and not again:
            return
        self._warned = True
        where = redact(str(self._request["uri"]))
        logger.warning(
            "MLflow at %s is behind: %s. Nothing is lost: the metrics and the record are in %s",
            where,
            why,
            self._folder,
        )


def main() -> int:
    """The child process: 0 when MLflow has everything, 1 when something is pending."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    logging.disable(logging.CRITICAL)
    request = json.loads(sys.stdin.readline() or "null")
    if request is None:
        return 0
    over = _watch_the_run(float(request["grace_seconds"]))
    pending: str | None = "it has not been reached yet"
    feed: Any = None
    wait = float(request["poll_seconds"])
    failures, tries = 0, _TRIES_AT_END
    while True:
        ending = over.is_set()
        before, pending = pending, None
        try:
            if feed is None:
                feed = _open_feed(request)
            feed.push()
            failures = 0
        except Exception as error:
            pending = _reason(error)
            failures += 1
        if pending != before:
            print(json.dumps({"pending": pending}), flush=True)
        if not ending:
            over.wait(min(wait * 2 ** min(failures, 10), max(wait, _LONGEST_WAIT)))
            continue
        # A server that was away before the end is tried once more, not waited for.
        tries = 0 if failures > _TRIES_AT_END else tries - 1
        if pending is None or tries <= 0:
            return 1 if pending else 0
        time.sleep(0.5)


def _open_feed(request: dict[str, Any]) -> Any:
    from workbench.track.mlflow_store import Feed, connect

    target = connect(request["uri"], Store(request["home"]), request["experiment"])
    return Feed(Path(request["folder"]), target)


def _watch_the_run(grace_seconds: float) -> threading.Event:
    """An event that is set when standard input ends or the parent dies.

    From then on the kernel ends this process when its time is up, whatever hangs.
    """
    over, parent = threading.Event(), os.getppid()

    def watch() -> None:
        # A process forked from the run may keep the pipe open beyond the run's death.
        while os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], 1.0)
            if readable and not os.read(0, 4096):
                break
        signal.setitimer(signal.ITIMER_REAL, grace_seconds)
        over.set()

    threading.Thread(target=watch, daemon=True).start()
    return over


def _reason(error: Exception) -> str:
    """One line, without credentials."""
    lines = str(error).strip().splitlines() or [""]
    return redact(f"{type(error).__name__}: {lines[0][:300]}")


if __name__ == "__main__":
    sys.exit(main())
