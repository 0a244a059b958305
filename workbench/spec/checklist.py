"""The comparison checklist: which rule guards which leaf, and what each rule decides.

A *leaf* is one value of a run: `optimizer.lr` of the resolved spec, or `effective.precision.matmul`
of what really happened. Every leaf has exactly one tag here; a test fails when one has none. To
add a field, add its tag; to add a rule, add its row to `RULES` and tag its leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

RULESET_VERSION = 6

Claim = Literal["nll", "bpb", "throughput", "memory"]
CLAIMS: tuple[Claim, ...] = ("nll", "bpb", "throughput", "memory")
Effect = Literal["refuse", "flag"]


@dataclass(frozen=True)
class Rule:
    """One item of the checklist: what must match, and what a difference does to each claim.

    `unit_of` lists the claims whose unit the rule guards: there a difference keeps its effect even
    as the treatment, since the two numbers would not measure one thing.
    """

    name: str
    must_match: str
    effects: dict[Claim, Effect]
    unit_of: tuple[Claim, ...] = ()


def _effects(nll: str, bpb: str, throughput: str, memory: str) -> dict[Claim, Effect]:
    given = dict(zip(CLAIMS, (nll, bpb, throughput, memory), strict=True))
    effects: dict[Claim, Effect] = {}
    for claim, effect in given.items():
        if effect == "refuse":
            effects[claim] = "refuse"
        elif effect == "flag":
            effects[claim] = "flag"
    return effects


# Nats per token of two tokenizers have no common unit; bits per byte have.
_UNIT_OF: dict[str, tuple[Claim, ...]] = {"tokenizer": ("nll",)}

RULES: dict[str, Rule] = {
    name: Rule(name, must_match, _effects(*effects.split()), _UNIT_OF.get(name, ()))
    for name, must_match, effects in (
        ("model", "every model setting and the route tables", "flag flag flag flag"),
        ("tokenizer", "name, vocabulary size and content", "refuse flag flag flag"),
        ("data", "training text, split, order, and the batches consumed", "refuse refuse flag -"),
        (
            "budget",
            "tokens consumed at the point compared, the learning rates, the planned end",
            "refuse refuse - -",
        ),
        ("parameters", "total parameters", "flag flag flag flag"),
        ("seeds", "the seed", "refuse refuse - -"),
        ("optimizer", "optimizer, schedule, clipping, update size", "refuse refuse flag flag"),
        (
            "precision",
            "effective compute dtype, master dtype, matmul mode",
            "refuse refuse refuse refuse",
        ),
        ("hardware", "device, torch, driver and library versions", "flag flag refuse refuse"),
        ("telemetry", "which telemetry was on, and how often", "- - refuse flag"),
        (
            "execution",
            "compilation, kernels, loss blocks, micro-batches",
            "flag flag refuse refuse",
        ),
        ("evaluation", "evaluation sets, context, scored tokens, checkpoint", "refuse refuse - -"),
        ("interval", "the steps over which throughput was measured", "- - refuse -"),
        ("code", "the package's own sources", "flag flag flag flag"),
    )
}


@dataclass(frozen=True)
class Tag:
    """What guards a leaf.

    `judged`: compared under `rule`. `requested`: not compared itself; what it became is, in the
    leaves `becomes`. `free`: never compared. `follows` names (as patterns) the leaves whose
    difference explains a difference here; it then counts once, there. The leaves `under` explain it
    only as the treatment: undeclared, they count under a weaker rule and would hide this one. When
    a leaf of `unless` differs or is not known, nothing explains a difference here. The leaves
    `exists_by` explain no more than that a setting is null in one of the two, where it does not
    apply. Where `instead_of` matches, this leaf need not be known. `<set>` stands for the
    evaluation set that the leaf itself belongs to.
    """

    rule: str | None
    kind: Literal["judged", "requested", "free"] = "judged"
    follows: tuple[str, ...] = ()
    becomes: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    exists_by: tuple[str, ...] = ()
    instead_of: str | None = None


FREE = Tag(None, "free")

# What a difference does to a run that goes on from a checkpoint, by the rule that guards it: the
# numbers after it would be those of another run, or only their last digits could differ.
ON_RESUME: dict[str, Effect] = {
    "model": "refuse",
    "tokenizer": "refuse",
    "data": "refuse",
    "budget": "refuse",
    "parameters": "refuse",
    "seeds": "refuse",
    "optimizer": "refuse",
    "precision": "refuse",
    "hardware": "flag",
    "telemetry": "flag",
    "execution": "refuse",
    "evaluation": "refuse",
    "interval": "flag",
    "code": "flag",
}
# Stricter than their rule: another kind of device computes by other means altogether.
REFUSED_ON_RESUME = ("effective.hardware.device_type",)
# Milder: another number of processes, or of micro-batches, gives the same updates, rounded in
# another order; where it does not, the sequences of an update differ, too.
FLAGGED_ON_RESUME = ("effective.execution.parallel", "training.gradient_accumulation_steps")


def _judged(
    rule: str,
    *follows: str,
    under: tuple[str, ...] = (),
    unless: tuple[str, ...] = (),
    exists_by: tuple[str, ...] = (),
) -> Tag:
    return Tag(rule, "judged", follows, (), under, unless, exists_by)


def _requested(rule: str, *becomes: str) -> Tag:
    return Tag(rule, "requested", (), becomes)


_TOKENIZER = "effective.tokenizer.*"
_TEXT = ("effective.data.train_sha256", "effective.data.split")
_LAYOUT = (
    "training.batch_size",
    "training.global_batch_size",
    "training.gradient_accumulation_steps",
)
_UPDATE = "effective.optimizer.sequences_per_update"
_DEVICE = ("effective.hardware.device_type", "effective.hardware.device_name")
_SET_TEXT = "effective.evaluation.<set>.sha256"
_KIND = "model.mlp_type"
_SHARED = (_KIND, "model.shared_expert")
_MUON = ("optimizer.name", "optimizer.muon_scope")
_OF_EXPERTS = (
    "shared_expert",
    "num_experts",
    "top_k",
    "routing_strategy",
    "router_aux_loss_weight",
    "expert_diversity_lambda",
)
# The settings from which what follows the model comes; another one explains nothing there.
_ROUTES = tuple(
    f"model.{name}"
    for name in ("mlp_type", "num_experts", "top_k", "routing_strategy", "num_hidden_layers")
)
_RAMPED = (
    "model.mlp_type",
    "model.top_k",
    "model.learn_shared_routed_gates",
    "model.*_final",
    "model.*_schedule_*",
    "model.expert_diversity_lambda",
)
_TENSORS = tuple(
    f"model.{name}"
    for name in (
        "attention_type",
        "mlp_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "shared_expert",
        "shared_intermediate_size",
        "num_experts",
        "learn_shared_routed_gates",
        "qk_norm",
        "tie_word_embeddings",
    )
)
_GROUPS = (
    "optimizer.name",
    "optimizer.muon_scope",
    "optimizer.*weight_decay",
    "optimizer.*_lr_scale",
)

# First matching pattern wins. The leaves are those of `RunSpec`, of `Effective`, and what a
# comparison adds for the point compared: `effective.budget.{tokens,bytes,lr_trace,decay_tokens}`
# and `effective.data.order_digest`.
TAGS: tuple[tuple[str, Tag], ...] = (
    # -- the resolved spec
    ("name", FREE),
    ("notes", FREE),
    ("seed", _judged("seeds")),
    ("model.profile", FREE),  # its sizes are compared
    ("model.shared_expert_chunk_tokens", _judged("execution", exists_by=_SHARED)),
    ("model.*_schedule_*", _requested("model", "effective.budget.ramp_tokens")),
    # Multi-head and multi-query attention leave no choice.
    ("model.num_key_value_heads", _judged("model", "model.attention_type")),
    ("model.shared_intermediate_size", _judged("model", exists_by=_SHARED)),
    ("model.*_gate_*", _judged("model", exists_by=(_KIND, "model.learn_shared_routed_gates"))),
    (
        "model.expert_diversity_target",
        _judged("model", exists_by=(_KIND, "model.expert_diversity_lambda")),
    ),
    ("model.top_k_*", _judged("model", exists_by=(_KIND, "model.top_k"))),
    # Without a shared path there is nothing to weigh.
    (
        "model.learn_shared_routed_gates",
        _judged("model", "model.shared_expert", exists_by=(_KIND,)),
    ),
    *((f"model.{name}", _judged("model", exists_by=(_KIND,))) for name in _OF_EXPERTS),
    ("model.*", _judged("model")),
    ("tokenizer.*", _requested("tokenizer", _TOKENIZER)),
    ("data.dataset", _requested("data", "effective.data.*")),
    ("data.text_*", _requested("data", "effective.data.*")),
    ("data.tokens_*", _requested("data", "effective.data.*")),
    # Studying the data must not excuse another measurement: these become leaves of `evaluation`.
    ("data.stream_eval_documents", FREE),
    ("data.eval_tokens_path", FREE),
    ("data.held_out", FREE),
    ("data.overlap_limit", FREE),
    ("data.overlap_*", _requested("data", "effective.data.*")),
    ("data.stream_*", _requested("data", "effective.data.*")),
    ("data.held_out_ratio", _requested("data", "effective.data.*")),
    ("data.order", _judged("data")),
    (
        "training.steps",
        _requested(
            "budget",
            "effective.budget.tokens",
            "effective.budget.lr_trace",
            "effective.budget.decay_tokens",
            "effective.budget.ramp_tokens",
        ),
    ),
    ("training.stop_at_step", _requested("budget", "effective.budget.tokens")),
    ("training.batch_size", _judged("execution", "training.gradient_accumulation_steps")),
    ("training.parallel", _requested("execution", "effective.execution.parallel")),
    ("training.global_batch_size", _requested("optimizer", _UPDATE, "training.batch_size")),
    ("training.gradient_accumulation_steps", _judged("execution")),
    ("training.seq_len", _judged("optimizer")),
    ("training.precision", _requested("precision", "effective.precision.*")),
    ("training.device", _requested("hardware", *_DEVICE)),
    ("training.max_grad_norm", _judged("optimizer")),
    ("training.label_smoothing", _judged("optimizer")),
    ("training.z_loss", _judged("optimizer")),
    ("training.loss_backend", _requested("execution", "effective.execution.loss_backend")),
    ("training.compile_mode", _judged("execution", exists_by=("training.compile",))),
    ("training.*", _judged("execution")),
    # What trains a part of the model, and exists only where that part does, belongs to the model.
    ("optimizer.shared_*", _judged("model", exists_by=(*_SHARED, *_MUON))),
    ("optimizer.expert_*", _judged("model", exists_by=(_KIND, *_MUON))),
    ("optimizer.muon_*", _judged("optimizer", exists_by=("optimizer.name",))),
    ("optimizer.*", _judged("optimizer")),
    ("schedule.warmup_steps", _requested("optimizer", "effective.optimizer.warmup_steps")),
    ("schedule.*", _judged("optimizer")),
    ("evaluation.eval_steps", FREE),
    (
        "evaluation.eval_documents",
        _requested(
            "evaluation",
            *(
                f"effective.evaluation.*.{name}"
                for name in ("sha256", "documents", "scored_tokens", "bytes")
            ),
        ),
    ),
    ("evaluation.stride", _requested("evaluation", "effective.evaluation.*.context")),
    ("evaluation.*", _judged("evaluation")),
    ("telemetry.*", _judged("telemetry")),
    ("checkpoint.*", FREE),
    ("tracking.*", FREE),
    # -- what really happened
    ("effective.model.route_tables_sha256", _judged("model", *_ROUTES, _TOKENIZER)),
    ("effective.tokenizer.vocab_size", _judged("tokenizer", "effective.tokenizer.sha256")),
    ("effective.tokenizer.name", _judged("tokenizer", "effective.tokenizer.sha256")),
    ("effective.tokenizer.sha256", _judged("tokenizer")),
    ("effective.data.train_sha256", _judged("data", "effective.data.split")),
    ("effective.data.split", _judged("data")),
    ("effective.data.train_documents", _judged("data", *_TEXT)),
    ("effective.data.train_bytes", _judged("data", *_TEXT)),
    ("effective.data.train_tokens", _judged("data", *_TEXT, _TOKENIZER)),
    (
        "effective.data.order_digest",
        _judged(
            "data",
            *_TEXT,
            _TOKENIZER,
            "seed",
            "data.order",
            "training.seq_len",
            "effective.budget.tokens",
        ),
    ),
    ("effective.data.source", FREE),
    ("effective.data.order_proof", FREE),  # in words; `train_sha256` is the proof
    ("effective.data.counts", FREE),
    ("effective.budget.finished", _judged("budget")),
    # Of two tokenizers, the bytes of text may be the budget that both have had: one of them is
    # enough, and only what differs in both is another budget.
    (
        "effective.budget.tokens",
        _judged("budget", "effective.tokenizer.sha256", unless=("effective.budget.bytes",)),
    ),
    (
        "effective.budget.bytes",
        replace(
            _judged(
                "budget",
                "effective.data.order_digest",
                "effective.budget.tokens",
                "effective.tokenizer.sha256",
            ),
            instead_of="effective.budget.tokens",
        ),
    ),
    # Where the decay ends: two runs at the same token count, one half way down its cosine and one
    # at its end, have not had the same budget, whatever else explains their learning rates.
    ("effective.budget.decay_tokens", _judged("budget", "schedule.decay")),
    # Where the ramps of model values end.
    (
        "effective.budget.ramp_tokens",
        _judged("budget", *_RAMPED, "effective.budget.decay_tokens"),
    ),
    (
        "effective.budget.lr_trace",
        _judged(
            "budget",
            "optimizer.lr",
            "schedule.*",
            _UPDATE,
            "training.seq_len",
            "effective.budget.tokens",
            "effective.budget.decay_tokens",
        ),
    ),
    ("effective.parameters.total", _judged("parameters")),
    ("effective.parameters.active", FREE),
    ("effective.parameters.embedding", FREE),
    ("effective.parameters.experts", FREE),
    ("effective.optimizer.sequences_per_update", _judged("optimizer", under=_LAYOUT)),
    (
        "effective.optimizer.warmup_steps",
        _judged(
            "optimizer",
            "training.steps",
            under=(*_LAYOUT, "training.seq_len"),
            unless=("schedule.warmup_steps",),
        ),
    ),
    # The groups list every tensor with its shape, the embedding's among them.
    (
        "effective.optimizer.groups_sha256",
        _judged("optimizer", *_TENSORS, *_GROUPS, _TOKENIZER),
    ),
    ("effective.precision.compute_dtype", _judged("precision")),
    ("effective.precision.matmul", _judged("precision", "effective.precision.compute_dtype")),
    ("effective.precision.master_dtype", _judged("precision")),
    ("effective.hardware.driver", _judged("hardware", *_DEVICE)),
    ("effective.hardware.device_name", _judged("hardware", "effective.hardware.device_type")),
    ("effective.hardware.*", _judged("hardware")),
    ("effective.execution.dispatch", _judged("execution", "model.mlp_type")),
    (
        "effective.execution.attention",
        _judged(
            "execution",
            "model.attention_type",
            "model.num_attention_heads",
            "model.num_key_value_heads",
            *_DEVICE,
            "effective.precision.compute_dtype",
        ),
    ),
    ("effective.execution.compiled", _judged("execution", "training.compile")),
    ("effective.execution.recompilations", _judged("execution", "training.compile")),
    ("effective.execution.graph_breaks", _judged("execution", "training.compile")),
    ("effective.execution.*", _judged("execution")),
    (
        "effective.evaluation.*.scored_tokens",
        _judged("evaluation", _SET_TEXT, _TOKENIZER, "evaluation.sets"),
    ),
    (
        "effective.evaluation.*.context",
        _judged("evaluation", "training.seq_len", "evaluation.sets", unless=("evaluation.stride",)),
    ),
    # Whether it is held out never follows anything: a set that trained the one and not the other
    # is no common measure. What was counted shows in the status.
    ("effective.evaluation.*.status", _judged("evaluation", "evaluation.sets")),
    ("effective.evaluation.*.overlap_rule", _judged("evaluation", "evaluation.sets")),
    ("effective.evaluation.*.overlap", FREE),
    ("effective.evaluation.*.passed", FREE),
    # Never follows the data, studied or not: on other documents it is another measurement.
    ("effective.evaluation.*.sha256", _judged("evaluation", "evaluation.sets")),
    ("effective.evaluation.*", _judged("evaluation", _SET_TEXT, "evaluation.sets")),
    ("effective.interval.*", _judged("interval")),
    ("effective.code.package_sha256", _judged("code")),
    ("effective.code.version", _judged("code", "effective.code.package_sha256")),
    ("effective.code.forced_resume", _judged("code")),
    ("effective.code.resumed_with", _judged("code", "effective.code.forked_from")),
    ("effective.code.forked_from", _judged("code")),
    ("effective.code.git_commit", FREE),
    ("effective.code.git_dirty", FREE),
    ("effective.code.git_diff_sha256", FREE),
)


@cache
def tag_of(leaf: str) -> Tag:
    """The tag of a leaf.

    Raises:
        KeyError: no pattern covers it.
    """
    for pattern, tag in TAGS:
        if fnmatchcase(leaf, pattern):
            return tag
    raise KeyError(f"the leaf {leaf!r} has no tag in the checklist")


def matches(leaf: str, patterns: tuple[str, ...]) -> bool:
    """Whether any of the patterns covers the leaf."""
    return any(fnmatchcase(leaf, pattern) for pattern in patterns)
