"""Runs MLflow's own UI on a store, and leaves no process behind when it ends."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import IO, Any

from workbench.errors import StoreError, UserError
from workbench.track.mlflow_fields import VIEW, experiment_tags, safe_experiment
from workbench.track.mlflow_store import store_database
from workbench.track.store import Store

LOOPBACK = "127.0.0.1"
PORT = 5000
_START_SECONDS = 120.0
_STOP_SECONDS = 5.0


def ui(
    store: Store,
    host: str = LOOPBACK,
    port: int | None = None,
    experiment: str = "workbench",
    say: Callable[[str], None] = print,
) -> int:
    """Serves the store until Ctrl-C or SIGTERM. `port` None takes 5000 or the next free one, 0 any.

    Returns:
        The exit code: 0 after Ctrl-C, 128 + n after another signal n.

    Raises:
        UserError: the host or the port cannot be used.
        StoreError: the store cannot be read, or MLflow does not start on it.
    """
    port = _choose_port(host, port)
    near = LOOPBACK if host in ("0.0.0.0", "", "::") else host
    address = f"http://{f'[{near}]' if ':' in near else near}:{port}"
    with tempfile.TemporaryFile() as log, _signals() as stopped:
        server: subprocess.Popen[bytes] | None = None
        try:
            with store_database(store):
                server = _start(store, host, port, log)
                _wait_until_it_answers(server, address, log)
                experiment_id = _experiment_id(address, store, experiment)
            view = f"viewStateShareKey={VIEW}&workflowType=machine_learning"
            say(f"{address}/#/experiments/{experiment_id}/runs?{view}")
            if not _is_loopback(host):
                say(f"Listening on {host}: whoever reaches this machine can read and change runs")
            say("Ctrl-C ends it")
            server.wait()
            raise _failed(f"MLflow ended with {server.returncode}", log)
        except KeyboardInterrupt:
            return 0 if stopped in ([], [signal.SIGINT]) else 128 + stopped[0]
        finally:
            if server is not None:
                _stop(server)


def _start(store: Store, host: str, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    artifacts = store.artifacts.as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--backend-store-uri", store.tracking_uri]
    command += ["--default-artifact-root", artifacts, "--artifacts-destination", artifacts]
    command += ["--host", host, "--port", str(port)]
    environment = os.environ | {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        cwd=store.home,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the whole group
    )


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_SECONDS)


def _wait_until_it_answers(server: subprocess.Popen[bytes], address: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise _failed(f"MLflow ended with {server.returncode}", log)
        with contextlib.suppress(OSError), urllib.request.urlopen(address + "/health", timeout=2):
            return
        time.sleep(0.2)
    raise _failed(f"MLflow did not answer at {address} within {_START_SECONDS:g} s", log)


def _experiment_id(address: str, store: Store, name: str) -> str:
    """The id of the experiment, made and marked as model training where needed."""
    key = safe_experiment(name)
    query = urllib.parse.urlencode({"experiment_name": key})
    try:
        found = _call(address, f"experiments/get-by-name?{query}")["experiment"]
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise StoreError.at(
                address, f"MLflow refuses to name its experiments: {error}"
            ) from None
        tags = [{"key": tag, "value": value} for tag, value in experiment_tags(name).items()]
        body = {"name": key, "artifact_location": store.artifacts.as_uri(), "tags": tags}
        return str(_call(address, "experiments/create", body)["experiment_id"])
    known = {tag["key"] for tag in found.get("tags", [])}
    for tag, value in experiment_tags(name).items():
        if tag not in known:
            body = {"experiment_id": found["experiment_id"], "key": tag, "value": value}
            _call(address, "experiments/set-experiment-tag", body)
    return str(found["experiment_id"])


def _call(address: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _choose_port(host: str, port: int | None) -> int:
    """A port that is free now: the one asked for, or one of those from 5000 on."""
    for candidate in (port,) if port is not None else range(PORT, PORT + 20):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, candidate))
                return int(trial.getsockname()[1])
            except (OSError, OverflowError) as error:
                fault = error
    reason = (getattr(fault, "strerror", None) or str(fault)).lower()
    if port is None:
        raise UserError.at("port", f"none from {PORT} to {PORT + 19} can be used: {reason}")
    raise UserError.at("port", f"cannot listen on {host}: {reason}", port, "a free port, 0 for any")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _failed(why: str, log: IO[bytes]) -> StoreError:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    last = f"; its last words: {lines[-1].strip()}" if lines else ""
    return StoreError(*UserError.at("wb ui", why + last).faults)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP end the UI like Ctrl-C does; the list then holds which it was."""
    stopped: list[int] = []

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
