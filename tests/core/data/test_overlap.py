"""Against a naive count, and against texts whose overlap is known from how they were made."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from workbench.core.data import ngrams, overlap
from workbench.core.data import passages as passages_module
from workbench.core.data.overlap import (
    Overlap,
    Passages,
    Settings,
    histogram,
    measure,
    measured,
    outcome,
    overlapping,
)
from workbench.core.data.passages import passages_of_shard
from workbench.core.data.shard_files import StoredIds, TokenFile
from workbench.spec.held_out import measured_status


def words(count: int, length: int, seed: int = 0) -> list[str]:
    """Texts of that many words, drawn from 1,000."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in row) for row in rng.integers(0, 1_000, (count, length))]


def passages(*texts: str, whole: bool = True) -> Passages:
    rows = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    table = np.frombuffer(rows, np.uint8).reshape(-1, 32)
    identity = hashlib.sha256(rows).hexdigest()
    return Passages(identity, table if whole else None, lambda: iter(texts))


def id_passages(*documents: Sequence[int]) -> Passages:
    arrays = [np.array(ids, np.uint16) for ids in documents]
    return Passages(str(documents), None, read_ids=lambda: iter(arrays))


def naive(evaluation: Sequence[str], training: Sequence[str], n: int) -> list[tuple[int, int]]:
    """n-grams of each document, and how many of them stand in training: by sets of tuples."""
    seen = set()
    for text in training:
        words = text.lower().split()
        seen |= {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
    counts = []
    for text in evaluation:
        words = text.lower().split()
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        counts.append((len(grams), sum(gram in seen for gram in grams)))
    return counts


@pytest.mark.parametrize("n", [3, 13])
def test_as_a_naive_count(n: int) -> None:
    rng = np.random.default_rng(n)
    training = words(60, length=120)
    evaluation = words(30, length=120, seed=5)
    for i in range(0, 30, 2):  # passages of training text, in other case, of every length
        size = 3 + 7 * i
        source = training[i].upper().split()[:size]
        place = int(rng.integers(0, 60))
        own = evaluation[i].split()
        evaluation[i] = " ".join(own[:place] + source + own[place:])
    found = measure(passages(*evaluation), passages(*training), n)
    expected = naive(evaluation, training, n)
    assert list(zip(found.ngrams.tolist(), found.found.tolist(), strict=True)) == expected
    assert sum(inside for _, inside in expected) > 500
    assert found.rate == 1


def test_the_same_ids_overlap_whatever_they_stand_for() -> None:
    rng = np.random.default_rng(0)
    training = rng.integers(0, 60_000, 1_000).tolist()
    copied = training[100:140]
    fresh = rng.integers(0, 60_000, 200).tolist()
    found = measure(id_passages(fresh, fresh[:60] + copied), id_passages(training), 13)
    assert found.ngrams.tolist() == [188, 88]
    assert found.found.tolist() == [0, 28]


def test_long_training_texts_are_read_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngrams, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(overlap, "ID_BATCH", 64)
    (long,) = words(1, length=2_000)
    parts = [" ".join(long.split()[i : i + 40]) for i in range(0, 1_960, 40)]
    found = measure(passages(*parts), passages(long), 13)
    assert found.found.tolist() == found.ngrams.tolist() == [28] * len(parts)
    ids = list(range(1_000))
    some = [ids[i : i + 30] for i in range(0, 970, 30)]
    of_ids = measure(id_passages(*some), id_passages(ids), 13)
    assert of_ids.found.tolist() == [18] * len(some)


def test_a_shard_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages_module, "READ_AT_ONCE", 300)
    (tmp_path / "ids.bin").write_bytes(np.arange(1_000, dtype="<u2").tobytes())
    ids = StoredIds(TokenFile(tmp_path / "ids.bin", np.dtype("<u2"), 0, 1_000))
    training = passages_of_shard(ids, np.array([[0, 1_000]]), None, "t", "unnamed", in_parts=True)
    some = [list(range(i, i + 30)) for i in range(10, 970, 30)]
    found = measure(id_passages(*some), training, 13)
    assert found.found.tolist() == found.ngrams.tolist() == [18] * len(some)


def test_short_documents() -> None:
    """From 8 words on inside any text; shorter ones only as whole documents; without words only
    as copies."""
    eight, seven = "one two three four five six seven eight", "a b c d e f g"
    training = passages(f"so {eight} and on", f"so {seven} and on", "x y", "...")
    found = measure(passages(eight, seven, "x  Y", "x", "...", "!"), training, 13)
    assert found.found.tolist() == [1, 0, 1, 0, 0, 0]
    assert found.copies.tolist() == [False, False, False, False, True, False]
    assert overlapping(found, Settings()).tolist() == [True, False, True, False, True, False]


def test_a_copy_is_found_by_its_content() -> None:
    text = "the same words from the first to the last, in this order and in no other one at all"
    found = measure(passages(text, "other"), passages("first", text), 13)
    assert found.copies.tolist() == [True, False]
    assert found.shares.tolist() == [1, 0]


def test_a_document_overlaps_from_the_share_on() -> None:
    counts = np.array([10, 10, 10, 0])
    found = Overlap(counts, np.array([1, 2, 10, 0]), np.zeros(4, bool), 1.0)
    assert overlapping(found, Settings()).tolist() == [False, True, True, False]
    assert overlapping(found, Settings(document_share=0.0)).tolist() == [True, True, True, False]
    assert histogram(found) == [1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("documents", "over", "tokens", "over_tokens", "status"),
    [
        (100, 1, 10_000, 100, "held_out"),
        (100, 2, 10_000, 100, "contaminated"),  # documents
        (100, 1, 10_000, 101, "contaminated"),  # tokens
        (100, 0, 10_000, 0, "held_out"),
        (54, 1, 10_000, 1, "contaminated"),
    ],
)
def test_a_set_is_contaminated_above_the_limit(
    documents: int, over: int, tokens: int, over_tokens: int, status: str
) -> None:
    assert measured_status(documents, over, tokens, over_tokens, 0.01) == status


def test_what_a_record_keeps_of_it() -> None:
    training = words(5, length=50)
    evaluation = [training[0], *words(3, length=50, seed=9)]
    found = measure(passages(*evaluation), passages(*training), 13)
    status, facts, rule = outcome(found, np.array([70, 60, 60, 60]), Settings(limit=0.3))
    assert status == "held_out"
    assert facts == {
        "method": "every n-gram, 64-bit hashes",
        "measured_on": "words of the text",
        "ngrams": 4 * 38,
        "ngrams_in_training": 38,
        "share": 0.25,
        "copies": 1,
        "overlapping_documents": 1,
        "overlapping_tokens": 70,
        "histogram": [3, *[0] * 10, 1],
    }
    assert rule.startswith("n-grams of 13 words; a document overlaps from 0.2 of them on;")


def test_a_sample_estimates_within_its_stated_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of a text is copied: of 20,000 n-grams 1 in 8 is looked up."""
    monkeypatch.setattr(overlap, "MOST_KEYS", 4_000)
    (training,), (fresh,) = words(1, length=10_012), words(1, length=10_000, seed=3)
    found = measure(passages(f"{training} {fresh}"), passages(training), 13)
    assert found.rate == 1 / 8
    error = (0.25 / (20_000 * found.rate)) ** 0.5
    assert abs(found.shares[0] - 0.5) < 4 * error
    assert outcome(found, np.array([1]), Settings())[1]["method"].startswith("a sample: 1 in 8")


def test_the_sample_is_the_same_however_documents_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch or in many, the rate is found only when the last of them is there."""
    monkeypatch.setattr(overlap, "MOST_KEYS", 500)
    evaluation = words(60, length=120)
    training = [" ".join(one.split()[:60]) for one in evaluation]
    at_once = measure(passages(*evaluation), passages(*training), 13)
    monkeypatch.setattr(overlap, "BATCH_CHARACTERS", 2_000)
    in_turn = measure(passages(*evaluation), passages(*training), 13)
    assert at_once.rate == in_turn.rate == 1 / 16
    assert at_once.ngrams.tolist() == in_turn.ngrams.tolist()
    assert at_once.found.tolist() == in_turn.found.tolist()
    assert 0 < at_once.ngrams.sum() < 500


def test_what_was_measured_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = words(4, length=30), words(4, length=30, seed=2)
    reads = []

    def counted(texts: list[str]) -> Passages:
        plain = passages(*texts)

        def read() -> object:
            reads.append(1)
            return iter(texts)

        return Passages(plain.identity, plain.content_sha256, read)  # type: ignore[arg-type]

    first = measured(counted(one), counted(one + other), 13, tmp_path)
    assert len(reads) == 2
    again = measured(counted(one), counted(one + other), 13, tmp_path)
    assert len(reads) == 2, "nothing is read again"
    assert again.found.tolist() == first.found.tolist()
    assert again.copies.tolist() == first.copies.tolist() == [True] * 4
    measured(counted(one), counted(other), 13, tmp_path)
    measured(counted(one), counted(one + other), 8, tmp_path)
    assert len(reads) == 6, "other text and other settings are measured"
    (path, *_) = tmp_path.glob("*.npz")
    for file in tmp_path.glob("*.npz"):
        file.write_bytes(file.read_bytes()[:-40] + bytes(40))
    with caplog.at_level(logging.WARNING):
        repaired = measured(counted(one), counted(one + other), 13, tmp_path)
    assert repaired.found.tolist() == first.found.tolist()
    assert "damaged" in caplog.text
    assert path.exists()
