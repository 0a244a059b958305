"""`wb study run`: what is missing is trained, once, and whatever happens is kept and said.

The study's processes are real; a stand-in takes the place of training (see `stand_in.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_studies import ARMS, Lines, NoStop, arms_with, write_study

from workbench.errors import RefusedError, StoreError, UserError
from workbench.study import machine, processes
from workbench.study import run as running
from workbench.study.check import check_study
from workbench.study.ledger import Ledger
from workbench.study.lock import is_being_run, study_lock
from workbench.study.machine import share_machine
from workbench.study.plan import (
    document_of_study,
    folder_of,
    plan_differences,
    plan_hash,
    read_plan,
)
from workbench.study.run import StudyOutcome, run_study
from workbench.study.spec import load_study
from workbench.study.states import RunState
from workbench.study.status import render, study_status
from workbench.track.store import Store

STAND_IN = Path(__file__).with_name("stand_in.py")


@dataclass
class Lab:
    """A store, a study file, and the runs that were started."""

    folder: Path
    store: Store
    path: Path
    patch: pytest.MonkeyPatch

    def tell(self, **told: Any) -> None:
        """What the stand-in is to do."""
        document = {"starts": str(self.folder / "starts"), **told}
        self.patch.setenv("STAND_IN", json.dumps(document))

    def run(self, stops: Any = None, **options: Any) -> tuple[StudyOutcome, Lines]:
        """`wb study run`, in this process."""
        lines = Lines()
        stops = stops or NoStop()
        outcome = run_study(load_study(self.path), self.store, stops, lines, **options)
        return outcome, lines

    def starts(self) -> list[str]:
        """The runs that were started, in order."""
        path = self.folder / "starts"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def threads(self) -> set[str]:
        """The thread counts that runs were started with."""
        return {line.split()[1] for line in (self.folder / "starts").read_text().splitlines()}

    def states(self) -> dict[str, str]:
        """The state of each run."""
        return {state.run: state.state for state in study_status(str(self.path), self.store).states}

    def status(self) -> str:
        """`wb study status`."""
        return render(study_status(str(self.path), self.store))


class Sound:
    """The check of a study that can answer its question."""

    def require(self) -> None:
        """Nothing is wrong."""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(processes, "RUN", (sys.executable, str(STAND_IN)))
    monkeypatch.setattr(running, "_POLL_SECONDS", 0.02)
    # Reading the text of every arm has its own tests, and takes longer than all the rest.
    monkeypatch.setattr(running, "check_study", lambda study, store: Sound())
    monkeypatch.setattr(running, "tell_mlflow", lambda *_: True)  # takes seconds to import
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    store = Store(tmp_path / "mlruns")
    monkeypatch.setenv("WB_HOME", str(store.home))
    found = Lab(tmp_path, store, write_study(tmp_path), monkeypatch)
    found.tell()
    return found


ALL = ["small-routed-s1", "small-dense-s1", "small-routed-s2", "small-dense-s2"]


def test_what_is_missing_is_trained_seed_by_seed_and_only_once(lab: Lab) -> None:
    outcome, lines = lab.run(at_once=1)
    assert outcome.exit_code == 0
    assert lab.starts() == ALL == outcome.trained
    assert any("the plan is frozen" in line for line in lines.lines)
    again, lines = lab.run()
    assert again.exit_code == 0
    assert again.trained == []
    assert lab.starts() == ALL
    assert lines.lines == []
    assert "4 of 4 runs finished" in lab.status()


def test_unlike_arms_are_refused_before_anything_is_frozen(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "check_study", check_study)
    write_study(lab.folder, arms=arms_with("dense", optimizer={"lr": 1.0}))
    with pytest.raises(RefusedError, match="arms differ in more than the treatment"):
        lab.run()
    assert lab.starts() == []
    assert not folder_of("small", lab.store).exists()


def test_the_plan_is_frozen_before_the_first_run_with_hash_and_time(lab: Lab) -> None:
    lab.run()
    plan = read_plan(folder_of("small", lab.store))
    assert plan is not None
    assert len(plan.first.sha256) == 64
    first = min(e.when for e in Ledger(folder_of("small", lab.store)).events if e.run)
    assert plan.first.when <= first
    document = json.loads((folder_of("small", lab.store) / "plan.json").read_text())
    document["versions"][0]["document"]["seeds"] = [1]
    (folder_of("small", lab.store) / "plan.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="the frozen plan was edited: its hash does not hold"):
        lab.run()


def test_all_runs_have_the_same_threads_however_many_are_left(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 6)
    lab.tell(codes={"small-dense-s2": 2})
    lab.run(at_once=3)
    assert lab.threads() == {"2"}
    lab.tell()
    lab.run(at_once=1)  # one is left, and has the machine for itself
    assert lab.starts() == [*sorted(ALL, key=lab.starts().index), "small-dense-s2"]
    assert lab.threads() == {"2"}


def test_memory_and_cores_bound_how_many_train_at_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [run.spec for run in load_study(lab.path).runs]
    monkeypatch.setattr(machine, "cores", lambda: 8)

    def free(gigabytes: float) -> None:
        memory = type("Memory", (), {"available": gigabytes * 1e9})
        monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)

    monkeypatch.setattr(machine, "plan", lambda spec, store: {"memory_gb": 2.0})
    free(100)
    assert share_machine(specs, lab.store, None, None).at_once == 4  # the runs there are
    assert share_machine(specs, lab.store, None, None).threads == 2
    assert share_machine(specs, lab.store, 4, None).at_once == 2  # threads that are frozen
    free(5)
    share = share_machine(specs, lab.store, None, None)
    assert (share.at_once, share.threads) == (2, 4)
    assert "5.0 GB free, 2.00 GB a run" in share.why
    free(1)
    assert share_machine(specs, lab.store, None, None).at_once == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    free(100)
    assert share_machine(specs, lab.store, None, None) == machine.Share(2, 3, "8 CPUs")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(UserError, match="OMP_NUM_THREADS"):
        share_machine(specs, lab.store, None, None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    gpu = [
        spec.model_copy(update={"training": spec.training.model_copy(update={"device": "cuda"})})
        for spec in specs
    ]
    assert share_machine(gpu, lab.store, None, None).at_once == 1


def test_a_failed_arm_is_exit_4_and_the_others_are_trained(lab: Lab) -> None:
    lab.tell(codes={"small-dense-s1": 4})
    outcome, lines = lab.run()
    assert outcome.exit_code == 4
    assert sorted(outcome.trained) == sorted(set(ALL) - {"small-dense-s1"})
    assert any("small-dense-s1: train/nll: the loss is not finite" in line for line in lines.lines)
    again, _ = lab.run()  # it would fail there again
    assert again.exit_code == 4
    assert lab.starts().count("small-dense-s1") == 1
    assert "failed" in lab.status()


def test_a_run_that_could_not_begin_or_was_killed_is_tried_the_next_time(lab: Lab) -> None:
    lab.tell(codes={"small-dense-s1": 2, "small-routed-s2": 137})
    outcome, lines = lab.run()
    assert outcome.exit_code == 4
    text = "\n".join(lines.lines)
    assert "small-dense-s1: data.text_file: it is not there" in text
    assert "small-routed-s2: ended by SIGKILL" in text
    assert lab.states()["small-dense-s1"] == "failed"
    assert lab.states()["small-routed-s2"] == "stopped"
    lab.tell()
    again, _ = lab.run()
    assert again.exit_code == 0
    assert sorted(again.trained) == ["small-dense-s1", "small-routed-s2"]


def test_a_full_disk_ends_the_study_as_a_fault_of_the_store(lab: Lab) -> None:
    lab.tell(codes={"small-routed-s1": StoreError.exit_code})
    outcome, _ = lab.run(at_once=1)
    assert outcome.exit_code == 74
    assert lab.starts() == ["small-routed-s1"]


def when(condition: Callable[[], bool], do: Callable[[], None]) -> threading.Thread:
    """Does something as soon as a condition holds."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_in_the_second_run_loses_nothing(number: int, lab: Lab) -> None:
    lab.tell(seconds=1.0)
    stops = NoStop()
    thread = when(
        lambda: (lab.store.runs / "small-dense-s1" / "metrics.csv").exists(),
        lambda: setattr(stops, "number", number),
    )
    outcome, lines = lab.run(stops, at_once=1)
    thread.join()
    assert outcome.exit_code == 128 + number
    assert outcome.trained == ["small-routed-s1"]
    assert lab.states() == {
        "small-routed-s1": "finished",
        "small-dense-s1": "stopped",
        "small-routed-s2": "planned",
        "small-dense-s2": "planned",
    }
    assert any("the runs save and end" in line for line in lines.lines)
    kinds = [event.kind for event in Ledger(folder_of("small", lab.store)).events]
    assert "interrupted" in kinds
    lab.tell()
    again, _ = lab.run(at_once=1)
    assert again.exit_code == 0
    assert lab.starts() == ["small-routed-s1", "small-dense-s1", *ALL[1:]]


def test_a_second_study_run_at_the_same_time_is_refused(lab: Lab) -> None:
    folder = folder_of("small", lab.store)
    with study_lock(folder):
        assert is_being_run(folder)
        with pytest.raises(RefusedError, match=f"being run by another process .pid {os.getpid()}"):
            lab.run()
    assert not is_being_run(folder)
    assert lab.starts() == []
    assert lab.run()[0].exit_code == 0


@pytest.mark.slow
def test_runs_that_outlive_a_killed_study_hold_its_lock(lab: Lab) -> None:
    lab.tell(seconds=2.0)
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[3:]\n"
        "from workbench.study import processes\n"
        "processes.RUN = (sys.executable, sys.argv[2])\n"
        "from small_studies import Lines, NoStop; from workbench.study.run import run_study\n"
        "from workbench.study.spec import load_study; from workbench.track.store import Store\n"
        "run_study(load_study(Path(sys.argv[1])), Store(), NoStop(), Lines(), at_once=1)"
    )
    here = [str(STAND_IN.parent), str(STAND_IN.parents[1])]
    study = subprocess.Popen([sys.executable, "-c", code, str(lab.path), str(STAND_IN), *here])
    metrics = lab.store.runs / "small-routed-s1" / "metrics.csv"
    when(metrics.exists, study.kill).join()
    study.wait()
    with pytest.raises(RefusedError, match="is gone; a run that it began goes on"):
        lab.run()
    assert lab.states()["small-routed-s1"] == "running"
    folder = folder_of("small", lab.store)
    deadline = time.monotonic() + 30
    while is_being_run(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    lab.tell()
    outcome, _ = lab.run()
    assert outcome.exit_code == 0
    assert lab.starts().count("small-routed-s1") == 1
    assert Ledger(folder).ids("small-routed-s1")  # noted although its study was dead


def test_a_changed_plan_is_refused_and_an_amended_one_remembered(lab: Lab) -> None:
    lab.run()
    write_study(lab.folder, seeds=[1, 2, 3], decision={"confidence": 0.9})
    assert "seeds: [1, 2] -> [1, 2, 3]" in lab.status()
    with pytest.raises(RefusedError) as caught:
        lab.run()
    text = str(caught.value)
    assert "the plan was frozen on" in text
    assert "seeds: [1, 2] -> [1, 2, 3]" in text
    assert "decision.confidence: 0.95 -> 0.9" in text
    assert len(lab.starts()) == 4
    with pytest.raises(UserError, match="needs its reason"):
        lab.run(amend=" ")
    outcome, _ = lab.run(amend="two seeds say too little")
    assert outcome.exit_code == 0
    assert sorted(outcome.trained) == ["small-dense-s3", "small-routed-s3"]
    plan = read_plan(folder_of("small", lab.store))
    assert plan is not None
    assert [version.reason for version in plan.versions] == [None, "two seeds say too little"]
    assert plan.latest.finished_runs == 4
    assert "two seeds say too little" in lab.status()
    assert lab.run()[0].trained == []  # from now on this is the plan


def test_a_field_that_a_later_version_brings_is_no_change_of_plan(lab: Lab) -> None:
    study = load_study(lab.path)
    now = document_of_study(study)
    then = json.loads(json.dumps(now))
    for arm in then["arms"].values():
        del arm["training.z_loss"], arm["evaluation.stride"]
    assert plan_differences(then, now) == []
    now["arms"]["dense"]["data.overlap_ngram"] = 7  # set in every arm, whatever its default
    del then["arms"]["dense"]["data.overlap_ngram"], then["arms"]["routed"]["data.overlap_ngram"]
    assert plan_differences(then, now) == []
    then["arms"]["routed"]["training.z_loss"] = 0.0  # known then, and not in this arm
    now["arms"]["dense"]["training.z_loss"] = 0.1
    assert plan_differences(then, now) == ["arms.dense.training.z_loss: null -> 0.1"]
    assert plan_differences(now, then) != []


def test_contrasts_are_frozen_with_the_plan(lab: Lab) -> None:
    before = document_of_study(load_study(lab.path))
    assert "contrasts" not in before  # as in plans frozen before there were any
    arms = ARMS | {"wide": {"model": ARMS["dense"]["model"] | {"intermediate_size": 128}}}
    contrasts = [{"arm": "wide", "against": "dense"}]
    with_arm = document_of_study(load_study(write_study(lab.folder, arms=arms)))
    path = write_study(lab.folder, arms=arms, contrasts=contrasts)
    after = document_of_study(load_study(path))
    said = json.dumps(contrasts, sort_keys=True)
    assert plan_differences(with_arm, after) == [f"contrasts: [] -> {said}"]
    assert plan_differences(after, with_arm) == [f"contrasts: {said} -> []"]
    turned = [dict(reversed(pair.items())) for pair in after["contrasts"]]
    assert plan_differences(after, {**after, "contrasts": turned}) == []
    assert plan_hash(with_arm) != plan_hash(after)


def test_a_seed_dropped_later_stays_in_sight(lab: Lab) -> None:
    lab.run()
    write_study(lab.folder, seeds=[1])
    outcome, _ = lab.run(amend="seed 2 looked odd")
    assert outcome.exit_code == 0
    states = study_status(str(lab.path), lab.store)
    assert states.plan.seeds == [1, 2]
    dropped = [state.run for state in states.states if state.dropped]
    assert dropped == ["small-routed-s2", "small-dense-s2"]
    assert "no longer planned" in lab.status()


def test_an_arm_that_has_runs_cannot_become_another(lab: Lab) -> None:
    lab.run()
    model = {**ARMS["dense"]["model"], "qk_norm": False}
    write_study(lab.folder, arms=arms_with("dense", model=model))
    with pytest.raises(UserError) as caught:
        lab.run(amend="a better idea")
    assert "small-dense-s1: this is not the planned run" in str(caught.value)
    assert "it was trained with model.qk_norm True, planned is False" in str(caught.value)
    plan = read_plan(folder_of("small", lab.store))
    assert plan is not None
    assert len(plan.versions) == 1


def test_titles_notes_and_cadences_of_saving_are_no_change_of_plan(lab: Lab) -> None:
    lab.run()
    base = json.loads((lab.folder / "base.yaml").read_text())
    base |= {"notes": "more", "checkpoint": {"save_minutes": 1.0}}
    write_study(lab.folder, question="Which?")
    (lab.folder / "base.yaml").write_text(json.dumps(base))
    assert lab.run()[0].exit_code == 0
    plan = read_plan(folder_of("small", lab.store))
    assert plan is not None
    assert len(plan.versions) == 1
    assert plan.question == "Which?"


def test_a_deleted_run_is_said_and_trained_again_and_a_renamed_one_is_found(lab: Lab) -> None:
    lab.run()
    shutil.rmtree(lab.store.runs / "small-dense-s1")
    (lab.store.runs / "small-routed-s2").rename(lab.store.runs / "lucky")
    assert lab.states() == dict.fromkeys(lab.states(), "finished") | {"small-dense-s1": "deleted"}
    status = lab.status()
    assert "it had finished" in status
    assert "its folder is now lucky" in status
    outcome, lines = lab.run()
    assert outcome.exit_code == 0
    assert outcome.trained == ["small-dense-s1"]
    text = "\n".join(lines.lines)
    assert "small-dense-s1: it had finished" in text
    assert "is no longer in the store: it is trained again" in text
    assert "small-routed-s2: its folder is now lucky; it is not trained again" in text
    kinds = {event.kind for event in Ledger(folder_of("small", lab.store)).events}
    assert {"missed", "renamed"} <= kinds
    assert len(Ledger(folder_of("small", lab.store)).ids("small-dense-s1")) == 2


def test_an_unfinished_run_that_was_renamed_goes_on_where_it_is(lab: Lab) -> None:
    lab.tell(codes={"small-dense-s1": 137})
    lab.run()
    (lab.store.runs / "small-dense-s1").rename(lab.store.runs / "other")
    lab.tell()
    outcome, _ = lab.run()
    assert outcome.exit_code == 0
    assert lab.starts()[-1] == "other"
    assert not (lab.store.runs / "small-dense-s1").exists()


def test_a_run_of_the_planned_name_that_is_not_the_studys_is_never_touched(lab: Lab) -> None:
    lab.run()
    folder = lab.store.runs / "small-dense-s1"
    document = json.loads((folder / "run_config.json").read_text())
    document["spec"]["tracking"]["tags"] = {}
    (folder / "run_config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="a run of this name exists that is not this study's"):
        lab.run()


def test_a_ledger_with_a_line_cut_short_goes_on(lab: Lab) -> None:
    lab.run()
    path = folder_of("small", lab.store) / "ledger.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    ledger = Ledger(path.parent)
    assert len(ledger.events) == len(whole.splitlines()) - 1
    ledger.add("over", detail="x")
    assert Ledger(path.parent).events[-1].detail == "x"


def test_credentials_of_a_server_are_not_written_to_the_store(lab: Lab) -> None:
    tracking = {"uri": "http://me:hunter2@127.0.0.1:9"}
    base = json.loads((lab.folder / "base.yaml").read_text()) | {"tracking": tracking}
    (lab.folder / "base.yaml").write_text(json.dumps(base))
    assert lab.run()[0].exit_code == 0
    for path in folder_of("small", lab.store).rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path


def test_status_says_what_is_left_and_how_long_it_takes(lab: Lab) -> None:
    with pytest.raises(UserError, match="this study has not begun"):
        study_status(str(lab.path), lab.store)
    lab.tell(codes={"small-dense-s2": 2})
    lab.run()
    status = study_status("small", lab.store)
    document = status.to_json()
    assert document["seconds_left"] == pytest.approx(1.0 / status.at_once)
    assert [run["state"] for run in document["runs"]] == [
        "finished",
        "finished",
        "finished",
        "failed",
    ]
    assert document["seeds"] == [1, 2]
    assert document["arms"] == ["routed", "dense"]
    assert "about" in render(status)
    with pytest.raises(UserError, match=r"there is no such study in .* Did you mean 'small'"):
        study_status("smal", lab.store)
    lab.path.unlink()
    gone = study_status("small", lab.store)
    assert gone.fault
    assert "the study file cannot be read" in render(gone)


def test_states_are_data(lab: Lab) -> None:
    outcome, _ = lab.run()
    assert all(isinstance(state, RunState) for state in outcome.states)
    document = outcome.to_json()
    assert json.loads(json.dumps(document))["runs"][0]["state"] == "finished"
