"""`wb bench`: the spec's training step beside another one, in turn A B A B.

The other is a plain step of the same shape, or the step of another spec. Machines drift, with their
heat and their neighbours, so the arms are measured side by side, each in a long-lived process of
its own that works while the others wait. What is compared is compared within a round; what is
reported is the median over rounds or steps. A spec with expert telemetry gets one more arm, itself
without: its cost.

No step needs text: ids are random, of the spec's own vocabulary.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.bench.process import ArmKind, Worker
from workbench.bench.trace import require_place, write_trace
from workbench.bench.turns import Say, Turns, benched, pairs, telemetry_cost
from workbench.core.counts import flops_per_token
from workbench.spec.run import RunSpec

# Sides of the square products that are tried for the machine's best rate.
SQUARES = (1024, 2048, 4096)
# Sections that say nothing of a step, or that a bench replaces.
NOT_OF_A_STEP = {"name", "notes", "data", "evaluation", "checkpoint", "tracking"}


def bench(
    spec: RunSpec,
    rounds: int = 2,
    steps: int = 2,
    max_seconds: float = 120.0,
    say: Say | None = None,
    squares: Sequence[int] = SQUARES,
    *,
    other: RunSpec | None = None,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Measures `spec` in `rounds` turns of up to `steps` timed steps of each arm.

    The other arm is `other`, or a plain step where that is None. `max_seconds` bounds the timed
    steps of each arm: turns get shorter and then fewer, down to one step (two where every second
    one reports on experts). A warm-up step that takes longer than that is itself the measurement,
    and `notes` say so. `trace` names a file for the profile of a step of `spec`, taken when all is
    timed. `say` is told what is being measured.

    Raises:
        UserError: a spec cannot be trained here, or `trace` is there already.
        StoreError: the trace cannot be written.
        BenchError: a worker failed or died.
    """
    say = say or (lambda _: None)
    if trace:
        require_place(trace)
    with contextlib.ExitStack() as stack:
        arms = {
            name: Turns(stack.enter_context(Worker(kind, benched(one), name=name)), one, say)
            for name, kind, one in _arms(spec, other)
        }
        say("building the arms")
        for arm in arms.values():
            arm.facts = arm.worker.facts()
        for arm in arms.values():
            arm.warm_up(max_seconds)
        # After the warm-up, so that these operands are not taken for memory that training needs.
        rates = _Rates(arms, squares)
        say("measuring matrix products")
        rates.measure()
        plans = {name: arm.plan(rounds, steps, max_seconds) for name, arm in arms.items()}
        turns = min((len(plan) for plan in plans.values() if plan), default=0)
        for turn in range(turns):
            for name, arm in arms.items():
                if plans[name]:
                    say(f"round {turn + 1} of {turns}: {name}, {plans[name][turn]} steps")
                    arm.take(plans[name][turn])
            rates.measure()
        if not turns:
            rates.measure()
        for arm in arms.values():
            if arm.facts["device_type"] != "cpu":
                say(f"the parts of a step, waiting for the device between them: {arm.name}")
                arm.split(steps)
        if trace:
            say("profiling a step")
            write_trace(arms["spec"].worker, trace)
    return _summary(arms, rates, trace)


def _arms(spec: RunSpec, other: RunSpec | None) -> Iterator[tuple[str, ArmKind, RunSpec]]:
    """Name, kind and spec of each arm, in the order of their turns."""
    yield "spec", "spec", spec
    if other:
        yield "compared", "spec", other
        return
    if spec.telemetry.moe:
        off = spec.telemetry.model_copy(update={"moe": False})
        yield "telemetry_off", "spec", spec.model_copy(update={"telemetry": off})
    yield "plain", "plain", spec


class _Rates:
    """The best rates of matrix products, by device: arms on one device share them."""

    def __init__(self, arms: dict[str, Turns], squares: Sequence[int]) -> None:
        self._squares = list(squares)
        self._askers: dict[str, Worker] = {}
        for arm in arms.values():
            self._askers.setdefault(arm.facts["device_type"], arm.worker)
        self._best: dict[str, dict[str, float]] = {}

    def measure(self) -> None:
        """Measures again; what counts is the best so far."""
        for device, worker in self._askers.items():
            found = worker.call("matmul", squares=self._squares)
            best = self._best.setdefault(device, found)
            self._best[device] = {name: max(best[name], rate) for name, rate in found.items()}

    def of(self, arm: Turns) -> dict[str, Any]:
        """TFLOP/s: of both kinds of product, and of the kind that the arm's spec takes."""
        best = self._best[arm.facts["device_type"]]
        native, fp32 = best["bf16"], best["fp32"]
        bf16, means = native, "native bf16 products"
        native_runs = "native" in arm.facts["precision"]["matmul"]
        if arm.facts["device_type"] == "cpu" and not native_runs and fp32 > native:
            # What a bf16 run takes for a product here is a float32 one of rounded operands.
            bf16, means = fp32, "float32 products of operands rounded to bf16"
        used = bf16
        if arm.spec.training.precision == "fp32":
            used, means = fp32, "float32 products"
        return {
            "bf16": bf16,
            "fp32": fp32,
            "native_bf16": native,
            "used": used,
            "used_is": means,
        }


def _summary(arms: dict[str, Turns], rates: _Rates, trace: Path | None) -> dict[str, Any]:
    ours = arms["spec"]
    theirs = arms.get("plain") or arms["compared"]
    ratios = [
        (ours.spec.tokens_per_step / ours.turn_seconds(mine))
        / (theirs.spec.tokens_per_step / theirs.turn_seconds(other))
        for mine, other in pairs(ours.turns, theirs.turns)
    ]
    plain, compared, unwatched = (arms.get(n) for n in ("plain", "compared", "telemetry_off"))
    cost = telemetry_cost(ours, unwatched) if unwatched else None
    notes = [arm.note for arm in arms.values() if arm.note]
    if unwatched and not cost:
        notes.append("too few steps were taken to tell the cost of expert telemetry")
    if plain and plain.facts["left_out"]:
        notes.append(f"the plain step does without {', '.join(plain.facts['left_out'])}")
    if ours.spec.tokens_per_step != theirs.spec.tokens_per_step:
        notes.append("the two take different numbers of tokens a step; the ratio is of tokens/s")
    hardware = ours.facts["hardware"]
    return {
        "spec": ours.spec.name,
        **_measured(ours, rates),
        "plain_tokens_per_s": plain.tokens_per_s() if plain else None,
        "plain_seconds": plain.part_seconds() if plain else None,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "compared_with": {
            "spec": compared.spec.name,
            **_measured(compared, rates),
            "peak_rss_gb": compared.peak_gb(),
            "step_seconds": compared.step_seconds(),
            "parameters": compared.facts["parameters"],
            "differs": differences(ours.spec, compared.spec),
        }
        if compared
        else None,
        "telemetry_cost": cost["cost"] if cost else None,
        "telemetry": cost,
        "peak_rss_gb": {name: arm.peak_gb() for name, arm in arms.items()},
        "step_seconds": {name: arm.step_seconds() for name, arm in arms.items()},
        "parameters": {name: arm.facts["parameters"] for name, arm in arms.items()},
        "device": hardware["device_name"],
        "device_type": hardware["device_type"],
        "torch": hardware["torch"],
        "threads": hardware["threads"],
        "turns": sorted(
            ({"arm": name, **turn} for name, arm in arms.items() for turn in arm.turns),
            key=lambda turn: float(turn["began"]),
        ),
        "trace": str(trace) if trace else None,
        "notes": notes,
    }


def _measured(arm: Turns, rates: _Rates) -> dict[str, Any]:
    """What is told of each spec alike."""
    training = arm.spec.training
    matmul = rates.of(arm)
    flops = flops_per_token(arm.spec.model, arm.facts["vocab_size"], training.seq_len)
    return {
        "tokens_per_s": arm.tokens_per_s(),
        "tokens_per_step": arm.spec.tokens_per_step,
        "mfu": arm.tokens_per_s() * flops / (matmul["used"] * 1e12),
        "flops_per_token": flops,
        "matmul_tflops": matmul,
        "seconds": arm.part_seconds(),
        "settings": {
            "batch_size": arm.spec.micro_batch_size,
            "seq_len": training.seq_len,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "precision": arm.facts["precision"],
            "compile": training.compile,
            "compile_mode": training.compile_mode,
            "grad_ckpt": training.grad_ckpt,
            "telemetry_moe": arm.spec.telemetry.moe,
            "execution": arm.facts["execution"],
            "data": "random ids",
        },
    }


def differences(one: RunSpec, other: RunSpec) -> dict[str, dict[str, Any]]:
    """The settings of a step in which two specs differ, by field: `spec` and `compared`."""
    mine, theirs = (
        dict(_leaves(s.model_dump(mode="json", exclude=NOT_OF_A_STEP))) for s in (one, other)
    )
    return {
        field: {"spec": value, "compared": theirs[field]}
        for field, value in mine.items()
        if value != theirs[field]
    }


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
