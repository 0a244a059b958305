"""The model of an original run in the terms of a run spec, or what keeps it from being told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.importing.draft import Draft
from workbench.spec.profiles import DENSE_NULLS

DENSE = ("swiglu", "dense")  # what it called a dense feed-forward
_KINDS = {
    **dict.fromkeys(DENSE, "dense"),
    "token_routed": "token_routed",
    "learned_router": "learned_router",
}

_SAME = (
    "attention_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "rope_theta",
    "tie_word_embeddings",
)
_ROUTED = ("num_experts", "top_k", "shared_expert", "shared_intermediate_size")
_GATES = ("shared_gate_init", "routed_gate_init", "shared_gate_final", "routed_gate_final")

# Mechanisms that this package does not have, with the values at which they do nothing.
_OFF: dict[str, Any] = {
    "attention_dropout": 0.0,
    "causal_context_fusion_size": 0,
    "causal_delta_collision_normalized": False,
    "causal_delta_lexical_forge": False,
    "causal_delta_lexical_values": False,
    "causal_delta_occurrence_address": False,
    "causal_stable_delta": False,
    "expert_initialization": "gpt_normal",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "learn_hash_channel_modulation": False,
    "learn_hash_pair_gates": False,
    "lexical_zipf_mode": "uniform",
    "lsh_bits": 0,
    "lsh_routing": False,
    "norm_eps": 1e-6,
    "norm_type": "rmsnorm",
    "rope_fraction": 1.0,
    "rope_type": "standard",
    "routed_output_scale": 1.0,
    "routed_output_scale_first_layer": None,
    "routed_output_scale_last_layer": None,
    "shared_output_scale": 1.0,
    "shared_output_scale_first_layer": None,
    "shared_output_scale_last_layer": None,
    "sliding_window": None,
    "static_expert_capacity": False,
    "use_mu_guidance": False,
    "use_mu_norm": False,
    "use_mup_attn_scale": False,
    "use_mup_init": False,
    "use_mup_output_mult": False,
}
# In the arguments alone.
_OFF_ARGS: dict[str, Any] = {"paired_dense_init": False}


def model_settings(draft: Draft, args: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Records the model's settings; without its kind, where it had what has no name here."""
    kind = _KINDS.get(str(config.get("mlp_type")))
    other = {key: config[key] for key, off in _OFF.items() if key in config and config[key] != off}
    other |= {key: args[key] for key, off in _OFF_ARGS.items() if key in args and args[key] != off}
    if kind is None:
        other["mlp_type"] = config.get("mlp_type")
    if other:
        why = "the model had what this package has no name for, so it equals no other"
        draft.correct("model.mlp_type", other, None, why)
    else:
        draft.setting("model.mlp_type", kind)
    draft.setting("model.profile", "custom")
    for key in _SAME:
        if key in config:
            draft.setting(f"model.{key}", config[key])
    if "use_qk_norm" in config:
        draft.setting("model.qk_norm", config["use_qk_norm"])
    _heads(draft, config)
    if kind == "dense":
        for key in DENSE_NULLS:
            draft.setting(f"model.{key}", None)
    elif kind is not None:
        _experts(draft, args, config, kind)


def _heads(draft: Draft, config: Mapping[str, Any]) -> None:
    """Multi-head attention has as many key/value heads as heads, whatever was recorded."""
    heads, recorded = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if config.get("attention_type") == "mha" and heads != recorded:
        draft.setting("model.num_key_value_heads", heads)
        why = "multi-head attention forced as many as heads, and the record held the profile's"
        draft.correct("model.num_key_value_heads", recorded, heads, why)


def _experts(draft: Draft, args: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> None:
    """The settings of a routed feed-forward; what does not apply to its kind is null."""
    for key in _ROUTED:
        if key in config:
            draft.setting(f"model.{key}", config[key])
    width, experts = config.get("intermediate_size"), config.get("num_experts")
    if isinstance(width, int) and isinstance(experts, int) and experts and width % experts:
        kept = width // experts * experts
        draft.setting("model.intermediate_size", kept)
        why = f"it is shared by {experts} experts, and what could not be divided was cut off"
        draft.correct("model.intermediate_size", width, kept, why)
    if "shared_expert_chunk_tokens" in config:
        draft.setting("model.shared_expert_chunk_tokens", config["shared_expert_chunk_tokens"])
    _ramp(draft, args, "top_k_primary_weight", kind == "token_routed")
    table = kind == "token_routed"
    draft.setting("model.routing_strategy", config.get("routing_strategy") if table else None)
    weight = args.get("router_aux_loss_weight")
    if table or weight is not None:
        draft.setting("model.router_aux_loss_weight", None if table else weight)
    gates = config.get("use_shared_routed_gates")
    if gates is not None:
        draft.setting("model.learn_shared_routed_gates", gates)
        for key in _GATES:
            value = config.get(key, args.get(key))
            draft.setting(f"model.{key}", value if gates else None)
        final = gates and any(args.get(key) is not None for key in _GATES[2:])
        draft.setting(
            "model.gate_schedule_ratio", args.get("gate_schedule_ratio") if final else None
        )
        draft.setting("model.gate_schedule_steps", None)
    penalty = args.get("expert_diversity_lambda")
    if penalty is not None:
        draft.setting("model.expert_diversity_lambda", penalty)
        for key in ("target", "schedule_ratio"):
            value = args.get(f"expert_diversity_{key}") if penalty else None
            draft.setting(f"model.expert_diversity_{key}", value)
        draft.setting("model.expert_diversity_schedule_steps", None)


def _ramp(draft: Draft, args: Mapping[str, Any], name: str, applies: bool) -> None:
    """A value with its end and the share of the run it takes; null where it does not apply."""
    final = args.get(f"{name}_final")
    for key in (name, f"{name}_final", f"{name}_schedule_ratio"):
        ramped = key == name or final is not None
        draft.setting(f"model.{key}", args.get(key) if applies and ramped else None)
    draft.setting(f"model.{name}_schedule_steps", None)
