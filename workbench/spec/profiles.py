"""The named model sizes, and how the sections of a spec are completed from them and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Profile:
    """Sizes of one named model; the totals they come to stand in the documentation."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    shared_intermediate_size: int


PROFILES: dict[str, Profile] = {
    "50m": Profile(224, 8, 7, 1, 128, 1024),
    "100m": Profile(384, 10, 8, 2, 128, 1536),
    "200m": Profile(512, 20, 8, 2, 256, 2496),
    "300m": Profile(896, 10, 14, 2, 256, 3584),
    "1b": Profile(1536, 20, 24, 4, 512, 6144),
    "8b": Profile(4096, 32, 32, 8, 3072, 12288),
}


@dataclass(frozen=True)
class Ramp:
    """A value that moves over the run: the fields that switch it on, its length when not given."""

    switches: tuple[str, ...]
    ratio: float
    zero_is_off: bool = False

    def is_on(self, model: Mapping[str, Any]) -> bool:
        """Whether this model section has a value to ramp."""
        given = [model.get(name) for name in self.switches]
        return any(given) if self.zero_is_off else any(value is not None for value in given)


# By the prefix of the fields `..._ratio` (of the run's steps) and `..._steps`.
RAMPS: dict[str, Ramp] = {
    "top_k_primary_weight_schedule": Ramp(("top_k_primary_weight_final",), 0.5),
    "gate_schedule": Ramp(("shared_gate_final", "routed_gate_final"), 0.5),
    "expert_diversity_schedule": Ramp(("expert_diversity_lambda",), 0.7, zero_is_off=True),
}

_EXPERTS: dict[str, Any] = {
    "shared_expert": True,
    "num_experts": 4,
    "top_k": 2,
    "learn_shared_routed_gates": False,
    "expert_diversity_lambda": 0.0,
}
_SHARED_PATH: dict[str, Any] = {
    "shared_intermediate_size": None,
    "shared_expert_chunk_tokens": 0,
}
_TABLE: dict[str, Any] = {"routing_strategy": "modulo_cyclic", "top_k_primary_weight": 0.5}
_ROUTER: dict[str, Any] = {"router_aux_loss_weight": 0.01}
_GATES: dict[str, Any] = {"shared_gate_init": 1.0, "routed_gate_init": 0.1}

DENSE_NULLS = (
    *_EXPERTS,
    *_SHARED_PATH,
    *_TABLE,
    *_ROUTER,
    *_GATES,
    "top_k_primary_weight_final",
    "shared_gate_final",
    "routed_gate_final",
    "expert_diversity_target",
    *(f"{prefix}_{unit}" for prefix in RAMPS for unit in ("ratio", "steps")),
)
"""The fields of the model section that only a routed feed-forward has."""

_MUON: dict[str, Any] = {
    "muon_scope": "expert",
    "muon_lr": 3e-3,
    "muon_momentum": 0.95,
    "muon_nesterov": True,
    "muon_ns_steps": 5,
    "muon_orthogonal_blend": 0.5,
    "muon_max_update_rms": 1.0,
}

MUON_KINDS: dict[str, tuple[str, ...]] = {
    "expert": ("expert",),
    "expert_shared": ("expert", "shared"),
    "all": ("expert", "shared", "matrix"),
}
"""Scope of Muon -> the kinds of matrices that it trains."""


def complete_model(given: dict[str, Any]) -> dict[str, Any]:
    """The model section with every size and default filled in.

    Values given by the user are never changed, also wrong ones: validation names them. What does
    not apply to the chosen kind stays null (absent here), so that giving it can be told from not.
    """
    full = {key: value for key, value in given.items() if value is not None}
    profile = PROFILES.get(str(full.setdefault("profile", "100m")))
    sizes = asdict(profile) if profile else {}
    attention = full.setdefault("attention_type", "gqa")
    dense = full.setdefault("mlp_type", "token_routed") == "dense"

    if attention == "mha":
        sizes["num_key_value_heads"] = full.get("num_attention_heads") or sizes.get(
            "num_attention_heads"
        )
    elif attention == "mqa":
        sizes["num_key_value_heads"] = 1
    if dense and profile:
        # The dense model of a profile has the width of all its paths together.
        sizes["intermediate_size"] = profile.intermediate_size + profile.shared_intermediate_size
    shared_width = sizes.pop("shared_intermediate_size", None)
    for key, value in sizes.items():
        full.setdefault(key, value)
    if dense:
        return full

    defaults = dict(_EXPERTS)
    if full.get("shared_expert", True) is not False:
        defaults |= _SHARED_PATH | {"shared_intermediate_size": shared_width}
    if full["mlp_type"] == "learned_router":
        defaults |= _ROUTER
    else:
        defaults |= _TABLE
        if full.get("top_k") == 1:
            defaults.pop("top_k_primary_weight")
    if full.get("learn_shared_routed_gates"):
        defaults |= _GATES
    if full.get("expert_diversity_lambda"):
        defaults["expert_diversity_target"] = "down"
    for prefix, ramp in RAMPS.items():
        if ramp.is_on(full) and f"{prefix}_steps" not in full:
            defaults[f"{prefix}_ratio"] = ramp.ratio
    for key, value in defaults.items():
        full.setdefault(key, value)
    return full


def complete_optimizer(given: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The optimizer section with the defaults that depend on its kind and on the model's.

    Expert and shared matrices decay like all others under AdamW, and by little under Muon, whose
    updates do not shrink with the gradient.
    """
    full = {key: value for key, value in given.items() if value is not None}
    routed = model.get("mlp_type") != "dense"
    if full.get("name") == "muon_tr":
        if not routed:
            full.setdefault("muon_scope", "all")
        for key, value in _MUON.items():
            full.setdefault(key, value)
    on_muon = MUON_KINDS.get(str(full.get("muon_scope")), ())
    shared = routed and model.get("shared_expert") is not False
    for kind, exists, decay in (("expert", routed, 0.005), ("shared", shared, 0.01)):
        if not exists:
            continue
        if kind in on_muon:
            full.setdefault(f"{kind}_weight_decay", decay)
        else:
            full.setdefault(f"{kind}_lr_scale", 1.0)
            full.setdefault(f"{kind}_weight_decay", full.get("weight_decay", 0.1))
    return full
