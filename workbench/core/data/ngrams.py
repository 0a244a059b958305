"""Hashes of word n-grams and of token n-grams: what "the same passage" means for every data set.

A *word* is a longest run of letters, marks and digits (Unicode categories L, M, N) of the text in
form NFKC, lower-cased; all else separates. In scripts written without blanks (Chinese, Japanese,
Thai, Lao, Khmer, Burmese) every letter is a word of its own. So the words of a text depend on no
tokenizer, and not on case, punctuation or blanks. Where only token ids exist, an id is a unit.

An *n-gram* is n units in a row of one document. It is known by 64 bits: two that differ have the
same hash with a probability of at most 2^-60. 10^10 n-grams looked up among 10^6 others bring one
false hit with a probability below 1 %. Nothing guards against somebody who seeks collisions.

Shapes: D documents, U units (words or ids) in all, G n-grams in all.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

WORDS = 13  # of an n-gram, unless a spec says otherwise
BATCH_CHARACTERS = 1 << 17  # hashed at once: about 5 MB of memory
MOST_UNITS = 256  # of an n-gram

_SEPARATOR, _PART, _ALONE = 0, 1, 2
_TABLE_PLACES = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COMMON = 0x3000  # code points whose table is built in no time; that of all takes 0.3 s
_AT_ONCE = 1 << 14  # n-grams, in what the processor's cache holds
_BLANK = re.compile(r"\s")
# Letters of scripts that put no blanks between words: first and last code point.
_WITHOUT_BLANKS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Japanese syllables
    (0x3400, 0x9FFF),  # Chinese characters
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)


@dataclass(frozen=True, eq=False)
class Ragged:
    """One row of 64-bit hashes for each of D documents: row d is `values[offsets[d]:offsets[d+1]]`.

    The values are the units of the documents, or their n-grams.
    """

    values: UInt64
    offsets: Int64  # [D + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        """Units or n-grams of each document [D]."""
        return np.diff(self.offsets)

    def row(self, index: int) -> UInt64:
        """The hashes of one document."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True, eq=False)
class LongText:
    """A text that is read in pieces, each of them cut where no word goes on."""

    pieces: Callable[[], Iterator[str]]


Text = str | LongText


def whole(text: Text) -> str:
    """All of a text at once."""
    return text if isinstance(text, str) else "".join(text.pieces())


def word_hashes(texts: Sequence[str]) -> Ragged:
    """The hash of every word of each text, in order [U]. Memory: that, and one batch."""
    lengths = np.zeros(len(texts), np.int64)
    values = [np.zeros(0, np.uint64)]
    document = 0
    for texts_read, found in _batches(texts, 0):
        values.append(found.values)
        np.add.at(lengths, np.arange(document, document + len(found)), found.lengths)
        document += texts_read
    return Ragged(np.concatenate(values), np.r_[0, np.cumsum(lengths)].astype(np.int64))


def _hashed(texts: Sequence[str]) -> Ragged:
    """`word_hashes` of one batch: about 40 bytes a character."""
    if all(text.isascii() for text in texts):
        return _hashed_ascii(texts)
    prepared = [_prepared(text) for text in texts]
    sizes = np.fromiter((len(text) + 1 for text in prepared), np.int64, len(prepared))
    ends = np.cumsum(sizes)
    joined = "\n".join([*prepared, ""]).encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(joined, "<u4")
    kinds = _kinds(_COMMON if codes.max(initial=0) < _COMMON else sys.maxunicode + 1)[codes]
    before = np.empty_like(kinds)
    before[:1] = _SEPARATOR
    before[1:] = kinds[:-1]
    kept = np.flatnonzero(kinds)
    begins = ((kinds == _ALONE) | (before != _PART))[kept]
    first = np.flatnonzero(begins)  # of each word, among the characters kept
    if not len(first):
        return Ragged(np.zeros(0, np.uint64), np.zeros(len(texts) + 1, np.int64))
    positions = np.arange(len(kept), dtype=np.int64)
    positions -= np.repeat(first, np.diff(first, append=len(kept)))
    # A character counts with its place in the word, so that a sum of them tells words apart.
    letters = _mixed(codes[kept].astype(np.uint64) | (positions.astype(np.uint64) << np.uint64(21)))
    hashes = _mixed(np.add.reduceat(letters, first))
    starts = kept[first]
    return Ragged(hashes, np.r_[0, np.searchsorted(starts, ends)].astype(np.int64))


def _hashed_ascii(texts: Sequence[str]) -> Ragged:
    """`_hashed` of ASCII alone: the same hashes from tables, three times as fast."""
    sizes = np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts))
    joined = "\n".join([*texts, ""]).lower().encode("ascii")
    codes = np.frombuffer(joined, np.uint8)
    is_part = (_kinds(_COMMON)[:128] != _SEPARATOR).take(codes)
    begins = is_part.copy()
    begins[1:] &= ~is_part[:-1]
    starts = np.flatnonzero(begins)
    offsets = np.r_[0, np.searchsorted(starts, np.cumsum(sizes))].astype(np.int64)
    if not len(starts):
        return Ragged(np.zeros(0, np.uint64), offsets)
    codes, is_part = codes[starts[0] :], is_part[starts[0] :]
    starts -= starts[0]
    spans = np.diff(starts, append=len(codes))  # with what separates a word from the next one
    positions = np.arange(len(codes), dtype=np.int32)
    positions -= np.repeat(starts.astype(np.int32), spans)
    letters = _letters().take((np.minimum(positions, _TABLE_PLACES - 1) << 7) | codes)
    far = np.flatnonzero(is_part & (positions >= _TABLE_PLACES))
    places = positions[far].astype(np.uint64) << np.uint64(21)
    letters[far] = _mixed(codes[far].astype(np.uint64) | places)
    # What separates counts 0, and sums that wrap around have the right differences.
    sums = np.cumsum(letters, out=letters)[starts + spans - 1]
    sums[1:] -= sums[:-1].copy()
    return Ragged(_mixed(sums), offsets)


def id_hashes(documents: Sequence[npt.NDArray[np.integer]]) -> Ragged:
    """The hash of every token id of each document, in order [U]."""
    lengths = [len(ids) for ids in documents]
    joined = np.concatenate([np.zeros(0, np.int64), *documents]).astype(np.uint64)
    return Ragged(
        _mixed(joined | np.uint64(1 << 60)), np.r_[0, np.cumsum(lengths)].astype(np.int64)
    )


def ngrams(units: Ragged, n: int = WORDS) -> Ragged:
    """The n-grams of each document; one of fewer than n units is a single n-gram of all of them.

    A document without units has none.
    """
    lengths = units.lengths
    counts = np.where(lengths >= n, lengths - n + 1, np.minimum(lengths, 1))
    long = lengths >= n
    if long.all():
        return windows(units, n)
    offsets = np.r_[0, np.cumsum(counts)].astype(np.int64)
    values = np.empty(offsets[-1], np.uint64)
    values[np.repeat(long, counts)] = windows(units, n).values
    for m in np.unique(lengths[~long & (lengths > 0)]):
        exact = lengths == m
        starts = units.offsets[:-1][exact]
        values[offsets[:-1][exact]] = _ngrams_at(units.values, starts, int(m))
    return Ragged(values, offsets)


def windows(units: Ragged, n: int) -> Ragged:
    """The n-grams of each document that has at least n units; none of the others."""
    if not 1 <= n <= MOST_UNITS:
        raise ValueError(f"n-grams of {n} units: at least 1, at most {MOST_UNITS}")
    counts = np.maximum(units.lengths - n + 1, 0)
    offsets = np.r_[0, np.cumsum(counts)].astype(np.int64)
    values = np.empty(max(len(units.values) - n + 1, 0), np.uint64)
    products = np.empty(min(len(values), _AT_ONCE), np.uint64)
    for start in range(0, len(values), _AT_ONCE):
        sums = values[start : start + _AT_ONCE]
        some = products[: len(sums)]
        np.multiply(units.values[start : start + len(sums)], _multipliers()[0], out=sums)
        for k in range(1, n):
            ahead = units.values[start + k : start + k + len(sums)]
            sums += np.multiply(ahead, _multipliers()[k], out=some)
        _mix(sums, some)
    if len(units) > 1:  # those that run from one document into the next are dropped
        kept = np.ones(len(units.values), bool)
        for k in range(1, n):
            starts = units.offsets[1:] - k
            kept[starts[starts >= 0]] = False
        values = values[kept[: len(values)]]
    return Ragged(values, offsets)


def word_batches(texts: Iterable[Text], overlap: int) -> Iterator[Ragged]:
    """The words of any number of texts, in batches of about `BATCH_CHARACTERS`.

    A text longer than that comes in parts, each of them a document that starts with the last
    `overlap` words of the part before: with `overlap` n - 1 no n-gram is lost.
    """
    yield from (found for _, found in _batches(texts, overlap))


def _batches(texts: Iterable[Text], overlap: int) -> Iterator[tuple[int, Ragged]]:
    """`word_batches`, and how many texts end with each of them: none before the last part of a
    long one."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        pieces: Iterator[str] | None = None
        if isinstance(text, LongText):
            pieces = (part for piece in text.pieces() for part in _pieces(piece))
        elif len(text) > BATCH_CHARACTERS:
            pieces = _pieces(text)
        size = BATCH_CHARACTERS if isinstance(text, LongText) else len(text)
        if batch and characters + size > BATCH_CHARACTERS:
            yield len(batch), _hashed(batch)
            batch, characters = [], 0
        if pieces is not None:
            yield from ((0, part) for part in _long_text(pieces, overlap))
            yield 1, Ragged(np.zeros(0, np.uint64), np.zeros(2, np.int64))
            continue
        assert isinstance(text, str)
        batch.append(text)
        characters += len(text)
    if batch:
        yield len(batch), _hashed(batch)


def _long_text(pieces: Iterable[str], overlap: int) -> Iterator[Ragged]:
    carried = np.zeros(0, np.uint64)
    for piece in pieces:
        found = _hashed([piece]).values
        words = np.r_[carried, found]
        if len(found):
            yield Ragged(words, np.array([0, len(words)], np.int64))
        carried = words[max(0, len(words) - overlap) :]


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        # Cut at a blank: no word, and nothing that NFKC joins, stands on both sides of it.
        blank = _BLANK.search(text, start + BATCH_CHARACTERS)
        end = blank.end() if blank else len(text)
        yield text[start:end]
        start = end


def _ngrams_at(values: UInt64, starts: Int64, n: int) -> UInt64:
    """The n-gram that starts at each place."""
    found = np.zeros(len(starts), np.uint64)
    for k in range(n):
        found += values[starts + k] * _multipliers()[k]
    return _mixed(found)


def _prepared(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).lower()


@cache
def _kinds(count: int) -> npt.NDArray[np.uint8]:
    """What each of the first `count` code points is to a word."""
    letters = (unicodedata.category(chr(code))[0] in "LMN" for code in range(count))
    kinds = np.fromiter(letters, np.uint8, count)
    for low, high in _WITHOUT_BLANKS:
        kinds[low : high + 1] *= _ALONE
    return kinds


@cache
def _letters() -> UInt64:
    """What an ASCII character counts at each of the first places of a word [places x 128]."""
    codes, places = np.arange(128, dtype=np.uint64), np.arange(_TABLE_PLACES, dtype=np.uint64)
    table = _mixed(codes[None, :] | (places[:, None] << np.uint64(21)))
    return np.where(_kinds(_COMMON)[:128] == _SEPARATOR, np.uint64(0), table).ravel()


@cache
def _multipliers() -> UInt64:
    """An odd number for each place in an n-gram, so that the order of units counts."""
    return _mixed(np.arange(1, MOST_UNITS + 1, dtype=np.uint64)) | np.uint64(1)


def _mixed(values: UInt64) -> UInt64:
    """Every bit of each value spread over all 64 (the finaliser of splitmix64, Steele et al.
    2014, https://doi.org/10.1145/2714064.2660195)."""
    mixed = values.copy()
    _mix(mixed, np.empty_like(mixed))
    return mixed


def _mix(values: UInt64, space: UInt64) -> None:
    """`_mixed` in place; `space` is as large, and written to."""
    values += _GOLDEN
    values ^= np.right_shift(values, np.uint64(30), out=space)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= np.right_shift(values, np.uint64(27), out=space)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= np.right_shift(values, np.uint64(31), out=space)
