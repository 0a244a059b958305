"""Parameters and FLOPs predicted from the spec, against hand counts and built models."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from workbench.core.counts import count_parameters, flops_per_token, training_flops
from workbench.core.model import build_model
from workbench.core.precision import FLOAT32
from workbench.spec.profiles import PROFILES
from workbench.spec.run import ModelSpec

O200K = 200_019


def model_spec(**fields: object) -> ModelSpec:
    return ModelSpec.model_validate(fields)


ATTENTIONS = ("mha", "gqa", "mqa")
FEED_FORWARDS: list[dict[str, object]] = [
    {"mlp_type": "dense"},
    *(
        {"mlp_type": kind, **more}
        for kind in ("token_routed", "learned_router")
        for more in (
            {},
            {"learn_shared_routed_gates": True},
            {"shared_expert": False, "top_k": 1},
        )
    ),
]
KINDS = [
    {"attention_type": attention, **feed_forward}
    for attention, feed_forward in itertools.product(ATTENTIONS, FEED_FORWARDS)
]
KINDS += [one | {"tie_word_embeddings": False} for one in FEED_FORWARDS] + [{"qk_norm": False}]


@pytest.mark.parametrize("profile", PROFILES)
def test_prediction_equals_the_built_model(profile: str) -> None:
    for kind in KINDS:
        spec = model_spec(profile=profile, **kind)
        with torch.device("meta"):
            model = build_model(spec, 1000, 0, FLOAT32)
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        counts = count_parameters(spec, 1000)
        assert counts.total == sum(sizes.values()), kind
        experts = sum(n for name, n in sizes.items() if name.endswith("_proj_w"))
        assert counts.experts == experts
        unused = 0
        if spec.is_routed:
            assert spec.top_k
            assert spec.num_experts
            unused = experts // spec.num_experts * (spec.num_experts - spec.top_k)
        assert counts.active == counts.total - unused
        vocabulary = {"embed_tokens.weight", "lm_head.weight"} & sizes.keys()
        assert counts.embedding == sum(sizes[name] for name in vocabulary)


@pytest.mark.parametrize(
    "arm",
    [
        {"attention_type": "mha", "mlp_type": "dense", "intermediate_size": 1456},
        {
            "attention_type": "mha",
            "mlp_type": "token_routed",
            "shared_intermediate_size": 1296,
            "intermediate_size": 160,
        },
        {"attention_type": "gqa", "mlp_type": "dense", "intermediate_size": 1648},
        {
            "attention_type": "gqa",
            "mlp_type": "token_routed",
            "shared_intermediate_size": 1392,
            "intermediate_size": 256,
        },
    ],
)
def test_the_four_matched_arms_have_one_size(arm: dict[str, object]) -> None:
    assert count_parameters(model_spec(profile="100m", **arm), O200K).total == 99_487_680


@pytest.mark.parametrize(
    ("profile", "total"),
    [
        ("50m", 51.9e6),
        ("100m", 99.7e6),
        ("200m", 200_081_920),
        ("300m", 300.8e6),
        ("1b", 1030.8e6),
        ("8b", 8201.5e6),
    ],
)
def test_profile_totals(profile: str, total: float) -> None:
    tolerance = 0 if isinstance(total, int) else 0.05e6
    found = count_parameters(model_spec(profile=profile), O200K).total
    assert found == pytest.approx(total, abs=tolerance, rel=0)


TINY = {
    "profile": "custom",
    "attention_type": "gqa",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
}


def test_hand_count_dense_tied_and_untied() -> None:
    # Per layer: q, o 64 each; k, v 32 each; q/k norms 2 + 2; norms 16; feed-forward 3 * 8 * 12.
    expected = 10 * 8 + 2 * (2 * 64 + 2 * 32 + 4 + 16 + 288) + 8
    counts = count_parameters(model_spec(**TINY, mlp_type="dense"), 10)
    assert (counts.total, counts.active, counts.embedding, counts.experts) == (
        expected,
        expected,
        80,
        0,
    )
    untied = count_parameters(model_spec(**TINY, mlp_type="dense", tie_word_embeddings=False), 10)
    assert (untied.total, untied.embedding) == (expected + 80, 160)


def test_hand_count_of_four_experts_with_one_route() -> None:
    spec = model_spec(**TINY, num_experts=4, top_k=1, shared_intermediate_size=5)
    counts = count_parameters(spec, 10)
    assert counts.total == 10 * 8 + 2 * (2 * 64 + 2 * 32 + 4 + 16 + 288 + 3 * 8 * 5) + 8
    assert counts.experts == 2 * 288
    assert counts.total - counts.active == 2 * 288 * 3 // 4


def test_flops_count_the_vocabulary_once_and_active_experts_only() -> None:
    tied = model_spec(**TINY, num_experts=4, top_k=1, shared_intermediate_size=5)
    active = count_parameters(tied, 10).active
    assert flops_per_token(tied, 10, 32) == 6 * active + 6 * 2 * 32 * 8
    untied = tied.model_copy(update={"tie_word_embeddings": False})
    assert flops_per_token(untied, 10, 32) == flops_per_token(tied, 10, 32)


@pytest.mark.parametrize("kind", ["dense", "token_routed", "learned_router"])
def test_flops_are_those_of_the_products_that_a_model_makes(kind: str) -> None:
    """Against PyTorch's own counter: the head by itself, and the forward pass of a model whose
    experts are all in use. Attention is counted in full there, for it has no mask; norms are in 6 N
    and not in products, which is next to nothing."""
    routes = {"num_experts": 2, "top_k": 2, "shared_intermediate_size": 40}
    routes = routes if kind != "dense" else {}
    spec = model_spec(**(TINY | {"hidden_size": 64, "mlp_type": kind}), **routes)
    model = build_model(spec, 50, 0, FLOAT32)
    length = 32
    ids = torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        (model(ids) @ model.head_weight.t()).sum().backward()
    found = training_flops(spec, 50, length)
    expected = (found.weights + 2 * found.attention) * length
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)
    assert found.total == found.forward + found.backward == found.weights + found.attention
    assert found.backward == 2 * found.forward


def test_counting_imports_no_torch() -> None:
    code = "import sys, workbench.core.counts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
