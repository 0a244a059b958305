"""What the workers of `wb bench` time: the spec's own step, the plain step, matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from workbench.core.data.batches import RandomWindows, WindowStream
from workbench.core.data.loading import vocab_size_of
from workbench.core.device import choose_device
from workbench.core.memory import peak_bytes
from workbench.core.model import Output, TrainingForward
from workbench.core.plain import PlainStep, PlainTransformer, left_out
from workbench.core.precision import choose_precision
from workbench.core.train import synchronize, train
from workbench.run import build
from workbench.spec.run import RunSpec
from workbench.track.record import COMPILER_COUNTS
from workbench.track.store import Store

PARTS = ("forward", "loss", "backward", "optimizer")

# A product is repeated for this long and the fastest counts; one that would take longer than
# `MOST_SECONDS` a time is left out: it is of a kind that this machine does not do well.
PRODUCT_SECONDS = 0.15
MOST_SECONDS = 3.0
KEPT_SHAPES = 2

Shape = tuple[int, int, int]


class Stopwatch:
    """Splits training steps into their parts, from outside, by what the step calls.

    `loss` is the head's product and the cross-entropy, both their passes: from the hidden states
    to the gradient of the hidden states. `backward` is the rest of that pass. `optimizer` has the
    clipping in it. `exact` waits for the device at each boundary; on a CPU nothing has to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.exact = False
        self.restart()

    def restart(self) -> None:
        """Forgets what it has."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    def around(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`forward` (ids -> hidden states), watched."""

        def watched(ids: Tensor) -> Tensor:
            self._mark(None)
            hidden = forward(ids)
            self._mark("forward")
            hidden.register_hook(self._at_hidden)  # type: ignore[no-untyped-call]
            return hidden

        return watched

    def around_training(self, forward: TrainingForward) -> TrainingForward:
        """`forward` (ids -> hidden states and extras), watched."""

        def watched(ids: Tensor) -> Output:
            self._mark(None)
            output = forward(ids)
            self._mark("forward")
            if output.hidden.requires_grad:
                output.hidden.register_hook(self._at_hidden)  # type: ignore[no-untyped-call]
            return output

        return watched

    def finish(self) -> None:
        """To be called right after the step."""
        self._mark("optimizer")

    def _at_hidden(self, grad: Tensor) -> None:
        self._mark("loss")
        engine: Any = Variable._execution_engine
        engine.queue_callback(lambda: self._mark("backward"))

    def _mark(self, part: str | None) -> None:
        if self.exact:
            synchronize(self._device)
        now = time.perf_counter()
        if part:
            self.seconds[part] += now - self._last
        self._last = now


class Arm(Protocol):
    """Something that trains step by step."""

    device: torch.device
    watch: Stopwatch
    reported: bool
    """Whether the last step reported on the experts."""

    def step(self) -> float:
        """One update; the seconds it took."""

    def facts(self) -> dict[str, Any]:
        """What ran, for the report."""


class SpecArm:
    """The step of the spec, built and trained as a run does it."""

    def __init__(self, spec: RunSpec) -> None:
        self._parts = build(spec, Store())
        self.device = self._parts.device
        self.watch = Stopwatch(self.device)
        forward = self.watch.around_training(self._parts.forward)
        self._results = train(spec, self._parts.state, forward, self._parts.loss)

    def step(self) -> float:
        """One update; the seconds it took."""
        result = next(self._results)
        self.watch.finish()
        self.reported = result.experts is not None
        return result.seconds

    def facts(self) -> dict[str, Any]:
        """What ran, for the report."""
        effective = self._parts.effective.model_dump(mode="json")
        for name in COMPILER_COUNTS:  # of the steps of a run, which these are not
            del effective["execution"][name]
        return {
            "parameters": effective["parameters"]["total"],
            "vocab_size": effective["tokenizer"]["vocab_size"],
            "device_type": self.device.type,
            "precision": effective["precision"],
            "execution": effective["execution"],
            "hardware": effective["hardware"],
        }


class PlainArm:
    """The plain step of the same shape, on the same ids."""

    reported = False

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self.device = choose_device(spec.training.device)
        choose_precision(spec.training.precision, self.device)  # the same refusals
        torch.manual_seed(spec.seed)
        cache = Store().home / "cache" / "tiktoken"
        vocab = vocab_size_of(spec, cache)
        self._stream = WindowStream(RandomWindows(vocab, spec.training.seq_len, spec.seed))
        self._sequences = spec.sequences_per_update
        model = PlainTransformer(spec.model, vocab).to(self.device)
        self.watch = Stopwatch(self.device)
        self._step = PlainStep(spec, model, self.watch.around(model))

    def step(self) -> float:
        """One update; the seconds it took."""
        began = time.perf_counter()
        windows = torch.from_numpy(self._stream.next_batch(self._sequences)).to(self.device)
        self._step.step(windows)
        synchronize(self.device)
        self.watch.finish()
        return time.perf_counter() - began

    def facts(self) -> dict[str, Any]:
        """What ran, for the report."""
        parameters = sum(p.numel() for p in self._step.model.parameters())
        return {
            "parameters": parameters,
            "device_type": self.device.type,
            "left_out": left_out(self._spec),
        }


class Workbench:
    """What a worker does when it is asked to: one method per request, JSON in and out."""

    def __init__(self, arm: str, spec: dict[str, Any]) -> None:
        self._spec = RunSpec.model_validate(spec)
        self._arm: Arm = SpecArm(self._spec) if arm == "spec" else PlainArm(self._spec)
        self._best: dict[torch.dtype, list[Shape]] = {}
        # The peak that training reached, and the one that matrix products left behind.
        self._peak = self._other_peak = 0

    def facts(self) -> dict[str, Any]:
        """What this worker runs."""
        return self._arm.facts()

    def steps(self, count: int, exact: bool = False) -> dict[str, Any]:
        """`count` updates: seconds of each and of its parts, and peak memory so far.

        `reported` says which of them reported on the experts. `began` and `ended` are on the clock
        that all processes share.
        """
        watch = self._arm.watch
        watch.exact = exact
        seconds, reported = [], []
        parts: dict[str, list[float]] = {part: [] for part in PARTS}
        began = time.monotonic()
        for _ in range(count):
            watch.restart()
            seconds.append(self._arm.step())
            reported.append(self._arm.reported)
            for part, value in watch.seconds.items():
                parts[part].append(value)
        ended = time.monotonic()
        watch.exact = False
        peak = peak_bytes(self._arm.device)
        if peak > self._other_peak:
            self._peak = peak
        return {
            "seconds": seconds,
            "parts": parts,
            "reported": reported,
            "began": began,
            "ended": ended,
            "peak_bytes": self._peak,
        }

    def profile(self, path: str) -> dict[str, Any]:
        """Writes a trace of one step, as JSON for a viewer of Chrome traces; the profiler itself
        warms up in a step before it."""
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(path),
            record_shapes=True,
        ) as profiler:
            for _ in range(2):
                self._arm.step()
                profiler.step()
        return {}

    def matmul(self, squares: list[int]) -> dict[str, float]:
        """The best rates of bf16 and float32 products at present, in TFLOP/s.

        Squares of the given sides and the shapes of the model; the first call tries all of them,
        later ones those that were best in it.
        """
        found = {}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            shapes = self._best.get(dtype) or list(_shapes(self._spec, squares))
            rates = _rates(shapes, dtype, self._arm.device)
            self._best[dtype] = sorted(rates, key=lambda shape: -rates[shape])[:KEPT_SHAPES]
            found[name] = max(rates.values()) / 1e12
        self._other_peak = peak_bytes(self._arm.device)
        return found


def _shapes(spec: RunSpec, squares: list[int]) -> Iterator[Shape]:
    """Products (rows, inner, columns) to try: squares, then those of the model's own matrices."""
    yield from ((side, side, side) for side in squares)
    model, training = spec.model, spec.training
    tokens, hidden = spec.micro_batch_size * training.seq_len, model.hidden_size
    widths = {
        hidden,
        model.num_attention_heads * model.head_dim,
        model.num_key_value_heads * model.head_dim,
        model.shared_intermediate_size or hidden,
        model.intermediate_size,
    }
    for width in sorted(widths):
        yield tokens, hidden, width
        yield tokens, width, hidden
    yield tokens, hidden, training.loss_block_vocab


def _rates(shapes: list[Shape], dtype: torch.dtype, device: torch.device) -> dict[Shape, float]:
    """FLOP/s of the fastest of several products of each shape that this machine does in time."""
    rates: dict[Shape, float] = {}
    for rows, inner, columns in shapes:
        work = 2 * rows * inner * columns
        if rates and work / max(rates.values()) > MOST_SECONDS:
            continue
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(inner, columns, device=device).to(dtype)
        out = torch.empty(rows, columns, dtype=dtype, device=device)
        fastest, until, times = float("inf"), time.perf_counter() + PRODUCT_SECONDS, 0
        while times < 3 or time.perf_counter() < until:
            synchronize(device)
            began = time.perf_counter()
            torch.mm(left, right, out=out)
            synchronize(device)
            seconds = time.perf_counter() - began
            times += 1
            if times > 1 or seconds > MOST_SECONDS:  # the first one sets things up
                fastest = min(fastest, seconds)
            if seconds > MOST_SECONDS:
                break
        rates[rows, inner, columns] = work / fastest
    return rates
