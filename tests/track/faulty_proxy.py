"""A server before another one, that passes requests on or fails in the ways in which servers do."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from workbench.track.mlflow_store import store_database
from workbench.track.store import Store

Mode = Literal["ok", "gone", "hang", "500", "429", "lost", "cut"]
"""`gone`: nobody listens. `hang`: nothing is answered. `lost`: the request is carried out, and the
connection reset before the answer. `cut`: reset in the middle of the request."""


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """HOST:PORT of an MLflow server of its own."""
    store = Store(folder / "server")
    with store_database(store), socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Artifacts go through the server, so that they can be lost on the way.
    places = ["--artifacts-destination", str(store.artifacts)]
    places += ["--default-artifact-root", "mlflow-artifacts:/", "--serve-artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--backend-store-uri", store.tracking_uri, *places],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class FaultyProxy:
    """Listens on one port of this machine all along, whatever it does with what comes."""

    def __init__(self, behind: str, mode: Mode = "ok", only: str = "") -> None:
        """`behind` is HOST:PORT; only requests whose path has `only` in it are failed."""
        self.behind, self.mode, self.only = behind, mode, only
        self.counts: dict[str, int] = {}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._server: ThreadingHTTPServer | None = None
        self.set(mode)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def set(self, mode: Mode) -> None:
        """From now on it does this."""
        self.mode = mode
        if mode == "gone":
            self.close()
        elif self._server is None:
            self._server = _Server(("127.0.0.1", self.port), _handler(self))
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Nobody listens any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True


def _handler(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            mode = proxy.mode if proxy.only in self.path else "ok"
            proxy.counts[mode] = proxy.counts.get(mode, 0) + 1
            if mode == "hang":
                while proxy.mode == "hang":
                    time.sleep(0.02)
                return self.reset()
            if mode == "cut":
                self.rfile.read(1)
                return self.reset()
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if mode in ("500", "429"):
                self.send_response(int(mode))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            behind = http.client.HTTPConnection(proxy.behind, timeout=60)
            try:
                headers = {key: value for key, value in self.headers.items() if key != "Host"}
                behind.request(self.command, self.path, body or None, headers)
                found = behind.getresponse()
                content = found.read()
            finally:
                behind.close()
            if mode == "lost":
                return self.reset()
            self.send_response(found.status)
            for key, value in found.getheaders():
                if key.lower() in ("content-type", "content-disposition"):
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)
            return None

        def reset(self) -> None:
            """Ends the connection as a machine does that goes down."""
            self.close_connection = True
            linger = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    return Handler
