"""The composition root: from a validated spec to a trained and recorded run."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from workbench.core import liger
from workbench.core.checkpoint import save_checkpoint
from workbench.core.counts import count_parameters
from workbench.core.data.batches import TokenDigest
from workbench.core.data.loading import Data, load_data
from workbench.core.device import (
    choose_device,
    device_kind,
    make_deterministic,
    require_compiler,
)
from workbench.core.evaluate import evaluate, write_scores
from workbench.core.liger import choose_loss_backend
from workbench.core.losses import linear_cross_entropy
from workbench.core.memory import peak_bytes
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
from workbench.core.precision import Precision, choose_precision
from workbench.core.schedules import RateTrace, is_evaluated, is_logged, last_step, ramp_tokens
from workbench.core.telemetry import ExpertWatch
from workbench.core.train import (
    Loss,
    StepResult,
    TrainState,
    loss_settings,
    require_finite_weights,
    train,
)
from workbench.errors import StoreError
from workbench.foresee import recorded
from workbench.progress import Reporter
from workbench.signals import InterruptedRunError, StopRequests
from workbench.spec.run import RunSpec, spec_hash
from workbench.step_columns import rates_of, terms_of
from workbench.track.events import Tracker
from workbench.track.feeder import MlflowTracker, patience
from workbench.track.journal import Journal, columns
from workbench.track.layer_table import LayerTable
from workbench.track.provenance import code_facts, hardware_facts, provenance, redact
from workbench.track.record import Effective, IntervalFacts, Point, RunRecord, Status, write_record
from workbench.track.store import METRICS, RECORD, Store, release_run, storing

# Steps whose time is not counted: compilation, first touches of memory, caches filling. A run with
# too few beside them has no throughput, and the interval stays unknown: it could have had one.
WARM_UP_STEPS = 10
LEAST_TIMED_STEPS = 5


@dataclass(frozen=True)
class Components:
    """Everything a run trains with, built and checked before the store is touched."""

    spec: RunSpec
    data: Data
    state: TrainState
    forward: TrainingForward
    loss: Loss
    steps: int
    table: list[ParameterRow]
    effective: Effective
    device: torch.device
    precision: Precision


def build(spec: RunSpec, store: Store) -> Components:
    """Loads the data and builds model and optimizer as the spec asks.

    Raises:
        UserError: the data, the device or the precision cannot be had.
    """
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
    ).to(device)
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
                "matmul": precision.describe(),
            },
            "hardware": hardware_facts(device).model_dump(),
            "execution": {
                "loss_backend": backend,
                "dispatch": model.dispatch,
                "attention": model.attention_path,
                "compiled": spec.training.compile_mode is not None,
                "parallel": "one process",
            },
            "budget": {"finished": False, "ramp_tokens": ramp_tokens(spec)},
            "code": code_facts().model_dump(),
        }
    )
    state = TrainState(
        model=model,
        optimizers=build_optimizers(model, spec.optimizer, table),
        stream=stream,
        digest=TokenDigest(),
        trace=RateTrace(),
        watch=ExpertWatch(model),
    )
    return Components(spec, data, state, forward, loss, steps, table, effective, device, precision)


def run(
    spec: RunSpec,
    store: Store,
    command: list[str],
    quiet: bool = False,
    ended: Callable[[RunOutcome], None] = lambda outcome: None,
) -> RunOutcome:
    """Trains one run to its end and records it, whatever the end is.

    `ended` is called when the end is recorded, before the wait for the tracker.

    Raises:
        UserError: before training, with nothing written; or a TrainingStoppedError or StoreError
            after it began, with the run recorded as FAILED (KILLED, where it was being stopped).
    """
    parts = build(spec, store)
    reporter = Reporter(parts.steps, quiet)
    with StopRequests() as stop:
        folder = store.create_run(spec.name)
        try:
            recorder = Recorder(parts, folder, command, tracker_for(spec, store))
        except BaseException:
            store.discard_run(folder)
            raise
        try:
            with reporter:
                exit_code = _train_and_record(parts, recorder, reporter, stop)
            outcome = RunOutcome(recorder.record, folder, exit_code)
            stop.restore()
            recorder.close()
            ended(outcome)
        finally:
            # The end is recorded: from here on a signal may cut the wait for the tracker short.
            stop.restore()
            recorder.close()
            recorder.wait_for_tracker(reporter.say)
    return outcome


def _train_and_record(
    parts: Components, recorder: Recorder, reporter: Reporter, stop: StopRequests
) -> int:
    """Trains to whatever end comes and records which it was; returns the exit code."""
    stopped: InterruptedRunError | None = None
    saved = False
    try:
        try:
            _train(parts, recorder, reporter, stop)
        except InterruptedRunError as request:
            stopped = request
            reporter.say(f"{stopped} at step {parts.state.step}: saving")
            recorder.flush()  # the step's row, where its evaluation was cut short
            saved = recorder.checkpoint()
        else:
            recorder.end("FINISHED")
            return 0
    except KeyboardInterrupt:
        recorder.end("KILLED", "ended at once by a second SIGINT")
        return 128 + signal.SIGINT
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        try:
            recorder.end("KILLED" if stopped else "FAILED", reason)
        except StoreError as second:
            reporter.say(f"the end of the run could not be recorded: {second}")
        raise
    what = f"a checkpoint of step {parts.state.step} was saved" if saved else "nothing was trained"
    recorder.end("KILLED", f"{stopped}; {what}")
    return 128 + stopped.number


def _train(parts: Components, recorder: Recorder, reporter: Reporter, stop: StopRequests) -> None:
    """The run itself: evaluate, then update, log, evaluate and save, to the last step."""
    spec, steps = parts.spec, parts.steps
    saved = time.monotonic()

    recorder.evaluation(stop.check, reporter)
    for result in train(spec, parts.state, parts.forward, parts.loss):
        step = result.step
        last, logged = step == steps, is_logged(spec, step, steps)
        recorder.step(result, logged)
        reporter.step(result, logged)
        if is_evaluated(spec, step, steps):
            recorder.evaluation(stop.check, reporter)
        recorder.flush()
        saving = spec.checkpoint
        due = saving.save_minutes > 0 and time.monotonic() - saved > saving.save_minutes * 60
        if last or due or (saving.save_steps > 0 and step % saving.save_steps == 0):
            recorder.checkpoint()
            saved = time.monotonic()
        if not last:
            stop.check()
    if unused := parts.state.watch.unused:
        reporter.say(f"warning: unused experts, no token reached them: {', '.join(unused)}")


class Recorder:
    """Writes what happens in one run: metrics first, then the record, then whoever listens."""

    def __init__(
        self, parts: Components, folder: Path, command: list[str], tracker: Tracker
    ) -> None:
        spec = parts.spec
        self._parts, self._folder, self._tracker = parts, folder, tracker
        self._row: dict[str, float | int | None] = {}
        self._layers = LayerTable(folder)
        self._since_log: list[StepResult] = []
        self._timed_seconds = 0.0
        self._timed_tokens = 0
        self._began = time.monotonic()
        self.record = RunRecord(
            id=uuid.uuid4().hex,
            name=spec.name,
            status="RUNNING",
            started=_now(),
            spec=recorded(spec),
            spec_sha256=spec_hash(spec),
            effective=parts.effective,
            provenance=provenance(command),
            git_commit=parts.effective.code.git_commit,
            params=parts.effective.parameters.total,
            parameter_table=[asdict(row) for row in parts.table],
            tokens_per_step=spec.tokens_per_step,
            total_tokens=spec.tokens_per_step * parts.steps,
            backend={"backend": device_kind(parts.device), "distributed": None},
            model_config_={
                **spec.model.model_dump(mode="json"),
                "vocab_size": parts.data.tokenizer.vocab_size,
            },
        )
        # The record last: a folder without one never was a run, and is removed again.
        self._journal = Journal(folder / METRICS, columns(list(parts.data.evaluation_sets)))
        self._write_record()
        tracker.start(self.record, folder)

    def step(self, result: StepResult, logged: bool) -> None:
        """Counts an update, and puts it into the step's row when it is to be logged."""
        if result.step > WARM_UP_STEPS:
            self._timed_seconds += result.seconds
            self._timed_tokens += self._parts.spec.tokens_per_step
        self._since_log.append(result)
        if not logged:
            return
        seconds = sum(one.seconds for one in self._since_log)
        tokens = self._parts.spec.tokens_per_step * len(self._since_log)
        self._row |= {
            "step": result.step,
            "tokens": result.tokens,
            "train/nll": result.nll,
            "train/objective": result.objective,
            "train/smoothing": result.smoothing,
            "train/z_loss": result.z_loss,
            "grad_norm": result.grad_norm,
            **rates_of(result),
            **terms_of(result),
            **(result.experts.totals if result.experts else {}),
            # The first step's time is compilation and page faults, not training.
            "tokens_per_s": tokens / seconds if result.step > 1 else None,
            "step_seconds": seconds / len(self._since_log),
            "peak_memory_gb": peak_bytes(self._parts.device) / 1e9,
        }
        if result.experts:
            self._layers.add(result.step, result.tokens, result.experts.rows)
        self._since_log = []

    def evaluation(self, between: Callable[[], None], reporter: Reporter) -> None:
        """Scores every evaluation set at the present step, and proves where the run stands."""
        parts, state = self._parts, self._parts.state
        spec = parts.spec
        require_finite_weights(state)
        scores = [
            evaluate(
                state.model,
                documents,
                spec.training.seq_len,
                loss_settings(spec),
                between,
                spec.evaluation.stride,
            )
            for documents in parts.data.evaluation_sets.values()
        ]
        values = {name: value for score in scores for name, value in score.values().items()}
        path = self._folder / "evaluations" / f"step_{state.step:08d}.parquet"
        with storing(path):
            write_scores(scores, path)
        self._row |= {"step": state.step, "tokens": state.tokens, **values}
        self.flush()
        self._layers.flush()
        self.record.points.append(
            Point(
                step=state.step,
                tokens=state.tokens,
                order_digest=state.digest.hexdigest(),
                lr_trace=state.trace.hexdigest(),
            )
        )
        self.record.results.final = {k: v for k, v in values.items() if v is not None}
        self._write_record()
        self._tracker.update(self.record)
        reporter.evaluation(state.step, self.record.results.final)

    def flush(self) -> None:
        """Writes the present step's row, if there is one."""
        if self._row:
            self._journal.write(self._row)
            self._tracker.log(self._row)
            self._row = {}

    def checkpoint(self) -> bool:
        """Saves the present state; False where no update was made, so that there is none."""
        if not self._parts.state.step:
            return False
        require_finite_weights(self._parts.state)
        keep = self._parts.spec.checkpoint.save_total_limit
        save_checkpoint(self._parts.state, self._folder / "checkpoints", self.record.spec, keep)
        return True

    def end(self, status: Status, error: str | None = None) -> None:
        """Writes into the record how the run ended.

        Raises:
            StoreError: it cannot be written.
        """
        record, step = self.record, self._parts.state.step
        record.status = status
        record.results.unused_experts = self._parts.state.watch.unused if step else []
        record.error, record.ended = error and redact(error), _now()
        record.results.tokens = self._parts.state.tokens
        record.results.seconds = time.monotonic() - self._began
        record.results.peak_memory_bytes = peak_bytes(self._parts.device)
        record.effective.budget.finished = status == "FINISHED"
        if step - WARM_UP_STEPS >= LEAST_TIMED_STEPS:
            record.results.tokens_per_s = self._timed_tokens / self._timed_seconds
            record.effective.interval = IntervalFacts(first_step=WARM_UP_STEPS + 1, last_step=step)
        self._write_record()
        self._layers.close()  # after the record: without room its segments stay as they are

    def close(self) -> None:
        """Frees the run's folder; more than once is fine."""
        self._journal.close()
        # Where no end could be recorded, the free folder tells that the run is over.
        release_run(self._folder)

    def wait_for_tracker(self, say: Callable[[str], None]) -> None:
        """Lets the tracker finish; `say` is told of a wait."""
        self._tracker.finish(self.record, say)

    def _write_record(self) -> None:
        with storing(self._folder / RECORD):
            write_record(self.record, self._folder)


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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
