"""Which settings of a run spec contradict one another, each with its place and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.errors import UNSET, Fault
from workbench.spec.datasets import data_faults
from workbench.spec.profiles import DENSE_NULLS, MUON_KINDS, RAMPS

if TYPE_CHECKING:
    from workbench.spec.run import ModelSpec, OptimizerSpec, RunSpec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

MOST_EXPERTS = 2**15 - 1
MOST_NS_STEPS = 99
"""The most Newton-Schulz iterations that Muon takes."""


def contradictions(spec: RunSpec) -> list[Fault]:
    """Every fault of a spec whose fields are each valid by themselves."""
    return [
        *_name_faults(spec),
        *_model_faults(spec.model),
        *_ramp_faults(spec),
        *data_faults(spec),
        *_training_faults(spec),
        *_optimizer_faults(spec.optimizer, spec.model),
    ]


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
    return list(_given(model, dict.fromkeys(DENSE_NULLS, "a dense model has no such setting")))


def _given(model: ModelSpec, not_applicable: dict[str, str]) -> Iterator[Fault]:
    """A fault for each of the fields that has a value although it does not apply."""
    for key, reason in not_applicable.items():
        if (value := getattr(model, key)) is not None:
            yield Fault(f"model.{key}", reason, value, UNSET)


def _expert_faults(model: ModelSpec) -> list[Fault]:
    faults = []
    experts, top_k = model.num_experts or 0, model.top_k or 0
    width = model.intermediate_size
    if width % experts:
        message = f"the routed width {width} is not divisible by {experts} experts"
        place = "model.intermediate_size"
        faults.append(Fault(place, message, width, f"a multiple of {experts}"))
    if experts > MOST_EXPERTS:
        message = "more experts than the int16 of a route table can name"
        faults.append(Fault("model.num_experts", message, experts, f"1 to {MOST_EXPERTS}"))
    if top_k > experts:
        message = f"top_k is above the {experts} experts"
        faults.append(Fault("model.top_k", message, top_k, f"1 to {experts}"))
    if model.mlp_type == "learned_router" and experts == 1:
        message = "a router of one expert has nothing to choose, and would never learn"
        faults.append(Fault("model.num_experts", message, experts, "2 or more"))
    faults += _given(model, _not_applicable(model, top_k))
    if not model.shared_expert and model.learn_shared_routed_gates:
        place = "model.learn_shared_routed_gates"
        message = "without shared_expert there is no shared path to weigh against"
        faults.append(Fault(place, message, True, "false"))
    if model.shared_expert and model.shared_intermediate_size is None:
        place = "model.shared_intermediate_size"
        faults.append(Fault(place, "profile custom needs every size", None, "a positive integer"))
    if model.expert_diversity_lambda and experts == 1:
        place, value = "model.expert_diversity_lambda", model.expert_diversity_lambda
        faults.append(Fault(place, "one expert has no other to differ from", value, "0"))
    return faults


def _not_applicable(model: ModelSpec, top_k: int) -> dict[str, str]:
    """Field -> why it does not apply to this routed model."""
    found: dict[str, str] = {}
    primary = ("top_k_primary_weight", "top_k_primary_weight_final")
    if model.mlp_type == "learned_router":
        found |= dict.fromkeys(primary, "a learned router weighs its routes itself")
        found["routing_strategy"] = "a learned router has no route table"
    else:
        found["router_aux_loss_weight"] = "only a learned router has a balance loss"
        if top_k == 1:
            found |= dict.fromkeys(primary, "with top_k 1 the weight is 1")
    if not model.learn_shared_routed_gates:
        gates = ("shared_gate_init", "routed_gate_init", "shared_gate_final", "routed_gate_final")
        found |= dict.fromkeys(gates, "without learn_shared_routed_gates there is no gate")
    if not model.shared_expert:
        keys = ("shared_intermediate_size", "shared_expert_chunk_tokens")
        found |= dict.fromkeys(keys, "without shared_expert there is no shared path")
    if not model.expert_diversity_lambda:
        found["expert_diversity_target"] = "at expert_diversity_lambda 0 nothing is penalised"
    return found


def _ramp_faults(spec: RunSpec) -> list[Fault]:
    faults: list[Fault] = []
    model, steps = spec.model, spec.training.steps
    if not model.is_routed:
        return []
    for prefix, ramp in RAMPS.items():
        ratio, ramp_steps = getattr(model, f"{prefix}_ratio"), getattr(model, f"{prefix}_steps")
        if not ramp.is_on(model.model_dump()):
            reason = f"nothing is ramped without {' or '.join(ramp.switches)}"
            faults += _given(model, {f"{prefix}_ratio": reason, f"{prefix}_steps": reason})
        elif ratio is not None and ramp_steps is not None:
            message = f"{prefix}_ratio says how long the ramp is already"
            faults.append(Fault(f"model.{prefix}_steps", message, ramp_steps, "one of the two"))
        elif ratio is not None and steps == 0:
            message = "no share can be taken of a run whose end is not planned"
            allowed = f"null, and {prefix}_steps given"
            faults.append(Fault(f"model.{prefix}_ratio", message, ratio, allowed))
        elif ramp_steps is not None and steps and ramp_steps > steps:
            message = f"the ramp is longer than the run's {steps} steps"
            faults.append(Fault(f"model.{prefix}_steps", message, ramp_steps, f"1 to {steps}"))
    return faults


def _training_faults(spec: RunSpec) -> list[Fault]:
    faults = []
    training = spec.training
    if training.seq_len > spec.model.max_position_embeddings:
        message = f"longer than model.max_position_embeddings {spec.model.max_position_embeddings}"
        allowed = f"1 to {spec.model.max_position_embeddings}"
        faults.append(Fault("training.seq_len", message, training.seq_len, allowed))
    whole, parts = training.global_batch_size, training.gradient_accumulation_steps
    if whole is not None and training.batch_size is not None:
        message = "training.global_batch_size says it already, over all processes"
        faults.append(Fault("training.batch_size", message, training.batch_size, UNSET))
    if whole is not None and whole % parts:
        message = f"the {parts} micro-batches of training.gradient_accumulation_steps do not divide"
        allowed = f"a multiple of {parts}"
        faults.append(Fault("training.global_batch_size", f"{message} it", whole, allowed))
    if training.compile_mode is not None and not training.compile:
        place = "training.compile_mode"
        value = training.compile_mode
        faults.append(Fault(place, "does not apply without compile", value, UNSET))
    if training.parallel == "fsdp" and training.compile:
        message = "blocks whose weights are gathered for each pass are not compiled"
        faults.append(Fault("training.compile", message, True, "false, or parallel: ddp"))
    if training.loss_backend == "liger" and training.label_smoothing:
        message = "liger's kernel returns only the smoothed loss, not the plain NLL"
        place = "training.loss_backend"
        faults.append(Fault(place, message, "liger", "auto or chunked with label_smoothing"))
    stop = training.stop_at_step
    if stop is not None and training.steps and stop > training.steps:
        message = f"the run ends after its {training.steps} steps"
        allowed = f"null or 1 to {training.steps}"
        faults.append(Fault("training.stop_at_step", message, stop, allowed))
    warmup = spec.schedule.warmup_steps
    if training.steps == 0:
        return faults + _open_ended_faults(spec)
    if warmup is not None and warmup > training.steps:
        message = f"longer than the run's {training.steps} steps"
        allowed = f"null or 0 to {training.steps}"
        faults.append(Fault("schedule.warmup_steps", message, warmup, allowed))
    return faults


def _open_ended_faults(spec: RunSpec) -> list[Fault]:
    """What a run to the end of its data (`training.steps: 0`) cannot have."""
    faults = []
    if spec.data.dataset != "fineweb" and spec.data.order != "sequential":
        message = "0 steps means one pass over the data in its order"
        faults.append(Fault("data.order", message, spec.data.order, "sequential"))
    if spec.schedule.decay != "constant":
        message = "a decay needs a planned end, and training.steps is 0"
        faults.append(Fault("schedule.decay", message, spec.schedule.decay, "constant"))
    if spec.schedule.warmup_steps is None:
        message = "no share can be taken of a run whose end is not planned (training.steps: 0)"
        faults.append(Fault("schedule.warmup_steps", message, None, "a number of steps"))
    return faults


def _optimizer_faults(optimizer: OptimizerSpec, model: ModelSpec) -> list[Fault]:
    faults = []
    not_applicable: dict[str, str] = {}
    scope = optimizer.muon_scope
    if optimizer.name != "muon_tr":
        names = [name for name in type(optimizer).model_fields if name.startswith("muon_")]
        not_applicable |= dict.fromkeys(names, f"does not apply to optimizer {optimizer.name!r}")
    elif scope != "all" and not model.is_routed:
        message = "a dense model has no experts that Muon could train"
        faults.append(Fault("optimizer.muon_scope", message, scope, "all"))
    elif scope == "expert_shared" and not model.shared_expert:
        message = "without model.shared_expert there is no shared path"
        faults.append(Fault("optimizer.muon_scope", message, scope, "expert or all"))
    for kind, exists in (("expert", model.is_routed), ("shared", bool(model.shared_expert))):
        if not exists:
            reason = f"this model has no {kind} matrices"
            not_applicable |= dict.fromkeys((f"{kind}_lr_scale", f"{kind}_weight_decay"), reason)
        elif optimizer.muon_scope and kind in MUON_KINDS[optimizer.muon_scope]:
            reason = f"Muon trains the {kind} matrices, at muon_lr"
            not_applicable[f"{kind}_lr_scale"] = reason
    for key, reason in not_applicable.items():
        if (value := getattr(optimizer, key)) is not None:
            faults.append(Fault(f"optimizer.{key}", reason, value, UNSET))
    if optimizer.name == "muon_tr" and (optimizer.muon_ns_steps or 0) > MOST_NS_STEPS:
        message = "five or six iterations are usual"
        place, value = "optimizer.muon_ns_steps", optimizer.muon_ns_steps
        faults.append(Fault(place, message, value, f"1 to {MOST_NS_STEPS}"))
    return faults
