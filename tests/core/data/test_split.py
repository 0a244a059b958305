"""The split: by content alone, equal texts on one side, counts that add up."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from workbench.core.data.encoded import EncodedCorpus
from workbench.core.data.errors import DataError
from workbench.core.data.ngrams import ngrams, word_hashes
from workbench.core.data.passages import texts_of as text_of_ranges
from workbench.core.data.split import Spans, Split, every_document, split_corpus
from workbench.core.data.tokenizer import Tokenizer

Encode = Callable[..., EncodedCorpus]
Words = Callable[..., list[str]]
RATIO = 0.2
TOGETHER = ", near-duplicates (13 words, 0.2) together"


def side(text: str, ratio: float) -> str:
    """The rule, written once more."""
    digest = hashlib.sha256(" ".join(text.casefold().split()).encode()).hexdigest()
    return "held_out" if int(digest, 16) / 2**256 < ratio else "train"


def texts_of(split: Split, spans: Spans, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(split.tokens[a:b]) for a, b in spans.ranges]


def train_texts(split: Split, tokenizer: Tokenizer) -> list[str]:
    stream = np.concatenate([split.tokens[a:b] for a, b in split.train_segments])
    assert stream[0] == tokenizer.eod_id
    return [
        tokenizer.decode(part)
        for part in np.split(stream, np.flatnonzero(stream == tokenizer.eod_id))[1:]
        for part in [part[1:]]
    ]


def test_every_document_is_where_its_hash_puts_it(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    texts = words(400)
    split = split_corpus(encode(*texts), byte_tokenizer, RATIO)
    assert train_texts(split, byte_tokenizer) == [t for t in texts if side(t, RATIO) == "train"]
    held_out = texts_of(split, split.held_out, byte_tokenizer)
    assert sorted(held_out) == sorted(t for t in texts if side(t, RATIO) == "held_out")
    assert held_out == sorted(held_out, key=lambda t: hashlib.sha256(t.encode()).digest())
    assert 50 < len(held_out) < 110
    assert split.rule == "document group hash < 0.2" + TOGETHER


def test_the_side_of_a_document_does_not_depend_on_the_others(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    texts = words(60)
    split = split_corpus(encode(*reversed(texts)), byte_tokenizer, RATIO)
    assert set(texts_of(split, split.held_out, byte_tokenizer)) == {
        t for t in texts if side(t, RATIO) == "held_out"
    }


def test_copies_fall_on_one_side_and_are_counted(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    texts = words(100)
    train = [t for t in texts if side(t, RATIO) == "train"]
    held = [t for t in texts if side(t, RATIO) == "held_out"]
    exact = train[:10] + held[:4] + held[:1]
    changed = [f"  {t.upper()}\n" for t in train[20:23] + held[5:7]]
    split = split_corpus(encode(*texts, *exact, *changed), byte_tokenizer, RATIO)
    got_train = train_texts(split, byte_tokenizer)
    got_held = texts_of(split, split.held_out, byte_tokenizer)
    alike = [{" ".join(t.casefold().split()) for t in got} for got in (got_train, got_held)]
    assert not alike[0] & alike[1]
    assert got_train == train + train[:10] + changed[:3]  # training keeps its copies
    assert sorted(got_held) == sorted([*held, *changed[3:]])  # the held-out set has none
    assert split.counts == {
        "documents": 120,
        "skipped_empty": 0,
        "exact_duplicates": 15,
        "normalised_duplicates": 5,
        "near_duplicate_groups": 19,
        "moved_to_training": 0,
        "train_exact_duplicates": 10,
        "held_out_dropped": 5,
        "train_documents": len(got_train),
        "train_tokens": sum(len(t) for t in got_train),
        "train_bytes": sum(len(t) for t in got_train),
        "stream_tokens": sum(len(t) + 1 for t in got_train),
        "held_out_documents": len(got_held),
        "held_out_tokens": sum(len(t) for t in got_held),
        "held_out_bytes": sum(len(t) for t in got_held),
    }


def test_train_split_is_training_text_of_the_held_out_size(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    texts = words(300)
    split = split_corpus(encode(*texts, *texts), byte_tokenizer, RATIO)
    got = texts_of(split, split.train_split, byte_tokenizer)
    assert set(got) <= set(train_texts(split, byte_tokenizer))
    assert len(got) == len(set(got))
    by_hash = sorted(set(texts), key=lambda t: hashlib.sha256(t.encode()).digest())
    assert got == [t for t in by_hash if side(t, RATIO) == "train"][: len(got)]
    sizes = split.train_split.byte_counts.sum(), split.held_out.byte_counts.sum()
    assert abs(int(sizes[0]) - int(sizes[1])) <= max(map(len, texts)) / 2
    assert split.train_split.unit == "document"


def test_train_split_is_the_same_under_every_tokenizer(
    words: Words, byte_tokenizer: Tokenizer, small: Tokenizer, encode: Encode
) -> None:
    texts = words(100)
    by_bytes = split_corpus(encode(*texts), byte_tokenizer, RATIO)
    encoded = encode(*texts)
    ids = small.encode_documents(texts)
    runs = [np.r_[small.eod_id, run] for run in ids]
    other = EncodedCorpus(
        np.concatenate(runs),
        np.r_[0, np.cumsum([len(run) for run in runs])],
        encoded.byte_counts,
        encoded.content_sha256,
        encoded.split_sha256,
        0,
    )
    by_ranks = split_corpus(other, small, RATIO)
    for a, b in (
        (by_bytes.train_split, by_ranks.train_split),
        (by_bytes.held_out, by_ranks.held_out),
    ):
        assert a.sha256.tobytes() == b.sha256.tobytes()
        assert a.byte_counts.tolist() == b.byte_counts.tolist()
        assert int(a.lengths.sum()) > int(b.lengths.sum())
    assert by_bytes.train_sha256 == by_ranks.train_sha256


def test_the_first_of_a_set_in_hash_order(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    split = split_corpus(encode(*words(200)), byte_tokenizer, RATIO)
    some = split.held_out.first(7)
    assert (
        texts_of(split, some, byte_tokenizer) == texts_of(split, split.held_out, byte_tokenizer)[:7]
    )
    assert len(split.held_out.first(10_000)) == len(split.held_out)


def test_training_identity_is_content_and_order(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    texts = words(60)
    encoded = encode(*texts)
    split = split_corpus(encoded, byte_tokenizer, RATIO)
    hashes = [hashlib.sha256(t.encode()).digest() for t in texts if side(t, RATIO) == "train"]
    assert split.train_sha256 == hashlib.sha256(b"".join(hashes)).hexdigest()


def test_nothing_held_out(encode: Encode, words: Words, byte_tokenizer: Tokenizer) -> None:
    for count in (5, 200):
        encoded = encode(*words(count))
        split = split_corpus(encoded, byte_tokenizer, 0.0)
        assert split.rule == "none"
        assert len(split.held_out) == 0
        assert split.counts["train_documents"] == len(encoded)
        assert split.train_segments.tolist() == [[0, len(encoded.tokens)]]
        assert len(split.train_split) == {5: 1, 200: 10}[count]  # 5 % of the text


def test_a_small_corpus_still_holds_out_a_whole_document(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    texts = [t for t in words(60) if side(t, 0.05) == "train"][:25]
    split = split_corpus(encode(*texts), byte_tokenizer, 0.05)
    digest = {t: hashlib.sha256(t.encode()).digest() for t in texts}
    assert texts_of(split, split.held_out, byte_tokenizer) == [min(texts, key=digest.__getitem__)]
    assert split.rule == "lowest document group hash (none below 0.05)" + TOGETHER
    assert split.counts["train_documents"] == 24


def test_a_high_ratio_still_leaves_a_document_to_train_on(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    texts = [t for t in words(60) if side(t, 0.9) == "held_out"][:20]
    split = split_corpus(encode(*texts), byte_tokenizer, 0.9)
    digest = {t: hashlib.sha256(t.encode()).digest() for t in texts}
    assert train_texts(split, byte_tokenizer) == [max(texts, key=digest.__getitem__)]


def test_a_corpus_of_one_text_cannot_be_split(encode: Encode, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="all 30 documents are the same text"):
        split_corpus(encode(*(["same text"] * 15 + [" SAME  text"] * 15)), byte_tokenizer, 0.05)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_ratio_outside_its_range(encode: Encode, byte_tokenizer: Tokenizer, ratio: float) -> None:
    with pytest.raises(DataError, match=r"data\.held_out_ratio"):
        split_corpus(encode("a"), byte_tokenizer, ratio)


@pytest.mark.parametrize(
    ("characters", "ratio", "tail"),
    [(99_999, 0.05, 5000), (19_999, 0.05, 2048), (5999, 0.05, 1200), (99_999, 0.5, 20_000)],
)
def test_contiguous_tail_by_hand(
    encode: Encode, byte_tokenizer: Tokenizer, characters: int, ratio: float, tail: int
) -> None:
    text = "".join(chr(97 + i % 26) for i in range(characters))
    split = split_corpus(encode(text), byte_tokenizer, ratio)  # with the end-of-document id
    cut = characters + 1 - tail
    assert split.rule == f"contiguous_tail {ratio}"
    assert split.train_segments.tolist() == [[0, cut]]
    assert split.held_out.unit == "block of 1024 tokens"
    ranges = sorted(split.held_out.ranges.tolist())
    assert ranges[0][0] == cut
    assert ranges[-1][1] == characters + 1
    assert all(b - a == 1024 for a, b in ranges[:-1])
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert sum(split.held_out.byte_counts.tolist()) == tail
    assert split.counts["train_bytes"] == cut - 1
    assert split.counts["held_out_tokens"] == tail
    assert all(end <= cut for _, end in split.train_split.ranges.tolist())


def test_nineteen_documents_have_a_tail_and_twenty_are_split_whole(
    encode: Encode, words: Words, byte_tokenizer: Tokenizer
) -> None:
    assert split_corpus(encode(*words(19)), byte_tokenizer, 0.05).rule == "contiguous_tail 0.05"
    assert "document group hash" in split_corpus(encode(*words(20)), byte_tokenizer, 0.05).rule


def test_a_copy_cannot_stand_in_the_tail(encode: Encode, byte_tokenizer: Tokenizer) -> None:
    first, second = "abcdefgh " * 300, "something else " * 400
    split = split_corpus(encode(first, second, first.upper()), byte_tokenizer, 0.05)
    text = byte_tokenizer.decode(split.tokens)
    assert text.upper().count("ABCDEFGH") == 300
    assert split.counts["duplicates_dropped"] == 1
    assert split.counts["normalised_duplicates"] == 1
    assert split.counts["exact_duplicates"] == 0


def test_bytes_of_tail_blocks_are_those_of_their_text(small: Tokenizer, encode: Encode) -> None:
    text = "Überall naïve 中文 🙂 text. " * 2000
    ids = np.r_[small.eod_id, small.encode_documents([text])[0]]
    encoded = encode(text)
    other = EncodedCorpus(
        ids,
        np.array([0, len(ids)]),
        encoded.byte_counts,
        encoded.content_sha256,
        encoded.split_sha256,
        0,
    )
    split = split_corpus(other, small, 0.05)
    for (start, end), count in zip(split.held_out.ranges, split.held_out.byte_counts, strict=True):
        assert len(small.decode_bytes(ids[start:end])) == count
    assert split.counts["train_bytes"] + split.counts["held_out_bytes"] == len(text.encode())


def test_a_text_too_small_to_cut(encode: Encode, byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="1 document with 3 tokens in all: too little"):
        split_corpus(encode("ab"), byte_tokenizer, 0.05)


def test_sample_split_is_pinned(sample: EncodedCorpus, o200k: Tokenizer) -> None:
    split = split_corpus(sample, o200k, 0.05)
    assert split.counts["train_documents"] == 1135
    assert split.counts["held_out_documents"] == len(split.held_out) == 54
    assert split.counts["held_out_tokens"] == 47_228
    assert split.counts["train_tokens"] == 926_690
    assert split.train_sha256 == "590231e2107ccbf92d3aeb2baf60f61e14d4954099c5cb5293077b2416c4d2ed"


def passage(draw: random.Random, words: int) -> str:
    return " ".join(f"w{draw.randrange(10**6)}" for _ in range(words))


def grams_of(text: str) -> set[tuple[str, ...]]:
    """Different sequences of 13 words, found without the package."""
    words = re.findall(r"[^\W_]+", text.lower())
    return {tuple(words[i : i + 13]) for i in range(len(words) - 12)}


def largest_share(held_out: list[str], train: list[str]) -> float:
    """The largest share of the 13-word sequences of a held-out text that stand in training."""
    stands: set[tuple[str, ...]] = set().union(*map(grams_of, train))
    shares = []
    for text in held_out:
        words = re.findall(r"[^\W_]+", text.lower())
        grams = [tuple(words[i : i + 13]) for i in range(len(words) - 12)]
        shares.append(sum(gram in stands for gram in grams) / max(len(grams), 1))
    return max(shares)


def test_near_duplicates_fall_on_one_side(encode: Encode, byte_tokenizer: Tokenizer) -> None:
    draw = random.Random(8)
    texts = []
    for _ in range(60):  # pairs that share half of their words
        shared = passage(draw, 40)
        texts += [f"{shared} {passage(draw, 40)}", f"{passage(draw, 40)} {shared}"]
    encoded = encode(*texts)
    split = split_corpus(encoded, byte_tokenizer, RATIO)
    held_out, train = (
        texts_of(split, split.held_out, byte_tokenizer),
        train_texts(split, byte_tokenizer),
    )
    assert len(held_out) > 10
    assert sorted(held_out + train) == sorted(texts)
    pairs = [(texts[i] in held_out, texts[i + 1] in held_out) for i in range(0, len(texts), 2)]
    assert all(one == other for one, other in pairs)
    assert split.counts["near_duplicate_groups"] == 60
    assert largest_share(held_out, train) == 0
    apart = split_corpus(replace(encoded, groups=None), byte_tokenizer, RATIO)
    assert (
        apart.counts["moved_to_training"] > 5
    )  # what no group held together is found all the same
    found = texts_of(apart, apart.held_out, byte_tokenizer)
    assert largest_share(found, train_texts(apart, byte_tokenizer)) < 0.2


def test_a_document_made_of_many_others_is_not_held_out(
    encode: Encode, byte_tokenizer: Tokenizer
) -> None:
    """No pair shares enough to be a group: the training side as a whole brings the passages."""
    draw = random.Random(3)
    texts = [passage(draw, 200) for _ in range(100)]
    made = []
    for k in range(20):
        parts = draw.sample(range(100), 12)
        made.append(" ".join(" ".join(texts[i].split()[20 * (k % 9) :][:20]) for i in parts))
    split = split_corpus(encode(*texts, *made), byte_tokenizer, RATIO)
    held_out, train = (
        texts_of(split, split.held_out, byte_tokenizer),
        train_texts(split, byte_tokenizer),
    )
    assert split.counts["moved_to_training"] > 0
    assert len(held_out) > 5
    assert largest_share(held_out, train) < 0.2


def test_the_held_out_set_of_the_sample_is_clean(sample: EncodedCorpus, o200k: Tokenizer) -> None:
    split = split_corpus(sample, o200k, 0.05)
    held_out, train = texts_of(split, split.held_out, o200k), train_texts(split, o200k)
    assert len(held_out) > 40
    assert largest_share(held_out, train) < 0.2
    assert split.counts["near_duplicate_groups"] > 10


def test_a_split_by_single_chapter_would_not_be(sample: EncodedCorpus, o200k: Tokenizer) -> None:
    """Why groups are kept together: accounts of the same events stand in several chapters. Of
    splits by another hash each, a few percent of what is held out stands in training, and chapters
    of which 20 % and 30 % do."""
    spans = every_document(sample)
    texts = list(text_of_ranges(sample.tokens, spans.ranges, o200k))
    grams = ngrams(word_hashes(texts), 13)
    which = np.unique(grams.values, return_inverse=True)[1]
    owner = np.repeat(np.arange(len(texts)), grams.lengths)
    totals, over = [], []
    for salt in range(12):
        draws = [hashlib.sha256(f"{salt} {t}".encode()).digest()[0] / 256 for t in texts]
        held_out = np.array(draws) < RATIO / 4
        trained = np.zeros(which.max() + 1, bool)
        trained[which[~held_out[owner]]] = True
        inside = np.bincount(owner, trained[which], len(texts))[held_out]
        lengths = grams.lengths[held_out]
        totals.append(inside.sum() / lengths.sum())
        over.append([int((inside / lengths >= share).sum()) for share in (0.2, 0.3)])
    assert 0.015 < np.mean(totals) < 0.04
    assert sum(one[0] > 0 for one in over) >= 8
    assert max(one[1] for one in over) >= 2
