"""A server that answers as the Hugging Face hub does for one data set at one commit."""

from __future__ import annotations

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "some/corpus"
REVISION = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/*.parquet
---
"""
_API = f"/api/datasets/{NAME}"


class Hub(ThreadingHTTPServer):
    """Serves the files below a folder; every `broken`-th answer with a part is cut."""

    daemon_threads = True

    def __init__(self, folder: Path, broken: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        (folder / "README.md").write_text(CARD)
        self.folder, self.broken, self.answers, self.cut = folder, broken, 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no concern here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path in (_API, f"{_API}/revision/{REVISION}"):
            names = [{"rfilename": name} for name in self._names(self.server.folder, True)]
            self._send_json({"id": NAME, "sha": REVISION, "siblings": names, "tags": []})
        elif found := re.fullmatch(f"{_API}/tree/{REVISION}/?(.*)", path):
            folder = self.server.folder / found[1]
            names = self._names(folder, "recursive=true" in self.path.lower())
            self._send_json([self._entry(name) for name in names])
        elif found := re.fullmatch(f"/datasets/{NAME}/resolve/{REVISION}/(.*)", path):
            self._send_file(self.server.folder / found[1])
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def _names(self, folder: Path, below: bool) -> list[str]:
        paths = folder.rglob("*") if below else folder.iterdir()
        return sorted(path.relative_to(self.server.folder).as_posix() for path in paths)

    def _entry(self, name: str) -> dict[str, Any]:
        path = self.server.folder / name
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "1" * 40}
        return {"type": "file", "path": name, "oid": "0" * 40, "size": path.stat().st_size}

    def _send_json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{"a" * 40}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, content, headers)
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.server.answers += 1
        is_cut = self.server.broken and self.server.answers % self.server.broken == 0
        self._send(206, content[first : last + 1], headers, bool(is_cut))

    def _send(self, code: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.server.cut += 1
            self.close_connection = True
