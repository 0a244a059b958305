"""The language-model loss: a linear head fused with cross-entropy, by blocks of the vocabulary.

T tokens, H hidden, V vocabulary. The full logits [T, V] never exist. A panel of tokens at a time
goes over the vocabulary twice, in the forward pass:

1. every tile of logits, [panel, `block_vocab`], leaves its log-sum-exp per token and its softmax,
   rounded as the products take it; the former together give each token's normaliser;
2. the softmax of every block is multiplied into the gradients of hidden states and head, with the
   block's share of the normaliser as a factor per token.

The backward pass scales these gradients. The logits are thus computed once (three products in all,
as a plain head takes), for the price of a panel's softmax: as large as the gradient of the head, or
that of `LEAST_TOKENS` where a narrow model makes that more.

Terms, per token t with logits l, target y and lse = log sum_v exp(l_v), all in nats:

    nll        lse - l_y
    smoothing  eps * (mean_v(lse - l_v) - nll)   so that nll + smoothing is the loss of
               `torch.nn.functional.cross_entropy(label_smoothing=eps)`
    z          z_loss * lse**2

Why it looks as it does: on CPUs with fast matrix units the elementwise work and the page faults of
fresh large tensors cost as much as the products. `log_softmax` and `softmax` are single fused
kernels (maximum, exponential and sum of a row in one go) where separate calls make four trips
through memory; a tile of logits stays in the cache; products have preallocated outputs; factors per
token go to the smaller side of a product; terms that are the same for all entries (smoothing) never
touch a tile.

bf16 runs: hidden states and head are rounded to bfloat16, products accumulate in float32, logits
and everything computed from them stay float32. The softmax is rounded to bfloat16
for the two products of the gradients. CPUs that multiply bfloat16 only into bfloat16
(AVX512-BF16) compute the logits with their float32 units, and round what each tile adds to the
gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.core.loss_settings import LossSettings
from workbench.core.precision import Precision, bf16_products, takes_float32
from workbench.core.workspace import Workspace

IGNORED = -100
"""Targets of this value are not scored: no loss, no gradient (PyTorch's convention)."""


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
        hidden,
        weight,
        targets,
        settings,
        precision,
        workspace or Workspace(),
        torch.is_grad_enabled(),  # not so within the function
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
    panels = _Panels(hidden, weight, targets, kept, plain, precision, workspace or Workspace())
    found, *_ = panels.compute(False, False)
    values = torch.zeros(targets.shape, dtype=panels.wide, device=targets.device)
    nll = found.lse - found.target
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
        trains: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        kept = scored_tokens(targets)
        panels = _Panels(hidden, weight, targets, kept, settings, precision, workspace)
        wanted = [trains and needed for needed in ctx.needs_input_grad[:2]]
        found, *ctx.gradients = panels.compute(*wanted)
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
        ctx.save_for_backward(hidden, weight, kept)
        ctx.workspace = workspace
        # A copy: an output must not be the same tensor as another one.
        objective = objective.to(torch.float32, copy=True)
        ctx.mark_non_differentiable(nll, smoothing, z)
        ctx.set_materialize_grads(False)
        return objective, nll, smoothing, z, panels.tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
        hidden, weight, kept = ctx.saved_tensors
        if ctx.gradients is None:
            raise RuntimeError("this loss was differentiated before; its gradients are used up")
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        if scale is None:
            return (None,) * 7
        if of_hidden is not None:
            of_hidden = of_hidden.mul_(scale).to(hidden.dtype)
            if kept is not None:
                of_hidden = torch.zeros_like(hidden).index_copy_(0, kept, of_hidden)
        if of_weight is not None:
            of_weight = hand_over(of_weight, scale, weight, ctx.workspace)
        return of_hidden, of_weight, None, None, None, None, None


class _Statistics(NamedTuple):
    """What the loss is computed from, [T] in `wide` floats."""

    lse: Tensor
    """Log-sum-exp of the logits over V."""
    target: Tensor
    """Logit of the target."""
    mean: Any
    """Mean logit over V; None without smoothing."""


class _Panels:
    """The logits of one micro-batch's scored tokens: panels of tokens x blocks of the vocabulary.

    Where gradients are asked for, a panel leaves its `softmax`: for each block of the vocabulary
    the softmax over that block, [tokens, entries] in the compute dtype, 0 for the targets.
    """

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
        self.weight = weight
        self.settings, self.precision, self.workspace = settings, precision, workspace
        self.device, self.compute_dtype = hidden.device, precision.compute
        # Per-token values are few: wide floats cost nothing. MPS has none.
        self.wide = torch.float32 if self.device.type == "mps" else torch.float64
        # Only CUDA multiplies bfloat16 into float32. Elsewhere operands are rounded values held
        # as float32, and `bf16_products` lets the CPU's matrix units take them for what they are.
        # Units that take no such operands are given bfloat16 where the product may be rounded to
        # it: for the gradients.
        native = precision.matmul == "native"
        self.narrow = native and self.device.type == "cuda"
        self.rounded_products = (
            native and not self.narrow and not takes_float32(precision, self.device)
        )
        self.targets = targets if kept is None else targets.index_select(0, kept)
        self.tokens = len(self.targets)
        scored = hidden if kept is None else hidden.index_select(0, kept)
        self.hidden = self._operand(scored, "hidden", low=self.narrow)
        size, entries = settings.block_vocab, len(weight)
        self.blocks = [slice(a, min(a + size, entries)) for a in range(0, entries, size)]

    def compute(
        self, of_hidden: bool, of_weight: bool
    ) -> tuple[_Statistics, Tensor | None, Tensor | None]:
        """The statistics, and those gradients of the objective that are asked for, float32."""
        lse = torch.empty(self.tokens, dtype=self.wide, device=self.device)
        target = torch.empty_like(lse)
        hidden_grad = weight_grad = None
        if of_hidden:
            hidden_grad = torch.zeros(self.hidden.shape, dtype=torch.float32, device=self.device)
        if of_weight:
            weight_grad = self.workspace.gradient(self.weight)
            if not self.tokens:
                weight_grad.zero_()
        size = self.settings.panel_tokens(self.weight.shape[1], self.compute_dtype)
        with bf16_products(self.precision, self.device):
            for start in range(0, self.tokens, size):
                panel = slice(start, min(start + size, self.tokens))
                rows = self.weight.index_select(0, self.targets[panel])
                rows = self._operand(rows, "rows", low=self.narrow).float()
                torch.sum(self.hidden[panel] * rows, 1, dtype=self.wide, out=target[panel])
                softmax = self._room(panel) if of_hidden or of_weight else None
                lse_blocks = self._log_sum_exps(panel, softmax)
                lse[panel] = lse_blocks.logsumexp(0)
                if softmax is not None:
                    self._clear_targets(panel, softmax)
                    share = lse_blocks.sub_(lse[panel]).exp_()
                    found = _Statistics(lse[panel], target[panel], None)
                    self._add_gradients(
                        panel, softmax, share, found, rows, hidden_grad, weight_grad
                    )
        mean = None
        if smoothing := self.settings.label_smoothing:
            head_mean = self._head_sum() / len(self.weight)
            mean = torch.mv(self.hidden.to(self.wide), head_mean)
            if hidden_grad is not None:
                hidden_grad -= (smoothing * head_mean).float()
            if weight_grad is not None:
                hidden_sum = self.hidden.sum(0, dtype=self.wide)
                weight_grad -= (smoothing / len(self.weight) * hidden_sum).float()
        return _Statistics(lse, target, mean), hidden_grad, weight_grad

    def _log_sum_exps(self, panel: slice, softmax: list[Tensor] | None) -> Tensor:
        """Log-sum-exp of each block's logits, [blocks, tokens] `wide`; fills `softmax`, targets
        and all."""
        hidden = self.hidden[panel]
        shape = (len(self.blocks), len(hidden))
        lse_blocks = torch.empty(shape, dtype=self.wide, device=self.device)
        for block, entry in enumerate(self.blocks):
            head = self._operand(self.weight[entry], "head", low=self.narrow)
            logits = self._product(hidden, head.t(), "logits")
            # log_softmax is l - lse: any column gives lse back, with an error of two roundings of
            # a float32 of that size.
            first = logits[:, 0].to(self.wide, copy=True)
            torch.log_softmax(logits, 1, out=logits)
            lse_blocks[block] = first.sub_(logits[:, 0])
            if softmax is not None:
                # The softmax of a log-softmax is its exponential, by a faster kernel.
                softmax[block].copy_(torch.softmax(logits, 1, out=logits))
        return lse_blocks

    def _add_gradients(
        self,
        panel: slice,
        softmax: list[Tensor],
        share: Tensor,
        found: _Statistics,
        rows: Tensor,
        hidden_grad: Tensor | None,
        weight_grad: Tensor | None,
    ) -> None:
        """What the tokens of a panel add to the gradients, [T, H] and [V, H].

        d objective / d l_v = softmax_v (1 + 2 z lse) - (1 - eps) [v = y] - eps / V, of which the
        last, the same for all entries, comes at the end. `share` [blocks, tokens] makes the softmax
        over a block the one over V: a factor per token, which the smaller side of each product
        takes. The target's entry, the difference of nearly equal numbers where the model is sure,
        is never rounded to the compute dtype.
        """
        hidden = self.hidden[panel]
        slope = 1 + 2 * self.settings.z_loss * found.lse
        factors = (share * slope).float().unsqueeze(-1)  # [blocks, tokens, 1]
        hit = (found.target - found.lse).exp_().mul_(slope).sub_(1 - self.settings.label_smoothing)
        hit = hit.float().unsqueeze(-1)
        low = self.narrow or self.rounded_products
        if hidden_grad is not None:
            hidden_grad[panel].addcmul_(hit, rows)
        for block, entry in enumerate(self.blocks):
            left = self._operand(softmax[block], "logits", low=low)
            if hidden_grad is not None:
                head = self._operand(self.weight[entry], "head", low=low)
                product = self._product(left, head, "hidden gradient")
                hidden_grad[panel].addcmul_(factors[block], product)
            if weight_grad is not None:
                shape = (len(hidden), hidden.shape[1])
                right = self.workspace.scratch("weighed", shape, torch.float32, self.device)
                torch.mul(hidden, factors[block], out=right)
                right = self._operand(right, "weighed", low=low)
                self._put(weight_grad[entry], left.t(), right, fresh=panel.start == 0)
        if weight_grad is not None:
            weight_grad.index_add_(0, self.targets[panel], hit * hidden)

    def _room(self, panel: slice) -> list[Tensor]:
        """Where the softmax of a panel goes: one contiguous matrix per block, one after another."""
        tokens, shape = panel.stop - panel.start, (panel.stop - panel.start, len(self.weight))
        flat = self.workspace.scratch("softmax", shape, self.compute_dtype, self.device).view(-1)
        return [flat[tokens * e.start : tokens * e.stop].view(tokens, -1) for e in self.blocks]

    def _clear_targets(self, panel: slice, softmax: list[Tensor]) -> None:
        """Sets the entries of the targets to 0."""
        targets, most = self.targets[panel], self.settings.block_vocab
        start = targets // most * most
        width = (len(self.weight) - start).clamp(max=most)
        row = torch.arange(len(targets), device=self.device)
        place = len(targets) * start + row * width + (targets - start)
        flat = softmax[0].as_strided((len(targets) * len(self.weight),), (1,))
        flat.index_fill_(0, place, 0.0)

    def _head_sum(self) -> Tensor:
        """The sum of the head's rows as multiplied, [H] `wide`."""
        total = torch.zeros(self.weight.shape[1], dtype=self.wide, device=self.device)
        for entry in self.blocks:
            total += self._operand(self.weight[entry], "head", low=True).sum(0, dtype=self.wide)
        return total

    def _operand(self, values: Tensor, name: str, *, low: bool) -> Tensor:
        """A matrix rounded to the compute dtype: held in it (`low`), or as float32."""
        if self.compute_dtype == torch.float32:
            return values
        shape = (values.shape[0], values.shape[1])
        rounded = values
        if values.dtype != self.compute_dtype:
            rounded = self.workspace.scratch(name, shape, self.compute_dtype, self.device)
            rounded.copy_(values)
        if low:
            return rounded
        return self.workspace.scratch(name, shape, torch.float32, self.device).copy_(rounded)

    def _product(self, left: Tensor, right: Tensor, name: str) -> Tensor:
        """left @ right, in float32 or, of bfloat16 on a CPU, in bfloat16; valid until the next of
        that name."""
        if self.narrow:
            return torch.mm(left, right, out_dtype=torch.float32)
        shape = (left.shape[0], right.shape[1])
        out = self.workspace.scratch(name, shape, left.dtype, self.device)
        return torch.mm(left, right, out=out)

    def _put(self, into: Tensor, left: Tensor, right: Tensor, *, fresh: bool) -> None:
        """`into` += left @ right, or = where `fresh`, in float32."""
        if self.narrow or self.rounded_products:
            product = self._product(left, right, "head gradient")
            (into.copy_ if fresh else into.add_)(product)
        elif fresh:
            torch.mm(left, right, out=into)
        else:
            into.addmm_(left, right)


def hand_over(
    gradient: Tensor, scale: Tensor, weight: Tensor, workspace: Workspace
) -> Tensor | None:
    """The head's gradient times `scale`: returned for autograd, or left in `weight.grad` where it
    is to be written directly. Overwrites `gradient`, which came from the workspace."""
    if not writes_directly(workspace, weight):
        return gradient.mul_(scale)
    if weight.grad is None:
        weight.grad = gradient.mul_(scale)
    else:
        weight.grad.addcmul_(gradient, scale)
        workspace.keep(gradient)
    return None


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
