"""Checks training documents, as they pass, against the sets that nobody could check before.

Of each set the n-grams are indexed as in `overlap`; what a document brings is marked when it is
begun. So the outcome at any time is the overlap of the sets with all documents consumed until then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core.data.evaluation_sets import EvaluationSet
from workbench.core.data.ngrams import word_batches, word_hashes
from workbench.core.data.overlap import NgramIndex, Overlap, Settings, outcome


@dataclass(frozen=True, eq=False)
class Watched:
    """A set of M documents, and their texts in the same order [M]."""

    documents: EvaluationSet
    texts: Sequence[str]


class Passing:
    """Watches sets, by the name they were asked for."""

    def __init__(self, sets: Mapping[str, Watched], settings: Settings) -> None:
        self._sets, self._settings = sets, settings
        self._indexes = {
            name: NgramIndex((word_hashes([text]) for text in one.texts), settings.ngram)
            for name, one in sets.items()
        }
        self._copies: dict[str, set[bytes]] = {name: set() for name in sets}
        self._hashes = {
            name: [row.tobytes() for row in one.documents.content_sha256]
            for name, one in sets.items()
        }

    def see(self, texts: Sequence[str]) -> None:
        """Marks what these training documents hold."""
        if not self._sets:
            return
        passed = {hashlib.sha256(text.encode("utf-8")).digest() for text in texts}
        for name, hashes in self._hashes.items():
            self._copies[name] |= passed.intersection(hashes)
        for units in word_batches(texts, self._settings.ngram - 1):
            for index in self._indexes.values():
                index.see(units)

    def found(self, documents: int) -> dict[str, dict[str, Any]]:
        """What was found in the `documents` that have passed, by set, as a record holds it."""
        return {
            name: {"checked_documents": documents, **self._outcome(name)} for name in self._sets
        }

    def overlap(self, name: str) -> Overlap:
        """That of a set with all that has passed."""
        index = self._indexes[name]
        copies = np.array([one in self._copies[name] for one in self._hashes[name]], bool)
        return Overlap(index.ngrams, index.found(), copies, index.rate)

    def state_dict(self) -> dict[str, Any]:
        """What was seen, as JSON can hold it."""
        return {
            name: {"ngrams": index.state(), "copies": sorted(c.hex() for c in self._copies[name])}
            for name, index in self._indexes.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
            ValueError, KeyError: it was of other sets.
        """
        for name, index in self._indexes.items():
            index.load_state(state[name]["ngrams"])
            self._copies[name] = {bytes.fromhex(content) for content in state[name]["copies"]}

    def _outcome(self, name: str) -> dict[str, Any]:
        one = self._sets[name].documents
        tokens = np.array([len(ids) for ids in one.documents], np.int64)
        status, facts, _ = outcome(self.overlap(name), tokens, self._settings)
        return {"outcome": status, **facts}
