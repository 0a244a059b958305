"""Runs trained elsewhere, from a second, empty store: listed, shown, compared; a changed file is
refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow_servers import Server
from tiny_runs import DENSE, tiny_spec, untracked_run

from workbench import compare_runs as api_compare
from workbench import load_run, load_runs, to_frame
from workbench.answers import Answer
from workbench.cli import _guarded
from workbench.commands import list_runs, show
from workbench.compare import compare_runs
from workbench.compare_command import compare
from workbench.errors import StoreError, UserError
from workbench.track.mlflow_store import Feed, connect
from workbench.track.record import read_record, write_record
from workbench.track.server_files import FILES, FILES_TAG
from workbench.track.server_runs import find_run, other_runs
from workbench.track.store import Store, release_run

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Elsewhere:
    """Where two runs were trained, and the folders of their artifacts."""

    store: Store
    target: Any
    artifacts: dict[str, Path]

    def run_id(self, name: str) -> str:
        return self.artifacts[name].parent.name


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """Two tiny runs, sent to the database of their own store, which then counts as the server."""
    folder = tmp_path_factory.mktemp("elsewhere")
    store = Store(folder / "mlruns")
    target = connect(store.tracking_uri, store, "theirs")
    artifacts = {}
    for name, model in (("far-routed", {}), ("far-dense", {"mlp_type": "dense"} | DENSE)):
        tracking = {"experiment": "theirs", "tags": {"arm": name}}
        spec = tiny_spec(folder, name, model=model, tracking=tracking)
        run = untracked_run(spec, store)
        position = Feed(run.folder, target).push()
        where = target.client.get_run(position.run_id).info.artifact_uri
        artifacts[name] = Path(where.removeprefix("file://"))
    return Elsewhere(store, target, artifacts)


@pytest.fixture
def here(tmp_path: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, and the address of the other one."""
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere.store.tracking_uri)
    return Store()


def content(answer: Answer) -> Any:
    assert isinstance(answer.content, str | dict)
    return answer.content


def test_they_are_listed_shown_and_compared(
    here: Store, elsewhere: Elsewhere, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = content(list_runs(as_json=True))["runs"]
    assert {row["run"]: row["where"] for row in rows} == {
        "far-routed": "server",
        "far-dense": "server",
    }
    own = elsewhere.store.find_run("far-routed").record
    assert own
    assert {row["id"] for row in rows} >= {own.id}
    assert "where" in content(list_runs()).splitlines()[0]
    page = content(show("far-routed"))
    assert own.id in page
    assert "held_out/nll" in page or "contaminated/nll" in page
    assert content(show(own.id[:10], as_json=True))["name"] == "far-routed"

    done = compare("far-routed", "far-dense", treatment=["model"], as_json=True)
    found = json.loads(capsys.readouterr().out)
    there = [elsewhere.store.find_run(name).folder for name in ("far-routed", "far-dense")]
    expected = compare_runs(*there, treatment=["model"])
    assert done.exit_code == expected.exit_code()
    assert {k: v for k, v in found.items() if k != "report"} == {
        k: v for k, v in expected.to_json().items() if k != "report"
    }
    numbers = found["results"].values()
    assert any(number["documents"] for number in numbers)  # from the scores of every document
    # The verdict stands with the runs on the server, and what else they have is as it was.
    run = elsewhere.target.client.get_run(elsewhere.run_id("far-routed"))
    assert any(tag.startswith("workbench.comparison.") for tag in run.data.tags)
    assert run.info.status == "FINISHED"
    names = {path.name for path in elsewhere.artifacts["far-routed"].iterdir()}
    assert "comparisons" in names
    assert find_run(here, "far-routed", whole=True).record == own
    assert not here.runs.exists()


def test_from_python_they_are_loaded_and_compared(here: Store, elsewhere: Elsewhere) -> None:
    own = elsewhere.store.find_run("far-routed")
    run = load_run("far-routed")
    assert run.record == own.record
    assert run.curve("train/nll") == load_run(own.folder).curve("train/nll")
    assert to_frame(run).equals(to_frame(load_run(own.folder)))
    found = api_compare("far-routed", "far-dense", treatment=["model"])
    there = [elsewhere.store.find_run(name).folder for name in ("far-routed", "far-dense")]
    assert found.to_json() == compare_runs(*there, treatment=["model"]).to_json()
    assert load_runs() == ()
    both = load_runs("far-*", server=True)
    assert {one.name for one in both} == {"far-routed", "far-dense"}
    old = read_record(own.folder).model_copy(update={"name": "old", "started": "2020-01-01T00:00"})
    write_record(old, here.create_run("old"))
    release_run(here.path_of("old"))
    names = [one.name for one in load_runs(server=True)]
    assert names[-1] == "old", "the newest first, wherever it is"
    assert len(to_frame(load_runs("far-d*", server=True)[0])) > 0


def test_what_a_server_named_nowhere_cannot_give_is_said(
    here: Store, changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed("run_config.json", b"{}")
    with pytest.warns(UserWarning, match="left out: .*far-dense: run_config.json"):
        assert [one.name for one in load_runs(server=True)] == ["far-routed"]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(UserError, match="allowed: MLFLOW_TRACKING_URI in the environment"):
        load_runs(server=True)


def test_a_tag_means_runs_of_the_server_as_well(
    here: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", "--a-tag", "arm=far-routed", "--b-tag", "arm=far-dense"]
    assert _guarded([*words, "--treatment", "model", "--json"]) == 0
    arms = json.loads(capsys.readouterr().out)["arms"]
    names = {name: [run["name"] for run in arm["runs"]] for name, arm in arms.items()}
    assert names == {name: [name] for name in ("far-routed", "far-dense")}
    assert _guarded(["compare", "--a-tag", "arm=none", "--b-tag", "arm=far-dense"]) == 2
    assert "allowed: arm=far-dense, arm=far-routed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "far-dense", "--set", "x={text}"], "its checkpoints are not"),
        (["export", "far-dense", "--out", "{out}"], "its checkpoints are not"),
        (["runs", "rm", "far-dense"], "is removed there"),
        (["sync", "far-dense"], "has all that was sent"),
        (["run", "{spec}", "--resume", "far-dense"], "its checkpoints are not"),
    ],
)
def test_what_needs_more_than_a_server_has_says_where_it_is_possible(
    here: Store, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "far-dense.yaml"
    spec.write_text(tiny_spec(tmp_path, "far-dense").model_dump_json())
    (tmp_path / "text.txt").write_text("some text")
    places = {"text": tmp_path / "text.txt", "out": tmp_path / "out", "spec": spec}
    assert _guarded([word.format(**places) for word in words]) == 2
    found = capsys.readouterr().err
    assert "run: this run is at sqlite:" in found
    assert said in found
    assert f"or here with its folder in {here.runs}" in found
    assert "Traceback" not in found
    assert not (tmp_path / "out").exists()


def test_a_run_of_the_server_is_trained_again(
    here: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _guarded(["verify", "far-dense", "--steps", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "bit for bit"


def test_what_the_store_has_is_not_asked_for(
    here: Store, elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = untracked_run(tiny_spec(tmp_path, "near"), here)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert find_run(here, "near", whole=True).folder == run.folder
    with pytest.raises(StoreError, match="MLFLOW_TRACKING_URI names cannot be read"):
        find_run(here, "far-routed")
    listed = content(list_runs(as_json=True))["runs"]  # and the list goes without it
    assert [row["run"] for row in listed] == ["near"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere.store.tracking_uri)
    with pytest.raises(UserError, match=r"no such run in .*, nor at sqlite"):
        find_run(here, "nowhere")
    with pytest.raises(UserError, match=r"more than one run at .* far-dense \(.*far-routed"):
        find_run(here, "far")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(UserError, match="no such run"):
        find_run(here, "far-routed")
    assert other_runs(here, []) == ([], [])


@pytest.fixture
def changed(elsewhere: Elsewhere) -> Iterator[Any]:
    """Changes an artifact of the dense run, and puts it back."""
    before: dict[Path, bytes] = {}

    def change(name: str, text: bytes) -> None:
        path = elsewhere.artifacts["far-dense"] / name
        before.setdefault(path, path.read_bytes())
        path.write_bytes(text)

    yield change
    for path, text in before.items():
        path.write_bytes(text)


@pytest.mark.parametrize(
    "name", ["run_config.json", "metrics.csv", "evaluations/step_00000004.parquet", FILES]
)
def test_a_changed_file_is_refused(
    here: Store, elsewhere: Elsewhere, changed: Any, name: str
) -> None:
    path = elsewhere.artifacts["far-dense"] / name
    changed(name, path.read_bytes().replace(b"4", b"5", 1))
    with pytest.raises(UserError, match=f"far-dense: {name}: this is not the"):
        find_run(here, "far-dense", whole=True)
    cached = here.cache / "server"
    assert not list(cached.rglob(name))  # nothing of it is kept
    if name in ("run_config.json", FILES):
        entries, faults = other_runs(here, [])
        assert [entry.name for entry in entries] == ["far-routed"]
        assert len(faults) == 1


def test_a_list_that_leads_out_of_the_folder_is_refused(
    here: Store, elsewhere: Elsewhere, changed: Any
) -> None:
    import hashlib

    client, run_id = elsewhere.target.client, elsewhere.run_id("far-dense")
    before = client.get_run(run_id).data.tags[FILES_TAG]
    text = json.dumps({"files": {"../../../escaped": "0" * 64}}).encode()
    changed(FILES, text)
    client.set_tag(run_id, FILES_TAG, hashlib.sha256(text).hexdigest())
    try:
        with pytest.raises(UserError, match="no run has a file of this name"):
            find_run(here, "far-dense")
    finally:
        client.set_tag(run_id, FILES_TAG, before)


def test_a_copy_is_kept_and_checked(here: Store, changed: Any) -> None:
    first = find_run(here, "far-dense", whole=True)
    metrics = first.folder / "metrics.csv"
    before = metrics.read_bytes()
    changed("metrics.csv", b"gone")  # the copy serves, and nothing is fetched
    assert find_run(here, "far-dense", whole=True).folder == first.folder
    metrics.write_bytes(before + b"1")  # a damaged copy does not
    with pytest.raises(UserError, match="it was changed since"):
        find_run(here, "far-dense", whole=True)
    changed("metrics.csv", before)
    find_run(here, "far-dense", whole=True)
    assert metrics.read_bytes() == before


def test_over_a_real_server_with_nothing_shared(tmp_path: Path) -> None:
    """By the command line alone: one store trains, the other has the server's address."""
    with Server(tmp_path / "server", f"sqlite:///{tmp_path / 'server.db'}") as server:

        def wb(home: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            environment = {**os.environ, "WB_HOME": str(tmp_path / home / "mlruns")}
            environment["MLFLOW_TRACKING_URI"] = server.address
            command = [sys.executable, "-m", "workbench", *arguments]
            return subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False
            )

        for name, seed in (("one", 1), ("two", 2)):
            spec = tmp_path / f"{name}.yaml"
            spec.write_text(tiny_spec(tmp_path, name, seed).model_dump_json())
            done = wb("first", "run", str(spec))
            assert done.returncode == 0, done.stderr
        assert wb("second", "list").stdout.count("server") == 2
        assert wb("second", "show", "one").returncode == 0
        compared = wb("second", "compare", "one", "two", "--treatment", "seed", "--json")
        assert compared.returncode == 0, compared.stderr
        own = wb("first", "compare", "one", "two", "--treatment", "seed", "--json")
        results = [json.loads(done.stdout)["results"] for done in (compared, own)]
        assert results[0] == results[1]
        assert not (tmp_path / "second" / "mlruns" / "runs").exists()
