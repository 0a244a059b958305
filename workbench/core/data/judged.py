"""An evaluation set under the name that it has earned: measured against the training text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.data.evaluation_sets import EvaluationSet
from workbench.core.data.overlap import (
    Passages,
    Settings,
    measured,
    outcome,
    overlapping,
)
from workbench.spec.held_out import logged_name, overlap_rule

if TYPE_CHECKING:
    from workbench.spec.run import DataSpec

OF_TRAINING = {"not_applicable": "a part of the training text"}


@dataclass(frozen=True, eq=False)
class JudgedSet:
    """A set under its logged name, and the facts `status`, `overlap` and `overlap_rule`."""

    documents: EvaluationSet
    facts: dict[str, Any]


def settings_of(data: DataSpec) -> Settings:
    """The settings of the section `data`; defaults where they do not apply."""
    default = Settings()
    return Settings(
        data.overlap_ngram or default.ngram,
        default.document_share
        if data.overlap_document_share is None
        else data.overlap_document_share,
        default.limit if data.overlap_limit is None else data.overlap_limit,
    )


def of_training(one: EvaluationSet) -> JudgedSet:
    """A set of training documents: never held out, whatever is measured."""
    facts = {"status": "train_split", "overlap": OF_TRAINING, "overlap_rule": OF_TRAINING}
    return JudgedSet(one, facts)


def unproven(one: EvaluationSet, reason: str) -> JudgedSet:
    """A set whose overlap cannot be known before training."""
    why = {"not_applicable": reason}
    facts = {"status": "unproven", "overlap": why, "overlap_rule": why}
    return JudgedSet(replace(one, name=logged_name(one.name, "unproven")), facts)


def passing(one: EvaluationSet, settings: Settings) -> JudgedSet:
    """A set that is checked against a stream while it passes: unproven until it has passed."""
    found = unproven(one, "the stream is checked as it passes")
    rule = overlap_rule(settings.ngram, settings.document_share, settings.limit)
    return JudgedSet(found.documents, {**found.facts, "overlap_rule": rule})


def judge(
    one: EvaluationSet,
    passages: Passages,
    training: Passages,
    settings: Settings,
    cache_dir: Path | None,
) -> JudgedSet:
    """Measures a set and names it.

    Args:
        one: under the name it was asked for by; its documents are the first of `passages`.
        passages: the documents of the whole set, also those that are not scored: what is measured
            of them is kept, and serves a run that scores others.

    Raises:
        StoreError: the cache cannot be written.
    """
    found = measured(passages, training, settings.ngram, cache_dir)
    found = found.first(len(one.documents))
    counts = np.array([np.count_nonzero(ids != one.eod_id) for ids in one.documents], np.int64)
    status, facts, rule = outcome(found, counts, settings, passages.unit, passages.measured_on)
    logged = replace(one, name=logged_name(one.name, status), clean=~overlapping(found, settings))
    return JudgedSet(logged, {"status": status, "overlap": facts, "overlap_rule": rule})
