"""What a run measured, read and checked: its metrics, its points and its scores must agree.

`metrics.csv` is what the numbers of a comparison are taken from. A row that is missing, stands
twice or was changed is found by what else the run left: the points of its record, the cadence of
its spec, the columns that repeat a number, and the score of every document.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.compare.imported import UNTOUCHED, check_imported_metrics
from workbench.compare.scores import BYTES, TOKENS, SetScores, read_scores, scores_path
from workbench.compare.table import Table, read_table
from workbench.errors import UserError
from workbench.spec.held_out import logged_name
from workbench.spec.run import RunSpec
from workbench.track.journal import legacy_cells, perplexity
from workbench.track.record import NotApplicable, RunRecord, SetFacts, strict

Metrics = Mapping[str, Sequence[float | None]]
Scores = Mapping[str, SetScores]

# Both numbers are one sum of the same float64 values; only the order of the sum may differ.
RELATIVE = 1e-9
_OVERFLOW = 709.0  # nats, from which on a perplexity is written as infinite


@dataclass(frozen=True)
class RunData:
    """What the numbers are taken from: a run's folder, record, metrics, and the scores of every
    evaluation (step -> evaluation set -> scores) whose file is there."""

    folder: Path
    record: RunRecord
    metrics: Metrics
    scores: Mapping[int, Scores]


def read_run(folder: Path, record: RunRecord, scored_at: Container[int] | None = None) -> RunData:
    """The measurements of a run whose record has been checked.

    Args:
        scored_at: the token counts of the evaluations whose scores are read; by default all.

    Raises:
        UserError: the metrics or the scores are missing, damaged, or contradict one another or the
            record; names the file and the step.
    """
    path = folder / "metrics.csv"
    metrics = read_table(path)
    if record.imported is not None:
        check_imported_metrics(path, metrics, record)
        return RunData(folder, record, metrics, {})
    table = _Table(path, metrics, record.run_spec)
    lines = table.lines(record)
    table.require_rows(record, lines)
    _check_sets(table, record)
    scores = {}
    for point in record.points:
        wanted = scored_at is None or point.tokens in scored_at
        found = read_scores(scores_path(folder, point.step)) if wanted else None
        if found is not None:
            scores[point.step] = found
        for asked, facts in record.effective.evaluation.items():
            name = logged_name(asked, facts.status)
            _check_numbers(table, lines[point.step], name, facts)
            if found is not None:
                file = scores_path(folder, point.step)
                _check_scores(table, lines[point.step], file, name, found, facts)
    # After the scores: of a cell that was changed, its twin in the same row would be blamed.
    table.check_repeats(lines)
    _check_final(table, folder, record, lines)
    return RunData(folder, record, metrics, scores)


class _Table:
    """`metrics.csv` with the place of every cell."""

    def __init__(self, path: Path, metrics: Table, spec: RunSpec) -> None:
        self.path, self.metrics, self.spec = path, metrics, spec

    def error(self, line: int, message: str, value: Any = None, allowed: str = "") -> UserError:
        """What is wrong in a line (the first is 0, below the heads)."""
        step = strict(self.metrics["step"][line])
        step = f"{step:g}" if isinstance(step, float) else step
        place = f"{self.path}:{line + 2}: step {step}"
        return UserError.at(place, message, strict(value), allowed or UNTOUCHED)

    def missing(self, step: int, why: str) -> UserError:
        """That the row of a step is not there."""
        message = f"there is no row of this step, which {why}"
        return UserError.at(f"{self.path}: step {step}", message, None, UNTOUCHED)

    def cell(self, name: str, line: int) -> float | None:
        """A value; None where it, or its whole column, is not there."""
        return self.metrics[name][line] if name in self.metrics else None

    def lines(self, record: RunRecord) -> dict[int, int]:
        """Step -> line. Steps increase, and every row stands where its tokens are."""
        if "tokens" not in self.metrics:
            raise UserError.at(str(self.path), "there is no column `tokens`", None, UNTOUCHED)
        lines: dict[int, int] = {}
        last, end = -1, self.spec.training.steps
        steps, tokens_at = self.metrics.numbers("step"), self.metrics.numbers("tokens")
        whole = bool(np.isfinite(steps).all() and (steps == np.floor(steps)).all())
        whole = whole and bool((np.diff(steps) > 0).all())
        inside = not len(steps) or bool(steps[0] >= 0 and (not end or steps[-1] <= end))
        if whole and inside and np.array_equal(tokens_at, steps * (record.tokens_per_step or 0)):
            return {int(step): line for line, step in enumerate(steps.tolist())}
        counts = self.metrics["tokens"]
        for line, value in enumerate(self.metrics["step"]):
            if value is None or not math.isfinite(value) or value != int(value):
                raise self.error(line, "not a step", value, "a whole number")
            step = int(value)
            if step in lines:
                raise self.error(line, "the row of this step stands twice", step, "once")
            if step < last:
                raise self.error(line, "steps must increase", step, f"above {last}")
            if end and step > end:
                raise self.error(line, "the run has no such step", step, f"at most {end}")
            tokens, expected = counts[line], step * (record.tokens_per_step or 0)
            if tokens != expected:
                message = "these are not the tokens of this step"
                raise self.error(line, message, tokens, str(expected))
            lines[step] = line
            last = step
        return lines

    def require_rows(self, record: RunRecord, lines: Mapping[int, int]) -> None:
        """Every point has its row, and so has every step that the spec logs."""
        for point in record.points:
            if point.step not in lines:
                raise self.missing(point.step, "the record says was evaluated")
        if not record.resumes and self._has_logged(lines):
            return
        for step in _logged(record, self.spec, max(lines, default=0)):
            if step not in lines:
                raise self.missing(step, "the spec logs")
            if self.cell("train/nll", lines[step]) is None:
                raise self.error(lines[step], "there is no train/nll, which the spec logs")

    def _has_logged(self, lines: Mapping[int, int]) -> bool:
        """Whether every step of one cadence has its row and its number."""
        spec, last = self.spec, max(lines, default=0)
        due = set(range(spec.telemetry.log_steps, last + 1, spec.telemetry.log_steps))
        if every := spec.evaluation.eval_steps:
            due |= set(range(every, last + 1, every))
        due |= {1} if last >= 1 else set()
        if not due <= lines.keys() or "train/nll" not in self.metrics:
            return False
        measured = self.metrics.known("train/nll")
        return bool(measured[[lines[step] for step in due]].all())

    def check_repeats(self, lines: Mapping[int, int]) -> None:
        """Columns that repeat a number, or come from one, say what it says."""
        known = {name.removesuffix("/nll") for name in self.metrics if name.endswith("/nll")}
        doubtful = self._doubtful(known - {"train"})
        for line in (line for line in lines.values() if doubtful[line]):
            row = {name: column[line] for name, column in self.metrics.items()}
            expected: dict[str, float | None] = dict(legacy_cells(row))
            for name in known - {"train"}:
                nll = row[f"{name}/nll"]
                if nll is None or nll < _OVERFLOW:
                    expected[f"{name}/perplexity"] = perplexity(nll)
            for name, value in expected.items():
                if name in row and not _agree(row[name], value):
                    message = f"{name} is not what the other columns of its row make it"
                    raise self.error(line, message, row[name], str(strict(value)))

    def _doubtful(self, sets: set[str]) -> npt.NDArray[np.bool_]:
        """[L] the lines in which a repeated number may not agree: all that do not, and few more."""
        found = np.zeros(len(self.metrics["step"]), dtype=bool)
        pairs = [("train_loss", "train/nll", False), ("train_ppl", "train/nll", True)]
        pairs += [("eval_loss", "held_out/nll", False), ("tok_s", "tokens_per_s", False)]
        pairs += [("total_loss", "train/objective", False)]
        has_ppl = "held_out/perplexity" in self.metrics
        source = "held_out/perplexity" if has_ppl else "held_out/nll"
        pairs += [("eval_ppl", source, not has_ppl)]
        pairs += [(f"{name}/perplexity", f"{name}/nll", True) for name in sets]
        for twin, origin, is_exp in pairs:
            if twin not in self.metrics or origin not in self.metrics:
                continue
            given, value = self.metrics.numbers(twin), self.metrics.numbers(origin)
            with np.errstate(over="ignore", invalid="ignore"):
                expected = np.exp(value) if is_exp else value
                near = np.abs(given - expected) <= RELATIVE / 2 * np.abs(expected)
            alike = near | (given == expected) | (np.isnan(given) & np.isnan(expected))
            alike &= self.metrics.known(twin) == self.metrics.known(origin)
            found |= ~alike
        return found


def _logged(record: RunRecord, spec: RunSpec, last: int) -> Iterator[int]:
    """The steps up to `last` that a run leaves a row for, by the cadence that held at each."""
    cadences = _cadences(record, spec)
    for step in range(1, last + 1):
        # Up to and with the step of a resume the cadence of before it held; the row of that step
        # itself stayed only where the cadence after it keeps it too.
        held = next(i for i, one in enumerate(cadences) if one.until is None or step <= one.until)
        kept = cadences[held : held + 2 if step == cadences[held].until else held + 1]
        if all(step == 1 or one.logs(step) for one in kept):
            yield step


@dataclass(frozen=True)
class _Cadence:
    until: int | None  # the last step under it; None: the end
    log: int
    evaluate: int

    def logs(self, step: int) -> bool:
        return step % self.log == 0 or bool(self.evaluate and step % self.evaluate == 0)


def _cadences(record: RunRecord, spec: RunSpec) -> list[_Cadence]:
    """One for each stretch between two resumes, taken back from the record's own spec."""
    log, evaluate = spec.telemetry.log_steps, spec.evaluation.eval_steps
    found = [_Cadence(None, log, evaluate)]
    for resume in reversed(record.resumes):
        then = {change["path"]: change["then"] for change in resume.changes}
        log = then.get("telemetry.log_steps", log)
        evaluate = then.get("evaluation.eval_steps", evaluate)
        found.append(_Cadence(resume.step, log, evaluate))
    return found[::-1]


def _check_sets(table: _Table, record: RunRecord) -> None:
    """Every evaluation set of the metrics is in the record too, so that a rule judges it."""
    found = {name.removesuffix("/nll") for name in table.metrics if name.endswith("/nll")}
    recorded = record.effective.evaluation
    asked = {name for name in table.spec.evaluation.sets if name not in recorded}
    found -= {"train", *asked, *(logged_name(name, one.status) for name, one in recorded.items())}
    for name in sorted(found):
        message = f"the record knows of no evaluation set {name}"
        raise UserError.at(str(table.path), message, f"{name}/nll", UNTOUCHED)


def _check_numbers(table: _Table, line: int, name: str, facts: SetFacts) -> None:
    """The row of an evaluation has the numbers of a set: NLL, and bits per byte of its text."""
    nll, bits = (table.cell(f"{name}/{score}", line) for score in ("nll", "bits_per_byte"))
    if nll is None:
        message = f"there is no {name}/nll, and the record says that it was evaluated here"
        raise table.error(line, message)
    if isinstance(facts.bytes, int) and facts.scored_tokens is not None:
        expected = nll * facts.scored_tokens / math.log(2) / facts.bytes if facts.bytes else None
        if not _agree(bits, expected):
            message = f"{name}/bits_per_byte is not what its NLL makes it"
            raise table.error(line, message, bits, str(strict(expected)))
    elif isinstance(facts.bytes, NotApplicable) and bits is not None:
        message = f"{name}/bits_per_byte was measured, and the record says that there are no bytes"
        raise table.error(line, message, bits)


def _check_scores(
    table: _Table, line: int, path: Path, name: str, scores: Scores, facts: SetFacts
) -> None:
    """The scores are those of the set's documents, and their mean is the number in the row."""
    if name not in scores:
        message = f"there are no scores of {name}, which was evaluated"
        raise UserError.at(str(path), message, ", ".join(scores) or None, UNTOUCHED)
    _check_documents(path, name, scores[name], facts)
    nll, mean = table.cell(f"{name}/nll", line), scores[name].nll
    if not _agree(nll, mean):
        message = f"{name}/nll is not that of the documents in {path.name}"
        raise table.error(line, message, nll, str(strict(mean)))
    _check_clean(table, line, path, name, scores[name], facts)


def _check_clean(
    table: _Table, line: int, path: Path, name: str, scores: SetScores, facts: SetFacts
) -> None:
    """The documents said to be clean are as many as the record says, and their NLL is theirs."""
    if not isinstance(facts.overlap, dict):
        return
    if None in scores.clean or len(scores.clean) != len(scores.documents):
        message = f"it does not say which documents of {name} are clean, which was measured"
        raise UserError.at(str(path), message, None, UNTOUCHED)
    others = scores.clean_rows(clean=False)
    counted = {"documents": len(others), "tokens": int(others[:, TOKENS].sum())}
    for what, value in counted.items():
        recorded = facts.overlap.get(f"overlapping_{what}")
        if value != recorded:
            message = f"overlapping {what} of {name} are not those of the record"
            raise UserError.at(str(path), message, value, str(recorded))
    nll, mean = table.cell(f"{name}/clean_nll", line), scores.clean_nll
    if not _agree(nll, mean):
        message = f"{name}/clean_nll is not that of the clean documents in {path.name}"
        raise table.error(line, message, nll, str(strict(mean)))


def _check_documents(path: Path, name: str, scores: SetScores, facts: SetFacts) -> None:
    """The scored documents are those of the set in the record."""
    found = {
        "documents": len(scores.documents),
        "scored_tokens": int(scores.rows[:, TOKENS].sum()),
        "sha256": scores.sha256,
    }
    if isinstance(facts.bytes, int):
        found["bytes"] = scores.rows[:, BYTES].sum()
    for fact, value in found.items():
        recorded = getattr(facts, fact)
        if recorded is not None and value != recorded:
            message = f"{fact} of {name} is not that of the record"
            raise UserError.at(str(path), message, strict(value), str(recorded))


def _check_final(table: _Table, folder: Path, record: RunRecord, lines: Mapping[int, int]) -> None:
    """The final results are those of the last point."""
    if not record.points:
        return
    line = lines[record.points[-1].step]
    for name, value in record.results.final.items():
        if name in table.metrics and not _agree(value, table.cell(name, line)):
            place = f"{folder / 'run_config.json'}: results.final.{name}"
            allowed = str(strict(table.cell(name, line)))
            message = f"not what metrics.csv holds at step {record.points[-1].step}"
            raise UserError.at(place, message, strict(value), allowed)


def _agree(a: float | None, b: float | None) -> bool:
    """Whether two values are one value; a NaN agrees with a NaN, and none with none."""
    if a is None or b is None:
        return a is b
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return math.isclose(a, b, rel_tol=RELATIVE)
