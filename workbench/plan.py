"""`wb plan`: what a run will be and take (parameters, FLOPs, tokens, memory, disk, time).

Everything follows from the spec, the size of its vocabulary and, for the time, a bench of this
machine. No model is built and torch is not imported.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workbench.bench.store import Device, find_bench, torch_version
from workbench.core.counts import count_parameters, training_flops
from workbench.core.data.loading import vocab_size_of
from workbench.core.footprint import Matmul, checkpoint_bytes, footprint
from workbench.spec.run import RunSpec, spec_hash
from workbench.track.provenance import instruction_sets
from workbench.track.store import Store

FORMULA = "6 N + 6 L S H"
_PRODUCTS: dict[Matmul, str] = {
    "native": "bf16 products",
    "upcast": "float32 products of operands rounded to bf16",
    "float32": "float32 products",
}


def plan(spec: RunSpec, store: Store) -> dict[str, Any]:
    """The numbers of a run, as `wb plan --json` prints them.

    `tokens` and `steps` are those after which the run ends (`training.stop_at_step` included), None
    for one pass over the data; `expected` is None where this machine has no bench. `memory_gb` is
    the peak of the process on a CPU, elsewhere that of the device.

    Raises:
        UserError: the tokenizer cannot be read.
    """
    vocab = vocab_size_of(spec, store.cache / "tiktoken", keep=False)
    model, training = spec.model, spec.training
    counts = count_parameters(model, vocab)
    flops = training_flops(model, vocab, training.seq_len)
    device = expected_device(spec)
    matmul = expected_matmul(spec, device)
    memory = footprint(spec, vocab, matmul)
    parts = asdict(memory)
    if device != "cpu":
        del parts["process"], parts["holes"]
    return {
        "name": spec.name,
        "spec_sha256": spec_hash(spec),
        "vocab_size": vocab,
        "parameters": asdict(counts),
        "flops_per_token": flops.total,
        "flops": {
            "formula": FORMULA,
            "N": flops.weights // 6,
            "L": model.num_hidden_layers,
            "S": training.seq_len,
            "H": model.hidden_size,
            "weights": flops.weights,
            "attention": flops.attention,
            "forward": flops.forward,
            "backward": flops.backward,
        },
        "tokens": spec.end_tokens,
        "tokens_per_step": spec.tokens_per_step,
        "steps": training.stop_at_step or training.steps or None,
        "planned_steps": training.steps or None,
        "warmup_steps": spec.warmup_steps,
        "memory_gb": sum(parts.values()) / 1e9,
        "memory": {
            "device": device,
            "matmul": matmul,
            "bytes": parts,
        },
        "checkpoint_bytes": checkpoint_bytes(spec, vocab),
        "checkpoints_kept": spec.checkpoint.save_total_limit,
        "expected": _expected(spec, flops.total, device, store),
    }


def _expected(spec: RunSpec, flops: int, device: Device, store: Store) -> dict[str, Any] | None:
    """The time of all updates; evaluating and saving come on top."""
    bench = find_bench(spec, device, store)
    if bench is None:
        return None
    differs = bench.differs(spec)
    rate = bench.tokens_per_s * bench.flops_per_token / flops
    return {
        "seconds": spec.end_tokens / rate if spec.end_tokens else None,
        "step_seconds": spec.tokens_per_step / rate,
        "tokens_per_s": rate,
        "scaled": bool(differs),
        "differs": differs,
        "bench": {
            "spec": bench.spec,
            "date": bench.date,
            "device": bench.device,
            "threads": bench.threads,
            "torch": bench.torch,
            "tokens_per_s": bench.tokens_per_s,
            "flops_per_token": bench.flops_per_token,
        },
    }


def expected_device(spec: RunSpec) -> Device:
    """The device that the run will choose, as far as can be told without loading torch."""
    if spec.training.device != "auto":
        return spec.training.device
    drivers = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
    if "+cpu" not in torch_version() and any(Path(driver).exists() for driver in drivers):
        return "cuda"
    return "mps" if sys.platform == "darwin" else "cpu"


def expected_matmul(spec: RunSpec, device: Device) -> Matmul:
    """The means by which products will run there: see `precision.choose_precision`."""
    if spec.training.precision == "fp32":
        return "float32"
    if device != "cpu":
        return "native"
    sets = set(instruction_sets())
    # Those of x86 that multiply bfloat16, or Arm's.
    return "native" if sets & {"avx512_bf16", "amx_bf16", "bf16"} else "upcast"


def render(document: dict[str, Any]) -> str:
    """A plan for the terminal."""
    counts, flops, memory = (document[name] for name in ("parameters", "flops", "memory"))
    tokens = f"{document['tokens_per_step']:,} a step, {_whole(document)}"
    parts = [f"{name} {_size(size)}" for name, size in memory["bytes"].items()]
    kept = document["checkpoints_kept"]
    lines = [
        ("parameters", f"{counts['total']:,} total, {counts['active']:,} active per token"),
        ("", f"{counts['embedding']:,} embedding, {counts['experts']:,} experts"),
        ("vocabulary", f"{document['vocab_size']:,}"),
        (
            "FLOPs",
            f"{document['flops_per_token']:,} a token = {FORMULA}: "
            f"{flops['forward']:,} forward, {flops['backward']:,} backward",
        ),
        ("", f"6 N = {flops['weights']:,}: products with N = {flops['N']:,} parameters"),
        (
            "",
            f"6 L S H = {flops['attention']:,}: causal attention, "
            f"L = {flops['L']} layers, S = {flops['S']:,} tokens, H = {flops['H']:,}",
        ),
        ("tokens", tokens),
        (
            "memory",
            f"{_size(document['memory_gb'] * 1e9)} at the peak "
            f"({memory['device']}, {_PRODUCTS[memory['matmul']]})",
        ),
        ("", ", ".join(parts)),
        (
            "checkpoint",
            f"{_size(document['checkpoint_bytes'])}, the newest {kept} of a run are kept",
        ),
        *_time_lines(document),
    ]
    rows = [f"  {name:10}  {text}" for name, text in lines]
    return "\n".join((document["name"], *rows))


def _whole(document: dict[str, Any]) -> str:
    """The tokens and the steps of the whole run, in words."""
    steps, planned = document["steps"], document["planned_steps"]
    if steps is None:
        return "one pass over the data in all: as many as they hold"
    whole = f"{document['tokens']:,} in all"
    if steps == planned:
        return f"{whole} ({steps:,} steps)"
    if planned is None:
        return f"{whole} ({steps:,} steps of one pass over the data, if they hold as many)"
    return f"{whole} ({steps:,} of {planned:,} planned steps)"


def _time_lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    expected = document["expected"]
    if expected is None:
        return [("time", "unknown: `wb bench` of this spec measures it on this machine")]
    rate, step = expected["tokens_per_s"], expected["step_seconds"]
    speed = f"{rate:,.0f} tokens/s, {step:.3g} s a step"
    total = "" if expected["seconds"] is None else f"{duration(expected['seconds'])} at "
    bench = expected["bench"]
    source = f"from wb bench of {bench['spec']}, {bench['date'].replace('T', ' ')[:16]}"
    source += f" ({bench['device']}, {bench['threads']} threads, torch {bench['torch']})"
    lines = [("time", f"{total}{speed}; evaluating and saving not counted"), ("", source)]
    if expected["scaled"]:
        listed = ", ".join(expected["differs"][:4])
        more = len(expected["differs"]) - 4
        listed += f" and {more} more" if more > 0 else ""
        lines.append(("", f"scaled by FLOPs per token: it differs in {listed}"))
    return lines


def _size(count: float) -> str:
    """Bytes as "3.77 GB" or, below a tenth of that unit, "12.3 MB"."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Such as "3 h 20 min", "5 min 2 s" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 10:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"
    return f"{hours / 24:.1f} days"
