"""Statistics of a pair: intervals over held-out documents. Pure functions; the generator is given.

Sizes: D documents, R bootstrap draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
DRAWS = 10_000
_CHUNK = 2_000_000  # document weights held at once
FEW = 30  # documents, below which too few are drawn from for the bootstrap t to keep its level


def document_interval(
    difference: Floats,
    weight: Floats,
    rng: np.random.Generator,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> tuple[float, float] | None:
    """A bootstrap interval of sum(difference) / sum(weight) over documents.

    Whole documents are drawn with replacement, both runs together (paired), so that tokens of one
    document stay together and a long document weighs by its tokens: a cluster bootstrap of a ratio.
    The ends are those of the bootstrap t (Efron and Tibshirani 1993, section 12.5) with the
    linearised standard error of a ratio (Cochran 1977, section 6.3), which keeps its level where
    documents are skewed and of unequal length; the percentile and BCa intervals fall below it.

    Of fewer than 30 documents the bootstrap t falls below it too (91 to 93 % of nominal 95 for 8 to
    20). There it is a t interval, drawn from nothing: with the HC3 standard error (MacKinnon and
    White 1985), in which a document that is much of the text counts by what is left without it, and
    with the effective number of documents, (sum w)^2 / sum w^2 (Kish 1965), less one as degrees of
    freedom, no fewer than one. It is approximate: with strongly skewed documents it covers less.

    Args:
        difference: [D] summed NLL of the second run minus that of the first, in nats.
        weight: [D] scored tokens (or bytes) of each document.

    Returns:
        The interval in nats per unit of weight; None for fewer than two documents, or values that
        are not finite, of which nothing can be drawn.
    """
    return document_intervals([difference], [weight], rng, draws=draws, level=level)[0]


def document_intervals(
    differences: Sequence[Floats],
    weights: Sequence[Floats],
    rng: np.random.Generator,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> list[tuple[float, float] | None]:
    """`document_interval` of several differences of the same documents, with the same draws."""
    found: list[tuple[float, float] | None] = [None] * len(differences)
    drawn: dict[int, _Ratio] = {}
    for index, (difference, weight) in enumerate(zip(differences, weights, strict=True)):
        finite = np.isfinite(difference).all() and np.isfinite(weight).all()
        if len(difference) < 2 or not finite or weight.min() <= 0:
            continue
        ratio = _Ratio(difference, weight)
        if len(difference) < FEW or ratio.error <= _ROUNDING * abs(ratio.value):
            found[index] = ratio.t_interval(level)
        else:
            drawn[index] = ratio
    if drawn:
        tails = _draw_tails(list(drawn.values()), rng, draws, (1 - level) / 2)
        for (index, ratio), (low, high) in zip(drawn.items(), tails, strict=True):
            found[index] = ratio.value - high * ratio.error, ratio.value - low * ratio.error
    return found


_ROUNDING = 1e-12  # of a ratio: a standard error below it is one of floating point


class _Ratio:
    """The ratio of two sums over D documents, its linearised standard error, and [D, 5] what has to
    be summed over drawn documents for the same of them."""

    def __init__(self, difference: Floats, weight: Floats) -> None:
        self.documents = len(difference)
        self.value = float(difference.sum() / weight.sum())
        rest = difference - self.value * weight  # so that nothing large cancels
        self.columns = np.stack([rest, weight, rest**2, rest * weight, weight**2], axis=1)
        sums = float((rest**2).sum()) * self.documents / (self.documents - 1)
        self.error = math.sqrt(sums) / float(weight.sum())

    def t_interval(self, level: float) -> tuple[float, float]:
        """The interval that draws nothing: HC3 standard error, effective degrees of freedom."""
        from scipy import special  # scipy.stats takes the better part of a second to load

        rest, weight = self.columns[:, 0], self.columns[:, 1]
        share = weight / weight.sum()  # the leverage of a document on the ratio
        error = math.sqrt(float(((rest / (1 - share)) ** 2).sum())) / float(weight.sum())
        freedom = max(1.0, 1 / float((share**2).sum()) - 1)
        half = float(special.stdtrit(freedom, (1 + level) / 2)) * error
        return self.value - half, self.value + half

    def statistics(self, sums: Floats) -> Floats:
        """[R] the t statistic of every draw from its sums [R, 5]."""
        rest, weight, rest2, cross, weight2 = sums.T
        shift = rest / weight
        squares = np.maximum(rest2 - 2 * shift * cross + shift**2 * weight2, 0.0)
        error = np.sqrt(squares * self.documents / (self.documents - 1)) / weight
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(shift == 0, 0.0, shift / error)


def _draw_tails(
    ratios: Sequence[_Ratio], rng: np.random.Generator, draws: int, tail: float
) -> list[tuple[float, float]]:
    """The lower and upper quantile of every ratio's t statistic under the bootstrap."""
    documents = ratios[0].documents
    columns = np.concatenate([ratio.columns for ratio in ratios], axis=1)  # [D, 5 P]
    found: list[list[Floats]] = [[] for _ in ratios]
    rows = max(1, _CHUNK // documents)
    for start in range(0, draws, rows):
        size = min(rows, draws - start)
        places = rng.integers(0, documents, (size, documents))
        places += np.arange(size)[:, None] * documents
        times = np.bincount(places.ravel(), minlength=size * documents)  # how often each was drawn
        sums = times.reshape(size, documents).astype(np.float64) @ columns
        for index, ratio in enumerate(ratios):
            found[index].append(ratio.statistics(sums[:, 5 * index : 5 * index + 5]))
    ends = []
    for one in found:
        low, high = np.quantile(np.concatenate(one), [tail, 1 - tail], method="inverted_cdf")
        ends.append((float(low), float(high)))
    return ends
