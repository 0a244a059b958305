"""What can be known of a run before it starts: counts, identities, and the order it will read.

Torch is not imported: a check of two specs answers in the time it takes to read their text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.core.counts import count_parameters, flops_per_token
from workbench.core.data.batches import TokenDigest
from workbench.core.data.loading import Data, known_facts, load_data, vocab_size_of
from workbench.core.schedules import (
    is_evaluated,
    last_step,
    planned_trace,
    ramp_tokens,
    timed_steps,
)
from workbench.spec.foreseen import Foreseen
from workbench.spec.run import RunSpec, spec_hash
from workbench.track.provenance import redact
from workbench.track.record import COMPILER_COUNTS, NOT_COMPILED
from workbench.track.store import Store

# Above this many tokens the planned order is not replayed (about 10 s of hashing).
MOST_REPLAYED_TOKENS = 50_000_000


def foresee(spec: RunSpec, store: Store) -> Foreseen:
    """The effective facts that the spec and its data decide.

    Raises:
        UserError: the data or the tokenizer cannot be read; a run would fail the same way.
    """
    data = None
    known = known_facts(spec, store.home)  # a stream is not read for it
    steps = spec.training.stop_at_step or spec.training.steps or None
    if known is None:
        data = load_data(spec, store.home, seed=spec.seed)
        known = data.facts
        steps = last_step(spec, data.train_stream())
    counts = count_parameters(spec.model, known["tokenizer"]["vocab_size"])
    facts: dict[str, Any] = {
        "effective.budget.ramp_tokens": ramp_tokens(spec),
        "effective.optimizer.sequences_per_update": spec.sequences_per_update,
        "effective.optimizer.warmup_steps": spec.warmup_steps,
        "effective.precision.compute_dtype": {"bf16": "bfloat16", "fp32": "float32"}[
            spec.training.precision
        ],
        "effective.precision.master_dtype": "float32",
        "effective.execution.compiled": spec.training.compile,
    }
    if not spec.training.compile:
        none = NOT_COMPILED.model_dump()
        facts |= {f"effective.execution.{name}": none for name in COMPILER_COUNTS}
    if spec.training.device != "auto":
        facts["effective.hardware.device_type"] = spec.training.device
    if spec.training.loss_backend != "auto":
        facts["effective.execution.loss_backend"] = spec.training.loss_backend
    facts |= {f"effective.parameters.{name}": value for name, value in vars(counts).items()}
    facts |= {f"effective.tokenizer.{k}": v for k, v in known["tokenizer"].items()}
    # Of a stream, None is what is not known yet.
    facts |= {f"effective.data.{k}": v for k, v in known["data"].items() if v is not None}
    for name, one in known["evaluation"].items():
        facts |= {f"effective.evaluation.{name}.{k}": v for k, v in one.items()}

    def at(tokens: int) -> dict[str, Any]:
        step = tokens // spec.tokens_per_step
        known: dict[str, Any] = {"effective.budget.lr_trace": planned_trace(spec, step)}
        if data is not None and tokens <= MOST_REPLAYED_TOKENS:
            digest = _planned_digest(spec, data, step)
            known["effective.data.order_digest"] = digest.hexdigest()
            known["effective.budget.bytes"] = digest.bytes
        return known

    if steps is None:  # to the end of a stream
        return Foreseen(facts, None, at)
    first, last = timed_steps(0, steps) or (None, None)
    facts |= {"effective.interval.first_step": first, "effective.interval.last_step": last}
    evaluated = (step for step in range(1, steps + 1) if is_evaluated(spec, step, steps))
    return Foreseen(facts, tuple(step * spec.tokens_per_step for step in evaluated), at)


def _planned_digest(spec: RunSpec, data: Data, steps: int) -> TokenDigest:
    """The digest of all the windows that the run will consume."""
    stream, digest = data.train_stream(), TokenDigest(data.byte_lengths)
    for _ in range(steps):
        digest.update(stream.next_batch(spec.sequences_per_update))
    return digest


def plan(spec: RunSpec, store: Store) -> dict[str, Any]:
    """The numbers of `wb run --dry-run`: counts, tokens and the resolved spec."""
    cache = Path(store.home, "cache", "tiktoken")
    vocab = vocab_size_of(spec, cache, keep=False)
    counts = count_parameters(spec.model, vocab)
    return {
        "name": spec.name,
        "spec_sha256": spec_hash(spec),
        "parameters": vars(counts),
        "vocab_size": vocab,
        "flops_per_token": flops_per_token(spec.model, vocab, spec.training.seq_len),
        "tokens_per_step": spec.tokens_per_step,
        "tokens": spec.end_tokens,
        "warmup_steps": spec.warmup_steps,
        "spec": recorded(spec),
    }


def recorded(spec: RunSpec) -> dict[str, Any]:
    """The resolved spec as it is shown and kept: without the credentials of a tracking address."""
    document = spec.model_dump(mode="json")
    document["notes"] = redact(spec.notes)
    tracking = document["tracking"]
    tracking["uri"] = spec.tracking.uri and redact(spec.tracking.uri)
    tracking["tags"] = {key: redact(value) for key, value in spec.tracking.tags.items()}
    return document


def render_plan(document: dict[str, Any]) -> str:
    """The dry run for a person: the resolved spec as YAML, then the counts."""
    import yaml

    counts, tokens = document["parameters"], document["tokens"]
    total = "one pass over the data" if tokens is None else f"{tokens:,} in all"
    return "\n".join(
        (
            yaml.safe_dump(document["spec"], sort_keys=False, default_flow_style=None).rstrip(),
            "",
            f"parameters   {counts['total']:,} total, {counts['active']:,} active per token",
            f"             {counts['embedding']:,} embedding, {counts['experts']:,} experts",
            f"vocabulary   {document['vocab_size']:,}",
            f"tokens       {document['tokens_per_step']:,} a step, {total}",
            f"FLOPs        {document['flops_per_token']:.3g} a token, forward and backward",
            f"warm-up      {document['warmup_steps']:,} steps",
            f"spec hash    {document['spec_sha256']}",
            "valid; nothing was trained or written; that this machine can train it was not tried",
        )
    )
