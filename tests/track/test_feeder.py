"""The feeder: training does not wait for it or end with it, and it does not outlive training."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from track.tracked_runs import assert_equal_to_file, end_run, make_record, make_run, rows

from workbench.errors import StoreError, UserError
from workbench.track.feeder import (
    GRACE_SECONDS,
    MlflowTracker,
    patience,
    pause,
    send_again,
    short_reason,
)
from workbench.track.journal import Journal, columns, read_metrics
from workbench.track.mlflow_store import connect, read_position
from workbench.track.record import write_record
from workbench.track.store import Store

# A run in a process of its own: claims its folder, writes rows, and then does `then`.
RUN = """
import os, sys, time
sys.path.insert(0, {tests!r})
from track.tracked_runs import end_run, make_record, rows
from workbench.track.feeder import MlflowTracker, send_again, short_reason
from workbench.track.journal import Journal, columns
from workbench.track.record import write_record
from workbench.track.store import Store
store = Store({home!r})
record = make_record({name!r})
folder = store.create_run({name!r})
write_record(record, folder)
journal = Journal(folder / "metrics.csv", columns(["train_split", "held_out"]))
tracker = MlflowTracker(None, store, "workbench", grace_seconds=240.0, poll_seconds=0.2)
tracker.start(record, folder)
for row in rows(9):
    journal.write(row)
    tracker.log(row)
print("written", flush=True)
"""
FINISH = "end_run(folder, record)\nprint(tracker.finish(record), flush=True)"


def run_process(store: Store, name: str, then: str) -> subprocess.Popen[str]:
    code = RUN.format(tests=str(Path(__file__).parents[1]), home=str(store.home), name=name) + then
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )


def feeders(folder: Path) -> list[psutil.Process]:
    """The living feeder processes of this store's runs, by the file they have locked or not."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            environment = process.environ()
        except psutil.Error:
            continue
        if "workbench.track.feeder" in command and environment.get("WB_TEST") == str(folder):
            found.append(process)
    return found


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Marks the processes that a test starts, and looks that none is left."""
    monkeypatch.setenv("WB_TEST", str(tmp_path))
    yield tmp_path
    assert feeders(tmp_path) == []


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_run_arrives_whole_and_no_process_stays(
    mlflow_store: Store, target: Any, marked: Path
) -> None:
    folder, record, journal = make_run(mlflow_store, "fed", 9)
    tracker = MlflowTracker(None, mlflow_store, "workbench", poll_seconds=0.2)
    before = time.monotonic()
    tracker.start(record, folder)
    for _ in range(1000):
        tracker.log({"step": 1})
    assert time.monotonic() - before < 1.0
    assert len(feeders(marked)) == 1
    assert os.getpgid(feeders(marked)[0].pid) != os.getpgid(0)  # Ctrl-C is not for it
    journal.close()
    end_run(folder, record)
    assert tracker.finish(record) is None
    assert_equal_to_file(target, folder)
    assert target.client.get_run(read_position(folder).run_id).info.status == "FINISHED"


def test_a_server_that_refuses_costs_a_warning_and_nothing_else(
    store: Store, marked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    folder, record, _ = make_run(store, count=3)
    uri = f"http://ada:hunter2@127.0.0.1:{closed_port()}"
    tracker = MlflowTracker(uri, store, "workbench", grace_seconds=30.0, poll_seconds=0.2)
    before = time.monotonic()
    tracker.start(record, folder)
    tracker.log({"step": 1})
    assert time.monotonic() - before < 1.0
    end_run(folder, record)
    pending = tracker.finish(record)
    assert pending
    assert time.monotonic() - before < 32.0
    assert f"wb sync {folder.name}" in caplog.text
    assert "hunter2" not in caplog.text + pending + repr(tracker.__dict__.get("_pending"))
    assert "127.0.0.1" in caplog.text
    (warning,) = caplog.records
    assert "at http://***@127.0.0.1:" in warning.message
    assert "connection refused" in warning.message
    assert "HTTPConnectionPool" not in warning.message
    assert len(warning.message.replace(str(folder), "").replace(sys.executable, "")) < 250
    assert len(read_metrics(folder / "metrics.csv")["step"]) == 3


def test_a_long_run_is_warned_again_at_its_end(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = MlflowTracker(None, store, "workbench")
    tracker._warn("connection refused")
    tracker._warn("no answer in time")
    tracker._warn("no answer in time", ended=True)
    assert len(caplog.records) == 1
    hours = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: hours)
    tracker._warn("no answer in time")
    assert len(caplog.records) == 1
    tracker._warn("no answer in time", ended=True)
    assert len(caplog.records) == 2


def caught(url: str) -> Exception:
    """What MLflow's client raises, as MLflow wraps it."""
    try:
        try:
            requests.get(url, timeout=0.2)
        except Exception as error:
            raise RuntimeError(f"API request failed with exception {error}")  # noqa: B904
    except RuntimeError as error:
        return error
    raise AssertionError


def test_the_reason_of_a_failure_is_its_innermost_cause(silent_server: str) -> None:
    refused = caught(f"http://ada:hunter2@127.0.0.1:{closed_port()}")
    assert short_reason(refused) == "connection refused"
    assert short_reason(caught(silent_server)) == "no answer in time"
    assert "name" in short_reason(caught("http://no-such-host.invalid"))
    assert short_reason(StoreError.at("/x", "full")) == "/x: full"
    assert short_reason(ValueError()) == "ValueError"
    long = short_reason(ValueError("http://ada:hunter2@host " + "words and more " * 50))
    assert long.endswith(("words ...", "and ...", "more ..."))
    assert len(long) <= 100
    assert "hunter2" not in long


def test_what_was_not_sent_can_be_sent_later(
    mlflow_store: Store,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, record, journal = make_run(mlflow_store, "later", 5)
    journal.close()
    end_run(folder, record)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:hunter2@127.0.0.1:{closed_port()}")
    assert send_again(folder) == 74
    said = capsys.readouterr().err
    assert "connection refused" in said
    assert "hunter2" not in said
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert send_again(folder) == 0
    assert_equal_to_file(target, folder)
    assert send_again(folder.parent / "nothing") == 2


def test_a_server_that_hangs_is_left_after_the_time_allowed(
    store: Store, marked: Path, silent_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, record, _ = make_run(store, count=3)
    tracker = MlflowTracker(silent_server, store, "workbench", grace_seconds=2.0)
    tracker.start(record, folder)
    time.sleep(0.5)
    end_run(folder, record)
    before = time.monotonic()
    pending = tracker.finish(record)
    assert 1.5 < time.monotonic() - before < 6.0
    assert pending
    assert "2 s" in pending
    assert f"wb sync {folder.name}" in caplog.text


def test_a_feeder_that_cannot_start_or_is_killed_does_not_end_the_run(
    store: Store, marked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record, _ = make_run(store, count=1)
    tracker = MlflowTracker(None, store, "workbench")
    tracker.start(record, folder)
    feeders(marked)[0].kill()
    tracker.log({"step": 1})
    assert tracker.finish(record)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    tracker = MlflowTracker(None, store, "workbench")
    tracker.start(record, folder)
    tracker.log({"step": 2})
    assert "could not be started" in str(tracker.finish(record))
    tracker.close()


def test_a_run_killed_outright_is_closed_as_killed_by_its_feeder(
    mlflow_store: Store, target: Any, marked: Path
) -> None:
    process = run_process(mlflow_store, "murdered", "time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while feeders(marked):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    folder = mlflow_store.runs / "murdered"
    assert_equal_to_file(target, folder)
    assert target.client.get_run(read_position(folder).run_id).info.status == "KILLED"
    assert mlflow_store.find_run("murdered").died


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_runs_that_start_at_once_on_no_store_are_all_complete(
    store: Store, marked: Path, count: int
) -> None:
    names = [f"run-{index}" for index in range(count)]
    processes = [run_process(store, name, FINISH) for name in names]
    for process in processes:
        assert process.communicate(timeout=300)[0] == "written\nNone\n"
    target = connect(None, store, "workbench")
    for name in names:
        assert_equal_to_file(target, store.runs / name)
    found = target.client.search_runs([target.experiment_id])
    assert sorted(run.info.run_name for run in found) == names
    assert {run.info.status for run in found} == {"FINISHED"}
    assert len(target.client.search_experiments()) == 2  # MLflow's own default, and ours


def test_how_long_a_run_waits_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WB_MLFLOW_WAIT", "2.5")
    assert patience() == 2.5
    for wrong in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("WB_MLFLOW_WAIT", wrong)
        with pytest.raises(UserError, match=f"WB_MLFLOW_WAIT.*{wrong}"):
            patience()
    monkeypatch.delenv("WB_MLFLOW_WAIT")
    assert patience() == GRACE_SECONDS


def test_a_run_is_looked_at_often_at_first_and_never_left_alone_for_long() -> None:
    assert [pause(5.0, age, 0) for age in (0, 40, 100, 250, 1e9)] == [5, 5, 10, 25, 30]
    assert [pause(5.0, 0, failures) for failures in (1, 2, 3, 4, 99)] == [10, 20, 40, 60, 60]
    assert max(pause(5.0, age, n) for age in (0, 1e9) for n in range(20)) == 60


@pytest.mark.slow  # of a whole run, it is tested with the runs
def test_ctrl_c_ends_the_wait_and_the_feeder_goes_on(
    mlflow_store: Store, target: Any, marked: Path
) -> None:
    folder, record, journal = make_run(mlflow_store, "impatient", 9)
    tracker = MlflowTracker(None, mlflow_store, "workbench", poll_seconds=0.2)
    tracker.start(record, folder)
    journal.close()
    end_run(folder, record)
    said: list[str] = []
    (feeder,) = feeders(marked)
    feeder.suspend()  # so that it cannot be done before the wait begins
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        pending = tracker.finish(record, said.append)
    finally:
        timer.cancel()
        feeder.resume()
    assert "background" in str(pending)
    assert ["waiting" in line for line in said] == [True, False]
    feeder.wait(timeout=120)
    assert_equal_to_file(target, folder)
    assert target.client.get_run(read_position(folder).run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_following_a_run_costs_it_less_than_a_hundredth(store: Store, marked: Path) -> None:
    """Beyond its start: 4 rows a second, each as the run writes it, against two cores."""
    record = make_record("cost")
    folder = store.create_run("cost")
    write_record(record, folder)
    journal = Journal(folder / "metrics.csv", columns(["train_split", "held_out"]))
    tracker = MlflowTracker(None, store, "workbench")
    tracker.start(record, folder)
    (feeder,) = feeders(marked)
    began, inside, start = time.monotonic(), 0.0, (0.0, 0.0)
    for count, row in enumerate(rows(260), 1):
        journal.write(row)
        before = time.perf_counter()
        tracker.log(row)
        inside += time.perf_counter() - before
        time.sleep(0.25)
        if count == 120:
            start = time.monotonic() - began, sum(feeder.cpu_times()[:2])
    seconds = time.monotonic() - began - start[0]
    used = sum(feeder.cpu_times()[:2]) - start[1]
    tracker.close()
    assert used / (2 * seconds) < 0.01
    assert inside / count < 1e-4  # of a row, in the process that trains
