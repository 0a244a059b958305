"""Runs of seconds for the tests: a corpus of made-up sentences, byte tokens, two narrow layers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from workbench import run as runner
from workbench.run import Components, RunOutcome, build
from workbench.spec.run import RunSpec
from workbench.track.events import NullTracker
from workbench.track.store import Store

DOCUMENTS = 60
_WORDS = ["the", "a", "cat", "dog", "sees", "likes", "old", "small", "tree", "river", "and", "not"]

ROUTED = {
    "profile": "custom",
    "attention_type": "gqa",
    "mlp_type": "token_routed",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "shared_intermediate_size": 64,
}
DENSE = {key: value for key, value in ROUTED.items() if key != "shared_intermediate_size"}
DENSE |= {"mlp_type": "dense", "intermediate_size": 96}


def write_corpus(path: Path) -> Path:
    """Documents of 1 to 40 words, apart by blank lines; the same ones every time."""
    draw = random.Random(5)
    texts = [
        f"{number} " + " ".join(draw.choices(_WORDS, k=draw.randint(1, 40)))
        for number in range(DOCUMENTS)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(texts) + "\n")
    return path


def sections(folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """The sections of the tiny spec, each with its changes laid over it."""
    base: dict[str, dict[str, Any]] = {
        "model": ROUTED,
        "tokenizer": {"name": "bytes"},
        "data": {
            "dataset": "text",
            "text_file": str(write_corpus(folder / "corpus.txt")),
            "text_unit": "blank_line",
            "held_out_ratio": 0.2,
        },
        "training": {"steps": 4, "batch_size": 4, "seq_len": 32},
        "optimizer": {"lr": 3e-3},
        "evaluation": {"eval_steps": 2},
        "telemetry": {"log_steps": 1},
    }
    if changes.get("model", {}).get("mlp_type") == "dense":
        base["model"] = DENSE
    return {name: base.get(name, {}) | changes.get(name, {}) for name in base | changes}


def tiny_spec(folder: Path, name: str = "tiny", seed: int = 42, **changes: Any) -> RunSpec:
    """A spec that trains in less than a second."""
    return RunSpec.model_validate({"name": name, "seed": seed, **sections(folder, **changes)})


def tiny_parts(folder: Path, **changes: Any) -> Components:
    """Everything that a tiny run trains with."""
    return build(tiny_spec(folder, **changes), Store(folder / "mlruns"))


def untracked_run(spec: RunSpec, store: Store, command: list[str] | None = None) -> RunOutcome:
    """A run that nobody follows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
        return runner.run(spec, store, command or ["run", "tiny.yaml"], quiet=True)
