"""Whether the record of an imported run agrees with itself, and with its `metrics.csv`.

Such a record holds what another trainer wrote down, so there is less in it that could contradict
itself; but nothing that only a run of this package can prove may stand in it either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from workbench.compare.table import Table
from workbench.errors import Fault, UserError, reason_of
from workbench.spec.held_out import STATUSES, logged_name
from workbench.track.record import NotApplicable, RunRecord, strict

UNTOUCHED = "a run's files as the run wrote them"

_METRICS = "metrics.csv"


def imported_faults(record: RunRecord) -> Iterator[Fault]:
    """What an imported record says and cannot know, or says in two ways."""
    assert record.imported is not None
    last, tokens = -1, -1
    for index, point in enumerate(record.points):
        place = f"points[{index}]"
        if point.order_digest is not None or point.lr_trace is not None:
            message = "only a run of this package has a proof of what it consumed"
            yield Fault(place, message, point.order_digest or point.lr_trace, "null")
        if point.step <= last or point.tokens <= tokens:
            yield Fault(place, "steps and tokens must increase", point.step, f"above {last}")
        if record.tokens_per_step and point.tokens != point.step * record.tokens_per_step:
            expected = str(point.step * record.tokens_per_step)
            message = f"these are not the tokens of step {point.step}"
            yield Fault(f"{place}.tokens", message, point.tokens, expected)
        last, tokens = point.step, point.tokens
    ran = record.effective
    if record.params != ran.parameters.total:
        message = "this contradicts effective.parameters.total"
        yield Fault("params", message, record.params, str(ran.parameters.total))
    for name, leaf in (("package_sha256", ran.code.package_sha256), ("version", ran.code.version)):
        if leaf is not None:
            yield Fault(f"effective.code.{name}", "another program made this run", leaf, "null")
    for name, facts in ran.evaluation.items():
        place = f"effective.evaluation.{name}.status"
        if facts.status in ("held_out", "contaminated"):
            message = "the overlap of an imported run's set was never measured"
            yield Fault(place, message, facts.status, "unproven")
        elif facts.status is not None and facts.status not in STATUSES:
            yield Fault(place, "there is no such status", facts.status, ", ".join(STATUSES))
    results = record.results
    first, end = ran.interval.first_step, ran.interval.last_step
    if results.tokens_per_s is not None and (
        not results.tokens_per_s > 0 or any(isinstance(x, NotApplicable) for x in (first, end))
    ):
        yield Fault("results.tokens_per_s", "this cannot have been measured", results.tokens_per_s)


def check_imported_metrics(path: Path, metrics: Table, record: RunRecord) -> None:
    """Checks the numbers of an imported run: they are those that were imported, and in order.

    Raises:
        UserError: the file was changed, or the record does not fit it.
    """
    assert record.imported is not None
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError.at(str(path), f"unreadable: {reason_of(error)}") from None
    if found != record.imported.files.get(_METRICS):
        message = "this is not the file that was written when the run was imported"
        raise UserError.at(str(path), message, found, UNTOUCHED)
    if "tokens" not in metrics:
        raise UserError.at(str(path), "there is no column `tokens`", None, UNTOUCHED)
    evaluation = record.effective.evaluation
    known = {logged_name(name, facts.status) for name, facts in evaluation.items()}
    for name in sorted({n.removesuffix("/nll") for n in metrics if n.endswith("/nll")} - {"train"}):
        if name not in known:
            message = f"the record knows of no evaluation set {name}"
            raise UserError.at(str(path), message, f"{name}/nll", UNTOUCHED)
    rows = dict(zip(metrics["step"], metrics["tokens"], strict=True))
    for point in record.points:
        if rows.get(point.step) != point.tokens:
            place = f"{path}: step {point.step}"
            message = "the tokens of this evaluation are not those of the record"
            raise UserError.at(place, message, strict(rows.get(point.step)), str(point.tokens))
