"""Which documents belong together because they share passages: groups of near-duplicates.

Two documents are linked when they share at least 20 % (settable) of the different n-grams of the
one that has fewer, and all that is linked, directly or through others, is one group. Documents
whose words are the same are always one group.

The n-grams of up to `MOST_ENTRIES` are compared exactly. Of more, a sample decides: the n-grams
whose hash is below 2^64 x rate, rate the largest power of 1/2 that keeps at most that many
(FracMinHash, Irber et al. 2022, https://doi.org/10.1101/2022.01.11.475838). The share of a document
of m n-grams is then estimated without bias, with a standard error of sqrt(share (1 - share) /
(m x rate)); a document none of whose n-grams is in the sample is linked only to its copies.

An n-gram that stands in more than `MOST_PAIRED` documents links each to the next and to the first
of them in order of their content, not all to all: what that misses are links between documents
that share nothing but such common passages. Groups are therefore a means, not a proof: whether a
held-out document still overlaps is measured afterwards, exactly.

Groups depend on the documents alone: not on their order, nor on who computed the n-grams.
Memory: 60 bytes an entry at most, 1 GB in all.

Shapes: D documents, E entries (one for each different n-gram of each document).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.core.data.ngrams import (
    BATCH_CHARACTERS,
    Int64,
    Ragged,
    UInt64,
    ngrams,
    word_hashes,
)
from workbench.core.data.workers import cores

MOST_ENTRIES = 16 << 20
MOST_PAIRED = 8
SHARE = 0.2
_FOR_THREADS = 1 << 21  # hashes; so many are sorted on all cores


@dataclass(frozen=True, eq=False)
class Groups:
    """The number of each document's group [D], and the rate of the sample (1: exact).

    Groups are numbered in order of their first document.
    """

    numbers: Int64
    rate: float

    @property
    def shared(self) -> int:
        """Groups of more than one document."""
        return int((np.bincount(self.numbers) > 1).sum()) if len(self.numbers) else 0


@dataclass(frozen=True, eq=False)
class Sample:
    """What is kept of the n-grams of D documents: `hashes` and `documents` [E], each n-gram of
    each document once, and a fingerprint of all n-grams of each document [D]."""

    hashes: UInt64
    documents: npt.NDArray[np.int32]
    fingerprints: UInt64


def sample_of(grams: Ragged, halvings: int = 0) -> Sample:
    """The sample of these documents at the rate 2^-halvings."""
    hashes = grams.values
    documents = np.repeat(np.arange(len(grams), dtype=np.int32), grams.lengths)
    if halvings:
        kept = hashes <= _limit(halvings)
        hashes, documents = hashes[kept], documents[kept]
    hashes, documents = _distinct(hashes, documents)
    return Sample(hashes, documents, _fingerprints(grams))


class NearDuplicates:
    """Collects the n-grams of documents, then groups them.

    `add` may be called with any number of documents at a time; memory is bounded by the sample.
    """

    def __init__(self, share: float = SHARE, most_entries: int = MOST_ENTRIES) -> None:
        self._share, self._most = share, most_entries
        self.halvings = 0
        self._hashes: list[UInt64] = []
        self._documents: list[npt.NDArray[np.int32]] = []
        self._fingerprints: list[UInt64] = []
        self._entries = 0
        self._count = 0

    def add(self, grams: Ragged) -> None:
        """The n-grams of the next documents, as `ngrams.ngrams` makes them."""
        self.add_sample(sample_of(grams, self.halvings))

    def add_sample(self, sample: Sample) -> None:
        """The next documents, sampled elsewhere at a rate of at least 2^-halvings."""
        kept = sample.hashes <= _limit(self.halvings)
        self._fingerprints.append(sample.fingerprints)
        self._hashes.append(sample.hashes[kept])
        self._documents.append(sample.documents[kept] + np.int32(self._count))
        self._count += len(sample.fingerprints)
        self._entries += len(self._hashes[-1])
        while self._entries > self._most:
            self._halve()

    def add_texts(self, texts: Iterable[str]) -> None:
        """The n-grams of the next documents, by their words."""
        batch: list[str] = []
        characters = 0
        for text in texts:
            batch.append(text)
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                self.add(ngrams(word_hashes(batch)))
                batch, characters = [], 0
        self.add(ngrams(word_hashes(batch)))

    def groups(self) -> Groups:
        """The group of every document added, in the order in which they were added."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        count = self._count
        fingerprints = np.concatenate([np.zeros(0, np.uint64), *self._fingerprints])
        pairs = np.concatenate([self._linked(fingerprints), _same(fingerprints)])
        ones = np.ones(len(pairs), np.bool_)
        graph = coo_array((ones, (pairs[:, 0], pairs[:, 1])), shape=(count, count))
        labels = connected_components(graph, directed=False)[1] if count else np.zeros(0, np.int64)
        first = np.unique(labels, return_index=True)[1]
        numbers = np.empty(len(first), np.int64)
        numbers[np.argsort(first)] = np.arange(len(first))
        return Groups(numbers[labels], 0.5**self.halvings)

    def _halve(self) -> None:
        self.halvings += 1
        kept = [hashes <= _limit(self.halvings) for hashes in self._hashes]
        self._hashes = [h[k] for h, k in zip(self._hashes, kept, strict=True)]
        self._documents = [d[k] for d, k in zip(self._documents, kept, strict=True)]
        self._entries = sum(map(len, self._hashes))

    def _linked(self, fingerprints: UInt64) -> Int64:
        """The pairs [P, 2] of documents that share enough n-grams."""
        hashes = np.concatenate([np.zeros(0, np.uint64), *self._hashes])
        documents = np.concatenate([np.zeros(0, np.int32), *self._documents])
        self._hashes, self._documents = [hashes], [documents]
        sizes = np.bincount(documents, minlength=self._count)
        several = _occurs_again(hashes)  # the others link nothing
        hashes, documents = hashes[several], documents[several]
        # Documents in order of their content, so that "next" and "first" mean the same in any order
        order = np.lexsort((sizes, fingerprints))
        rank = np.empty(self._count, np.int64)
        rank[order] = np.arange(self._count)
        by_hash = np.lexsort((rank[documents], hashes))
        hashes, ranks = hashes[by_hash], rank[documents[by_hash]]
        heads = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]]) if len(hashes) else hashes
        runs = np.diff(heads, append=len(hashes)).astype(np.int64)
        codes = [np.zeros(0, np.int64)]
        for length in range(2, MOST_PAIRED + 1):
            starts = heads[runs == length].astype(np.int64)
            for i in range(length - 1):
                for j in range(i + 1, length):
                    codes.append(ranks[starts + i] * self._count + ranks[starts + j])
        long = runs > MOST_PAIRED
        starts, counts = heads[long].astype(np.int64), runs[long]
        first = np.repeat(starts, counts)
        place = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        own, head = ranks[first + place], ranks[first]
        after = ranks[np.minimum(first + place + 1, max(len(ranks) - 1, 0))]
        codes.append((head * self._count + own)[place > 1])
        codes.append((own * self._count + after)[place + 1 < np.repeat(counts, counts)])
        pairs, shared = np.unique(np.concatenate(codes), return_counts=True)
        one, two = order[pairs // max(self._count, 1)], order[pairs % max(self._count, 1)]
        enough = shared >= self._share * np.minimum(sizes[one], sizes[two])
        return np.stack([one, two], axis=1)[enough]


def group(grams: Ragged, share: float = SHARE, most_entries: int = MOST_ENTRIES) -> Groups:
    """The groups of documents held in memory at once."""
    collected = NearDuplicates(share, most_entries)
    collected.add(grams)
    return collected.groups()


def _fingerprints(grams: Ragged) -> UInt64:
    """One number for the n-grams of each document [D], the same for the same sequence."""
    place = np.arange(len(grams.values)) - np.repeat(grams.offsets[:-1], grams.lengths)
    # Odd factors that depend on the place; sums of hashed values do not cancel by chance.
    weighted = grams.values * (place.astype(np.uint64) * np.uint64(2) + np.uint64(1))
    sums = np.r_[np.uint64(0), np.cumsum(weighted, dtype=np.uint64)]
    found: UInt64 = sums[grams.offsets[1:]] - sums[grams.offsets[:-1]]
    return found


def _same(fingerprints: UInt64) -> Int64:
    """Pairs [P, 2] that join every document to the first with the same words; those without words
    stay alone."""
    _, first, which = np.unique(fingerprints, return_index=True, return_inverse=True)
    at = np.arange(len(fingerprints))
    pairs = np.stack([first[which], at], axis=1).astype(np.int64)
    found: Int64 = pairs[(pairs[:, 0] != at) & (fingerprints != 0)]
    return found


def _distinct(
    hashes: UInt64, documents: npt.NDArray[np.int32]
) -> tuple[UInt64, npt.NDArray[np.int32]]:
    """Each n-gram of each document once."""
    again = _occurs_again(hashes)  # few, and only those need the slow sort by two keys
    some, theirs = hashes[again], documents[again]
    order = np.lexsort((some, theirs))
    some, theirs = some[order], theirs[order]
    new = np.ones(len(some), bool)
    new[1:] = (some[1:] != some[:-1]) | (theirs[1:] != theirs[:-1])
    return np.r_[hashes[~again], some[new]], np.r_[documents[~again], theirs[new]]


def _occurs_again(hashes: UInt64) -> npt.NDArray[np.bool_]:
    """Which of the hashes stand there more than once [E]."""
    if len(hashes) >= _FOR_THREADS and (most := cores()) > 1:  # numpy sorts outside the lock
        found = np.zeros(len(hashes), bool)
        bits = most.bit_length()
        first = (hashes >> np.uint64(64 - bits)).astype(np.uint8)

        def look(value: int) -> npt.NDArray[np.intp]:
            at = np.flatnonzero(first == value)
            return at[_again(hashes[at])]

        with ThreadPoolExecutor(most) as pool:
            for at in pool.map(look, range(1 << bits)):
                found[at] = True
        return found
    return _again(hashes)


def _again(hashes: UInt64) -> npt.NDArray[np.bool_]:
    """`_occurs_again` on this core."""
    ordered = np.sort(hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    found = np.zeros(len(hashes), bool)
    if not len(repeated):
        return found
    repeated = repeated[np.r_[True, repeated[1:] != repeated[:-1]]]
    # A table by the first bits leaves few to be looked up: that is four times as fast.
    bits = min(max(len(hashes).bit_length() + 2, 8), 26)
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, bool)
    table[(repeated >> shift).astype(np.int64)] = True
    perhaps = np.flatnonzero(table[(hashes >> shift).astype(np.int64)])
    at = np.minimum(np.searchsorted(repeated, hashes[perhaps]), len(repeated) - 1)
    found[perhaps] = repeated[at] == hashes[perhaps]
    return found


def _limit(halvings: int) -> np.uint64:
    """The largest hash of a sample at the rate 2^-halvings."""
    return np.uint64(2 ** (64 - halvings) - 1)
