"""Weights of the original runner in a checkpoint: the logits are those it computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from importing.legacy_runs import ORIGINAL
from safetensors.torch import load_file, save_file

from workbench.core.load_model import load_model
from workbench.errors import UserError
from workbench.importing.weights import import_weights

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("name", ["tr_gqa", "tr_mha", "dense_gqa"])
def test_the_logits_are_those_of_the_original(tmp_path: Path, name: str) -> None:
    weights, config = DATA / f"{name}.safetensors", DATA / f"{name}.json"
    kept = import_weights(weights, config, tmp_path, None)
    assert kept.parameters == json.loads(config.read_text())["params"]
    reference = load_file(weights)
    loaded = load_model(tmp_path, device="cpu")
    logits = loaded.model.logits(reference["input_ids"][:, :-1])
    torch.testing.assert_close(logits, reference["logits"], rtol=0, atol=2e-5)


def test_a_value_that_moved_stands_where_the_run_left_it(tmp_path: Path) -> None:
    """The route weight went from 0.5 to 0.85 over half the run: the weights say nothing of it."""
    config = json.loads((DATA / "tr_gqa.json").read_text())["config"]
    run = json.loads((ORIGINAL / "run_config.json").read_text())
    run["model_config"] = run["model_config"] | config
    record = tmp_path / "run_config.json"
    record.write_text(json.dumps(run))
    found = {}
    for step in (0, None):
        out = tmp_path / f"at-{step}"
        import_weights(DATA / "tr_gqa.safetensors", record, out, step)
        model = load_model(out, device="cpu").model
        found[step] = model.logits(load_file(DATA / "tr_gqa.safetensors")["input_ids"][:, :-1])
    reference = load_file(DATA / "tr_gqa.safetensors")["logits"]
    torch.testing.assert_close(found[0], reference, rtol=0, atol=2e-5)
    assert (found[None] - reference).abs().max() > 1e-3


def test_what_does_not_fit_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    good = DATA / "tr_gqa.safetensors"
    with pytest.raises(UserError, match="not the weights of this model"):
        import_weights(good, DATA / "dense_gqa.json", out, None)
    with pytest.raises(UserError, match="no such step"):
        import_weights(good, DATA / "tr_gqa.json", out, 3)
    with pytest.raises(UserError, match="no mlp_type"):
        import_weights(good, DATA / "token_shard" / "train" / "tokens.idx.json", out, None)
    with pytest.raises(UserError, match="not a safetensors file"):
        import_weights(DATA / "tr_gqa.json", DATA / "tr_gqa.json", out, None)
    tensors = load_file(good)
    routes = next(name for name in tensors if name.endswith("topk_token_to_expert"))
    save_file(tensors | {routes: tensors[routes].flip(0)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="route table"):
        import_weights(tmp_path / "other.safetensors", DATA / "tr_gqa.json", out, None)
    guided = json.loads((DATA / "tr_gqa.json").read_text())
    guided["config"]["use_mu_guidance"] = True
    (tmp_path / "guided.json").write_text(json.dumps(guided))
    with pytest.raises(UserError, match="what this package has not"):
        import_weights(good, tmp_path / "guided.json", out, None)
    assert not out.exists()
    import_weights(good, DATA / "tr_gqa.json", out, None)
    with pytest.raises(UserError, match="there are checkpoints here"):
        import_weights(good, DATA / "tr_gqa.json", out, None)
