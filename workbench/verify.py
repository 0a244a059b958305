"""Trains a run again from its record and says whether the losses are the same, and from where not.

The second training leaves nothing in the store. What is compared are the reproducible columns of
`metrics.csv` and the digests of the points.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from workbench import run as runner
from workbench.errors import UserError
from workbench.guard import Difference, changes, require_no_refusal
from workbench.spec.run import RunSpec
from workbench.track.journal import MEASURED_COLUMNS, TWINS, read_metrics
from workbench.track.record import RunRecord, strict
from workbench.track.store import METRICS, Store

# Float32 sums in another order (other threads, another machine) part by less in a short run.
TOLERANCE = 1e-5

Verdict = Literal["bit for bit", "within tolerance", "parted"]
Metrics = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Verification:
    """What training again has shown; `step` and `column` are where the numbers first differ."""

    run: str
    verdict: Verdict
    steps: int
    rows: int
    tolerance: float
    step: int | None = None
    column: str | None = None
    then: float | None = None
    now: float | None = None
    largest: float = 0.0
    changed: list[Difference] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 the same or within the tolerance, 3 parted."""
        return 3 if self.verdict == "parted" else 0

    def to_json(self) -> dict[str, Any]:
        """The document that `wb verify --json` prints."""
        return {
            "run": self.run,
            "verdict": self.verdict,
            "steps": self.steps,
            "rows": self.rows,
            "tolerance": self.tolerance,
            "largest_relative_difference": self.largest,
            "first_difference": None
            if self.step is None
            else {"step": self.step, "column": self.column, "then": self.then, "now": self.now},
            "changed": [one.to_json() for one in self.changed],
        }


def verify(
    folder: Path,
    record: RunRecord,
    store: Store,
    steps: int | None = None,
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Trains the first `steps` updates of a run again (None: as many as it made) and compares.

    Raises:
        UserError: the run trained nothing, made fewer steps, or began with another's checkpoint.
        RefusedError: its data, settings or device kind are not to be had any more: with a list.
    """
    made = int(max((step or 0 for step in read_metrics(folder / METRICS)["step"]), default=0))
    if record.effective.code.forked_from not in (None, "none"):
        message = "the run began with the checkpoint of another run, not with step 0"
        raise UserError.at(record.name, message, record.effective.code.forked_from)
    if not made:
        raise UserError.at(record.name, "the run has no steps that could be trained again")
    if steps is not None and not 1 <= steps <= made:
        raise UserError.at("--steps", "the run made other steps", steps, f"1 to {made}")
    again = _again(record, steps or made)
    parts = runner.build(again, store)
    new = runner.new_record(parts, ["verify", record.name])
    changed = [one for one in changes(record, new, record.spec) if one.effect != "free"]
    require_no_refusal(changed, record.name, None)
    for one in changed:
        say(f"changed since the run: {one.path}: {one.then!r} then, {one.now!r} now")
    with tempfile.TemporaryDirectory(prefix="wb-verify-") as name:
        digests = runner.replay(parts, new, Path(name))
        metrics = read_metrics(Path(name, METRICS))
    then = read_metrics(folder / METRICS)
    points = {point.step: point.order_digest for point in record.points}
    other = [step for step, digest in digests.items() if points.get(step, digest) != digest]
    if other:
        message = f"the token ids consumed up to step {other[0]} are not those of the run"
        raise UserError.at(record.name, message, digests[other[0]], points[other[0]])
    return _compared(record.name, then, metrics, steps or made, tolerance, changed)


def _again(record: RunRecord, steps: int) -> RunSpec:
    """The run's spec, to be stopped after so many steps, without saving on the way."""
    spec = record.run_spec
    document = spec.model_dump(mode="json")
    document["training"]["stop_at_step"] = steps
    document["checkpoint"] |= {"save_steps": 0, "save_minutes": 0.0}
    document["tracking"]["uri"] = None
    return RunSpec.model_validate(document)


def _compared(
    name: str,
    then: Metrics,
    now: Metrics,
    steps: int,
    tolerance: float,
    changed: list[Difference],
) -> Verification:
    left_out = {*MEASURED_COLUMNS, *TWINS, "step", "tokens"}
    columns = [column for column in then if column in now and column not in left_out]
    lines = {int(step): i for i, step in enumerate(now["step"]) if step is not None}
    rows, largest = 0, 0.0
    first: tuple[int, str, float, float] | None = None
    parted: tuple[int, str, float, float] | None = None
    for line, step in enumerate(then["step"]):
        if step is None or int(step) not in lines or step > steps:
            continue
        rows += 1
        for column in columns:
            a, b = then[column][line], now[column][lines[int(step)]]
            if a is None or b is None or a == b or (math.isnan(a) and math.isnan(b)):
                continue
            apart = abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a - b) else math.inf
            largest = max(largest, apart)
            first = first or (int(step), column, a, b)
            if apart > tolerance:
                parted = parted or (int(step), column, a, b)
    verdict: Verdict = "parted" if parted else "within tolerance" if first else "bit for bit"
    place: dict[str, Any] = {}
    if found := parted or first:
        place = dict(zip(("step", "column", "then", "now"), found, strict=True))
    return Verification(
        name, verdict, steps, rows, tolerance, **place, largest=largest, changed=changed
    )


def render(found: Verification) -> str:
    """For the terminal: the verdict first."""
    lines = [f"{found.run}: {found.verdict}, over {found.rows} rows of {found.steps} steps"]
    if found.step is not None:
        lines.append(
            f"  first at step {found.step}: {found.column} {strict(found.then)} then, "
            f"{strict(found.now)} now"
        )
        lines.append(
            f"  largest relative difference {found.largest:.3g}, tolerance {found.tolerance:g}"
        )
    lines += [f"  changed: {one.path}: {one.then!r} then, {one.now!r} now" for one in found.changed]
    return "\n".join(lines)
