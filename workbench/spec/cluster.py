"""Cluster plans: a model on many devices, its numbers checked against one another; none launches.

A plan is a YAML file with the sections `model` (as in a run spec), `parallel` and `run`. T tensor,
P pipeline and D data-parallel ways share its devices: T x P x D = `world_size`. Every fault is
found at once, also where one section is not valid by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from workbench.errors import Fault, UserError
from workbench.spec.load import (
    apply_overrides,
    is_cluster_plan,
    place_of,
    read_source,
    validate_as,
    without_nulls,
)
from workbench.spec.run import Above0, ModelSpec, Positive, RunSpec, Section

O200K_ENTRIES = 200_019
"""Entries of o200k_base, the vocabulary that a plan has unless it says another size."""


class ParallelSpec(Section):
    """How devices share the model: T x P x D of them, `devices_per_node` in one machine.

    `tensor` splits every matrix, `pipeline` the layers, `data` the sequences of an update. `engine`
    is what the D copies of a part do: each holds it whole (ddp), or all share its weights,
    gradients and optimizer state (fsdp).
    """

    world_size: Positive
    tensor: Positive = 1
    pipeline: Positive = 1
    data: Positive
    engine: Literal["ddp", "fsdp"] = "ddp"
    devices_per_node: Positive = 8
    device_memory_gb: Above0 | None = None


class ClusterRunSpec(Section):
    """The budget and the step. Batches are counted in sequences.

    `micro_batch_size` is what one of the D copies takes at once, `global_batch_size` an update of
    all. `steps` None: the fewest that reach `target_tokens`.
    """

    target_tokens: Positive
    steps: Positive | None = None
    global_batch_size: Positive
    micro_batch_size: Positive
    seq_len: Positive = 2048
    vocab_size: Positive = O200K_ENTRIES
    precision: Literal["bf16", "fp32"] = "bf16"
    grad_ckpt: bool = False
    optimizer: Literal["adamw", "muon_tr"] = "adamw"


class ClusterSpec(Section):
    """A whole plan; consistent where `load_cluster_plan` gives it."""

    name: str
    notes: str = ""
    model: ModelSpec = Field(default_factory=lambda: ModelSpec.model_validate({}))
    parallel: ParallelSpec
    run: ClusterRunSpec

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update."""
        return self.run.global_batch_size * self.run.seq_len

    @property
    def steps(self) -> int:
        """Updates: as given, or the fewest that reach the target."""
        return self.run.steps or _fewest_steps(self.run)

    @property
    def micro_batches(self) -> int:
        """Forward passes of one copy in an update."""
        return self.run.global_batch_size // (self.run.micro_batch_size * self.parallel.data)

    def run_spec(self) -> RunSpec:
        """The same training as a run spec: one copy, one micro-batch, no parallelism.

        Raises:
            UserError: the model or the length contradicts itself.
        """
        try:
            return _run_spec(self.name, self.model, self.run)
        except ValidationError as error:
            raise UserError(*_contradictions(error)) from None


def load_cluster_plan(path: Path, overrides: list[str] | None = None) -> ClusterSpec:
    """The validated plan of a YAML file with `key=value` overrides laid over it.

    Raises:
        UserError: with every fault found; each names file and line, the field, the value and what
            is allowed.
    """
    source = read_source(path)
    source.values.setdefault("name", path.stem)
    apply_overrides(source, overrides or [])
    assert is_cluster_plan(source.values)
    given = without_nulls(source.values)
    faults: list[Fault] = []
    try:
        spec = validate_as(ClusterSpec, given, source)
    except UserError as error:
        spec, faults = None, list(error.faults)
    found = _Sections(
        spec.model if spec else _valid(ModelSpec, given.get("model", {})),
        spec.parallel if spec else _valid(ParallelSpec, given.get("parallel")),
        spec.run if spec else _valid(ClusterRunSpec, given.get("run")),
    )
    for fault in found.faults(str(given["name"])):
        place = place_of(fault.place, source)
        faults.append(Fault(place, fault.message, fault.value, fault.allowed))
    if faults or spec is None:
        raise UserError(*faults)
    return spec


Part = TypeVar("Part", bound=BaseModel)


def _valid(kind: type[Part], given: Any) -> Part | None:
    """A section by itself, without keys that it does not know; None where it is not valid. All of
    these faults are known already."""
    if isinstance(given, dict):
        given = {key: value for key, value in given.items() if key in kind.model_fields}
    try:
        return kind.model_validate(given)
    except ValidationError:
        return None


@dataclass(frozen=True)
class _Sections:
    """What is valid of a plan; None where a section is not."""

    model: ModelSpec | None
    parallel: ParallelSpec | None
    run: ClusterRunSpec | None

    def faults(self, name: str) -> list[Fault]:
        """Every fault of sections that are each valid by themselves."""
        model, parallel, run = self.model, self.parallel, self.run
        found = []
        if model is not None:
            sound = run or ClusterRunSpec(
                target_tokens=1, global_batch_size=1, micro_batch_size=1, seq_len=1
            )
            try:
                _run_spec(name, model, sound)
            except ValidationError as error:
                found += _contradictions(error)
        if parallel is not None:
            found += _device_faults(parallel)
        if run is not None:
            found += _budget_faults(run)
        if parallel is not None and run is not None:
            found += _batch_faults(parallel, run)
        if model is not None and parallel is not None:
            found += _split_faults(model, parallel)
        return found


def _device_faults(parallel: ParallelSpec) -> list[Fault]:
    faults = []
    ways = (parallel.tensor, parallel.pipeline, parallel.data)
    product = parallel.tensor * parallel.pipeline * parallel.data
    world, node = parallel.world_size, parallel.devices_per_node
    if product != world:
        said = " x ".join(f"{way:,}" for way in ways)
        message = f"tensor x pipeline x data = {said} = {product:,} is not the world size"
        faults.append(Fault("parallel.world_size", message, world, _factors(parallel)))
    if world > node and world % node:
        message = f"machines of {node} devices do not make {world:,}"
        allowed = f"a multiple of {node}, or another parallel.devices_per_node"
        faults.append(Fault("parallel.world_size", message, world, allowed))
    if parallel.engine == "fsdp" and parallel.data == 1:
        message = "there is one copy, and no other to share its state with"
        faults.append(Fault("parallel.engine", message, "fsdp", "ddp, or parallel.data above 1"))
    if parallel.engine == "fsdp" and parallel.pipeline > 1:
        message = "each micro-batch of a pipeline would gather the weights again"
        faults.append(Fault("parallel.engine", message, "fsdp", "ddp with parallel.pipeline"))
    return faults


def _factors(parallel: ParallelSpec) -> str:
    product = parallel.tensor * parallel.pipeline * parallel.data
    ways, rest = divmod(parallel.world_size, parallel.tensor * parallel.pipeline)
    other = f", or parallel.data {ways:,}" if ways and not rest else ""
    return f"{product:,}{other}"


def _budget_faults(run: ClusterRunSpec) -> list[Fault]:
    """A given number of steps is the fewest that reach the target: what is beyond is another
    budget, which no comparison at the target allows for."""
    if run.steps is None or run.steps == (fewest := _fewest_steps(run)):
        return []
    per_step = run.global_batch_size * run.seq_len
    tokens = run.steps * per_step
    if run.steps < fewest:
        message = f"{tokens:,} tokens miss the target by {run.target_tokens - tokens:,}"
    else:
        over = tokens - run.target_tokens
        message = f"{over:,} tokens beyond the target, more than the {per_step:,} of a step"
    allowed = f"null or {fewest}, which come to {fewest * per_step:,} tokens"
    return [Fault("run.steps", message, run.steps, allowed)]


def _batch_faults(parallel: ParallelSpec, run: ClusterRunSpec) -> list[Fault]:
    at_once = run.micro_batch_size * parallel.data
    whole = run.global_batch_size
    if whole % at_once == 0:
        return []
    message = (
        f"{parallel.data:,} copies with micro-batches of {run.micro_batch_size} do not divide it"
    )
    below = whole // at_once * at_once
    near = f"{below:,} or {below + at_once:,}" if below else f"{at_once:,}"
    allowed = f"a multiple of {at_once:,}, such as {near}"
    return [Fault("run.global_batch_size", message, whole, allowed)]


def _split_faults(model: ModelSpec, parallel: ParallelSpec) -> list[Fault]:
    """What T ways do not divide of a matrix, and P not of the layers."""
    faults = []
    experts = model.num_experts or 1
    widths = {
        "num_attention_heads": ("heads", model.num_attention_heads),
        "num_key_value_heads": ("key/value heads", model.num_key_value_heads),
        "intermediate_size": (
            "rows of an expert" if model.is_routed else "rows of the feed-forward",
            model.intermediate_size // experts,
        ),
        "shared_intermediate_size": ("rows of the shared path", model.shared_intermediate_size),
    }
    bad = {
        name: (what, size)
        for name, (what, size) in widths.items()
        if size is not None and size % parallel.tensor
    }
    if bad:
        said = ", ".join(f"{size:,} {what} (model.{name})" for name, (what, size) in bad.items())
        sizes = [size for _, size in widths.values() if size is not None]
        ways = [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
        message = f"it does not divide the model's {said}"
        allowed = ", ".join(map(str, ways))
        faults.append(Fault("parallel.tensor", message, parallel.tensor, allowed))
    layers = model.num_hidden_layers
    if layers % parallel.pipeline:
        message = f"the stages do not divide the {layers} layers"
        allowed = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        faults.append(Fault("parallel.pipeline", message, parallel.pipeline, allowed))
    return faults


def _fewest_steps(run: ClusterRunSpec) -> int:
    return -(-run.target_tokens // (run.global_batch_size * run.seq_len))


def _run_spec(name: str, model: ModelSpec, run: ClusterRunSpec) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": name,
            "model": model.model_dump(),
            "tokenizer": {"name": "bytes"},
            "data": {"dataset": "random"},
            "training": {
                "steps": run.steps or _fewest_steps(run),
                "batch_size": run.micro_batch_size,
                "seq_len": run.seq_len,
                "precision": run.precision,
                "grad_ckpt": run.grad_ckpt,
            },
            "optimizer": {"name": run.optimizer},
        }
    )


def _contradictions(error: ValidationError) -> list[Fault]:
    """The faults of a run spec, at the places of the plan."""
    faults: list[Fault] = []
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        assert isinstance(cause, UserError), item
        for fault in cause.faults:
            place = fault.place.replace("training.", "run.")
            faults.append(Fault(place, fault.message, fault.value, fault.allowed))
    return faults
