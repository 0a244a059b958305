"""`wb plan` of a cluster plan: what it comes to on each device; it launches nothing and says so."""

from __future__ import annotations

from typing import Any

from workbench.core.cluster_memory import LEFT_OUT, DeviceMemory, device_memory
from workbench.core.counts import count_parameters, training_flops
from workbench.core.footprint import checkpoint_bytes
from workbench.errors import UserError
from workbench.spec.cluster import ClusterSpec

NO_LAUNCH = "a plan, checked: nothing was launched, and the workbench does not launch it"
PREDICTED = "a prediction from the plan: no such device was asked"


def cluster_plan(plan: ClusterSpec) -> dict[str, Any]:
    """The numbers of a plan, as `wb plan --json` prints them.

    `memory` lists each kind of pipeline stage; `memory_gb` is that of the fullest.

    Raises:
        UserError: a device has less memory than is predicted.
    """
    run, parallel, spec = plan.run, plan.parallel, plan.run_spec()
    memory = device_memory(plan)
    fullest = max(memory, key=lambda stage: stage.total)
    require_room(plan, fullest)
    flops = training_flops(plan.model, run.vocab_size, run.seq_len).total
    tokens = plan.steps * plan.tokens_per_step
    return {
        "name": plan.name,
        "kind": "cluster plan",
        "launches": False,
        "parameters": vars(count_parameters(plan.model, run.vocab_size)),
        "vocab_size": run.vocab_size,
        "parallel": {
            **parallel.model_dump(mode="json"),
            "nodes": -(-parallel.world_size // parallel.devices_per_node),
        },
        "global_batch_size": run.global_batch_size,
        "micro_batches": plan.micro_batches,
        "pipeline_idle_share": idle_share(plan),
        "tokens_per_step": plan.tokens_per_step,
        "steps": plan.steps,
        "target_tokens": run.target_tokens,
        "tokens": tokens,
        "overshoot": tokens - run.target_tokens,
        "flops_per_token": flops,
        "flops_per_device": flops * tokens / parallel.world_size,
        "memory_gb": fullest.total / 1e9,
        "memory": [
            {
                "stage": stage.stage,
                "parameters": stage.parameters,
                "gb": stage.total / 1e9,
                "bytes": stage.parts,
            }
            for stage in memory
        ],
        "memory_is": PREDICTED,
        "left_out": list(LEFT_OUT),
        "checkpoint_bytes": checkpoint_bytes(spec, run.vocab_size),
        "remarks": remarks(plan),
    }


def require_room(plan: ClusterSpec, fullest: DeviceMemory) -> None:
    """Does nothing where a device has the memory, or none is given.

    Raises:
        UserError: it has not.
    """
    room = plan.parallel.device_memory_gb
    if room is None or fullest.total / 1e9 <= room:
        return
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in fullest.parts.items())
    need = f"{fullest.total / 1e9:.1f}"
    message = f"{need} GB are predicted, without what is left out ({parts})"
    allowed = f"{need} or more, or a plan that takes less"
    raise UserError.at("parallel.device_memory_gb", message, room, allowed)


def idle_share(plan: ClusterSpec) -> float:
    """The share of an update in which a stage waits: (P - 1) / (N + P - 1), P stages and N
    micro-batches (Narayanan et al. 2021)."""
    ways = plan.parallel.pipeline
    return (ways - 1) / (plan.micro_batches + ways - 1)


def remarks(plan: ClusterSpec) -> list[str]:
    """What is allowed and worth a thought."""
    parallel, said = plan.parallel, []
    inside = min(parallel.devices_per_node, parallel.world_size)
    if parallel.tensor > inside or inside % parallel.tensor:
        said.append(
            f"the {parallel.tensor} tensor ways do not fit into machines of {inside} devices: "
            "every layer waits for the network between them"
        )
    if parallel.pipeline > 1 and plan.micro_batches < parallel.pipeline:
        said.append(
            f"{plan.micro_batches} micro-batches never fill {parallel.pipeline} pipeline stages"
        )
    if parallel.device_memory_gb is None:
        said.append("parallel.device_memory_gb is not given: whether it fits was not judged")
    return said


def render(document: dict[str, Any]) -> str:
    """A plan for the terminal."""
    parallel, counts = document["parallel"], document["parameters"]
    ways = [f"{name} {parallel[name]:,}" for name in ("tensor", "pipeline", "data")]
    over, per_step = document["overshoot"], document["tokens_per_step"]
    room = parallel["device_memory_gb"]
    lines = [
        ("parameters", f"{counts['total']:,} total, {counts['active']:,} active per token"),
        (
            "devices",
            f"{' x '.join(ways)} = {parallel['world_size']:,}, {parallel['engine']}, "
            f"{parallel['nodes']:,} machines of {parallel['devices_per_node']}",
        ),
        (
            "batch",
            f"{document['global_batch_size']:,} sequences, {per_step:,} tokens a step; "
            f"micro-batches of each copy: {document['micro_batches']:,}",
        ),
        (
            "tokens",
            f"{document['tokens']:,} in {document['steps']:,} steps: "
            f"{over:,} beyond the target of {document['target_tokens']:,} "
            f"({over / document['target_tokens']:.2g} of it)",
        ),
        (
            "FLOPs",
            f"{document['flops_per_token']:,} a token, "
            f"{document['flops_per_device']:.3g} a device in all",
        ),
        ("checkpoint", f"{document['checkpoint_bytes'] / 1e9:.1f} GB in all"),
        (
            "memory",
            f"{document['memory_gb']:.2f} GB a device"
            + (f" of {room:g} GB" if room else "")
            + f", {document['memory_is']}",
        ),
    ]
    for stage in document["memory"]:
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in stage["bytes"].items())
        name = "" if stage["stage"] == "only" else f"{stage['stage']} stage {stage['gb']:.2f} GB: "
        lines.append(("", f"{name}{stage['parameters']:,} parameters; GB: {parts}"))
    lines.append(("", f"left out: {'; '.join(document['left_out'])}"))
    if document["pipeline_idle_share"]:
        lines.append(("pipeline", f"{document['pipeline_idle_share']:.1%} of an update idle"))
    lines += [("remark", said) for said in document["remarks"]]
    rows = [f"  {name:10}  {text}" for name, text in lines]
    return "\n".join((document["name"], *rows, NO_LAUNCH))
