"""Whole studies with `wb` itself in real processes: signals, kills, a second start, and MLflow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_studies import write_study
from tiny_runs import DENSE

from workbench.study.ledger import Ledger
from workbench.study.mlflow import tell_mlflow
from workbench.study.plan import folder_of, read_plan
from workbench.study.spec import load_study
from workbench.study.status import study_status
from workbench.track.parents import PARENT_TAG, STUDY_ID_TAG, folder_of_study
from workbench.track.record import RunRecord, read_record
from workbench.track.store import Store

SLOW_RUNS = {"training": {"steps": 40, "batch_size": 4, "seq_len": 32}}


def wb(home: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """`wb`, followed by an MLflow that does not answer unless `more` says otherwise."""
    variables = {"WB_HOME": str(home), "WB_MLFLOW_WAIT": "0"}
    variables |= {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"} | more
    return subprocess.Popen(
        [sys.executable, "-m", "workbench", *arguments],
        env={k: v for k, v in (os.environ | variables).items() if v},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)


def steps_of(folder: Path) -> int:
    path = folder / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def twelve(folder: Path) -> Path:
    """A study of twelve runs: two arms, six seeds."""
    path = write_study(folder, seeds=[1, 2, 3, 4, 5, 6])
    base = json.loads((folder / "base.yaml").read_text()) | SLOW_RUNS
    (folder / "base.yaml").write_text(json.dumps(base))
    return path


@pytest.mark.slow
def test_ctrl_c_in_the_third_of_twelve_runs(tmp_path: Path) -> None:
    """The interrupted run goes on to the same bits as an unbroken one; nothing is trained twice."""
    path, home = twelve(tmp_path), tmp_path / "mlruns"
    store = Store(home)
    study = wb(home, "study", "run", str(path), "--at-once", "1")
    third = store.runs / "small-routed-s2"
    wait_for(lambda: steps_of(third) > 5, study)
    os.killpg(study.pid, signal.SIGINT)  # as a terminal does; the runs have groups of their own
    out, err = study.communicate(timeout=120)
    assert study.returncode == 130, err
    assert "Traceback" not in err
    assert "2 of 12 runs finished, 1 stopped, 9 not begun" in out
    record = read_record(third)
    assert record.status == "KILLED"
    kept = {
        run: (store.runs / run / "run_config.json").read_bytes()
        for run in ("small-routed-s1", "small-dense-s1")
    }
    assert list((third / "checkpoints").iterdir())

    study = wb(home, "study", "run", str(path), "--json")
    out, err = study.communicate(timeout=900)
    assert study.returncode == 0, err
    document = json.loads(out)
    assert len(document["trained"]) == 10
    assert {run["state"] for run in document["runs"]} == {"finished"}
    for run, before in kept.items():
        assert (store.runs / run / "run_config.json").read_bytes() == before
    resumed = read_record(third)
    assert [one.status_before for one in resumed.resumes] == ["KILLED"]
    spec = folder_of("small", store) / "specs" / f"{third.name}.yaml"
    threads = str(resumed.effective.hardware.threads)
    straight = wb(tmp_path / "straight", "run", str(spec), OMP_NUM_THREADS=threads)
    straight.communicate(timeout=120)
    unbroken = read_record(tmp_path / "straight" / "runs" / third.name)
    assert [p.order_digest for p in resumed.points] == [p.order_digest for p in unbroken.points]
    assert resumed.results.final == unbroken.results.final


@pytest.mark.slow
def test_a_second_start_is_refused_and_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    path, home = twelve(tmp_path), tmp_path / "mlruns"
    store = Store(home)
    study = wb(home, "study", "run", str(path), "--at-once", "1")
    first = store.runs / "small-routed-s1"
    wait_for(lambda: steps_of(first) > 2, study)
    second = wb(home, "study", "run", str(path), "--json")
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 3
    message = json.loads(out)["error"]["message"]
    assert message.startswith(f"this study is being run by another process (pid {study.pid}")
    shown = wb(home, "study", "status", "small")
    out, _ = shown.communicate(timeout=120)
    assert "being run" in out
    os.killpg(study.pid, signal.SIGINT)
    os.killpg(study.pid, signal.SIGINT)
    _, err = study.communicate(timeout=120)
    assert study.returncode == 130
    assert "Traceback" not in err
    assert study_status("small", store).states[0].state in ("stopped", "planned", "finished")


@pytest.mark.slow
def test_an_arm_that_diverges_is_exit_4_and_shown(tmp_path: Path) -> None:
    home = tmp_path / "mlruns"
    path = write_study(
        tmp_path,
        treatment=["rule:optimizer"],
        arms={"calm": {"model": DENSE}, "wild": {"model": DENSE, "optimizer": {"lr": 1e30}}},
    )
    study = wb(home, "study", "run", str(path))
    out, err = study.communicate(timeout=600)
    assert study.returncode == 4, err
    assert "2 of 4 runs finished, 2 failed" in out
    assert "not finite" in err
    again = wb(home, "study", "run", str(path))
    out, err = again.communicate(timeout=120)
    assert again.returncode == 4
    events = Ledger(folder_of("small", Store(home))).events
    assert sum(event.kind == "started" for event in events) == 4


@pytest.mark.slow
def test_runs_are_nested_under_a_parent_in_mlflow(tmp_path: Path) -> None:
    home = tmp_path / "mlruns"
    path = write_study(tmp_path, seeds=[1], question="Which is better?")
    study = wb(home, "study", "run", str(path), MLFLOW_TRACKING_URI="", WB_MLFLOW_WAIT="120")
    _, err = study.communicate(timeout=900)
    assert study.returncode == 0, err
    from mlflow.tracking import MlflowClient

    client = MlflowClient(Store(home).tracking_uri)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    parents = [run for run in runs if STUDY_ID_TAG in run.data.tags]
    assert len(parents) == 1
    parent = parents[0]
    assert parent.info.run_name == "small"
    assert parent.info.status == "FINISHED"
    assert "2 of 2 runs finished" in parent.data.tags["mlflow.note.content"]
    assert "Which is better?" in parent.data.tags["mlflow.note.content"]
    children = [run for run in runs if run.data.tags.get(PARENT_TAG) == parent.info.run_id]
    assert sorted(run.info.run_name for run in children) == ["small-dense-s1", "small-routed-s1"]
    assert {run.data.tags["workbench.arm"] for run in children} == {"dense", "routed"}
    plan = read_plan(folder_of("small", Store(home)))
    assert plan is not None
    assert parent.data.tags[STUDY_ID_TAG] == plan.id
    names = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {"plan.json", "ledger.jsonl", "summary.json"} <= names


def test_mlflow_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the summary is kept, so that `wb sync` can send it."""
    monkeypatch.setenv("WB_MLFLOW_WAIT", "0")
    where = "quick", "http://me:hunter2@127.0.0.1:9"
    said: list[str] = []
    assert not tell_mlflow(tmp_path, where, "FINISHED", "2 of 2", [], said.append)
    assert len(said) == 1
    assert "wb sync" in said[0]
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text)["status"] == "FINISHED"
    assert "hunter2" not in text


def test_a_study_whose_plan_is_gone_leaves_its_runs_without_a_parent(tmp_path: Path) -> None:
    home = tmp_path / "mlruns"
    run = home / "runs" / "small-dense-s1"
    spec = load_study(write_study(tmp_path)).runs[-1].spec.model_dump(mode="json")
    document = {"id": "1", "name": "x", "status": "FINISHED", "started": "", "spec": spec}
    record = RunRecord.model_validate(
        document | {"spec_sha256": "", "tokens_per_step": 1, "total_tokens": 1}
    )
    assert folder_of_study(record, run) is None
    (home / "studies" / "small").mkdir(parents=True)
    (home / "studies" / "small" / "plan.json").write_text("{}")
    assert folder_of_study(record, run) == home / "studies" / "small"
    record.spec["tracking"]["tags"] = {}
    assert folder_of_study(record, run) is None
