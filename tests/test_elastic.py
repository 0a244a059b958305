"""Processes that torchrun, or `wb run --nproc`, has started, killed while they train."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import socket
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
            [sys.executable, *words],
            env=environment,
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,
        )


def wait_for_steps(launched: subprocess.Popen[str], run: Path, number: int = 8) -> None:
    deadline = time.monotonic() + 240
    while len(steps(run)) < number:
        assert launched.poll() is None, (run.parents[2] / "said.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers(*launched: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The processes that train, by their rank."""
    children = [p for one in launched for p in psutil.Process(one.pid).children()]
    return {int(p.environ()["RANK"]): p for p in children if "RANK" in p.environ()}


def kill_rank(launched: subprocess.Popen[str], rank: int, run: Path) -> float:
    """Kills the process of this rank by SIGKILL once eight steps are recorded; when it did so."""
    wait_for_steps(launched, run)
    workers(launched)[rank].send_signal(signal.SIGKILL)
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
    assert "started again by torchrun" in said
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
    # The launcher's SIGTERM does not take the word from the one that is left.
    assert f"error: rank {rank}: has ended without a word" in said
    assert "Traceback" not in said
    assert read_record(run).status != "FINISHED"
    again = start(tmp_path, [*LAUNCH, spec, "--resume"])
    assert again.wait(300) == 0, (tmp_path / "said.txt").read_text()
    require_unbroken(run, straight)


def torchruns(nodes: str, restarts: int) -> list[str]:
    """The words that start one process on each of several machines."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    words = ["-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"]
    words += ["--rdzv-backend=c10d", "--rdzv-id=one", f"--rdzv-endpoint={endpoint}"]
    return [*words, f"--max-restarts={restarts}", "-m", "workbench", "run"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_on_one_of_two_machines_is_started_again_on_both(
    tmp_path: Path, straight: Ran, rank: int
) -> None:
    """The torchrun of the other machine counts no restart."""
    spec = spec_file(tmp_path, "machines", training=WHOLE | STEPS)
    run = tmp_path / "mlruns/runs/machines"
    words = [*torchruns("2", 1), spec]
    machines = [start(tmp_path, words), start(tmp_path, words)]
    wait_for_steps(machines[0], run)
    workers(*machines)[rank].send_signal(signal.SIGKILL)
    codes = [one.wait(300) for one in machines]
    assert codes == [0, 0], (tmp_path / "said.txt").read_text()
    record = require_unbroken(run, straight)
    assert len(record.resumes) == 1


def test_a_machine_that_joins_lets_the_run_go_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.13 does not tell a machine that joins where the store is that it shares."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    spec = spec_file(tmp_path, "joined", training=WHOLE | {"steps": 400})
    run = tmp_path / "mlruns/runs/joined"
    words = [*torchruns("1:2", 0), spec]
    machines = [start(tmp_path, words)]
    wait_for_steps(machines[0], run)
    machines.append(start(tmp_path, words))
    codes = [one.wait(300) for one in machines]
    assert codes == [0, 0], (tmp_path / "said.txt").read_text()
    record = read_record(run)
    assert record.status == "FINISHED"
    assert steps(run) == [0, *range(1, 401)]
    assert record.world_size == 2
    assert "effective.execution.parallel" in (record.effective.code.resumed_with or "")


@pytest.mark.parametrize("group", [False, True], ids=["command", "terminal"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_lets_all_its_processes_save(
    tmp_path: Path, straight: Ran, number: signal.Signals, group: bool
) -> None:
    """A terminal sends it to the command and to its processes."""
    spec = spec_file(tmp_path, "stopped", training=WHOLE | STEPS, checkpoint={"save_steps": 0})
    run = tmp_path / "mlruns/runs/stopped"
    launched = start(tmp_path, [*LAUNCH, spec])
    wait_for_steps(launched, run)
    trained = workers(launched)
    if group:
        os.killpg(launched.pid, number)
    else:
        launched.send_signal(number)
    assert launched.wait(60) == 128 + number, (tmp_path / "said.txt").read_text()
    assert not any(p.is_running() for p in trained.values())
    said = (tmp_path / "said.txt").read_text()
    assert f"stopped by {number.name}" in said
    assert "Traceback" not in said
    again = start(tmp_path, [*LAUNCH, spec, "--resume"])
    assert again.wait(300) == 0, (tmp_path / "said.txt").read_text()
    record = require_unbroken(run, straight)
    (resume,) = record.resumes
    assert resume.step >= 8, "it saved where it was stopped"


def has_network_namespaces() -> bool:
    words = ["unshare", "-rn", "true"]
    return bool(shutil.which("unshare")) and not subprocess.run(words, check=False).returncode


@pytest.mark.skipif(
    not has_network_namespaces(), reason="needs a network of its own (Linux, util-linux)"
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_machine_whose_network_is_lost_ends_the_run_in_seconds(
    tmp_path: Path, parallel: str
) -> None:
    """Nobody closes a connection: without asking, each would wait two hours for the other."""
    long = WHOLE | {"steps": 100_000, "parallel": parallel}
    spec = spec_file(tmp_path, "lost", training=long, evaluation={"eval_steps": 0})
    metrics = str(tmp_path / "mlruns/runs/lost/metrics.csv")
    script = str(Path(__file__).with_name("lost_network.py"))
    environment = os.environ | {"WB_HOME": str(tmp_path / "mlruns"), "WB_MLFLOW_WAIT": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, script, metrics, "-m", "workbench", "run", spec],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = done.stdout + done.stderr
    assert "codes [74, 74]" in said, said
    assert int(said.split("seconds ")[1].split()[0]) < 60, said
    assert "the connection to" in said, said
    assert "Traceback" not in said
    assert read_record(tmp_path / "mlruns/runs/lost").status != "FINISHED"
