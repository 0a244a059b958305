"""Complete records of many kinds of run, with the facts that the runner itself finds.

Nothing is trained: points and interval are those that the plan would reach.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fake_runs import full_record, sha
from parquet_streams import stream_spec, three_files
from test_token_runs import token_spec
from tiny_runs import tiny_spec

from workbench.run import build, new_record
from workbench.spec.run import RunSpec
from workbench.track.record import IntervalFacts, Point, RunRecord
from workbench.track.store import Store

STEPS = 16
GATES = {"learn_shared_routed_gates": True, "shared_gate_final": 0.5, "routed_gate_final": 0.5}
RAMPS = {**GATES, "top_k_primary_weight_final": 0.8, "expert_diversity_lambda": 0.01}
MUON = {"name": "muon_tr"}
LONG: dict[str, Any] = {"training": {"steps": STEPS, "seq_len": 32, "batch_size": 4}}


def _tiny(folder: Path, name: str, **changes: Any) -> RunSpec:
    return tiny_spec(folder, name, **{**LONG, **changes})


KINDS: dict[str, Callable[[Path], RunSpec]] = {
    "token_routed": lambda folder: _tiny(
        folder,
        "token_routed",
        model={**RAMPS, "gate_schedule_steps": 5, "expert_diversity_schedule_steps": 7},
        schedule={"warmup_steps": 3},
        tracking={"uri": "http://localhost:5000", "tags": {"team": "a"}},
    ),
    "dense": lambda folder: _tiny(
        folder,
        "dense",
        model={"mlp_type": "dense"},
        training={**LONG["training"], "batch_size": None, "global_batch_size": 4},
        evaluation={"stride": 8, "eval_documents": 3},
        optimizer={"name": "muon_tr"},
    ),
    "learned_router": lambda folder: _tiny(
        folder,
        "learned_router",
        model={"mlp_type": "learned_router"},
        schedule={"decay": "constant"},
        data={"held_out": [{"name": "more", "path": str(_more(folder))}]},
    ),
    "muon": lambda folder: _tiny(
        folder,
        "muon",
        optimizer={**MUON, "muon_scope": "all"},
        model={**RAMPS, "top_k_primary_weight_schedule_steps": 4},
        training={**LONG["training"], "stop_at_step": 15},
    ),
    "tokens": lambda folder: _longer(token_spec("tokens", {"vocab_size": 512})),
    "fineweb": lambda folder: stream_spec(
        three_files(folder / "stream")[0], "fineweb", training={**LONG["training"]}
    ),
}
NAMES = (*KINDS, "hub", "compiled")


def _longer(spec: RunSpec) -> RunSpec:
    training = spec.training.model_copy(update={"steps": STEPS})
    return spec.model_copy(update={"training": training})


def _more(folder: Path) -> Path:
    path = folder / "more.txt"
    path.write_text("\n\n".join(f"quite another text {n} of some length" for n in range(9)))
    return path


@cache
def base_record(name: str, folder: Path) -> RunRecord:
    """A finished record of this kind; what it reads stands below the folder."""
    if name == "compiled":  # the one with a value in every leaf
        return full_record("compiled")
    if name == "hub":
        return _on_the_hub(base_record("fineweb", folder))
    spec = KINDS[name](folder)
    parts = build(spec, Store(folder / "mlruns"))
    record = new_record(parts, ["run", "spec.yaml"])
    steps = spec.training.stop_at_step or spec.training.steps
    if spec.data.dataset == "fineweb":
        record.effective.evaluation["held_out"].passed = {"outcome": "held_out", "documents": 6}
    return finished(record, steps)


def finished(record: RunRecord, steps: int) -> RunRecord:
    """The record as it would be after so many steps."""
    record.status = "FINISHED"
    record.effective.budget.finished = True
    record.effective.interval = IntervalFacts(first_step=11, last_step=steps)
    record.points = [
        Point(
            step=step,
            tokens=step * record.tokens_per_step,
            order_digest=sha(f"order {step}"),
            lr_trace=sha(f"rates {step}"),
            bytes=4 * step * record.tokens_per_step,
        )
        for step in (0, steps // 2, steps)
    ]
    return record


def _on_the_hub(record: RunRecord) -> RunRecord:
    """A run on a pinned stream of the hub, as a record has it."""
    document = record.model_dump(mode="json")
    document["spec"]["data"] |= {
        "stream_path": None,
        "stream_name": "HuggingFaceFW/fineweb-edu",
        "stream_config": "sample-10BT",
        "stream_revision": "a" * 40,
    }
    return RunRecord.model_validate(document)
