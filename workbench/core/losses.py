"""The language-model loss: a linear head fused with cross-entropy, by blocks of the vocabulary.

T tokens, H hidden, V vocabulary. The full logits [T, V] never exist: one tile of them, [at most
`TILE_TOKENS`, `block_vocab`], is computed, used and overwritten. Two passes go over the vocabulary:

1. forward: every tile leaves its log-sum-exp per token; together they give each token's normaliser;
2. backward: the tile is computed again, becomes its own gradient in place, and is multiplied into
   the gradients of hidden states and head.

Terms, per token t with logits l, target y and lse = log sum_v exp(l_v), all in nats:

    nll        lse - l_y
    smoothing  eps * (mean_v(lse - l_v) - nll)   so that nll + smoothing is the loss of
               `torch.nn.functional.cross_entropy(label_smoothing=eps)`
    z          z_loss * lse**2

Why it looks as it does: on CPUs with fast matrix units the elementwise work and the page faults of
fresh large tensors cost as much as the products. `log_softmax` and `softmax` are single fused
kernels (maximum, exponential and sum of a row in one go) where separate calls make four trips
through memory; a tile stays in the cache; large products have preallocated outputs; terms that are
the same for all entries (smoothing) never touch the tile.

bf16 runs: hidden states and head are rounded to bfloat16, products accumulate in float32, logits
and everything computed from them stay float32. The gradient of the logits is rounded to bfloat16
for the two products of the backward pass. CPUs that multiply bfloat16 only into bfloat16
(AVX512-BF16) compute the logits with their float32 units, and round what each tile adds to the
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.core.precision import Precision, bf16_products, takes_float32
from workbench.core.workspace import Workspace

IGNORED = -100
"""Targets of this value are not scored: no loss, no gradient (PyTorch's convention)."""

TILE_TOKENS = 1024
"""Tokens per tile of logits: 8 MB at 2,048 entries, which a shared cache holds. Larger tiles were
no faster and smaller ones lose matmul rate."""


@dataclass(frozen=True)
class LossSettings:
    """What the loss computes (smoothing, z) and in which pieces (blocks).

    `block_vocab` and `chunk_tokens` bound the tile of logits that exists at a time: entries and
    tokens (0 = no bound asked for; `TILE_TOKENS` holds in any case). Neither changes the result
    beyond the order of float32 sums.
    """

    block_vocab: int = 2048
    chunk_tokens: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.block_vocab < 1:
            raise ValueError(f"block_vocab is {self.block_vocab}, must be at least 1")
        if self.chunk_tokens < 0:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}, must be 0 (all) or more")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, must be in [0, 1)")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"z_loss is {self.z_loss}, must be a number >= 0")

    @property
    def tile_tokens(self) -> int:
        """The most tokens in one tile of logits."""
        return min(self.chunk_tokens or TILE_TOKENS, TILE_TOKENS)


class LossSums(NamedTuple):
    """Sums over the scored tokens of one micro-batch, in nats. Divide by the scored tokens of the
    whole accumulation window, over all processes; never by the tokens of the micro-batch."""

    objective: Tensor
    """float32 scalar, differentiable: nll + smoothing + z."""
    nll: Tensor
    """float64 scalar, detached: the plain negative log-likelihood, whatever the settings."""
    smoothing: Tensor
    """float64 scalar, detached: what label smoothing added; exactly 0 when it is off."""
    z: Tensor
    """float64 scalar, detached: what z-loss added; exactly 0 when it is off."""
    tokens: int
    """Scored tokens."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: LossSettings,
    precision: Precision,
    workspace: Workspace | None = None,
) -> LossSums:
    """Sums of the loss of `hidden @ weight.T` against `targets`, in float32 logits.

    hidden [T, H] in the compute dtype, weight [V, H] float32 master, targets [T] int64: the entry
    that each position predicts, exactly as given (nothing is shifted here), or `IGNORED`.

    Gradients flow into `hidden` and `weight` from `objective` only; how that of the weight is kept
    is the workspace's matter.

    Raises:
        ValueError: shapes or dtypes do not fit, or a target is neither in [0, V) nor `IGNORED`.
    """
    check_inputs(hidden, weight, targets, precision)
    sums: tuple[Tensor, Tensor, Tensor, Tensor, int] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, settings, precision, workspace or Workspace()
    )
    return LossSums(*sums)


@torch.no_grad()
def linear_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: LossSettings,
    precision: Precision,
    workspace: Workspace | None = None,
) -> Tensor:
    """The plain NLL of every token, [T] float64 in nats, 0 where ignored; no gradient.

    The arithmetic of `linear_cross_entropy`, whose `nll` is the sum of these values; smoothing and
    z of the settings play no part.

    Raises:
        ValueError: as `linear_cross_entropy`.
    """
    check_inputs(hidden, weight, targets, precision)
    kept = scored_tokens(targets)
    plain = LossSettings(settings.block_vocab, settings.chunk_tokens)
    run = _Tiles(hidden, weight, targets, kept, plain, precision, workspace or Workspace())
    statistics = run.statistics()
    values = torch.zeros(targets.shape, dtype=run.wide, device=targets.device)
    nll = statistics.lse - statistics.target
    if kept is None:
        return values.copy_(nll)
    return values.index_copy_(0, kept, nll)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: LossSettings,
        precision: Precision,
        workspace: Workspace,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        kept = scored_tokens(targets)
        tiles = _Tiles(hidden, weight, targets, kept, settings, precision, workspace)
        found = tiles.statistics()
        per_token = found.lse - found.target
        nll = per_token.sum()
        smoothing, z = torch.zeros_like(nll), torch.zeros_like(nll)
        objective = nll
        if settings.label_smoothing:
            smoothing = settings.label_smoothing * (found.lse - found.mean - per_token).sum()
            objective = objective + smoothing
        if settings.z_loss:
            z = settings.z_loss * found.lse.square().sum()
            objective = objective + z
        ctx.save_for_backward(
            hidden, weight, targets, kept, found.lse_blocks, found.lse, found.head_sum
        )
        ctx.how = (settings, precision, workspace)
        # A copy: an output must not be the same tensor as another one.
        objective = objective.to(torch.float32, copy=True)
        ctx.mark_non_differentiable(nll, smoothing, z)
        ctx.set_materialize_grads(False)
        return objective, nll, smoothing, z, tiles.tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        hidden, weight, targets, kept, lse_blocks, lse, head_sum = ctx.saved_tensors
        settings, precision, workspace = ctx.how
        tiles = _Tiles(hidden, weight, targets, kept, settings, precision, workspace)
        of_hidden, of_weight = tiles.gradients(
            grad, _Statistics(lse_blocks, lse, None, None, head_sum), *ctx.needs_input_grad[:2]
        )
        return of_hidden, of_weight, None, None, None, None


class _Statistics(NamedTuple):
    """What the first pass finds, in `wide` floats."""

    lse_blocks: Tensor
    """[blocks of V, T] log-sum-exp over each block."""
    lse: Tensor
    """[T] log-sum-exp over V."""
    target: Any
    """[T] logit of the target."""
    mean: Any
    """[T] mean logit over V; None without smoothing."""
    head_sum: Tensor | None
    """[H] sum of the head's rows as multiplied; None without smoothing."""


class _Tiles:
    """The tiles of one micro-batch: scored tokens x vocabulary, in blocks."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        settings: LossSettings,
        precision: Precision,
        workspace: Workspace,
    ) -> None:
        self.all_hidden, self.weight, self.kept = hidden, weight, kept
        self.settings, self.precision, self.workspace = settings, precision, workspace
        self.device = hidden.device
        # Per-token values are few: wide floats cost nothing. MPS has none.
        self.wide = torch.float32 if self.device.type == "mps" else torch.float64
        # Only CUDA multiplies bfloat16 into float32. Elsewhere operands are rounded values held
        # as float32, and `bf16_products` lets the CPU's matrix units take them for what they are.
        # Units that take no such operands are given bfloat16 where the product may be rounded to
        # it: for the gradients.
        native = precision.matmul == "native"
        self.narrow = native and self.device.type == "cuda"
        self.rounds_within = takes_float32(precision, self.device)
        self.rounded_products = native and not self.narrow and not self.rounds_within
        self.rounds = precision.compute != torch.float32
        self.targets = targets if kept is None else targets.index_select(0, kept)
        self.tokens = len(self.targets)
        self.direct = writes_directly(workspace, weight)
        scored = hidden if kept is None else hidden.index_select(0, kept)
        self.hidden, self.low_hidden = self._operands(scored, "hidden")
        size, entries = settings.tile_tokens, len(weight)
        self.token_tiles = [
            slice(a, min(a + size, self.tokens)) for a in range(0, self.tokens, size)
        ]
        size = settings.block_vocab
        self.blocks = [slice(a, min(a + size, entries)) for a in range(0, entries, size)]

    def statistics(self) -> _Statistics:
        """The first pass."""
        entries = len(self.weight)
        lse_blocks = torch.empty(len(self.blocks), self.tokens, dtype=self.wide, device=self.device)
        smooths = self.settings.label_smoothing > 0
        head_sum = torch.zeros(self.weight.shape[1], dtype=self.wide, device=self.device)
        with bf16_products(self.precision, self.device):
            for block, entry in enumerate(self.blocks):
                head, _ = self._operands(self.weight[entry], "head")
                if smooths:
                    head_sum += head.sum(0, dtype=self.wide)
                for tile in self.token_tiles:
                    logits = self._logits(tile, head)
                    # log_softmax is l - lse: any column gives lse back, with an error of two
                    # roundings of a float32 of that size.
                    first = logits[:, 0].to(self.wide, copy=True)
                    torch.log_softmax(logits, 1, out=logits)
                    lse_blocks[block, tile] = first.sub_(logits[:, 0])
        target = torch.empty(self.tokens, dtype=self.wide, device=self.device)
        for tile in self.token_tiles:
            rows, _ = self._operands(self.weight.index_select(0, self.targets[tile]), "rows")
            torch.sum(self.hidden[tile] * rows.float(), 1, dtype=self.wide, out=target[tile])
        mean = None
        if smooths:
            mean = torch.mv(self.hidden.to(self.wide), head_sum / entries)
        return _Statistics(
            lse_blocks, lse_blocks.logsumexp(0), target, mean, head_sum if smooths else None
        )

    def gradients(
        self, scale: Tensor, found: _Statistics, of_hidden: bool, of_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The second pass: gradients of `scale` (a scalar) times the objective."""
        smoothing = self.settings.label_smoothing
        scale = scale.to(self.wide)
        # d objective / d l_v = softmax_v (1 + 2 z lse) - (1 - eps) [v = y] - eps / V; the softmax
        # over a block becomes the one over V by the block's share of the sum.
        share = (found.lse_blocks - found.lse).exp_()
        share = share.mul_(scale * (1 + 2 * self.settings.z_loss * found.lse)).float()
        hits = (scale * (smoothing - 1)).float().expand(self.tokens)
        flat, ends = self._target_places()

        hidden_grad = torch.zeros(self.hidden.shape, dtype=torch.float32, device=self.device)
        weight_grad, adds = self._weight_gradient() if of_weight else (None, False)
        head_shift = None
        if found.head_sum is not None:
            even = scale * (smoothing / len(self.weight))
            hidden_grad -= (even * found.head_sum).float()
            head_shift = (even * self.hidden.sum(0, dtype=self.wide)).float()

        with bf16_products(self.precision, self.device):
            for block, entry in enumerate(self.blocks):
                head, low_head = self._operands(self.weight[entry], "head")
                fresh = not adds
                for number, tile in enumerate(self.token_tiles):
                    logits = self._logits(tile, head)
                    torch.softmax(logits, 1, out=logits)
                    logits.mul_(share[block, tile, None])
                    here = slice(*ends[block * len(self.token_tiles) + number :][:2])
                    if here.start < here.stop:
                        logits.view(-1).index_add_(0, flat[here], hits[here])
                    logits = self._rounded(logits)
                    if of_hidden:
                        self._add_product(hidden_grad[tile], logits, low_head, fresh=False)
                    if weight_grad is not None:
                        self._add_product(
                            weight_grad[entry], logits.t(), self.low_hidden[tile], fresh=fresh
                        )
                    fresh = False
                if weight_grad is not None:
                    if fresh:  # no token is scored, nothing was written
                        weight_grad[entry].zero_()
                    if head_shift is not None:
                        weight_grad[entry].sub_(head_shift)

        result = None
        if of_hidden:
            result = hidden_grad.to(self.all_hidden.dtype)
            if self.kept is not None:
                result = torch.zeros_like(self.all_hidden).index_copy_(0, self.kept, result)
        if self.direct and weight_grad is not None:
            self.weight.grad = weight_grad
            weight_grad = None
        return result, weight_grad

    def _weight_gradient(self) -> tuple[Tensor, bool]:
        """Where the head's gradient goes, and whether it adds to what is there already."""
        grad = self.weight.grad if self.direct else None
        if grad is not None:
            return grad, True
        return self.workspace.gradient(self.weight), False

    def _target_places(self) -> tuple[Tensor, list[int]]:
        """Where in the tiles the targets lie: positions in each flattened tile, ordered by tile
        (blocks outside, tokens inside), and the ends [0, ...] of the tiles in that order."""
        settings = self.settings
        block = self.targets // settings.block_vocab
        token = torch.arange(self.tokens, device=self.device)
        tile = token // settings.tile_tokens
        start = block * settings.block_vocab
        width = (len(self.weight) - start).clamp(max=settings.block_vocab)
        flat = (token % settings.tile_tokens) * width + (self.targets - start)
        cell = block * len(self.token_tiles) + tile
        cells = len(self.blocks) * len(self.token_tiles)
        ends = torch.bincount(cell, minlength=cells).cumsum(0).tolist()
        return flat[torch.argsort(cell, stable=True)], [0, *ends]

    def _operands(self, values: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """A matrix, rounded to the compute dtype, as the product of the logits takes it and as
        those of the gradients do."""
        if not self.rounds:
            return values, values
        shape = (values.shape[0], values.shape[1])
        low = values
        if values.dtype != self.precision.compute:
            low = self.workspace.scratch(name, shape, self.precision.compute, self.device)
            low.copy_(values)
        if self.narrow:
            return low, low
        wide = self.workspace.scratch(name, shape, torch.float32, self.device).copy_(low)
        return wide, low if self.rounded_products else wide

    def _logits(self, tile: slice, head: Tensor) -> Tensor:
        """One tile of logits, [tokens, entries] float32, valid until the next call."""
        rows = self.hidden[tile]
        if self.narrow:
            return torch.mm(rows, head.t(), out_dtype=torch.float32)
        shape = (len(rows), len(head))
        out = self.workspace.scratch("logits", shape, torch.float32, self.device)
        return torch.mm(rows, head.t(), out=out)

    def _rounded(self, logits_grad: Tensor) -> Tensor:
        """The gradient of a tile as the backward products take it."""
        if not self.rounds or self.rounds_within:
            return logits_grad  # `bf16_products`: the product itself rounds
        shape = (logits_grad.shape[0], logits_grad.shape[1])
        low = self.workspace.scratch("gradient", shape, self.precision.compute, self.device)
        low.copy_(logits_grad)
        return low if self.narrow or self.rounded_products else logits_grad.copy_(low)

    def _add_product(self, into: Tensor, left: Tensor, right: Tensor, *, fresh: bool) -> None:
        """`into` += left @ right, or = where `fresh`, in float32."""
        if self.narrow or self.rounded_products:
            product = (
                torch.mm(left, right, out_dtype=torch.float32)
                if self.narrow
                else torch.mm(left, right)
            )
            (into.copy_ if fresh else into.add_)(product)
        elif fresh:
            torch.mm(left, right, out=into)
        else:
            into.addmm_(left, right)


def writes_directly(workspace: Workspace, weight: Tensor) -> bool:
    """Whether the head's gradient goes into `weight.grad` itself: asked for, and possible."""
    dense = weight.grad is None or weight.grad.layout == torch.strided
    return workspace.direct and weight.is_leaf and dense


def scored_tokens(targets: Tensor) -> Tensor | None:
    """Indices of the scored tokens; None when all are."""
    scored = targets != IGNORED
    return None if bool(scored.all()) else scored.nonzero().squeeze(1)


def check_inputs(hidden: Tensor, weight: Tensor, targets: Tensor, precision: Precision) -> None:
    """Raise ValueError for what does not fit together, and for targets outside the vocabulary."""
    if hidden.dtype != precision.compute or weight.dtype != torch.float32:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}, "
            f"must be {precision.compute} and torch.float32"
        )
    dimensions = hidden.ndim == weight.ndim == 2 and targets.ndim == 1
    if not dimensions or hidden.shape != (len(targets), weight.shape[1]):
        raise ValueError(
            "hidden [T, H], weight [V, H] and targets [T] do not fit: "
            f"{list(hidden.shape)}, {list(weight.shape)}, {list(targets.shape)}"
        )
    wrong = ((targets < 0) | (targets >= len(weight))) & (targets != IGNORED)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"target {int(targets[at])} at position {at} is outside the vocabulary of "
            f"{len(weight)} entries (allowed: 0 to {len(weight) - 1}, or {IGNORED} = ignored)"
        )
