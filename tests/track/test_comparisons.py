"""A comparison arrives at the runs it speaks of: the note in their folders, its tag and its report
in MLflow; and a server that is down costs a message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from full_disks import largest_file
from track.tracked_runs import end_run, make_run

from workbench.compare.pair import Side
from workbench.compare.sections import description
from workbench.publish import publish
from workbench.track.comparisons import notes_of
from workbench.track.feeder import send_run
from workbench.track.mlflow_store import Feed, read_position
from workbench.track.record import read_record
from workbench.track.store import Store

DOWN = "http://127.0.0.1:9"
DOCUMENT = {
    "verdict": "flagged",
    "claims": {"nll": "flagged", "bpb": "flagged", "throughput": "refused", "memory": "comparable"},
    "treatment": {"names": ["model"], "inferred": False},
    "ruleset": 1,
}
WORDS = (
    "nll flagged, bpb flagged, throughput refused, memory comparable; one against two;"
    " treatment: model; override of seeds: a look at http://***@host; ruleset 1; "
)


def make_pair(store: Store, *names: str) -> list[Path]:
    """Two runs that have ended."""
    folders = []
    for name in names:
        folder, record, journal = make_run(store, name, 3)
        journal.close()
        end_run(folder, record)
        folders.append(folder)
    return folders


def make_report(store: Store, name: str, text: str = "first") -> Path:
    report = store.reports / name
    report.mkdir(parents=True, exist_ok=True)
    (report / "report.html").write_text(f"<p>{text}")
    (report / "figure.png").write_bytes(b"picture")
    return report


def published(folders: list[Path], report: Path, document: Any = DOCUMENT) -> list[str]:
    said: list[str] = []
    allow = {"seeds": "a look at http://me:secret@host"}
    publish(document, allow, ["one", "two"], folders, report, said.append)
    return said


def test_tag_and_report_arrive_at_both_runs(
    mlflow_store: Store, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = make_pair(mlflow_store, "one", "two")
    run_ids = [Feed(folder, target).push().run_id for folder in folders]
    for folder, run_id in zip(folders, run_ids, strict=True):  # a report says where its runs are
        side = Side(folder.name, folder, read_record(folder), "FINISHED")
        assert description(side, {})["MLflow run"] == run_id
    report = make_report(mlflow_store, "one--two--0123abcd")
    tag = f"workbench.comparison.{report.name}"

    monkeypatch.setenv("MLFLOW_TRACKING_URI", DOWN)
    (said,) = published(folders, report)
    assert said.startswith(f"MLflow does not have this report: MLflow at {DOWN} did not take it: ")
    assert said.endswith(". Later: wb sync one two")
    assert tag not in target.client.get_run(run_ids[0]).data.tags

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    for folder, run_id in zip(folders, run_ids, strict=True):
        assert send_run(folder) is None  # what `wb sync` does
        assert target.client.get_run(run_id).data.tags[tag].startswith(WORDS)
        got = target.client.download_artifacts(run_id, f"comparisons/{report.name}", str(tmp_path))
        assert {path.name: path.read_bytes() for path in Path(got).iterdir()} == {
            "report.html": b"<p>first",
            "figure.png": b"picture",
        }

    # The same comparison again: its tag and its files are replaced; another stands beside it.
    make_report(mlflow_store, report.name, "second")
    assert published(folders, report, {**DOCUMENT, "verdict": "refused"}) == []
    other = make_report(mlflow_store, "one--two--ffffffff")
    assert published(folders, other) == []
    tags = target.client.get_run(run_ids[1]).data.tags
    assert [key for key in tags if key.startswith("workbench.comparison.")] == [
        tag,
        f"workbench.comparison.{other.name}",
    ]
    got = target.client.download_artifacts(run_ids[1], f"comparisons/{report.name}", str(tmp_path))
    assert (Path(got) / "report.html").read_text() == "<p>second"


def test_a_run_that_mlflow_never_saw_is_named_and_noted(store: Store) -> None:
    folders = make_pair(store, "one", "two")
    report = make_report(store, "one--two--0123abcd")
    (said,) = published(folders, report)
    assert "it does not have these runs yet. Later: wb sync one two" in said
    assert not store.database.exists()
    for folder in folders:
        (note,) = notes_of(folder).values()
        assert note.claims == DOCUMENT["claims"]
        assert (folder / note.report).resolve() == report
        assert read_position(folder) is None


def test_a_folder_without_room_costs_a_message(store: Store) -> None:
    folders = make_pair(store, "one", "two")
    report = make_report(store, "one--two--0123abcd")
    with largest_file(10):
        said = published(folders, report)
    assert [words.startswith("the comparison is not noted in ") for words in said] == [True, True]
    assert all("file too large" in words for words in said)
    assert [notes_of(folder) for folder in folders] == [{}, {}]


def test_a_note_that_cannot_be_read_and_a_report_that_is_gone_are_left_out(
    mlflow_store: Store, target: Any
) -> None:
    (folder,) = make_pair(mlflow_store, "left-out")
    report = make_report(mlflow_store, "a--b--0123abcd")
    published([folder], report)
    for path in report.iterdir():
        path.unlink()
    report.rmdir()
    (folder / "comparisons" / "broken.json").write_text("[")
    (folder / "comparisons" / "other.json").write_text(json.dumps({"report": 1}))
    run_id = Feed(folder, target).push().run_id
    tags = target.client.get_run(run_id).data.tags
    assert [key for key in tags if "comparison" in key] == ["workbench.comparison.a--b--0123abcd"]
    assert target.client.list_artifacts(run_id, "comparisons") == []
