"""Scores a model on a set of documents: NLL summed per document, each token once.

Nothing here draws a random number, keeps a gradient or touches a buffer of the training step, so an
evaluation cannot change the run by one bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workbench.core.data.evaluation_sets import EvaluationSet, scoring_batches
from workbench.core.losses import linear_nll
from workbench.core.model import Transformer

# Tokens scored at once. Memory, not the result, depends on it.
TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class SetScore:
    """The scores of one evaluation set.

    `nll_sums` is [documents] float64, the summed NLL in nats; `tokens` and `bytes` are [documents].
    """

    name: str
    documents: list[str]
    nll_sums: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray

    @property
    def nll(self) -> float:
        """Nats per token: the sum of NLL over the sum of scored tokens."""
        return float(self.nll_sums.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp of the token-weighted NLL; infinite where it overflows."""
        return math.exp(self.nll) if self.nll < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of the scored text."""
        return float(self.nll_sums.sum() / math.log(2) / self.bytes.sum())

    def values(self) -> dict[str, float]:
        """The set's numbers under the names they are logged by."""
        return {
            f"{self.name}/nll": self.nll,
            f"{self.name}/perplexity": self.perplexity,
            f"{self.name}/bits_per_byte": self.bits_per_byte,
        }


def evaluate(
    model: Transformer, documents: EvaluationSet, seq_len: int, block_vocab: int
) -> SetScore:
    """Scores every document of a set, in windows of `seq_len` tokens.

    The NLL comes from float32 logits and is summed in float64, so the result does not depend on how
    windows are batched beyond the last digits of float32.
    """
    device = model.embed_tokens.weight.device
    sums = np.zeros(len(documents.documents), dtype=np.float64)
    with torch.no_grad():
        for batch in scoring_batches(documents, seq_len, max(1, TOKENS_AT_ONCE // seq_len)):
            inputs = torch.from_numpy(batch.inputs).to(device)
            targets = torch.from_numpy(batch.targets).to(device)
            hidden = model(inputs)
            nll = linear_nll(
                hidden.flatten(0, 1),
                model.head_weight,
                targets.flatten(),
                precision=model.precision,
                block_vocab=block_vocab,
            )
            per_window = nll.view(targets.shape).double().sum(dim=1).cpu().numpy()
            np.add.at(sums, batch.document, per_window)
    return SetScore(
        documents.name, documents.hashes, sums, documents.token_counts, documents.byte_counts
    )


def write_scores(scores: list[SetScore], path: Path) -> None:
    """Per-document scores of all sets as one parquet file, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "set": [score.name for score in scores for _ in score.documents],
            "document": [name for score in scores for name in score.documents],
            "tokens": np.concatenate([score.tokens for score in scores]),
            "bytes": np.concatenate([score.bytes for score in scores]),
            "nll_sum": np.concatenate([score.nll_sums for score in scores]),
        }
    )
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary)
    temporary.replace(path)
