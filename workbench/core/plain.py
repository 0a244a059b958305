"""The transformer as it is usually written: the plain step that `wb bench` compares with.

Stock modules, eager: `nn.Linear`, `nn.Embedding`, `nn.RMSNorm`, repeated key/value heads, each
expert on the tokens gathered for it, full logits, `F.cross_entropy`, autocast, fused AdamW, no
checkpointing. Widths, routes, and so the function it computes are those of `core.model`; what a
plain script has no place for, `left_out` names.

B batch, S sequence, T = B*S tokens, H hidden, V vocabulary, N heads, G key/value heads, D head dim,
E experts, K routes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.core.attention import rotary_table
from workbench.core.layers import EPSILON
from workbench.core.model import INIT_STD
from workbench.core.moe import mixture
from workbench.core.routing import route_table
from workbench.spec.profiles import RAMPS
from workbench.spec.run import ModelSpec, RunSpec


class PlainAttention(nn.Module):
    """Causal self-attention of one block."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        hidden, head_dim = spec.hidden_size, spec.head_dim
        self.q_proj = nn.Linear(hidden, self.heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=EPSILON) if spec.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, eps=EPSILON) if spec.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H], cos and sin [S, D] -> [B, S, H]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if self.kv_heads != self.heads:
            repeats = self.heads // self.kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class PlainSwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class PlainRouted(nn.Module):
    """A shared SwiGLU beside E experts; each expert takes the tokens that are routed to it.

    The routes come from a table by token id, or from a learned router. `balance` is the balance
    loss of the last forward pass, 0 without a router.
    """

    routes: Tensor

    def __init__(self, spec: ModelSpec, vocab_size: int, layer: int) -> None:
        super().__init__()
        assert spec.num_experts
        assert spec.top_k
        width = spec.intermediate_size // spec.num_experts
        self.experts = nn.ModuleList(
            PlainSwiGLU(spec.hidden_size, width) for _ in range(spec.num_experts)
        )
        self.shared = None
        if spec.shared_expert:
            assert spec.shared_intermediate_size
            self.shared = PlainSwiGLU(spec.hidden_size, spec.shared_intermediate_size)
        self.shared_gate = self.routed_gate = None
        if spec.learn_shared_routed_gates:
            assert spec.shared_gate_init is not None
            assert spec.routed_gate_init is not None
            self.shared_gate = nn.Parameter(torch.tensor(spec.shared_gate_init))
            self.routed_gate = nn.Parameter(torch.tensor(spec.routed_gate_init))
        self.top_k = spec.top_k
        self.balance = torch.zeros(())
        self.router = None
        if spec.mlp_type == "learned_router":
            self.router = nn.Linear(spec.hidden_size, spec.num_experts, bias=False)
            return
        self.mixture = mixture(spec.top_k, spec.top_k_primary_weight)
        assert spec.routing_strategy
        strategy, experts = spec.routing_strategy, spec.num_experts
        table = route_table(strategy, vocab_size, experts, spec.top_k, layer)
        self.register_buffer("routes", table)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [B, S, H], ids [B, S] -> [B, S, H]."""
        flat = x.flatten(0, 1)  # [T, H]
        routes, weights = self._routes(flat, ids.flatten())
        routed = torch.zeros_like(flat)
        for weight, route in zip(weights, routes, strict=True):
            for number, expert in enumerate(self.experts):
                mine = (route == number).nonzero().squeeze(1)
                output = weight[mine].unsqueeze(1) * expert(flat[mine], ids)
                routed = routed.index_add(0, mine, output.to(routed.dtype))
        routed = routed.view_as(x)
        if self.shared is None:
            return routed
        shared: Tensor = self.shared(x, ids)
        if self.shared_gate is None or self.routed_gate is None:
            return shared + routed
        return self.shared_gate * shared + self.routed_gate * routed

    def _routes(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H], ids [T] -> the expert of each route, and its weight: [K, T] each."""
        if self.router is None:
            weights = torch.tensor(self.mixture, device=x.device)
            return self.routes[:, ids], weights.unsqueeze(1).expand(-1, len(ids))
        probabilities = F.softmax(self.router(x), dim=-1, dtype=torch.float32)  # [T, E]
        weights, routes = probabilities.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        experts = probabilities.shape[-1]
        fraction = torch.bincount(routes.flatten(), minlength=experts) / routes.numel()
        self.balance = experts * (fraction * probabilities.mean(0)).sum()
        return routes.t(), weights.t()


class PlainBlock(nn.Module):
    """Attention and feed-forward, pre-norm."""

    def __init__(self, spec: ModelSpec, vocab_size: int, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=EPSILON)
        self.self_attn = PlainAttention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=EPSILON)
        self.mlp: nn.Module
        if spec.is_routed:
            self.mlp = PlainRouted(spec, vocab_size, layer)
        else:
            self.mlp = PlainSwiGLU(spec.hidden_size, spec.intermediate_size)

    def forward(self, x: Tensor, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, S, H] -> [B, S, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x), ids)
        return y


class PlainTransformer(nn.Module):
    """The model of `spec` over a vocabulary, from stock modules."""

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            PlainBlock(spec, vocab_size, layer) for layer in range(spec.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(spec.hidden_size, eps=EPSILON)
        self.lm_head = nn.Linear(spec.hidden_size, vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rotary_table(spec.max_position_embeddings, spec.head_dim, spec.rope_theta)
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((sin, sin), dim=-1), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> hidden states [B, S, H] after the final norm; `lm_head` is left to do."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x, ids, cos, sin)
        hidden: Tensor = self.norm(x)
        return hidden


class PlainStep:
    """One update after another, on batches [N, S + 1] of ids, as a short training script does it.

    `forward` stands for the model where a caller wants to watch it.
    """

    def __init__(
        self,
        spec: RunSpec,
        model: PlainTransformer,
        forward: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model, self.forward = model, forward or model
        self.training, self.micro_batch_size = spec.training, spec.micro_batch_size
        self.balance_weight = spec.model.router_aux_loss_weight or 0.0
        self.low = torch.bfloat16 if spec.training.precision == "bf16" else None
        beta1, beta2 = spec.optimizer.betas
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=spec.optimizer.lr,
            betas=(beta1, beta2),
            eps=spec.optimizer.eps,
            weight_decay=spec.optimizer.weight_decay,
            fused=True,
        )

    def loss(self, batch: Tensor) -> Tensor:
        """batch [B, S + 1] -> what is optimised, a scalar in nats: the mean NLL, smoothed as the
        spec asks, and the balance loss of this batch, averaged over layers."""
        with torch.autocast(batch.device.type, dtype=self.low, enabled=self.low is not None):
            logits = self.model.lm_head(self.forward(batch[:, :-1]))  # [B, S, V]
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                batch[:, 1:].flatten(),
                label_smoothing=self.training.label_smoothing,
            )
        if not self.balance_weight:
            return loss
        routed = [module for module in self.model.modules() if isinstance(module, PlainRouted)]
        balances = [module.balance for module in routed]
        return loss + self.balance_weight * torch.stack(balances).mean()

    def step(self, windows: Tensor) -> float:
        """windows [N, S + 1] -> the mean of `loss` before the update."""
        accumulation = self.training.gradient_accumulation_steps
        total = 0.0
        for batch in torch.split(windows, self.micro_batch_size):
            loss = self.loss(batch) / accumulation
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        if self.training.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def left_out(spec: RunSpec) -> list[str]:
    """What of a spec's step the plain one has not, in words."""
    model, optimizer = spec.model, spec.optimizer
    scales = {optimizer.shared_lr_scale, optimizer.expert_lr_scale, None, 1.0}
    decays = {optimizer.shared_weight_decay, optimizer.expert_weight_decay, None}
    own_rates = scales != {None, 1.0} or bool(decays - {None, optimizer.weight_decay})
    found = {
        "z-loss": spec.training.z_loss > 0,
        "the diversity penalty": bool(model.expert_diversity_lambda),
        "ramps": any(ramp.is_on(model.model_dump()) for ramp in RAMPS.values()),
        "Muon (it takes AdamW)": optimizer.name == "muon_tr",
        "rates and decays of experts or the shared path": optimizer.name == "adamw" and own_rates,
    }
    return [name for name, is_so in found.items() if is_so]
