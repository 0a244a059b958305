"""A trained model from `model.safetensors` and `config.json` beside this file, in plain PyTorch.

This file stands alone: it needs torch and safetensors, and nothing of the package that trained the
model. `wb export` copies it beside the weights.

    from model import load
    logits = load(".")(ids)        # ids [B, S] int64 -> float32 [B, S, V]

B batch, S sequence, H hidden, V vocabulary, N heads, G key/value heads, D head dim, E experts,
K routes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]


class Model:
    """A decoder-only language model for inference. Call it with ids to get logits.

    `config` is the content of `config.json`, `weights` the tensors by name. With "bfloat16" as
    `compute_dtype` the operands of every matrix product are rounded to it, as in training; sums are
    taken in float32.
    """

    def __init__(self, config: dict[str, Any], weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.rounded = config["compute_dtype"] == "bfloat16"
        positions, size = config["max_position_embeddings"], config["head_dim"]
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = torch.arange(positions, dtype=torch.float64)[:, None]
        angles = angles * float(config["rope_theta"]) ** -exponents  # [positions, D/2]
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """ids [B, S] int64 -> float32 logits [B, S, V].

        Raises:
            ValueError: the sequence is longer than the model was made for.
        """
        limit = self.config["max_position_embeddings"]
        if ids.shape[1] > limit:
            raise ValueError(f"a sequence of {ids.shape[1]} tokens is longer than {limit}")
        x = self.kept(self.weights["embed_tokens.weight"][ids])
        for layer in range(self.config["num_hidden_layers"]):
            at = f"layers.{layer}."
            x = x + self.attention(at + "self_attn.", self.norm(at + "input_layernorm", x))
            y = self.norm(at + "post_attention_layernorm", x)
            x = x + self.feed_forward(at + "mlp.", y, ids)
        x = self.norm("norm", x)
        head = "embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return F.linear(
            self.operand(x).float(), self.operand(self.weights[f"{head}.weight"]).float()
        )

    def kept(self, x: Tensor) -> Tensor:
        """As activations are held between products."""
        return x.bfloat16() if self.rounded else x.float()

    def operand(self, x: Tensor) -> Tensor:
        """As a matrix product takes it."""
        return x.bfloat16().float() if self.rounded else x.float()

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]."""
        return self.kept(F.linear(self.operand(x), self.operand(weight)))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm over the last dimension, in float32, rounded once."""
        return self.normed(name, x).to(x.dtype)

    def normed(self, name: str, x: Tensor) -> Tensor:
        """The same before rounding."""
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.config["norm_eps"])
        return x.float() * scale * self.weights[f"{name}.weight"]

    def attention(self, at: str, x: Tensor) -> Tensor:
        """Causal attention of N heads, G of keys and values; rotary positions on halves."""
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            self.product(x, self.weights[f"{at}{one}_proj.weight"]).view(*x.shape[:2], count, -1)
            for one, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if self.config["qk_norm"]:
            q, k = self.normed(at + "q_norm", q), self.normed(at + "k_norm", k)
        q, k = self.rotated(q.float()), self.rotated(k.float())
        q, k, v = (self.operand(part).transpose(1, 2) for part in (q, k, v))  # [B, heads, S, D]
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        joined = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.product(self.kept(joined), self.weights[at + "o_proj.weight"])

    def rotated(self, x: Tensor) -> Tensor:
        """Turns the pair (i, i + D/2) of every head of x [B, S, heads, D] by its position."""
        cos, sin = self.cos[: x.shape[1], None], self.sin[: x.shape[1], None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def feed_forward(self, at: str, x: Tensor, ids: Tensor) -> Tensor:
        """SwiGLU; with experts, a shared one beside those that each token is routed to."""
        w = self.weights
        if self.config["mlp_type"] == "dense":
            gate, up = (self.product(x, w[f"{at}{one}_proj.weight"]) for one in ("gate", "up"))
            return self.product(self.kept(F.silu(gate) * up), w[at + "down_proj.weight"])
        routed = self.routed(at, x, self.routes(at, x, ids))
        if not self.config["shared_expert"]:
            return routed
        gate, up = (self.product(x, w[f"{at}shared_{one}.weight"]) for one in ("gate", "up"))
        shared = self.product(self.kept(F.silu(gate) * up), w[at + "shared_down.weight"])
        if not self.config["learn_shared_routed_gates"]:
            return shared + routed
        # Float32 gates; what a schedule added to them is in the saved values.
        by_shared, by_routed = w[at + "shared_output_gate"], w[at + "routed_output_gate"]
        return self.kept(by_shared * shared.float() + by_routed * routed.float())

    def routes(self, at: str, x: Tensor, ids: Tensor) -> Tensor:
        """What each expert counts for each token, 0 where it is not routed: [B, S, E], float32."""
        experts, k = self.config["num_experts"], self.config["top_k"]
        if self.config["mlp_type"] == "token_routed":
            chosen = self.weights[at + "topk_token_to_expert"].long()[:, ids]  # [K, B, S]
            weights = torch.tensor(self.config["route_weights"]).view(-1, 1, 1, 1)
            return (F.one_hot(chosen, experts) * weights).sum(0)
        scores = F.linear(x.float(), self.weights[at + "router.weight"]).softmax(-1)
        top = scores.topk(k, dim=-1)
        values = top.values / top.values.sum(-1, keepdim=True) if k > 1 else top.values
        return torch.zeros_like(scores).scatter(-1, top.indices, values)

    def routed(self, at: str, x: Tensor, routes: Tensor) -> Tensor:
        """The experts' SwiGLUs, each weighted by `routes`, summed."""
        stacks = [self.weights[f"{at}{one}_proj_w"] for one in ("gate", "up", "down")]
        gate, up = (w.transpose(1, 2).flatten(0, 1) for w in stacks[:2])  # [E*W, H]
        hidden = self.kept(F.silu(self.product(x, gate)) * self.product(x, up))
        apart = hidden.view(*x.shape[:2], self.config["num_experts"], -1)
        by_expert = apart * routes.unsqueeze(-1)
        return self.product(self.kept(by_expert.flatten(-2)), stacks[2].flatten(0, 1).t())


def load(folder: str | Path = ".") -> Model:
    """The model of a folder with `config.json` and `model.safetensors`."""
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    return Model(config, load_file(Path(folder, "model.safetensors")))
