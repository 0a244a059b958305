"""Streams over HTTP: a server that drops, resets or refuses brings the very documents of one that
does not, or one clear error that says where reading stood."""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from parquet_streams import three_files

from workbench.core.data import stream_files
from workbench.core.data.errors import DataError
from workbench.core.data.retry import WAITS, Patience
from workbench.core.data.stream_files import urls_source
from workbench.core.data.stream_rows import Position, Row, RowReader


class Server(ThreadingHTTPServer):
    """Serves a folder by ranges. `faults` are what the next requests meet."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.faults: list[str] = []
        self.met: list[str] = []
        self.silent = threading.Event()
        self.sent: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no concern here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: Any) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.server.folder / self.path.lstrip("/")
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault:
            self.server.met.append(fault)
        if not path.is_file() or fault in ("503", "429", "403"):
            self.send_response(int(fault or 404))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = 0, len(content) - 1
        if wanted:
            first, last = int(wanted[1]), min(int(wanted[2] or last), last)
        body = content[first : last + 1]
        if fault == "silence":
            self.server.silent.wait(5)
            fault = "reset"
        if fault == "reset" or (fault == "drop" and not with_body):
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if fault == "drop":
            body = body[: len(body) // 2]
            self.close_connection = True
        if with_body:
            self.wfile.write(body)
            name = path.name
            self.server.sent[name] = self.server.sent.get(name, 0) + len(body)
        if fault == "drop":
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    folder, _ = three_files(tmp_path / "s")
    # Small files, as if they were large: several requests for each.
    monkeypatch.setattr(stream_files, "BLOCK_BYTES", 1500)
    monkeypatch.setattr(stream_files, "SILENCE", 0.1)
    one = Server(folder)
    thread = threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield one
    one.silent.set()
    one.shutdown()
    one.server_close()


def reader(server: Server, waits: tuple[float, ...] = (0.01, 0.02, 0.03)) -> RowReader:
    urls = [f"{server.url}/{number:03d}.parquet" for number in range(3)]
    return RowReader(urls_source(urls).files, "text", Patience(waits))


def rows_of(reader: RowReader, at: Position = Position()) -> list[Row]:  # noqa: B008
    return [row for batch in reader.read(at) for row in batch]


def expected(server: Server) -> list[str]:
    return three_files(server.folder)[1]


@pytest.mark.parametrize(
    ("fault", "after"), [("drop", 1), ("drop", 6), ("reset", 0), ("503", 2), ("silence", 6)]
)
def test_a_broken_connection_brings_the_documents_of_an_unbroken_one(
    server: Server, fault: str, after: int
) -> None:
    texts = expected(server)
    server.faults = [""] * after + [fault, fault, "", fault]
    found = rows_of(reader(server))
    assert server.met == [fault] * 3
    assert [row.text for row in found] == texts
    assert [row.at for row in found[44:46]] == [Position(0, 44), Position(1, 0)]


def test_a_wait_is_said_and_grows(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.faults = ["", "", "503", "", "503"]
    with caplog.at_level(logging.WARNING):
        rows_of(reader(server))
    said = [record.getMessage() for record in caplog.records if "workbench" in record.name]
    assert len(said) == 2
    assert re.search(
        r"000\.parquet \(file 1 of 3\), row \d+: the connection failed \(.*503.*\); "
        r"attempt 2 of 4 in 0\.01 s",
        said[0],
    )
    assert said[1].endswith("attempt 3 of 4 in 0.02 s")
    assert list(WAITS) == sorted(WAITS)
    assert sum(WAITS) < 300


def test_it_gives_up_and_says_where_it_stood(server: Server) -> None:
    texts = expected(server)
    found: list[str] = []

    def read() -> None:
        for batch in reader(server).read():
            found.extend(row.text for row in batch)
            if len(found) >= 45:
                server.faults = ["503"] * 99

    with pytest.raises(DataError) as caught:
        read()
    assert found == texts[: len(found)]
    assert len(found) >= 45
    assert re.search(
        r"00\d\.parquet \(file \d of 3\), row \d+: gave up after 4 attempts: .*503",
        str(caught.value),
    )


@pytest.mark.parametrize("missing", [True, False])
def test_what_does_not_pass_is_not_waited_for(server: Server, missing: bool) -> None:
    if missing:
        (server.folder / "001.parquet").unlink()
    else:
        server.faults = ["403"] * 9
    with pytest.raises(DataError, match=r"00\d\.parquet.* the server refuses: .*(404|403|Not)"):
        rows_of(reader(server, waits=(60.0,)))


def test_reading_from_a_position_fetches_what_holds_it(server: Server) -> None:
    texts = expected(server)
    assert [row.text for row in rows_of(reader(server), Position(2, 25))] == texts[95:]
    assert set(server.sent) == {"002.parquet"}


def test_a_server_that_is_gone_is_one_clear_error(server: Server) -> None:
    one = reader(server, waits=(0.01,))
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=r"000\.parquet \(file 1 of 3\), row 1: gave up after 2"):
        rows_of(one)
