"""The transformer: embedding, pre-norm blocks, final norm; how it is built and initialised.

B batch, S sequence, H hidden, V vocabulary, D head dim, K routes.

The head is not applied here: the loss multiplies by `Transformer.head_weight` block by block,
because [tokens, V] logits would be the largest tensor of a step by far.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from workbench.core.attention import Attention, grouped_kernel, rotary_table
from workbench.core.layers import RMSNorm
from workbench.core.moe import (
    DISPATCH,
    Extras,
    LearnedRouted,
    RoutedFeedForward,
    SwiGLU,
    TokenRouted,
)
from workbench.core.precision import Precision, operands
from workbench.core.routing import tables_sha256
from workbench.core.schedules import ModelValues
from workbench.core.sharding import part, part_of
from workbench.spec.run import ModelSpec

INIT_STD = 0.02
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "shared_down.weight", "down_proj_w")
"""Matrices that write into the residual stream: drawn narrower, so that its variance at the start
does not grow with depth (Radford et al. 2019)."""

BlockCall = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Extras]]


class Output(NamedTuple):
    """What a forward pass of training gives: hidden states [B, S, H], and the extras by layer."""

    hidden: Tensor
    extras: list[Extras]


TrainingForward = Callable[[Tensor], Output]


class Embedding(nn.Module):
    """The [V, H] matrix that maps ids to vectors."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden))
        # A caller whose loss has already written the head's gradient into `weight.grad` sets this:
        # the lookup's gradient then adds the rows it used, not a dense [V, H] of zeros.
        self.sparse_gradient = False

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> [B, S, H], float32."""
        return F.embedding(ids, self.weight, sparse=self.sparse_gradient)


class Head(nn.Module):
    """Holds the [V, H] matrix of an untied head; the loss multiplies by it."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden))


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised residual stream and added to it."""

    def __init__(self, spec: ModelSpec, vocab_size: int, layer: int, precision: Precision) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size)
        self.self_attn = Attention(spec, precision)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size)
        self.mlp: SwiGLU | RoutedFeedForward
        match spec.mlp_type:
            case "dense":
                self.mlp = SwiGLU(spec.hidden_size, spec.intermediate_size, precision)
            case "token_routed":
                self.mlp = TokenRouted(spec, vocab_size, layer, precision)
            case "learned_router":
                self.mlp = LearnedRouted(spec, precision)

    def forward(self, x: Tensor, ids: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Extras]:
        """x [B, S, H], ids [B, S], cos and sin [S, D/2] -> [B, S, H] and the extras."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, extras = self.mlp(self.post_attention_layernorm(x), ids)
        return x + y, extras


class Transformer(nn.Module):
    """A decoder-only language model without its head product. Built by `build_model`."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self, spec: ModelSpec, vocab_size: int, precision: Precision, grad_checkpointing: bool
    ) -> None:
        super().__init__()
        self.spec, self.precision = spec, precision
        self.grad_checkpointing = grad_checkpointing
        self.embed_tokens = Embedding(vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            Block(spec, vocab_size, layer, precision) for layer in range(spec.num_hidden_layers)
        )
        self.norm = RMSNorm(spec.hidden_size)
        self.lm_head = None if spec.tie_word_embeddings else Head(vocab_size, spec.hidden_size)
        cos, sin = rotary_table(spec.max_position_embeddings, spec.head_dim, spec.rope_theta)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    @property
    def head_weight(self) -> Tensor:
        """The [V, H] float32 matrix that turns hidden states into logits."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def dispatch(self) -> str | dict[str, str]:
        """How tokens reach their experts: an effective fact of a run."""
        return DISPATCH if self.spec.is_routed else {"not_applicable": "a dense model"}

    @property
    def attention_path(self) -> str:
        """How attention runs on the model's present device: an effective fact of a run."""
        if self.spec.num_key_value_heads == self.spec.num_attention_heads:
            return "sdpa"
        dtype = torch.float32 if self.precision.matmul == "upcast" else self.precision.compute
        grouped = grouped_kernel(self.head_weight.device, dtype)
        return "sdpa, grouped key/value heads" if grouped else "sdpa, repeated key/value heads"

    @property
    def feed_forwards(self) -> list[SwiGLU | RoutedFeedForward]:
        """The feed-forward of every layer."""
        return [block.mlp for block in self.layers]  # type: ignore[misc]

    @property
    def routed_layers(self) -> list[RoutedFeedForward]:
        """The feed-forwards that have experts; none in a dense model."""
        return [mlp for mlp in self.feed_forwards if isinstance(mlp, RoutedFeedForward)]

    def observe(self, on: bool) -> None:
        """Whether training passes also measure what each path adds (see `moe.Extras`)."""
        for mlp in self.feed_forwards:
            mlp.observes = on

    def set_values(self, values: ModelValues) -> None:
        """Gives the scheduled values of the coming update to every layer."""
        for layer in self.routed_layers:
            layer.set_values(values)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [B, S] int64 ids -> hidden states [B, S, H] after the final norm.

        Raises:
            ValueError: the sequence is longer than `max_position_embeddings`.
        """
        return self._through(inputs, self.layers).hidden

    def through(self, inputs: Tensor, blocks: Iterable[BlockCall]) -> Output:
        """`forward` with its extras, by other callables (compiled ones) in place of the blocks."""
        return self._through(inputs, blocks)

    def _through(self, inputs: Tensor, blocks: Iterable[BlockCall]) -> Output:
        length, limit = inputs.shape[1], self.spec.max_position_embeddings
        if length > limit:
            raise ValueError(
                f"a sequence of {length} tokens is longer than model.max_position_embeddings "
                f"{limit}; shorten it or raise the setting"
            )
        cos, sin = self.rope_cos[:length], self.rope_sin[:length]
        x = self.embed_tokens(inputs).to(self.precision.compute)
        extras: list[Extras] = []
        for block in blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                # Nothing in a block draws random numbers, so no random state has to be kept.
                x, found = checkpoint(
                    block, x, inputs, cos, sin, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x, found = block(x, inputs, cos, sin)
            extras.append(found)
        return Output(self.norm(x), extras)

    def logits(self, inputs: Tensor) -> Tensor:
        """inputs [B, S] -> float32 logits [B, S, V]. All at once: for tests and export only."""
        hidden, weight = operands(self.precision, self.forward(inputs), self.head_weight)
        return F.linear(hidden.float(), weight.float())


def build_model(
    spec: ModelSpec,
    vocab_size: int,
    seed: int,
    precision: Precision,
    grad_checkpointing: bool = False,
    place: Callable[[Transformer], Transformer] = lambda model: model,
) -> Transformer:
    """The initialised model, on the CPU; under `torch.device("meta")` its shapes alone.

    `place` puts it elsewhere, or splits it, before its matrices are drawn.
    """
    model = place(Transformer(spec, vocab_size, precision, grad_checkpointing))
    initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Draws all matrices from normal(0, 0.02), those into the residual stream / sqrt(2 x layers).

    Each draws from a generator of its own, seeded by (seed, name): tensors that two architectures
    share are bit-identical under one seed, whatever else the two have. Norms (1) and gates have
    their values from construction.
    """
    residual_std = INIT_STD / math.sqrt(2 * len(model.layers))
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or parameter.is_meta:
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        # torch's CPU generator uses the low 32 bits of its seed.
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))
        std = residual_std if name.endswith(RESIDUAL_OUTPUTS) else INIT_STD
        own = part(parameter)
        if own.device.type == "cpu" and own.shape == parameter.shape:
            own.normal_(0.0, std, generator=generator)
        else:
            drawn = torch.empty(parameter.shape, device="cpu").normal_(
                0.0, std, generator=generator
            )
            own.copy_(part_of(drawn, parameter))


def training_forward(model: Transformer, compile_mode: str | None) -> TrainingForward:
    """The forward pass that a run trains through; evaluation takes the model itself.

    With a mode the blocks are compiled for batches of one shape; the model, its parameters and
    their names stay as they are.
    """
    blocks: Iterable[BlockCall] = model.layers
    if compile_mode:
        blocks = [
            torch.compile(block, mode=compile_mode, fullgraph=True, dynamic=False)
            for block in model.layers
        ]
    return lambda inputs: model.through(inputs, blocks)


def route_tables_sha256(model: Transformer) -> str | dict[str, str]:
    """Hash of all route tables in the order of layers, by value, whatever integers hold them."""
    tables = [
        layer.topk_token_to_expert
        for layer in model.routed_layers
        if isinstance(layer, TokenRouted)
    ]
    if not tables:
        routed = model.spec.is_routed
        reason = "a learned router has no table" if routed else "a dense model"
        return {"not_applicable": reason}
    return tables_sha256(tables)


def load_reference_state(model: Transformer, state: Mapping[str, Tensor]) -> None:
    """Loads weights saved by the runner that this package replaces, by their names.

    Its derived buffers (rotary frequencies, the table of first routes) are left out.

    Raises:
        ValueError: the saved route tables are not those of the model.
        RuntimeError: a name or a shape does not fit.
    """
    derived = ("rotary_emb.inv_freq", "mlp.token_to_expert")
    kept = {name: tensor for name, tensor in state.items() if not name.endswith(derived)}
    for name, table in model.named_buffers():
        if name in kept and not torch.equal(kept[name].to(table.dtype), table):
            raise ValueError(f"{name}: the saved route table is not the model's")
    model.load_state_dict(kept, strict=True)
