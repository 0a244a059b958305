"""A server over PostgreSQL: twelve runs at once, restarted meanwhile; all of it reads back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from many_runs import specs
from mlflow_servers import Server
from postgres_servers import Postgres, programs
from track.tracked_runs import assert_equal_to_file

from workbench.compare import compare_runs
from workbench.track.feeder import send_run
from workbench.track.mlflow_store import connect, read_position
from workbench.track.server_runs import find_run, other_runs
from workbench.track.store import Store

RUNS, STEPS = 12, 200
SECONDS = 900.0


@pytest.mark.slow
def test_twelve_runs_at_once_while_the_server_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg2", reason="the extra `postgres` is not installed")
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with Postgres() as database, Server(tmp_path / "server", database.uri, workers=2) as server:
        command = [sys.executable, str(Path(__file__).parents[1] / "many_runs.py")]
        command += [str(tmp_path), server.address, str(RUNS), str(STEPS)]
        with (tmp_path / "log.txt").open("wb") as log:
            training = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + SECONDS
        try:
            # In the middle of it: some rows have arrived, and others have not.
            while int(database.query("select count(distinct run_uuid) from metrics")) < 6:
                assert training.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)
            server.stop()
            before = int(database.query("select count(*) from metrics"))
            time.sleep(3)
            server.start()
            assert training.wait(deadline - time.monotonic()) == 0
        finally:
            training.kill()
            training.wait()

        store = Store(tmp_path / "mlruns")
        planned = specs(tmp_path, server.address, RUNS, STEPS)
        folders = {spec.name: store.path_of(spec.name) for spec in planned}
        for folder in folders.values():  # what was not sent in time is sent now
            assert send_run(folder) is None
        target = connect(server.address, store, "many")
        for folder in folders.values():
            assert_equal_to_file(target, folder)
            position = read_position(folder)
            assert position
            assert target.client.get_run(position.run_id).info.status == "FINISHED"
            assert target.client.get_logged_model(*position.models.values()).source_run_id
        assert int(database.query("select count(*) from metrics")) > before  # it was midway
        assert int(database.query("select count(*) from runs")) == RUNS  # and none is there twice

        # From a second, empty store the server alone gives the same comparisons.
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        second = Store(tmp_path / "second")
        entries, faults = other_runs(second, [])
        assert not faults
        assert {entry.name for entry in entries} == set(folders)
        for seed in range(RUNS // 2):
            names = f"routed-{seed}", f"dense-{seed}"
            fetched = [find_run(second, name, whole=True).folder for name in names]
            there = compare_runs(*fetched, treatment=["model"])
            own = compare_runs(*(folders[name] for name in names), treatment=["model"])
            assert there.verdict != "refused"
            assert there.to_json() == own.to_json()
