"""The UI: a page that answers, on this machine only, and no process left when it ends."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from track.tracked_runs import assert_equal_to_file, end_run, make_run, points

from workbench.errors import StoreError, UserError
from workbench.track.mlflow_store import Feed, connect
from workbench.track.store import Store
from workbench.track.ui import ui


def test_a_port_in_use_or_a_host_that_is_not_ours_is_a_clear_error(store: Store) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"in use.*{port}"):
            ui(store, port=port)
    for host, port in (("192.0.2.1", 0), ("127.0.0.1", 70000), ("no such host", 0)):
        with pytest.raises(UserError, match="cannot listen"):
            ui(store, host=host, port=port)


def test_a_store_that_cannot_be_used_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="not a directory"):
        ui(Store(tmp_path / "file"), port=0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_the_store_and_ends_without_a_trace(store: Store, number: int) -> None:
    code = f"""
import sys
from workbench.track.store import Store
from workbench.track.ui import ui
sys.exit(ui(Store({str(store.home)!r}), port=0, say=lambda text: print(text, flush=True)))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        page = process.stdout.readline().strip()
        address, _, route = page.partition("/#/")
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(page, timeout=20) as answer:
            assert b"<html" in answer.read()
        if number == signal.SIGINT:
            _push_over_http(store, address, route)
        servers = psutil.Process(process.pid).children(recursive=True)
        assert servers
        listening = [c for s in servers for c in s.net_connections() if c.status == "LISTEN"]
        assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
        process.send_signal(number)
        assert process.wait(20) == (0 if number == signal.SIGINT else 128 + number)
        deadline = time.monotonic() + 5
        while any(server.is_running() for server in servers):
            assert time.monotonic() < deadline, servers
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


def _push_over_http(store: Store, address: str, route: str) -> None:
    """A run with NaN, infinity and an empty parameter goes through MLflow's server as well."""
    target = connect(address, store, "workbench")
    view = "viewStateShareKey=workbench&workflowType=machine_learning"
    assert route == f"experiments/{target.experiment_id}/runs?{view}"
    folder, record, _ = make_run(store, "over-http", 9)
    end_run(folder, record)
    position = Feed(folder, target).push()
    assert_equal_to_file(target, folder)
    nll = dict(points(target, position.run_id)["train/nll"])
    assert math.isnan(nll[2])
    query = f"{address}/api/2.0/mlflow/experiments/get?experiment_id={target.experiment_id}"
    with urllib.request.urlopen(query, timeout=20) as answer:
        tags = json.load(answer)["experiment"]["tags"]
    assert {"key": "mlflow.experimentKind", "value": "custom_model_development"} in tags
    (view,) = (tag["value"] for tag in tags if tag["key"] == "mlflow.sharedViewState.workbench")
    assert json.loads(view)["selectedColumns"][0] == "metrics.`held_out/nll`"
    get = f"{address}/get-artifact?path=metrics.csv&run_uuid={position.run_id}"
    with urllib.request.urlopen(get, timeout=20) as answer:
        assert answer.read() == (folder / "metrics.csv").read_bytes()
