"""Memory of one device among many, predicted from a cluster plan with the sizes of `footprint`.

T tensor, P pipeline, D data-parallel ways; L layers, H hidden, V vocabulary; N micro-batches of an
update. A device holds L/P layers, of each matrix the T-th part, and of the vocabulary V/T rows
where its stage has them: the first stage embeds, the last one scores; tied, both hold the matrix.

Assumed, as the usual engines do it: weights, gradients and moments are float32, and the rounded
copies of the weights are there once; heads, experts' and feed-forward widths are split over T and
norms and the residual stream are not (no sequence parallelism); stages take turns as in 1F1B
(Narayanan et al. 2021), so that stage s holds min(P - s, N) micro-batches at once; DDP keeps a
second copy of the gradients in its buckets; FSDP shares weights, gradients and optimizer state over
D, and gathers one block while the next is under way.

Torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from workbench.core.footprint import (
    FLOAT,
    Activations,
    Kind,
    Matmul,
    loss_bytes,
    model_parameters,
    route_table_bytes,
)
from workbench.spec.cluster import ClusterSpec
from workbench.spec.run import ModelSpec, OptimizerSpec

LEFT_OUT = (
    "the device's context and the buffers of its communication library",
    "fragmentation and rounding of the allocator",
    "workspaces of kernels, and collectives that wait for one another",
    "an uneven load of experts",
    "evaluation and saving",
)
"""What takes memory, too, and is not in the prediction."""

StageName = Literal["only", "first", "middle", "last"]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device of a stage, by what they are for. See `footprint.Footprint` for the parts
    that are named alike.

    buckets    of DDP: the gradients once more
    gathered   of FSDP: the weights of two blocks and of the vocabulary, and the gradient of the
               larger of a block and the vocabulary
    """

    stage: StageName
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    buckets: int
    gathered: int
    activations: int
    loss: int
    temporaries: int

    @property
    def parts(self) -> dict[str, int]:
        """The parts in bytes, those that are not there left out."""
        named = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return {name: size for name, size in named.items() if size}

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def device_memory(plan: ClusterSpec) -> list[DeviceMemory]:
    """The memory of a device in each kind of stage that the plan has.

    The plan is a consistent one.
    """
    ways = plan.parallel.pipeline
    if ways == 1:
        return [_of_stage(plan, "only", 1)]
    stages = [_of_stage(plan, "first", ways), _of_stage(plan, "last", 1)]
    if ways > 2:
        stages.insert(1, _of_stage(plan, "middle", ways - 1))
    return stages


def part_of_model(plan: ClusterSpec) -> ModelSpec:
    """The model as one device sees it: its layers, and of each its heads and widths.

    Its `head_dim` is not the model's, as `hidden_size` stays whole: the residual stream is.
    """
    model, tensor = plan.model, plan.parallel.tensor
    shared = model.shared_intermediate_size
    return model.model_copy(
        update={
            "num_hidden_layers": model.num_hidden_layers // plan.parallel.pipeline,
            "num_attention_heads": model.num_attention_heads // tensor,
            "num_key_value_heads": model.num_key_value_heads // tensor,
            "intermediate_size": model.intermediate_size // tensor,
            "shared_intermediate_size": shared // tensor if shared else shared,
        }
    )


def device_parameters(plan: ClusterSpec, stage: StageName) -> Iterator[tuple[Kind, int]]:
    """The trainable tensors of one device before FSDP shares them, by kind and size."""
    model, tensor = plan.model, plan.parallel.tensor
    rows = -(-plan.run.vocab_size // tensor)
    # One vocabulary matrix, and the norm before it, are not the layers'.
    ends = 2 if stage == "only" and not model.tie_word_embeddings else 1
    if stage != "middle":
        for _ in range(ends):
            yield "vocabulary", rows * model.hidden_size
    if stage in ("only", "last"):
        yield "vector", model.hidden_size
    whole = model.model_copy(update={"tie_word_embeddings": True})
    inside = list(model_parameters(whole, 0))[2:]
    for kind, size in inside[: len(inside) // plan.parallel.pipeline]:
        split = kind in ("matrix", "expert", "shared")
        yield kind, size // tensor if split else size


def _of_stage(plan: ClusterSpec, stage: StageName, in_flight: int) -> DeviceMemory:
    run, parallel = plan.run, plan.parallel
    spec, part = plan.run_spec(), part_of_model(plan)
    matmul: Matmul = "native" if run.precision == "bf16" else "float32"
    tensors = list(device_parameters(plan, stage))
    held = sum(size for _, size in tensors)
    moments = sum(size * _moments(kind, spec.optimizer) for kind, size in tensors)
    shared = parallel.data if parallel.engine == "fsdp" else 1
    of_ddp = parallel.engine == "ddp" and parallel.data > 1
    tokens = run.micro_batch_size * run.seq_len
    model, bare = (
        Activations(part, tokens, matmul, copies=copies, head_dim=plan.model.head_dim)
        for copies in (shared == 1, False)  # what FSDP gathers are the copies
    )
    kept, each = model.kept(run.grad_ckpt), bare.kept(run.grad_ckpt)
    if run.grad_ckpt:
        each -= bare.block()  # computed again, one at a time
    waiting = min(in_flight, plan.micro_batches) - 1
    rows = -(-run.vocab_size // parallel.tensor)
    rotary = 2 * FLOAT * part.max_position_embeddings * (plan.model.head_dim // 2)
    tables = route_table_bytes(part, run.vocab_size)
    return DeviceMemory(
        stage=stage,
        parameters=held,
        weights=FLOAT * -(-held // shared) + tables + rotary,
        gradients=FLOAT * -(-held // shared),
        optimizer=FLOAT * -(-moments // shared),
        buckets=FLOAT * held if of_ddp else 0,
        gathered=_gathered(plan, tensors, model.c) if shared > 1 else 0,
        activations=kept + waiting * each,
        loss=loss_bytes(spec, rows, matmul) if stage in ("only", "last") else 0,
        temporaries=model.temporaries(),
    )


def _gathered(plan: ClusterSpec, tensors: list[tuple[Kind, int]], width: int) -> int:
    """What FSDP holds whole for a while: `width` bytes of an entry while it is multiplied by."""
    vocabulary = sum(size for kind, size in tensors if kind == "vocabulary")
    layers = plan.model.num_hidden_layers // plan.parallel.pipeline
    block = (sum(size for _, size in tensors) - vocabulary) // layers
    return width * (2 * block + vocabulary) + FLOAT * max(block, vocabulary)


def _moments(kind: Kind, optimizer: OptimizerSpec) -> int:
    """How many of a parameter the optimizer remembers: Muon one, AdamW two."""
    if kind in ("expert", "shared", "matrix") and optimizer.uses_muon_for(kind):
        return 1
    return 2
