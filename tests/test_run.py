"""Whole runs: what they record, what they leave behind however they end, and what MLflow gets."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from tiny_runs import tiny_parts, tiny_spec, untracked_run
from torch import Tensor
from track.tracked_runs import assert_equal_to_file

from workbench import recorder
from workbench import run as runner
from workbench.cli import _guarded
from workbench.compare.facts import facts_of_record, is_known
from workbench.core.checkpoint import checkpoints
from workbench.core.model import Transformer, build_model
from workbench.core.precision import FLOAT32
from workbench.core.saving import Saver
from workbench.core.train import StepResult
from workbench.errors import StoreError
from workbench.progress import Reporter
from workbench.run import RunOutcome
from workbench.spec.checklist import FREE, tag_of
from workbench.spec.run import RunSpec
from workbench.track.events import NullTracker, Say, never, silent
from workbench.track.journal import MEASURED_COLUMNS, read_metrics
from workbench.track.mlflow_fields import leaves
from workbench.track.mlflow_store import Feed, connect, read_position
from workbench.track.record import RunRecord, document_of, read_record
from workbench.track.store import Store, effective_status, is_locked

LEGACY_METRICS = Path(__file__).parent / "data/legacy_run_gqa/metrics.csv"
SECRETS = ("hunter2", "tr0ub4dor")

Wb = Callable[..., int]


# -- runs that several tests look at


@dataclass(frozen=True)
class Tracked:
    """A store whose MLflow database exists, and the connection to that."""

    store: Store
    target: Any
    path: Path  # of what the runs of the store read

    def folder(self, name: str) -> Path:
        return self.store.runs / name

    def mlflow_run(self, name: str) -> Any:
        position = read_position(self.folder(name))
        assert position
        return self.target.client.get_run(position.run_id)


@dataclass(frozen=True)
class Stopped:
    """A process of `wb run --json` that a signal has ended."""

    name: str
    code: int
    printed: dict[str, Any]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    folder = tmp_path_factory.mktemp("tracked")
    store = Store(folder / "mlruns")
    return Tracked(store, connect(store.tracking_uri, store, "workbench"), folder)


def start_endless(tracked: Tracked, number: signal.Signals) -> subprocess.Popen[str]:
    """`wb run` of a spec that does not end by itself, called as the signal that is to end it."""
    path = tracked.path / f"{number.name.lower()}.yaml"
    endless = {"training": {"steps": 10**6}, "evaluation": {"eval_steps": 0}}
    path.write_text(tiny_spec(tracked.path, path.stem, **endless).model_dump_json())
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    return subprocess.Popen(
        [sys.executable, "-m", "workbench", "run", str(path), "--json"],
        env=environment | {"WB_HOME": str(tracked.store.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def send(tracked: Tracked, process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Sends the signal while the process trains."""
    name = number.name.lower()
    metrics = tracked.folder(name) / "metrics.csv"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as Ctrl-C does: to the whole group
    else:
        process.send_signal(number)


def end_of(process: subprocess.Popen[str], number: signal.Signals) -> Stopped:
    """Waits for the end that a signal has asked for."""
    printed = process.communicate(timeout=120)[0]
    return Stopped(number.name.lower(), process.returncode, json.loads(printed))


def stop(tracked: Tracked, process: subprocess.Popen[str], number: signal.Signals) -> Stopped:
    """Sends the signal while the process trains, and waits for its end."""
    try:
        send(tracked, process, number)
        return end_of(process, number)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def ended(tracked: Tracked) -> Iterator[tuple[RunOutcome, Stopped]]:
    """A run that MLflow follows to its end, and one that Ctrl-C ends: MLflow takes both at once."""
    spec = tiny_spec(
        tracked.path,
        "finished",
        training={"steps": 16, "label_smoothing": 0.1},
        evaluation={"eval_steps": 5},
        telemetry={"log_steps": 3},
        tracking={"uri": tracked.store.tracking_uri, "tags": {"purpose": "a test"}},
    )
    process = start_endless(tracked, signal.SIGINT)
    try:
        send(tracked, process, signal.SIGINT)
        outcome = runner.run(spec, tracked.store, ["run", "finished.yaml"], quiet=True)
        yield outcome, end_of(process, signal.SIGINT)
    finally:
        process.kill()
        process.communicate()
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def finished(ended: tuple[RunOutcome, Stopped]) -> RunOutcome:
    return ended[0]


@pytest.fixture
def wb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wb:
    """`wb` in this process, on a store of its own that no MLflow follows."""
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["wb", *arguments])
        return _guarded(list(arguments))

    return call


def spec_file(folder: Path, name: str = "tiny", **changes: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(tiny_spec(folder, name, **changes).model_dump_json())
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# -- what a run records


def facts_of(record: RunRecord) -> dict[str, Any]:
    facts = facts_of_record(record, record.points[-1])
    return {leaf: value for leaf, value in facts.items() if leaf.startswith("effective.")}


@pytest.mark.parametrize("kind", ["routed", "dense", "random"])
def test_a_finished_run_knows_every_effective_fact(
    finished: RunOutcome, tmp_path: Path, kind: str
) -> None:
    if kind == "routed":
        record = finished.record
    elif kind == "dense":
        spec = tiny_spec(tmp_path, model={"mlp_type": "dense"}, training={"steps": 16})
        record = untracked_run(spec, Store(tmp_path / "mlruns")).record
    else:
        text = {"text_file": None, "text_unit": None, "held_out_ratio": None}
        data = {"dataset": "random", **text}
        spec = tiny_spec(tmp_path, data=data, training={"steps": 16})
        record = untracked_run(spec, Store(tmp_path / "mlruns")).record
    assert record.status == "FINISHED"
    # What no rule judges may be unknown: code, for one, need not come from a checkout.
    judged = {leaf: value for leaf, value in facts_of(record).items() if tag_of(leaf) != FREE}
    assert len(judged) > 35
    unknown = {leaf for leaf, value in judged.items() if not is_known(value)}
    of_text = {f"effective.evaluation.{name}.proof" for name in ("held_out", "train_split")}
    of_text.add("effective.budget.bytes")
    assert unknown == (of_text if kind == "random" else set()), "random ids are no text"


def test_the_record_in_the_folder_is_the_one_returned(finished: RunOutcome) -> None:
    record = read_record(finished.folder)
    assert document_of(record) == document_of(finished.record)
    assert record.effective.budget.finished is True
    assert (record.error, record.results.tokens) == (None, 16 * 128)
    assert record.ended
    assert record.ended >= record.started
    assert not is_locked(finished.folder)


def test_effective_facts_are_what_ran_and_not_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that falls back to float32, a spec that asks for bf16 ran float32."""
    monkeypatch.setattr(runner, "choose_precision", lambda name, device: FLOAT32)
    spec = tiny_spec(tmp_path, training={"precision": "bf16", "device": "auto"})
    record = untracked_run(spec, Store(tmp_path / "mlruns")).record
    assert record.spec["training"]["precision"] == "bf16"
    assert record.effective.precision.compute_dtype == "float32"
    assert record.effective.precision.matmul == "float32"
    assert record.effective.hardware.device_type not in (None, "auto")
    assert record.effective.optimizer.warmup_steps == 1
    assert record.spec["schedule"]["warmup_steps"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")
def test_bf16_on_a_cpu_is_recorded_as_the_products_that_ran(tmp_path: Path) -> None:
    parts = tiny_parts(tmp_path, training={"precision": "bf16"})
    seen: list[torch.dtype] = []
    linear = torch.nn.functional.linear

    def watched(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.append(weight.dtype)
        return linear(x, weight, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", watched)
        parts.forward(torch.zeros(1, 4, dtype=torch.int64))
    assert len(set(seen)) == 1
    phrase = parts.effective.precision.matmul
    assert phrase
    assert ("native" in phrase) == (seen[0] == torch.bfloat16)
    assert ("float32 units" in phrase) == (seen[0] == torch.float32)
    assert parts.effective.precision.compute_dtype == "bfloat16"


def test_recorded_counts_are_those_of_the_scores(finished: RunOutcome) -> None:
    path = finished.folder / "evaluations/step_00000016.parquet"
    table = pq.read_table(path).to_pandas()
    final = finished.record.results.final
    for name, facts in finished.record.effective.evaluation.items():
        rows = table[table["set"] == name]
        assert len(rows) == facts.documents
        assert rows["tokens"].sum() == facts.scored_tokens
        assert rows["bytes"].sum() == facts.bytes
        assert rows["index"].tolist() == list(range(len(rows)))
        assert final[f"{name}/nll"] == math.fsum(rows["nll_sum"]) / rows["tokens"].sum()


# -- metrics.csv


def cells(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_original_columns_come_first_and_in_their_order(finished: RunOutcome) -> None:
    original = LEGACY_METRICS.read_text().splitlines()[0].split(",")
    names = (finished.folder / "metrics.csv").read_text().splitlines()[0].split(",")
    assert len(original) == 29
    assert names[:29] == original
    assert len(set(names)) == len(names)


def test_rows_stand_where_something_is_due_and_hold_what_was_measured(finished: RunOutcome) -> None:
    """Evaluation every 5 of 16 steps, at the start and at the end; a log line every 3."""
    rows = cells(finished.folder)
    assert [int(row["step"]) for row in rows] == [0, 1, 3, 5, 6, 9, 10, 12, 15, 16]
    evaluated = ("eval_loss", "eval_ppl", "held_out/nll", "train_split/bits_per_byte")
    telemetry = (
        "expert_0_share",
        "expert_dead_count",
        "routed_gate",
        "router_aux_loss",
    )
    trained = ("train_loss", "train_ppl", "train/nll", "total_loss", "grad_norm", "lr")
    for row in rows:
        step = int(row["step"])
        assert int(row["tokens"]) == step * 128
        assert {name for name in evaluated if row[name]} == (
            set(evaluated) if step in (0, 5, 10, 15, 16) else set()
        )
        assert {name for name in trained if row[name]} == (set(trained) if step else set())
        assert bool(row["tok_s"]) == (step > 1)
        assert not any(row[name] for name in telemetry)
        assert "nan" not in row.values()
        assert row["eval_loss"] == row["held_out/nll"]
        assert row["train_loss"] == row["train/nll"]
        assert row["total_loss"] == row["train/objective"]
    assert float(rows[-1]["train/objective"]) > float(rows[-1]["train/nll"])  # smoothing apart
    assert float(rows[-1]["eval_ppl"]) == math.exp(float(rows[-1]["eval_loss"]))
    points = finished.record.points
    assert [point.step for point in points] == [0, 5, 10, 15, 16]


def saved_tensors(folder: Path) -> dict[str, bytes]:
    newest = checkpoints(folder / "checkpoints")[-1]
    return {path.name: path.read_bytes() for path in sorted(newest.glob("*.safetensors"))}


def same_spec(finished: RunOutcome, name: str, **changes: Any) -> RunSpec:
    document = json.loads(finished.record.run_spec.model_dump_json(exclude_none=True))
    for section, values in changes.items():
        document[section] = document[section] | values if isinstance(values, dict) else values
    return RunSpec.model_validate(document | {"name": name})


def test_what_is_watched_does_not_change_by_being_watched(
    finished: RunOutcome, tmp_path: Path
) -> None:
    """Tracked and evaluated now and then, against evaluated and logged at every step."""
    store = Store(tmp_path / "mlruns")
    often = same_spec(
        finished,
        "often",
        evaluation={"eval_steps": 1},
        telemetry={"log_steps": 1},
        checkpoint={"save_steps": 4},
    )
    folder = untracked_run(often, store).folder
    assert saved_tensors(folder) == saved_tensors(finished.folder)
    wanted = cells(finished.folder)
    found = {row["step"]: row for row in cells(folder)}
    reproducible = set(wanted[0]) - set(MEASURED_COLUMNS)
    compared = 0
    for row in wanted:
        for name in reproducible:
            if row[name]:
                assert row[name] == found[row["step"]][name], (row["step"], name)
                compared += 1
    assert compared > 100
    other = untracked_run(same_spec(finished, "other", seed=43), store).folder
    assert saved_tensors(other) != saved_tensors(folder)
    assert [row["train/nll"] for row in cells(other)] != [row["train/nll"] for row in wanted]
    assert cells(other)[0]["held_out/nll"] != wanted[0]["held_out/nll"]


# -- MLflow


def test_mlflow_holds_the_whole_run(tracked: Tracked, finished: RunOutcome) -> None:
    record, folder = finished.record, finished.folder
    run = tracked.mlflow_run("finished")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "finished"
    assert_equal_to_file(tracked.target, folder)

    spec = leaves(record.spec)
    assert run.data.params.keys() == set(spec)
    assert run.data.params["training.label_smoothing"] == "0.1"
    assert run.data.params["model.num_experts"] == "4"
    assert run.data.params["schedule.warmup_steps"] == "null"

    tags = run.data.tags
    assert tags["workbench.run_id"] == record.id
    assert tags["purpose"] == "a test"
    code = record.effective.code
    assert tags["effective.code.package_sha256"] == code.package_sha256
    if code.git_commit:
        assert tags["mlflow.source.git.commit"] == code.git_commit
        assert tags["effective.code.git_dirty"] == json.dumps(code.git_dirty)
        assert tags.get("effective.code.git_diff_sha256") == code.git_diff_sha256
    assert tags["effective.precision.compute_dtype"] == "float32"

    inputs = {one.dataset.name: one.dataset.digest for one in run.inputs.dataset_inputs}
    facts = record.effective
    wanted = {"train": facts.data.train_sha256}
    wanted |= {name: one.sha256 for name, one in facts.evaluation.items()}
    assert inputs.keys() == wanted.keys() == {"train", "train_split", "held_out"}
    for name, digest in inputs.items():
        assert len(digest) >= 32
        assert str(wanted[name]).startswith(digest)


def test_mlflow_has_the_files_as_they_are_in_the_folder(
    tracked: Tracked, finished: RunOutcome, tmp_path: Path
) -> None:
    run_id = tracked.mlflow_run("finished").info.run_id
    client, folder = tracked.target.client, finished.folder
    names = {entry.path for entry in client.list_artifacts(run_id)}
    assert {"spec.yaml", "run_config.json", "metrics.csv"} <= names
    for name in ("run_config.json", "metrics.csv"):
        got = Path(client.download_artifacts(run_id, name, str(tmp_path)))
        assert got.read_bytes() == (folder / name).read_bytes()
    spec = Path(client.download_artifacts(run_id, "spec.yaml", str(tmp_path)))
    assert yaml.safe_load(spec.read_text()) == finished.record.spec


def test_credentials_of_the_tracking_address_are_nowhere(
    tracked: Tracked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not in the run's files, on the console, or in MLflow, once that gets the run."""
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    monkeypatch.setenv("WB_HOME", str(tracked.store.home))
    path = spec_file(tmp_path, "secret", training={"steps": 1})
    uri = f"http://ada:p@{SECRETS[0]}@127.0.0.1:1/?token={SECRETS[1]}"
    arguments = ["run", path, f"tracking.uri={uri}", f"notes=see {uri}"]
    arguments.append(f"tracking.tags={{where: '{uri}'}}")
    monkeypatch.setattr(sys, "argv", ["wb", *arguments])
    assert _guarded(arguments) == 0
    assert _guarded([*arguments, "name=planned", "--dry-run"]) == 0
    folder = tracked.folder("secret")
    assert read_record(folder).status == "FINISHED"
    assert "127.0.0.1" in read_record(folder).spec["tracking"]["uri"]
    Feed(folder, tracked.target).push()
    printed = capfd.readouterr()
    shown = (printed.out + printed.err).encode()
    assert b"127.0.0.1" in shown
    for secret in SECRETS:
        assert secret.encode() not in shown
        for name, content in contents(tracked.store.home).items():
            assert secret.encode() not in content, name


# -- refused before it begins


def test_a_taken_name_is_refused_and_nothing_is_overwritten(
    tmp_path: Path, wb: Wb, capsys: pytest.CaptureFixture[str]
) -> None:
    path = spec_file(tmp_path)
    assert wb("run", path) == 0
    before = contents(tmp_path / "mlruns/runs")
    capsys.readouterr()
    assert wb("run", path, "seed=7", "name=tiny") == 2
    shown = capsys.readouterr().err
    assert "tiny-2" in shown
    assert "never overwritten" in shown
    assert contents(tmp_path / "mlruns/runs") == before
    assert wb("run", path, "name=tiny-2") == 0


@pytest.mark.parametrize(
    "change",
    [
        "name=../x",
        "name=..",
        "data.text_file=missing.txt",
        "data.text_file=empty.txt",
        "data.text_file=bytes.txt",
        "data.text_file=short.txt",
        "training.seq_len=100000",
        "training.device=mps" if not torch.backends.mps.is_available() else "seed=-1",
    ],
)
def test_what_cannot_run_leaves_no_run_behind(
    tmp_path: Path, wb: Wb, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = spec_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n\n")
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00broken\x80\n\n" * 50)
    Path("short.txt").write_text("a\n\nb\n")
    assert wb("run", path, change) == 2
    runs = tmp_path / "mlruns/runs"
    assert not runs.exists() or not list(runs.iterdir())
    assert not (tmp_path / "mlruns/x").exists()
    assert not list(tmp_path.glob("**/metrics.csv"))


# -- stopped


class Signaller(NullTracker):
    """Sends this process a signal when the row of a step has been logged."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def log(self, values: Any) -> None:
        if values["step"] == self.step:
            os.kill(os.getpid(), self.number)


def run_with(tracker: NullTracker, spec: RunSpec, store: Store) -> RunOutcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "tracker_for", lambda spec, store: tracker)
        return runner.run(spec, store, ["run", "tiny.yaml"], quiet=True)


def whole(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint has the hash that its manifest says."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {"model.safetensors", "optimizer.safetensors", "state.json"} <= files.keys() and all(
        hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == entry["sha256"]
        for name, entry in files.items()
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signals are heard, also in the background of a shell; and given back after a run."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == heard


def test_a_process_that_ctrl_c_stops_saves_and_ends_as_killed(
    tracked: Tracked, ended: tuple[RunOutcome, Stopped]
) -> None:
    assert_killed(tracked, ended[1], signal.SIGINT)


@pytest.mark.slow
def test_a_process_that_a_scheduler_stops_saves_and_ends_as_killed(tracked: Tracked) -> None:
    process = start_endless(tracked, signal.SIGTERM)
    assert_killed(tracked, stop(tracked, process, signal.SIGTERM), signal.SIGTERM)


def assert_killed(tracked: Tracked, process: Stopped, number: signal.Signals) -> None:
    folder = tracked.folder(process.name)
    record = read_record(folder)
    assert process.code == process.printed["exit_code"] == 128 + number
    assert record.status == process.printed["status"] == "KILLED"
    assert str(record.error).startswith(f"stopped by {number.name}")
    (saved,) = checkpoints(folder / "checkpoints")
    assert whole(saved)
    last = int(cells(folder)[-1]["step"])
    assert saved.name == f"step_{last:08d}"
    assert f"a checkpoint of step {last} was saved" in str(record.error)
    run = tracked.mlflow_run(process.name)
    assert run.info.status == "KILLED"
    assert run.data.tags["workbench.error"] == record.error
    assert_equal_to_file(tracked.target, folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_steps_ends_after_the_step(
    tmp_path: Path, handlers: None, number: signal.Signals
) -> None:
    spec = tiny_spec(tmp_path, training={"steps": 50})
    outcome = run_with(Signaller(3, number), spec, Store(tmp_path / "mlruns"))
    assert outcome.exit_code == 128 + number
    record = read_record(outcome.folder)
    assert record.status == "KILLED"
    assert record.effective.budget.finished is False
    assert record.results.tokens == 3 * 128
    assert [path.name for path in checkpoints(outcome.folder / "checkpoints")] == ["step_00000003"]
    assert read_metrics(outcome.folder / "metrics.csv")["step"] == [0, 1, 2, 3]
    assert [point.step for point in record.points] == [0, 2]


def test_a_signal_after_the_last_step_changes_nothing(tmp_path: Path, handlers: None) -> None:
    spec = tiny_spec(tmp_path)
    outcome = run_with(Signaller(4, signal.SIGINT), spec, Store(tmp_path / "mlruns"))
    assert (outcome.exit_code, outcome.record.status) == (0, "FINISHED")


@pytest.mark.parametrize(
    ("call", "steps", "saved"),
    [(1, [], []), (4, [0, 1, 2], ["step_00000002"]), (5, [0, 1, 2, 3, 4], ["step_00000004"])],
)
def test_a_signal_cuts_an_evaluation_short(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handlers: None,
    call: int,
    steps: list[int],
    saved: list[str],
) -> None:
    """In the one before the first update, in the second set of step 2, and after the last."""
    calls = [0]
    evaluate = recorder.evaluate

    def interrupted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments)

    monkeypatch.setattr(recorder, "evaluate", interrupted)
    outcome = untracked_run(tiny_spec(tmp_path), Store(tmp_path / "mlruns"))
    assert calls[0] == call, "the evaluation went on"
    assert outcome.exit_code == 130
    record = read_record(outcome.folder)
    assert record.status == "KILLED"
    assert ("nothing was trained" in str(record.error)) == (not saved)
    assert names_in(outcome.folder / "checkpoints") == saved
    assert all(whole(outcome.folder / "checkpoints" / name) for name in saved)
    table = read_metrics(outcome.folder / "metrics.csv")
    assert table["step"] == steps
    # Half an evaluation is none: no number, no point, no scores.
    complete = [step for step in steps if step % 2 == 0][:-1]
    assert [point.step for point in record.points] == complete
    found = zip(table["step"], table["train_split/nll"], strict=True)
    assert [step for step, value in found if value is not None] == complete
    assert len(list(outcome.folder.glob("evaluations/*.parquet"))) == len(complete)


@pytest.mark.parametrize("moment", ["model.safetensors", "state.json", "manifest.json"])
def test_a_second_ctrl_c_while_saving_is_killed_and_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None, moment: str
) -> None:
    fsync = os.fsync

    def impatient(handle: int) -> None:
        fsync(handle)
        if synced(handle).endswith(f"3.{os.getpid()}/{moment}"):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(os, "fsync", impatient)
    spec = tiny_spec(tmp_path, training={"steps": 50}, checkpoint={"save_steps": 2})
    try:
        outcome = run_with(Signaller(3, signal.SIGINT), spec, Store(tmp_path / "mlruns"))
    except KeyboardInterrupt:
        pytest.fail("the run did not end as one that was killed")
    assert outcome.exit_code == 130
    record = read_record(outcome.folder)
    assert record.status == "KILLED"
    assert "second SIGINT" in str(record.error)
    assert "was saved" not in str(record.error)
    assert names_in(outcome.folder / "checkpoints") == ["step_00000002"]
    assert whole(outcome.folder / "checkpoints/step_00000002")
    assert not is_locked(outcome.folder)


def test_ctrl_c_while_mlflow_is_waited_for_does_not_undo_the_end(
    tmp_path: Path, handlers: None
) -> None:
    class Slow(NullTracker):
        def finish(
            self, record: RunRecord, say: Say = silent, hurried: Callable[[], bool] = never
        ) -> str | None:
            os.kill(os.getpid(), signal.SIGINT)
            assert hurried(), "the first ends the wait"
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            return None

    store = Store(tmp_path / "mlruns")
    with pytest.raises(KeyboardInterrupt):  # the second, whatever the tracker does
        run_with(Slow(), tiny_spec(tmp_path), store)
    assert read_record(store.runs / "tiny").status == "FINISHED"


# -- failed


def failing_model(step: int) -> Callable[..., Transformer]:
    """Builds models whose backward pass raises at an update."""

    def build(*arguments: Any, **options: Any) -> Transformer:
        model = build_model(*arguments, **options)
        calls = [0]

        def hook(gradient: Tensor) -> Tensor:
            calls[0] += 1
            if calls[0] == step:
                raise RuntimeError("the third backward pass fell over")
            return gradient

        model.get_parameter("layers.0.self_attn.q_proj.weight").register_hook(hook)
        return model

    return build


def test_an_exception_in_training_is_failed_here_and_in_mlflow(
    tracked: Tracked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    handlers: None,
) -> None:
    monkeypatch.setenv("WB_HOME", str(tracked.store.home))
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # for the report of the crash
    monkeypatch.setattr(runner, "build_model", failing_model(3))
    path = spec_file(tmp_path, "fallen")
    monkeypatch.setattr(sys, "argv", ["wb", "run", path])
    assert _guarded(["run", path]) == 70
    assert "fell over" in capsys.readouterr().err
    folder = tracked.folder("fallen")
    record = read_record(folder)
    assert record.status == "FAILED"
    assert record.error == "RuntimeError: the third backward pass fell over"
    assert record.effective.budget.finished is False
    assert record.results.tokens == 2 * 128
    assert read_metrics(folder / "metrics.csv")["step"] == [0, 1, 2]
    Feed(folder, tracked.target).push()
    run = tracked.mlflow_run("fallen")
    assert run.info.status == "FAILED"
    assert run.data.tags["workbench.error"] == record.error
    assert_equal_to_file(tracked.target, folder)


def test_a_gradient_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, wb: Wb, capsys: pytest.CaptureFixture[str]
) -> None:
    """A z-loss so heavy that float32 overflows in the very first norm."""
    assert wb("run", spec_file(tmp_path), "training.z_loss=1e30") == 4
    assert "step 1" in capsys.readouterr().err
    folder = tmp_path / "mlruns/runs/tiny"
    record = read_record(folder)
    assert record.status == "FAILED"
    assert "its norm is inf" in str(record.error)
    assert record.results.tokens == 0
    assert read_metrics(folder / "metrics.csv")["step"] == [0]
    assert not (folder / "checkpoints").exists()


def synced(handle: int) -> str:
    """The path of an open file."""
    return str(Path(f"/proc/self/fd/{handle}").readlink())


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A disk without room for files of a name: from their nth sync on, so many times; of the
    metrics, whose syncs are not counted, from their nth line on."""

    def fill(name: str, first: int = 1, times: int = 10**6, call: str | None = None) -> None:
        call = call or ("write" if name == "metrics.csv" else "fsync")
        real, seen = getattr(os, call), [0]

        def refuse(handle: int, *arguments: Any) -> Any:
            if name in Path(synced(handle)).name:
                seen[0] += 1
                if first <= seen[0] < first + times:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(handle, *arguments)

        monkeypatch.setattr(os, call, refuse)

    return fill


@pytest.mark.parametrize(
    ("name", "first", "steps", "saved"),
    [
        # The header of metrics.csv, then each row: here the row of step 3.
        ("metrics.csv", 5, [0, 1, 2], 2),
        ("metrics.csv", 4, [0, 1], None),  # and here that of step 2, with its evaluation
        ("optimizer.safetensors", 2, [0, 1, 2, 3, 4], 2),
        # The record is synced at the start and after each evaluation: here after that of step 2.
        ("run_config.json", 3, [0, 1, 2], None),
    ],
)
def test_a_full_disk_ends_the_run_as_failed_and_names_the_file(
    tmp_path: Path,
    wb: Wb,
    full_disk: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    name: str,
    first: int,
    steps: list[int],
    saved: int | None,
) -> None:
    full_disk(name, first, times=1)
    assert wb("run", spec_file(tmp_path), "checkpoint.save_steps=2") == 74
    shown = capsys.readouterr().err
    folder = tmp_path / "mlruns/runs/tiny"
    expected = "step_00000004" if "safetensors" in name else name
    assert str(folder) in shown
    assert expected in shown
    assert "no space left" in shown.lower()
    assert "fault in wb" not in shown
    record = read_record(folder)
    assert record.status == "FAILED"
    assert expected in str(record.error)
    assert read_metrics(folder / "metrics.csv")["step"] == steps
    kept = [] if saved is None else [f"step_{saved:08d}"]
    assert names_in(folder / "checkpoints") == kept
    assert not [path for path in folder.rglob(".*") if path.name != ".lock"]
    # A number that is recorded is also in the metrics.
    assert {point.step for point in record.points} <= set(steps)


def test_rows_that_the_disk_refuses_later_end_the_run_without_them(
    tmp_path: Path, wb: Wb, full_disk: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a disk elsewhere does, which takes what it has no room for until it is synced."""
    full_disk("metrics.csv", 2, call="fsync")  # after the header
    assert wb("run", spec_file(tmp_path)) == 74
    assert "metrics.csv" in capsys.readouterr().err
    record = read_record(tmp_path / "mlruns/runs/tiny")
    assert (record.status, record.points) == ("FAILED", [])
    assert read_metrics(tmp_path / "mlruns/runs/tiny/metrics.csv")["step"] == []


def test_scores_that_find_no_room_end_the_run_the_same_way(
    tmp_path: Path, wb: Wb, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if ".parquet" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)
    assert wb("run", spec_file(tmp_path)) == 74
    assert "step_00000000.parquet" in capsys.readouterr().err
    assert read_record(tmp_path / "mlruns/runs/tiny").status == "FAILED"


def test_a_disk_that_stays_full_leaves_a_run_that_is_seen_to_have_ended(
    tmp_path: Path, full_disk: Callable[..., None], handlers: None
) -> None:
    """The record cannot say so, but nobody holds the run; and the tracker is let go."""

    class Watcher(NullTracker):
        def finish(
            self, record: RunRecord, say: Say = silent, hurried: Callable[[], bool] = never
        ) -> str | None:
            seen.append(effective_status(store.runs / "tiny"))
            return None

    seen: list[str] = []
    store = Store(tmp_path / "mlruns")
    full_disk("run_config.json", 2)
    with pytest.raises(StoreError, match=r"run_config\.json") as caught:
        run_with(Watcher(), tiny_spec(tmp_path), store)
    assert caught.value.exit_code == 74
    assert read_record(store.runs / "tiny").status == "RUNNING"
    assert seen == ["KILLED"]


def test_the_first_error_is_the_one_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: Callable[..., None]
) -> None:
    """Training falls over on a disk that has become full: the cause is the training."""
    monkeypatch.setattr(runner, "build_model", failing_model(1))
    full_disk("run_config.json", 3)
    with pytest.raises(RuntimeError, match="fell over"):
        untracked_run(tiny_spec(tmp_path), Store(tmp_path / "mlruns"))


@pytest.mark.parametrize("name", ["metrics.csv", "run_config.json"])
def test_a_disk_full_from_the_start_leaves_no_run(
    tmp_path: Path,
    wb: Wb,
    full_disk: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    full_disk(name)
    assert wb("run", spec_file(tmp_path)) == 74
    assert name in capsys.readouterr().err
    assert names_in(tmp_path / "mlruns/runs") == []


def test_a_console_that_is_gone_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    outcome = runner.run(tiny_spec(tmp_path), Store(tmp_path / "mlruns"), ["run"])
    assert outcome.record.status == "FINISHED"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_while_the_result_is_told_ends_the_wait_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Ctrl-C, or what a scheduler sends before it takes the machine: the run is finished."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    told: list[runner.RunOutcome] = []

    def tell(outcome: runner.RunOutcome) -> None:
        os.kill(os.getpid(), number)
        told.append(outcome)

    try:
        with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
            address = f"http://127.0.0.1:{silent.getsockname()[1]}"
            monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
            monkeypatch.setenv("WB_MLFLOW_WAIT", "60")
            began = time.monotonic()
            outcome = runner.run(
                tiny_spec(tmp_path), Store(tmp_path / "mlruns"), ["run"], ended=tell
            )
            assert time.monotonic() - began < 30
    finally:
        signal.signal(signal.SIGINT, before)
        for child in psutil.Process().children():
            if "workbench.track.feeder" in child.cmdline():
                child.kill()
    assert told == [outcome]
    assert (outcome.record.status, outcome.exit_code) == ("FINISHED", 0)


def test_what_ends_a_run_that_was_told_to_stop_is_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal was answered: it does not come again in place of the error."""

    def full(*given: object, **named: object) -> None:
        raise StoreError.at("checkpoint", "No space left on device")

    step = Reporter.step

    def told(reporter: Reporter, result: StepResult, logged: bool) -> None:
        step(reporter, result, logged)
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(Saver, "save", full)
    monkeypatch.setattr(Reporter, "step", told)
    store = Store(tmp_path / "mlruns")
    with pytest.raises(StoreError, match="No space left"):
        runner.run(tiny_spec(tmp_path), store, ["run"])
    record = read_record(store.list_runs()[0].folder)
    assert record.status == "KILLED"
    assert "No space left" in (record.error or "")


@pytest.mark.slow
def test_the_result_is_told_before_the_wait_for_mlflow_and_ctrl_c_ends_only_the_wait(
    tmp_path: Path,
) -> None:
    path = tmp_path / "patient.yaml"
    path.write_text(tiny_spec(tmp_path, "patient").model_dump_json())
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        variables = {
            "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WB_MLFLOW_WAIT": "60",
            "WB_HOME": str(tmp_path / "mlruns"),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench", "run", str(path), "--json"],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        feeder: psutil.Process | None = None
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            while lines[-1] != "}\n":
                lines.append(process.stdout.readline())
                assert lines[-1], "the run ended without a result"
            assert process.poll() is None, "it did not wait for MLflow"
            (feeder,) = psutil.Process(process.pid).children()
            process.send_signal(signal.SIGINT)
            rest, said = process.communicate(timeout=30)
            assert feeder.is_running()
        finally:
            for one in filter(None, (process, feeder)):
                one.kill()
            process.communicate()
    assert (json.loads("".join(lines))["status"], rest) == ("FINISHED", "")
    assert process.returncode == 0
    assert said.count("\n") <= 1, said  # at most that the server did not answer
    assert read_record(tmp_path / "mlruns/runs/patient").status == "FINISHED"
