"""Predicted memory against the tensors that training really holds, and against its processes."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.tiny_runs import tiny_parts
from workbench.core import loss_settings
from workbench.core.checkpoint import save_checkpoint
from workbench.core.counts import count_parameters
from workbench.core.footprint import (
    LEAST_TOKENS,
    TILE_TOKENS,
    Activations,
    Footprint,
    Matmul,
    checkpoint_bytes,
    footprint,
    loss_bytes,
    model_parameters,
    whole_weights_bytes,
)
from workbench.core.loss_settings import LossSettings
from workbench.core.losses import linear_cross_entropy
from workbench.core.model import Transformer, build_model, training_forward
from workbench.core.optim import kind_of
from workbench.core.precision import FLOAT32, Precision, takes_float32
from workbench.core.train import train
from workbench.core.workspace import Workspace
from workbench.spec.profiles import PROFILES
from workbench.spec.run import ModelSpec, RunSpec

ROOT = Path(__file__).parents[2]
BATCH, LENGTH, VOCABULARY = 2, 48, 300
PRECISIONS: dict[Matmul, Precision] = {
    "float32": FLOAT32,
    "native": Precision(torch.bfloat16, "native"),
    "upcast": Precision(torch.bfloat16, "upcast"),
}
SMALL: dict[str, Any] = {
    "profile": "custom",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
ROUTED: dict[str, Any] = SMALL | {"shared_intermediate_size": 80}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SMALL | {"mlp_type": "dense"},
    "dense mha": SMALL | {"mlp_type": "dense", "attention_type": "mha", "num_key_value_heads": 8},
    "no query norm": SMALL | {"mlp_type": "dense", "qk_norm": False},
    "untied": SMALL | {"mlp_type": "dense", "tie_word_embeddings": False},
    "token-routed": ROUTED,
    "one expert": ROUTED | {"num_experts": 1, "top_k": 1},
    "no shared path": SMALL | {"shared_expert": False, "top_k": 1},
    "gates": ROUTED | {"learn_shared_routed_gates": True},
    "chunks": ROUTED | {"shared_expert_chunk_tokens": 32},
    "one chunk": ROUTED | {"shared_expert_chunk_tokens": 4096},
    "router": ROUTED | {"mlp_type": "learned_router"},
    "router of one": ROUTED | {"mlp_type": "learned_router", "top_k": 1},
}
COMPILED = (("token-routed", "native"),)
"""Compiled in the default suite; the others take two minutes."""


def model_spec(**fields: object) -> ModelSpec:
    return ModelSpec.model_validate(fields)


def kept_by(model: Transformer, compile_mode: str | None = None) -> int:
    """Bytes of all storages that a forward pass keeps, other than those of the model itself."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}  # the tensors too, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(training_forward(model, compile_mode)(ids).hidden)  # the loss does
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)


@pytest.mark.parametrize("matmul", PRECISIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_activations_are_what_autograd_keeps(kind: str, matmul: Matmul) -> None:
    spec = model_spec(**MODELS[kind])
    model = build_model(spec, VOCABULARY, 0, PRECISIONS[matmul])
    assert Activations(spec, BATCH * LENGTH, matmul).kept(checkpointed=False) == kept_by(model)


@pytest.mark.parametrize(
    ("kind", "matmul"),
    [
        pytest.param(kind, matmul, marks=[] if (kind, matmul) in COMPILED else pytest.mark.slow)
        for kind, matmul in itertools.product(MODELS, PRECISIONS)
    ],
)
def test_compiled_blocks_keep_less(kind: str, matmul: Matmul) -> None:
    spec = model_spec(**MODELS[kind])
    model = build_model(spec, VOCABULARY, 0, PRECISIONS[matmul])
    torch.compiler.reset()  # it compiles the same code for eight models at most
    predicted = Activations(spec, BATCH * LENGTH, matmul, compiled=True).kept(checkpointed=False)
    assert predicted == kept_by(model, "default")
    assert predicted < Activations(spec, BATCH * LENGTH, matmul).kept(checkpointed=False)


@pytest.mark.parametrize("matmul", PRECISIONS)
def test_checkpointed_blocks_keep_their_input_and_the_inside_of_one(matmul: Matmul) -> None:
    spec = model_spec(**ROUTED)
    model = build_model(spec, VOCABULARY, 0, PRECISIONS[matmul], grad_checkpointing=True)
    predicted = Activations(spec, BATCH * LENGTH, matmul)
    assert predicted.kept(checkpointed=True) == kept_by(model) + predicted.block()


@pytest.mark.parametrize("profile", PROFILES)
def test_parameters_are_those_of_the_built_model(profile: str) -> None:
    kinds = [
        {"attention_type": attention, "mlp_type": kind}
        for attention, kind in itertools.product(
            ("mha", "gqa", "mqa"), ("dense", "token_routed", "learned_router")
        )
    ] + [{"learn_shared_routed_gates": True}, {"shared_expert": False}, {"qk_norm": False}]
    for fields in kinds:
        spec = model_spec(profile=profile, **fields, tie_word_embeddings=len(fields) > 1)
        with torch.device("meta"):
            model = build_model(spec, 1000, 0, FLOAT32)
        built = Counter((kind_of(n, p), p.numel()) for n, p in model.named_parameters())
        predicted = list(model_parameters(spec, 1000))
        assert Counter((one.kind, one.size) for one in predicted) == built, fields
        assert sum(one.size for one in predicted) == count_parameters(spec, 1000).total


OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "adamw"},
    *({"name": "muon_tr", "muon_scope": scope} for scope in ("expert", "expert_shared", "all")),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.get("muon_scope", "adamw"))
def test_weights_gradients_moments_and_checkpoint_are_those_of_a_run(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    parts = tiny_parts(tmp_path, optimizer=optimizer)
    state, gradients = parts.state, 0

    def count(*_: object) -> None:
        nonlocal gradients
        gradients = sum(p.grad.nbytes for p in state.model.parameters() if p.grad is not None)

    state.optimizers[0].register_step_pre_hook(count)
    next(train(parts.spec, state, parts.forward, parts.loss))

    vocabulary = parts.data.tokenizer.vocab_size
    found = footprint(parts.spec, vocabulary, "float32")
    model = state.model
    route_weights = sum(b.nbytes for n, b in model.named_buffers() if n.endswith("route_weights"))
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert found.weights == weights - route_weights  # a few numbers
    assert found.gradients == gradients
    moments = [
        value
        for each in state.optimizers
        for values in each.state.values()
        for name, value in values.items()
        if name != "step"
    ]
    assert found.optimizer == sum(value.nbytes for value in moments)

    saved = save_checkpoint(state, tmp_path / "checkpoints", {}, keep=1)
    payload = {}
    for name in ("model", "optimizer"):
        with safe_open(saved / f"{name}.safetensors", "pt") as file:
            payload[name] = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    assert checkpoint_bytes(parts.spec, vocabulary) == sum(payload.values())
    assert whole_weights_bytes(parts.spec, vocabulary) == payload["model"]


@pytest.mark.parametrize("matmul", PRECISIONS)
def test_the_loss_works_in_the_memory_predicted_for_it(matmul: Matmul) -> None:
    precision = PRECISIONS[matmul]
    spec = run_spec(model_spec(**ROUTED), loss_block_vocab=64, loss_chunk_tokens=32)
    tokens = spec.training.batch_size * spec.training.seq_len
    weight = torch.randn(VOCABULARY, 64, requires_grad=True)
    hidden = torch.randn(tokens, 64).to(precision.compute).requires_grad_()
    workspace = Workspace(direct=True)
    linear_cross_entropy(
        hidden,
        weight,
        torch.randint(0, VOCABULARY, (tokens,)),
        LossSettings(block_vocab=64, chunk_tokens=32),
        precision,
        workspace,
    ).objective.backward()
    scratch = sum(flat.nbytes for flat in workspace._scratch.values())
    # Statistics twice in float64 and their factors, and the gradient of the hidden states.
    more = 20 * math.ceil(VOCABULARY / 64) * 32 + 4 * hidden.numel()
    more += hidden.nbytes if matmul != "float32" else 0
    if matmul == "native" and takes_float32(precision, torch.device("cpu")):
        more += 2 * (64 - 32) * 64  # predicted for units that put out bfloat16
    assert loss_bytes(spec, VOCABULARY, matmul) == scratch + more


def run_spec(model: ModelSpec, **training: Any) -> RunSpec:
    sizes = {"batch_size": BATCH, "seq_len": LENGTH}
    return RunSpec.model_validate(
        {
            "name": "predicted",
            "model": model.model_dump(),
            "data": {"dataset": "random"},
            "training": sizes | training,
        }
    )


def test_accumulation_costs_a_gradient_of_the_head_and_checkpointing_saves_some() -> None:
    spec = model_spec(profile="100m")
    one = footprint(run_spec(spec), 200_019, "float32")
    for steps in (2, 8):
        more = footprint(run_spec(spec, gradient_accumulation_steps=steps), 200_019, "float32")
        assert more.loss == one.loss + 4 * 200_019 * spec.hidden_size
        assert vars(more) | {"loss": one.loss} == vars(one)
    less = footprint(run_spec(spec, grad_ckpt=True), 200_019, "float32")
    assert less.activations < one.activations / 3
    assert vars(less) | {"activations": one.activations} == vars(one)


def test_tiles_are_those_of_the_loss() -> None:
    assert (TILE_TOKENS, LEAST_TOKENS) == (loss_settings.TILE_TOKENS, loss_settings.LEAST_TOKENS)


def test_only_tensors_of_the_heap_leave_holes() -> None:
    small = footprint(run_spec(model_spec(profile="100m")), 200_019, "float32")
    assert small.holes == 0  # gradients take more than a pass of so few tokens leaves
    run = run_spec(model_spec(profile="100m", max_position_embeddings=4096), seq_len=1024)
    some = footprint(run, 200_019, "float32")
    assert 0 < some.holes < some.activations
    checkpointed = run_spec(run.model, seq_len=1024, grad_ckpt=True)
    assert footprint(checkpointed, 200_019, "float32").holes == some.holes
    # At 4,096 x 8 tokens of 4,096 wide tensors only the small per-row statistics are on the heap.
    huge = run_spec(
        model_spec(profile="8b", max_position_embeddings=4096), batch_size=8, seq_len=4096
    )
    assert footprint(huge, 200_019, "native").holes == 0


def test_the_peak_is_the_sum_of_its_parts() -> None:
    assert Footprint(1, 2, 4, 8, 16, 32, 64, 128).peak == 255


def test_predicting_imports_no_torch() -> None:
    code = "import sys, workbench.core.footprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MEASURE = """
import json, sys
from pathlib import Path
from workbench.process import prepare_process
prepare_process()
import psutil
from workbench.core.memory import peak_bytes
from workbench.core.train import train
from workbench.run import build
from workbench.spec.load import load_spec
from workbench.track.store import Store

spec = load_spec(Path(sys.argv[1]), sys.argv[3:])
before = psutil.Process().memory_info().rss
parts = build(spec, Store(Path(sys.argv[2])))
for result in train(spec, parts.state, parts.forward, parts.loss):
    if result.step == 4:
        break
matmul = parts.precision.matmul
print(json.dumps({"bytes": peak_bytes(parts.device) - before, "matmul": matmul}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator's settings")
@pytest.mark.parametrize("arm", ["100m_mha", "100m_mha_dense"])
@pytest.mark.parametrize(
    "changes",
    [
        ("precision=fp32",),
        ("precision=fp32", "compile=false"),
        ("precision=fp32", "batch_size=2", "seq_len=512"),
        ("precision=fp32", "grad_ckpt=true"),
        ("precision=bf16", "batch_size=2"),
        ("precision=bf16", "batch_size=2", "compile=false"),
    ],
    ids=" ".join,
)
def test_the_peak_of_a_real_run(tmp_path: Path, arm: str, changes: tuple[str, ...]) -> None:
    """A fresh process builds and trains as a run does; what counts is what it takes above its
    imports. The second update has all moments in place, in two more the heap finds its size."""
    from workbench.spec.load import load_spec

    path = ROOT / "experiments" / f"{arm}.yaml"
    overrides = [f"training.{change}" for change in changes]
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    measured = json.loads(done.stdout.splitlines()[-1])
    predicted = footprint(load_spec(path, overrides), 200_019, measured["matmul"])
    assert predicted.peak == pytest.approx(measured["bytes"], rel=0.15), vars(predicted)
