"""What is scored, and in which windows: every token of a set once, none of the padding.

A document is scored after the end-of-document id: the first input of all is that id, and a later
window starts with the token before it. The end-of-document id is never a target. Of a token shard
that does not say which id that is, a document starts with the id before it in the shard.

Windows of up to S tokens start every `stride` tokens. The first one scores all it holds; each later
one scores its last `stride` tokens (the last window those that are left) and takes the S - stride
before them as context alone. With a stride of S windows do not overlap.

Shapes: M documents, B windows of a batch, S sequence length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.data.split import Spans, Unit
from workbench.core.data.tokenizer import Ids

IGNORED = -100  # the target that is not scored
PAD_MULTIPLE = 64  # batches are padded to a multiple of this, so that few shapes occur

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """Documents in hash order. `byte_counts` is None where the ids stand for no text.

    `contexts` [M] are the ids that documents start after where `eod_id` is None.
    `clean` tells the documents that do not overlap the training text; None: it was not measured.
    """

    name: str
    unit: Unit
    eod_id: int | None
    documents: Sequence[Ids]  # M arrays of token ids
    byte_counts: Int64 | None  # [M], UTF-8 bytes of each document's text
    content_sha256: npt.NDArray[np.uint8]  # [M, 32]
    contexts: Int64 | None = None
    clean: npt.NDArray[np.bool_] | None = None  # [M]

    @property
    def sha256(self) -> str:
        """Identity of the set: over the hashes of its documents in order, and their contexts."""
        before = b"" if self.contexts is None else self.contexts.astype("<i8").tobytes()
        return hashlib.sha256(self.content_sha256.tobytes() + before).hexdigest()

    def context(self, document: int) -> int:
        """The id that a document starts after."""
        return self.eod_id if self.eod_id is not None else int(_known(self.contexts)[document])

    @property
    def scored_tokens(self) -> int:
        """Targets in all windows of the set."""
        if self.eod_id is None:
            return sum(len(ids) for ids in self.documents)
        return sum(int(np.count_nonzero(ids != self.eod_id)) for ids in self.documents)

    @property
    def scored_bytes(self) -> int | None:
        """UTF-8 bytes of the scored text."""
        return None if self.byte_counts is None else int(self.byte_counts.sum())


class Window(NamedTuple):
    """Up to S inputs [n] and the target that follows each [n]; -100 where it is not scored here."""

    document: int
    inputs: Int64
    targets: Int64


class ScoringBatch(NamedTuple):
    """Windows side by side, padded at the right with targets of -100."""

    inputs: Int64  # [B, S]
    targets: Int64  # [B, S]
    documents: Int64  # [B], the index of each row's document in its set


def from_spans(name: str, tokens: Ids, spans: Spans, eod_id: int) -> EvaluationSet:
    """The evaluation set of these stretches of an encoded corpus."""
    documents = [tokens[start:end] for start, end in spans.ranges]
    return EvaluationSet(name, spans.unit, eod_id, documents, spans.byte_counts, spans.sha256)


def facts_of(
    one: EvaluationSet, seq_len: int, stride: int | None, no_bytes: Mapping[str, str]
) -> dict[str, Any]:
    """What a comparison needs to know of a set; `no_bytes` says why there may be no bytes."""
    return {
        "sha256": one.sha256,
        "documents": len(one.documents),
        "unit": one.unit,
        "scored_tokens": one.scored_tokens,
        "bytes": no_bytes if one.scored_bytes is None else one.scored_bytes,
        "context": context_of(seq_len, stride, one.eod_id is not None),
    }


def scoring_windows(
    evaluation_set: EvaluationSet, seq_len: int, stride: int | None = None
) -> Iterator[Window]:
    """The windows of each document in turn."""
    for document, ids in enumerate(evaluation_set.documents):
        for start in _starts(len(ids), seq_len, stride):
            yield _window(evaluation_set, document, start, seq_len, stride)


def scoring_batches(
    evaluation_set: EvaluationSet, seq_len: int, batch_size: int, stride: int | None = None
) -> Iterator[ScoringBatch]:
    """The same windows, `batch_size` at a time, long ones first, so that little is padded.

    With causal attention, padding at the right changes no score.
    """
    starts = [
        (min(seq_len, len(ids) - start), document, start)
        for document, ids in enumerate(evaluation_set.documents)
        for start in _starts(len(ids), seq_len, stride)
    ]
    starts.sort(key=lambda window: (-window[0], window[1], window[2]))
    for first in range(0, len(starts), batch_size):
        rows = starts[first : first + batch_size]
        width = min(seq_len, -(-rows[0][0] // PAD_MULTIPLE) * PAD_MULTIPLE)
        inputs = np.full((len(rows), width), evaluation_set.eod_id or 0, np.int64)
        targets = np.full((len(rows), width), IGNORED, np.int64)
        for row, (length, document, start) in enumerate(rows):
            window = _window(evaluation_set, document, start, seq_len, stride)
            inputs[row, :length] = window.inputs
            targets[row, :length] = window.targets
        yield ScoringBatch(inputs, targets, np.array([row[1] for row in rows], np.int64))


def _starts(length: int, seq_len: int, stride: int | None) -> range:
    """Where the windows of a document of `length` tokens start: none without new tokens."""
    step = stride or seq_len
    return range(0, max(length - seq_len + step, 1 if length else 0), step)


def _window(
    evaluation_set: EvaluationSet, document: int, start: int, seq_len: int, stride: int | None
) -> Window:
    ids = evaluation_set.documents[document]
    targets = ids[start : start + seq_len].astype(np.int64)
    before = evaluation_set.context(document) if start == 0 else int(ids[start - 1])
    inputs = np.r_[before, targets[:-1]].astype(np.int64)
    # Only blocks hold end-of-document ids: between the documents that they run over.
    if evaluation_set.eod_id is not None:
        targets[targets == evaluation_set.eod_id] = IGNORED
    if start:
        targets[: seq_len - (stride or seq_len)] = IGNORED  # scored by the windows before
    return Window(document, inputs, targets)


def context_of(seq_len: int, stride: int | None = None, has_eod: bool = True) -> str:
    """The context policy, for the record: sets scored under another one are not comparable."""
    step = stride or seq_len
    overlap = "no overlap" if step == seq_len else f"stride {step}"
    before = "the end-of-document id" if has_eod else "the id before it in the shard"
    return f"starts with {before}; windows of {seq_len}, {overlap}"


def _known(contexts: Int64 | None) -> Int64:
    assert contexts is not None, "a set has an end-of-document id or contexts"
    return contexts
