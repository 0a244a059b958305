"""Scoring windows: every token once, in the stated context, no padding, whatever the batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.data.corpus import Corpus
from workbench.core.data.encoded import EncodedCorpus, encode_corpus
from workbench.core.data.evaluation_sets import (
    IGNORED,
    EvaluationSet,
    context_of,
    facts_of,
    from_spans,
    scoring_batches,
    scoring_windows,
)
from workbench.core.data.split import every_document, split_corpus
from workbench.core.data.tokenizer import Tokenizer

EOD = 99


def set_of(*documents: list[int], eod: int = EOD) -> EvaluationSet:
    arrays = [np.array(ids, np.uint16) for ids in documents]
    hashes = b"".join(hashlib.sha256(a.tobytes()).digest() for a in arrays)
    table = np.frombuffer(hashes, np.uint8).reshape(-1, 32)
    counts = np.array([len(ids) for ids in documents])
    return EvaluationSet("held_out", "document", eod, arrays, counts, table)


def oracle(previous: int, target: int) -> float:
    """A made-up score that tells every pair of ids from the others."""
    return float(np.log1p(1 + 1000 * previous + target))


def total(evaluation_set: EvaluationSet, seq_len: int, batch_size: int) -> tuple[float, int]:
    score, count = 0.0, 0
    for batch in scoring_batches(evaluation_set, seq_len, batch_size):
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            for previous, target in zip(inputs.tolist(), targets.tolist(), strict=True):
                if target != IGNORED:
                    score += oracle(previous, target)
                    count += 1
    return score, count


def test_windows_by_hand() -> None:
    got = list(scoring_windows(set_of([1, 2, 3, 4, 5], [6], [7, 8]), 2))
    assert [(d, i.tolist(), t.tolist()) for d, i, t in got] == [
        (0, [EOD, 1], [1, 2]),
        (0, [2, 3], [3, 4]),
        (0, [4], [5]),
        (1, [EOD], [6]),
        (2, [EOD, 7], [7, 8]),
    ]


def test_windows_with_a_stride_by_hand() -> None:
    """Windows of 4 every 2: each later one scores its last 2, the last one what is left."""
    got = list(scoring_windows(set_of([1, 2, 3, 4, 5, 6, 7], [8, 9]), 4, 2))
    assert [(d, i.tolist(), t.tolist()) for d, i, t in got] == [
        (0, [EOD, 1, 2, 3], [1, 2, 3, 4]),
        (0, [2, 3, 4, 5], [-100, -100, 5, 6]),
        (0, [4, 5, 6], [-100, -100, 7]),
        (1, [EOD, 8], [8, 9]),
    ]


@pytest.mark.parametrize(("length", "starts"), [(4, [0]), (5, [0, 3]), (7, [0, 3]), (8, [0, 3, 6])])
def test_no_window_is_without_new_tokens(length: int, starts: list[int]) -> None:
    one = set_of(list(range(1, length + 1)))
    found = list(scoring_windows(one, 4, 3))
    assert [int(w.inputs[0]) if int(w.inputs[0]) != EOD else 0 for w in found] == starts
    assert all((w.targets != IGNORED).any() for w in found)


def test_the_context_names_window_and_stride() -> None:
    plain = "starts with the end-of-document id; windows of 32, no overlap"
    assert context_of(32) == context_of(32, 32) == plain
    assert context_of(32, 8) == "starts with the end-of-document id; windows of 32, stride 8"


def test_batch_by_hand() -> None:
    (batch,) = scoring_batches(set_of([6], [1, 2, 3]), seq_len=4, batch_size=4)
    assert batch.documents.tolist() == [1, 0]
    assert batch.inputs.tolist() == [[EOD, 1, 2, EOD], [EOD, EOD, EOD, EOD]]
    assert batch.targets.tolist() == [[1, 2, 3, -100], [6, -100, -100, -100]]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    seq_len=st.integers(1, 17),
    batch_size=st.integers(1, 6),
    stride=st.none() | st.integers(1, 17),
)
def test_every_token_is_scored_once_after_its_predecessor(
    lengths: list[int], seq_len: int, batch_size: int, stride: int | None
) -> None:
    stride = stride and min(stride, seq_len)
    documents = [[(7 * d + i) % 90 for i in range(n)] for d, n in enumerate(lengths)]
    one = set_of(*documents)
    expected = sorted(
        (d, previous, target)
        for d, ids in enumerate(documents)
        for previous, target in pairwise([EOD, *ids])
    )
    by_window = sorted(
        (w.document, p, t)
        for w in scoring_windows(one, seq_len, stride)
        for p, t in zip(w.inputs.tolist(), w.targets.tolist(), strict=True)
        if t != IGNORED
    )
    by_batch = sorted(
        (d, p, t)
        for b in scoring_batches(one, seq_len, batch_size, stride)
        for d, inputs, targets in zip(b.documents.tolist(), b.inputs, b.targets, strict=True)
        for p, t in zip(inputs.tolist(), targets.tolist(), strict=True)
        if t != IGNORED
    )
    assert by_window == by_batch == expected
    assert one.scored_tokens == sum(lengths)


@pytest.mark.parametrize("eod", [0, 99])
def test_separate_scores_add_up_to_the_joint_one(eod: int) -> None:
    short, long = list(range(1, 6)), list(range(1, 31))
    joint = total(set_of(short, long, eod=eod), 16, 2)
    alone = [total(set_of(ids, eod=eod), 16, 1) for ids in (short, long)]
    assert joint[1] == alone[0][1] + alone[1][1] == 35
    assert joint[0] == pytest.approx(alone[0][0] + alone[1][0], rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7])
def test_batch_size_changes_nothing(batch_size: int) -> None:
    rng = np.random.default_rng(0)
    one = set_of(*[rng.integers(0, 90, n).tolist() for n in (1, 5, 40, 33, 16, 17, 2)])
    reference = total(one, 16, 2)
    got = total(one, 16, batch_size)
    assert got[1] == reference[1] == 114
    assert got[0] == pytest.approx(reference[0], rel=1e-12)


def test_rows_are_as_wide_as_needed() -> None:
    rng = np.random.default_rng(0)
    one = set_of(*[rng.integers(0, 90, n).tolist() for n in (100, 100, 3, 130, 1000)])
    widths = [b.inputs.shape for b in scoring_batches(one, seq_len=130, batch_size=4)]
    # eight windows of 130, then 100, 100, 90 and 3
    assert widths == [(4, 130), (4, 130), (4, 128)]


def test_end_of_document_ids_inside_a_block_are_context_only() -> None:
    one = set_of([1, 2, EOD, 3])
    (window,) = scoring_windows(one, 8)
    assert window.inputs.tolist() == [EOD, 1, 2, EOD]
    assert window.targets.tolist() == [1, 2, IGNORED, 3]
    assert one.scored_tokens == 3


def test_identity_is_documents_and_their_order() -> None:
    first = set_of([1, 2], [3])
    assert first.sha256 == set_of([1, 2], [3]).sha256
    assert len({first.sha256, set_of([3], [1, 2]).sha256, set_of([1, 2]).sha256}) == 3
    assert first.sha256 == hashlib.sha256(first.content_sha256.tobytes()).hexdigest()


def test_documents_of_a_split_are_scored_as_their_text(
    encode: Callable[..., EncodedCorpus],
    words: Callable[..., list[str]],
    byte_tokenizer: Tokenizer,
) -> None:
    split = split_corpus(encode(*words(100)), byte_tokenizer, 0.2)
    one = from_spans("held_out", split.tokens, split.held_out, byte_tokenizer.eod_id)
    parts: dict[int, list[int]] = {}
    for window in scoring_windows(one, 9):
        parts.setdefault(window.document, []).extend(window.targets.tolist())
    texts = [byte_tokenizer.decode(ids) for ids in parts.values()]
    assert texts == [byte_tokenizer.decode(ids) for ids in one.documents]
    assert set(texts) <= set(words(100))
    assert one.scored_tokens == one.scored_bytes == split.counts["held_out_tokens"]


def test_a_whole_corpus_is_a_set_of_its_texts_with_their_bytes(
    small: Tokenizer, corpus_of: Callable[..., Corpus], tmp_path: Path
) -> None:
    """Each text once, in hash order; bytes are those of UTF-8, whatever the tokens are."""
    texts = [
        "the river and the tree",
        "\u65e5\u672c\u8a9e caf\u00e9",
        "a",
        "the river and the tree",
    ]
    encoded = encode_corpus(corpus_of(*texts), small, tmp_path)
    one = from_spans("held_out.x", encoded.tokens, every_document(encoded), small.eod_id)
    distinct = sorted(set(texts), key=lambda text: hashlib.sha256(text.encode()).digest())
    assert [small.decode(ids) for ids in one.documents] == distinct
    sizes = [len(text.encode()) for text in distinct]
    assert one.byte_counts is not None
    assert one.byte_counts.tolist() == sizes
    assert one.scored_bytes == sum(sizes) not in (one.scored_tokens, sum(map(len, distinct)))
    facts = facts_of(one, 32, 8, {"not_applicable": "no text"})
    assert facts == {
        "sha256": one.sha256,
        "documents": 3,
        "unit": "document",
        "scored_tokens": sum(map(len, one.documents)),
        "bytes": sum(sizes),
        "context": context_of(32, 8),
    }
    without = replace(one, byte_counts=None)
    assert facts_of(without, 32, None, {"not_applicable": "no text"})["bytes"] == {
        "not_applicable": "no text"
    }


def test_a_tail_is_scored_whole_in_blocks(
    encode: Callable[..., EncodedCorpus], byte_tokenizer: Tokenizer
) -> None:
    texts = [f"text {i} " * 700 for i in range(12)]
    split = split_corpus(encode(*texts), byte_tokenizer, 0.15)
    one = from_spans("held_out", split.tokens, split.held_out, byte_tokenizer.eod_id)
    cut = int(split.train_segments[0, 1])
    tail = split.tokens[cut:]
    scored = [t for w in scoring_windows(one, 100) for t in w.targets.tolist() if t != IGNORED]
    assert sorted(scored) == sorted(tail[tail != 256].tolist())
    assert one.scored_tokens == one.scored_bytes == len(scored)
    assert len(tail) - len(scored) >= 1  # an end-of-document id lies in this tail
