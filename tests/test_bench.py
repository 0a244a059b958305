"""`wb bench`: the plain arm is the same model, the arms take turns, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from workbench import bench as benching
from workbench.bench import BenchError, Worker, bench, environment, render
from workbench.core.losses import linear_cross_entropy
from workbench.core.model import build_model
from workbench.core.plain import PlainStep, PlainTransformer
from workbench.core.precision import FLOAT32
from workbench.core.train import loss_settings
from workbench.errors import UserError
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
VOCAB = 257


def tiny(model: dict[str, Any], **training: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "tiny",
            "model": model,
            "tokenizer": {"name": "bytes"},
            "data": {"dataset": "sample"},
            "training": {"steps": 5, "batch_size": 2, "seq_len": 64, **training},
        }
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """One bench of a tiny spec, shared; and what it said. Its workers must be gone."""
    said: list[str] = []
    before, here = _children(), Path.cwd()
    os.chdir(tmp_path_factory.mktemp("bench"))
    try:
        result = bench(tiny(ROUTED), rounds=2, steps=10, say=said.append, squares=[256])
        assert not list(Path.cwd().iterdir()), "a bench writes nothing"
    finally:
        os.chdir(here)
    assert _children() == before
    return result, said


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
    assert set(result["peak_rss_gb"]) == {"spec", "plain"}
    assert result["mfu"] < 1
    assert len(result["ratios"]) == 2
    assert "times the plain step" in render(result)


def test_rates_follow_from_the_measured_seconds(
    measured: tuple[dict[str, Any], list[str]],
) -> None:
    result, _ = measured
    tokens = 2 * 64
    assert result["tokens_per_s"] == tokens / result["step_seconds"]["spec"]
    assert result["plain_tokens_per_s"] == tokens / result["step_seconds"]["plain"]
    peak = result["matmul_tflops"]["used"] * 1e12
    assert result["mfu"] == pytest.approx(
        result["tokens_per_s"] * result["flops_per_token"] / peak, rel=1e-12
    )


def test_parts_sum_to_the_step(measured: tuple[dict[str, Any], list[str]]) -> None:
    result, _ = measured
    for arm, parts in (("spec", "seconds"), ("plain", "plain_seconds")):
        steps = [s for turn in result["turns"] if turn["arm"] == arm for s in turn["seconds"]]
        mean = sum(steps) / len(steps)
        # Reading the batch is in the step and in no part; the digest after it in a part only.
        assert sum(result[parts].values()) == pytest.approx(mean, rel=0.1)


def test_arms_take_turns_and_never_overlap(measured: tuple[dict[str, Any], list[str]]) -> None:
    result, said = measured
    turns = result["turns"]
    assert [turn["arm"] for turn in turns] == ["spec", "plain", "spec", "plain"]
    assert all(a["ended"] <= b["began"] for a, b in pairwise(turns))
    assert [line for line in said if line.startswith("round 2")]


@pytest.mark.parametrize("model", [ROUTED, DENSE, {**ROUTED, "num_experts": 4, "top_k": 2}])
def test_plain_arm_is_the_same_model(model: dict[str, Any]) -> None:
    spec = tiny(model, precision="fp32")
    ours = build_model(spec.model, VOCAB, 1, FLOAT32)
    plain = PlainTransformer(spec.model, VOCAB)
    count = sum(p.numel() for p in ours.parameters())
    assert sum(p.numel() for p in plain.parameters()) == count
    plain.load_state_dict(_as_plain(ours.state_dict()), strict=False)

    batch = torch.randint(VOCAB, (2, 65), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        hidden = ours(batch[:, :-1]).flatten(0, 1)
        targets = batch[:, 1:].flatten()
        sums = linear_cross_entropy(hidden, ours.head_weight, targets, loss_settings(spec), FLOAT32)
        loss = PlainStep(spec, plain).loss(batch)
    assert float(loss) == pytest.approx(float(sums.nll) / len(targets), abs=1e-4)
    # The embedding alone would already come to about this loss: the blocks must agree, too.
    torch.testing.assert_close(plain(batch[:, :-1]), ours(batch[:, :-1]), atol=1e-4, rtol=1e-4)


def _as_plain(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's weights under the names of the plain one."""
    plain = {}
    for name, tensor in state.items():
        if name.endswith("_proj_w"):  # [E, in, out]
            head, _, kind = name.removesuffix("_w").rpartition(".")
            for number, weight in enumerate(tensor):
                plain[f"{head}.experts.{number}.{kind}.weight"] = weight.t()
        elif ".shared_" in name and name.endswith(".weight"):
            plain[name.replace(".shared_", ".shared.").replace(".weight", "_proj.weight")] = tensor
        else:
            name = name.replace("shared_output_gate", "shared_gate")
            plain[name.replace("routed_output_gate", "routed_gate")] = tensor
    return plain


def test_plain_step_learns_the_batch() -> None:
    spec = tiny(DENSE, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    step = PlainStep(spec, PlainTransformer(spec.model, VOCAB))
    batch = torch.randint(VOCAB, (4, 65))
    losses = [step.step(batch) for _ in range(5)]
    assert losses[0] == pytest.approx(5.55, abs=0.2)  # ln 257
    assert losses[-1] < losses[0]


def test_plain_arm_starts_untuned() -> None:
    variables = {"THP_MEM_ALLOC_ENABLE": "1", "LD_PRELOAD": "/lib/libjemalloc.so", "HOME": "/h"}
    assert environment("plain", variables) == {"HOME": "/h"}
    assert environment("spec", variables) == variables


class FakeWorker:
    """Answers with steps of a given length."""

    def __init__(self, *seconds: float) -> None:
        self.arm, self._seconds, self.taken = "plain", list(seconds), 0

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
    turns = benching._Turns(worker, lambda _: None)  # type: ignore[arg-type]
    turns.warm_up(100.0, compiles=False)
    assert worker.taken == warm_ups
    assert turns.plan(2, 3, 100.0) == plan
    assert bool(turns.note) == (not plan)
    assert bool(turns.turns) == (not plan)


def test_fault_found_by_a_worker_is_the_users(tmp_path: Path) -> None:
    document = benching._benched(tiny(DENSE))
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
    ],
)
def test_worker_that_fails_is_reported(code: str, message: str) -> None:
    command = [sys.executable, "-c", code]
    with Worker("plain", {}, command) as worker, pytest.raises(BenchError, match=message):
        worker.facts()


def test_worker_dies_with_its_parent() -> None:
    command = [sys.executable, "-m", "workbench.bench_worker"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert worker.stdin
    worker.stdin.close()
    assert worker.wait(10) == -signal.SIGKILL


def test_interrupt_ends_both_workers(tmp_path: Path) -> None:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(tiny(DENSE).model_dump_json(exclude={"schedule"}))
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
