"""One model trained by several processes: the same run, whatever their number."""

from __future__ import annotations

import csv
import json
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from parquet_streams import three_files
from tiny_runs import sections, tiny_parts, tiny_spec

from workbench.compare import compare_runs
from workbench.core.load_model import load_model
from workbench.core.parallel import Ranks
from workbench.errors import UserError
from workbench.spec.run import RunSpec
from workbench.track.record import RunRecord, read_record

pytestmark = pytest.mark.ddp

WHOLE = {"batch_size": None, "global_batch_size": 8, "steps": 20}
RESUME = ["--resume"]
PREFIX = "TrainingStoppedError: "
SPEC: dict[str, Any] = {
    "training": WHOLE,
    "telemetry": {"log_steps": 1, "moe": True},
    "evaluation": {"eval_steps": 10},
    "checkpoint": {"save_steps": 5},
}


@dataclass(frozen=True)
class Ran:
    """What the processes of a case came to."""

    codes: list[int]
    seconds: float
    said: list[str]
    wrote: list[list[str]]  # files in the store that each rank but zero wrote
    document: dict[str, Any]  # the record as it was when they ended
    after_kill: float | None  # seconds from the kill to the end of all
    folder: Path

    @property
    def record(self) -> RunRecord:
        return read_record(self.folder)

    def rows(self, name: str) -> list[float]:
        with (self.folder / "metrics.csv").open() as file:
            return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def spec_file(folder: Path, name: str, **changes: Any) -> str:
    """A spec that trains 20 steps; the path of its file."""
    merged = {
        part: SPEC.get(part, {}) | changes.get(part, {}) for part in SPEC.keys() | changes.keys()
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"name": name, "seed": 42, **sections(folder, **merged)}))
    return str(path)


def ran(folder: Path, cases: list[dict[str, Any]]) -> dict[str, Ran]:
    """Runs cases (see ranks.py), all from one process that loads torch once."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script = str(Path(__file__).parent / "ranks.py")
    done = subprocess.run(
        [sys.executable, script, str(folder)], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    runs = folder / "mlruns" / "runs"
    found = json.loads(done.stdout)
    return {
        case["name"]: Ran(**found[case["name"]], folder=runs / case.get("run", case["name"]))
        for case in cases
    }


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    folder = tmp_path_factory.mktemp("worlds")
    whole = spec_file(folder, "whole")
    own = spec_file(folder, "own", training={"batch_size": 4, "global_batch_size": None})
    split = spec_file(
        folder, "split", training=WHOLE | {"parallel": "fsdp"}, checkpoint={"save_steps": 0}
    )
    return ran(
        folder,
        [
            {"name": "one", "processes": 1, "spec": whole},
            {"name": "two", "processes": 2, "spec": whole},
            {"name": "split", "processes": 2, "spec": split},
            {"name": "dying", "processes": 2, "spec": whole, "kill": [1, 12]},
            # And two runs that go on with another number of processes.
            {"name": "fewer", "run": "dying", "processes": 1, "spec": whole, "options": RESUME},
            {"name": "own", "processes": 1, "spec": own, "kill": [0, 7]},
            {"name": "more", "run": "own", "processes": 2, "spec": own, "options": RESUME},
        ],
    )


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    folder = tmp_path_factory.mktemp("splits")
    whole = spec_file(folder, "whole")
    own = spec_file(folder, "own", training={"batch_size": 2, "global_batch_size": None})
    own_4 = spec_file(folder, "own_4", training={"batch_size": 4, "global_batch_size": None})
    few = spec_file(folder, "few", training=WHOLE | {"steps": 1}, data={"held_out_ratio": 0.03})
    split = ["training.gradient_accumulation_steps=2"]
    return ran(
        folder,
        [
            {"name": "one_split", "processes": 1, "spec": whole, "options": split},
            {"name": "four_split", "processes": 4, "spec": whole, "options": split},
            {"name": "batch_4", "processes": 1, "spec": own_4},
            {"name": "batch_2", "processes": 2, "spec": own},
            {"name": "few", "processes": 1, "spec": few},
            {"name": "few_on_four", "processes": 4, "spec": few},
        ],
    )


def require_same_run(one: Ran, other: Ran, telemetry: float = 1e-3) -> None:
    """Every digest is equal, and every loss but for rounding; telemetry within so much."""
    assert one.codes == [0] * len(one.codes), one.said
    assert other.codes == [0] * len(other.codes), other.said
    a, b = one.record, other.record
    assert [p.order_digest for p in a.points] == [p.order_digest for p in b.points]
    assert a.tokens_per_step == b.tokens_per_step
    assert len(one.rows("train/nll")) == 20
    for name in ("train/nll", "train/objective", "held_out/nll", "train_split/nll"):
        assert one.rows(name) == pytest.approx(other.rows(name), rel=1e-5), name
    for name in ("route_entropy", "expert_0_share", "expert_2_share"):
        assert one.rows(name) == other.rows(name), name
    for name in ("grad_norm", "shared_rms", "routed_rms", "expert_0_grad_norm"):
        assert one.rows(name) == pytest.approx(other.rows(name), rel=telemetry), name


def test_a_global_batch_gives_the_same_run_on_two_processes(worlds: dict[str, Ran]) -> None:
    require_same_run(worlds["one"], worlds["two"])
    assert worlds["two"].record.world_size == 2
    assert worlds["two"].said[1] == "", "only rank zero speaks"


def test_processes_that_hold_a_part_of_the_model_each_train_the_same(
    worlds: dict[str, Ran],
) -> None:
    require_same_run(worlds["one"], worlds["split"])
    assert worlds["split"].record.effective.execution.parallel == "fsdp, 2 processes"
    load_model(worlds["split"].folder)  # as `wb eval` does, in one process


@pytest.mark.slow
@pytest.mark.parametrize("other", ["one_split", "four_split"])
def test_a_global_batch_gives_the_same_run_with_any_accumulation(
    worlds: dict[str, Ran], splits: dict[str, Ran], other: str
) -> None:
    require_same_run(worlds["one"], splits[other])


@pytest.mark.slow
def test_batch_4_on_one_process_is_batch_2_on_two(splits: dict[str, Ran]) -> None:
    require_same_run(splits["batch_4"], splits["batch_2"])
    assert splits["batch_2"].record.tokens_per_step == 4 * 32


def scores(ran: Ran) -> dict[str, list[Any]]:
    """By document, before any update: of the same weights."""
    import pyarrow.parquet as pq

    path = ran.folder / "evaluations" / "step_00000000.parquet"
    return dict(pq.read_table(path).to_pydict())


def test_every_document_is_scored_once_on_any_number_of_processes(worlds: dict[str, Ran]) -> None:
    one, two, split = (scores(worlds[name]) for name in ("one", "two", "split"))
    assert one == two == split


@pytest.mark.slow
def test_every_document_is_scored_once_on_four_processes(
    worlds: dict[str, Ran], splits: dict[str, Ran]
) -> None:
    assert scores(worlds["one"]) == scores(splits["four_split"])


@pytest.mark.slow
def test_fewer_documents_than_processes_are_scored_once_too(splits: dict[str, Ran]) -> None:
    assert splits["few_on_four"].codes == [0] * 4, splits["few_on_four"].said
    one, four = scores(splits["few"]), scores(splits["few_on_four"])
    assert one == four
    assert 0 < one["set"].count("held_out") < 4


def test_processes_that_do_not_divide_the_batch_are_refused(tmp_path: Path) -> None:
    spec = RunSpec.model_validate({"name": "whole", "seed": 1, **sections(tmp_path, **SPEC)})
    assert spec.on(4).micro_batch_size == 2
    with pytest.raises(UserError, match="3 processes"):
        spec.on(3)


def test_tokens_of_a_step_are_those_of_all_processes_and_micro_batches(tmp_path: Path) -> None:
    training = {"batch_size": 2, "gradient_accumulation_steps": 3, "seq_len": 32, "steps": 5}
    spec = tiny_spec(tmp_path, training=training).on(4)
    assert spec.tokens_per_step == 2 * 3 * 4 * 32
    assert spec.total_tokens == 5 * 2 * 3 * 4 * 32


def test_a_rank_that_dies_ends_the_run_in_seconds_by_name(worlds: dict[str, Ran]) -> None:
    dying = worlds["dying"]
    assert dying.codes == [74, -9], dying.said
    assert dying.seconds < 30
    assert "rank 1" in dying.said[0]
    assert "Traceback" not in dying.said[0]
    assert dying.document["status"] == "FAILED"
    assert worlds["fewer"].record.resumes[0].step == 10, "its last checkpoint is whole"


def test_a_run_of_a_global_batch_goes_on_with_fewer_processes_and_says_so(
    worlds: dict[str, Ran],
) -> None:
    fewer = worlds["fewer"]
    require_same_run(worlds["one"], fewer)
    (resumed,) = fewer.record.resumes
    assert resumed.step == 10
    assert resumed.changes == [
        {
            "path": "effective.execution.parallel",
            "then": "ddp, 2 processes",
            "now": "one process",
            "effect": "flag",
        }
    ]
    assert fewer.record.effective.code.resumed_with == "effective.execution.parallel at step 10"
    code = compare_runs(worlds["one"].folder, fewer.folder).judgement.ruling("code")
    assert code.outcome == "differs"


def test_a_run_of_batches_of_its_own_does_not_go_on_with_more_processes(
    worlds: dict[str, Ran],
) -> None:
    """Every update would be of twice as many tokens."""
    more = worlds["more"]
    assert more.codes == [3, 3], more.said
    assert "effective.optimizer.sequences_per_update" in more.said[0]
    assert "4 then, 8 now" in more.said[0]
    assert more.said[1] == ""
    assert more.document == worlds["own"].document


def test_several_processes_make_one_run(worlds: dict[str, Ran]) -> None:
    """Those other than rank zero write nothing."""
    runs = worlds["two"].folder.parent
    assert sorted(path.name for path in runs.iterdir()) == ["dying", "one", "own", "split", "two"]
    alone, together = (
        {str(path.relative_to(folder)) for path in folder.rglob("*")}
        for folder in (worlds["one"].folder, worlds["two"].folder)
    )
    assert alone == together
    assert worlds["two"].wrote[1] == []


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    whole = spec_file(tmp_path, "whole")
    straight = ran(tmp_path, [{"name": "straight", "processes": 1, "spec": whole}])["straight"]
    ran(tmp_path, [{"name": "moved", "processes": 2, "spec": whole, "kill": [1, 12]}])
    on = {"name": "moved", "processes": 4, "spec": whole, "options": ["--resume"]}
    moved = ran(tmp_path, [on])["moved"]
    require_same_run(straight, moved)
    flagged = [one["path"] for one in moved.record.model_dump()["resumes"][-1]["changes"]]
    assert "effective.execution.parallel" in flagged


@pytest.mark.slow
def test_experts_without_tokens_on_a_rank_neither_hang_nor_skew(tmp_path: Path) -> None:
    few = {"batch_size": None, "global_batch_size": 4, "seq_len": 2, "steps": 20}
    whole = spec_file(tmp_path, "few", training=few)
    cases = [{"name": f"on_{n}", "processes": n, "spec": whole} for n in (1, 4)]
    found = ran(tmp_path, cases)
    require_same_run(found["on_1"], found["on_4"])


@pytest.mark.slow
def test_experts_without_tokens_on_a_rank_and_compiled_blocks(tmp_path: Path) -> None:
    """With micro-batches, whose gradients are not sent; and no graph after the first update."""
    few = {"batch_size": None, "global_batch_size": 4, "seq_len": 2, "steps": 20, "compile": True}
    compiled = spec_file(tmp_path, "few", training=few)
    eager = spec_file(tmp_path, "eager", training=few | {"compile": False})
    split = ["training.gradient_accumulation_steps=2"]
    cases = [
        {"name": f"on_{n}", "processes": n, "spec": spec, "options": options, "patience": 300}
        for n, spec, options in ((1, eager, []), (2, compiled, split))
    ]
    found = ran(tmp_path, cases)
    require_same_run(found["on_1"], found["on_2"])
    execution = found["on_2"].record.effective.execution
    assert (execution.compiled, execution.recompilations, execution.graph_breaks) == (True, 0, 0)


@pytest.mark.slow
def test_what_is_not_finite_on_one_rank_stops_all_before_the_update(tmp_path: Path) -> None:
    """Each rank decides by the numbers of all, so that none goes on alone or waits for another."""
    whole = spec_file(tmp_path, "whole", checkpoint={"save_steps": 1})
    split = spec_file(
        tmp_path,
        "split",
        training=WHOLE | {"parallel": "fsdp"},
        checkpoint={"save_steps": 1},
    )
    cases = [
        {"name": f"{what}_{rank}_{n}", "processes": 2, "spec": spec, "poison": [rank, 4, what]}
        for n, (what, rank, spec) in enumerate(
            [
                ("gradient", 1, whole),
                ("gradient", 0, whole),
                ("loss", 1, whole),
                ("gradient", 1, split),
            ]
        )
    ]
    for name, stopped in ran(tmp_path, cases).items():
        assert stopped.codes == [4, 4], (name, stopped.said)
        assert stopped.said[1] == "", "only rank zero speaks"
        (error,) = [line for line in stopped.said[0].splitlines() if "not finite" in line]
        assert error == f"error: {stopped.document['error'].removeprefix(PREFIX)}"
        assert "step 4: loss or gradient is not finite" in error
        what = "its norm is nan; gradients not finite in embed_tokens.weight"
        assert (what if "gradient" in name else "the loss is ") in error
        assert stopped.document["status"] == "FAILED"
        assert stopped.rows("step") == [0, 1, 2, 3]
        kept = sorted(path.name for path in (stopped.folder / "checkpoints").iterdir())
        assert kept[-1] == "step_00000003"
        weights = load_model(stopped.folder).model.parameters()
        assert all(bool(torch.isfinite(weight).all()) for weight in weights)


def test_who_leaves_does_not_hold_the_others_by_what_an_error_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last to let go of the group would wait for its threads, and these for the interpreter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **place}.items():
        monkeypatch.setenv(name, value)
    team = Ranks("cpu")
    model = tiny_parts(tmp_path).state.model
    trained = team.through(model, lambda ids: model.through(ids, model.layers))
    reducer = weakref.ref(trained.reducer)  # type: ignore[attr-defined]
    team.leave()
    assert trained is not None  # as a traceback holds it
    assert reducer() is None


@pytest.mark.slow
def test_auxiliary_terms_and_muon_do_not_scale_with_the_processes(tmp_path: Path) -> None:
    """Balance and diversity, their gradients, ramps and both optimizers: of one process, of two,
    and of two with micro-batches. The loss of the former is a product of means over all of them."""
    model = {"mlp_type": "learned_router", "router_aux_loss_weight": 0.5}
    model |= {"expert_diversity_lambda": 2.0, "expert_diversity_schedule_steps": 4}
    model |= {"learn_shared_routed_gates": True, "routed_gate_final": 1.0, "gate_schedule_steps": 8}
    training = {"label_smoothing": 0.1, "z_loss": 1e-3}
    learned = spec_file(tmp_path, "learned", model=model, training=WHOLE | training)
    muon = {"name": "muon_tr", "muon_scope": "all"}
    routed = spec_file(tmp_path, "routed", optimizer=muon)
    split = ["training.gradient_accumulation_steps=2"]
    cases = [
        {"name": f"{name}_{kind}", "processes": processes, "spec": spec, "options": options}
        for name, spec in (("learned", learned), ("routed", routed))
        for kind, processes, options in (("one", 1, []), ("two", 2, []), ("split", 2, split))
    ]
    found = ran(tmp_path, cases)
    for name, rel in (("learned", 1e-5), ("routed", 1e-3)):  # Muon multiplies in bfloat16
        one = found[f"{name}_one"]
        assert one.codes == [0], one.said
        columns = ["train/nll", "train/objective", "held_out/nll", "grad_norm"]
        if name == "learned":
            columns += ["train/balance", "train/diversity", "train/z_loss", "train/smoothing"]
            columns += ["route_entropy", "expert_0_share", "expert_0_grad_norm"]
        for kind in ("two", "split"):
            other = found[f"{name}_{kind}"]
            assert other.codes == [0, 0], other.said
            for column in columns:
                rows = one.rows(column)
                assert rows, column
                close = 100 * rel if "grad_norm" in column or "diversity" in column else rel
                assert other.rows(column) == pytest.approx(rows, rel=close), (kind, column)


@pytest.mark.slow
def test_each_kind_of_data_is_the_same_on_two_processes(tmp_path: Path) -> None:
    """What the ranks train on is together what one process trains on, in its order: `train/nll` is
    of all sequences of a step, and the digest of the order is that of one process."""
    shard = Path(__file__).parent / "data/token_shard"
    folder, _ = three_files(tmp_path / "stream")
    kinds: dict[str, dict[str, Any]] = {
        "tokens": {
            "dataset": "tokens",
            "tokens_path": str(shard / "train"),
            "eval_tokens_path": str(shard / "eval"),
        },
        "stream": {
            "dataset": "fineweb",
            "stream_path": str(folder),
            "stream_eval_documents": 6,
            "held_out_ratio": 0.2,
        },
        "random": {"dataset": "random"},
    }
    cases = []
    for kind, data in kinds.items():
        spec = {"name": kind, "seed": 42, **sections(tmp_path, **SPEC), "data": data}
        if kind == "tokens":
            spec["tokenizer"] = {}
        (tmp_path / f"{kind}.yaml").write_text(json.dumps(spec))
        for processes in (1, 2):
            name = f"{kind}-{processes}"
            path = str(tmp_path / f"{kind}.yaml")
            cases.append({"name": name, "processes": processes, "spec": path})
    found = ran(tmp_path, cases)
    for kind in kinds:
        one, two = found[f"{kind}-1"], found[f"{kind}-2"]
        assert (one.codes, two.codes) == ([0], [0, 0]), one.said + two.said
        digests = [[point.order_digest for point in run.record.points] for run in (one, two)]
        assert digests[0] == digests[1]
        assert len(one.rows("train/nll")) == 20
        assert one.rows("train/nll") == pytest.approx(two.rows("train/nll"), rel=1e-5)
        if kind == "stream":
            assert one.record.effective.evaluation == two.record.effective.evaluation
