"""On which side each document falls: whole groups of near-duplicates, by the hash of their text.

This is the rule of `split`, for whoever has the hashes of the documents and a way to their words.

Shapes: N documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.data.errors import DataError
from workbench.core.data.overlap import Bools, Passages, Settings, measured, overlapping

Int64 = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint8]  # [N, 32]


class Documents(NamedTuple):
    """What decides on the side of N documents."""

    byte_counts: Int64  # [N]
    content_sha256: Hashes
    split_sha256: Hashes  # of the normalised text
    groups: Int64 | None  # [N], of near-duplicates; None: each document is one of its own
    passages: Callable[[Int64], Passages]  # the text of chosen documents, in that order


class Sides(NamedTuple):
    """The outcome: which documents are held out [N], the rule, and what near-duplicates did."""

    is_held_out: Bools
    rule: str
    shared_groups: int  # groups of more than one document
    moved: int  # documents that overlapped the training text and were moved there


def choose_sides(
    documents: Documents,
    ratio: float,
    settings: Settings,
    cache_dir: Path | None = None,
    unit: str = "word",
) -> Sides:
    """The side of every document; see `split`. What is measured is kept in `cache_dir`; `unit` is
    that of the passages.

    Raises:
        DataError: no choice leaves text on both sides.
        StoreError: the cache cannot be written.
    """
    groups = _Groups(documents, ratio, settings.ngram, unit)
    is_held_out, rule = groups.choose()

    def measure(is_held_out: Bools) -> Bools:
        """Which documents overlap the training text [N]."""
        kept = in_hash_order(documents.content_sha256, np.flatnonzero(is_held_out))
        train = documents.passages(np.flatnonzero(~is_held_out))
        found = measured(documents.passages(kept), train, settings.ngram, cache_dir)
        over = np.zeros(len(is_held_out), bool)
        over[kept] = overlapping(found, settings)
        return over

    moved = 0
    while is_held_out.any():
        over = np.isin(groups.numbers, groups.numbers[measure(is_held_out)]) & is_held_out
        if not over.any():
            break
        moved += int(over.sum())
        is_held_out &= ~over
        groups.train(over)
        if not is_held_out.any():
            is_held_out, rule = groups.choose()
    if ratio > 0:
        rule += (
            f", near-duplicates ({settings.ngram} {unit}s, {settings.document_share:.6g}) together"
        )
    return Sides(is_held_out, rule, groups.shared, moved)


class _Groups:
    """Groups of near-duplicates, and where the hash of each puts it."""

    def __init__(self, documents: Documents, ratio: float, ngram: int, unit: str) -> None:
        count = len(documents.byte_counts)
        given = documents.groups if documents.groups is not None else np.arange(count)
        self.numbers = np.unique(given, return_inverse=True)[1]
        self.shared = int((np.bincount(self.numbers) > 1).sum())
        self._ratio, self._count = ratio, count
        self._ngram, self._unit = ngram, unit
        keys = as_keys(documents.split_sha256)
        order = np.lexsort((keys, self.numbers))
        heads = np.flatnonzero(np.r_[True, np.diff(self.numbers[order]) > 0])
        smallest = documents.split_sha256[order[heads]]  # [groups, 32]
        # Texts in a group that are not the same up to case and blanks.
        differs = keys != as_keys(smallest)[self.numbers]
        various = np.bincount(self.numbers, differs) > 0
        # The first 8 of the 32 bytes decide: that is finer than the ratio, which is a float.
        first = smallest[:, :8].copy()
        for group in np.flatnonzero(various):
            first[group] = np.frombuffer(hashlib.sha256(smallest[group]).digest()[:8], np.uint8)
        self._position = first.view(">u8").ravel().astype(np.uint64)
        sizes = np.bincount(self.numbers, documents.byte_counts)
        self._may = ~(various & (sizes > ratio * documents.byte_counts.sum()))

    def train(self, documents: Bools) -> None:
        """The groups of these documents are not chosen again."""
        self._may[self.numbers[documents]] = False

    def choose(self) -> tuple[Bools, str]:
        """Which documents [N] are held out by their hash, and the rule."""
        ratio = self._ratio
        if ratio == 0:
            return np.zeros(self._count, bool), "none"
        chosen = self._may & (self._position < np.uint64(int(ratio * 2.0**64)))
        rule = f"document group hash < {ratio}"
        if not chosen.any() and self._may.any():
            chosen = self._may & (self._position == self._position[self._may].min())
            rule = f"lowest document group hash (none below {ratio})"
        if chosen.all():
            chosen = self._position != self._position.max()
            rule = f"all but the highest document group hash (none above {ratio})"
        if not chosen.any():
            problem = f"each of the {self._count:,} documents shares its text with others"
            if len(self._position) == 1:
                problem = f"all {self._count:,} documents are the same text, or nearly"
            remedy = (
                "0, with evaluation sets from other files (data.held_out, data.eval_tokens_path)"
            )
            if self._unit == "token":
                problem += f", {self._ngram} ids at a time"
                remedy = f"data.overlap_ngram above {self._ngram}; or {remedy}"
            message = f"{problem}: nothing can be held out"
            raise DataError.at("data.held_out_ratio", message, ratio, remedy)
        return chosen[self.numbers], rule


def is_held_out(split_sha256: bytes, ratio: float) -> bool:
    """The side of a document by the hash of its own normalised text alone: that of `choose_sides`
    where it is like no other."""
    return int.from_bytes(split_sha256[:8], "big") < int(ratio * 2.0**64)


def in_hash_order(hashes: Hashes, chosen: Int64) -> Int64:
    """`chosen` sorted by hash, the first of those with the same hash."""
    return chosen[first_of_each(hashes[chosen])]


def first_of_each(hashes: Hashes) -> Int64:
    """The first index of each hash, in order of the hashes."""
    if not len(hashes):
        return np.zeros(0, np.int64)
    return np.unique(as_keys(hashes), return_index=True)[1].astype(np.int64)


def as_keys(hashes: Hashes) -> npt.NDArray[np.bytes_]:
    """Each row as one string of 32 bytes [N]: numpy sorts and compares those like the bytes."""
    return np.ascontiguousarray(hashes).view("S32").ravel()
