"""Runs on streams: resumed to the bit, to the end, checked beforehand, honest about what passed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_hub import NAME, REVISION, Hub
from parquet_streams import made_up, stream_spec, three_files, write_files
from test_resume import Interrupter, same_but_for_the_past, start, tracker
from tiny_runs import untracked_run

from workbench.compare import check_specs, compare_runs
from workbench.compare.evidence import check_record
from workbench.core.data import stream_data
from workbench.core.data.errors import DataError
from workbench.core.data.stream_files import StreamFile, StreamSource, folder_source
from workbench.errors import RefusedError, UserError
from workbench.foresee import foresee
from workbench.resume import ResumeRequest
from workbench.spec.run import RunSpec
from workbench.track.events import NullTracker
from workbench.track.record import read_record
from workbench.track.store import Store
from workbench.views import run_page

__all__ = ["tracker"]  # a fixture

Track = Callable[[NullTracker], None]
TO_THE_END: dict[str, Any] = {
    "training": {"steps": 0, "batch_size": 32},
    "schedule": {"warmup_steps": 2, "decay": "constant"},
    "evaluation": {"eval_steps": 5},
}


def spec_of(folder: Path, name: str = "tiny", **changes: Any) -> RunSpec:
    return stream_spec(folder, name, checkpoint={"save_total_limit": 1}, **changes)


@pytest.mark.parametrize("stop", [9, *(pytest.param(at, marks=pytest.mark.slow) for at in (4, 13))])
def test_a_run_to_the_end_of_the_stream_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, tracker: Track, stop: int
) -> None:
    """The stops lie in each of the three files, the last of them at the last update."""
    spec = spec_of(three_files(tmp_path / "s")[0], **TO_THE_END)
    straight = start(spec, Store(tmp_path / "straight"))
    assert straight.record.points[-1].step == 13
    tracker(Interrupter(stop, signal.SIGINT))
    store = Store(tmp_path / "resumed")
    broken = start(spec, store)
    assert broken.record.status == ("FINISHED" if stop == 13 else "KILLED")
    tracker(NullTracker())
    resumed = start(spec, store, ResumeRequest())
    same_but_for_the_past(straight.folder, resumed.folder)
    for field in ("counts", "train_sha256"):
        then, now = (getattr(one.record.effective.data, field) for one in (straight, resumed))
        assert then == now
    assert straight.record.effective.evaluation == resumed.record.effective.evaluation
    assert resumed.record.total_tokens == 13 * 32 * 32
    check_record(resumed.folder, read_record(resumed.folder))


@pytest.mark.parametrize("steps", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_a_signal_while_a_server_is_waited_for_saves_and_ends(
    tmp_path: Path, tracker: Track, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    changes = TO_THE_END | {"training": {"steps": steps, "batch_size": 16}}
    spec = spec_of(three_files(tmp_path / "s")[0], **changes)
    straight = start(spec, Store(tmp_path / "straight"))

    def lost() -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ConnectionResetError("gone")

    def with_a_lost_file(*given: Any) -> StreamSource:
        source = folder_source(*given)
        first, second, third = source.files
        return replace(source, files=(first, StreamFile(second.name, lost, remote=True), third))

    store = Store(tmp_path / "resumed")
    with monkeypatch.context() as patch:
        patch.setattr(stream_data, "folder_source", with_a_lost_file)
        broken = start(spec, store)
    assert (broken.record.status, broken.exit_code) == ("KILLED", 128 + signal.SIGTERM)
    assert 5 < broken.record.results.tokens / spec.tokens_per_step < 15
    resumed = start(spec, store, ResumeRequest())
    same_but_for_the_past(straight.folder, resumed.folder)


def test_what_a_run_on_a_stream_says_of_itself(tmp_path: Path, monkeypatch: Any) -> None:
    texts = made_up(60)
    held = next(t for t in texts if stream_data.is_held_out(stream_data.split_hash(t), 0.2))
    texts.insert(40, f"see: {held}" + " and so on" * 3)  # trains, as its hash has it
    spec = spec_of(write_files(tmp_path / "s", texts), **TO_THE_END)
    outcome = untracked_run(spec, Store(tmp_path / "m"))
    record = outcome.record
    facts = record.effective.evaluation["held_out"].passed
    assert isinstance(facts, dict)
    assert facts["outcome"] == "contaminated"
    assert facts["overlapping_documents"] == 1
    assert record.effective.data.counts
    assert facts["checked_documents"] == record.effective.data.counts["consumed_documents"] > 40
    assert "unproven/nll" in record.results.final
    assert not [name for name in record.results.final if name.startswith("held_out")]
    page = run_page(record, record.status, outcome.folder)
    assert "proven: SHA-256 of all 1 files" in page
    assert "unproven: contaminated by what passed: 1 of 6 documents overlap" in page

    killed = spec_of(tmp_path / "s", "planned", training={"steps": 3})
    first = untracked_run(killed, Store(tmp_path / "m")).record
    assert first.total_tokens == first.results.tokens == 3 * 128
    assert first.effective.evaluation["held_out"].passed["outcome"] == "held_out"  # so far


def test_two_specs_are_checked_without_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = three_files(tmp_path / "s")[0]
    store = Store(tmp_path / "m")
    a, b = spec_of(folder, "a"), spec_of(folder, "b")
    with monkeypatch.context() as patch:
        patch.setattr(stream_data.RowReader, "read", lambda *a: pytest.fail("it was read"))
        facts = [foresee(spec, store) for spec in (a, b)]
        assert check_specs(a, b, *facts).verdict == "comparable"
        other = spec_of(write_files(tmp_path / "t", made_up(50)), "c")
        assert check_specs(a, other, facts[0], foresee(other, store)).verdict == "refused"
        end = foresee(spec_of(folder, "d", **TO_THE_END), store)
        assert end.points is None
    runs = [untracked_run(spec, store) for spec in (a, b)]
    ran = runs[0].record.effective.data.model_dump()
    for leaf in ("train_sha256", "split", "train_tokens"):
        assert facts[0].facts[f"effective.data.{leaf}"] == ran[leaf]
    comparison = compare_runs(runs[0].folder, runs[1].folder).to_json()
    apart = {rule["rule"] for rule in comparison["rules"] if rule["outcome"] != "match"}
    assert apart == {"interval"}  # too few steps for a throughput
    assert comparison["results"]["unproven/nll"]["difference"] == 0


def test_the_guard_refuses_another_stream_and_not_what_only_the_end_shows(
    tmp_path: Path, tracker: Track
) -> None:
    folder = three_files(tmp_path / "s")[0]
    store = Store(tmp_path / "m")
    tracker(Interrupter(3))
    start(spec_of(folder), store)
    tracker(NullTracker())
    write_files(folder, made_up(45, 9))
    with pytest.raises(RefusedError, match=r"effective\.data\.train_sha256"):
        start(spec_of(folder), store, ResumeRequest())
    three_files(folder)
    assert start(spec_of(folder), store, ResumeRequest()).record.status == "FINISHED"


def test_a_plan_beyond_the_end_and_a_file_that_changes_fail_the_run(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "s", made_up(30))
    store = Store(tmp_path / "m")
    with pytest.raises(DataError, match=r"the stream ends after \d+ sequences"):
        untracked_run(spec_of(folder, training={"steps": 10, "batch_size": 64}), store)
    record = read_record(store.path_of("tiny"))
    assert record.status == "FAILED"
    assert "fewer training.steps" in str(record.error)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"stream_revision": "main"}, "is no full hash of a commit"),
        ({"stream_revision": "A" * 40}, "is no full hash of a commit"),
        ({}, "a stream from the hub is pinned"),
        ({"stream_revision": "0" * 40, "stream_path": "x"}, "does not apply to a local folder"),
    ],
)
def test_a_stream_of_the_hub_is_pinned_to_a_commit(data: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        RunSpec.model_validate({"name": "x", "data": {"dataset": "fineweb"} | data})
    assert said in str(caught.value)


def test_without_the_package_the_hub_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    data = {"dataset": "fineweb", "stream_revision": "0" * 40}
    spec = RunSpec.model_validate({"name": "x", "tokenizer": {"name": "bytes"}, "data": data})
    with pytest.raises(UserError, match=r'pip install "workbench\[fineweb\]"'):
        untracked_run(spec, Store(tmp_path / "m"))


@pytest.mark.slow
def test_a_run_on_the_hub_reads_what_a_run_on_its_files_reads(tmp_path: Path) -> None:
    """The real clients against a server that answers as the hub does and cuts every third answer;
    in a process of its own, as they read the hub's address when they are imported."""
    folder = three_files(tmp_path / "hub/small")[0]
    local = untracked_run(spec_of(folder, **TO_THE_END), Store(tmp_path / "m")).record
    hub = Hub(tmp_path / "hub", broken=3)
    threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
    document = spec_of(folder, "streamed", **TO_THE_END).model_dump(mode="json")
    document["data"] |= {"stream_path": None, "stream_name": NAME, "stream_config": "small"}
    document["data"]["stream_revision"] = REVISION
    (tmp_path / "spec.yaml").write_text(json.dumps(document))
    environment = dict(os.environ, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"))

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "workbench", "run", str(tmp_path / "spec.yaml"), *more]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
        )

    done = run()
    assert done.returncode == 0, done.stderr
    assert hub.cut >= 1
    record = read_record(tmp_path / "mlruns/runs/streamed")
    assert record.points[-1].order_digest == local.points[-1].order_digest
    for name, facts in record.effective.evaluation.items():
        assert facts == local.effective.evaluation[name]
    assert str(record.effective.data.order_proof).startswith("pinned, not proven: by commit 0123")
    wrong = run("name=other", "data.stream_config=large")
    assert wrong.returncode == 2
    assert (
        "data.stream_config: BuilderConfig 'large' not found. Available: ['small']" in wrong.stderr
    )
    hub.shutdown()
    hub.server_close()
