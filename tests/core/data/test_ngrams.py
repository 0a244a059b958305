"""Hashes of n-grams, against a reading of the text word by word; and groups of near-duplicates."""

from __future__ import annotations

import random
import unicodedata

import numpy as np
import pytest

from workbench.core.data import near_duplicates as near_duplicates_module
from workbench.core.data import ngrams
from workbench.core.data.near_duplicates import NearDuplicates, group
from workbench.core.data.ngrams import id_hashes, word_batches, word_hashes

TEXTS = [
    "In the beginning, God created the heavens and the earth.",
    "Don't  STOP\tme-now\r\n42nd 3.14 naïve na\u0308ive İstanbul ΣΑΣ straße",
    "हिन्दी में शब्द और मात्राएँ",
    "我们去北京 and 東京タワー。 ภาษาไทย",
    "",
    "... !!! \n\t ---",
    "one",
    "\U0001d518\U0001d52b ﬁne ① \ud800 x",
]


def words_of(text: str) -> list[str]:
    """The definition, character by character."""
    words: list[str] = []
    inside = False
    for char in unicodedata.normalize("NFKC", text).lower():
        code = ord(char)
        if unicodedata.category(char)[0] not in "LMN":
            inside = False
        elif any(low <= code <= high for low, high in ngrams._WITHOUT_BLANKS):
            words.append(char)
            inside = False
        elif inside:
            words[-1] += char
        else:
            words.append(char)
            inside = True
    return words


def grams_of(words: list[str], n: int) -> list[tuple[str, ...]]:
    if len(words) < n:
        return [tuple(words)] if words else []
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def test_words_are_those_of_the_definition() -> None:
    found = word_hashes(TEXTS)
    assert found.lengths.tolist() == [len(words_of(text)) for text in TEXTS]
    # Equal words have equal hashes, and different words have not.
    by_word = dict(zip([w for t in TEXTS for w in words_of(t)], found.values.tolist(), strict=True))
    again = [by_word[w] for t in TEXTS for w in words_of(t)]
    assert again == found.values.tolist()
    assert len(set(by_word.values())) == len(by_word)
    for text, row in zip(TEXTS, map(found.row, range(len(found))), strict=True):
        assert word_hashes([text]).values.tolist() == row.tolist()


def test_case_blanks_and_punctuation_do_not_count() -> None:
    a, b = "The quick, brown fox -- jumps!", "  the QUICK brown\nfox\tjumps"
    assert word_hashes([a]).values.tolist() == word_hashes([b]).values.tolist()
    assert word_hashes(["the quick"]).values.tolist() != word_hashes(["the quack"]).values.tolist()


@pytest.mark.parametrize("at_once", [7, 1 << 14])
@pytest.mark.parametrize("n", [1, 2, 3, 13])
def test_ngrams_are_those_of_the_definition(
    n: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are hashed at once."""
    monkeypatch.setattr(ngrams, "_AT_ONCE", at_once)
    draw = random.Random(7)
    texts = [" ".join(draw.choices("abcd", k=k)) for k in (0, 1, 2, 12, 13, 14, 40, 0, 300, 5)]
    found = ngrams.ngrams(word_hashes(texts), n)
    expected = [gram for text in texts for gram in grams_of(words_of(text), n)]
    assert found.lengths.tolist() == [len(grams_of(words_of(text), n)) for text in texts]
    known: dict[tuple[str, ...], int] = {}
    for gram, value in zip(expected, found.values.tolist(), strict=True):
        assert known.setdefault(gram, value) == value
    assert len(set(known.values())) == len(known)
    whole = ngrams.windows(word_hashes(texts), n)
    assert whole.lengths.tolist() == [max(len(words_of(text)) - n + 1, 0) for text in texts]


def test_ids_are_units_too() -> None:
    documents = [np.array([5, 6, 5, 6, 7], np.uint16), np.array([5, 6], np.uint32)]
    units = id_hashes(documents)
    assert units.values[0] == units.values[2] == units.values[5] != units.values[1]
    pairs = ngrams.ngrams(units, 2)
    assert pairs.values[0] == pairs.values[2] == pairs.values[4]
    assert pairs.lengths.tolist() == [4, 1]
    assert pairs.values[0] != pairs.values[1], "the order of the units counts"


def test_a_long_text_in_parts_loses_no_ngram(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    text = " ".join(draw.choice(["alpha", "bé", "gamma", "我们"]) + str(i) for i in range(5000))
    whole = ngrams.ngrams(word_hashes([text]), 13).values
    monkeypatch.setattr(ngrams, "BATCH_CHARACTERS", 700)
    texts = ["short text", text, "another"]
    parts = [ngrams.windows(part, 13) for part in word_batches(texts, 12)]
    assert len(parts) > 20
    assert np.concatenate([part.values for part in parts]).tolist() == whole.tolist()


def passages(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(count))


def near_duplicates() -> tuple[list[str], list[set[int]]]:
    """Documents, and the groups that they make."""
    draw = random.Random(11)
    texts = [passages(draw, 120) for _ in range(30)]
    texts[3] = texts[20].upper().replace(" ", "\n")  # the same words
    texts[5] = " ".join([texts[21][: len(texts[21]) // 2], passages(draw, 60)])  # half of it
    texts[7] = " ".join([texts[5][-len(texts[5]) // 2 :], passages(draw, 60)])  # through 5
    texts[9] = " ".join([*texts[22].split()[:18], passages(draw, 100)])  # 6 of 106 n-grams
    boiler = passages(draw, 60)
    for i in range(10, 20):  # one passage in ten documents, more than are paired
        texts[i] = f"{passages(draw, 60)} {boiler}"
    texts += ["?", "!", "so short", "So short!"]
    linked = [{3, 20}, {5, 7, 21}, set(range(10, 20)), {32, 33}]
    alone = set(range(34)) - set().union(*linked)
    return texts, [*linked, *({i} for i in alone)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("parts", [1, 7])
def test_documents_that_share_passages_are_one_group(
    parts: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_duplicates_module, "_FOR_THREADS", 10)
    monkeypatch.setattr(near_duplicates_module, "cores", lambda: threads)
    texts, expected = near_duplicates()
    for seed in range(3):
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        collected = NearDuplicates()
        for start in range(0, len(texts), -(-len(texts) // parts)):
            some = order[start : start + -(-len(texts) // parts)]
            collected.add(ngrams.ngrams(word_hashes([texts[i] for i in some])))
        found = collected.groups()
        assert found.rate == 1.0
        groups: dict[int, set[int]] = {}
        for place, number in enumerate(found.numbers.tolist()):
            groups.setdefault(number, set()).add(order[place])
        assert sorted(map(sorted, groups.values())) == sorted(map(sorted, expected))
        assert found.shared == 4


def test_beyond_the_bound_a_sample_decides_whatever_the_order() -> None:
    draw = random.Random(5)
    texts = [passages(draw, 400) for _ in range(40)]
    for i in range(0, 20, 2):
        texts[i + 1] = " ".join([*texts[i].split()[:300], passages(draw, 100)])
    grams = ngrams.ngrams(word_hashes(texts))
    exact = group(grams)
    sampled = group(grams, most_entries=3000)
    assert exact.rate == 1.0
    assert sampled.rate == 0.125  # 15,520 entries: 1/8 is the first power of 1/2 below 3,000
    assert sampled.numbers.tolist() == exact.numbers.tolist()
    collected = NearDuplicates(most_entries=3000)
    for text in reversed(texts):
        collected.add(ngrams.ngrams(word_hashes([text])))
    backwards = collected.groups()
    assert backwards.rate == sampled.rate
    assert backwards.shared == exact.shared == 10


def test_no_documents_have_no_groups() -> None:
    assert group(ngrams.ngrams(word_hashes([]))).numbers.tolist() == []
    assert group(ngrams.ngrams(word_hashes(["", "..."]))).numbers.tolist() == [0, 1]


def test_words_of_ascii_have_the_hashes_they_have_beside_other_letters() -> None:
    draw = random.Random(2)
    letters = "".join(map(chr, range(1, 128)))
    for _ in range(40):
        texts = [
            "".join(draw.choice(draw.choice((letters, "abc XY9 "))) for _ in range(size))
            for size in draw.sample(range(300), 4)
        ]
        texts += ["x" * 200 + " " + "y9" * 90, "", "..."]  # words longer than any table
        alone, beside = word_hashes(texts), word_hashes([*texts, "é"])
        assert alone.values.tolist() == beside.values[:-1].tolist()
        assert alone.offsets.tolist() == beside.offsets[:-1].tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_hashes_that_occur_again(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates_module, "_FOR_THREADS", 10)
    monkeypatch.setattr(near_duplicates_module, "cores", lambda: threads)
    rng = np.random.default_rng(threads)
    hashes = np.repeat(rng.integers(0, 2**64, 400, np.uint64), rng.integers(1, 4, 400))
    rng.shuffle(hashes)
    listed = hashes.tolist()
    expected = [listed.count(value) > 1 for value in listed]
    assert near_duplicates_module._occurs_again(hashes).tolist() == expected
