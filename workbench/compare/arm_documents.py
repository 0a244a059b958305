"""The NLL of every held-out document, averaged over the seeds of each of two arms.

M documents of a set, D of them distinct by content; n seeds of an arm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.compare.measurements import RunData
from workbench.compare.scores import BYTES, NLL_SUM, TOKENS, SetScores, scores_path
from workbench.compare.stats import Floats

_Grouping = tuple[tuple[str, ...], npt.NDArray[np.intp]]


@dataclass(frozen=True)
class DocumentMeans:
    """Sums of every document's score, each the mean over the seeds of an arm.

    `a`, `b`: [D] in nats (or bits) of the whole document; `weight`: [D] its scored tokens (or
    bytes). A text that stands in the set twice is one document.
    """

    documents: tuple[str, ...]
    a: Floats
    b: Floats
    weight: Floats
    tokens: int


def document_means(
    a: Sequence[RunData], b: Sequence[RunData], name: str, score: str, tokens: int
) -> DocumentMeans | str:
    """Every document's mean score in both arms at a point; or, in words, why there is none."""
    found: list[SetScores] = []
    for run in (*a, *b):
        step = next(point.step for point in run.record.points if point.tokens == tokens)
        if step not in run.scores:
            where = scores_path(run.folder, step).relative_to(run.folder)
            return f"{run.record.name} has no {where}"
        found.append(run.scores[step][name])
    column = TOKENS if score == "nll" else BYTES
    scale = 1.0 if score == "nll" else 1 / math.log(2)
    known: dict[tuple[str, ...], _Grouping] = {}
    sums: list[Floats] = []
    weight: Floats | None = None
    documents = _grouping(found[0].documents, known)[0]
    for scores in found:
        names, members = _grouping(scores.documents, known)
        if names != documents:
            return "the runs scored other documents"
        weighed = _summed(members, scores.rows[:, column], len(names))
        if weight is None:
            weight = weighed
        elif not np.array_equal(weighed, weight):
            return "the runs scored other parts of the documents"
        sums.append(_summed(members, scores.rows[:, NLL_SUM], len(names)) * scale)
    assert weight is not None
    first, second = np.array(sums[: len(a)]), np.array(sums[len(a) :])  # [n, D]
    return DocumentMeans(documents, first.mean(axis=0), second.mean(axis=0), weight, tokens)


def _summed(members: npt.NDArray[np.intp], values: Floats, documents: int) -> Floats:
    """[D] the sum over what belongs to each document."""
    return np.bincount(members, values, minlength=documents).astype(np.float64)


def _grouping(documents: tuple[str, ...], known: dict[tuple[str, ...], _Grouping]) -> _Grouping:
    """The distinct documents in order [D], and to which of them each of the set belongs [M]."""
    if documents not in known:
        names, members = np.unique(np.array(documents, dtype=str), return_inverse=True)
        known[documents] = tuple(names.tolist()), members
    return known[documents]
