"""`wb plan`: its numbers, that no model is built for them, and where its time comes from."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_spec

from workbench import commands, foresee
from workbench import plan as planning
from workbench.answers import Answer
from workbench.bench import measure as benching
from workbench.bench import store as bench_store
from workbench.bench.store import MOST_KEPT, find_bench, keep_bench, step_settings, torch_version
from workbench.core.counts import count_parameters, flops_per_token
from workbench.core.footprint import checkpoint_bytes, footprint
from workbench.core.precision import choose_precision
from workbench.errors import UserError
from workbench.plan import duration, expected_device, expected_matmul, plan, render
from workbench.spec.run import RunSpec
from workbench.track.store import Store

ROOT = Path(__file__).parents[1]
OPEN_ENDED = {
    "data": {"order": "sequential"},
    "training": {"steps": 0, "batch_size": 4, "seq_len": 32},
    "schedule": {"decay": "constant", "warmup_steps": 2},
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "mlruns")


def result(spec: RunSpec, tokens_per_s: float = 1000.0, **changes: Any) -> dict[str, Any]:
    """What a bench of `spec` on this machine says, as far as it is kept."""
    return {
        "tokens_per_s": tokens_per_s,
        "flops_per_token": flops_per_token(spec.model, 257, spec.training.seq_len),
        "device": "a CPU",
        "device_type": "cpu",
        "torch": torch_version(),
        "threads": 2,
    } | changes


def test_the_numbers_of_a_plan(tmp_path: Path, store: Store) -> None:
    spec = tiny_spec(tmp_path)
    document = plan(spec, store)
    vocab = document["vocab_size"]
    assert document["parameters"] == vars(count_parameters(spec.model, vocab))
    assert document["flops_per_token"] == flops_per_token(spec.model, vocab, 32)
    flops = document["flops"]
    assert flops["weights"] == 6 * flops["N"]
    assert flops["attention"] == 6 * flops["L"] * flops["S"] * flops["H"]
    assert flops["weights"] + flops["attention"] == document["flops_per_token"]
    assert document["tokens_per_step"] == 4 * 32
    assert document["tokens"] == 4 * 4 * 32
    memory = footprint(spec, vocab, "float32")
    assert document["memory_gb"] == memory.peak / 1e9
    assert document["memory"]["bytes"]["optimizer"] == memory.optimizer
    assert document["checkpoint_bytes"] == checkpoint_bytes(spec, vocab)
    assert document["expected"] is None
    assert not store.home.exists()
    page = render(document)
    assert f"{document['flops_per_token']:,} a token = 6 N + 6 L S H" in page
    assert "`wb bench`" in page


def test_a_run_without_a_planned_end_takes_one_pass(tmp_path: Path, store: Store) -> None:
    spec = tiny_spec(tmp_path, **OPEN_ENDED)
    keep_bench(spec, result(spec), store)
    document = plan(spec, store)
    assert document["tokens"] is document["steps"] is document["expected"]["seconds"] is None
    assert document["expected"]["step_seconds"] == pytest.approx(0.128)
    assert "one pass over the data" in render(document)


def test_a_run_that_stops_early_takes_what_it_takes(tmp_path: Path, store: Store) -> None:
    """Tokens, steps and time are those of the run, not those that its schedules are made for."""
    spec = tiny_spec(tmp_path, training={"steps": 100, "stop_at_step": 3, "seq_len": 32})
    keep_bench(spec, result(spec), store)
    document = plan(spec, store)
    assert (document["steps"], document["planned_steps"], document["tokens"]) == (3, 100, 384)
    assert document["expected"]["seconds"] == pytest.approx(0.384)
    assert "384 in all (3 of 100 planned steps)" in render(document)
    assert foresee.plan(spec, store)["tokens"] == 384
    training = {**OPEN_ENDED["training"], "stop_at_step": 5}
    open_ended = plan(tiny_spec(tmp_path, **OPEN_ENDED | {"training": training}), store)
    assert (open_ended["steps"], open_ended["planned_steps"]) == (5, None)
    assert open_ended["tokens"] == 5 * 128
    assert "if they hold as many" in render(open_ended)


def test_memory_elsewhere_is_that_of_the_device(tmp_path: Path, store: Store) -> None:
    spec = tiny_spec(tmp_path, training={"device": "cuda", "precision": "bf16"})
    memory = plan(spec, store)["memory"]
    assert (memory["device"], memory["matmul"]) == ("cuda", "native")
    assert not {"process", "holes"} & memory["bytes"].keys()


def test_means_of_products_are_foreseen(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, training={"device": "cpu", "precision": "bf16"})
    assert expected_device(spec) == "cpu"
    assert expected_matmul(spec, "cpu") == choose_precision("bf16", torch.device("cpu")).matmul


@pytest.mark.parametrize(
    ("sets", "matmul"),
    [
        (["avx2", "fma"], "upcast"),
        (["avx512f", "avx512bw", "avx512dq", "avx512vl"], "upcast"),
        (["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"], "native"),
        (["amx_bf16", "avx512f"], "native"),
        (["asimd", "bf16"], "native"),
    ],
)
def test_bf16_products_hang_on_the_instructions(
    sets: list[str], matmul: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "instruction_sets", lambda: sets)
    spec = tiny_spec(tmp_path, training={"precision": "bf16"})
    assert expected_matmul(spec, "cpu") == matmul


def test_the_command_builds_no_model_and_is_quick(tmp_path: Path) -> None:
    """Torch is not even imported. Its time is that of the processor: the machine may be busy."""
    code = (
        "import sys\nfrom workbench.commands import call\n"
        "answer = call(['plan', *sys.argv[1:], '--json'])\n"
        "import json; print(json.dumps(answer.content)); sys.exit('torch' in sys.modules)"
    )
    specs = [str(ROOT / "experiments" / f"100m_{name}.yaml") for name in ("mha", "gqa_dense")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *specs],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"WB_HOME": str(tmp_path)},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["plans"]
    assert first["parameters"]["total"] == second["parameters"]["total"] == 99_487_680
    assert first["parameters"]["experts"] > second["parameters"]["experts"] == 0
    assert first["tokens"] == 1_024_000
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5 * len(specs)


def asked(*arguments: str) -> Any:
    answer = commands.call(["plan", *arguments])
    assert isinstance(answer, Answer)
    return answer.content


def test_one_spec_is_one_document_and_overrides_hold_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "data: {dataset: random}\ntokenizer: {name: bytes}\n"
    for name in ("a.yaml", "lr=1.yaml"):
        Path(name).write_text(text + "name: one\n")
    assert asked("a.yaml", "--json")["tokens_per_step"] == 4096
    plans = asked("a.yaml", "lr=1.yaml", "training.batch_size=2", "--json")["plans"]
    assert [one["tokens_per_step"] for one in plans] == [2048, 2048]
    assert asked("a.yaml", "lr=1.yaml").count("6 L S H") == 4
    with pytest.raises(UserError, match="no spec is named"):
        asked("training.batch_size=2")


def test_the_same_step_is_expected_to_take_as_long(tmp_path: Path, store: Store) -> None:
    spec = tiny_spec(tmp_path)
    keep_bench(spec, result(spec, 500.0), store)
    keep_bench(spec, result(spec, 1000.0), store)  # takes the place of the first
    other = tiny_spec(tmp_path, training={"steps": 9, "batch_size": 2, "seq_len": 32})
    keep_bench(other, result(other, 10.0), store)  # newer, but of another step
    longer = tiny_spec(tmp_path, training={"steps": 100, "batch_size": 4, "seq_len": 32})
    expected = plan(longer, store)["expected"]
    assert expected["seconds"] == pytest.approx(100 * 128 / 1000)
    assert not expected["scaled"]
    assert expected["bench"]["spec"] == "tiny"
    assert expected["bench"]["tokens_per_s"] == 1000.0
    (path,) = (store.cache / "bench").iterdir()
    assert len(json.loads(path.read_text())["results"]) == 2


def test_another_shape_is_scaled_by_its_flops_and_says_so(tmp_path: Path, store: Store) -> None:
    spec = tiny_spec(tmp_path)
    keep_bench(spec, result(spec), store)
    long = tiny_spec(tmp_path, training={"steps": 4, "batch_size": 2, "seq_len": 512})
    document = plan(long, store)
    expected = document["expected"]
    ratio = flops_per_token(spec.model, 257, 32) / flops_per_token(long.model, 257, 512)
    assert ratio < 0.9
    assert expected["tokens_per_s"] == pytest.approx(1000 * ratio)
    assert expected["scaled"]
    assert expected["differs"] == ["training.batch_size", "training.seq_len"]
    page = render(document)
    assert "scaled by FLOPs per token: it differs in training.batch_size, training.seq_len" in page
    assert "from wb bench of tiny, 20" in page


def test_a_bench_of_another_machine_or_precision_tells_nothing(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_spec(tmp_path)
    keep_bench(spec, result(spec, torch="1.0"), store)
    keep_bench(spec, result(spec, device_type="cuda"), store)
    assert find_bench(spec, "cpu", store) is None
    found = tiny_spec(tmp_path, training={"precision": "bf16"})
    keep_bench(found, result(found), store)
    assert find_bench(spec, "cpu", store) is None
    keep_bench(spec, result(spec), store)
    assert find_bench(spec, "cpu", store) is not None
    monkeypatch.setattr(bench_store, "cpu_name", lambda: "another")
    assert find_bench(spec, "cpu", store) is None


def test_damaged_results_count_as_none(tmp_path: Path, store: Store) -> None:
    spec = tiny_spec(tmp_path)
    path = keep_bench(spec, result(spec), store)
    for text in ("", "{", "[]", '{"format": 0}'):
        path.write_text(text)
        assert find_bench(spec, "cpu", store) is None
    keep_bench(spec, result(spec), store)
    assert find_bench(spec, "cpu", store) is not None


def test_results_do_not_pile_up(tmp_path: Path, store: Store) -> None:
    for batch in range(1, MOST_KEPT + 4):
        spec = tiny_spec(tmp_path, training={"batch_size": batch, "seq_len": 32})
        path = keep_bench(spec, result(spec), store)
    kept = json.loads(path.read_text())["results"]
    assert len(kept) == MOST_KEPT
    assert kept[-1]["step"] == step_settings(spec)


def test_what_a_step_does_not_depend_on_is_no_difference(tmp_path: Path) -> None:
    one = tiny_spec(tmp_path)
    other = tiny_spec(tmp_path, "other", 1, optimizer={"lr": 1.0}, evaluation={"eval_steps": 1})
    assert step_settings(one) == step_settings(other)
    shape = {"batch_size": None, "global_batch_size": 4, "seq_len": 32}
    other = tiny_spec(tmp_path, training={"steps": 9, "stop_at_step": 3, **shape})
    assert step_settings(one) == step_settings(other)


def test_wb_bench_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("data: {dataset: random}\ntokenizer: {name: bytes}\n")
    monkeypatch.setattr(benching, "bench", lambda spec, *_, **__: result(spec))
    commands.call(["bench", "a.yaml", "--json"])
    assert asked("a.yaml", "--json")["expected"]["tokens_per_s"] == 1000.0

    monkeypatch.setenv("WB_HOME", str(tmp_path / "a.yaml"))  # a file, where a folder must be
    answer = commands.call(["bench", "a.yaml", "--json"])
    assert isinstance(answer, Answer)
    assert answer.exit_code == 0
    assert "not kept for wb plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.21, "4.2 s"),
        (302, "5 min 2 s"),
        (1800, "30 min"),
        (12_000, "3 h 20 min"),
        (864_000, "10.0 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
