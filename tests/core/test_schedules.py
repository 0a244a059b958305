"""The learning rate over a run, and the trace that proves it."""

import math

import pytest

from workbench.core.schedules import RateTrace, learning_rate, planned_trace
from workbench.spec.run import RunSpec


def spec(steps: int = 100, lr: float = 1e-3, **schedule: object) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "a",
            "data": {"dataset": "random"},
            "training": {"steps": steps, "batch_size": 2, "seq_len": 8},
            "optimizer": {"lr": lr},
            "schedule": schedule,
        }
    )


def test_the_first_step_trains_and_warm_up_ends_at_the_peak() -> None:
    run = spec(warmup_steps=10)
    assert learning_rate(run, 1) == pytest.approx(1e-4)
    assert learning_rate(run, 10) == 1e-3
    assert learning_rate(run, 11) < 1e-3
    assert [learning_rate(run, i) for i in (2, 5)] == pytest.approx([2e-4, 5e-4])


def test_cosine_ends_at_the_floor() -> None:
    run = spec(warmup_steps=0, min_lr_ratio=0.1)
    assert learning_rate(run, 100) == pytest.approx(1e-4)
    assert learning_rate(run, 50) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))
    halfway = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.25))
    assert learning_rate(run, 25) == pytest.approx(1e-3 * halfway)


def test_linear_and_constant() -> None:
    assert learning_rate(spec(decay="linear", warmup_steps=0), 50) == pytest.approx(0.55e-3)
    assert learning_rate(spec(decay="linear", warmup_steps=0), 100) == pytest.approx(1e-4)
    assert learning_rate(spec(decay="constant", warmup_steps=0), 100) == 1e-3


def test_warm_up_defaults_to_five_percent_and_at_least_one_step() -> None:
    assert spec(250).warmup_steps == 12
    assert spec(3).warmup_steps == 1
    assert learning_rate(spec(1), 1) == 1e-3


def test_a_rate_is_never_zero_while_the_floor_is_not() -> None:
    run = spec(37)
    assert all(learning_rate(run, step) > 0 for step in range(1, 38))


def test_the_trace_tells_every_rate_and_every_token_count_apart() -> None:
    def trace(*updates: tuple[int, float]) -> str:
        one = RateTrace()
        for tokens, rate in updates:
            one.update(tokens, rate)
        return one.hexdigest()

    base = trace((16, 1e-3), (32, 1e-3))
    assert base == trace((16, 1e-3), (32, 1e-3))
    assert base != trace((16, 1e-3), (32, 1.0000001e-3))
    assert base != trace((16, 1e-3), (33, 1e-3))
    assert base != trace((32, 1e-3), (16, 1e-3))


def test_the_trace_continues_from_its_state() -> None:
    whole, half = RateTrace(), RateTrace()
    whole.update(8, 1e-3)
    half.update(8, 1e-3)
    half = RateTrace(half.hexdigest())
    whole.update(16, 2e-3)
    half.update(16, 2e-3)
    assert whole.hexdigest() == half.hexdigest()


def test_a_longer_constant_run_has_the_shorter_ones_trace_at_its_end() -> None:
    short = spec(20, decay="constant", warmup_steps=5)
    long = spec(40, decay="constant", warmup_steps=5)
    trace = RateTrace()
    for step in range(1, 21):
        trace.update(step * long.tokens_per_step, learning_rate(long, step))
    assert trace.hexdigest() == planned_trace(short, short.training.steps)
    assert planned_trace(short, short.training.steps) != planned_trace(long, long.training.steps)
