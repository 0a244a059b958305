"""Statistics of a pair: intervals over held-out documents. Pure functions; the generator is given.

Sizes: D documents, R bootstrap draws.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
DRAWS = 10_000
_CHUNK = 2_000_000  # document weights held at once


def document_interval(
    difference: Floats,
    weight: Floats,
    rng: np.random.Generator,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> tuple[float, float] | None:
    """A percentile bootstrap interval of sum(difference) / sum(weight) over documents.

    Whole documents are drawn with replacement, both runs together (paired), so that tokens of one
    document stay together and a long document weighs by its tokens: a cluster bootstrap of a ratio
    (Efron and Tibshirani 1993, chapters 8 and 13).

    Args:
        difference: [D] summed NLL of the second run minus that of the first, in nats.
        weight: [D] scored tokens (or bytes) of each document.

    Returns:
        The interval in nats per unit of weight; None for fewer than two documents, or values that
        are not finite, of which nothing can be drawn.
    """
    documents = len(difference)
    finite = np.isfinite(difference).all() and np.isfinite(weight).all()
    if documents < 2 or not finite or weight.min() <= 0:
        return None
    even = np.full(documents, 1 / documents)
    ratios = []
    for start in range(0, draws, max(1, _CHUNK // documents)):
        size = min(max(1, _CHUNK // documents), draws - start)
        times = rng.multinomial(documents, even, size=size)  # [R, D] how often each was drawn
        ratios.append((times @ difference) / (times @ weight))
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(ratios), [tail, 1 - tail])
    return float(low), float(high)
