"""The composition root: from a validated spec to a trained and recorded run."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.core import liger
from workbench.core.compilation import Compiled, CompileWatch
from workbench.core.counts import count_parameters
from workbench.core.data.batches import TokenDigest
from workbench.core.data.loading import Data, load_data
from workbench.core.device import (
    choose_device,
    device_kind,
    make_deterministic,
    require_compiler,
)
from workbench.core.liger import choose_loss_backend
from workbench.core.losses import linear_cross_entropy
from workbench.core.model import (
    TrainingForward,
    build_model,
    route_tables_sha256,
    training_forward,
)
from workbench.core.optim import (
    ParameterRow,
    build_optimizers,
    parameter_table,
    table_sha256,
)
from workbench.core.parallel import ALONE, Team
from workbench.core.precision import Precision, choose_precision
from workbench.core.restore import open_checkpoint, restore
from workbench.core.schedules import (
    RateTrace,
    is_evaluated,
    is_logged,
    last_step,
    planned_steps,
    ramp_tokens,
)
from workbench.core.telemetry import ExpertWatch
from workbench.core.train import (
    Loss,
    TrainState,
    train,
)
from workbench.errors import StoreError
from workbench.foresee import recorded
from workbench.launch import launcher
from workbench.progress import Reporter
from workbench.recorder import Follower, Recorder, now
from workbench.resume import Beginning, ResumeRequest, take_up, was_begun_by
from workbench.room import require_room
from workbench.signals import EndedError, InterruptedRunError, StopRequests
from workbench.spec.held_out import set_words
from workbench.spec.run import RunSpec, spec_hash
from workbench.track.events import NullTracker, Tracker
from workbench.track.feeder import MlflowTracker, patience
from workbench.track.journal import Journal, columns
from workbench.track.provenance import (
    code_facts,
    hardware_facts,
    provenance,
    write_source_diff,
)
from workbench.track.record import COMPILER_COUNTS, NOT_COMPILED, Effective, RunRecord
from workbench.track.store import METRICS, Store, release_run


@dataclass(frozen=True)
class Components:
    """Everything a run trains with, built and checked before the store is touched."""

    spec: RunSpec
    data: Data
    state: TrainState
    forward: TrainingForward
    loss: Loss
    steps: int | None  # None: to the end of a stream
    table: list[ParameterRow]
    effective: Effective
    device: torch.device
    precision: Precision
    team: Team = ALONE


def build(spec: RunSpec, store: Store, team: Team = ALONE) -> Components:
    """Loads the data and builds model and optimizer as the spec asks, in each process of the team.

    Raises:
        UserError: the data, the device or the precision cannot be had.
    """
    spec = spec.on(team.size)
    device = choose_device(spec.training.device)
    precision = choose_precision(spec.training.precision, device)
    if spec.training.compile:
        require_compiler(device)
    make_deterministic(spec.training.deterministic, device)
    torch.manual_seed(spec.seed)
    data = load_data(spec, store.home, seed=spec.seed)
    model = build_model(
        spec.model,
        data.tokenizer.vocab_size,
        spec.seed,
        precision,
        grad_checkpointing=spec.training.grad_ckpt,
        place=lambda made: team.place(made, device),
    )
    forward = training_forward(model, spec.training.compile_mode)
    training = spec.training
    backend = choose_loss_backend(training.loss_backend, device, training.label_smoothing)
    loss = {"chunked": linear_cross_entropy, "liger": liger.linear_cross_entropy}[backend]
    stream = data.train_stream()
    steps = last_step(spec, stream)
    table = parameter_table(model, spec.optimizer)
    counts = count_parameters(spec.model, data.tokenizer.vocab_size)
    effective = Effective.model_validate(
        {
            **data.facts,
            "model": {"route_tables_sha256": route_tables_sha256(model)},
            "parameters": vars(counts),
            "optimizer": {
                "sequences_per_update": spec.sequences_per_update,
                "warmup_steps": spec.warmup_steps,
                "groups_sha256": table_sha256(table),
            },
            "precision": {
                "compute_dtype": str(precision.compute).removeprefix("torch."),
                "master_dtype": str(model.head_weight.dtype).removeprefix("torch."),
                "matmul": precision.describe(device),
            },
            "hardware": hardware_facts(device).model_dump(),
            "execution": {
                "loss_backend": backend,
                "dispatch": model.dispatch,
                "attention": model.attention_path,
                "compiled": spec.training.compile_mode is not None,
                "parallel": team.mode,
                **dict.fromkeys(COMPILER_COUNTS, 0 if spec.training.compile else NOT_COMPILED),
            },
            "budget": {"finished": False, "ramp_tokens": ramp_tokens(spec)},
            "code": code_facts().model_dump(),
        }
    )
    state = TrainState(
        model=model,
        optimizers=build_optimizers(model, spec.optimizer, table),
        stream=stream,
        digest=TokenDigest(data.byte_lengths),
        trace=RateTrace(),
        watch=ExpertWatch(model),
    )
    return Components(
        spec, data, state, forward, loss, steps, table, effective, device, precision, team
    )


def run(
    spec: RunSpec,
    store: Store,
    command: list[str],
    quiet: bool = False,
    ended: Callable[[RunOutcome], None] = lambda outcome: None,
    resume: ResumeRequest | None = None,
    team: Team = ALONE,
) -> RunOutcome:
    """Trains one run to its end and records it, whatever the end is.

    `ended` is called when the end is recorded, before the wait for the tracker. With `resume` an
    earlier run goes on, or a new one goes on from its checkpoint. Of several processes rank zero
    alone writes and says anything.

    Raises:
        UserError: before training, with nothing written; or a TrainingStoppedError or StoreError
            after it began, with the run recorded as FAILED (KILLED, where it was being stopped).
        RefusedError: the run may not go on, since something that decides its numbers has changed.
        PeerError: another process has ended, with the run recorded as FAILED where rank zero has
            not.
    """
    try:
        with team.failing():
            return _run(spec, store, command, quiet, ended, resume, team)
    finally:
        team.leave()


def _run(
    spec: RunSpec,
    store: Store,
    command: list[str],
    quiet: bool,
    ended: Callable[[RunOutcome], None],
    resume: ResumeRequest | None,
    team: Team,
) -> RunOutcome:
    parts = team.in_turn(lambda: build(spec, store, team))
    reporter = Reporter(parts.steps, quiet or not team.is_first)
    vocab_size = parts.data.tokenizer.vocab_size
    team.first(
        lambda: require_room(
            parts.spec, vocab_size, parts.steps, store, reporter.say, in_parts=team.is_sharded
        )
    )
    with StopRequests() as stop:
        launchers = sorted({one for one in team.gathered(launcher()) if one})
        parts.state.stream.interrupt_by(stop.check)
        try:
            beginning = team.first(
                lambda: _begin(parts, store, command, resume, launchers, reporter.say)
            )
        except InterruptedRunError as request:  # while it waited for what it would go on with
            raise EndedError(request.number) from request
        folder = beginning.folder
        if beginning.nothing_to_do:
            outcome = RunOutcome(beginning.record, folder, 0)
            if team.is_first:
                release_run(folder)
                ended(outcome)
            return outcome
        recorder = team.agreed(lambda: _recorder(parts, store, beginning))
        for name, facts in recorder.record.effective.evaluation.items():
            reporter.say(set_words(name, facts.status, facts.overlap, facts.documents))
        try:
            with reporter:
                exit_code = _train_and_record(parts, recorder, reporter, stop, beginning)
            outcome = RunOutcome(recorder.record, folder, exit_code)
            recorder.close()
            if team.is_first:
                ended(outcome)
        finally:
            recorder.close()
            team.leave()
            # A signal of before the end was answered; one of later cuts the wait short.
            recorder.wait_for_tracker(reporter.say, lambda: stop.has_come)
    return outcome


def _begin(
    parts: Components,
    store: Store,
    command: list[str],
    request: ResumeRequest | None,
    launchers: list[str],
    say: Callable[[str], None],
) -> Beginning:
    """Claims the folder of a new run, or takes up an earlier one where its checkpoint was saved."""
    record = new_record(parts, command)
    record.provenance["launchers"] = launchers
    if was_begun_by(launchers, parts.spec.name, store):
        say("started again by torchrun")
        request = ResumeRequest()
    if request is not None:
        found = take_up(request, record, parts.spec, parts.state, parts.steps, store, say)
        if found is not None:
            return found
    return Beginning(store.create_run(parts.spec.name), record)


def _recorder(parts: Components, store: Store, beginning: Beginning) -> Recorder | Follower:
    """Who records the run, or, in a process other than rank zero, takes the part of that."""
    if not parts.team.is_first:
        return Follower(parts, beginning.folder, beginning.record, beginning.owes_evaluation)
    try:
        write_source_diff(beginning.folder)
        return Recorder(
            parts,
            beginning.folder,
            beginning.record,
            beginning.journal(columns(list(parts.data.evaluation_sets))),
            tracker_for(parts.spec, store),
            beginning.row,
        )
    except BaseException:
        store.discard_run(beginning.folder)
        raise


def replay(parts: Components, record: RunRecord, folder: Path) -> dict[int, str]:
    """Trains into a folder of no store, followed by nobody; returns the digest at each point."""
    journal = Journal(folder / METRICS, columns(list(parts.data.evaluation_sets)))
    recorder = Recorder(parts, folder, record, journal, NullTracker())
    with StopRequests() as stop, Reporter(parts.steps) as reporter:
        parts.state.stream.interrupt_by(stop.check)
        try:
            _train(parts, recorder, reporter, stop)
        except InterruptedRunError as request:
            raise KeyboardInterrupt from request
        finally:
            recorder.close()
    return {point.step: str(point.order_digest) for point in record.points}


def new_record(parts: Components, command: list[str]) -> RunRecord:
    """The record that a run of these parts begins with."""
    spec = parts.spec
    planned = planned_steps(spec, parts.state.stream)
    return RunRecord(
        id=uuid.uuid4().hex,
        name=spec.name,
        status="RUNNING",
        started=now(),
        spec=recorded(spec),
        spec_sha256=spec_hash(spec),
        effective=parts.effective,
        provenance=provenance(command),
        git_commit=parts.effective.code.git_commit,
        params=parts.effective.parameters.total,
        world_size=parts.team.size,
        parameter_table=[asdict(row) for row in parts.table],
        tokens_per_step=spec.tokens_per_step,
        total_tokens=planned and spec.tokens_per_step * planned,
        backend={"backend": device_kind(parts.device), "distributed": parts.team.backend},
        model_config_={
            **spec.model.model_dump(mode="json"),
            "vocab_size": parts.data.tokenizer.vocab_size,
        },
    )


def _train_and_record(
    parts: Components,
    recorder: Recorder | Follower,
    reporter: Reporter,
    stop: StopRequests,
    beginning: Beginning,
) -> int:
    """Trains to whatever end comes and records which it was; returns the exit code."""
    stopped: InterruptedRunError | None = None
    saved = False
    try:
        try:
            with parts.team.failing():
                parts.team.agreed(lambda: _restore_follower(parts, beginning))
                _train(parts, recorder, reporter, stop)
        except InterruptedRunError as request:
            stopped = request
            reporter.say(f"{stopped} at step {parts.state.step}: saving")
            recorder.flush()  # the step's row, where its evaluation was cut short
            saved = recorder.checkpoint()
            recorder.settle()
        else:
            recorder.settle()
            recorder.end("FINISHED")
            return 0
    except KeyboardInterrupt:
        recorder.end("KILLED", "ended at once by a second SIGINT")
        return 128 + signal.SIGINT
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(StoreError):  # what was saved before is worth the wait
            recorder.settle()
        try:
            recorder.end("KILLED" if stopped else "FAILED", reason)
        except StoreError as second:
            reporter.say(f"the end of the run could not be recorded: {second}")
        raise
    finally:
        stop.forget()
    what = f"a checkpoint of step {parts.state.step} was saved" if saved else "nothing was trained"
    recorder.end("KILLED", f"{stopped}; {what}")
    return 128 + stopped.number


def _restore_follower(parts: Components, beginning: Beginning) -> None:
    """Puts a process other than rank zero to where rank zero has put itself."""
    if beginning.checkpoint is not None and not parts.team.is_first:
        restore(parts.state, open_checkpoint(beginning.checkpoint), parts.spec)


def _train(
    parts: Components, recorder: Recorder | Follower, reporter: Reporter, stop: StopRequests
) -> None:
    """The run itself: evaluate, then update, log, evaluate and save, to the last step."""
    spec, team = parts.spec, parts.team
    saved = time.monotonic()
    compiler, compiled = CompileWatch(spec.training.compile), Compiled()

    if recorder.owes_evaluation:
        recorder.evaluation(stop.check, reporter)
    for result in train(spec, parts.state, parts.forward, parts.loss, team=team):
        step = result.step
        last = result.is_last
        end = step if last else None
        logged = is_logged(spec, step, end)
        recorder.step(result, logged)
        reporter.step(result, logged)
        if is_evaluated(spec, step, end):
            recorder.evaluation(stop.check, reporter)
        recorder.flush()
        saving = spec.checkpoint
        due = saving.save_minutes > 0 and time.monotonic() - saved > saving.save_minutes * 60
        if (
            last
            or any(team.highest(due))
            or (saving.save_steps > 0 and step % saving.save_steps == 0)
        ):
            recorder.checkpoint(last=last)
            saved = time.monotonic()
        asked, *counts = team.highest(stop.number or 0, *compiler.after_update())
        compiled = Compiled(*counts)
        recorder.compiled(compiled)
        if asked and not last:
            raise InterruptedRunError(asked)
    if any(compiled):
        reporter.say(f"warning: {compiled.words()}")
    if unused := parts.state.watch.unused:
        reporter.say(f"warning: unused experts, no token reached them: {', '.join(unused)}")


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: its record, its folder and the exit code it stands for."""

    record: RunRecord
    folder: Path
    exit_code: int

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        record = self.record
        return {
            "run": record.name,
            "id": record.id,
            "status": record.status,
            "folder": str(self.folder),
            "results": record.results.model_dump(),
            "exit_code": self.exit_code,
        }


def tracker_for(spec: RunSpec, store: Store) -> Tracker:
    """MLflow, at the spec's address or in the store."""
    return MlflowTracker(spec.tracking.uri, store, spec.tracking.experiment, patience())
