"""`wb bench`: the spec's training step beside a plain step of the same shape, in turn A B A B.

Machines drift, with their heat and their neighbours, so the two arms are measured side by side,
each in a long-lived process of its own that works while the other waits. What is compared is
compared within a round; what is reported is the median over rounds or steps.

Neither step needs text: ids are random, of the spec's own vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Literal, Self

from workbench.core.counts import flops_per_token
from workbench.errors import Fault, UserError
from workbench.spec.run import RunSpec

ArmName = Literal["spec", "plain"]
Say = Callable[[str], None]

# The first step compiles and touches memory for the first time, the second still fills caches.
WARM_UP_STEPS = 2
# Share of an arm's budget after which its warm-up ends early.
WARM_UP_SHARE = 0.25
# Sides of the square products that are tried for the machine's best rate.
SQUARES = (1024, 2048, 4096)
# `train` must not come to its end.
NO_END = 1_000_000

# What tunes an allocator or the threads' waiting: the plain arm does without.
TUNING = (
    "THP_MEM_ALLOC_ENABLE",
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "KMP_BLOCKTIME",
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_CONF",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


class BenchError(UserError):
    """A worker died or failed: no fault of the spec as far as one can tell."""

    exit_code = 70


def bench(
    spec: RunSpec,
    rounds: int = 2,
    steps: int = 2,
    max_seconds: float = 120.0,
    say: Say | None = None,
    squares: Sequence[int] = SQUARES,
) -> dict[str, Any]:
    """Measures `spec` in `rounds` turns of up to `steps` timed steps of each arm.

    `max_seconds` bounds the timed steps of each arm: turns get shorter and then fewer, down to one
    step. A warm-up step that takes longer than that is itself the measurement, and `notes` say so.
    `say` is told what is being measured.

    Raises:
        UserError: the spec cannot be trained here.
        BenchError: a worker failed or died.
    """
    say = say or (lambda _: None)
    document = _benched(spec)
    with Worker("spec", document) as a, Worker("plain", document) as b:
        arms: dict[ArmName, _Turns] = {}
        say("building both arms")
        facts = a.facts()
        plain_facts = b.facts()
        for worker in (a, b):
            arms[worker.arm] = _Turns(worker, say)
            arms[worker.arm].warm_up(max_seconds, spec.training.compile)
        # After the warm-up, so that these operands are not taken for memory that training needs.
        say("measuring matrix products")
        rates = [a.call("matmul", squares=list(squares))]
        counts = {name: arm.plan(rounds, steps, max_seconds) for name, arm in arms.items()}
        turns = min((len(c) for c in counts.values() if c), default=0)
        for turn in range(turns):
            for name, arm in arms.items():
                if counts[name]:
                    say(f"round {turn + 1} of {turns}: {name}, {counts[name][turn]} steps")
                    arm.take(counts[name][turn])
            rates.append(a.call("matmul", squares=list(squares)))
        if facts["hardware"]["device_type"] != "cpu":
            say("the parts of a step, waiting for the device between them")
            for arm in arms.values():
                arm.split(steps)
        if not turns:
            rates.append(a.call("matmul", squares=list(squares)))
    return _summary(spec, facts, plain_facts, arms, rates)


def _benched(spec: RunSpec) -> dict[str, Any]:
    """The spec with random ids for its data, and without an end."""
    document = spec.model_dump(mode="json")
    document["data"] = {"dataset": "random"}
    document["training"]["steps"] = NO_END
    document["schedule"]["warmup_steps"] = spec.warmup_steps
    return document


class _Turns:
    """One arm's measurements."""

    def __init__(self, worker: Worker, say: Say) -> None:
        self.worker, self._say = worker, say
        self.turns: list[dict[str, Any]] = []
        self.parts: dict[str, float] = {}
        self.note: str | None = None

    def warm_up(self, budget: float, compiles: bool) -> None:
        """Takes the uncounted steps; where one is beyond the budget, it is the measurement."""
        compiles = compiles and self.worker.arm == "spec"
        self._say(f"warming up: {self.worker.arm}")
        for number in range(WARM_UP_STEPS):
            last = self.worker.call("steps", count=1)
            self.once = last["seconds"][0]
            if self.once > budget * WARM_UP_SHARE and not (compiles and number == 0):
                break
        if self.once > budget:
            self.note = (
                f"{self.worker.arm}: one step took {self.once:.0f} s, over the {budget:.0f} s for "
                "this arm; that step, without a warm-up before it, is the measurement"
            )
            self._say(self.note)
            self.turns.append(last)

    def plan(self, rounds: int, steps: int, budget: float) -> list[int]:
        """Timed steps of each turn to come; none where the measurement is made."""
        if self.turns:
            return []
        turns = max(1, min(rounds, int(budget / self.once)))
        count = max(1, min(steps, int(budget / turns / self.once)))
        return [count] * turns

    def take(self, count: int) -> None:
        """One turn."""
        self.turns.append(self.worker.call("steps", count=count))

    def split(self, count: int) -> None:
        """Measures the parts of a step apart from its speed, where that disturbs it."""
        self.parts = self.worker.call("steps", count=count, exact=True)["parts"]

    def step_seconds(self) -> float:
        """Median seconds of a step."""
        seconds: list[float] = [s for turn in self.turns for s in turn["seconds"]]
        return statistics.median(seconds)

    def part_seconds(self) -> dict[str, float]:
        """Mean seconds of the parts of a step."""
        if self.parts:
            return self.parts
        weights = [len(turn["seconds"]) for turn in self.turns]
        return {
            part: sum(w * turn["parts"][part] for w, turn in zip(weights, self.turns, strict=True))
            / sum(weights)
            for part in self.turns[0]["parts"]
        }


def _summary(
    spec: RunSpec,
    facts: dict[str, Any],
    plain_facts: dict[str, Any],
    arms: Mapping[ArmName, _Turns],
    rates: list[dict[str, float]],
) -> dict[str, Any]:
    ours, plain = arms["spec"], arms["plain"]
    ratios = [
        statistics.mean(theirs["seconds"]) / statistics.mean(mine["seconds"])
        for mine, theirs in _pairs(ours.turns, plain.turns)
    ]
    native, fp32 = (max(rate[name] for rate in rates) for name in ("bf16", "fp32"))
    bf16, means = native, "native bf16 products"
    native_runs = "native" in facts["precision"]["matmul"]
    if facts["hardware"]["device_type"] == "cpu" and not native_runs and fp32 > native:
        # What a bf16 run takes for a product here is a float32 one of rounded operands.
        bf16, means = fp32, "float32 products of operands rounded to bf16"
    used = bf16 if spec.training.precision == "bf16" else fp32
    if spec.training.precision == "fp32":
        means = "float32 products"
    tokens_per_s = spec.tokens_per_step / ours.step_seconds()
    flops = flops_per_token(spec.model, facts["vocab_size"], spec.training.seq_len)
    training = spec.training
    return {
        "spec": spec.name,
        "tokens_per_s": tokens_per_s,
        "plain_tokens_per_s": spec.tokens_per_step / plain.step_seconds(),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "mfu": tokens_per_s * flops / (used * 1e12),
        "flops_per_token": flops,
        "matmul_tflops": {
            "bf16": bf16,
            "fp32": fp32,
            "native_bf16": native,
            "used": used,
            "used_is": means,
        },
        "peak_rss_gb": {name: arm.turns[-1]["peak_bytes"] / 1e9 for name, arm in arms.items()},
        "seconds": ours.part_seconds(),
        "plain_seconds": plain.part_seconds(),
        "step_seconds": {name: arm.step_seconds() for name, arm in arms.items()},
        "parameters": {"spec": facts["parameters"], "plain": plain_facts["parameters"]},
        "device": facts["hardware"]["device_name"],
        "device_type": facts["hardware"]["device_type"],
        "torch": facts["hardware"]["torch"],
        "threads": facts["hardware"]["threads"],
        "settings": {
            "batch_size": training.batch_size,
            "seq_len": training.seq_len,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "precision": facts["precision"],
            "compile": training.compile,
            "compile_mode": training.compile_mode,
            "grad_ckpt": training.grad_ckpt,
            "execution": facts["execution"],
            "data": "random ids",
        },
        "turns": sorted(
            ({"arm": name, **turn} for name, arm in arms.items() for turn in arm.turns),
            key=lambda turn: float(turn["began"]),
        ),
        "notes": [arm.note for arm in arms.values() if arm.note],
    }


def _pairs(
    mine: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The turns of each round; an arm measured by a single step is in every round."""
    for turn in range(max(len(mine), len(theirs))):
        yield mine[min(turn, len(mine) - 1)], theirs[min(turn, len(theirs) - 1)]


class Worker:
    """A process that measures one arm; gone, with all it started, when the `with` block ends."""

    def __init__(
        self, arm: ArmName, spec: dict[str, Any], command: list[str] | None = None
    ) -> None:
        self.arm = arm
        self._spec = spec
        self._command = command or [sys.executable, "-m", "workbench.bench_worker"]

    def __enter__(self) -> Self:
        self._log: IO[bytes] = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env=environment(self.arm, os.environ),
                # Ctrl-C in a terminal reaches this process alone, which then ends the workers.
                start_new_session=True,
            )
        except BaseException:
            self._log.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream
                stream.close()
        self._log.close()

    def facts(self) -> dict[str, Any]:
        """Builds the arm; what it is."""
        return self._ask({"arm": self.arm, "spec": self._spec})

    def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request (see `bench_worker`).

        Raises:
            UserError: the worker found a fault in the spec.
            BenchError: it failed or died.
        """
        return self._ask({"call": name, "with": arguments})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self.process.stdout.readline()
        if not line:
            raise self._died()
        answer = json.loads(line)
        if "error" not in answer:
            result: dict[str, Any] = answer["result"]
            return result
        if answer["faults"]:
            raise UserError(*(Fault(**fault) for fault in answer["faults"]))
        raise BenchError.at(f"the {self.arm} worker", f"{answer['error']}{self._last_lines()}")

    def _died(self) -> BenchError:
        code = self.process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (out of memory?)"
        return BenchError.at(f"the {self.arm} worker", f"{how}{self._last_lines()}")

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-8:]
        return "; its last lines:\n  " + "\n  ".join(lines) if lines else ""


def environment(arm: ArmName, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables a worker starts with: for the plain arm, without what tunes an allocator."""
    kept = dict(variables)
    if arm == "plain":
        for name in TUNING:
            kept.pop(name, None)
        if "malloc" in kept.get("LD_PRELOAD", ""):
            del kept["LD_PRELOAD"]
    return kept


def render(result: dict[str, Any]) -> str:
    """A page for the terminal."""
    matmul, peak = result["matmul_tflops"], result["peak_rss_gb"]
    settings, step = result["settings"], result["step_seconds"]
    shape = f"{settings['batch_size']} x {settings['seq_len']:,} tokens"
    if settings["gradient_accumulation_steps"] > 1:
        shape += f" x {settings['gradient_accumulation_steps']} micro-batches"
    head = f"{result['spec']}: {shape}, {settings['precision']['compute_dtype']}"
    head += ", compiled" if settings["compile"] else ", not compiled"
    lines = [
        head,
        f"{result['device']}, {result['threads']} threads, torch {result['torch']}",
        "",
        f"{'':22}{'spec':>12}{'plain':>12}",
        f"{'tokens/s':22}{result['tokens_per_s']:12,.0f}{result['plain_tokens_per_s']:12,.0f}",
        f"{'peak memory, GB':22}{peak['spec']:12.2f}{peak['plain']:12.2f}",
        f"{'seconds of a step':22}{step['spec']:12.3f}{step['plain']:12.3f}",
    ]
    for part, seconds in result["seconds"].items():
        lines.append(f"{'  ' + part:22}{seconds:12.3f}{result['plain_seconds'][part]:12.3f}")
    ratios = ", ".join(f"{ratio:.2f}" for ratio in result["ratios"])
    lines += [
        "",
        f"{result['ratio']:.2f} times the plain step (by round: {ratios})",
        f"MFU {result['mfu']:.1%} of {matmul['used']:.3g} TFLOP/s ({matmul['used_is']}); "
        f"{result['flops_per_token']:,} FLOPs a token",
        f"matrix products: bf16 {matmul['bf16']:.3g}, float32 {matmul['fp32']:.3g} TFLOP/s",
        *result["notes"],
    ]
    return "\n".join(lines)
