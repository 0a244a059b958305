"""The run record: what really happened in one training run, as `run_config.json` holds it.

`spec` is what was asked for, resolved; `effective` is what ran. A fact that cannot exist is
`{"not_applicable": reason}` and equals itself; a fact that is not known is None and equals nothing.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench.errors import UserError, storing
from workbench.json_files import read_json
from workbench.spec.run import RunSpec
from workbench.track.imported import Imported

SCHEMA_VERSION = 2  # 1 is the format of the runner that this package replaces

# Tags (of `tracking.tags`) by which a run says which study planned it, and as which arm.
STUDY_TAG = "workbench.study"
STUDY_ARM_TAG = "workbench.arm"

_SECTIONS = [
    name
    for name, field in RunSpec.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
]

# UNKNOWN is the end of an imported run of which its source says nothing.
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED", "UNKNOWN"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", validate_assignment=True)


class NotApplicable(BaseModel):
    """A fact that cannot exist in this run, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    not_applicable: str


# Facts of `ExecutionFacts` that count what torch.compile did.
COMPILER_COUNTS = ("recompilations", "graph_breaks")
NOT_COMPILED = NotApplicable(not_applicable="nothing was compiled")


class ModelFacts(_Part):
    """Of the model, beyond its spec."""

    route_tables_sha256: str | NotApplicable | None = None


class TokenizerFacts(_Part):
    """Which tokenizer encoded the text, by content."""

    name: str | None = None
    vocab_size: int | None = None
    sha256: str | None = None


class DataFacts(_Part):
    """The training text by content, and the digest of the windows consumed (at a point)."""

    source: str | None = None
    train_sha256: str | NotApplicable | None = None
    train_documents: int | NotApplicable | None = None
    train_tokens: int | NotApplicable | None = None
    train_bytes: int | NotApplicable | None = None
    split: str | NotApplicable | None = None
    # What pins the content and order of a stream; of data that are hashed whole there is no need.
    order_proof: str | NotApplicable | None = None
    counts: dict[str, int] | None = None


class BudgetFacts(_Part):
    """Whether the run reached its planned end. Tokens and learning rates stand in the points."""

    finished: bool | None = None
    ramp_tokens: dict[str, int] | NotApplicable | None = None


class ParameterFacts(_Part):
    """Trainable parameters; a tied matrix counts once."""

    total: int | None = None
    active: int | None = None
    embedding: int | None = None
    experts: int | None = None


class OptimizerFacts(_Part):
    """What the optimizer really got."""

    sequences_per_update: int | None = None
    warmup_steps: int | None = None
    groups_sha256: str | None = None


class PrecisionFacts(_Part):
    """The dtypes that ran."""

    compute_dtype: str | None = None
    master_dtype: str | None = None
    matmul: str | None = None


class HardwareFacts(_Part):
    """The device that ran, and the libraries that drive it."""

    device_type: str | None = None
    device_name: str | None = None
    device_count: int | None = None
    threads: int | None = None
    torch: str | None = None
    driver: str | NotApplicable | None = None
    libraries: dict[str, str] | None = None


class ExecutionFacts(_Part):
    """Which code paths ran."""

    loss_backend: str | None = None
    dispatch: str | NotApplicable | None = None
    attention: str | None = None
    compiled: bool | None = None
    parallel: str | None = None
    # By torch.compile, after the first update of each process; of several the highest count.
    recompilations: int | NotApplicable | None = None
    graph_breaks: int | NotApplicable | None = None


class SetFacts(_Part):
    """One evaluation set: its content, how it is scored, and whether it is held out.

    `status` is held_out, contaminated, unproven or train_split (see `workbench.spec.held_out`); it
    rests on `overlap`, what was counted under the settings in `overlap_rule`.
    """

    sha256: str | None = None
    documents: int | None = None
    unit: str | None = None
    scored_tokens: int | None = None
    bytes: int | NotApplicable | None = None
    context: str | None = None
    status: str | None = None
    # Tried in this order: a fact that cannot exist is written as a mapping, too.
    overlap: Annotated[NotApplicable | dict[str, Any] | None, Field(union_mode="left_to_right")] = (
        None
    )
    overlap_rule: str | NotApplicable | None = None
    # Of a set whose status is unproven because a stream trains: what of it has passed so far.
    passed: dict[str, Any] | None = None

    @property
    def measured(self) -> NotApplicable | dict[str, Any] | None:
        """What there is to say of its overlap with the training text."""
        return self.passed or self.overlap


class IntervalFacts(_Part):
    """Over which steps throughput was measured (both ends included)."""

    first_step: int | NotApplicable | None = None
    last_step: int | NotApplicable | None = None


class CodeFacts(_Part):
    """Which code ran. The commit and its state are shown; the sources' hash is compared."""

    package_sha256: str | None = None
    version: str | None = None
    # "none", or: the reason for going on against the guard; what had changed when the run went on;
    # the run and step whose checkpoint it began with.
    forced_resume: str | None = None
    resumed_with: str | None = None
    forked_from: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    git_diff_sha256: str | None = None


class Effective(_Part):
    """What ran, one part for each rule of the checklist that needs more than the spec."""

    model: ModelFacts = ModelFacts()
    tokenizer: TokenizerFacts = TokenizerFacts()
    data: DataFacts = DataFacts()
    budget: BudgetFacts = BudgetFacts()
    parameters: ParameterFacts = ParameterFacts()
    optimizer: OptimizerFacts = OptimizerFacts()
    precision: PrecisionFacts = PrecisionFacts()
    hardware: HardwareFacts = HardwareFacts()
    execution: ExecutionFacts = ExecutionFacts()
    evaluation: dict[str, SetFacts] = {}
    interval: IntervalFacts = IntervalFacts()
    code: CodeFacts = CodeFacts()


class Point(_Part):
    """One evaluation point: where the run stood, and the proof of what it had consumed.

    `order_digest` chains the token ids of every window consumed so far; `lr_trace` chains the
    learning rate of every update so far together with its token count. Of an imported run neither
    is known. `bytes` of text were read: None where no tokenizer says so, or nobody counted.
    """

    step: int
    tokens: int
    order_digest: str | None
    lr_trace: str | None
    bytes: int | None = None


class Addition(_Part):
    """Numbers of a further evaluation set or a downstream task, measured after the run had ended.

    `sha256` is the identity of what was scored, `checkpoint_sha256` of what it was scored with;
    `scores` is the file of every document's or item's score, below the run's folder. `facts` says
    how it was scored (of a set: `SetFacts`), `ran` by which code and in which precision.
    """

    name: str
    step: int
    tokens: int
    when: str
    source: str
    sha256: str
    checkpoint_sha256: str
    values: dict[str, float]
    facts: dict[str, Any] = {}
    ran: dict[str, Any] = {}
    scores: Annotated[str, Field(pattern=r"^evaluations/[^/\\\x00]+$")] | None = None


class Results(_Part):
    """Measured outcomes, never compared by a rule. Unmeasured is None."""

    tokens: int | None = None
    tokens_per_s: float | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    final: dict[str, float] = {}
    additions: list[Addition] = []
    # Experts that no token of the run has reached, such as "layer 3 expert 1".
    unused_experts: list[str] = []


class Resumption(_Part):
    """One time that the run went on from a checkpoint (step 0: from the start).

    `changes` are the differences that the guard found, each with what it was then and is now;
    `replayed_to` is the last step that had been logged before and was trained again.
    """

    step: int
    when: str
    checkpoint_sha256: str | None = None
    status_before: str
    changes: list[dict[str, Any]] = []
    reason: str | None = None
    forked_from: dict[str, str] | None = None
    replayed_to: int | None = None
    provenance_before: dict[str, Any] = {}


class RunRecord(_Part):
    """Everything that is kept of one run, except its metrics."""

    schema_version: int = SCHEMA_VERSION
    id: str
    name: str
    status: Status
    started: str | None  # None: an imported run whose source does not say
    ended: str | None = None
    error: str | None = None
    spec: dict[str, Any]
    spec_sha256: str
    effective: Effective = Effective()
    points: list[Point] = []
    resumes: list[Resumption] = []
    results: Results = Results()
    provenance: dict[str, Any] = {}
    # The names by which the replaced runner's users know these facts.
    git_commit: str | None = None
    params: int | None = None
    world_size: Annotated[int, Field(ge=1)] | None = 1
    # One row for each trainable tensor: its shape, kind, optimizer, scale of the rate, decay.
    parameter_table: list[dict[str, Any]] = []
    tokens_per_step: int | None  # None: an imported run whose source does not say
    total_tokens: int | None  # None: not known, or to the end of a stream that was not reached yet
    backend: dict[str, Any] = {}
    model_config_: dict[str, Any] = {}
    mlflow: dict[str, str] = {}
    # Of a run that another trainer made. Its `spec` holds the settings that are known.
    imported: Imported | None = None

    @model_validator(mode="after")
    def _knows_itself(self) -> RunRecord:
        if self.imported is None:
            names = ("started", "tokens_per_step", "world_size")
            own = {name: getattr(self, name) for name in names}
            for index, point in enumerate(self.points):
                own[f"points[{index}].order_digest"] = point.order_digest
                own[f"points[{index}].lr_trace"] = point.lr_trace
            if lacking := [name for name, value in own.items() if value is None]:
                raise ValueError(f"a run of this package knows its {', '.join(lacking)}")
        return self

    @property
    def study(self) -> tuple[str, str] | None:
        """The study that planned this run, and its arm there."""
        tracking = self.spec.get("tracking")
        tags = (tracking.get("tags") if isinstance(tracking, dict) else None) or {}
        if STUDY_TAG not in tags:
            return None
        return str(tags[STUDY_TAG]), str(tags.get(STUDY_ARM_TAG, ""))

    @property
    def run_spec(self) -> RunSpec:
        """The spec as its model, on as many processes; only for records of this schema version.

        Raises:
            UserError: the run was imported, so that its spec is known in part alone.
            pydantic.ValidationError: it is not a spec of this version.
        """
        if self.imported is not None:
            message = f"this run was imported from {self.imported.source}: it has no whole spec"
            raise UserError.at(self.name, message, None, "a run that this package trained")
        return RunSpec.model_validate(without_nulls(self.spec)).on(self.world_size or 1)


def without_nulls(value: Any) -> Any:
    """A mapping without its null values, at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def document_of(record: RunRecord) -> dict[str, Any]:
    """The record as `run_config.json` holds it."""
    document = record.model_dump(mode="json")
    document["model_config"] = document.pop("model_config_")
    return document


def write_record(record: RunRecord, folder: Path) -> None:
    """Writes `run_config.json` whole or not at all."""
    write_json(folder / "run_config.json", document_of(record))


def read_record(folder: Path) -> RunRecord:
    """The record of a run folder.

    Raises:
        UserError: there is none, or it is not a record.
    """
    path = folder / "run_config.json"
    try:
        document = read_json(path)
        if "args" in document and "spec" not in document:
            message = "this is a record of the runner that this package replaces"
            raise UserError.at(str(path), message, None, "a run of this package")
        document["model_config_"] = document.pop("model_config", {})
        record = RunRecord.model_validate(document)
    except FileNotFoundError:
        raise UserError.at(str(path), "there is no run record here") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError.at(f"{path}: {where}", first["msg"]) from None
    except UserError:
        raise
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError.at(str(path), f"this is not a readable run record: {error}") from None
    for name in _SECTIONS:
        if not isinstance(record.spec.get(name, {}), dict):
            message = "a section of a spec is a mapping"
            raise UserError.at(f"{path}: spec.{name}", message, record.spec[name])
    tags = record.spec.get("tracking", {}).get("tags")
    if not isinstance(tags, dict | NoneType):
        raise UserError.at(f"{path}: spec.tracking.tags", "tags are a mapping", tags)
    return record


def strict(value: Any) -> Any:
    """A value fit for strict JSON: NaN and the infinities become the words for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def write_json(path: Path, document: Any) -> None:
    """Strict JSON, written to a temporary name, synced and renamed."""
    text = json.dumps(strict(document), indent=1, sort_keys=True, allow_nan=False)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Text written whole or not at all.

    Raises:
        StoreError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    with storing(path, len(text.encode())):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
