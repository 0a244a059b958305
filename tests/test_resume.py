"""Going on with a run: the same files as without a break, asked of the guard, never twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_spec

from workbench import recorder
from workbench import run as runner
from workbench.cli import _guarded
from workbench.compare import compare_runs
from workbench.compare.facts import facts_of_record
from workbench.core import saving
from workbench.errors import UserError
from workbench.guard import changes
from workbench.resume import ResumeRequest
from workbench.run import RunOutcome
from workbench.spec.checklist import ON_RESUME, RULES, tag_of
from workbench.spec.run import RunSpec
from workbench.track.events import NullTracker, Values
from workbench.track.journal import MEASURED_COLUMNS, read_metrics
from workbench.track.record import COMPILER_COUNTS, read_record
from workbench.track.store import Store

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every_other": {"telemetry": {"log_steps": 2}, "evaluation": {"eval_steps": 3}},
    "bf16": {"training": {"precision": "bf16"}},
    "experts": {
        "model": {"learn_shared_routed_gates": True, "routed_gate_final": 1.0},
        "telemetry": {"log_steps": 1, "moe": True},
    },
    "router": {"model": {"mlp_type": "learned_router"}, "telemetry": {"log_steps": 2, "moe": True}},
    "muon": {"optimizer": {"name": "muon_tr"}},
    "accumulated": {"training": {"batch_size": 2, "gradient_accumulation_steps": 2}},
    "ramps": {
        "model": {
            "learn_shared_routed_gates": True,
            "shared_gate_final": 0.5,
            "routed_gate_final": 1.5,
            "top_k": 2,
            "top_k_primary_weight_final": 0.8,
            "expert_diversity_lambda": 0.1,
        },
        "training": {"label_smoothing": 0.1, "z_loss": 1e-4},
    },
    "random": {
        "data": {"dataset": "random", "text_file": None, "text_unit": None, "held_out_ratio": None}
    },
    "compiled": {"training": {"compile": True}},
    # Two epochs and a third, each in an order of its own; the stop is within the second.
    "epochs": {
        "training": {"batch_size": 5, "gradient_accumulation_steps": 2, "seq_len": 64},
    },
    "sequential": {"data": {"order": "sequential"}, "training": {"seq_len": 128}},
    "starts": {"data": {"order": "random"}},
}
LONG = {"compiled", "random", "accumulated", "sequential", "starts"}
STEPS = 8
STEPS_OF_EPOCHS = 14


class Interrupter(NullTracker):
    """Asks the run to stop when the row of a step has been written."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self._step, self._number = step, number

    def log(self, values: Values) -> None:
        if values["step"] == self._step:
            os.kill(os.getpid(), self._number)


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Callable[[NullTracker], None]:
    def follow(one: NullTracker) -> None:
        monkeypatch.setattr(runner, "tracker_for", lambda spec, store: one)

    follow(NullTracker())
    for number in (signal.SIGINT, signal.SIGUSR1):
        before = signal.getsignal(number)
        if before in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, signal.default_int_handler)
    return follow


def spec_of(folder: Path, kind: str = "plain", name: str = "tiny", **more: Any) -> RunSpec:
    changes = {key: dict(value) for key, value in KINDS[kind].items()}
    for section, values in more.items():
        if isinstance(values, dict):
            changes[section] = changes.get(section, {}) | values
    steps = STEPS_OF_EPOCHS if kind == "epochs" else STEPS
    changes["training"] = {"steps": steps} | changes.get("training", {})
    return tiny_spec(folder, name, more.get("seed", 42), **changes)


def start(spec: RunSpec, store: Store, request: ResumeRequest | None = None) -> RunOutcome:
    return runner.run(spec, store, ["run"], quiet=True, resume=request)


def reproducible(folder: Path) -> dict[str, Any]:
    """All that a run leaves, but for what is measured of time, speed and memory."""
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    kept = [i for i, name in enumerate(lines[0]) if name not in MEASURED_COLUMNS]
    files: dict[str, Any] = {"rows": [[cells[i] for i in kept] for cells in lines]}
    for path in sorted(folder.glob("evaluations/*")):
        files[path.name] = path.read_bytes()
    if (folder / "telemetry.parquet").exists():
        files["telemetry"] = (folder / "telemetry.parquet").read_bytes()
    for path in sorted(folder.glob("checkpoints/*/*.safetensors")):
        files[f"{path.parent.name}/{path.name}"] = path.read_bytes()
    record = read_record(folder)
    files["points"] = [point.model_dump() for point in record.points]
    files["final"] = record.results.final
    files["status"] = record.status
    return files


def same_but_for_the_past(straight: Path, resumed: Path) -> None:
    a, b = reproducible(straight), reproducible(resumed)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == b[name], name


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in LONG)) for k in KINDS]
)
@pytest.mark.parametrize("stop", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_and_goes_on_leaves_the_same_files(
    tmp_path: Path, tracker: Callable[[NullTracker], None], kind: str, stop: int
) -> None:
    spec = spec_of(tmp_path, kind, checkpoint={"save_total_limit": 1})
    if kind in ("every_other", "router"):
        stop += stop % 2  # a step that leaves a row
    if kind == "epochs":
        stop += 6
    straight = start(spec, Store(tmp_path / "straight"))
    tracker(Interrupter(stop))
    store = Store(tmp_path / "broken")
    stopped = start(spec, store)
    assert stopped.record.status == "KILLED"
    assert stopped.exit_code == 130
    tracker(NullTracker())
    resumed = start(spec, store, ResumeRequest())
    assert resumed.exit_code == 0
    same_but_for_the_past(straight.folder, resumed.folder)
    record = resumed.record
    if kind == "epochs":
        data = record.effective.data
        windows = (data.train_tokens - 1) // 64
        assert windows < stop * 10 < 2 * windows < STEPS_OF_EPOCHS * 10
    assert record.id == stopped.record.id
    assert [(one.step, one.status_before) for one in record.resumes] == [(stop, "KILLED")]
    assert record.effective.code.resumed_with == "none"
    judged = compare_runs(straight.folder, resumed.folder, names=("straight", "resumed")).judgement
    refusing = [one.rule for one in judged.rules if one.effects["nll"] == "refuse"]
    # A smoke test is no result, resumed or not.
    assert refusing == (["evaluation"] if kind == "random" else [])
    assert judged.claims["nll"] == ("refused" if kind == "random" else "comparable")


def test_a_run_saved_beside_its_training_goes_on_as_any_other(
    tmp_path: Path, tracker: Callable[[NullTracker], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path, "experts", checkpoint={"save_steps": 2})
    straight = start(spec, Store(tmp_path / "straight"))
    monkeypatch.setattr(saving, "overlaps", lambda device, nbytes: True)
    tracker(Interrupter(5))
    store = Store(tmp_path / "broken")
    assert start(spec, store).exit_code == 130
    tracker(NullTracker())
    resumed = start(spec, store, ResumeRequest())
    assert [one.step for one in resumed.record.resumes] == [5]
    same_but_for_the_past(straight.folder, resumed.folder)


def test_a_stop_during_an_evaluation_is_made_up_for(
    tmp_path: Path, tracker: Callable[[NullTracker], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row was written without it, and is completed, not doubled."""
    spec = spec_of(tmp_path, checkpoint={"save_total_limit": 1})
    straight = start(spec, Store(tmp_path / "straight"))
    calls, evaluate = [0], recorder.evaluate

    def interrupted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:  # the second set of step 2
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments)

    store = Store(tmp_path / "broken")
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "evaluate", interrupted)
        stopped = start(spec, store)
    assert read_metrics(stopped.folder / "metrics.csv")["held_out/nll"][-1] is None
    resumed = start(spec, store, ResumeRequest())
    same_but_for_the_past(straight.folder, resumed.folder)


def test_the_checkpoint_of_a_path_is_gone_on_with_and_what_came_after_is_trimmed(
    tmp_path: Path, tracker: Callable[[NullTracker], None]
) -> None:
    spec = spec_of(tmp_path, "experts", checkpoint={"save_steps": 2, "save_total_limit": 9})
    straight = start(spec, Store(tmp_path / "straight"))
    store = Store(tmp_path / "broken")
    tracker(Interrupter(7))
    stopped = start(spec, store)
    path = stopped.folder / "checkpoints/step_00000004"
    tracker(NullTracker())
    resumed = start(spec, store, ResumeRequest(str(path)))
    same_but_for_the_past(straight.folder, resumed.folder)
    assert [one.step for one in resumed.record.resumes] == [4]


def test_a_torn_row_and_a_half_checkpoint_are_nothing(
    tmp_path: Path, tracker: Callable[[NullTracker], None]
) -> None:
    spec = spec_of(tmp_path, checkpoint={"save_total_limit": 1})
    straight = start(spec, Store(tmp_path / "straight"))
    tracker(Interrupter(5))
    store = Store(tmp_path / "broken")
    stopped = start(spec, store)
    with (stopped.folder / "metrics.csv").open("a") as file:
        file.write("6,3.1,22")
    (stopped.folder / "checkpoints/step_00000006").mkdir()
    (stopped.folder / "checkpoints/.step_00000007.123").mkdir()
    tracker(NullTracker())
    resumed = start(spec, store, ResumeRequest())
    same_but_for_the_past(straight.folder, resumed.folder)


def test_a_checkpoint_is_written_when_the_rows_before_it_are_on_the_disk(
    tmp_path: Path, tracker: Callable[[NullTracker], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that dies takes no row with it that nobody would write again."""
    synced, found = {}, []
    fsync, write = os.fsync, saving.write_checkpoint

    def noted(handle: int) -> None:
        status = os.fstat(handle)
        fsync(handle)
        synced[status.st_ino] = status.st_size

    def saved(taken: Any, folder: Path, keep: int) -> Path:
        status = (folder.parent / "metrics.csv").stat()
        found.append((taken.step, status.st_size - synced[status.st_ino]))
        return write(taken, folder, keep)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(saving, "write_checkpoint", saved)
    changes = {"checkpoint": {"save_steps": 1}, "evaluation": {"eval_steps": 0}}
    start(spec_of(tmp_path, **changes), Store(tmp_path / "mlruns"))
    assert found == [(step, 0) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("cadence", [(3, 1), (1, 3), (2, 3)])
def test_a_cadence_that_changed_on_the_way_is_no_contradiction(
    tmp_path: Path, tracker: Callable[[NullTracker], None], cadence: tuple[int, int]
) -> None:
    """What was logged until then by the old one, and after it by the new one."""
    before, after = cadence
    store = Store(tmp_path / "mlruns")
    changes: dict[str, Any] = {"evaluation": {"eval_steps": 0}, "checkpoint": {"save_steps": 4}}
    tracker(Interrupter(1))
    start(spec_of(tmp_path, name="odd", telemetry={"log_steps": before}, **changes), store)
    tracker(NullTracker())
    odd = spec_of(tmp_path, name="odd", telemetry={"log_steps": after}, **changes)
    resumed = start(odd, store, ResumeRequest())
    straight = start(spec_of(tmp_path, name="straight", **changes), store)
    comparison = compare_runs(straight.folder, resumed.folder)
    assert comparison.judgement.claims["nll"] == "flagged"
    assert "telemetry.log_steps" in str(resumed.record.effective.code.resumed_with)
    for step in (1, 8):
        with (resumed.folder / "metrics.csv").open() as file:
            lines = file.readlines()
        kept = [line for line in lines if not line.startswith(f"{step},")]
        (resumed.folder / "metrics.csv").write_text("".join(kept))
        with pytest.raises(UserError, match=f"step {step}"):
            compare_runs(straight.folder, resumed.folder)
        (resumed.folder / "metrics.csv").write_text("".join(lines))


@pytest.mark.parametrize("stop", [3, 4])
def test_a_planned_stop_keeps_the_horizon_and_leaves_no_trace_once_gone_on(
    tmp_path: Path, tracker: Callable[[NullTracker], None], stop: int
) -> None:
    """Step 3 is evaluated only because the run stops there."""
    whole = spec_of(tmp_path, checkpoint={"save_total_limit": 1})
    straight = start(whole, Store(tmp_path / "straight"))
    store = Store(tmp_path / "broken")
    early = start(spec_of(tmp_path, training={"stop_at_step": stop}), store)
    assert early.record.status == "FINISHED"
    assert [point.step for point in early.record.points][-1] == stop
    comparison = compare_runs(straight.folder, early.folder, names=("whole", "early"))
    assert (comparison.verdict, comparison.at) == ("comparable", stop // 2 * 2 * 128)
    again = start(spec_of(tmp_path, training={"stop_at_step": stop}), store, ResumeRequest())
    assert again.record.resumes == []
    resumed = start(whole, store, ResumeRequest())
    same_but_for_the_past(straight.folder, resumed.folder)


@pytest.fixture
def stopped(tmp_path: Path, tracker: Callable[[NullTracker], None]) -> RunOutcome:
    tracker(Interrupter(4))
    outcome = start(spec_of(tmp_path), Store(tmp_path / "mlruns"))
    tracker(NullTracker())
    return outcome


Wb = Callable[..., tuple[int, str]]


@pytest.fixture
def wb(
    tmp_path: Path,
    tracker: Callable[[NullTracker], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Wb:
    """`wb run` of the tiny spec in this process; its exit code and all that it said."""
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    path = tmp_path / "tiny.yaml"
    path.write_text(spec_of(tmp_path).model_dump_json())

    def call(*arguments: str) -> tuple[int, str]:
        words = ["run", str(path), *arguments]
        monkeypatch.setattr(sys, "argv", ["wb", *words])
        code = _guarded(words)
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


REFUSED = {
    "optimizer.lr=1e-3": "optimizer.lr",
    "training.gradient_accumulation_steps=2": "effective.optimizer.sequences_per_update",
    # The same tokens for each update, rounded in another order.
    "training.gradient_accumulation_steps=2 training.batch_size=2": "training.batch_size",
    "training.steps=16": "training.steps",
    "training.batch_size=8": "effective.optimizer.sequences_per_update",
    "training.seq_len=16": "training.seq_len",
    "schedule.decay=linear": "schedule.decay",
    "data.held_out_ratio=0.3": "effective.data.train_sha256",
    "data.order=sequential": "data.order",
    "training.loss_block_vocab=64": "training.loss_block_vocab",
    "training.precision=bf16": "effective.precision.compute_dtype",
    "model.top_k_primary_weight=0.6": "model.top_k_primary_weight",
    "evaluation.eval_documents=1": "effective.evaluation.held_out.sha256",
}


@pytest.mark.parametrize("change", REFUSED)
def test_the_guard_refuses_what_decides_the_numbers(
    stopped: RunOutcome, wb: Wb, change: str
) -> None:
    before = {p: p.read_bytes() for p in stopped.folder.rglob("*") if p.is_file()}
    code, said = wb(*change.split(), "--resume")
    assert code == 3, said
    assert REFUSED[change] in said
    assert "then" in said
    assert "--force-resume" in said
    assert {p: p.read_bytes() for p in stopped.folder.rglob("*") if p.is_file()} == before


def test_a_data_file_that_was_replaced_is_refused_and_one_that_was_moved_is_not(
    tmp_path: Path, stopped: RunOutcome, wb: Wb
) -> None:
    corpus, moved = tmp_path / "corpus.txt", tmp_path / "elsewhere.txt"
    text = corpus.read_text()
    record = (stopped.folder / "run_config.json").read_bytes()
    for other in (text + "\n\nanother document of some words\n", text.replace("cat", "cow", 1)):
        corpus.write_text(other)
        code, said = wb("--resume")
        assert code == 3, said
        assert "effective.data.train_sha256" in said or "effective.evaluation" in said
        assert (stopped.folder / "run_config.json").read_bytes() == record
    corpus.unlink()
    moved.write_text(text)
    code, said = wb("--resume", f"data.text_file={moved}")
    assert code == 0, said
    assert [one.changes for one in read_record(stopped.folder).resumes] == [[]]
    corpus.write_text(text)
    straight = start(spec_of(tmp_path), Store(tmp_path / "straight"))
    shutil.rmtree(stopped.folder / "checkpoints/step_00000004")  # of the stop
    same_but_for_the_past(straight.folder, stopped.folder)


def test_another_environment_is_flagged_and_recorded(
    tmp_path: Path, stopped: RunOutcome, wb: Wb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of threads sums in another order; other sources may do anything."""
    threads = torch.get_num_threads()
    code_facts = runner.code_facts

    def edited() -> Any:
        return code_facts().model_copy(update={"package_sha256": "0" * 64})

    monkeypatch.setattr(runner, "code_facts", edited)
    torch.set_num_threads(threads + 1)
    try:
        code, said = wb("--resume")
    finally:
        torch.set_num_threads(threads)
    assert code == 0, said
    record = read_record(stopped.folder)
    (resumed,) = record.resumes
    changes = {one["path"]: (one["then"], one["now"], one["effect"]) for one in resumed.changes}
    assert changes["effective.hardware.threads"] == (threads, threads + 1, "flag")
    assert changes["effective.code.package_sha256"][1:] == ("0" * 64, "flag")
    assert resumed.provenance_before == stopped.record.provenance
    listed = "effective.hardware.threads, effective.code.package_sha256 at step 4"
    assert record.effective.code.resumed_with == listed
    straight = start(spec_of(tmp_path, name="straight"), Store(tmp_path / "mlruns"))
    found = compare_runs(straight.folder, stopped.folder)
    assert found.judgement.claims["nll"] == "flagged"
    counted = [one.path for one in found.judgement.ruling("code").counted]
    assert "effective.code.resumed_with" in counted


@pytest.mark.slow
def test_kernels_that_are_picked_by_timing_are_said_to_be_so(
    tmp_path: Path, tracker: Callable[[NullTracker], None]
) -> None:
    """Nobody promises the same bits then: the record tells, and so does a comparison."""
    spec = spec_of(tmp_path, training={"compile": True, "compile_mode": "max-autotune"})
    store = Store(tmp_path / "mlruns")
    tracker(Interrupter(2))
    assert start(spec, store).exit_code == 130
    tracker(NullTracker())
    resumed = start(spec, store, ResumeRequest())
    said = "kernels picked by timing (max-autotune) at step 2"
    assert resumed.record.effective.code.resumed_with == said
    assert resumed.record.resumes[0].changes == []


def test_every_refusal_comes_at_once_with_then_and_now(stopped: RunOutcome, wb: Wb) -> None:
    code, said = wb("optimizer.lr=1e-3", "training.max_grad_norm=0.5", "--resume", "--json")
    document = json.loads(said[said.index("{") :])
    assert code == 3
    assert [one["place"] for one in document["errors"]] == [
        "tiny: optimizer.lr",
        "tiny: training.max_grad_norm",
    ]
    assert "0.003 then, 0.001 now" in document["errors"][0]["message"]


def test_what_is_free_passes_and_is_kept_in_the_record(stopped: RunOutcome, wb: Wb) -> None:
    code, said = wb(
        "notes=again", "checkpoint.save_minutes=3", "evaluation.eval_steps=4", "--resume"
    )
    assert code == 0, said
    record = read_record(stopped.folder)
    changes = {one["path"]: (one["then"], one["now"]) for one in record.resumes[0].changes}
    assert changes["evaluation.eval_steps"] == (2, 4)
    assert {one["effect"] for one in record.resumes[0].changes} == {"free"}
    assert record.effective.code.resumed_with == "none"
    assert [point.step for point in record.points] == [0, 2, 4, 8]
    # The cadence of before and that of after the resume are both known to `wb compare`.
    other = start(
        spec_of(stopped.folder.parents[2], name="other"), Store(stopped.folder.parents[1])
    )
    assert compare_runs(other.folder, stopped.folder).verdict == "comparable"


def test_a_forced_resume_is_recorded_and_flagged_for_good(
    tmp_path: Path, stopped: RunOutcome, wb: Wb
) -> None:
    straight = start(spec_of(tmp_path, name="straight"), Store(tmp_path / "mlruns"))
    change = "training.loss_block_vocab=64"
    assert wb(change, "--resume", "--force-resume", " ")[0] == 2
    code, said = wb(change, "--resume", "--force-resume", "memory was short")
    assert code == 0, said
    record = read_record(stopped.folder)
    assert record.effective.code.forced_resume == "memory was short"
    assert record.resumes[0].reason == "memory was short"
    assert record.resumes[0].changes[0]["path"] == "training.loss_block_vocab"
    comparison = compare_runs(
        straight.folder, stopped.folder, treatment=["training.loss_block_vocab"]
    )
    assert comparison.verdict == "flagged"
    assert comparison.judgement.ruling("code").outcome == "differs"


def test_a_finished_run_has_nothing_left_and_a_changed_one_is_refused(
    tmp_path: Path, wb: Wb, tracker: Callable[[NullTracker], None]
) -> None:
    code, said = wb("--resume")
    assert code == 0
    assert "no run tiny to go on with: it begins at step 0" in said
    before = reproducible(tmp_path / "mlruns/runs/tiny")
    code, said = wb("--resume")
    assert code == 0
    assert "nothing to do" in said
    assert reproducible(tmp_path / "mlruns/runs/tiny") == before
    assert read_record(tmp_path / "mlruns/runs/tiny").resumes == []
    code, said = wb("--resume", "training.steps=12")
    assert code == 3
    assert "--fork" in said


def test_a_run_without_a_checkpoint_begins_again(
    tmp_path: Path, stopped: RunOutcome, wb: Wb
) -> None:
    straight = start(spec_of(tmp_path), Store(tmp_path / "straight"))
    shutil.rmtree(stopped.folder / "checkpoints")
    code, said = wb("--resume")
    assert code == 0
    assert "no checkpoint: it begins again at step 0" in said
    same_but_for_the_past(straight.folder, stopped.folder)


def test_a_fork_is_a_new_run_with_its_lineage(tmp_path: Path, stopped: RunOutcome, wb: Wb) -> None:
    before = reproducible(stopped.folder)
    code, said = wb("name=longer", "training.steps=12", "--resume", "tiny", "--fork")
    assert code == 0, said
    assert reproducible(stopped.folder) == before
    folder = tmp_path / "mlruns/runs/longer"
    fork = read_record(folder)
    assert fork.id != stopped.record.id
    assert fork.effective.code.forked_from == f"{stopped.record.id} at step 4"
    assert fork.resumes[0].forked_from == {"id": stopped.record.id, "name": "tiny"}
    assert read_metrics(folder / "metrics.csv")["step"] == [float(step) for step in range(13)]
    assert [point.step for point in fork.points] == [0, 2, 4, 6, 8, 10, 12]
    old, new = (read_metrics(f / "metrics.csv") for f in (stopped.folder, folder))
    assert new["train/nll"][:5] == old["train/nll"][:5]
    straight = start(spec_of(tmp_path, name="straight"), Store(tmp_path / "mlruns"))
    code_rule = compare_runs(straight.folder, folder).judgement.ruling("code")
    assert code_rule.outcome == "differs"
    assert wb("name=longer", "--resume", "tiny", "--fork")[0] == 2  # the name is taken
    assert wb("name=other", "--fork")[0] == 2
    assert wb("name=other", "--resume", "--fork")[0] == 2


@pytest.mark.parametrize("source", ["nothing", "no/such/checkpoint"])
def test_what_cannot_be_gone_on_with_is_one_clear_error(
    stopped: RunOutcome, wb: Wb, source: str
) -> None:
    code, said = wb("--resume", source)
    assert code == 2
    assert source in said


def test_a_run_that_is_still_going_is_left_alone(stopped: RunOutcome, wb: Wb) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from workbench.track.store import lock_run;"
        f"lock_run(Path({str(stopped.folder)!r})); print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        code, said = wb("--resume")
    finally:
        process.kill()
        process.communicate()
    assert code == 2
    assert "still going" in said


def test_slurms_signal_saves_and_ends(
    tmp_path: Path, tracker: Callable[[NullTracker], None]
) -> None:
    tracker(Interrupter(3, signal.SIGUSR1))
    outcome = start(spec_of(tmp_path), Store(tmp_path / "mlruns"))
    assert outcome.exit_code == 128 + signal.SIGUSR1
    assert (outcome.folder / "checkpoints/step_00000003/manifest.json").exists()


def test_every_judged_leaf_has_an_effect_on_resume() -> None:
    assert ON_RESUME.keys() == RULES.keys()


def test_a_change_of_any_recorded_fact_is_noticed(stopped: RunOutcome) -> None:
    """Each leaf of the record that a rule guards, changed by itself."""
    record = stopped.record
    leaves = [
        path
        for path, value in facts_of_record(record, None).items()
        if path.startswith("effective.") and tag_of(path).kind == "judged" and value is not None
    ]
    checked = 0
    for path in leaves:
        _, part, *middle, leaf = path.split(".")
        if part in ("budget", "interval") or leaf in (
            "forced_resume",
            "resumed_with",
            "forked_from",
            *COMPILER_COUNTS,
        ):
            continue
        changed = record.model_copy(deep=True)
        holder = getattr(changed.effective, part)
        if middle:
            holder = holder[".".join(middle)]
        if not hasattr(holder, leaf):
            continue  # added for the point compared
        holder.__dict__[leaf] = "another"
        found = changes(changed, record, record.spec)
        assert [one.path for one in found] == [path]
        assert found[0].effect in ("refuse", "flag")
        checked += 1
    assert checked > 25
