"""The named model sizes, and how a model section is completed from them."""

from __future__ import annotations

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

SIZES = tuple(asdict(PROFILES["100m"]))

# What only a routed feed-forward has: null in the resolved spec of a dense model.
EXPERT_DEFAULTS: dict[str, Any] = {
    "shared_expert": True,
    "shared_intermediate_size": None,
    "shared_expert_chunk_tokens": 0,
    "num_experts": 4,
    "top_k": 2,
    "top_k_primary_weight": 0.5,
    "routing_strategy": "modulo_cyclic",
    "learn_shared_routed_gates": False,
    "shared_gate_init": 1.0,
    "routed_gate_init": 0.1,
}


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

    defaults = EXPERT_DEFAULTS | {"shared_intermediate_size": shared_width}
    if full.get("shared_expert") is False:
        for key in ("shared_intermediate_size", "shared_expert_chunk_tokens"):
            defaults.pop(key)
        defaults["learn_shared_routed_gates"] = False
    if full.get("top_k") == 1:
        defaults.pop("top_k_primary_weight")
    if not full.get("learn_shared_routed_gates"):
        defaults.pop("shared_gate_init")
        defaults.pop("routed_gate_init")
    for key, value in defaults.items():
        full.setdefault(key, value)
    return full
