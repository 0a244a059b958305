"""`wb verify` and `wb sync`: the same losses again, and MLflow complete, each point once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from tiny_runs import tiny_spec, untracked_run
from track.tracked_runs import assert_equal_to_file

from workbench.cli import _guarded
from workbench.run import RunOutcome
from workbench.track.mlflow_store import connect, read_position
from workbench.track.store import Store

Wb = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def outcome(tmp_path: Path) -> RunOutcome:
    return untracked_run(tiny_spec(tmp_path, training={"steps": 6}), Store(tmp_path / "mlruns"))


@pytest.fixture
def wb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Wb:
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def call(*arguments: str) -> tuple[int, dict[str, Any], str]:
        words = [*arguments, "--json"]
        monkeypatch.setattr(sys, "argv", ["wb", *words])
        code = _guarded(words)
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return call


def test_the_same_run_again_is_the_same_bit_for_bit(outcome: RunOutcome, wb: Wb) -> None:
    before = {p: p.read_bytes() for p in outcome.folder.rglob("*") if p.is_file()}
    code, document, _ = wb("verify", "tiny")
    assert (code, document["verdict"]) == (0, "bit for bit")
    assert (document["steps"], document["rows"]) == (6, 7)
    assert document["first_difference"] is None
    assert {p: p.read_bytes() for p in outcome.folder.rglob("*") if p.is_file()} == before
    code, document, _ = wb("verify", "tiny", "--steps", "3")
    assert (code, document["verdict"], document["rows"]) == (0, "bit for bit", 4)


@pytest.mark.parametrize(
    ("factor", "code", "verdict"),
    [(1 + 1e-7, 0, "within tolerance"), (1 + 1e-3, 3, "parted"), (float("nan"), 3, "parted")],
)
def test_where_the_losses_part_is_named(
    outcome: RunOutcome, wb: Wb, factor: float, code: int, verdict: str
) -> None:
    path = outcome.folder / "metrics.csv"
    lines = [line.split(",") for line in path.read_text().splitlines()]
    column = lines[0].index("train/nll")
    for cells in lines[1:]:
        if int(cells[0]) >= 4:
            cells[column] = repr(float(cells[column]) * factor)
    path.write_text("\n".join(map(",".join, lines)) + "\n")
    found, document, _ = wb("verify", "tiny")
    assert (found, document["verdict"]) == (code, verdict)
    assert document["first_difference"]["step"] == 4
    assert document["first_difference"]["column"] == "train/nll"
    assert wb("verify", "tiny", "--steps", "3")[1]["verdict"] == "bit for bit"


def test_other_data_are_no_verification(tmp_path: Path, outcome: RunOutcome, wb: Wb) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(corpus.read_text().replace("cat", "cow"))
    code, document, _ = wb("verify", "tiny")
    assert code == 3
    assert "effective.data.train_sha256" in json.dumps(document)


@pytest.mark.parametrize("arguments", [("nobody",), ("tiny", "--steps", "7")])
def test_what_cannot_be_verified_is_one_clear_error(
    outcome: RunOutcome, wb: Wb, arguments: tuple[str, ...]
) -> None:
    code, document, _ = wb("verify", *arguments)
    assert code == 2
    assert document["error"]["place"] in ("run", "--steps")


class Faulty(BaseHTTPRequestHandler):
    """Answers 500 to everything."""

    def answer(self) -> None:
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_PUT = answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def faulty_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_sync_brings_mlflow_up_to_date_once(
    outcome: RunOutcome, wb: Wb, faulty_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for address in (nobody, faulty_server):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        code, document, _ = wb("sync")
        assert code == 74
        assert document["runs"]["tiny"].startswith(f"not sent: MLflow at {address}")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    for _ in range(2):
        assert wb("sync", "tiny")[:2] == (0, {"runs": {"tiny": "complete"}})
    store = Store(outcome.folder.parents[1])
    target = connect(None, store, "workbench")
    assert_equal_to_file(target, outcome.folder)
    position = read_position(outcome.folder)
    assert position is not None
    assert target.client.get_run(position.run_id).info.status == "FINISHED"
    assert len(target.client.search_runs([target.experiment_id])) == 1
    assert wb("sync", "nobody")[0] == 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """MLflow's own server, over a database of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    command += ["--artifacts-destination", str(tmp_path / "served")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while not _answers(f"{address}/health"):
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(address: str) -> bool:
    try:
        return requests.get(address, timeout=5).status_code == 200
    except requests.RequestException:
        return False


@pytest.mark.slow
def test_a_server_gets_the_run_and_standard_output_holds_the_answer_alone(
    outcome: RunOutcome, tmp_path: Path, server: str
) -> None:
    variables = {"WB_HOME": str(tmp_path / "mlruns"), "MLFLOW_TRACKING_URI": server}
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "sync", "tiny", "--json"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"runs": {"tiny": "complete"}}
    target = connect(server, Store(tmp_path / "mlruns"), "workbench")
    assert_equal_to_file(target, outcome.folder)
