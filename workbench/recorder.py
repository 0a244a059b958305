"""Writes what happens in one run: metrics first, then the record, then whoever listens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core.compilation import Compiled
from workbench.core.evaluate import SetScore, evaluate, write_scores
from workbench.core.memory import peak_bytes
from workbench.core.saving import Saver
from workbench.core.schedules import WARM_UP_STEPS, timed_steps
from workbench.core.train import StepResult, loss_settings, require_finite_weights
from workbench.errors import StoreError, storing
from workbench.progress import Reporter
from workbench.step_columns import rates_of, terms_of
from workbench.track.events import Tracker
from workbench.track.journal import Journal, Number
from workbench.track.layer_table import LayerTable
from workbench.track.provenance import redact
from workbench.track.record import IntervalFacts, Point, RunRecord, Status, write_record
from workbench.track.reserve import Reserve
from workbench.track.store import RECORD, release_run

if TYPE_CHECKING:
    from workbench.run import Components


class Recorder:
    """Writes what happens in one run: metrics first, then the record, then whoever listens."""

    def __init__(
        self,
        parts: Components,
        folder: Path,
        record: RunRecord,
        journal: Journal,
        tracker: Tracker,
        row: dict[str, Number | None] | None = None,
    ) -> None:
        """Begins, or goes on with, a run; `row` is what is known of the present step's row."""
        self._parts, self._folder, self._tracker = parts, folder, tracker
        self._row: dict[str, Number | None] = row or {}
        self._layers = LayerTable(folder)
        keep = parts.spec.checkpoint.save_total_limit
        self._saver = Saver(folder / "checkpoints", keep, parts.device, parts.team)
        self._since_log: list[StepResult] = []
        self._first = parts.state.step + 1  # of this process: it compiles, and touches memory first
        self._warm = parts.state.step + WARM_UP_STEPS  # the last step whose time is not counted
        self._timed_seconds = 0.0
        self._timed_tokens = 0
        self._began = time.monotonic() - (record.results.seconds or 0.0)
        self._journal = journal
        self.record = record
        self._compiled_before = dict(record.effective.execution)
        # The record last: a folder without one never was a run, and is removed again.
        self._write_record()
        self._reserve = Reserve(folder, (folder / RECORD).stat().st_size)
        tracker.start(self.record, folder)

    @property
    def owes_evaluation(self) -> bool:
        """Whether the present step is to be evaluated before training goes on."""
        return not self._parts.state.step or bool(self._row)

    def step(self, result: StepResult, logged: bool) -> None:
        """Counts an update, and puts it into the step's row when it is to be logged."""
        if result.step > self._warm:
            self._timed_seconds += result.seconds
            self._timed_tokens += self._parts.spec.tokens_per_step
        self._since_log.append(result)
        if not logged:
            return
        counted = [one.seconds for one in self._since_log if one.step != self._first]
        tokens = self._parts.spec.tokens_per_step * len(counted)
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
            # The first step's time is compilation and page faults, not training: its own row alone
            # tells it.
            "tokens_per_s": tokens / sum(counted) if counted else None,
            "step_seconds": sum(counted) / len(counted) if counted else result.seconds,
            "peak_memory_gb": peak_bytes(self._parts.device) / 1e9,
        }
        if result.experts:
            self._layers.add(result.step, result.tokens, result.experts.rows)
        self._since_log = []

    def compiled(self, counts: Compiled) -> None:
        """Puts into the record what torch.compile had to do in this process so far, and before."""
        for name, count in counts._asdict().items():
            before = self._compiled_before[name]
            if isinstance(before, int):
                setattr(self.record.effective.execution, name, before + count)

    def evaluation(self, between: Callable[[], None], reporter: Reporter) -> None:
        """Scores every evaluation set at the present step, and proves where the run stands."""
        state = self._parts.state
        scores = scores_of(self._parts, between)
        values = {name: value for score in scores for name, value in score.values().items()}
        path = self._folder / "evaluations" / f"step_{state.step:08d}.parquet"
        with storing(path):
            write_scores(scores, path)
        self._row |= {"step": state.step, "tokens": state.tokens, **values}
        self.flush()
        self._layers.flush()
        self._journal.sync()  # no record tells of a row that is not there
        self.record.points.append(
            Point(
                step=state.step,
                tokens=state.tokens,
                order_digest=state.digest.hexdigest(),
                lr_trace=state.trace.hexdigest(),
                bytes=state.digest.bytes,
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

    def checkpoint(self, *, last: bool = False) -> bool:
        """Saves the present state; False where no update was made, so that there is none. `last`:
        the run ends with it.

        It may still be on its way to the disk afterwards: see `settle`.

        Raises:
            StoreError: this checkpoint, or the one before, cannot be written.
        """
        if not self._parts.state.step:
            return False
        require_finite_weights(self._parts.state, self._parts.team)
        self._layers.flush()  # a run that goes on from here has nothing of it in memory
        self._journal.sync()  # nor does it write the rows before it again
        self._saver.save(self._parts.state, self.record.spec, last=last)
        return True

    def settle(self) -> None:
        """Waits until every checkpoint is on the disk.

        Raises:
            StoreError: one cannot be written.
        """
        self._saver.wait()

    def end(self, status: Status, error: str | None = None) -> None:
        """Writes into the record how the run ended.

        Raises:
            StoreError: it cannot be written.
        """
        # A run that has failed is recorded all the same; it may have failed because of this.
        with contextlib.suppress(*([] if status == "FINISHED" else [StoreError])):
            self._journal.sync()
        record, step = self.record, self._parts.state.step
        record.status = status
        record.results.unused_experts = self._parts.state.watch.unused if step else []
        # Never before its start, though the clock be set back meanwhile.
        record.error, record.ended = error and redact(error), max(now(), record.started or "")
        record.results.tokens = self._parts.state.tokens
        record.results.seconds = time.monotonic() - self._began
        record.results.peak_memory_bytes = peak_bytes(self._parts.device)
        record.effective.budget.finished = status == "FINISHED"
        stop = self._parts.spec.training.stop_at_step
        if status == "FINISHED" and record.total_tokens is None and step != stop:  # a stream's end
            record.total_tokens = self._parts.state.tokens
        if timed := timed_steps(self._warm - WARM_UP_STEPS, step):
            record.results.tokens_per_s = self._timed_tokens / self._timed_seconds
            record.effective.interval = IntervalFacts(first_step=timed[0], last_step=timed[1])
        try:
            self._write_record()
        except StoreError:
            if not self._reserve.release():
                raise
            self._write_record()
        self._reserve.release()
        self._layers.close()  # after the record: without room its segments stay as they are

    def close(self) -> None:
        """Frees the run's folder; more than once is fine."""
        self._journal.close()
        self._reserve.release()
        # Where no end could be recorded, the free folder tells that the run is over.
        release_run(self._folder)

    def wait_for_tracker(self, say: Callable[[str], None], hurried: Callable[[], bool]) -> None:
        """Lets the tracker finish; see `Tracker.finish`."""
        self._tracker.finish(self.record, say, hurried)

    def _write_record(self) -> None:
        found = self._parts.state.stream.found()
        if found is not None:
            data = self.record.effective.data
            data.counts = (data.counts or {}) | found.counts
            for name, passed in found.passed.items():
                self.record.effective.evaluation[name].passed = passed
        with storing(self._folder / RECORD):
            write_record(self.record, self._folder)


class Follower:
    """What a process of several does in the place of a recorder: its part, and no more of it.

    Rank zero records for all.
    """

    def __init__(
        self, parts: Components, folder: Path, record: RunRecord, owes_evaluation: bool
    ) -> None:
        """Begins, or goes on with, what rank zero records in `folder`."""
        self._parts, self.record = parts, record
        self._owes = owes_evaluation
        keep = parts.spec.checkpoint.save_total_limit
        self._saver = Saver(folder / "checkpoints", keep, parts.device, parts.team)

    @property
    def owes_evaluation(self) -> bool:
        """As a recorder's."""
        return self._owes

    def step(self, result: StepResult, logged: bool) -> None:
        """Nothing."""

    def compiled(self, counts: Compiled) -> None:
        """Nothing."""

    def evaluation(self, between: Callable[[], None], reporter: Reporter) -> None:
        """Scores its share of every evaluation set."""
        scores_of(self._parts, between)

    def flush(self) -> None:
        """Nothing."""

    def checkpoint(self, *, last: bool = False) -> bool:
        """Checks what rank zero saves; saves this process's part, where it holds one."""
        if not self._parts.state.step:
            return False
        require_finite_weights(self._parts.state, self._parts.team)
        self._saver.save(self._parts.state, self.record.spec, last=last)
        return True

    def settle(self) -> None:
        """Nothing."""

    def end(self, status: Status, error: str | None = None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def wait_for_tracker(self, say: Callable[[str], None], hurried: Callable[[], bool]) -> None:
        """Waits for nothing."""


def scores_of(parts: Components, between: Callable[[], None]) -> list[SetScore]:
    """Scores every evaluation set at the present step.

    Raises:
        TrainingStoppedError: weights are not finite, or not the same in all processes.
    """
    spec, state = parts.spec, parts.state
    require_finite_weights(state, parts.team)
    return [
        evaluate(
            state.model,
            documents,
            spec.training.seq_len,
            loss_settings(spec),
            between,
            spec.evaluation.stride,
            parts.team,
        )
        for documents in parts.data.evaluation_sets.values()
    ]


def now() -> str:
    """The present time, for the record."""
    return datetime.now(UTC).isoformat(timespec="seconds")
