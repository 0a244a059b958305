"""Memory that training takes, computed from the spec: what is allocated, tensor by tensor.

B batch, S sequence, T = B*S tokens of a micro-batch, H hidden, V vocabulary, L layers, D head dim,
N query heads, G key/value heads, E experts, K routes, I width of a dense feed-forward, R width of
all experts together, F width of the shared path.

It follows the code that it predicts, as it runs on a CPU: which tensors autograd keeps for the
backward pass (`Transformer`), where the gradient of the head goes (`Workspace`), which tiles the
loss works in (`_Panels`), what the optimizers remember. Tests compare each part with what the
model, the optimizers and the loss really hold, and the sum with the peak of real processes. Kernels
of other devices keep less in places (a fused norm has no product to keep): there it is a close
upper bound.

Torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from workbench.spec.run import ModelSpec, RunSpec

Matmul = Literal["native", "upcast", "float32"]
"""The means by which products run, see `precision.Matmul`."""

Kind = Literal["vector", "vocabulary", "router", "expert", "shared", "matrix"]
"""What a parameter is, see `optim.Kind`."""

FLOAT, WIDE, INDEX, ROUTE = 4, 8, 8, 2
"""Bytes of float32, of float64, of an int64 index, and of an int16 entry of a route table."""

TILE_TOKENS, LEAST_TOKENS = 1024, 128
"""Tokens in a tile of logits: those of `loss_settings`."""

COMPILER_BYTES = 140_000_000
"""Modules of torch's compiler, which `torch.optim` loads when the first optimizer is built, whether
or not anything is compiled (torch 2.13; measured)."""

MAPPED_BYTES = 1 << 25
"""Allocations from this size on go back to the kernel when freed: `process.prepare_process`."""

TOKEN_BYTES = 510
"""A vocabulary entry in tiktoken's two tables and in ours (o200k_base; measured)."""


@dataclass(frozen=True)
class Footprint:
    """Bytes by what they are for. Together they are the peak of resident memory, see `peak`.

    weights      float32 masters, route tables, rotary tables
    gradients    float32, of every parameter; the head's is written by the loss itself, and that of
                 a tied embedding is added into it
    optimizer    AdamW's two moments, Muon's one
    activations  what autograd keeps of one micro-batch's forward pass until its backward pass; with
                 gradient checkpointing the inputs of all blocks and the inside of one
    loss         the tile of logits, the softmax of a panel, the rounded operands, the gradient of
                 the hidden states, and with accumulation a second one of the head
    temporaries  results in the middle of one block's backward pass
    process      what building a run loads beside tensors: vocabulary and modules
    holes        freed memory of the heap that the next pass cannot use, see `footprint`
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    temporaries: int
    process: int
    holes: int

    @property
    def peak(self) -> int:
        """The most that is resident, from the third update on.

        The sum of all: it is reached when the last block's backward pass begins. Gradients of the
        blocks are not alive then (but for accumulation), yet their memory is taken: the process
        keeps what it frees (`process.prepare_process`).
        """
        return sum(getattr(self, field.name) for field in fields(self))


class Parameter(NamedTuple):
    """One trainable tensor."""

    kind: Kind
    size: int


def footprint(spec: RunSpec, vocab_size: int, matmul: Matmul) -> Footprint:
    """The memory of training `spec` over `vocab_size` entries, products running by `matmul`.

    Holes: torch asks for memory aligned to 64 bytes, and glibc (2.36) then looks for a piece larger
    by the alignment. So it does not put a tensor where an equal one was freed, unless neighbours
    were freed with it, and the heap fills with holes of the sizes of tensors until there are half
    as many as there are tensors of one forward pass (the fifty-percent rule; Knuth, The Art of
    Computer Programming, vol. 1, 2.5). Checkpointing does not change that: each block leaves its
    own. Gradients of the blocks and temporaries find room in them. Tensors of `MAPPED_BYTES` and
    more leave none. Of all parts this one is an estimate.
    """
    training = spec.training
    parameters = list(model_parameters(spec.model, vocab_size))
    total = FLOAT * sum(one.size for one in parameters)
    rotary = 2 * FLOAT * spec.model.max_position_embeddings * (spec.model.head_dim // 2)
    tokens = spec.micro_batch_size * training.seq_len
    compiled = training.compile_mode is not None
    model = Activations(spec.model, tokens, matmul, compiled=compiled)
    heap = Activations(spec.model, tokens, matmul, compiled=compiled, below=MAPPED_BYTES)
    in_holes = sum(FLOAT * one.size for one in parameters if one.kind != "vocabulary")
    in_holes += model.temporaries()
    return Footprint(
        weights=total + route_table_bytes(spec.model, vocab_size) + rotary,
        gradients=total,
        optimizer=optimizer_bytes(spec, vocab_size),
        activations=model.kept(training.grad_ckpt),
        loss=loss_bytes(spec, vocab_size, matmul),
        temporaries=model.temporaries(),
        process=COMPILER_BYTES + TOKEN_BYTES * vocab_size,
        holes=max(0, heap.kept(checkpointed=False) // 2 - in_holes),
    )


def checkpoint_bytes(spec: RunSpec, vocab_size: int) -> int:
    """The tensors of a checkpoint: weights, route tables, optimizer state with its step counts.

    Names, sizes and hashes of the tensors add some kilobytes.
    """
    parameters = list(model_parameters(spec.model, vocab_size))
    steps = FLOAT * sum(not _by_muon(spec, one) for one in parameters)
    weights = whole_weights_bytes(spec, vocab_size)
    return weights + optimizer_bytes(spec, vocab_size) + steps


def whole_weights_bytes(spec: RunSpec, vocab_size: int) -> int:
    """Weights and route tables in one file. Where each process saves a part of the model, the last
    checkpoint of a run holds it beside the parts."""
    weights = FLOAT * sum(one.size for one in model_parameters(spec.model, vocab_size))
    return weights + route_table_bytes(spec.model, vocab_size)


def optimizer_bytes(spec: RunSpec, vocab_size: int) -> int:
    """float32 moments: two of each parameter that AdamW trains, one of each that Muon does."""
    parameters = model_parameters(spec.model, vocab_size)
    return FLOAT * sum(one.size * (1 if _by_muon(spec, one) else 2) for one in parameters)


def _by_muon(spec: RunSpec, parameter: Parameter) -> bool:
    kind = parameter.kind
    return kind in ("expert", "shared", "matrix") and spec.optimizer.uses_muon_for(kind)


def model_parameters(spec: ModelSpec, vocab_size: int) -> Iterator[Parameter]:
    """Every trainable tensor of the model, by kind; the order is not the model's."""
    hidden, experts = spec.hidden_size, spec.num_experts or 0
    for _ in range(1 if spec.tie_word_embeddings else 2):
        yield Parameter("vocabulary", vocab_size * hidden)
    yield Parameter("vector", hidden)
    for _ in range(spec.num_hidden_layers):
        yield from [Parameter("vector", hidden)] * 2
        if spec.qk_norm:
            yield from [Parameter("vector", spec.head_dim)] * 2
        for heads in (spec.num_attention_heads, spec.num_key_value_heads):
            yield from [Parameter("matrix", hidden * heads * spec.head_dim)] * 2
        stacks: Kind = "expert" if spec.is_routed else "matrix"
        yield from [Parameter(stacks, hidden * spec.intermediate_size)] * 3
        if spec.shared_intermediate_size:
            yield from [Parameter("shared", hidden * spec.shared_intermediate_size)] * 3
        if spec.learn_shared_routed_gates:
            yield from [Parameter("vector", 1)] * 2
        if spec.mlp_type == "learned_router":
            yield Parameter("router", hidden * experts)


def route_table_bytes(spec: ModelSpec, vocab_size: int) -> int:
    """The tables of a token-routed model, [K, V] in each layer."""
    if spec.mlp_type != "token_routed":
        return 0
    assert spec.top_k
    return spec.num_hidden_layers * spec.top_k * vocab_size * ROUTE


def loss_bytes(spec: RunSpec, vocab_size: int, matmul: Matmul) -> int:
    """The working memory of `losses.linear_cross_entropy` over one micro-batch.

    The scratch is kept from step to step: a tile of logits, the softmax of a panel of tokens over
    the vocabulary, the operands of the products and, in bf16, their rounded copies. Statistics
    [blocks of V, tokens of a panel] are float64, once more as they turn into factors per token,
    which are float32. The gradient of the head is written into `weight.grad`; later micro-batches
    of an update add theirs from a second tensor.
    """
    training, hidden = spec.training, spec.model.hidden_size
    tokens = spec.micro_batch_size * training.seq_len
    width = FLOAT if matmul == "float32" else FLOAT // 2
    fitting = max(FLOAT * hidden // width, LEAST_TOKENS)
    panel = min(training.loss_chunk_tokens or TILE_TOKENS, TILE_TOKENS, fitting, tokens)
    block = min(training.loss_block_vocab, vocab_size)
    scratch = FLOAT * panel * block + width * panel * vocab_size
    scratch += (FLOAT + width) * panel * hidden  # hidden states by their factors, their gradient
    if matmul != "float32":
        rows = tokens + block + panel  # of hidden states, of the head, of the targets' entries
        scratch += FLOAT * rows * hidden + FLOAT // 2 * (block + 2 * panel) * hidden
        # What a block adds to the head's gradient, and to the hidden states' above: AMX and
        # products of upcast operands put both out as float32, the former in its place.
        scratch += FLOAT // 2 * (block if matmul == "native" else panel) * hidden
    statistics = (2 * WIDE + FLOAT) * math.ceil(vocab_size / block) * panel
    gradient = FLOAT * tokens * hidden  # of the hidden states
    if matmul != "float32":
        gradient += FLOAT // 2 * tokens * hidden
    if training.gradient_accumulation_steps > 1:
        gradient += FLOAT * vocab_size * hidden
    return scratch + statistics + gradient


class Activations:
    """Bytes that a forward pass leaves for the backward pass, by part of the model.

    Activations have `c` bytes. Operands of products have `m`: the activation itself in float32, its
    rounded value in a `native` bf16 run, and in an `upcast` one a float32 copy of that for every
    product. A bf16 run also keeps the copies of the weights that it multiplied by.

    A `compiled` block computes elementwise results again in its backward pass rather than keep
    them, and keeps one copy of what several products take (torch 2.13).

    Only tensors smaller than `below` bytes are counted. `copies` says whether the rounded copies of
    the weights are among them; `head_dim` is that of the model, where `spec` holds a part of its
    heads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokens: int,
        matmul: Matmul,
        *,
        compiled: bool = False,
        below: float = math.inf,
        copies: bool = True,
        head_dim: int | None = None,
    ) -> None:
        self.spec, self.tokens, self.matmul = spec, tokens, matmul
        self.compiled, self.below, self.copies = compiled, below, copies
        self.head_dim = head_dim or spec.head_dim
        self.c = FLOAT if matmul == "float32" else FLOAT // 2
        self.m = FLOAT // 2 if matmul == "native" else FLOAT
        self.query = spec.num_attention_heads * self.head_dim
        self.key = spec.num_key_value_heads * self.head_dim

    def kept(self, checkpointed: bool) -> int:
        """The whole model's. Checkpointed, a block keeps its input alone, and is computed again
        when its turn comes, so that the inside of one block is there at a time."""
        layers, stream = self.spec.num_hidden_layers, self._rows(self.spec.hidden_size, self.c)
        ends = self._rows(1, INDEX) + self._norm_alone(self.spec.hidden_size, 1) + stream
        if checkpointed:
            return ends + layers * stream + self.block()
        return ends + layers * self.block()

    def block(self) -> int:
        """One block's."""
        return self._attention() + self._feed_forward()

    def temporaries(self) -> int:
        """The largest working set of one block's backward pass: of its feed-forward the gradient
        of the activation, the part computed again and the gradients of its two factors, of its
        attention the gradients of queries, keys and values in and out; beside either the gradient
        of the residual stream and of what was added to it."""
        spec = self.spec
        width = max(spec.intermediate_size, spec.shared_intermediate_size or 0)
        inside = max(4 * self.c * width, 2 * FLOAT * (self.query + 2 * self.key))
        return self.tokens * (inside + 2 * FLOAT * spec.hidden_size)

    def _attention(self) -> int:
        spec, hidden = self.spec, self.spec.hidden_size
        found = self._norm(hidden, 1) + self._operand(hidden, products=3)
        if spec.qk_norm:
            found += self._norm(self.query, spec.num_attention_heads)
            found += self._norm(self.key, spec.num_key_value_heads)
        # Queries, keys, values and the result, and the log-sum-exp of every query.
        found += 2 * self._rows(self.query, self.m) + 2 * self._rows(self.key, self.m)
        found += self._rows(spec.num_attention_heads, FLOAT)
        if self.matmul == "upcast":
            found += self._operand(self.query, products=1)
        return found + 2 * self._weight(hidden * self.query) + 2 * self._weight(hidden * self.key)

    def _feed_forward(self) -> int:
        spec, hidden = self.spec, self.spec.hidden_size
        found = self._norm(hidden, 1)
        if not spec.is_routed:
            inside = self._swiglu(spec.intermediate_size)
            return found + self._operand(hidden, products=2) + inside
        return found + self._experts() + self._shared() + self._gates()

    def _experts(self) -> int:
        """The routed path, and the operand that all paths share."""
        spec, hidden, width = self.spec, self.spec.hidden_size, self.spec.intermediate_size
        assert spec.num_experts
        found = self._operand(hidden, products=2) + self._swiglu(width)
        if self.matmul == "float32" and spec.num_experts > 1:
            # The stacks of two factors, laid side by side.
            found += 2 * self._tensor(FLOAT * width * hidden)
        return found + (self._router() if spec.mlp_type == "learned_router" else self._routes())

    def _routes(self) -> int:
        """What each expert counts for; compiled, it is found again from the routes of each token,
        of which one expert alone leaves a yes or no."""
        assert self.spec.num_experts
        assert self.spec.top_k
        if not self.compiled:
            return self._rows(self.spec.num_experts, FLOAT)
        return self._rows(self.spec.top_k, ROUTE if self.spec.num_experts > 1 else 1)

    def _router(self) -> int:
        """What each expert counts for, probabilities, the chosen ones' indices, sum and values."""
        spec = self.spec
        assert spec.num_experts
        assert spec.top_k
        found = 2 * self._rows(spec.num_experts, FLOAT) + self._rows(spec.top_k, INDEX)
        if spec.top_k > 1:
            found += self._rows(1, FLOAT) + self._rows(spec.top_k, FLOAT)
        if self.compiled:
            found += self._rows(spec.num_experts, FLOAT)  # scores
        else:
            found += self._rows(spec.intermediate_size, self.c)  # the unweighted activation
        if self.matmul == "native" or (self.matmul == "upcast" and not self.compiled):
            found += self._rows(spec.hidden_size, FLOAT)  # it takes float32
        return found

    def _shared(self) -> int:
        spec = self.spec
        if not spec.shared_intermediate_size:
            return 0
        copied = self.matmul == "upcast" and not self.compiled
        if 0 < (spec.shared_expert_chunk_tokens or 0) < self.tokens:
            # The chunks keep their input, which elsewhere is an operand already.
            return self._rows(spec.hidden_size, self.c) if copied else 0
        copies = self._operand(spec.hidden_size, products=2) if copied else 0
        return copies + self._swiglu(spec.shared_intermediate_size)

    def _gates(self) -> int:
        """What both paths add, as float32 where nothing is compiled, and the gates that multiply
        it."""
        if not (self.spec.learn_shared_routed_gates and self.spec.shared_intermediate_size):
            return 0
        if self.compiled:
            return 2 * self._rows(self.spec.hidden_size, self.c)
        return 2 * self._rows(self.spec.hidden_size, FLOAT) + 2 * FLOAT

    def _swiglu(self, width: int) -> int:
        """Both factors, their product as an operand, and the three weights."""
        factors = 2 * self._rows(width, self.c)
        return factors + self._rows(width, self.m) + 3 * self._weight(width * self.spec.hidden_size)

    def _norm(self, width: int, rows: int) -> int:
        """The input and one over its root mean square, per row."""
        if not self.compiled:
            return self._norm_alone(width, rows)
        return self._rows(width, self.c) + self._rows(rows, FLOAT)

    def _norm_alone(self, width: int, rows: int) -> int:
        """The input as float32, the same over its root mean square, and one over that, per row."""
        return 2 * self._rows(width, FLOAT) + self._rows(rows, FLOAT)

    def _operand(self, width: int, products: int) -> int:
        """An activation that is multiplied by several weights."""
        copies = products if self.matmul == "upcast" and not self.compiled else 1
        return self._rows(width, self.m) * copies

    def _weight(self, size: int) -> int:
        """The copy of a weight that a product takes."""
        if self.matmul == "float32" or not self.copies:
            return 0
        return self._tensor(self.m * size)

    def _rows(self, width: int, size: int) -> int:
        """A tensor [T, width] of entries of `size` bytes."""
        return self._tensor(self.tokens * width * size)

    def _tensor(self, size: int) -> int:
        return size if size < self.below else 0
