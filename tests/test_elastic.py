"""Processes that torchrun, or `wb run --nproc`, has started, killed while they train."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_ranks import WHOLE, Ran, ran, spec_file

from workbench.track.record import RunRecord, read_record

pytestmark = [pytest.mark.ddp, pytest.mark.slow]

STEPS = {"steps": 60}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCHRUN += ["--max-restarts=1", "-m", "workbench", "run"]
LAUNCH = ["-m", "workbench", "run", "--nproc", "2"]


def start(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"WB_HOME": str(folder / "mlruns"), "WB_MLFLOW_WAIT": "0"}
    environment |= {"OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("a") as said:
        return subprocess.Popen(
            [sys.executable, *words], env=environment, stdout=said, stderr=said, text=True
        )


def kill_rank(launched: subprocess.Popen[str], rank: int, run: Path) -> float:
    """Kills the process of this rank by SIGKILL once eight steps are recorded; when it did so."""
    deadline = time.monotonic() + 240
    while len(steps(run)) < 8:
        assert launched.poll() is None, (run.parents[2] / "said.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    agent = psutil.Process(launched.pid)
    (victim,) = [p for p in agent.children() if p.environ().get("RANK") == str(rank)]
    victim.send_signal(signal.SIGKILL)
    return time.monotonic()


def steps(run: Path) -> list[int]:
    path = run / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["step"]]


def rows(run: Path, name: str) -> list[str]:
    with (run / "metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file) if row[name]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("straight")
    spec = spec_file(folder, "straight", training=WHOLE | STEPS)
    return ran(folder, [{"name": "straight", "processes": 2, "spec": spec}])["straight"]


def require_unbroken(run: Path, straight: Ran) -> RunRecord:
    record = read_record(run)
    assert record.status == "FINISHED"
    assert steps(run) == [0, *range(1, 61)]
    for name in ("train/nll", "grad_norm", "held_out/nll"):
        assert rows(run, name) == rows(straight.folder, name), name
    assert [p.order_digest for p in record.points] == [
        p.order_digest for p in straight.record.points
    ]
    return record


@pytest.mark.parametrize("rank", [0, 1])
def test_a_restart_by_torchrun_goes_on_by_itself(tmp_path: Path, straight: Ran, rank: int) -> None:
    spec = spec_file(tmp_path, "elastic", training=WHOLE | STEPS)
    run = tmp_path / "mlruns/runs/elastic"
    launched = start(tmp_path, [*TORCHRUN, spec])
    kill_rank(launched, rank, run)
    assert launched.wait(300) == 0, (tmp_path / "said.txt").read_text()
    record = require_unbroken(run, straight)
    (resume,) = record.model_dump()["resumes"]
    assert resume["step"] >= 5
    said = (tmp_path / "said.txt").read_text()
    assert "started again by torchrun (1)" in said
    assert "Traceback" not in said.replace("To enable traceback", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_nproc_that_is_killed_ends_the_run_by_name(
    tmp_path: Path, straight: Ran, rank: int
) -> None:
    spec = spec_file(tmp_path, "launched", training=WHOLE | STEPS)
    run = tmp_path / "mlruns/runs/launched"
    launched = start(tmp_path, [*LAUNCH, spec])
    killed = kill_rank(launched, rank, run)
    code = launched.wait(60)
    assert time.monotonic() - killed < 30
    said = (tmp_path / "said.txt").read_text()
    assert code in (137, 74), said
    assert f"rank {rank}" in said
    assert "Traceback" not in said
    assert read_record(run).status != "FINISHED"
    again = start(tmp_path, [*LAUNCH, spec, "--resume"])
    assert again.wait(300) == 0, (tmp_path / "said.txt").read_text()
    require_unbroken(run, straight)
