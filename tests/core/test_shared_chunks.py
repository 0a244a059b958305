"""Chunks of the shared path: the same run up to rounding, in less memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_parts

from workbench.core.train import train

PEAK = """
import sys
from pathlib import Path
import torch
from workbench.core.moe import TokenRouted
from workbench.core.precision import FLOAT32
from workbench.spec.run import ModelSpec

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

spec = ModelSpec.model_validate({
    "profile": "custom", "mlp_type": "token_routed", "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8,
    "shared_intermediate_size": 1024, "shared_expert_chunk_tokens": int(sys.argv[1]),
})
layer = TokenRouted(spec, 64, 0, FLOAT32)
torch.manual_seed(0)
for parameter in layer.parameters():
    torch.nn.init.normal_(parameter, 0, 0.1)
x = torch.randn(8, 1024, 16).requires_grad_()
ids = torch.randint(64, (8, 1024))
layer(x[:, :16], ids[:, :16])[0].sum().backward()  # what is loaded at its first call
x.grad = None
for parameter in layer.parameters():
    parameter.grad = None
before = peak()
y, _ = layer(x, ids)
y.square().mean().backward()
print(peak() - before, *(float(p.grad.double().norm()) for p in (x, *layer.parameters())))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from /proc")
def test_they_lower_the_peak_of_forward_and_backward() -> None:
    found = {}
    for chunk in (0, 64):
        command = [sys.executable, "-c", PEAK, str(chunk)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[chunk] = [float(word) for word in done.stdout.split()]
    assert found[64][1:] == pytest.approx(found[0][1:], rel=1e-6)
    # A hidden activation [T, 1024] is 33,554 kB; the whole path holds several of them at a time.
    assert found[0][0] > 4 * 33_554
    assert found[64][0] < 0.4 * found[0][0], found


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({}, {}),
        ({"mlp_type": "learned_router", "learn_shared_routed_gates": True}, {"grad_ckpt": True}),
    ],
)
def test_they_change_a_run_by_rounding_alone(
    tmp_path: Path, model: dict[str, Any], training: dict[str, Any], chunk: int
) -> None:
    runs = []
    for size in (0, chunk):
        parts = tiny_parts(
            tmp_path,
            model={**model, "shared_expert_chunk_tokens": size},
            training={**training, "max_grad_norm": 0.0},
        )
        runs.append([(r.objective, r.grad_norm) for r in train(parts.spec, parts.state)])
        widths = {p.shape for n, p in parts.state.model.named_parameters() if "shared_up" in n}
        assert widths == {torch.Size([64, 64])}
    whole, chunked = runs
    for one, other in zip(whole, chunked, strict=True):
        assert other[0] == pytest.approx(one[0], rel=1e-6)
    assert chunked[0][1] == pytest.approx(whole[0][1], rel=1e-6)
