"""What torch.compile had to do again while a run trained: counted, recorded, kept, and compared."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_spec, untracked_run

from workbench import run as runner
from workbench.compare import compare_runs
from workbench.compare.rules import Ruling
from workbench.core.compilation import Compiled, CompileWatch
from workbench.core.model import Block, Transformer
from workbench.core.schedules import ModelValues
from workbench.resume import ResumeRequest, _add_compilations
from workbench.run import RunOutcome
from workbench.track.events import NullTracker, Values
from workbench.track.record import COMPILER_COUNTS, NOT_COMPILED, ExecutionFacts
from workbench.track.store import Store


@pytest.fixture
def fresh() -> Iterator[None]:
    """The compiler as in a process of its own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counts(outcome: RunOutcome) -> dict[str, Any]:
    found = outcome.record.effective.execution.model_dump(mode="json")
    return {name: found[name] for name in COMPILER_COUNTS}


@pytest.mark.slow
def test_a_value_that_makes_another_graph_and_a_break_are_counted(fresh: None) -> None:
    def scaled(x: torch.Tensor, by: float, breaks: bool) -> torch.Tensor:
        if breaks:
            torch._dynamo.graph_break()
        return x * by

    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    compiled(torch.ones(2), 9.0, False)  # not of the watch's time
    watch, off = CompileWatch(True), CompileWatch(False)
    found = []
    for by, breaks in ((1.0, False), (1.0, False), (2.0, False), (3.0, False), (3.0, True)):
        compiled(torch.ones(2), by, breaks)
        found.append(watch.after_update())
    assert found[:4] == [(0, 0), (0, 0), (1, 0), (2, 0)]
    assert found[4].graph_breaks == 1
    assert off.after_update() == Compiled(0, 0)
    assert "compiled 2 times more" in found[3].words()


STEPS = 5


@pytest.fixture
def by_dynamo_alone(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Graphs are captured and guarded as in any compiled run, and then run as they were written."""
    plain: Any = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda block, mode, **how: plain(block, backend="eager", **how)
    )


def made_stale(patch: pytest.MonkeyPatch) -> None:
    """A scheduled value as a Python float in the graph: each of its values needs another one."""
    plain, set_values = Block.forward, Transformer.set_values

    def forward(block: Any, *given: Any) -> Any:
        y, extras = plain(block, *given)
        return y * block.scale, extras

    def changing(model: Transformer, values: ModelValues) -> None:
        set_values(model, values)
        for block in model.layers:
            block.scale += 0.01  # type: ignore[assignment, operator]

    patch.setattr(Block, "scale", 0.9, raising=False)
    patch.setattr(Block, "forward", forward)
    patch.setattr(Transformer, "set_values", changing)


class Stopper(NullTracker):
    """Asks the run to stop when the row of a step has been written."""

    def log(self, values: Values) -> None:
        if values["step"] == 3:
            signal.raise_signal(signal.SIGINT)


def train(
    folder: Path, name: str, compiled: bool = True, resume: bool = False, tracker: Any = NullTracker
) -> RunOutcome:
    if compiled:
        torch._dynamo.reset()  # as in a process of its own
    spec = tiny_spec(folder, name, training={"steps": STEPS, "compile": compiled})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "tracker_for", lambda spec, store: tracker())
        request = ResumeRequest() if resume else None
        return runner.run(spec, Store(folder / "mlruns"), ["run"], quiet=True, resume=request)


def execution(a: RunOutcome, b: RunOutcome) -> Ruling:
    return compare_runs(a.folder, b.folder).judgement.ruling("execution")


def forget(outcome: RunOutcome, names: tuple[str, ...]) -> None:
    """Takes counts out of a record, as one of before they were taken has it."""
    path = outcome.folder / "run_config.json"
    document = json.loads(path.read_text())
    for name in names:
        del document["effective"]["execution"][name]
    path.write_text(json.dumps(document))


@pytest.mark.slow
def test_a_run_records_how_often_it_was_compiled_again_and_that_is_judged(
    tmp_path: Path, by_dynamo_alone: None
) -> None:
    sound, other = train(tmp_path, "sound"), train(tmp_path, "other")
    assert counts(sound) == {"recompilations": 0, "graph_breaks": 0}
    assert execution(sound, other).outcome == "match"
    with pytest.MonkeyPatch.context() as patch:
        made_stale(patch)
        stale = train(tmp_path, "stale")
        # Stopped at step 3 after two more graphs; its process makes one less for the rest.
        stopped = train(tmp_path, "stopped", tracker=Stopper)
        assert (stopped.record.status, counts(stopped)["recompilations"]) == ("KILLED", 2)
        resumed = train(tmp_path, "stopped", resume=True)
    assert counts(stale) == {"recompilations": STEPS - 1, "graph_breaks": 0}
    assert counts(resumed) == {"recompilations": 2 + STEPS - 3 - 1, "graph_breaks": 0}
    assert resumed.record.effective.code.resumed_with == "none"

    # Compiled against not: one difference, which the counts follow from.
    plain = train(tmp_path, "plain", compiled=False)
    compared = compare_runs(plain.folder, sound.folder, treatment=["training.compile"])
    found = {leaf.path: leaf.outcome for leaf in compared.judgement.ruling("execution").leaves}
    assert [found[f"effective.execution.{name}"] for name in COMPILER_COUNTS] == ["follows"] * 2

    ruling = execution(sound, stale)
    (leaf,) = ruling.leaves
    assert (leaf.path, leaf.outcome) == ("effective.execution.recompilations", "differs")
    assert ruling.effects == {
        "nll": "flag",
        "bpb": "flag",
        "throughput": "refuse",
        "memory": "refuse",
    }


def test_a_record_of_before_lacks_nothing_where_nothing_was_compiled(tmp_path: Path) -> None:
    """Of a compiled one, see the tests of rulesets."""
    plain, old, damaged = (train(tmp_path, name, compiled=False) for name in ("a", "b", "c"))
    assert counts(plain) == dict.fromkeys(COMPILER_COUNTS, NOT_COMPILED.model_dump())
    forget(old, COMPILER_COUNTS)
    assert execution(plain, old).outcome == "match"
    forget(damaged, ("graph_breaks",))
    (leaf,) = execution(plain, damaged).leaves
    assert (leaf.path, leaf.outcome) == ("effective.execution.graph_breaks", "missing")


def test_the_counts_of_a_run_gone_on_with_are_not_invented() -> None:
    def after(then: Any, compiled: bool | None, now: Any) -> Any:
        facts = ExecutionFacts(recompilations=now, graph_breaks=now)
        _add_compilations(facts, ExecutionFacts(recompilations=then, compiled=compiled))
        return facts.recompilations

    assert after(2, True, 0) == 2
    assert after(2, True, NOT_COMPILED) == 2  # it was compiled, if only before
    assert after(NOT_COMPILED, False, 0) == 0
    assert after(None, True, 0) is None
    assert after(None, None, 0) is None
    assert after(None, False, 0) == 0
    assert after(None, False, NOT_COMPILED) == NOT_COMPILED


@pytest.mark.slow
def test_a_compiled_run_needs_no_second_graph(tmp_path: Path, fresh: None) -> None:
    """With the compiler that trains: none after the first update, whatever the telemetry."""
    training = {"steps": STEPS, "compile": True, "gradient_accumulation_steps": 2}
    for kind in ("token_routed", "learned_router", "dense"):
        spec = tiny_spec(
            tmp_path,
            kind,
            model={"mlp_type": kind},
            training=training,
            telemetry={"log_steps": 2, "moe": kind != "dense"},
        )
        outcome = untracked_run(spec, Store(tmp_path / "mlruns"))
        assert counts(outcome) == {"recompilations": 0, "graph_breaks": 0}, kind
