"""A real PostgreSQL on loopback for tests, from the system's packages; nothing of it is left."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mlflow_servers import free_port

# Debian keeps the programs of each version in a folder of its own, out of the way.
_FOLDERS = "/usr/lib/postgresql/*/bin"
_USER, _NAME = "mlflow", "mlflow"


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`; None: they are not installed."""
    found = sorted(Path("/").glob(f"{_FOLDERS[1:]}/initdb"), key=lambda p: float(p.parts[-3]))
    if found:
        return found[-1].parent
    there = shutil.which("initdb")
    return Path(there).resolve().parent if there else None


class Postgres:
    """A database server of its own, with an empty database for MLflow."""

    def __init__(self) -> None:
        folder = programs()
        assert folder is not None, "PostgreSQL is not installed: apt-get install postgresql"
        self._bin = folder
        # The server refuses to run as root, and its user must reach the folder.
        self._as: dict[str, Any] = {}
        self._home = Path(tempfile.mkdtemp(prefix="wb-postgres-"))
        if os.geteuid() == 0:
            owner = pwd.getpwnam("postgres" if _has_user("postgres") else "nobody")
            self._as = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
            os.chown(self._home, owner.pw_uid, owner.pw_gid)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """The address for MLflow's server; without its driver SQLAlchemy 2.1 takes another one."""
        return f"postgresql+psycopg2://{_USER}@127.0.0.1:{self.port}/{_NAME}"

    def __enter__(self) -> Self:
        data = self._home / "data"
        self._call("initdb", "-D", str(data), "-U", _USER, "-A", "trust", "-E", "UTF8")
        command = [str(self._bin / "postgres"), "-D", str(data), "-p", str(self.port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-k", str(self._home)]
        self._process = subprocess.Popen(
            command,
            cwd=self._home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **self._as,
        )
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", _USER]
        for _ in range(120):
            ready = self._call("pg_isready", *where, "-t", "1", check=False)
            if ready.returncode == 0:
                break
        self._call("createdb", *where, _NAME)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # "fast": it does not wait for its clients
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def query(self, text: str) -> str:
        """What the database answers."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", _USER, "-d", _NAME]
        return self._call("psql", *where, "-Atc", text).stdout.decode().strip()

    def _call(
        self, program: str, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        command = [str(self._bin / program), *arguments]
        done = subprocess.run(
            command, cwd=self._home, capture_output=True, check=False, timeout=120, **self._as
        )
        assert not check or done.returncode == 0, done.stderr.decode()
        return done


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
