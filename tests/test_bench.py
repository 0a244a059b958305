"""`wb bench`: the arms take turns, what is said follows from the turns, and nothing is left."""

from __future__ import annotations

import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from workbench import commands
from workbench.bench import measure as benching
from workbench.bench.measure import bench, differences
from workbench.bench.page import render
from workbench.bench.process import BenchError, Worker, environment
from workbench.bench.trace import require_place, write_trace
from workbench.bench.turns import NO_END, Turns, benched, logged_share, telemetry_cost, weighed
from workbench.core.data.loading import load_data, vocab_size_of
from workbench.core.schedules import last_step
from workbench.errors import StoreError, UserError
from workbench.spec.run import RunSpec

MODEL = {
    "profile": "custom",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_type": "gqa",
    "intermediate_size": 64,
}
ROUTED = {**MODEL, "mlp_type": "token_routed", "shared_intermediate_size": 96}
DENSE = {**MODEL, "mlp_type": "dense"}
TOKENS = 2 * 64
SHARD = Path(__file__).parent / "data/token_shard/train"


def tiny(
    model: dict[str, Any] = DENSE, telemetry: dict[str, Any] | None = None, **training: Any
) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "tiny",
            "model": model,
            "tokenizer": {"name": "bytes"},
            "data": {"dataset": "sample"},
            "training": {"steps": 5, "batch_size": 2, "seq_len": 64, **training},
            "telemetry": telemetry or {},
        }
    )


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Workers with one thread: the untuned ones of the plain arm spin while they wait for one
    another, which takes many times as long where the machine has other work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """One bench of a tiny spec with expert telemetry and a trace, shared; and what it said.

    Its workers must be gone.
    """
    said: list[str] = []
    before, here, folder = _children(), Path.cwd(), tmp_path_factory.mktemp("bench")
    trace = folder / "traces" / "step.json.gz"
    (folder / "empty").mkdir()
    os.chdir(folder / "empty")
    try:
        spec = tiny(ROUTED, {"moe": True})
        result = bench(spec, steps=3, say=said.append, squares=[256], trace=trace)
        assert not list(Path.cwd().iterdir()), "a bench writes nothing but the trace"
    finally:
        os.chdir(here)
    assert _children() == before
    assert list(trace.parent.iterdir()) == [trace]
    return result, said


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    """One bench of a tiny spec against another, shared."""
    other = tiny(ROUTED, {"moe": True, "log_steps": 1}, batch_size=1, precision="bf16")
    return bench(tiny(), rounds=2, steps=2, squares=[256], other=other)


def test_reports_what_was_asked_for(measured: tuple[dict[str, Any], list[str]]) -> None:
    result, _ = measured
    positive = [
        *(result[key] for key in ("tokens_per_s", "plain_tokens_per_s", "ratio", "mfu")),
        *result["peak_rss_gb"].values(),
        *result["seconds"].values(),
        *result["plain_seconds"].values(),
        *(result["matmul_tflops"][key] for key in ("bf16", "fp32", "used")),
    ]
    assert all(value > 0 for value in positive)
    assert list(result["seconds"]) == ["forward", "loss", "backward", "optimizer"]
    assert list(result["peak_rss_gb"]) == ["spec", "telemetry_off", "plain"]
    assert result["mfu"] < 1
    assert len(result["ratios"]) == 2
    assert result["compared_with"] is None
    page = render(result)
    assert "times the plain step" in page
    assert "expert telemetry: " in page
    assert result["trace"] in page


def test_rates_follow_from_the_measured_seconds(
    measured: tuple[dict[str, Any], list[str]],
) -> None:
    result, _ = measured
    assert result["tokens_per_s"] == TOKENS / result["step_seconds"]["spec"]
    assert result["plain_tokens_per_s"] == TOKENS / result["step_seconds"]["plain"]
    peak = result["matmul_tflops"]["used"] * 1e12
    assert result["mfu"] == pytest.approx(
        result["tokens_per_s"] * result["flops_per_token"] / peak, rel=1e-12
    )


def test_parts_sum_to_the_step(measured: tuple[dict[str, Any], list[str]]) -> None:
    result, _ = measured
    for arm in ("spec", "telemetry_off", "plain"):
        turns = [turn for turn in result["turns"] if turn["arm"] == arm]
        parts = sum(sum(values) for turn in turns for values in turn["parts"].values())
        # Reading the batch is in the step and in no part; the digest after it in a part only.
        assert parts == pytest.approx(sum(sum(turn["seconds"]) for turn in turns), rel=0.1)
    assert sum(result["plain_seconds"].values()) == pytest.approx(
        statistics.mean(s for turn in turns for s in turn["seconds"]), rel=0.1
    )


def test_arms_take_turns_and_never_overlap(measured: tuple[dict[str, Any], list[str]]) -> None:
    result, said = measured
    turns = result["turns"]
    assert [turn["arm"] for turn in turns] == ["spec", "telemetry_off", "plain"] * 2
    assert all(a["ended"] <= b["began"] for a, b in pairwise(turns))
    assert [line for line in said if line.startswith("round 2")]


def test_cost_of_telemetry_is_that_of_the_specs_cadence(
    measured: tuple[dict[str, Any], list[str]],
) -> None:
    result, _ = measured
    rounds = []
    for number in (0, 3):
        on, off, plain = (turn for turn in result["turns"][number : number + 3])
        # Three steps were asked for: a turn has as many that report as others.
        assert on["reported"] == [False, True, False, True]
        assert off["reported"] == plain["reported"] == [False] * 3
        other, reporting = (on["seconds"][0::2], on["seconds"][1::2])
        mean = 0.9 * statistics.mean(other) + 0.1 * statistics.mean(reporting)
        rounds.append(mean / statistics.mean(off["seconds"]) - 1)
    assert result["telemetry"]["reporting_share"] == 0.1
    assert result["telemetry"]["by_round"] == pytest.approx(rounds, abs=1e-9)
    assert result["telemetry_cost"] == pytest.approx(statistics.median(rounds), abs=1e-9)


def test_trace_is_of_one_whole_step(measured: tuple[dict[str, Any], list[str]]) -> None:
    result, said = measured
    document = json.loads(gzip.decompress(Path(result["trace"]).read_bytes()))
    names = [event["name"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert sum(name.startswith("ProfilerStep") for name in names) == 1
    assert "aten::scaled_dot_product_attention" in names
    assert any("Backward" in name for name in names)
    assert any(name.startswith("Optimizer.step") for name in names)
    assert said[-1] == "profiling a step", "all was timed before"


def test_two_specs_are_measured_like_one(compared: dict[str, Any]) -> None:
    other = compared["compared_with"]
    assert compared["plain_tokens_per_s"] is compared["plain_seconds"] is None
    assert compared["telemetry_cost"] is None
    assert list(compared["peak_rss_gb"]) == ["spec", "compared"]
    assert other["peak_rss_gb"] == compared["peak_rss_gb"]["compared"]
    assert [turn["arm"] for turn in compared["turns"]] == ["spec", "compared"] * 2
    assert compared["turns"][1]["reported"] == [True, True]
    for one in (compared, other):
        assert one["tokens_per_s"] > 0
        assert list(one["seconds"]) == ["forward", "loss", "backward", "optimizer"]
        peak = one["matmul_tflops"]["used"] * 1e12
        assert one["mfu"] == pytest.approx(one["tokens_per_s"] * one["flops_per_token"] / peak)
    assert other["tokens_per_s"] == TOKENS / 2 / other["step_seconds"]


def test_ratio_of_two_specs_is_of_their_tokens(compared: dict[str, Any]) -> None:
    means = [statistics.mean(turn["seconds"]) for turn in compared["turns"]]
    ratios = [2 * means[1] / means[0], 2 * means[3] / means[2]]
    assert compared["ratios"] == pytest.approx(ratios)
    assert compared["ratio"] == pytest.approx(statistics.median(ratios))
    assert (compared["tokens_per_step"], compared["compared_with"]["tokens_per_step"]) == (128, 64)
    assert "different numbers of tokens a step" in compared["notes"][0]


def test_page_of_two_specs_says_what_differs(compared: dict[str, Any]) -> None:
    page = render(compared)
    assert "A: tiny: 2 x 64 tokens, float32" in page
    assert "B: tiny: 1 x 64 tokens, bfloat16" in page
    assert "telemetry.moe: false in A, true in B" in page
    assert "model.num_experts: null in A, 4 in B" in page
    assert "times the tokens/s of B" in page
    assert page.count("MFU") == 3


def test_differences_are_those_of_a_step() -> None:
    spec = tiny()
    again = spec.model_copy(update={"name": "again", "notes": "the same", "seed": 7})
    assert differences(spec, again) == {"seed": {"spec": 42, "compared": 7}}


@pytest.mark.parametrize(
    ("options", "ours", "other"),
    [
        ([], "fp32", None),
        (["training.precision=bf16"], "bf16", None),
        (["--compare", "other.yaml"], "fp32", ("other", "fp32", 32)),
        (["--compare-set", "training.seq_len=16"], "fp32", ("tiny", "fp32", 16)),
        (
            ["training.precision=bf16", "--compare-set", "training.seq_len=16"],
            "bf16",
            ("tiny", "bf16", 16),
        ),
        (
            ["--compare", "other.yaml", "--compare-set", "seed=7", "--compare-set", "name=b"],
            "fp32",
            ("b", "fp32", 32),
        ),
    ],
)
def test_command_line_names_the_other_spec(
    options: list[str],
    ours: str,
    other: tuple[str, str, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, length in (("tiny", 64), ("other", 32)):
        lines = f"name: {name}\ndata: {{dataset: random}}\ntraining: {{seq_len: {length}}}\n"
        Path(f"{name}.yaml").write_text(lines)
    asked: dict[str, Any] = {}

    def measure(spec: RunSpec, *rest: Any, **more: Any) -> dict[str, Any]:
        asked.update(more, spec=spec)
        raise BenchError.at("here", "enough is known")

    monkeypatch.setattr(benching, "bench", measure)
    with pytest.raises(BenchError, match="enough is known"):
        commands.call(["bench", "tiny.yaml", "--profile", "t.json", *options])
    assert asked["spec"].name == "tiny"
    assert asked["spec"].training.precision == ours
    assert asked["trace"] == Path("t.json")
    found = asked["other"]
    described = found and (found.name, found.training.precision, found.training.seq_len)
    assert described == other


def test_trace_never_overwrites(tmp_path: Path) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    for trace, message in ((taken, "overwrites nothing"), (tmp_path / "step.txt", "no name of")):
        with pytest.raises(UserError, match=message) as caught:
            bench(tiny(), trace=trace)
        assert caught.value.exit_code == 2
    assert taken.read_text() == "mine"


def test_trace_without_a_place_is_refused_before_the_bench(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="trace cannot be written") as caught:
        bench(tiny(), trace=tmp_path / "file" / "step.json")
    assert caught.value.exit_code == 74


class FakeProfiler:
    """Leaves `text` where a trace was asked for, and what else a test wants to happen."""

    def __init__(self, text: str, meanwhile: Path | None = None) -> None:
        self._text, self._meanwhile = text, meanwhile

    def call(self, name: str, path: str) -> dict[str, Any]:
        Path(path).write_text(self._text)
        if self._meanwhile:
            self._meanwhile.write_text("another's")
        return {}


def test_trace_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    require_place(trace)
    with pytest.raises(StoreError, match="whole"):
        write_trace(FakeProfiler('{"traceEvents": ['), trace)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="overwrites nothing"):
        write_trace(FakeProfiler("{}", trace), trace)  # type: ignore[arg-type]
    assert trace.read_text() == "another's"
    trace.unlink()
    write_trace(FakeProfiler("{}"), trace)  # type: ignore[arg-type]
    assert trace.read_text() == "{}"


def test_plain_arm_starts_untuned() -> None:
    variables = {"THP_MEM_ALLOC_ENABLE": "1", "LD_PRELOAD": "/lib/libjemalloc.so", "HOME": "/h"}
    assert environment("plain", variables) == {"HOME": "/h"}
    assert environment("spec", variables) == variables


class FakeWorker:
    """Answers with steps of a given length."""

    def __init__(self, *seconds: float) -> None:
        self.name, self.kind = "plain", "plain"
        self._seconds, self.taken = list(seconds), 0

    def call(self, name: str, count: int = 1) -> dict[str, Any]:
        self.taken += count
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        return {"seconds": [seconds] * count, "parts": {}}


@pytest.mark.parametrize(
    ("seconds", "warm_ups", "plan"),
    [
        ([9.0, 1.0], 2, [3, 3]),  # 100 s are enough for all that was asked for
        ([20.0, 20.0], 2, [2, 2]),
        ([30.0], 1, [1, 1]),
        ([90.0], 1, [1]),
        ([400.0], 1, []),  # the warm-up step is the measurement
    ],
)
def test_budget_shortens_the_turns(seconds: list[float], warm_ups: int, plan: list[int]) -> None:
    worker = FakeWorker(*seconds)
    turns = Turns(worker, tiny(), lambda _: None)  # type: ignore[arg-type]
    turns.warm_up(100.0)
    assert worker.taken == warm_ups
    assert turns.plan(2, 3, 100.0) == plan
    assert bool(turns.note) == (not plan)
    assert bool(turns.turns) == (not plan)


@pytest.mark.parametrize(
    ("log_steps", "steps", "budget", "plan"),
    [
        (10, 3, 1000.0, [4, 4]),
        (10, 1, 1000.0, [2, 2]),
        (10, 3, 50.0, [2, 2]),
        (10, 3, 10.0, [2]),
        (1, 3, 1000.0, [3, 3]),
    ],
)
def test_turns_have_as_many_reporting_steps_as_others(
    log_steps: int, steps: int, budget: float, plan: list[int]
) -> None:
    worker = FakeWorker(10.0)
    worker.kind = "spec"
    spec = tiny(ROUTED, {"moe": True, "log_steps": log_steps})
    turns = Turns(worker, spec, lambda _: None)  # type: ignore[arg-type]
    turns.warm_up(1000.0)
    assert turns.plan(2, steps, budget) == plan
    assert benched(spec)["telemetry"]["log_steps"] == min(2, log_steps)


def test_steps_weigh_as_in_a_run() -> None:
    assert logged_share(tiny(telemetry={"log_steps": 10})) == pytest.approx(0.1)
    spec = tiny(telemetry={"log_steps": 10})
    often = spec.evaluation.model_copy(update={"eval_steps": 15})
    share = logged_share(spec.model_copy(update={"evaluation": often}))
    assert share == pytest.approx(1 / 10 + 1 / 15 - 1 / 30)
    kinds = [False, True, False, True]
    assert weighed([1.0, 4.0, 3.0, 6.0], kinds, 0.25, statistics.mean) == 2.75
    assert weighed([1.0, 3.0], [False, False], 0.25, statistics.mean) == 2.0


def test_cost_of_telemetry_needs_both_kinds_of_steps() -> None:
    on, off = (
        Turns(FakeWorker(1.0), tiny(), lambda _: None)  # type: ignore[arg-type]
        for _ in range(2)
    )
    on.reported_share = 0.5
    off.turns = [{"seconds": [1.0], "reported": [False]}]
    on.turns = [{"seconds": [1.0, 3.0], "reported": [False, True]}]
    assert telemetry_cost(on, off) == {
        "cost": 1.0,
        "of_reporting_step": 2.0,
        "of_other_step": 0.0,
        "reporting_share": 0.5,
        "by_round": [1.0],
    }
    on.turns = [{"seconds": [9.0], "reported": [True]}]
    assert telemetry_cost(on, off) is None
    on.reported_share = 1.0
    cost = telemetry_cost(on, off)
    assert cost
    assert (cost["cost"], cost["of_other_step"]) == (8.0, None)


@pytest.mark.parametrize(
    ("data", "tokenizer", "vocab_size"),
    [
        ({"dataset": "tokens", "tokens_path": str(SHARD)}, {}, 512),
        ({"dataset": "fineweb", "stream_path": "there"}, {"name": "bytes"}, 257),
        ({"dataset": "text", "text_file": "there"}, {"name": "bytes"}, 257),
    ],
)
def test_a_step_takes_random_ids_of_the_vocabulary_of_any_data(
    data: dict[str, Any], tokenizer: dict[str, Any], vocab_size: int, tmp_path: Path
) -> None:
    """Nothing of them is read but what a shard says of its ids; further sets are left out."""
    further = {"held_out": [{"name": "more", "path": "there"}]}
    document = tiny().model_dump(mode="json") | {"data": data | further, "tokenizer": tokenizer}
    document["evaluation"] = {}
    spec = RunSpec.model_validate(document)
    found = RunSpec.model_validate(benched(spec))
    assert found.data.dataset == "random"
    assert vocab_size_of(found, tmp_path) == vocab_size_of(spec, tmp_path) == vocab_size
    loaded = load_data(found, tmp_path / "s", seed=1)
    assert loaded.tokenizer.vocab_size == vocab_size
    assert int(loaded.train_stream().next_batch(40).max()) in range(vocab_size - 40, vocab_size)


@pytest.mark.parametrize(
    "fields",
    [
        {"training": {"steps": 100, "stop_at_step": 3}},
        {"training": {"steps": 100, "global_batch_size": 2, "batch_size": None}},
        {
            "training": {"steps": 0, "stop_at_step": 2},
            "data": {"dataset": "sample", "order": "sequential"},
            "schedule": {"decay": "constant", "warmup_steps": 7},
        },
    ],
)
def test_a_benched_step_never_is_the_last(fields: dict[str, Any], tmp_path: Path) -> None:
    """Wherever the run of the spec ends: a bench takes as many steps as it needs."""
    document = tiny().model_dump(mode="json")
    for section, values in fields.items():
        document[section] = values if section == "data" else document[section] | values
    spec = RunSpec.model_validate(document | {"evaluation": {}})
    found = RunSpec.model_validate(benched(spec))
    assert found.sequences_per_update == spec.sequences_per_update == 2
    stream = load_data(found, tmp_path / "s", seed=1).train_stream()
    assert last_step(found, stream) == NO_END


def test_fault_found_by_a_worker_is_the_users(tmp_path: Path) -> None:
    document = benched(tiny())
    document["tokenizer"] = {"name": "file", "path": str(tmp_path / "absent.tiktoken")}
    with Worker("plain", document) as worker, pytest.raises(UserError, match=r"absent\.tiktoken"):
        worker.facts()
    assert not psutil.pid_exists(worker.process.pid)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('no room', file=sys.stderr); sys.exit(3)", r"exit code 3.*\n.*no room"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("""print('{"error": "broken", "faults": null}')""", "broken"),
        ("""print('{"result": {}}')""", "exit code 0"),
    ],
)
def test_worker_that_fails_is_reported(code: str, message: str) -> None:
    command = [sys.executable, "-c", code]

    def use() -> None:
        worker.facts()
        worker.call("steps", count=1)

    with Worker("plain", {}, command) as worker, pytest.raises(BenchError, match=message):
        use()


def test_worker_dies_with_its_parent() -> None:
    command = [sys.executable, "-m", "workbench.bench.worker"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert worker.stdin
    worker.stdin.close()
    assert worker.wait(10) == -signal.SIGKILL


def test_interrupt_ends_both_workers(tmp_path: Path) -> None:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(tiny().model_dump_json(exclude={"schedule"}))
    command = [sys.executable, "-m", "workbench", "bench", str(spec), "--json", "--rounds", "999"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        assert process.stderr
        assert "building" in process.stderr.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


def _children() -> set[int]:
    time.sleep(0.05)
    return {child.pid for child in psutil.Process().children(recursive=True)}
