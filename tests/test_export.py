"""`wb export`: the files alone, with plain PyTorch, give the logits of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import tiny_spec, untracked_run

from workbench.core.load_model import load_model
from workbench.errors import UserError
from workbench.export import export
from workbench.export_command import export as export_command
from workbench.run import RunOutcome
from workbench.track.store import Store

# What somebody does who has the folder, torch and safetensors, and nothing else.
OUTSIDE = """
import sys
from safetensors.torch import load_file, save_file
from model import load
ids = load_file("ids.safetensors")["ids"]
save_file({"logits": load(".")(ids)}, "logits.safetensors")
assert not any(name.split(".")[0] == "workbench" for name in sys.modules)
"""
GATED = {
    "learn_shared_routed_gates": True,
    "routed_gate_final": 0.9,
    "top_k_primary_weight_final": 0.9,
    "gate_schedule_ratio": 1.0,
}


def trained(folder: Path, **changes: Any) -> RunOutcome:
    return untracked_run(tiny_spec(folder, **changes), Store(folder / "mlruns"))


def logits_outside(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    save_file({"ids": ids}, folder / "ids.safetensors")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "logits.safetensors")["logits"]


def assert_same_logits(run: RunOutcome, out: Path, outside: bool, atol: float) -> None:
    model = load_model(run.folder, device="cpu").model
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(7))
    if outside:
        found = logits_outside(out, ids)
    else:
        from workbench.exported_model import load

        found = load(out)(ids)
    torch.testing.assert_close(found, model.logits(ids), rtol=0, atol=atol)


def test_others_compute_the_logits_of_the_run(tmp_path: Path) -> None:
    run = trained(tmp_path, model=GATED)
    out = tmp_path / "out"
    written = export(run.folder, run.record, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.py",
        "model.safetensors",
    ]
    config = json.loads((out / "config.json").read_text())
    assert config["run"]["id"] == run.record.id
    assert config["results"] == run.record.results.final
    assert config["tokenizer"]["sha256"] == run.record.effective.tokenizer.sha256
    assert config["weights"]["sha256"] == written.weights_sha256
    assert config["weights"]["tensors"].keys() == load_file(out / "model.safetensors").keys()
    assert written.parameters == run.record.params
    assert "license" not in config
    assert config["route_weights"][0] > 0.6  # where the ramp has brought it, not where it began
    assert_same_logits(run, out, outside=True, atol=1e-5)
    with pytest.raises(UserError, match="never overwritten"):
        export(run.folder, run.record, out)
    with pytest.raises(UserError, match="no checkpoint of this step"):
        export(run.folder, run.record, tmp_path / "other", step=3)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "atol"),
    [
        pytest.param({"model": {"mlp_type": "dense", "tie_word_embeddings": False,
                                "qk_norm": False}}, 1e-5, marks=pytest.mark.slow),
        ({"model": {"mlp_type": "learned_router", "top_k": 1, "attention_type": "mqa",
                    "num_key_value_heads": 1}}, 1e-5),
        pytest.param({"model": {"mlp_type": "learned_router", "shared_expert": False,
                                "shared_intermediate_size": None, "attention_type": "mha",
                                "num_key_value_heads": 4}}, 1e-5, marks=pytest.mark.slow),
        ({"training": {"precision": "bf16"}}, 0.02),
    ],
)  # fmt: skip
def test_every_kind_of_model(tmp_path: Path, changes: dict[str, Any], atol: float) -> None:
    run = trained(tmp_path, **changes)
    export(run.folder, run.record, tmp_path / "out")
    assert_same_logits(run, tmp_path / "out", outside=False, atol=atol)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path)
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("workbench.export.write_json", full)
        with pytest.raises(UserError, match="no space left"):
            export_command(run.record.name, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    assert not list(tmp_path.glob(".out*"))
    answer = export_command(run.record.name, tmp_path / "out", as_json=True)
    assert isinstance(answer.content, dict)
    assert answer.content["parameters"] == run.record.params
