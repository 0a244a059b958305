"""Trains one spec with several processes over gloo, forked from one that has torch loaded.

`python tests/ranks.py FOLDER` reads `cases.json` there, a list of `{"name", "processes", "spec",
"options", "kill", "poison", "patience", "run", "launched", "meddle"}`, and runs one after another,
each with `runs/RUN` as its run (or `runs/NAME`). `launched`: one process as torchrun starts it.
`kill`, `[rank, step]`: that process ends itself by SIGKILL after that step. `poison` is
`[rank, step, what]`: there the `gradient` is NaN from a block on, or the hidden states, and so the
`loss`, are infinite. `meddle` is what else happens to one of them, see meddling.py. `patience`: the
seconds after which what hangs is ended. Prints one JSON document: of each case the exit codes by
rank, the seconds it took, what each rank said, the files in the store that each but rank zero
wrote, the record that was there when it ended, and the seconds from the kill to then. A rank ends
as any interpreter does, so that what its end comes to shows in its exit code.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

# Set before torch is loaded: another number of threads rounds otherwise, and forks badly.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as `wb` does

import matplotlib.figure  # noqa: F401
import torch
import torch._inductor
import torch.distributed
from meddling import WAYS

from workbench import run as runner
from workbench.cli import main as wb
from workbench.core import evaluate
from workbench.recorder import Follower, Recorder
from workbench.track.events import NullTracker

PATIENCE_SECONDS = 90

# Few, so that even a small set is several batches, of which each process scores some.
evaluate.TOKENS_AT_ONCE = 512


def run_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """One run; the processes that hang are ended, which shows in their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    processes = []
    for rank in range(case["processes"]):
        if not (process := os.fork()):
            _rank(folder, case, rank, port)
        processes.append(process)
    patience = case.get("patience", PATIENCE_SECONDS)
    codes = [_code(process, began + patience) for process in processes]
    seconds, ended = time.monotonic() - began, time.time()
    said = [_said(folder, case, rank).read_text() for rank in range(case["processes"])]
    wrote = [
        sorted({*_wrote(folder, case, rank).read_text().splitlines()})
        for rank in range(case["processes"])
    ]
    record = json.loads((folder / "mlruns/runs" / run_of(case) / "run_config.json").read_text())
    found = {"codes": codes, "seconds": seconds, "said": said, "wrote": wrote, "document": record}
    killed = folder / f"{case['name']}.killed"
    return found | {"after_kill": ended - killed.stat().st_mtime if killed.exists() else None}


def run_of(case: dict[str, Any]) -> str:
    """The name of the run of a case."""
    return str(case.get("run", case["name"]))


def _code(process: int, deadline: float) -> int:
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def _said(folder: Path, case: dict[str, Any], rank: int) -> Path:
    return folder / f"{case['name']}.{rank}.txt"


def _wrote(folder: Path, case: dict[str, Any], rank: int) -> Path:
    return folder / f"{case['name']}.{rank}.wrote"


def _note_writes(store: Path, to: int) -> None:
    """Notes whatever this process opens to write, makes, renames or removes in the store."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    changing = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}

    def hear(event: str, given: tuple[Any, ...]) -> None:
        if event in changing or (
            event == "open" and isinstance(given[2], int) and given[2] & writing
        ):
            path = given[0]
            if isinstance(path, str | Path) and str(path).startswith(str(store)):
                os.write(to, f"{Path(path).relative_to(store)}\n".encode())

    sys.addaudithook(hear)


def _rank(folder: Path, case: dict[str, Any], rank: int, port: int) -> NoReturn:
    os.environ.update(WB_HOME=str(folder / "mlruns"), WB_MLFLOW_WAIT="0")
    if case["processes"] > 1 or case.get("launched"):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
        os.environ.update(WORLD_SIZE=str(case["processes"]), MASTER_PORT=str(port))
    runner.tracker_for = lambda spec, store: NullTracker()
    if case.get("kill") and case["kill"][0] == rank:
        for kind in (Recorder, Follower):
            kind.flush = _killing(kind.flush, case["kill"][1], folder / f"{case['name']}.killed")  # type: ignore[method-assign]
    if case.get("poison") and case["poison"][0] == rank:
        runner.build_model = _poisoned(runner.build_model, *case["poison"][1:])
    if case.get("meddle") and case["meddle"][0] == rank:
        WAYS[case["meddle"][1]](*case["meddle"][2:])
    said = os.open(_said(folder, case, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    wrote = os.open(_wrote(folder, case, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if rank:
        _note_writes(folder / "mlruns", wrote)
    sys.argv = ["wb", "run", case["spec"], f"name={run_of(case)}", *case.get("options", [])]
    wb()
    sys.exit(0)


def _killing(flush: Any, step: int, mark: Path) -> Any:
    def after(recorder: Any) -> None:
        flush(recorder)
        if recorder._parts.state.step == step:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return after


def _poisoned(build: Any, step: int, what: str) -> Any:
    calls = [0]

    def spoil(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        if not output.requires_grad:
            return output  # an evaluation
        calls[0] += 1
        if calls[0] == step and what == "loss":
            return output * math.inf
        if calls[0] == step:
            output.register_hook(lambda gradient: gradient * math.nan)
        return output

    def built(*given: Any, **options: Any) -> Any:
        model = build(*given, **options)
        place = model.norm if what == "loss" else model.layers[1].post_attention_layernorm
        place.register_forward_hook(spoil)
        return model

    return built


def main() -> None:
    """Runs the cases of the folder."""
    folder = Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text())
    print(json.dumps({case["name"]: run_case(folder, case) for case in cases}), flush=True)


if __name__ == "__main__":
    main()
