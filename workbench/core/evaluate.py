"""Scores a model on a set of documents: NLL summed per document, each token once.

Nothing here draws a random number, keeps a gradient or touches a buffer of the training step, so an
evaluation cannot change the run by one bit.

Sums are exact: of float64 values, rounded once (`math.fsum`), first over the tokens of a window,
then over the windows of a document, then over documents. So no order of tokens, windows, batches or
documents changes a sum. What can change is the NLL of a token, by the last digits of float32: a
matrix product of another shape may add in another order.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from workbench.core.data import atomic
from workbench.core.data.evaluation_sets import IGNORED, EvaluationSet, scoring_batches
from workbench.core.loss_settings import LossSettings
from workbench.core.losses import linear_nll
from workbench.core.model import Transformer
from workbench.core.parallel import ALONE, Team
from workbench.errors import storing

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# Tokens scored at once. Memory, not the result, depends on it.
TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class SetScore:
    """The scores of one evaluation set of M documents.

    `documents` are their content hashes; `nll_sums` [M] float64 is the summed NLL in nats, `tokens`
    [M] the scored tokens, `bytes` [M] the UTF-8 bytes of the scored text (None: there is no text),
    `clean` [M] whether a document does not overlap the training text (None: not measured).
    """

    name: str
    documents: list[str]
    nll_sums: Float64
    tokens: Int64
    bytes: Int64 | None
    clean: npt.NDArray[np.bool_] | None = None

    @property
    def nll(self) -> float:
        """Nats per token: the sum of NLL over the sum of scored tokens."""
        return math.fsum(self.nll_sums) / int(self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp of the token-weighted NLL; infinite where it overflows."""
        return math.exp(self.nll) if self.nll < 709 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte of the scored text."""
        if self.bytes is None:
            return None
        return math.fsum(self.nll_sums) / math.log(2) / int(self.bytes.sum())

    @property
    def clean_nll(self) -> float | None:
        """Nats per token over the clean documents alone; None where there are none."""
        if self.clean is None or not self.tokens[self.clean].sum():
            return None
        return math.fsum(self.nll_sums[self.clean]) / int(self.tokens[self.clean].sum())

    def values(self) -> dict[str, float | None]:
        """The set's numbers under the names they are logged by."""
        values = {
            f"{self.name}/nll": self.nll,
            f"{self.name}/perplexity": self.perplexity,
            f"{self.name}/bits_per_byte": self.bits_per_byte,
        }
        if self.clean is not None:
            values[f"{self.name}/clean_nll"] = self.clean_nll
        return values


def evaluate(
    model: Transformer,
    documents: EvaluationSet,
    seq_len: int,
    settings: LossSettings,
    between: Callable[[], None] = lambda: None,
    stride: int | None = None,
    team: Team = ALONE,
) -> SetScore:
    """Scores every document of a set, each token once, in windows of `seq_len` tokens.

    The processes of a team share the batches, which are those of one process, and each returns the
    scores of all.

    A window scores its last `stride` tokens, the first of a document all of them (None: windows do
    not overlap); see `evaluation_sets`. `between` is called between batches and may raise to give
    up.
    """
    device = model.head_weight.device
    count = len(documents.documents)
    own: list[tuple[int, float]] = []  # of each window: its document, and the sum
    tokens = np.zeros(count, np.int64)
    batch_size = max(1, TOKENS_AT_ONCE // seq_len)

    def score() -> None:
        batches = scoring_batches(documents, seq_len, batch_size, stride)
        for batch, is_own in team.share(batches):
            team.ask(between)
            hidden = model(torch.from_numpy(batch.inputs).to(device))
            nll = linear_nll(
                hidden.flatten(0, 1),
                model.head_weight,
                torch.from_numpy(batch.targets).to(device).flatten(),
                settings,
                model.precision,
            )
            if not is_own:
                continue
            rows = nll.view(batch.targets.shape).cpu().double().numpy()
            scored = batch.targets != IGNORED
            for document, row, kept in zip(batch.documents, rows, scored, strict=True):
                own.append((int(document), math.fsum(row[kept])))
            np.add.at(tokens, batch.documents, scored.sum(axis=1))

    with torch.no_grad():
        team.side_by_side(score)
    windows: list[list[float]] = [[] for _ in range(count)]
    for document, value in chain.from_iterable(team.gathered(own)):
        windows[document].append(value)
    tokens = team.total(tokens)
    sums = np.array([math.fsum(parts) for parts in windows], np.float64)
    hashes = [row.tobytes().hex() for row in documents.content_sha256]
    return SetScore(documents.name, hashes, sums, tokens, documents.byte_counts, documents.clean)


def write_scores(scores: list[SetScore], path: Path) -> None:
    """Per-document scores of all sets as one parquet file, whole or not at all.

    Columns: `set`, `index` (of the document in its set, from 0), `document` (content hash),
    `tokens`, `bytes` (null: there is no text), `nll_sum` (nats) and `clean` (whether the document
    does not overlap the training text; null: not measured).

    Raises:
        StoreError: it cannot be written; nothing is left behind.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "set": [score.name for score in scores for _ in score.documents],
            "index": [i for score in scores for i in range(len(score.documents))],
            "document": [name for score in scores for name in score.documents],
            "tokens": np.concatenate([score.tokens for score in scores]),
            "bytes": [
                None if score.bytes is None else int(score.bytes[i])
                for score in scores
                for i in range(len(score.documents))
            ],
            "nll_sum": np.concatenate([score.nll_sums for score in scores]),
            "clean": pa.array(
                [
                    None if score.clean is None else bool(score.clean[i])
                    for score in scores
                    for i in range(len(score.documents))
                ],
                pa.bool_(),
            ),
        }
    )
    # Into memory first: pyarrow's own writing leaves half a file, and an error without a place.
    content = io.BytesIO()
    pq.write_table(table, content)
    with storing(path, content.tell()):
        atomic.write_file(path, content.getvalue())
