"""Feeds MLflow from a run folder in a process of its own, so that training never waits for it.

MLflow takes seconds to import, seconds more to create a database, and may hang for as long as a
server does. In a thread that would hold the interpreter's lock against training; a child process
at low priority does not. It reads the files that the run writes, is told of the run's end by the
end of its standard input, and outlives the run by at most `GRACE_SECONDS`, however the run ends.

`python -m workbench.track.feeder RUN_FOLDER` sends later what could not be sent then.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import shlex
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from workbench.errors import StoreError, UserError, reason_of
from workbench.track.events import Say, Values, never, silent
from workbench.track.provenance import PACKAGE, redact
from workbench.track.record import RunRecord, read_record
from workbench.track.store import Store, is_locked

GRACE_SECONDS = 60.0
POLL_SECONDS = 5.0
# Every look costs processor time, so a run is looked at again after a tenth of its age, between one
# and so many times the seconds above.
_AGE_SHARE = 0.1
LONGEST_POLLS = 6
_LONGEST_WAIT = 60.0
_UNNOTICED_SECONDS = 1.0
_HURRY_SECONDS = 0.1
_NICENESS = 10
_TRIES_AT_END = 3
_LONGEST_REASON = 100
# A warning that is younger than this is not said again at the end of a run.
_WARN_AGAIN_SECONDS = 60.0

logger = logging.getLogger("workbench.track")


def tracking_address(uri: str | None, store: Store) -> str:
    """Where MLflow is: as given, else MLFLOW_TRACKING_URI, else the store's own database."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or store.tracking_uri


def patience() -> float:
    """Seconds that a run waits for MLflow at its end: WB_MLFLOW_WAIT, else `GRACE_SECONDS`.

    Raises:
        UserError: the variable is not a number of seconds.
    """
    given = os.environ.get("WB_MLFLOW_WAIT")
    if given is None:
        return GRACE_SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        message = "how long a run waits for MLflow at its end"
        raise UserError.at("WB_MLFLOW_WAIT", message, given, "a number of seconds")
    return seconds


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
        self._warned: float | None = None

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
            self._pending = f"the process that feeds it could not be started: {reason_of(error)}"
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

    def finish(
        self, record: RunRecord, say: Say = silent, hurried: Callable[[], bool] = never
    ) -> str | None:
        """Waits until MLflow has everything, at most `grace_seconds`; else says what is pending.

        `say` is told of a wait that one notices. Who is `hurried`, or presses Ctrl-C, ends the wait
        and nothing else: the feeder goes on by itself for the rest of its time.
        """
        child = self._child
        if child is None:
            return self._pending
        late = False
        try:
            self._hang_up()
            self._wait(child, say, hurried)
        except subprocess.TimeoutExpired:
            late = True
        except KeyboardInterrupt:
            self._child = None
            say(f"MLflow is fed in the background, for at most {self._grace_seconds:g} s")
            return "a process in the background is feeding it"
        finally:
            self.close()
        if late or child.returncode == -signal.SIGALRM:
            self._pending = f"it did not take everything within {self._grace_seconds:g} s"
        elif child.returncode and not self._pending:
            self._pending = f"the process that feeds it ended with {child.returncode}"
        if self._pending:
            self._warn(self._pending, ended=True)
        return self._pending

    def _wait(self, child: subprocess.Popen[str], say: Say, hurried: Callable[[], bool]) -> None:
        began = time.monotonic()
        is_told = False
        while not hurried():
            waited = time.monotonic() - began
            if not is_told and waited >= min(_UNNOTICED_SECONDS, self._grace_seconds):
                say("waiting for MLflow to take the rest of the run (Ctrl-C: do not wait)")
                is_told = True
            try:
                child.wait(_HURRY_SECONDS)
            except subprocess.TimeoutExpired:
                if waited > self._grace_seconds + _UNNOTICED_SECONDS:
                    raise
            else:
                return
        raise KeyboardInterrupt

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

    def _warn(self, why: str, ended: bool = False) -> None:
        """One short line: at the first trouble, and at the end where that is long ago."""
        now = time.monotonic()
        if self._warned is not None and not (ended and now > self._warned + _WARN_AGAIN_SECONDS):
            return
        self._warned = now
        logger.warning(
            "MLflow at %s does not have all of this run: %s. Nothing is lost; what is not sent "
            "before the run ends can be sent later: %s",
            redact(str(self._request["uri"])),
            why,
            shlex.join(["wb", "sync", self._folder.name]),
        )


def send_again(folder: Path) -> int:
    """Sends a run to MLflow, at MLFLOW_TRACKING_URI or where its record says; the exit code."""
    try:
        reason = send_run(folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if reason:
        print(f"error: {reason}", file=sys.stderr)
    return StoreError.exit_code if reason else 0


def send_run(folder: Path) -> str | None:
    """Sends MLflow what it does not have of a run; returns why it did not take it.

    Raises:
        UserError: there is no readable record.
    """
    record = read_record(folder)
    store = Store(folder.resolve().parents[1])
    tracking = record.spec.get("tracking", {})
    # A recorded address lacks its credentials, so that of the environment goes first.
    uri = os.environ.get("MLFLOW_TRACKING_URI") or tracking.get("uri")
    request = {"uri": uri, "home": str(store.home), "folder": str(folder)}
    request["experiment"] = tracking.get("experiment", "workbench")
    try:
        _open_feed(request).push()
    except Exception as error:
        where = redact(tracking_address(uri, store))
        return f"MLflow at {where} did not take it: {short_reason(error)}"
    return None


def main() -> int:
    """The child process: 0 when MLflow has everything, 1 when something is pending."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    logging.disable(logging.CRITICAL)
    request = json.loads(sys.stdin.readline() or "null")
    if request is None:
        return 0
    parent = os.getppid()
    over = _watch_the_run(float(request["grace_seconds"]))
    pending: str | None = "it has not been reached yet"
    feed: Any = None
    poll, began = float(request["poll_seconds"]), time.monotonic()
    failures, tries = 0, _TRIES_AT_END
    while True:
        ending = over.is_set()
        if ending and os.getppid() != parent and is_locked(Path(request["folder"])):
            return 1  # the run goes on in another process, which has a feeder of its own
        before, pending = pending, None
        try:
            if feed is None:
                feed = _open_feed(request)
                gc.freeze()  # no search for garbage among a million objects of MLflow's imports
            feed.push()
            failures = 0
        except Exception as error:
            pending = short_reason(error)
            failures += 1
        if pending != before:
            with contextlib.suppress(OSError):  # a run that did not wait does not listen either
                print(json.dumps({"pending": pending}), flush=True)
        if not ending:
            over.wait(pause(poll, time.monotonic() - began, failures))
            continue
        # A server that was away before the end is tried once more, not waited for.
        tries = 0 if failures > _TRIES_AT_END else tries - 1
        if pending is None or tries <= 0:
            return 1 if pending else 0
        time.sleep(0.5)


def pause(poll: float, age: float, failures: int) -> float:
    """Seconds until a run that has gone on for `age` is looked at again, after so many failures of
    a server in turn."""
    wait = min(max(poll, age * _AGE_SHARE), poll * LONGEST_POLLS)
    return min(wait * 2.0 ** min(failures, 10), max(wait, _LONGEST_WAIT))


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


def short_reason(error: BaseException) -> str:
    """The cause of an error in a few words, without credentials.

    What a server's client raises is a chain of errors around errors; the innermost one knows.
    """
    for inner in reversed(list(_chain(error))):
        if isinstance(inner, UserError):
            return redact(f"{inner.faults[0].place}: {inner.faults[0].message}")
        if isinstance(inner, TimeoutError) and "timed out" in str(inner):
            return "no answer in time"
        if isinstance(inner, OSError) and inner.strerror:
            return _shortened(reason_of(inner))
        if isinstance(inner, sqlite3.Error):
            return _shortened(str(inner))
    first = str(error).strip().partition("\n")[0]
    return _shortened(": ".join(filter(None, (type(error).__name__, first))))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, then the errors that it came of, each once."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        yield inner
        # urllib3 keeps the last of several tries in `reason`.
        reason = getattr(inner, "reason", None)
        inner = inner.__cause__ or inner.__context__ or reason
        if not isinstance(inner, BaseException):
            return


def _shortened(text: str) -> str:
    """Without credentials, and cut at a blank where it is long."""
    return textwrap.shorten(redact(text), _LONGEST_REASON, placeholder=" ...")


if __name__ == "__main__":
    sys.exit(send_again(Path(sys.argv[1])) if len(sys.argv) > 1 else main())
