"""MLflow holds what the run folder holds: everything once, whatever happened on the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from full_disks import largest_file, tree
from tiny_runs import tiny_spec, untracked_run
from track.tracked_runs import assert_equal_to_file, end_run, make_record, make_run, points, rows

from workbench.track import mlflow_store as mlflow_store_module
from workbench.track.mlflow_fields import params_of
from workbench.track.mlflow_store import HEARTBEAT_TAG, POSITION, Feed, connect, read_position
from workbench.track.record import Addition, RunRecord, write_record
from workbench.track.store import Store, release_run


def test_a_finished_run_reads_back_whole(
    mlflow_store: Store, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_record(
        "whole", tracking={"tags": {"odd: key": "v", "team": "a"}}, notes="n" * 7000
    )
    folder, _, journal = make_run(mlflow_store, "whole", 9, record)
    scores = folder / "evaluations" / "step_00000008.parquet"
    scores.parent.mkdir()
    scores.write_bytes(b"scores")
    journal.close()
    end_run(folder, record)
    monkeypatch.chdir(tmp_path)  # where one stands must not matter
    position = Feed(folder, target).push()
    assert_equal_to_file(target, folder)
    run = target.client.get_run(position.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "whole"
    assert run.info.start_time == 1767323045000
    assert run.info.end_time == 1767326400000
    assert run.data.params == params_of(record)
    assert run.data.tags["workbench.run_id"] == record.id
    assert run.data.tags["team"] == "a"
    assert run.data.tags["odd_u3a_ key"] == "v"
    inputs = {one.dataset.name: one for one in run.inputs.dataset_inputs}
    assert {name: one.dataset.digest[0] for name, one in inputs.items()} == {
        "train": "a",
        "held_out": "b",
        "train_split": "c",
    }
    assert inputs["train"].tags[0].value == "training"
    assert not list(tmp_path.iterdir())
    monkeypatch.chdir("/")
    got = Path(target.client.download_artifacts(position.run_id, "", str(tmp_path)))
    for name in ("run_config.json", "metrics.csv", "evaluations/step_00000008.parquet"):
        assert (got / name).read_bytes() == (folder / name).read_bytes()
    assert yaml.safe_load((got / "spec.yaml").read_text()) == record.spec
    assert run.info.artifact_uri.startswith("file:///")


def test_numbers_added_after_the_end_arrive_once_and_disturb_nothing(
    mlflow_store: Store, target: Any
) -> None:
    folder, record, journal = make_run(mlflow_store, "added", 5)
    journal.close()
    end_run(folder, record)
    position = Feed(folder, target).push()
    before = points(target, position.run_id)
    values = {"unproven.wiki/nll": 3.5, "unproven.wiki/bits_per_byte": 1.25}
    added = Addition(
        name="unproven.wiki",
        step=4,
        tokens=16384,
        when="2026-01-03T00:00:00+00:00",
        source="text: 1 .txt (blank_line)",
        sha256="d" * 64,
        checkpoint_sha256="e" * 64,
        values=values,
        facts={"documents": 7, "scored_tokens": 900, "bytes": 4000},
        scores="evaluations/step_00000004.unproven.wiki.parquet",
    )
    record.results.additions = [added]
    (folder / "evaluations").mkdir()
    (folder / str(added.scores)).write_bytes(b"scores")
    write_record(record, folder)
    for _ in range(2):
        position = Feed(folder, target).push()
    after = points(target, position.run_id)
    assert {key: after.pop(key) for key in values} == {k: [(4, v)] for k, v in values.items()}
    assert repr(after) == repr(before)  # one of the numbers is NaN
    run = target.client.get_run(position.run_id)
    assert run.info.status == "FINISHED"
    inputs = {one.dataset.name: one.dataset for one in run.inputs.dataset_inputs}
    assert inputs["unproven.wiki"].digest == "d" * 36
    listed = {one.path for one in target.client.list_artifacts(position.run_id, "evaluations")}
    assert listed == {added.scores}


def test_the_experiment_opens_as_model_training(mlflow_store: Store, target: Any) -> None:
    found = target.client.get_experiment_by_name("workbench")
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"
    plain = target.client.create_experiment("made elsewhere (old)/ä")
    again = connect(None, mlflow_store, "made elsewhere (old)/ä")
    assert again.experiment_id == plain
    found = target.client.get_experiment(plain)
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_the_status_of_the_end_arrives(mlflow_store: Store, target: Any, status: str) -> None:
    folder, record, _ = make_run(mlflow_store, f"ends-{status}", 2)
    feed = Feed(folder, target)
    run_id = feed.push().run_id
    assert target.client.get_run(run_id).info.status == "RUNNING"
    record.error = "it broke"
    end_run(folder, record, status)
    feed.push()
    run = target.client.get_run(run_id)
    assert run.info.status == status
    assert run.data.tags["workbench.status"] == status
    assert run.data.tags["workbench.error"] == "it broke"


def test_a_run_that_died_is_killed_and_one_that_goes_on_runs_again(
    mlflow_store: Store, target: Any
) -> None:
    from workbench.track.store import lock_run

    folder, _, journal = make_run(mlflow_store, "died", 3)
    release_run(folder)
    run_id = Feed(folder, target).push().run_id
    run = target.client.get_run(run_id)
    assert run.info.status == "KILLED"
    assert run.info.end_time > 0
    assert lock_run(folder)
    journal.write(rows(1, first=3)[0])
    assert Feed(folder, target).push().run_id == run_id
    assert target.client.get_run(run_id).info.status == "RUNNING"
    assert_equal_to_file(target, folder)
    release_run(folder)  # and dies again
    Feed(folder, target).push()
    assert target.client.get_run(run_id).info.status == "KILLED"


def test_pushing_again_and_as_it_grows_adds_each_point_once(
    mlflow_store: Store, target: Any
) -> None:
    folder, record, journal = make_run(mlflow_store, "grows", 2)
    feed = Feed(folder, target)
    for first in (2, 5, 8):
        feed.push()
        feed.push()
        for row in rows(3, first):
            journal.write(row)
    Feed(folder, target).push()  # another process
    feed.push()
    end_run(folder, record)
    feed.push()
    assert_equal_to_file(target, folder)


def test_what_was_sent_but_not_noted_is_not_sent_twice(mlflow_store: Store, target: Any) -> None:
    """The process dies between the server's answer and its note; also before its first note."""
    folder, _, journal = make_run(mlflow_store, "unnoted", 3)
    first = Feed(folder, target).push()
    old = (folder / POSITION).read_bytes()
    for row in rows(3, 3):
        journal.write(row)
    Feed(folder, target).push()
    for note in (old, None, b"damaged"):
        if note is None:
            (folder / POSITION).unlink()
        else:
            (folder / POSITION).write_bytes(note)
        assert Feed(folder, target).push().run_id == first.run_id
        assert_equal_to_file(target, folder)


def test_steps_that_are_run_again_after_a_crash_stay_one_point(
    mlflow_store: Store, target: Any
) -> None:
    folder, _, _ = make_run(mlflow_store, "again", 9)
    path = folder / "metrics.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7]))  # it died after step 5,
    Feed(folder, target).push()
    column = lines[0].decode().strip().split(",").index("unix_time")
    replayed = []
    for line in lines[4:]:  # went back to a checkpoint at step 2, and on from there, later
        cells = line.decode().strip().split(",")
        cells[column] = "2000000000.0"
        replayed.append(",".join(cells).encode() + b"\n")
    path.write_bytes(b"".join(lines[:4] + replayed))
    (folder / POSITION).unlink()
    Feed(folder, target).push()
    steps = [step for step, _ in points(target, read_position(folder).run_id)["tokens"]]
    assert steps == list(range(9))


class Failing:
    """A client whose nth write reaches the server, and whose answer is then lost."""

    def __init__(self, client: Any, lose: int) -> None:
        self._client, self._left = client, lose

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not name.startswith(("log_", "create_", "set_", "update_")):
            return method

        def call(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            answer = method(*arguments, **named)
            if self._left == 0:
                raise ConnectionError("the answer is lost")
            return answer

        return call


class Hosted:
    """A client of a server that takes no parameter of more than 500 characters."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def log_batch(self, run_id: str, **fields: Any) -> Any:
        from mlflow.exceptions import MlflowException

        if any(len(param.value) > 500 for param in fields.get("params", ())):
            raise MlflowException.invalid_parameter_value("the value exceeds length 500")
        return self._client.log_batch(run_id, **fields)


def test_a_server_that_takes_no_long_values_gets_them_cut(
    mlflow_store: Store, target: Any, tmp_path: Path
) -> None:
    record = make_record("hosted", notes="n" * 7000)
    folder, _, journal = make_run(mlflow_store, "hosted", 3, record)
    journal.close()
    end_run(folder, record)
    hosted = type(target)(Hosted(target.client), target.experiment_id, target.uri)
    run_id = Feed(folder, hosted).push().run_id
    assert target.client.get_run(run_id).data.params == params_of(record, 500)
    assert_equal_to_file(target, folder)
    got = Path(target.client.download_artifacts(run_id, "spec.yaml", str(tmp_path)))
    assert yaml.safe_load(got.read_text())["notes"] == record.spec["notes"]


def test_an_experiment_of_any_name_is_found_again(mlflow_store: Store, target: Any) -> None:
    name = "of\nmany: parts/ä " + "x" * 300
    first = connect(None, mlflow_store, name)
    assert connect(None, mlflow_store, name).experiment_id == first.experiment_id
    found = target.client.get_experiment(first.experiment_id)
    assert found.tags["workbench.experiment"] == name
    assert len(found.name) == 250
    plain = connect(None, mlflow_store, "plain")
    assert "workbench.experiment" not in target.client.get_experiment(plain.experiment_id).tags


@pytest.mark.parametrize("lose", range(1, 12))
def test_a_lost_answer_at_any_call_leaves_no_gap_and_no_double(
    mlflow_store: Store, target: Any, lose: int
) -> None:
    folder, record, journal = make_run(mlflow_store, f"lost-{lose}", 5)
    journal.close()
    end_run(folder, record)
    shaky = type(target)(Failing(target.client, lose), target.experiment_id, target.uri)
    feed, failures = Feed(folder, shaky), 0
    while True:
        try:
            run_id = feed.push().run_id
            break
        except ConnectionError:
            failures += 1
    assert failures == (1 if lose <= 9 else failures)
    assert_equal_to_file(target, folder)
    query = f"tags.`workbench.run_id` = '{record.id}'"
    found = target.client.search_runs([target.experiment_id], query)
    assert [run.info.run_id for run in found] == [run_id]
    assert found[0].info.status == "FINISHED"
    assert found[0].data.params == params_of(record)
    assert len(found[0].inputs.dataset_inputs) == 3


def test_many_rows_go_in_batches(mlflow_store: Store, target: Any) -> None:
    folder, _, journal = make_run(mlflow_store, "many", 0)
    for step in range(700):
        journal.write({"step": step, "tokens": step, "train/nll": 1 / (step + 1), "lr": 0.1})
    Feed(folder, target).push()
    assert_equal_to_file(target, folder)


def test_artifacts_that_find_no_room_do_not_keep_metrics_and_status_back(
    mlflow_store: Store, target: Any
) -> None:
    folder, record, journal = make_run(mlflow_store, "no-room", 3)
    journal.close()
    position = Feed(folder, target).push()
    place = mlflow_store.artifacts / position.run_id / "artifacts"
    (place / "spec.yaml").unlink()
    place.rmdir()
    place.write_text("in the way")
    end_run(folder, record)
    with pytest.raises(Exception, match="artifacts"):
        Feed(folder, target).push()
    assert_equal_to_file(target, folder)
    assert target.client.get_run(position.run_id).info.status == "FINISHED"
    place.unlink()
    Feed(folder, target).push()
    assert (place / "metrics.csv").read_bytes() == (folder / "metrics.csv").read_bytes()


def test_a_store_that_was_moved_takes_its_artifacts_along(
    tmp_path: Path, mlflow_store: Store, target: Any
) -> None:
    """Moved or copied, with runs and files of before; what lies elsewhere is left there."""
    folder, record, journal = make_run(mlflow_store, "before", 3)
    journal.close()
    end_run(folder, record)
    run_id = Feed(folder, target).push().run_id
    client = target.client
    elsewhere = f"{mlflow_store.artifacts.as_uri()}-of-others"
    if client.get_experiment_by_name("theirs") is None:
        client.create_experiment("theirs", elsewhere)
    there = shutil.copytree(mlflow_store.home, tmp_path / "a new home" / "mlruns")
    untouched = tree(mlflow_store.home)
    moved = Store(there)
    for _ in range(2):
        now = connect(None, moved, "workbench")
        assert now.client.get_experiment_by_name("theirs").artifact_location == elsewhere
        assert "metrics.csv" in {one.path for one in now.client.list_artifacts(run_id)}
        got = Path(now.client.download_artifacts(run_id, "metrics.csv", str(tmp_path)))
        assert got.read_bytes() == (folder / "metrics.csv").read_bytes()
        assert now.client.get_run(run_id).info.artifact_uri.startswith(moved.artifacts.as_uri())
    # A run of before is still the same run, and a new one lies in the new place.
    assert Feed(moved.runs / "before", now).push().run_id == run_id
    assert_equal_to_file(now, moved.runs / "before")
    folder, record, journal = make_run(moved, "after", 3)
    journal.close()
    end_run(folder, record)
    position = Feed(folder, now).push()
    assert (moved.artifacts / position.run_id / "artifacts/metrics.csv").exists()
    assert tree(mlflow_store.home) == untouched


def test_a_run_whose_database_was_removed_is_sent_anew(mlflow_store: Store, target: Any) -> None:
    folder, _, _ = make_run(mlflow_store, "lost-database", 3)
    position = Feed(folder, target).push()
    note = (folder / POSITION).read_text().replace(position.run_id, "0" * 32)
    (folder / POSITION).write_text(note)
    assert Feed(folder, target).push().run_id == position.run_id
    assert_equal_to_file(target, folder)


def test_a_record_that_cannot_be_read_is_an_error_not_a_run(
    mlflow_store: Store, target: Any
) -> None:
    from workbench.errors import UserError

    folder = mlflow_store.create_run("no-record")
    with pytest.raises(UserError):
        Feed(folder, target).push()
    assert read_position(folder) is None


def test_odd_metric_names_arrive_with_their_originals(mlflow_store: Store, target: Any) -> None:
    from workbench.track.journal import Journal, columns
    from workbench.track.record import write_record

    record: RunRecord = make_record("odd")
    folder = mlflow_store.create_run("odd")
    write_record(record, folder)
    journal = Journal(folder / "metrics.csv", columns(["wiki (en), v2 @100%", "../x"]))
    journal.write({"step": 0, "tokens": 0, "wiki (en), v2 @100%/nll": 1.0, "../x/nll": 2.0})
    run = target.client.get_run(Feed(folder, target).push().run_id)
    names = yaml.safe_load(run.data.tags["workbench.renamed"])
    stored = {names.get(key, key): value for key, value in run.data.metrics.items()}
    assert stored == {"tokens": 0.0, "wiki (en), v2 @100%/nll": 1.0, "../x/nll": 2.0}


def test_a_run_on_sets_of_odd_names_is_logged_and_their_names_kept(
    tmp_path: Path, mlflow_store: Store, target: Any
) -> None:
    given = ["wiki (en), v2 @100%", "a:b", "../x", "\u65e5\u672c v1 \U0001f600"]
    held_out = []
    for number, name in enumerate(given):
        path = tmp_path / f"{number}.txt"
        path.write_text(f"one document of set {number}\n\nand another of set {number}\n")
        held_out.append({"name": name, "path": str(path)})
    folder = untracked_run(
        tiny_spec(tmp_path, "odd-sets", data={"held_out": held_out}, training={"steps": 2}),
        mlflow_store,
    ).folder
    run = target.client.get_run(Feed(folder, target).push().run_id)
    assert_equal_to_file(target, folder)
    names = json.loads(run.data.tags["workbench.renamed"])
    assert sorted(names.values()) == sorted(given)
    for name in names:
        assert f"{name}/nll" in run.data.metrics
        assert name in {one.dataset.name for one in run.inputs.dataset_inputs}
    (asked,) = [v for k, v in run.data.params.items() if k == "data.held_out"]
    assert [one["name"] for one in json.loads(asked)] == given


def databases(store: Store) -> list[Path]:
    """The database files below the store, whole or not."""
    return [path for path in store.home.rglob("*.db") if path.is_file()]


def assert_it_works(store: Store) -> None:
    target = connect(None, store, "workbench")
    assert target.client.get_experiment_by_name("workbench")
    assert databases(store) == [store.database]
    assert not [name for name in tree(store.home) if name.startswith(".mlflow-new")]


def test_a_disk_that_fills_while_the_database_is_made_does_not_break_it(store: Store) -> None:
    store.artifacts.mkdir(parents=True)
    with largest_file(200_000), pytest.raises(Exception, match=r"disk|large|I/O"):
        connect(None, store, "workbench")
    assert databases(store) == []
    store.database.touch()  # as somebody's own look at it may leave it
    assert_it_works(store)


def test_a_kill_while_the_database_is_made_does_not_break_it(store: Store) -> None:
    code = (
        "from workbench.track.mlflow_store import connect\n"
        "from workbench.track.store import Store\n"
        f"connect(None, Store({str(store.home)!r}), 'workbench')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not any(path.stat().st_size > 100_000 for path in databases(store)):
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not store.database.exists()  # half of it would work after some kills only
    assert_it_works(store)


def test_a_running_run_is_heard_of_and_an_ended_one_no_more(
    mlflow_store: Store, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record, journal = make_run(mlflow_store, "alive", 2)
    feed = Feed(folder, target)

    def heard() -> Any:
        run_id = feed.push().run_id
        return target.client.get_run(run_id).data.tags.get(HEARTBEAT_TAG)

    first = heard()
    assert first.startswith("20")
    time.sleep(1.1)
    assert heard() == first  # once a minute, not with every push
    monkeypatch.setattr(mlflow_store_module, "HEARTBEAT_SECONDS", 0.0)
    second = heard()
    assert second > first
    time.sleep(1.1)
    journal.close()
    end_run(folder, record)
    assert heard() == second
