"""The run spec: what a user may ask of one training run, validated, complete and frozen.

A `RunSpec` is always resolved: profile sizes and defaults are filled in, and a field that does not
apply to the chosen kind is None. Derived values (tokens per step, warm-up steps) are properties
computed from it, never written back. A dumped spec loads again to an equal spec.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.errors import Fault, UserError
from workbench.spec.profiles import EXPERT_DEFAULTS, SIZES, complete_model

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the spec: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSpec(Section):
    """The architecture. Expert settings are None on a dense model."""

    profile: Literal["50m", "100m", "200m", "300m", "1b", "8b", "custom"] = "100m"
    attention_type: Literal["mha", "gqa", "mqa"] = "gqa"
    mlp_type: Literal["token_routed", "dense"] = "token_routed"
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    intermediate_size: Positive
    shared_expert: bool | None = None
    shared_intermediate_size: Positive | None = None
    shared_expert_chunk_tokens: Count | None = None
    num_experts: Positive | None = None
    top_k: Positive | None = None
    top_k_primary_weight: Annotated[float, Field(ge=0, le=1)] | None = None
    routing_strategy: Literal["modulo_cyclic"] | None = None
    learn_shared_routed_gates: bool | None = None
    shared_gate_init: Finite | None = None
    routed_gate_init: Finite | None = None
    max_position_embeddings: Positive = 2048
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10000.0
    qk_norm: bool = True
    tie_word_embeddings: bool = True

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        return complete_model(given) if isinstance(given, dict) else given

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def is_routed(self) -> bool:
        """Whether the feed-forward has experts."""
        return self.mlp_type != "dense"


class TokenizerSpec(Section):
    """Which tokenizer encodes the text; its identity is the hash of its content."""

    name: str = "o200k_base"
    path: str | None = None


class DataSpec(Section):
    """Where the documents come from, how they are split and in which order they are trained."""

    dataset: Literal["sample", "text", "random"]
    text_file: str | None = None
    text_field: str | None = None
    text_unit: Literal["auto", "file", "blank_line", "line"] | None = None
    held_out_ratio: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] | None = None
    order: Literal["shuffled", "sequential", "random"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        full = {key: value for key, value in given.items() if value is not None}
        if full.get("dataset") == "text":
            full.setdefault("text_field", "text")
            full.setdefault("text_unit", "auto")
        if full.get("dataset") != "random":
            full.setdefault("held_out_ratio", 0.05)
            full.setdefault("order", "shuffled")
        return full


class TrainingSpec(Section):
    """One step: its batch, its precision, its loss; and how many of them."""

    steps: Positive = 250
    batch_size: Positive = 4
    seq_len: Positive = 1024
    gradient_accumulation_steps: Positive = 1
    precision: Literal["bf16", "fp32"] = "fp32"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    grad_ckpt: bool = False
    max_grad_norm: NonNegative = 1.0
    loss_backend: Literal["auto", "chunked"] = "auto"
    loss_chunk_tokens: Count = 0
    loss_block_vocab: Positive = 2048
    label_smoothing: Fraction = 0.0
    z_loss: NonNegative = 0.0
    compile: bool = False
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] | None = None
    deterministic: bool = True

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("compile") is True:
            return {"compile_mode": "default"} | {k: v for k, v in given.items() if v is not None}
        return given


class OptimizerSpec(Section):
    """The optimizer and its settings."""

    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3e-4
    weight_decay: NonNegative = 0.1
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8


class ScheduleSpec(Section):
    """The learning rate over the run. `warmup_steps` None is 5 % of the steps, at least 1."""

    warmup_steps: Count | None = None
    decay: Literal["cosine", "constant", "linear"] = "cosine"
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1


class EvaluationSpec(Section):
    """What is evaluated, when, and which checkpoint the run stands for."""

    eval_steps: Count = 50
    eval_documents: Count = 0
    sets: list[Literal["train_split", "held_out"]] = ["train_split", "held_out"]
    select: Literal["last"] = "last"


class TelemetrySpec(Section):
    """What is logged beside the losses."""

    log_steps: Positive = 10
    moe: Literal[False] = False


class CheckpointSpec(Section):
    """When checkpoints are saved; always at the end. 0 turns a cadence off."""

    save_steps: Count = 0
    save_minutes: NonNegative = 10.0
    save_total_limit: Positive = 2


class TrackingSpec(Section):
    """Where the run is tracked. `uri` None is the store on this machine."""

    uri: str | None = None
    experiment: Annotated[str, Field(min_length=1)] = "workbench"
    tags: dict[str, str] = {}


class RunSpec(Section):
    """The resolved description of one training run.

    Raises:
        pydantic.ValidationError: a field has a wrong type or value; its `ctx` carries the
            `UserError` with every fault where fields contradict one another.
    """

    name: str
    seed: Count = 42
    notes: str = ""
    model: ModelSpec = Field(default_factory=lambda: ModelSpec.model_validate({}))
    tokenizer: TokenizerSpec = TokenizerSpec()
    data: DataSpec
    training: TrainingSpec = TrainingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    telemetry: TelemetrySpec = TelemetrySpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        faults = [*_name_faults(self), *_model_faults(self.model), *_data_faults(self)]
        faults += [*_training_faults(self)]
        if faults:
            raise UserError(*faults)
        return self

    @property
    def sequences_per_update(self) -> int:
        """Sequences whose gradients make one optimizer step."""
        return self.training.batch_size * self.training.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens consumed by one optimizer step."""
        return self.sequences_per_update * self.training.seq_len

    @property
    def total_tokens(self) -> int:
        """Tokens the whole run is to consume."""
        return self.tokens_per_step * self.training.steps

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up: as given, or 5 % of the steps, at least 1."""
        if self.schedule.warmup_steps is not None:
            return self.schedule.warmup_steps
        return max(1, round(0.05 * self.training.steps))


def spec_hash(spec: RunSpec) -> str:
    """SHA-256 over the resolved spec: one number, one hash, however it was written in the file."""
    return document_hash(spec.model_dump(mode="json"))


def document_hash(document: Mapping[str, Any]) -> str:
    """`spec_hash` of a resolved spec as a record holds it.

    `tracking.uri` counts as null: a record holds it without its credentials, and the hash must be
    one that can be checked there.
    """
    tracking = document.get("tracking")
    if isinstance(tracking, Mapping):
        document = {**document, "tracking": {**tracking, "uri": None}}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _name_faults(spec: RunSpec) -> list[Fault]:
    if NAME.fullmatch(spec.name) and len(spec.name) <= 120:
        return []
    allowed = "letters, digits, '.', '_', '-'; the first a letter or digit; at most 120"
    return [Fault("name", "this cannot be the name of a run", spec.name, allowed)]


def _model_faults(model: ModelSpec) -> list[Fault]:
    faults = []
    heads, kv_heads, hidden = (
        model.num_attention_heads,
        model.num_key_value_heads,
        model.hidden_size,
    )
    if hidden % heads:
        message = f"hidden_size {hidden} is not divisible by {heads} heads"
        faults.append(Fault("model.hidden_size", message, hidden, f"a multiple of {heads}"))
    elif (hidden // heads) % 2:
        message = f"rotary embeddings need an even head width; {hidden} / {heads} is odd"
        faults.append(Fault("model.hidden_size", message, hidden, f"a multiple of {2 * heads}"))
    where = "model.num_key_value_heads"
    if heads % kv_heads:
        message = f"{kv_heads} key/value heads do not divide {heads} heads"
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        faults.append(Fault(where, message, kv_heads, divisors))
    elif model.attention_type == "mha" and kv_heads != heads:
        message = f"mha has as many key/value heads as heads ({heads})"
        faults.append(Fault(where, message, kv_heads, f"null or {heads}"))
    elif model.attention_type == "mqa" and kv_heads != 1:
        faults.append(Fault(where, "mqa has one key/value head", kv_heads, "null or 1"))
    return faults + (_expert_faults(model) if model.is_routed else _dense_faults(model))


def _dense_faults(model: ModelSpec) -> list[Fault]:
    return [
        Fault(f"model.{key}", "a dense model has no such setting", value, "null (unset it)")
        for key in EXPERT_DEFAULTS
        if (value := getattr(model, key)) is not None
    ]


def _expert_faults(model: ModelSpec) -> list[Fault]:
    faults = []
    experts, top_k = model.num_experts or 0, model.top_k or 0
    width = model.intermediate_size
    if width % experts:
        message = f"the routed width {width} is not divisible by {experts} experts"
        place = "model.intermediate_size"
        faults.append(Fault(place, message, width, f"a multiple of {experts}"))
    if top_k > experts:
        message = f"top_k is above the {experts} experts"
        faults.append(Fault("model.top_k", message, top_k, f"1 to {experts}"))
    not_applicable: list[tuple[str, str]] = []
    if top_k == 1:
        not_applicable.append(("top_k_primary_weight", "with top_k 1 the weight is 1"))
    if not model.learn_shared_routed_gates:
        reason = "without learn_shared_routed_gates there is no gate"
        not_applicable += [("shared_gate_init", reason), ("routed_gate_init", reason)]
    if not model.shared_expert:
        reason = "without shared_expert there is no shared path"
        keys = ("shared_intermediate_size", "shared_expert_chunk_tokens")
        not_applicable += [(key, reason) for key in keys]
        if model.learn_shared_routed_gates:
            place = "model.learn_shared_routed_gates"
            faults.append(Fault(place, reason + " to weigh against", True, "false"))
    for key, reason in not_applicable:
        if (value := getattr(model, key)) is not None:
            faults.append(Fault(f"model.{key}", reason, value, "null (unset it)"))
    if model.shared_expert and model.shared_intermediate_size is None:
        place = "model.shared_intermediate_size"
        faults.append(Fault(place, "profile custom needs every size", None, "a positive integer"))
    return faults


def _data_faults(spec: RunSpec) -> list[Fault]:
    faults = []
    data, tokenizer = spec.data, spec.tokenizer
    text_only = ("text_file", "text_field", "text_unit")
    unused: tuple[str, ...] = () if data.dataset == "text" else text_only
    if data.dataset == "random":
        unused += ("held_out_ratio", "order")
    for key in unused:
        if (value := getattr(data, key)) is not None:
            message = f"does not apply to dataset {data.dataset!r}"
            faults.append(Fault(f"data.{key}", message, value, "null (unset it)"))
    if data.dataset == "text" and data.text_file is None:
        allowed = "a file, folder or glob of .txt, .jsonl or .parquet"
        faults.append(Fault("data.text_file", "dataset 'text' needs it", None, allowed))
    if tokenizer.name == "file" and tokenizer.path is None:
        faults.append(
            Fault("tokenizer.path", "tokenizer 'file' needs it", None, "a .tiktoken rank file")
        )
    if tokenizer.name != "file" and tokenizer.path is not None:
        message = f"only tokenizer 'file' reads a path, not {tokenizer.name!r}"
        faults.append(Fault("tokenizer.path", message, tokenizer.path, "null (unset it)"))
    sets = spec.evaluation.sets
    if len(set(sets)) != len(sets):
        faults.append(Fault("evaluation.sets", "a set is named twice", sets, "each set once"))
    if data.held_out_ratio == 0 and "held_out" in sets:
        message = "held_out_ratio 0 leaves no documents to hold out"
        faults.append(Fault("evaluation.sets", message, sets, "[train_split]"))
    return faults


def _training_faults(spec: RunSpec) -> list[Fault]:
    faults = []
    training = spec.training
    if training.seq_len > spec.model.max_position_embeddings:
        message = f"longer than model.max_position_embeddings {spec.model.max_position_embeddings}"
        allowed = f"1 to {spec.model.max_position_embeddings}"
        faults.append(Fault("training.seq_len", message, training.seq_len, allowed))
    if training.compile_mode is not None and not training.compile:
        place = "training.compile_mode"
        value = training.compile_mode
        faults.append(Fault(place, "does not apply without compile", value, "null (unset it)"))
    warmup = spec.schedule.warmup_steps
    if warmup is not None and warmup > training.steps:
        message = f"longer than the run's {training.steps} steps"
        faults.append(
            Fault("schedule.warmup_steps", message, warmup, f"null or 0 to {training.steps}")
        )
    return faults


__all__ = ["NAME", "SIZES", "ModelSpec", "RunSpec", "spec_hash"]
