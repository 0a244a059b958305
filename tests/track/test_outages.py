"""A real MLflow server that fails in every way while a run goes on: nothing is lost or doubled."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from track.faulty_proxy import FaultyProxy, Mode, mlflow_server
from track.tracked_runs import (
    assert_equal_to_file,
    end_run,
    make_record,
    make_run,
    rows,
    track_spell,
)

from workbench.track.feeder import MlflowTracker, send_run
from workbench.track.journal import read_metrics
from workbench.track.mlflow_fields import params_of
from workbench.track.mlflow_store import connect, read_position
from workbench.track.record import RunRecord
from workbench.track.server_files import FILES
from workbench.track.store import Store


def test_what_waited_during_the_run_is_sent_at_its_end(
    mlflow_store: Store,
    target: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A folder stands in the database's place until the run is about to end."""
    caplog.set_level(logging.WARNING)
    store = Store(tmp_path / "mlruns")
    away = tmp_path / "away" / "mlflow.db"
    away.mkdir(parents=True)
    folder, record, journal = make_run(store, "waited", 5)
    tracker = MlflowTracker(f"sqlite:///{away}", store, "workbench", poll_seconds=0.2)
    tracker.start(record, folder)
    deadline = time.monotonic() + 60
    while not caplog.records:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "does not have all of this run" in caplog.text
    journal.write(rows(1, first=5)[0])
    away.rmdir()
    shutil.copyfile(mlflow_store.database, away)
    journal.close()
    end_run(folder, record)
    assert tracker.finish(record) is None
    assert len(caplog.records) == 1
    found = connect(f"sqlite:///{away}", store, "workbench")
    assert_equal_to_file(found, folder)
    assert found.client.get_run(read_position(folder).run_id).info.status == "FINISHED"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of an MLflow server of its own."""
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    for name in ("TIMEOUT", "MAX_RETRIES"):  # of the client, in seconds and times
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")
    found = FaultyProxy(server)
    yield found
    found.set("gone")


def assert_there_once(server: str, store: Store, folder: Path, record: RunRecord) -> None:
    """The server has the whole run, and one run: read back from it, not from our notes."""
    target = connect(f"http://{server}", store, "workbench")
    query = f"tags.`workbench.run_id` = '{record.id}'"
    (run,) = target.client.search_runs([target.experiment_id], query)
    position = read_position(folder)
    assert position is not None
    assert run.info.run_id == position.run_id
    assert run.info.status == record.status
    assert run.data.params == params_of(record)
    assert len(run.inputs.dataset_inputs) == 3
    assert_equal_to_file(target, folder)
    names = {one.path for one in target.client.list_artifacts(position.run_id)}
    assert names == {"spec.yaml", "run_config.json", "metrics.csv", FILES}
    for name in ("run_config.json", "metrics.csv"):
        got = Path(target.client.download_artifacts(position.run_id, name))
        assert got.read_bytes() == (folder / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_over_every_fault_of_a_server_arrives_once(
    server: str,
    proxy: FaultyProxy,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    seed: int,
) -> None:
    """The run goes on at full speed, warns once, and the rest is sent when it has ended."""
    import random

    caplog.set_level(logging.WARNING)
    modes: list[Mode] = ["hang", "500", "429", "lost", "cut", "gone"]
    random.Random(seed).shuffle(modes)
    proxy.set("gone" if seed else "ok")
    folder, record, journal = make_run(store, f"outages-{seed}", 3, make_record(f"outages-{seed}"))
    tracker = MlflowTracker(proxy.address, store, "workbench", 60.0, poll_seconds=0.1)
    tracker.start(record, folder)
    slowest, step = 0.0, 3
    for mode in [*modes, *modes]:
        for now in ("ok", mode):
            slowest = max(slowest, track_spell(proxy, now, journal, tracker, step, 0.15))
            step += 8
    journal.close()
    end_run(folder, record)
    assert slowest < 0.05
    proxy.set("ok")
    pending = tracker.finish(record)
    if pending is not None:
        assert "wb sync" in caplog.text
        assert send_run_to(proxy.address, folder) is None
    assert len(read_metrics(folder / "metrics.csv")["step"]) == step
    assert_there_once(server, store, folder, record)
    assert len([one for one in caplog.records if "does not have all" in one.message]) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gone", "hang", "500", "429", "lost", "cut"])
def test_a_server_that_is_away_at_the_end_is_brought_up_to_date_by_sync(
    server: str,
    proxy: FaultyProxy,
    store: Store,
    mode: Mode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"late-{mode}"
    folder, record, journal = make_run(store, name, 4, make_record(name))
    tracker = MlflowTracker(proxy.address, store, "workbench", 6.0, poll_seconds=0.1)
    tracker.start(record, folder)
    deadline = time.monotonic() + 60
    while (position := read_position(folder)) is None or position.last_step < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    proxy.set(mode)
    for row in rows(5, first=4):
        journal.write(row)
    journal.close()
    end_run(folder, record)
    before = time.monotonic()
    pending = tracker.finish(record)
    assert time.monotonic() - before < 9.0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.address)
    monkeypatch.setenv("WB_HOME", str(store.home))
    if pending is not None:  # where answers are lost, each try brings a part
        if mode != "lost":
            assert wb_sync(name) == (74, "not sent")
        proxy.set("ok")
        assert wb_sync(name) == (0, "complete")
    proxy.set("ok")
    assert wb_sync(name) == (0, "complete")
    assert_there_once(server, store, folder, record)


def wb_sync(name: str) -> tuple[int, str]:
    """`wb sync` in a process of its own: its exit code, and what it says of the run."""
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "sync", name, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)["runs"][name].partition(":")[0]


@pytest.mark.slow
def test_a_server_that_dies_during_the_last_upload_gets_the_artifacts_later(
    server: str, proxy: FaultyProxy, store: Store
) -> None:
    proxy.only, name = "mlflow-artifacts", "upload"
    folder, record, journal = make_run(store, name, 3, make_record(name))
    journal.close()
    end_run(folder, record)
    tracker = MlflowTracker(proxy.address, store, "workbench", 60.0, poll_seconds=0.1)
    proxy.set("cut")
    tracker.start(record, folder)
    assert tracker.finish(record) is not None
    target = connect(f"http://{server}", store, "workbench")
    position = read_position(folder)
    assert position is not None
    run = target.client.get_run(position.run_id)
    assert run.info.status == "FINISHED"  # though its artifacts are missing
    assert_equal_to_file(target, folder)
    proxy.set("ok")
    assert send_run_to(proxy.address, folder) is None
    assert_there_once(server, store, folder, record)


def send_run_to(address: str, folder: Path) -> str | None:
    """`send_run` where the environment says this address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", address)
        return send_run(folder)
