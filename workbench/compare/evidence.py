"""Whether a run record agrees with itself: its spec with its hash, and with what it says ran.

An edited or damaged record must not be judged: what it says twice has to be said alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from workbench.compare.held_out import overlap_faults
from workbench.compare.imported import UNTOUCHED, imported_faults
from workbench.errors import Fault, UserError
from workbench.spec.run import RunSpec, document_hash
from workbench.track.record import NotApplicable, RunRecord, strict

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_DEVICES = {"hip": "cuda"}  # ROCm, which is asked for by the name cuda


def check_record(folder: Path, record: RunRecord) -> None:
    """Checks a record against itself; an imported one as far as it goes.

    Raises:
        UserError: with every contradiction found; its spec is not the one that was recorded, or
            something that ran is not what the spec asks for.
    """
    path = folder / "run_config.json"
    if document_hash(record.spec) != record.spec_sha256:
        message = "this is not the hash of the spec in this record: one of them was changed"
        raise UserError.at(f"{path}: spec_sha256", message, record.spec_sha256, UNTOUCHED)
    if record.imported is not None:
        if found := list(imported_faults(record)):
            raise UserError(*(Fault(f"{path}: {f.place}", f.message, f.value) for f in found))
        return
    try:
        spec = record.run_spec
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("spec", *first["loc"])))
        allowed = "compare with the version of workbench that wrote it"
        raise UserError.at(f"{path}: {where}", first["msg"], None, allowed) from None
    faults = [
        *_contradictions(record, spec),
        *_point_faults(record, spec),
        *_speed_faults(record),
        *overlap_faults(record, spec),
    ]
    if faults:
        raise UserError(
            *(Fault(f"{path}: {f.place}", f.message, strict(f.value), f.allowed) for f in faults)
        )


def _contradictions(record: RunRecord, spec: RunSpec) -> Iterator[Fault]:
    """What the record says in two places, and says otherwise. What is not recorded is no fault
    here: the rules count it as missing."""
    for place, found, expected, source in _said_twice(record, spec):
        known = found is not None and not isinstance(found, NotApplicable)
        if known and expected is not None and found != expected:
            yield Fault(place, f"this contradicts {source}", found, str(expected))


def _said_twice(record: RunRecord, spec: RunSpec) -> Iterator[tuple[str, Any, Any, str]]:
    """Place, value there, the value that it must have, and where that comes from."""
    ran, training = record.effective, spec.training
    per_step = spec.tokens_per_step
    yield "tokens_per_step", record.tokens_per_step, per_step, "the batch settings of the spec"
    if training.steps:
        total = per_step * training.steps
        yield "total_tokens", record.total_tokens, total, "training.steps of the spec"
    updates = spec.sequences_per_update
    place = "effective.optimizer.sequences_per_update"
    yield place, ran.optimizer.sequences_per_update, updates, "the batch settings of the spec"
    place = "effective.optimizer.warmup_steps"
    yield place, ran.optimizer.warmup_steps, spec.warmup_steps, "schedule and steps of the spec"
    place = "effective.precision.compute_dtype"
    dtype = _DTYPES[training.precision]
    yield place, ran.precision.compute_dtype, dtype, "training.precision of the spec"
    place = "effective.execution.compiled"
    yield place, ran.execution.compiled, training.compile, "training.compile of the spec"
    if training.device != "auto":
        device = ran.hardware.device_type
        device = _DEVICES.get(str(device), device)
        place = "effective.hardware.device_type"
        yield place, device, training.device, "training.device of the spec"
    if training.loss_backend != "auto":
        place, backend = "effective.execution.loss_backend", ran.execution.loss_backend
        yield place, backend, training.loss_backend, "training.loss_backend of the spec"
    place = "effective.tokenizer.name"
    yield place, ran.tokenizer.name, spec.tokenizer.name, "tokenizer.name of the spec"
    yield "params", record.params, ran.parameters.total, "effective.parameters.total"
    most = spec.evaluation.eval_documents
    for name, facts in ran.evaluation.items():
        if most and facts.documents is not None and facts.documents > most:
            place = f"effective.evaluation.{name}.documents"
            yield place, facts.documents, most, "evaluation.eval_documents of the spec"
    built = {**record.spec.get("model", {}), "vocab_size": ran.tokenizer.vocab_size}
    for key, value in record.model_config_.items():
        if key in built:
            yield f"model_config.{key}", value, built[key], "the model of the spec"
    if record.status == "FINISHED":
        reached = record.points[-1].tokens if record.points else 0
        end, source = record.total_tokens, "total_tokens"
        if training.stop_at_step:
            end, source = training.stop_at_step * per_step, "training.stop_at_step of the spec"
        yield "points", reached, end, f"{source}, which a FINISHED run reached"
        yield "results.tokens", record.results.tokens, end, source
        last, stop = ran.interval.last_step, training.stop_at_step or training.steps or None
        yield "effective.interval.last_step", last, stop, "the last step of the spec"


def _point_faults(record: RunRecord, spec: RunSpec) -> Iterator[Fault]:
    """Points go forwards, and stand where so many steps lead."""
    last, read = -1, 0
    for index, point in enumerate(record.points):
        place = f"points[{index}]"
        if point.step <= last:
            yield Fault(f"{place}.step", "steps must increase", point.step, f"above {last}")
        if spec.training.steps and point.step > spec.training.steps:
            allowed = f"at most {spec.training.steps}"
            yield Fault(f"{place}.step", "the run has no such step", point.step, allowed)
        tokens = point.step * (record.tokens_per_step or 0)
        if point.tokens != tokens:
            message = f"these are not the tokens of step {point.step}"
            yield Fault(f"{place}.tokens", message, point.tokens, str(tokens))
        if point.bytes is not None and point.bytes < read:
            yield Fault(f"{place}.bytes", "no text is unread", point.bytes, f"{read} or more")
        last, read = point.step, max(read, point.bytes or 0)


def _speed_faults(record: RunRecord) -> Iterator[Fault]:
    """Measurements that no run can have."""
    results, interval = record.results, record.effective.interval
    for name in ("tokens_per_s", "seconds", "peak_memory_bytes"):
        value = getattr(results, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            yield Fault(f"results.{name}", "this cannot have been measured", value, "above 0")
    for name, end in (("first_step", interval.first_step), ("last_step", interval.last_step)):
        if results.tokens_per_s is not None and isinstance(end, NotApplicable):
            message = "a throughput was measured, so there are steps over which it was"
            yield Fault(f"effective.interval.{name}", message, end.not_applicable, "a step")
