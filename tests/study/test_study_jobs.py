"""`wb study run --launcher`: runs as jobs, by submitit's local executor and by a Slurm of scripts.

The jobs, their requeues and their files are submitit's own. In the default suite a stand-in takes
the place of training (see `stand_in.py`); the slow test trains.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_studies import Lines, NoStop, write_study

from workbench.cli import _guarded
from workbench.errors import UserError
from workbench.study import cluster, processes
from workbench.study import run as running
from workbench.study.cluster import JOBS, JobLauncher, attach, options_of, require_submitit
from workbench.study.cluster_job import RunJob
from workbench.study.ledger import Ledger, job_of
from workbench.study.plan import folder_of
from workbench.study.run import StudyOutcome, run_study
from workbench.study.spec import load_study
from workbench.study.status import study_status
from workbench.track.record import read_record
from workbench.track.store import Store

STAND_IN = Path(__file__).with_name("stand_in.py")
pytest.importorskip("submitit")


class Sound:
    """The check of a study that can answer its question."""

    def require(self) -> None:
        """Nothing is wrong."""


class Lab:
    """A store and a study of two runs."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        self.store = Store(folder / "mlruns")
        self.path = write_study(folder, seeds=[1])
        self.study = folder_of("small", self.store)

    def tell(self, **told: Any) -> None:
        """What the stand-in is to do."""
        document = {"starts": str(self.folder / "starts"), **told}
        self.patch.setenv("STAND_IN", json.dumps(document))

    def run(
        self, stops: Any = None, executor: Any = "local", **options: Any
    ) -> tuple[StudyOutcome, list[str]]:
        """`wb study run --launcher`, in this process; and what it said."""
        lines = Lines()
        launcher = JobLauncher(executor, options.pop("job", {}), self.study)
        outcome = run_study(
            load_study(self.path),
            self.store,
            stops or NoStop(),
            lines,
            launcher=launcher,
            **options,
        )
        return outcome, lines.lines

    def starts(self) -> list[str]:
        """The runs that were started, in order."""
        path = self.folder / "starts"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def states(self) -> dict[str, str]:
        """The state of each run."""
        return {one.run: one.state for one in study_status(str(self.path), self.store).states}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(processes, "RUN", (sys.executable, str(STAND_IN)))
    monkeypatch.setattr(running, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(running, "check_study", lambda study, store: Sound())
    monkeypatch.setattr(running, "tell_mlflow", lambda *_: True)
    monkeypatch.setattr(cluster, "_ASK_SECONDS", 0.2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = Lab(tmp_path, monkeypatch)
    monkeypatch.setenv("WB_HOME", str(found.store.home))
    found.tell()
    return found


BOTH = ["small-dense-s1", "small-routed-s1"]


@pytest.mark.slow
def test_jobs_train_what_is_missing_once(lab: Lab) -> None:
    lab.tell(codes={"small-dense-s1": 4})
    outcome, _ = lab.run()
    assert outcome.exit_code == 4
    assert sorted(lab.starts()) == BOTH
    assert lab.states() == {"small-routed-s1": "finished", "small-dense-s1": "failed"}
    events = Ledger(lab.study).of("small-dense-s1")
    assert [event.kind for event in events] == ["started", "ended"]
    assert (events[0].job or "").startswith("local:")
    assert events[1].exit_code == 4
    assert events[1].detail == "train/nll: the loss is not finite"
    lab.run()
    assert sorted(lab.starts()) == BOTH  # it would fail there again


def tasks_of(controller: psutil.Process) -> list[psutil.Process]:
    """The processes of a local job that submitit preempts."""
    return [p for p in controller.children() if "submitit.core._submit" in p.cmdline()]


class Meanwhile(NoStop):
    """Does something once, while the study runs, as soon as a run has made a step."""

    def __init__(self, lab: Lab, run: str, do: Any) -> None:
        self._do, self._done, self._found = do, False, None
        self._metrics = lab.store.runs / run / "metrics.csv"

    @property
    def number(self) -> int | None:  # type: ignore[override]
        """Asked in every turn of the study."""
        if not self._done and self._metrics.exists() and len(self._metrics.read_text()) > 12:
            self._done = True
            self._found = self._do()
        return self._found


def preempt_local(lab: Lab, run: str) -> None:
    """What a scheduler does when it takes the machine: submitit's signal to the job."""
    job = job_of(Ledger(lab.study).of(run))
    assert job is not None
    for task in tasks_of(psutil.Process(int(job.partition(":")[2]))):
        task.send_signal(signal.SIGUSR2)


@pytest.mark.slow
def test_a_preempted_job_is_queued_again_and_its_run_goes_on(lab: Lab) -> None:
    lab.tell(seconds=8.0)
    run = "small-routed-s1"
    stops = Meanwhile(lab, run, lambda: preempt_local(lab, run))
    outcome, lines = lab.run(stops, at_once=1)
    assert outcome.exit_code == 0, lines
    assert lab.starts() == [run, run, "small-dense-s1"]
    events = Ledger(lab.study).of(run)
    assert [(event.kind, event.exit_code) for event in events] == [("started", None), ("ended", 0)]
    rows = (lab.store.runs / run / "metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["step", "1", "2", "3", "4"]


def orders(lab: Lab) -> list[Any]:
    """The runs of the study, as it would begin them."""
    return [
        cluster.Order(
            run.spec,
            processes.write_spec(run.spec, lab.study / "specs"),
            None,
            1,
            lab.study / "logs" / f"{run.name}.log",
        )
        for run in load_study(lab.path).runs
    ]


@pytest.mark.slow
def test_a_job_that_somebody_else_submitted_is_followed_and_not_trained_again(lab: Lab) -> None:
    """As after a kill of the process that submitted it."""
    lab.tell(seconds=4.0)
    lab.study.mkdir(parents=True)
    (order, _) = orders(lab)
    (handle,) = JobLauncher("local", {}, lab.study).start([order], lab.store, -1)
    Ledger(lab.study).add("started", handle.run, job=handle.job)
    outcome, lines = lab.run()
    assert outcome.exit_code == 0
    assert f"small-routed-s1: {handle.job} has it" in lines
    assert sorted(lab.starts()) == BOTH
    assert handle.job is not None
    assert attach(handle.job, handle.run, handle.log, lab.study, lab.study / JOBS) is None


@pytest.mark.slow
def test_a_signal_lets_jobs_of_this_machine_save_and_the_next_goes_on(lab: Lab) -> None:
    lab.tell(seconds=8.0)
    run = "small-routed-s1"
    outcome, _ = lab.run(Meanwhile(lab, run, lambda: signal.SIGINT), at_once=1)
    assert outcome.exit_code == 130
    assert lab.states() == {run: "stopped", "small-dense-s1": "planned"}
    lab.tell()
    outcome, _ = lab.run()
    assert outcome.exit_code == 0
    assert lab.starts().count(run) == 2


def test_what_a_job_is_pickled_with_holds_no_process_and_no_credentials(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = RunJob(["true"], {}, str(lab.folder / "log"))
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert job() == 0
        assert job._child > 0
        assert pickle.loads(pickle.dumps(job))._child == -1
        assert RunJob(["false"], {}, job.log)() == 1
        assert RunJob(["sh", "-c", "kill -9 $$"], {}, job.log)() == 137
    finally:
        signal.signal(signal.SIGTERM, before)
    base = json.loads((lab.folder / "base.yaml").read_text())
    base["tracking"] = {"uri": "http://me:hunter2@127.0.0.1:9"}
    (lab.folder / "base.yaml").write_text(json.dumps(base))
    made = [cluster._job_of(order, lab.store) for order in orders(lab)]
    assert "hunter2" not in str([vars(one) for one in made])
    assert "hunter2" not in "".join(p.read_text() for p in (lab.study / "specs").iterdir())
    with cluster._environment([order.spec for order in orders(lab)]):
        assert "hunter2" in os.environ["MLFLOW_TRACKING_URI"]
    assert "hunter2" not in os.environ.get("MLFLOW_TRACKING_URI", "")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["partition"], "written KEY=VALUE"),
        (["partition=a", "partition=b"], "stands twice"),
    ],
)
def test_options_are_pairs(pairs: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        options_of(pairs)


def test_options_have_the_types_that_they_look_like() -> None:
    given = [
        "partition=gpu",
        "mem_gb=1.5",
        "timeout_min=60",
        "setup=a",
        "setup=b",
        "exclusive=true",
    ]
    assert options_of(given) == {
        "partition": "gpu",
        "mem_gb": 1.5,
        "timeout_min": 60,
        "setup": ["a", "b"],
        "exclusive": True,
    }


def test_where_jobs_cannot_be_submitted_it_is_said_before_anything_is_frozen(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wb(*arguments: str) -> dict[str, Any]:
        assert _guarded(["study", "run", str(lab.path), "--json", *arguments]) == 2
        return json.loads(capsys.readouterr().out)["error"]  # type: ignore[no-any-return]

    monkeypatch.setenv("PATH", str(lab.folder))
    error = wb("--launcher", "slurm")
    assert error["place"] == "--launcher"
    assert "there is no sbatch here" in error["message"]
    error = wb("--launcher", "submitit-local", "--job", "partitoin=gpu")
    assert error["value"] == "partitoin"
    assert "timeout_min" in error["allowed"]
    assert wb("--job", "partition=gpu")["allowed"] == "--launcher slurm with it"
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    error = wb("--launcher", "submitit-local")
    assert error["message"] == "submitit is not installed"
    assert error["allowed"] == "pip install 'workbench[slurm]'"
    assert not lab.study.exists()


@pytest.mark.slow
def test_a_job_that_cannot_be_asked_is_not_trained_again_unless_taken_over(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.study.mkdir(parents=True)
    Ledger(lab.study).add("started", "small-routed-s1", job="slurm:12_0")
    monkeypatch.setenv("PATH", os.environ["PATH"].replace("slurm", ""))
    with pytest.raises(UserError, match="slurm:12_0 was given this run, and whether it still has"):
        lab.run()
    assert lab.starts() == []
    outcome, _ = lab.run(take_over=True)
    assert outcome.exit_code == 0
    assert sorted(lab.starts()) == BOTH


@pytest.fixture
def slurm(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import fake_slurm
    import submitit

    folder = fake_slurm.install(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(cluster, "_ASK_SECONDS", 0.5)
    submitit.SlurmJob.watcher.clear()  # numbers of jobs begin anew
    return folder


@pytest.mark.slow
def test_slurm_gets_one_array_and_a_preempted_task_goes_on(lab: Lab, slurm: Path) -> None:
    import fake_slurm

    require_submitit("slurm")
    lab.tell(seconds=8.0)
    run = "small-routed-s1"
    stops = Meanwhile(lab, run, lambda: fake_slurm.preempt(slurm, "100_0"))
    outcome, lines = lab.run(stops, "slurm", job={"partition": "gpu", "timeout_min": 30})
    assert outcome.exit_code == 0, lines
    (batch,) = fake_slurm.submissions(slurm)
    for option in ("array=0-1%", "partition=gpu", "time=30", "signal=USR2@120", "cpus-per-task=1"):
        assert f"#SBATCH --{option}" in batch
    assert "job-name=small" in batch
    assert (slurm / "requeues").read_text() == "100_0\n"
    assert sorted(lab.starts()) == ["small-dense-s1", run, run]
    assert next((e.kind, e.job) for e in Ledger(lab.study).of(run)) == ("started", "slurm:100_0")
    rows = (lab.store.runs / run / "metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["step", "1", "2", "3", "4"]


@pytest.mark.slow
def test_jobs_in_the_queue_outlive_the_study_and_are_followed_again(lab: Lab, slurm: Path) -> None:
    import fake_slurm

    lab.tell(seconds=6.0)
    run = "small-routed-s1"
    outcome, lines = lab.run(Meanwhile(lab, run, lambda: signal.SIGINT), "slurm")
    assert outcome.exit_code == 130
    assert "SIGINT: 2 jobs go on in the queue (slurm:100_0, slurm:100_1)" in "\n".join(lines)
    outcome, lines = lab.run(executor="slurm")
    assert outcome.exit_code == 0
    assert len(fake_slurm.submissions(slurm)) == 1
    assert sorted(lab.starts()) == BOTH


@pytest.mark.slow
@pytest.mark.parametrize("accounting", [True, False])
def test_a_cancelled_job_is_seen_and_its_run_trained_the_next_time(
    accounting: bool, lab: Lab, slurm: Path
) -> None:
    import fake_slurm

    if not accounting:
        (slurm / "no-accounting").touch()
    lab.tell(seconds=8.0)
    run = "small-routed-s1"
    outcome, _ = lab.run(Meanwhile(lab, run, lambda: fake_slurm.cancel(slurm, "100_0")), "slurm")
    assert outcome.exit_code == 4
    assert lab.states() == {run: "stopped", "small-dense-s1": "finished"}
    (ended,) = [e for e in Ledger(lab.study).of(run) if e.kind == "ended"]
    assert "its job ended without a result" in ended.detail
    lab.tell()
    outcome, _ = lab.run(executor="slurm")
    assert outcome.exit_code == 0
    assert len(fake_slurm.submissions(slurm)) == 2


@pytest.mark.slow
def test_a_real_study_preempted_once_ends_with_the_bits_of_an_unbroken_one(tmp_path: Path) -> None:
    """Everything real but the queue: `wb study run --launcher submitit-local`."""
    path = write_study(tmp_path, seeds=[1])
    base = json.loads((tmp_path / "base.yaml").read_text())
    base["training"] = {"steps": 200, "batch_size": 4, "seq_len": 32}
    base["evaluation"] = {"eval_steps": 100}
    (tmp_path / "base.yaml").write_text(json.dumps(base))
    home = tmp_path / "mlruns"
    variables = {"WB_HOME": str(home), "WB_MLFLOW_WAIT": "0"}
    variables |= {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "workbench", "study", "run", str(path)]
    command += ["--launcher", "submitit-local", "--at-once", "1", "--json"]
    study = subprocess.Popen(
        command,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    store = Store(home)
    run = store.runs / "small-routed-s1"
    metrics = run / "metrics.csv"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 6):
        assert study.poll() is None, study.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (controller,) = psutil.Process(study.pid).children()
    for task in tasks_of(controller):
        task.send_signal(signal.SIGUSR2)
    out, err = study.communicate(timeout=400)
    assert study.returncode == 0, err
    assert sorted(json.loads(out)["trained"]) == ["small-dense-s1", "small-routed-s1"]
    record = read_record(run)
    assert [one.status_before for one in record.resumes] == ["KILLED"]
    assert record.resumes[0].step > 0
    assert read_record(store.runs / "small-dense-s1").resumes == []
    events = Ledger(folder_of("small", store)).events
    assert sum(event.kind == "started" for event in events) == 2
    spec = folder_of("small", store) / "specs" / f"{run.name}.yaml"
    variables["WB_HOME"] = str(tmp_path / "straight")
    straight = [sys.executable, "-m", "workbench", "run", str(spec)]
    subprocess.run(straight, env=os.environ | variables, check=True, capture_output=True)
    unbroken = read_record(tmp_path / "straight" / "runs" / run.name)
    assert [p.order_digest for p in record.points] == [p.order_digest for p in unbroken.points]
    assert record.results.final == unbroken.results.final
