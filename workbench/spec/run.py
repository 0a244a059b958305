"""The run spec: what a user may ask of one training run, validated, complete and frozen.

A `RunSpec` is always resolved: profile sizes and defaults are filled in, and a field that does not
apply to the chosen kind is None. Derived values (tokens per step, warm-up steps) are properties
computed from it, never written back. A dumped spec loads again to an equal spec.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from workbench.errors import UserError
from workbench.spec.consistency import contradictions
from workbench.spec.datasets import (
    complete_data,
    complete_evaluation,
    complete_tokenizer,
    set_name,
)
from workbench.spec.profiles import MUON_KINDS, complete_model, complete_optimizer

# What a tensor can hold: an int64, and a float32 with room for a product or two.
MOST = 2**63
LARGEST = 1e30

Positive = Annotated[int, Field(ge=1, lt=MOST)]
Count = Annotated[int, Field(ge=0, lt=MOST)]
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the spec: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSpec(Section):
    """The architecture, and what trains only a part of it.

    Expert settings are None on a dense model, a routing table's on a learned router and the
    reverse. A value named `..._final` is reached by a cosine ramp over `..._schedule_ratio` of the
    run's steps (or `..._schedule_steps` of them); without it nothing is ramped.
    """

    profile: Literal["50m", "100m", "200m", "300m", "1b", "8b", "custom"] = "100m"
    attention_type: Literal["mha", "gqa", "mqa"] = "gqa"
    mlp_type: Literal["token_routed", "learned_router", "dense"] = "token_routed"
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
    top_k_primary_weight: Share | None = None
    top_k_primary_weight_final: Share | None = None
    top_k_primary_weight_schedule_ratio: Share | None = None
    top_k_primary_weight_schedule_steps: Positive | None = None
    routing_strategy: (
        Literal[
            "modulo_cyclic",
            "round_robin",
            "random",
            "token_id_balanced_hash",
            "token_id_multi_hash",
        ]
        | None
    ) = None
    router_aux_loss_weight: NonNegative | None = None
    learn_shared_routed_gates: bool | None = None
    shared_gate_init: Finite | None = None
    routed_gate_init: Finite | None = None
    shared_gate_final: Finite | None = None
    routed_gate_final: Finite | None = None
    gate_schedule_ratio: Share | None = None
    gate_schedule_steps: Positive | None = None
    expert_diversity_lambda: NonNegative | None = None
    expert_diversity_target: Literal["down", "all"] | None = None
    expert_diversity_schedule_ratio: Share | None = None
    expert_diversity_schedule_steps: Positive | None = None
    max_position_embeddings: Positive = 2048
    rope_theta: Above0 = 10000.0
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
    """Which tokenizer encodes the text; its identity is the hash of its content.

    Token shards were encoded before: there `name` None is what the shard says, and `vocab_size` is
    for shards that do not say it.
    """

    name: str | None = None
    path: str | None = None
    vocab_size: Positive | None = None


class HeldOutSpec(Section):
    """One more evaluation set, from files that do not train."""

    name: Annotated[str, Field(min_length=1)]
    path: str

    @property
    def set_name(self) -> str:
        """The name its numbers are logged under: letters, digits, `_` and `-` of `name`."""
        return set_name(self.name)


class DataSpec(Section):
    """Where the documents come from, how they are split and in which order they are trained.

    `overlap_*` decide when an evaluation set counts as held out: n-grams of `overlap_ngram` words,
    the share of them in training at which a document overlaps, and the share of overlapping
    documents or tokens up to which the set is still held out.
    """

    dataset: Literal["sample", "text", "tokens", "fineweb", "random"]
    text_file: str | None = None
    text_field: str | None = None
    text_unit: Literal["auto", "file", "blank_line", "line"] | None = None
    tokens_path: str | None = None
    eval_tokens_path: str | None = None
    tokens_format: Literal["auto", "complexity", "llmc", "megatron", "nanogpt"] | None = None
    stream_path: str | None = None
    stream_name: str | None = None
    stream_config: str | None = None
    stream_revision: str | None = None
    stream_eval_documents: Positive | None = None
    held_out_ratio: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] | None = None
    held_out: list[HeldOutSpec] = []
    order: Literal["shuffled", "sequential", "random"] | None = None
    overlap_ngram: Positive | None = None
    overlap_document_share: Share | None = None
    overlap_limit: Share | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        return complete_data(given) if isinstance(given, dict) else given


class TrainingSpec(Section):
    """One step: its batch, precision and loss; and how many of them (0: one pass of the data).

    `batch_size` counts the sequences that one process takes at once. `global_batch_size`, the
    sequences of an update over all processes and micro-batches, may be given in its place;
    `batch_size` is then None, as it depends on their numbers. `parallel` is how several processes
    train one model. `stop_at_step` ends the run early; schedules go on to `steps` all the same.
    """

    steps: Count = 250
    stop_at_step: Positive | None = None
    batch_size: Positive | None = 4
    global_batch_size: Positive | None = None
    seq_len: Positive = 1024
    gradient_accumulation_steps: Positive = 1
    parallel: Literal["ddp", "fsdp"] = "ddp"
    precision: Literal["bf16", "fp32"] = "fp32"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    grad_ckpt: bool = False
    max_grad_norm: NonNegative = 1.0
    loss_backend: Literal["auto", "chunked", "liger"] = "auto"
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
        if not isinstance(given, dict):
            return given
        given = {key: value for key, value in given.items() if value is not None}
        if given.get("compile") is True:
            given = {"compile_mode": "default"} | given
        if "global_batch_size" in given:
            given = {"batch_size": None} | given
        return given


class OptimizerSpec(Section):
    """The optimizer and its settings; `lr` is AdamW's, also beside Muon.

    Scales and decays of expert and shared matrices are None on a dense model, the scales also where
    Muon trains the matrices: its rate is `muon_lr`.
    """

    name: Literal["adamw", "muon_tr"] = "adamw"
    lr: Above0 = 3e-4
    weight_decay: NonNegative = 0.1
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Above0 = 1e-8
    shared_lr_scale: Above0 | None = None
    expert_lr_scale: Above0 | None = None
    shared_weight_decay: NonNegative | None = None
    expert_weight_decay: NonNegative | None = None
    muon_scope: Literal["expert", "expert_shared", "all"] | None = None
    muon_lr: Above0 | None = None
    muon_momentum: Fraction | None = None
    muon_nesterov: bool | None = None
    muon_ns_steps: Positive | None = None
    muon_orthogonal_blend: Share | None = None
    muon_max_update_rms: NonNegative | None = None

    def uses_muon_for(self, kind: Literal["expert", "shared", "matrix"]) -> bool:
        """Whether Muon trains the matrices of this kind; AdamW trains all else."""
        return self.muon_scope is not None and kind in MUON_KINDS[self.muon_scope]


class ScheduleSpec(Section):
    """The learning rate over the run. `warmup_steps` None is 5 % of the steps, at least 1."""

    warmup_steps: Count | None = None
    decay: Literal["cosine", "constant", "linear"] = "cosine"
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1


class EvaluationSpec(Section):
    """What is evaluated, when, and which checkpoint the run stands for.

    `stride` is how many new tokens each window of a document scores; None: all of its `seq_len`, so
    that windows do not overlap.
    """

    eval_steps: Count = 50
    eval_documents: Count = 0
    stride: Positive | None = None
    sets: list[str]
    select: Literal["last"] = "last"


class TelemetrySpec(Section):
    """What is logged beside the losses."""

    log_steps: Positive = 10
    moe: bool = False


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
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    notes: str = ""
    model: ModelSpec = Field(default_factory=lambda: ModelSpec.model_validate({}))
    tokenizer: TokenizerSpec
    data: DataSpec
    training: TrainingSpec = TrainingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    evaluation: EvaluationSpec
    telemetry: TelemetrySpec = TelemetrySpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()
    _processes: int = PrivateAttr(default=1)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        parts = {
            name: given.get(name) or {}
            for name in ("model", "optimizer", "data", "tokenizer", "evaluation")
        }
        if not all(isinstance(part, dict) for part in parts.values()):
            return given
        return given | {
            "optimizer": complete_optimizer(parts["optimizer"], parts["model"]),
            "tokenizer": complete_tokenizer(parts["tokenizer"], parts["data"]),
            "evaluation": complete_evaluation(parts["evaluation"], parts["data"]),
        }

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        if faults := contradictions(self):
            raise UserError(*faults)
        return self

    def on(self, processes: int) -> RunSpec:
        """The same spec, its derived values those of a run on so many processes.

        Raises:
            UserError: they and the micro-batches do not divide the global batch.
        """
        whole, parts = self.training.global_batch_size, self.training.gradient_accumulation_steps
        if whole is not None and whole % (parts * processes):
            message = f"{processes} processes with {parts} micro-batches each do not divide it"
            allowed = f"a multiple of {parts * processes}, or other numbers of the two"
            raise UserError.at("training.global_batch_size", message, whole, allowed)
        other = self.model_copy()
        other._processes = processes
        return other

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one forward and backward pass on one process."""
        given, whole = self.training.batch_size, self.training.global_batch_size
        if given is not None:
            return given
        assert whole is not None
        return whole // (self.training.gradient_accumulation_steps * self._processes)

    @property
    def sequences_per_update(self) -> int:
        """Sequences whose gradients make one optimizer step, over all processes."""
        accumulation = self.training.gradient_accumulation_steps
        return self.micro_batch_size * accumulation * self._processes

    @property
    def tokens_per_step(self) -> int:
        """Tokens consumed by one optimizer step."""
        return self.sequences_per_update * self.training.seq_len

    @property
    def total_tokens(self) -> int | None:
        """Tokens the whole run is to consume; None for a run to the end of its data."""
        return self.tokens_per_step * self.training.steps if self.training.steps else None

    @property
    def end_tokens(self) -> int | None:
        """Tokens consumed when the run ends, at its plan or before it."""
        stop = self.training.stop_at_step
        return self.tokens_per_step * stop if stop else self.total_tokens

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
