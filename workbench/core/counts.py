"""Parameters and floating-point work of a model, computed from its spec without building it.

H hidden, V vocabulary, L layers, D head dim, E experts, K routes, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.spec.run import ModelSpec


@dataclass(frozen=True)
class ParameterCounts:
    """Trainable parameters; a tied matrix counts once.

    `active` are those that one token uses (K of E experts), `embedding` those of the vocabulary
    matrices (V*H tied, 2*V*H untied), `experts` those of all routed experts. All but `active` are
    parts of `total` or it.
    """

    total: int
    active: int
    embedding: int
    experts: int


def count_parameters(spec: ModelSpec, vocab_size: int) -> ParameterCounts:
    """The counts of the model that `spec` describes, over a vocabulary of `vocab_size`."""
    hidden, layers = spec.hidden_size, spec.num_hidden_layers
    query_width = spec.num_attention_heads * spec.head_dim
    kv_width = spec.num_key_value_heads * spec.head_dim
    attention = 2 * hidden * query_width + 2 * hidden * kv_width
    if spec.qk_norm:
        attention += 2 * spec.head_dim
    norms = 2 * hidden

    feed_forward, experts, unused = 3 * hidden * spec.intermediate_size, 0, 0
    if spec.is_routed:
        assert spec.num_experts
        assert spec.top_k
        experts = feed_forward
        unused = experts // spec.num_experts * (spec.num_experts - spec.top_k)
        if spec.shared_expert:
            assert spec.shared_intermediate_size
            feed_forward += 3 * hidden * spec.shared_intermediate_size
        if spec.learn_shared_routed_gates:
            feed_forward += 2
        if spec.mlp_type == "learned_router":
            feed_forward += spec.num_experts * hidden

    embedding = vocab_size * hidden * (1 if spec.tie_word_embeddings else 2)
    total = embedding + layers * (attention + norms + feed_forward) + hidden
    return ParameterCounts(total, total - layers * unused, embedding, layers * experts)


@dataclass(frozen=True)
class TrainingFlops:
    """Floating-point operations of training on one token, by what they are spent on.

    `weights`, 6 N: a multiplication and an addition by each of the N parameters that the token is
    multiplied with, in the forward pass, and twice as much in the backward pass (gradients of the
    activations and of the weights). N is `active` without an untied input embedding: the vocabulary
    counts once, as the head, since looking up an embedding is no arithmetic.

    `attention`, 6 L S H: scores and weighted values, 12 L S H (Chowdhery et al. 2022, appendix B),
    halved for the causal mask. The number of key/value heads plays no part.

    Recomputation under gradient checkpointing is not counted.
    """

    weights: int
    attention: int

    @property
    def total(self) -> int:
        """Both, forward and backward."""
        return self.weights + self.attention

    @property
    def forward(self) -> int:
        """The forward pass: a third of all."""
        return self.total // 3

    @property
    def backward(self) -> int:
        """The backward pass: two thirds of all."""
        return self.total - self.forward


def training_flops(spec: ModelSpec, vocab_size: int, seq_len: int) -> TrainingFlops:
    """FLOPs of one token in sequences of `seq_len`."""
    used = count_parameters(spec, vocab_size).active
    if not spec.tie_word_embeddings:
        used -= vocab_size * spec.hidden_size
    return TrainingFlops(6 * used, 6 * spec.num_hidden_layers * seq_len * spec.hidden_size)


def flops_per_token(spec: ModelSpec, vocab_size: int, seq_len: int) -> int:
    """`training_flops` in one number."""
    return training_flops(spec, vocab_size, seq_len).total
