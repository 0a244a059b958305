"""The process of one arm of `wb bench`, as the parent sees it: started, asked, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Literal, Self

from workbench.errors import Fault, UserError

ArmKind = Literal["spec", "plain"]

# What tunes an allocator or the threads' waiting: the plain arm does without.
TUNING = (
    "THP_MEM_ALLOC_ENABLE",
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "KMP_BLOCKTIME",
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_CONF",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


class BenchError(UserError):
    """A worker died or failed: no fault of the spec as far as one can tell."""

    exit_code = 70


class Worker:
    """A process that measures one arm; gone, with all it started, when the `with` block ends.

    It begins to build its arm at once, `facts` waits for that. `name` is what messages call it.
    """

    def __init__(
        self,
        kind: ArmKind,
        spec: dict[str, Any],
        command: list[str] | None = None,
        name: str | None = None,
    ) -> None:
        self.kind, self.name = kind, name or kind
        self._spec = spec
        self._command = command or [sys.executable, "-m", "workbench.bench.worker"]

    def __enter__(self) -> Self:
        self._log: IO[bytes] = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env=environment(self.kind, os.environ),
                # Ctrl-C in a terminal reaches this process alone, which then ends the workers.
                start_new_session=True,
            )
        except BaseException:
            self._log.close()
            raise
        with contextlib.suppress(BrokenPipeError):  # `facts` says how it died
            self._tell({"arm": self.kind, "spec": self._spec})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream
                stream.close()
        self._log.close()

    def facts(self) -> dict[str, Any]:
        """What the arm is, once it is built. To be called first, and once.

        Raises:
            UserError: the worker found a fault in the spec.
            BenchError: it failed or died.
        """
        return self._answer()

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request (see `bench.worker`). Raises what `facts` does."""
        try:
            self._tell({"call": name, "with": arguments})
        except BrokenPipeError:
            raise self._died() from None
        return self._answer()

    def _tell(self, request: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise self._died()
        answer = json.loads(line)
        if "error" not in answer:
            result: dict[str, Any] = answer["result"]
            return result
        if answer["faults"]:
            raise UserError(*(Fault(**fault) for fault in answer["faults"]))
        raise BenchError.at(f"the {self.name} worker", f"{answer['error']}{self._last_lines()}")

    def _died(self) -> BenchError:
        code = self.process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (out of memory?)"
        return BenchError.at(f"the {self.name} worker", f"{how}{self._last_lines()}")

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-8:]
        return "; its last lines:\n  " + "\n  ".join(lines) if lines else ""


def environment(kind: ArmKind, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables a worker starts with: for the plain arm, without what tunes an allocator."""
    kept = dict(variables)
    if kind == "plain":
        for name in TUNING:
            kept.pop(name, None)
        if "malloc" in kept.get("LD_PRELOAD", ""):
            del kept["LD_PRELOAD"]
    return kept
