"""A server before another one, that passes requests on or fails in the ways in which servers do."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Mode = Literal["ok", "gone", "hang", "500", "429", "lost", "cut"]
"""`gone`: nobody listens. `hang`: nothing is answered. `lost`: the request is carried out, and the
connection reset before the answer. `cut`: reset in the middle of the request."""


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
