"""A run of any other trainer as a draft of a record, by the names that a mapping file gives it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from pydantic import TypeAdapter

from workbench.errors import Fault, UserError
from workbench.importing.draft import Draft
from workbench.importing.foreign import ForeignRun, Reader, Reading, type_of
from workbench.importing.mapping import (
    RUN,
    MapFile,
    NumberOrigin,
    Origin,
    converted,
    recorded_set,
    unit_words,
)
from workbench.spec.held_out import logged_name
from workbench.spec.load import field_types
from workbench.spec.profiles import DENSE_NULLS
from workbench.track.imported import Importer
from workbench.track.journal import perplexity
from workbench.track.record import Effective, SetFacts

_STATUSES = ("FINISHED", "FAILED", "KILLED", "UNKNOWN")
_MANY = 12


def draft_of(run: ForeignRun, file: MapFile, importer: Importer, name: str | None = None) -> Draft:
    """The draft of a run: what the mapping file names is known, all else is missing.

    Args:
        name: what to call it here; by default as the mapping file says.

    Raises:
        UserError: the file names what is not there, or the run's values are not what they should
            be; with every fault found.
    """
    called = name or file.map.name.replace(RUN, re.sub(r"[^A-Za-z0-9._-]+", "-", run.name))
    draft = Draft(called, importer, f"{run.place}, run {run.name}", identity=run.identity)
    draft.status, draft.started, draft.ended = run.status, run.started, run.ended
    draft.originals = {**run.originals, "map.yaml": file.content}
    reader = Reader(run, file)
    _values(draft, reader)
    _numbers(draft, reader)
    if reader.faults:
        raise UserError(*reader.faults)
    _what_does_not_apply(draft)
    _sizes(draft, reader)
    _end(draft, reader)
    if reader.faults:
        raise UserError(*reader.faults)
    if reader.again:
        why = "a resume wrote them again: the later branch stands, the earlier is left"
        recorded = f"{reader.again} numbers of steps trained again"
        draft.correct("metrics.csv", recorded, "left out", why)
    draft.notes += _left_out(run, file)
    return draft


def _values(draft: Draft, reader: Reader) -> None:
    """Settings, facts and the facts of evaluation sets."""
    fields, facts = field_types(), field_types(Effective)
    for name, origin in reader.map.settings.items():
        known, value = reader.typed(f"settings.{name}", origin, type_of(fields[name]))
        if known:
            draft.setting(name, value)
    for name, origin in reader.map.facts.items():
        known, value = reader.typed(f"facts.{name}", origin, type_of(facts[name]))
        if known and value is not None:
            draft.fact(name, value)
    for name, one in reader.map.evaluation.items():
        what = "train_split" if name == "train_split" else "unproven"
        sets = draft.effective.setdefault("evaluation", {})  # names of sets may hold dots
        sets[recorded_set(name)] = {"status": what}
        for fact, origin in one.facts.items():
            kind = type_of(SetFacts.model_fields[fact])
            known, value = reader.typed(f"evaluation.{name}.facts.{fact}", origin, kind)
            if known and value is not None:
                sets[recorded_set(name)][fact] = value
    draft.setting("evaluation.sets", [recorded_set(name) for name in reader.map.evaluation])
    if processes := reader.map.world_size:
        known, value = reader.typed("world_size", processes, TypeAdapter(int))
        draft.world_size = value if known else None
    if status := reader.map.status:
        known, value = reader.typed("status", status, TypeAdapter(str))
        if known and value not in _STATUSES:
            reader.fault("status", "there is no such status", value, ", ".join(_STATUSES))
        elif known:
            draft.status = value


def _numbers(draft: Draft, reader: Reader) -> None:
    """The rows, and the steps at which an evaluation set was measured."""
    cells: dict[int, dict[str, float]] = {}
    columns: dict[str, None] = {}
    evaluated: set[int] = set()
    for path, kind, origin in reader.file.numbers():
        found = _converted(reader, path, kind, origin)
        section, _, rest = path.partition(".")
        if section == "results":
            if found:
                target = {"tokens_per_s": "tokens_per_s", "peak_memory_bytes": "peak_memory_bytes"}
                last = found[-1].value
                setattr(draft, target[kind], last if kind == "tokens_per_s" else round(last))
            continue
        own = rest.rpartition(".")[0]
        column = _column(draft, kind, own, origin)
        columns[column] = None
        for reading in found:
            cells.setdefault(reading.step, {})[column] = reading.value
            if column.endswith("/nll"):
                ppl = column.removesuffix("nll") + "perplexity"
                if section == "evaluation":
                    columns[ppl] = None
                    cells[reading.step][ppl] = perplexity(reading.value) or math.nan
            if section == "evaluation" and not column.endswith("/loss"):
                evaluated.add(reading.step)
        if origin.unit != unit_words(kind):
            here = f"{origin.there} in {origin.unit}"
            draft.notes.append(f"{column} was {here}, here in {unit_words(kind)}")
    for name in reader.map.evaluation:  # a set without an NLL is one all the same
        columns[f"{_logged(name)}/nll"] = None
    tokens = _tokens(draft, reader, cells)
    offset = reader.map.step.offset
    for step in sorted(cells):
        row: dict[str, float | int | None] = {"step": step + offset, "tokens": tokens.get(step)}
        draft.rows.append({**row, **{name: cells[step].get(name) for name in columns}})
    draft.evaluated = [step + offset for step in sorted(evaluated)]
    finals = [row for row in draft.rows if row["step"] in draft.evaluated]
    for row in finals[-1:]:
        draft.final = {
            name: value
            for name, value in row.items()
            if value is not None and "/" in name and not name.startswith("train/")
        }


def _logged(name: str) -> str:
    status = "train_split" if name == "train_split" else "unproven"
    return logged_name(recorded_set(name), status)


def _column(draft: Draft, kind: str, set_name: str, origin: NumberOrigin) -> str:
    """The name of a number here. A loss with something else in it is no NLL."""
    column = kind if "/" in kind or kind == "grad_norm" else f"{_logged(set_name)}/{kind}"
    if not column.endswith("/nll") or not origin.contains:
        return column
    why = f"{', '.join(origin.contains)} is in it: it is no NLL"
    draft.correct(column, origin.there, None, why)
    return column.removesuffix("nll") + "loss"


def _converted(reader: Reader, path: str, kind: str, origin: NumberOrigin) -> list[Reading]:
    found = []
    for reading in reader.readings(path, origin):
        try:
            value = converted(kind, origin.unit, reading.value)
        except ValueError:
            message = f"{origin.there} cannot be {origin.unit}"
            reader.faults.append(Fault(reading.place, message, reading.value, "a positive number"))
            return []
        found.append(reading._replace(value=value))
    return found


def _tokens(draft: Draft, reader: Reader, steps: Iterable[int]) -> dict[int, int]:
    """Step of there -> tokens consumed; what is not known is left out."""
    given, offset = reader.map.tokens, reader.map.step.offset
    if given is None:
        draft.notes.append("tokens: not in the mapping file, so there is no point to compare at")
        return {}
    if given.per_step is not None:
        known, each = reader.typed("tokens.per_step", given.per_step, TypeAdapter(int))
        if not known:
            return {}
        if each <= 0:
            reader.fault("tokens.per_step", "an update consumes tokens", each, "1 or more")
            return {}
        draft.tokens_per_step = each
        return {step: (step + offset) * each for step in steps}
    kind, name = ("metric", given.metric) if given.metric else ("column", given.column or "")
    found: dict[int, int] = {}
    last = -1.0
    for reading in reader.series(f"tokens.{kind}", kind, name or ""):
        if not reading.value.is_integer() or reading.value <= last:
            message = "not a count of tokens that grows"
            fault = Fault(reading.place, message, reading.value, f"a whole number above {last:g}")
            reader.faults.append(fault)
            return {}
        last = reading.value
        found[reading.step] = int(reading.value)
    return found


def _what_does_not_apply(draft: Draft) -> None:
    """Settings that cannot exist beside those that are known are null, and not unknown."""
    model, optimizer = draft.spec.get("model", {}), draft.spec.get("optimizer", {})
    training = draft.spec.get("training", {})
    if model.get("mlp_type") == "dense":
        for name in DENSE_NULLS:
            model.setdefault(name, None)
        kinds = ("lr_scale", "weight_decay")
        for name in (f"{part}_{kind}" for part in ("shared", "expert") for kind in kinds):
            draft.spec.setdefault("optimizer", optimizer).setdefault(name, None)
    if optimizer.get("name") == "adamw":
        names = [name for name in field_types() if name.startswith("optimizer.muon_")]
        for name in names:
            optimizer.setdefault(name.removeprefix("optimizer."), None)
    if training.get("compile") is False:
        training.setdefault("compile_mode", None)


def _sizes(draft: Draft, reader: Reader) -> None:
    """Numbers that follow from others, and whether those that are said twice agree."""
    draft.params = draft.effective.get("parameters", {}).get("total")
    training = draft.spec.get("training", {})
    parts = [training.get(name) for name in ("batch_size", "gradient_accumulation_steps")]
    processes, length = draft.world_size, training.get("seq_len")
    whole = training.get("global_batch_size")
    if whole is None and None not in parts and processes:
        whole = parts[0] * parts[1] * processes
    asked = draft.effective.get("optimizer", {}).get("sequences_per_update")
    if whole and asked and whole != asked:
        message = "the batch, its parts and the processes make another number"
        reader.fault("facts.optimizer.sequences_per_update", message, asked, str(whole))
    if whole and not asked:
        draft.fact("optimizer.sequences_per_update", whole)
    each = draft.tokens_per_step
    if whole and length and each and whole * length != each:
        message = f"{whole} sequences of {length} tokens are not so many"
        reader.fault("tokens.per_step", message, each, str(whole * length))
    if each and training.get("steps"):
        draft.total_tokens = each * training["steps"]
    if processes:
        draft.fact("execution.parallel", "one process" if processes == 1 else None)


def _end(draft: Draft, reader: Reader) -> None:
    """Whether the run reached its planned end: only its last row and its plan can tell."""
    if not draft.rows:
        message = "none of the numbers of the mapping file was measured"
        reader.faults.append(Fault(reader.run.place, message, reader.run.name, "a logged number"))
        return
    planned = draft.spec.get("training", {}).get("steps")
    last = int(draft.rows[-1]["step"] or 0)
    if not planned:
        draft.notes.append("training.steps: not known, so neither is whether the run reached it")
    elif last > planned:
        reader.fault("settings.training.steps", "there is a row after it", planned, f"{last}")
    elif last == planned and draft.status in ("FINISHED", "UNKNOWN"):
        draft.status = "FINISHED"
        draft.fact("budget.finished", True)
    else:
        draft.notes.append(f"the last row is of step {last} of {planned}")
    if draft.evaluated and any(row["tokens"] is None for row in draft.rows):
        lacking = [row["step"] for row in draft.rows if row["tokens"] is None]
        lost = sorted({int(step or 0) for step in lacking} & set(draft.evaluated))
        if lost and reader.map.tokens is not None:
            shown = ", ".join(map(str, lost[:_MANY]))
            draft.notes.append(f"no tokens are known at the evaluations of step {shown}")


def _left_out(run: ForeignRun, file: MapFile) -> list[str]:
    """What the source has and the mapping file does not speak of."""
    used: set[tuple[str, str]] = {("column", file.map.step.column)}
    used |= {origin.asks for _, one in file.origins() for origin in _flat(one) if origin.asks}
    tokens = file.map.tokens
    for origin in (*(number for _, _, number in file.numbers()), *((tokens,) if tokens else ())):
        used |= {(k, n) for k in ("metric", "column") if (n := getattr(origin, k, None))}
    notes = []
    for kind in ("param", "metric", "column"):
        rest = [name for name in run.names.get(kind, []) if (kind, name) not in used]
        if rest:
            more = f" and {len(rest) - _MANY} more" if len(rest) > _MANY else ""
            said = ", ".join(rest[:_MANY])
            notes.append(f"not in the mapping file, left out: {kind}s {said}{more}")
    return notes


def _flat(origin: Origin) -> Iterator[Origin]:
    yield origin
    for item in origin.items or []:
        yield from _flat(item)
