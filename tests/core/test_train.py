"""One training step against plain PyTorch, and everything that must not change or poison a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import tiny_parts, tiny_spec, untracked_run
from torch import Tensor, nn
from torch.nn import functional as F

from workbench import recorder
from workbench import run as runner
from workbench.cli import _guarded
from workbench.core import saving
from workbench.core import train as training
from workbench.core.checkpoint import checkpoints
from workbench.core.data.batches import TokenDigest
from workbench.core.losses import IGNORED, LossSums, linear_cross_entropy
from workbench.core.model import Block, Output, TrainingForward, Transformer, build_model
from workbench.core.moe import TokenRouted
from workbench.core.optim import parameter_table
from workbench.core.parallel import Team
from workbench.core.schedules import learning_rate
from workbench.core.train import StepResult, clip_gradients, train
from workbench.errors import TrainingStoppedError
from workbench.resume import ResumeRequest
from workbench.run import Components, build
from workbench.track.events import NullTracker
from workbench.track.journal import MEASURED_COLUMNS, read_metrics
from workbench.track.record import read_record
from workbench.track.store import Store

Weights = dict[str, Tensor]


def train_all(parts: Components, **options: Any) -> list[StepResult]:
    return list(train(parts.spec, parts.state, parts.forward, **options))


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def routed_layers(model: Transformer) -> list[TokenRouted]:
    blocks = [block for block in model.layers if isinstance(block, Block)]
    return [block.mlp for block in blocks if isinstance(block.mlp, TokenRouted)]


# -- the step against a reference


def reference(parts: Components, steps: int) -> tuple[Weights, list[float], list[float]]:
    """Weights, losses and gradient norms of stock modules: full logits, `F.cross_entropy`,
    `clip_grad_norm_`, one loop AdamW with its groups written out."""
    spec = parts.spec
    model = copy.deepcopy(parts.state.model)
    plain = [p for name, p in model.named_parameters() if "norm" in name]
    matrices = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=spec.optimizer.eps,
        foreach=False,
        fused=False,
    )
    stream = parts.data.train_stream()
    losses, norms = [], []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step)
        batch = torch.from_numpy(stream.next_batch(4))
        logits = model.logits(batch[:, :-1])
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            batch[:, 1:].flatten(),
            label_smoothing=spec.training.label_smoothing,
        )
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), spec.training.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return weights_of(model), losses, norms


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", [(4, 1), (2, 2)])
def test_three_steps_equal_plain_torch(tmp_path: Path, tied: bool, layout: tuple[int, int]) -> None:
    """Also for micro-batches: the reference sees all four sequences at once."""
    parts = tiny_parts(
        tmp_path,
        model={"tie_word_embeddings": tied},
        training={
            "steps": 3,
            "batch_size": layout[0],
            "gradient_accumulation_steps": layout[1],
            "max_grad_norm": 0.5,
            "label_smoothing": 0.1,
        },
        # A larger eps, so that an entry whose gradient is rounding noise moves by noise.
        optimizer={"eps": 1e-5},
    )
    weights, losses, norms = reference(parts, 3)
    results = train_all(parts)
    assert min(norms) > 0.5, "the reference must clip, or clipping is not tested"
    assert [r.objective for r in results] == pytest.approx(losses, rel=1e-5)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-5)  # before clipping
    for name, parameter in parts.state.model.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), weights[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_accumulation_equals_one_large_batch_over_20_steps(tmp_path: Path) -> None:
    found = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        layout = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
        layout |= {"steps": 20, "z_loss": 1e-3, "label_smoothing": 0.1}
        found.append(train_all(tiny_parts(tmp_path, training=layout)))
    for name in ("nll", "objective", "smoothing", "z_loss"):
        whole, *split = ([getattr(r, name) for r in results] for results in found)
        for one in split:
            assert one == pytest.approx(whole, rel=1e-5), name
    # The norm at equal weights; later weights differ in their last digits.
    first = [results[0].grad_norm for results in found]
    assert first[1:] == pytest.approx([first[0]] * 2, rel=1e-5)


def test_a_micro_batch_weighs_as_many_tokens_as_it_has(tmp_path: Path) -> None:
    """With a loss that leaves out many targets of one sequence and few of another: not a mean of
    the means of micro-batches."""
    counts: list[int] = []

    def uneven(hidden: Tensor, weight: Tensor, targets: Tensor, *more: Any) -> LossSums:
        each = targets.unflatten(0, (-1, 32))
        left_out = each % 5 < each[:, :1] % 5
        sums = linear_cross_entropy(
            hidden, weight, each.masked_fill(left_out, IGNORED).flatten(), *more
        )
        counts.append(sums.tokens)
        return sums

    found = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        layout = {"batch_size": batch, "gradient_accumulation_steps": accumulation, "steps": 3}
        found.append(train_all(tiny_parts(tmp_path, training=layout), loss=uneven))
    of_single_sequences = counts[-12:]
    assert max(of_single_sequences) > 2 * min(of_single_sequences)
    for name in ("nll", "objective", "grad_norm"):
        whole, *split = ([getattr(r, name) for r in results] for results in found)
        for one in split:
            assert one == pytest.approx(whole, rel=1e-5), name


def test_one_clip_over_all_parameters_and_zero_is_off() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    for limit, expected in ((1.0, [0.6, 0.8]), (0.0, [3.0, 4.0]), (7.0, [3.0, 4.0])):
        for layer, value in zip(model.values(), (3.0, 4.0), strict=True):
            layer.weight.grad = torch.full((1, 1), value)
        assert clip_gradients(model, limit) == pytest.approx(5.0)
        assert [float(layer.weight.grad) for layer in model.values()] == pytest.approx(expected)


def test_clipping_happens_once_for_each_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(model: nn.Module, max_norm: float, team: Team) -> float:
        calls.append(max_norm)
        return clip_gradients(model, max_norm, team)

    monkeypatch.setattr(training, "clip_gradients", counted)
    layout = {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 4, "max_grad_norm": 0.3}
    train_all(tiny_parts(tmp_path, training=layout))
    assert calls == [0.3] * 3


@pytest.mark.parametrize("extra", [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {}])
def test_the_nll_never_contains_the_extra_terms(tmp_path: Path, extra: dict[str, float]) -> None:
    plain = train_all(tiny_parts(tmp_path, training={"steps": 1}))[0]
    (result,) = train_all(tiny_parts(tmp_path, training={"steps": 1, **extra}))
    assert result.nll == plain.nll
    assert plain.objective == pytest.approx(plain.nll, rel=1e-7)
    assert (plain.smoothing, plain.z_loss) == (0.0, 0.0)
    assert result.objective == pytest.approx(
        result.nll + result.smoothing + result.z_loss, rel=1e-6
    )
    assert (result.smoothing != 0) == ("label_smoothing" in extra)
    assert (result.z_loss != 0) == ("z_loss" in extra)


def test_untrained_nll_is_that_of_a_uniform_guess(tmp_path: Path) -> None:
    (result,) = train_all(tiny_parts(tmp_path, training={"steps": 1}))
    assert result.nll == pytest.approx(math.log(257), abs=0.05)
    assert result.tokens == 4 * 32


# -- what is not finite


def poison(model: Transformer, step: int, value: float = math.nan) -> None:
    """Makes one gradient not finite at an update; the loss stays as it was."""
    seen = [0]

    def hook(gradient: Tensor) -> Tensor:
        seen[0] += 1
        return torch.full_like(gradient, value) if seen[0] == step else gradient

    model.get_parameter("layers.1.self_attn.q_proj.weight").register_hook(hook)


def failing_forward(model: Transformer, step: int) -> TrainingForward:
    calls = [0]

    def forward(ids: Tensor) -> Output:
        calls[0] += 1
        hidden, extras = model.through(ids, model.layers)
        return Output(hidden * (math.inf if calls[0] == step else 1.0), extras)

    return forward


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_before_the_update(
    tmp_path: Path, value: float
) -> None:
    parts = tiny_parts(tmp_path)
    poison(parts.state.model, 3, value)
    steps = train(parts.spec, parts.state)
    next(steps)
    next(steps)
    before = weights_of(parts.state.model)
    moments = copy.deepcopy(parts.state.optimizers[0].state_dict())
    with pytest.raises(TrainingStoppedError) as caught:
        next(steps)
    assert "step 3" in str(caught.value)
    assert "layers.1.self_attn.q_proj.weight" in str(caught.value)
    assert parts.state.step == 2
    for name, tensor in weights_of(parts.state.model).items():
        assert torch.equal(tensor, before[name]), name
    after = parts.state.optimizers[0].state_dict()
    for key, entries in moments["state"].items():
        for name, tensor in entries.items():
            assert torch.equal(after["state"][key][name], tensor)


def test_no_gradient_at_all_stops_before_the_update(tmp_path: Path) -> None:
    """Squares of such weights leave float32, the norms divide by infinity, and the NLL is ln V."""
    parts = tiny_parts(tmp_path)
    with torch.no_grad():
        for parameter in parts.state.model.parameters():
            parameter.mul_(1e10 if parameter.ndim > 1 else 1)
    with pytest.raises(TrainingStoppedError, match=r"step 1: .*exactly zero at \d") as caught:
        next(train(parts.spec, parts.state))
    assert caught.value.exit_code == 4
    assert parts.state.step == 0


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    parts = tiny_parts(tmp_path)
    steps = train(parts.spec, parts.state, failing_forward(parts.state.model, 2))
    next(steps)
    before = weights_of(parts.state.model)
    with pytest.raises(TrainingStoppedError, match=r"step 2: .*the loss is") as caught:
        next(steps)
    assert caught.value.exit_code == 4
    for name, tensor in weights_of(parts.state.model).items():
        assert torch.equal(tensor, before[name]), name


def test_a_stopped_run_is_failed_keeps_the_good_checkpoint_and_exits_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line: step 3 breaks, the checkpoint of step 2 stays the newest."""
    spec = tiny_spec(tmp_path)

    def poisoned(*args: Any, **options: Any) -> Transformer:
        model = build_model(*args, **options)
        poison(model, 3)
        return model

    monkeypatch.setattr(runner, "build_model", poisoned)
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    path = tmp_path / "tiny.yaml"
    path.write_text(spec.model_dump_json())
    assert _guarded(["run", str(path), "checkpoint.save_steps=1"]) == 4
    shown = capsys.readouterr().err
    assert "step 3" in shown
    assert "Traceback" not in shown

    folder = tmp_path / "mlruns/runs/tiny"
    record = read_record(folder)
    assert record.status == "FAILED"
    assert record.error
    assert "step 3" in record.error
    assert record.effective.budget.finished is False
    assert [path.name for path in checkpoints(folder / "checkpoints")] == [
        "step_00000001",
        "step_00000002",
    ]
    assert read_metrics(folder / "metrics.csv")["step"] == [0, 1, 2]


# -- what must be the same


def reproducible(folder: Path) -> dict[str, list[float | None]]:
    table = read_metrics(folder / "metrics.csv")
    return {name: column for name, column in table.items() if name not in MEASURED_COLUMNS}


def saved_weights(folder: Path) -> bytes:
    return (checkpoints(folder / "checkpoints")[-1] / "model.safetensors").read_bytes()


def test_evaluation_does_not_change_training_by_one_bit(tmp_path: Path) -> None:
    store = Store(tmp_path / "mlruns")
    runs = {}
    for every in (0, 1):
        spec = tiny_spec(
            tmp_path, f"every-{every}", evaluation={"eval_steps": every}, training={"steps": 6}
        )
        runs[every] = untracked_run(spec, store).folder
    assert saved_weights(runs[0]) == saved_weights(runs[1])
    never, always = (reproducible(runs[every]) for every in (0, 1))
    assert never["step"] == always["step"] == list(range(7))
    assert sum(value is not None for value in always["held_out/nll"]) == 7
    for name in ("train/nll", "train/objective", "grad_norm", "lr"):
        assert never[name] == always[name], name
    for name in ("held_out/nll", "train_split/nll"):
        assert (never[name][0], never[name][-1]) == (always[name][0], always[name][-1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_spec_gives_the_same_bits(tmp_path: Path, precision: str) -> None:
    store = Store(tmp_path / "mlruns")
    folders = [
        untracked_run(tiny_spec(tmp_path, name, training={"precision": precision}), store).folder
        for name in ("one", "two")
    ]
    assert reproducible(folders[0]) == reproducible(folders[1])
    assert saved_weights(folders[0]) == saved_weights(folders[1])
    points = [read_record(folder).points for folder in folders]
    assert points[0] == points[1]
    other = untracked_run(tiny_spec(tmp_path, "other", 43), store).folder
    assert reproducible(other)["train/nll"] != reproducible(folders[0])["train/nll"]


def test_each_point_has_the_digest_of_what_was_consumed(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, training={"steps": 5})
    outcome = untracked_run(spec, Store(tmp_path / "mlruns"))
    data = build(spec, Store(tmp_path / "mlruns")).data
    stream, digest = data.train_stream(), TokenDigest()
    expected, read = {0: digest.hexdigest()}, {0: 0}
    for step in range(1, 6):
        windows = stream.next_batch(4)
        digest.update(windows)
        expected[step] = digest.hexdigest()
        targets = [i for i in windows[:, 1:].ravel().tolist() if i != data.tokenizer.eod_id]
        read[step] = read[step - 1] + len(data.tokenizer.decode_bytes(targets))
    points = outcome.record.points
    assert [(p.step, p.tokens) for p in points] == [(0, 0), (2, 256), (4, 512), (5, 640)]
    assert {p.step: p.order_digest for p in points} == {s: expected[s] for s in (0, 2, 4, 5)}
    assert {p.step: p.bytes for p in points} == {s: read[s] for s in (0, 2, 4, 5)}
    assert len({p.lr_trace for p in points}) == 4


# -- experts


def expert_tensors(model: Transformer) -> dict[str, Tensor]:
    names = ("gate_proj_w", "up_proj_w", "down_proj_w")
    return {
        f"{layer}.{name}[{expert}]": getattr(mlp, name)[expert]
        for layer, mlp in enumerate(routed_layers(model))
        for name in names
        for expert in range(mlp.experts)
    }


def frozen_experts(parts: Components) -> set[str]:
    """Expert matrices that five updates, without weight decay, left as they were."""
    before = {name: t.detach().clone() for name, t in expert_tensors(parts.state.model).items()}
    train_all(parts)
    after = expert_tensors(parts.state.model)
    assert len(after) == 2 * 3 * 4
    return {name for name, tensor in after.items() if torch.equal(tensor.detach(), before[name])}


@pytest.mark.parametrize("options", [{}, {"grad_ckpt": True}, {"precision": "bf16"}])
def test_every_routed_expert_learns(tmp_path: Path, options: dict[str, Any]) -> None:
    parts = tiny_parts(tmp_path, training={"steps": 5, **options}, optimizer={"weight_decay": 0.0})
    assert not frozen_experts(parts)


def test_a_detached_expert_path_stops_the_run_in_its_fifth_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tiny_parts(tmp_path, training={"steps": 9}, optimizer={"weight_decay": 0.0})
    whole = TokenRouted.routed
    monkeypatch.setattr(TokenRouted, "routed", lambda self, x, w: whole(self, x, w).detach())
    with pytest.raises(TrainingStoppedError, match=r"step 5: layer 0 expert 0 gets tokens") as stop:
        frozen_experts(parts)
    assert stop.value.exit_code == 4
    assert parts.state.step == 4


def test_every_parameter_is_trained(tmp_path: Path) -> None:
    parts = tiny_parts(
        tmp_path,
        model={"learn_shared_routed_gates": True},
        training={"steps": 2},
        optimizer={"weight_decay": 0.0},
    )
    before = weights_of(parts.state.model)
    train_all(parts)
    after = weights_of(parts.state.model)
    assert not [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
    assert {r.name for r in parameter_table(parts.state.model, parts.spec.optimizer)} == set(after)


# -- throughput


class Clock:
    """A clock that moves when work is said to take time, and not by itself."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, **evaluation: int
) -> tuple[Any, dict[str, list[float | None]]]:
    """A run on a device whose work completes at `synchronize`: 50 s for each of the first ten
    updates, 2 s for later ones; 1,000 s for an evaluation, 10,000 s for a checkpoint."""
    clock, updates = Clock(), [0]

    def synchronize(device: torch.device) -> None:
        updates[0] += 1
        clock.now += 50.0 if updates[0] <= recorder.WARM_UP_STEPS else 2.0

    def slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            clock.now += seconds
            return function(*args, **options)

        return call

    monkeypatch.setattr(training, "synchronize", synchronize)
    monkeypatch.setattr(recorder, "evaluate", slow(recorder.evaluate, 1000.0))
    monkeypatch.setattr(saving, "write_checkpoint", slow(saving.write_checkpoint, 10000.0))
    monkeypatch.setattr(
        runner,
        "train",
        lambda *given, **options: train(*given, clock=clock, **options),
    )
    spec = tiny_spec(
        tmp_path,
        training={"steps": steps},
        evaluation={"eval_steps": 3, **evaluation},
        checkpoint={"save_steps": 4},
        telemetry={"log_steps": 3},
    )
    outcome = untracked_run(spec, Store(tmp_path / "mlruns"))
    return outcome.record, read_metrics(outcome.folder / "metrics.csv")


def test_throughput_counts_updates_after_warm_up_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, table = timed_run(tmp_path, monkeypatch, steps=16)
    assert record.results.tokens_per_s == 128 / 2.0
    assert record.effective.interval.first_step == 11
    assert record.effective.interval.last_step == 16
    by_step = dict(zip(table["step"], table["tokens_per_s"], strict=True))
    assert by_step[0] is None  # nothing was trained
    assert by_step[1] is None  # compilation and first touches of memory
    assert by_step[6] == pytest.approx(128 / 50)
    assert by_step[12] == pytest.approx(3 * 128 / (50 + 2 + 2))
    assert by_step[15] == pytest.approx(128 / 2)


@pytest.mark.parametrize("steps", [4, 14])
def test_a_run_too_short_to_measure_has_no_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    record, _ = timed_run(tmp_path, monkeypatch, steps=steps)
    assert record.results.tokens_per_s is None
    assert record.effective.interval.first_step is None  # unknown: equal to nothing


@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_log_interval_gives_the_same_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Work that completes at `synchronize` counts, however many updates a row stands for."""
    clock = Clock()

    def synchronize(device: torch.device) -> None:
        clock.now += 2.0

    monkeypatch.setattr(training, "synchronize", synchronize)
    monkeypatch.setattr(runner, "train", partial(train, clock=clock))
    spec = tiny_spec(
        tmp_path,
        training={"steps": 16},
        evaluation={"eval_steps": 0},
        telemetry={"log_steps": every},
    )
    outcome = untracked_run(spec, Store(tmp_path / "mlruns"))
    assert outcome.record.results.tokens_per_s == 128 / 2
    table = read_metrics(outcome.folder / "metrics.csv")
    rows = dict(zip(table["step"], table["tokens_per_s"], strict=True))
    assert {rate for step, rate in rows.items() if step and step > 1} == {128 / 2}
    assert len(rows) == 2 + sum(step % every == 0 or step == 16 for step in range(2, 17))


def test_the_first_update_after_a_resume_is_no_more_counted_than_that_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles again. Updates take 2 s, the first one of a process 1,000 s."""
    clock, fresh = Clock(), [True]

    def synchronize(device: torch.device) -> None:
        clock.now += 1000.0 if fresh.pop() else 2.0
        fresh.append(False)

    monkeypatch.setattr(training, "synchronize", synchronize)
    timed = partial(train, clock=clock)
    monkeypatch.setattr(runner, "train", timed)
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    store, found = Store(tmp_path / "mlruns"), None
    for stop, request in ((4, None), (None, ResumeRequest())):
        fresh[:] = [True]
        spec = tiny_spec(
            tmp_path,
            training={"steps": 9, "stop_at_step": stop},
            evaluation={"eval_steps": 0},
            telemetry={"log_steps": 3},
        )
        found = runner.run(spec, store, ["run"], quiet=True, resume=request)
    assert found
    table = read_metrics(found.folder / "metrics.csv")
    rates = zip(table["tokens_per_s"], table["step_seconds"], strict=True)
    rows = dict(zip(table["step"], rates, strict=True))
    assert rows[1] == (None, 1000.0)
    assert rows[3] == (128 / 2, 2.0)
    assert rows[6] == (128 / 2, 2.0)  # the updates 5 and 6, of which the former began the process
    assert rows[9] == (128 / 2, 2.0)


# -- bfloat16


def test_a_bf16_run_computes_in_bfloat16_and_keeps_float32_masters(tmp_path: Path) -> None:
    parts = tiny_parts(
        tmp_path, training={"precision": "bf16", "steps": 40}, optimizer={"lr": 1e-2}
    )
    seen = set()

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.add((output[0] if isinstance(output, tuple) else output).dtype)

    for module in parts.state.model.modules():
        if not isinstance(module, nn.ModuleList) and module is not parts.state.model.embed_tokens:
            module.register_forward_hook(note)
    results = train_all(parts)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in parts.state.model.parameters()} == {torch.float32}
    facts = parts.effective.precision
    assert (facts.compute_dtype, facts.master_dtype) == ("bfloat16", "float32")
    assert "bf16" in str(facts.matmul)
    assert results[-1].nll < results[0].nll - 2
    small = sum(
        int((p.to(torch.bfloat16).float() != p).sum()) for p in parts.state.model.parameters()
    )
    assert small, "masters hold more digits than bfloat16 has"


def test_bf16_is_not_float32(tmp_path: Path) -> None:
    one, other = (
        train_all(tiny_parts(tmp_path, training={"precision": precision, "steps": 1}))[0]
        for precision in ("fp32", "bf16")
    )
    assert one.nll != other.nll
    assert one.nll == pytest.approx(other.nll, rel=1e-2)


def test_equal_weights_are_equal_whatever_the_threads() -> None:
    """Of several processes, each may have another number: a sum of floats would differ."""

    class Listening(Team):
        def __init__(self) -> None:
            self.heard: list[object] = []

        def require_same(self, what: str, value: object) -> None:
            self.heard.append(value)

    model = nn.ParameterList(torch.exp(8 * torch.randn(1024, 192)) for _ in range(4))
    state = SimpleNamespace(model=model, step=1, digest=TokenDigest())
    team, threads = Listening(), torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            training.require_finite_weights(state, team)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        model[2][3, 4] = torch.nextafter(model[2][3, 4], torch.tensor(9e9))
    training.require_finite_weights(state, team)  # type: ignore[arg-type]
    one, two, three, other = team.heard
    assert one == two == three != other


def test_gradients_whose_squares_are_nothing_are_gradients() -> None:
    model = nn.ParameterList([torch.zeros(3), torch.zeros(2)])
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    assert not training.has_gradient(model)
    model[1].grad[1] = 1e-30  # type: ignore[index]
    assert clip_gradients(model, 1.0) == 0
    assert training.has_gradient(model)
