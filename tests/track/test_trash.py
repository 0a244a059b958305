"""`wb runs`: to the trash and back, never a run that goes on, never a planned one in silence."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from track.tracked_runs import assert_equal_to_file, end_run, make_record, make_run

from workbench.cli import _guarded
from workbench.study.ledger import Ledger
from workbench.study.plan import FrozenPlan, PlannedName, Version, folder_of, plan_hash, write_plan
from workbench.track.mlflow_store import Feed
from workbench.track.store import Store


class Shell:
    """`wb` on a store, in this process."""

    def __init__(self, store: Store, capture: pytest.CaptureFixture[str]) -> None:
        self.store, self._capture, self.err = store, capture, ""

    def __call__(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """The exit code and the document of a command."""
        self._capture.readouterr()
        code = _guarded([*arguments, "--json"])
        out, self.err = self._capture.readouterr()
        return code, json.loads(out)

    def text(self, *arguments: str) -> str:
        """What a command says."""
        self._capture.readouterr()
        _guarded(list(arguments))
        return self._capture.readouterr().out

    def runs(self) -> list[str]:
        """The runs that are listed."""
        return sorted(one["run"] for one in self("list")[1]["runs"])


@pytest.fixture
def wb(store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("WB_HOME", str(store.home))
    return Shell(store, capsys)


def ended(store: Store, name: str = "tiny", **spec: Any) -> Path:
    """A finished run's folder."""
    folder, record, journal = make_run(store, name, 3, make_record(name, **spec))
    journal.close()
    (folder / "checkpoints" / "step_00000002").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000002" / "weights").write_bytes(b"w" * 1000)
    end_run(folder, record)
    return folder


def content(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_removed_run_is_gone_from_sight_and_comes_back_whole(wb: Shell) -> None:
    folder = ended(wb.store)
    ended(wb.store, "other")
    before = content(folder)
    code, document = wb("runs", "rm", "tiny")
    assert code == 0
    (removed,) = document["removed"]
    assert (removed["run"], removed["mlflow"]) == ("tiny", "marked deleted")
    assert removed["bytes"] > 1000
    assert wb.runs() == ["other"]
    assert wb("show", "tiny")[0] == 2
    assert [one["run"] for one in wb("runs", "trash")[1]["trash"]] == ["tiny"]
    assert "tiny" in wb.text("runs", "trash")
    code, document = wb("runs", "restore", "tiny")
    assert code == 0
    assert document["restored"][0]["folder"] == str(folder)
    assert content(folder) == before
    assert wb.runs() == ["other", "tiny"]
    assert "the trash is empty" in wb.text("runs", "trash")


def test_a_run_that_goes_on_is_never_removed_and_nothing_with_it(wb: Shell) -> None:
    ended(wb.store, "done")
    folder, record, journal = make_run(wb.store, "going", 2)
    code, document = wb("runs", "rm", "done", "going")
    assert code == 3
    assert document["error"]["value"] == "going"
    assert document["error"]["message"] == "this run is still going"
    assert wb.runs() == ["done", "going"]
    assert not wb.store.trash.exists()
    journal.close()
    end_run(folder, record)
    assert wb("runs", "rm", "done", "going", "going")[0] == 0
    assert wb.runs() == []


def test_the_lock_decides_whatever_the_record_says(wb: Shell) -> None:
    """A run that goes on again between the look and the removal."""
    from workbench.errors import RefusedError
    from workbench.track import trash
    from workbench.track.store import lock_run, release_run

    folder = ended(wb.store)
    entry = wb.store.find_run("tiny")
    assert lock_run(folder)
    with pytest.raises(RefusedError, match="still going"):
        trash.remove(entry, wb.store)
    release_run(folder)
    assert wb.runs() == ["tiny"]


def plan_naming(store: Store, *runs: str) -> None:
    """A frozen plan of the study `matched` that names these runs."""
    document: dict[str, Any] = {"seeds": [1], "arms": {}}
    names = [PlannedName(run=run, arm=run, seed=1) for run in runs]
    version = Version(
        sha256=plan_hash(document), when="2026-01-01T00:00:00+00:00", document=document, runs=names
    )
    plan = FrozenPlan(id="1", name="matched", question="", file="f", threads=1, versions=[version])
    write_plan(folder_of("matched", store), plan)


def test_a_planned_run_is_removed_only_where_that_is_said(wb: Shell) -> None:
    ended(wb.store, "a")
    ended(wb.store, "b")
    plan_naming(wb.store, "a")
    code, document = wb("runs", "rm", "a", "b")
    assert code == 3
    assert document["error"]["value"] == "a"
    assert "the plan of the study matched names this run" in document["error"]["message"]
    assert "--planned" in document["error"]["allowed"]
    assert wb.runs() == ["a", "b"]
    assert wb("runs", "rm", "b")[0] == 0
    code, document = wb("runs", "rm", "a", "--planned")
    assert code == 0
    assert document["removed"][0]["studies"] == ["matched"]
    assert "the plan of the study matched names it" in wb.err
    (event,) = Ledger(folder_of("matched", wb.store)).of("a")
    assert (event.kind, event.status) == ("removed", "FINISHED")
    assert event.id == document["removed"][0]["id"]
    wb("runs", "restore", "a")
    events = Ledger(folder_of("matched", wb.store)).of("a")
    assert [one.kind for one in events] == ["removed", "restored"]


def test_a_planned_run_under_another_name_is_still_planned(wb: Shell) -> None:
    tags = {"workbench.study": "matched", "workbench.arm": "a"}
    folder = ended(wb.store, "a", tracking={"tags": tags})
    plan_naming(wb.store, "a")
    folder.rename(folder.with_name("renamed"))
    assert wb("runs", "rm", "renamed")[0] == 3


def test_the_trash_is_emptied_only_on_yes(wb: Shell) -> None:
    for name in ("a", "b"):
        ended(wb.store, name)
    wb("runs", "rm", "a", "b")
    code, document = wb("runs", "empty")
    assert (code, document["deleted"], len(document["runs"])) == (0, False, 2)
    assert "--yes deletes them for good" in wb.text("runs", "empty")
    assert len(wb("runs", "trash")[1]["trash"]) == 2
    assert wb("runs", "empty", "a", "--yes")[1]["deleted"] is True
    assert [one["run"] for one in wb("runs", "trash")[1]["trash"]] == ["b"]
    assert "1 runs deleted for good" in wb.text("runs", "empty", "--yes")
    assert list(wb.store.trash.iterdir()) == []
    assert wb("runs", "restore", "a")[1]["error"]["allowed"] == "nothing: it is empty"


def test_a_name_that_is_taken_again_is_not_overwritten(wb: Shell) -> None:
    ended(wb.store)
    wb("runs", "rm", "tiny")
    second = ended(wb.store)
    before = content(second)
    code, document = wb("runs", "restore", "tiny")
    assert code == 2
    assert document["error"]["allowed"] == "that one removed first"
    assert content(second) == before
    wb("runs", "rm", "tiny")
    code, document = wb("runs", "restore", "tiny")
    assert code == 2
    names = document["error"]["allowed"].split(", ")
    assert len(names) == 2
    assert wb("runs", "restore", names[0])[0] == 0
    assert wb.runs() == ["tiny"]


def test_a_damaged_run_can_be_removed_and_restored(wb: Shell) -> None:
    folder = wb.store.create_run("broken")
    (folder / "run_config.json").write_text("{")
    end_run_of_nothing(folder)
    assert wb("runs", "rm", "broken")[0] == 0
    assert wb("runs", "restore", "broken")[0] == 0
    assert (folder / "run_config.json").read_text() == "{"


def end_run_of_nothing(folder: Path) -> None:
    """Lets go of a folder without a record."""
    from workbench.track.store import release_run

    release_run(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written_keeps_its_runs(wb: Shell) -> None:
    ended(wb.store)
    wb.store.home.chmod(0o500)
    try:
        code, _ = wb("runs", "rm", "tiny")
    finally:
        wb.store.home.chmod(0o700)
    assert code == 74
    assert wb.runs() == ["tiny"]


@pytest.mark.slow
def test_mlflow_hides_a_removed_run_and_shows_it_again(
    mlflow_store: Store,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WB_HOME", str(mlflow_store.home))
    wb = Shell(mlflow_store, capsys)
    folder = ended(mlflow_store, "hidden")
    run_id = Feed(folder, target).push().run_id

    def stage() -> str:
        return str(target.client.get_run(run_id).info.lifecycle_stage)

    assert wb("runs", "rm", "hidden")[0] == 0
    assert stage() == "deleted"
    assert wb("runs", "restore", "hidden")[0] == 0
    assert stage() == "active"
    assert_equal_to_file(target, folder)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    code, document = wb("runs", "rm", "hidden")
    assert code == 0
    assert "MLFLOW_TRACKING_URI does not name that" in document["removed"][0]["mlflow"]
    assert "wb sync tells it later" in wb.err
    assert stage() == "active"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    code, document = wb("sync")
    assert document["runs"]["hidden (in the trash)"] == "marked deleted"
    assert stage() == "deleted"
    assert "hidden (in the trash)" not in wb("sync")[1]["runs"]
