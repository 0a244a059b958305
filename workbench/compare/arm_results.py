"""The numbers of two arms: every seed's value, the difference, and its two kinds of interval.

Over seeds: a t interval of paired differences or Welch's, which covers another seed. Over
documents: a bootstrap of the documents with the trained models held fixed, which does not. They
are never mixed. Differences are always second minus first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from workbench.compare.added import added_to_arms
from workbench.compare.arm_documents import DocumentMeans, document_means
from workbench.compare.measurements import RunData
from workbench.compare.results import (
    BOOTSTRAP_SEED,
    SCORES,
    Documents,
    clean_documents,
    evaluated_sets,
    measured_at,
    set_words,
    train_nll,
    training_numbers,
)
from workbench.compare.seeds import Design, SeedTest, bands, seed_test
from workbench.compare.stats import LEVEL, Floats, document_intervals
from workbench.spec.checklist import Claim

Values = tuple[float | None, ...]
Winner = Literal["a", "b"]

# The last parts of the names of numbers of which it is known which way is better.
_MORE_IS_BETTER = ("tokens_per_s", "acc", "acc_norm", "exact_match", "f1")
_LESS_IS_BETTER = ("nll", "clean_nll", "perplexity", "bits_per_byte", "peak_memory_bytes")


@dataclass(frozen=True)
class ArmNumber:
    """One measured number of both arms: a value of every run, in the order of their seeds.

    `blank` says why it may not be shown, `no_seeds` and `no_documents` why it lacks an interval.
    `level` is that of the intervals, adjusted for the pairs compared; `p` of the test over seeds is
    adjusted by Holm's method in `p_adjusted`, where the number is one that decides.
    """

    a: Values
    b: Values
    unit: str
    claim: Claim | None = None
    what: str = ""
    blank: str | None = None
    seeds: SeedTest | None = None
    no_seeds: str | None = None
    documents: Documents | None = None
    no_documents: str | None = None
    level: float = LEVEL
    p_adjusted: float | None = None
    winner: Winner | None = None

    @property
    def mean_a(self) -> float | None:
        """The mean over the seeds of the first arm; None where one was not measured."""
        return _mean(self.a)

    @property
    def mean_b(self) -> float | None:
        """The mean over the seeds of the second arm."""
        return _mean(self.b)

    @property
    def spreads(self) -> tuple[float | None, float | None]:
        """The standard deviation over the seeds of each arm."""
        return _spread(self.a), _spread(self.b)

    @property
    def difference(self) -> float | None:
        """Second minus first; None where one of them was not measured or is not finite."""
        a, b = self.mean_a, self.mean_b
        if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
            return None
        return b - a

    def decided(self, name: str, p_adjusted: float) -> ArmNumber:
        """The number with its adjusted p, and the winner where the test and the interval agree.

        The interval shown is the narrower gate of the two (Bonferroni's): with both, what the text
        says and what the picture shows cannot part.
        """
        if self.seeds is None or self.blank:
            return self
        found = replace(self, p_adjusted=p_adjusted)
        kind = name.rpartition("/")[2]
        if not found.is_told_apart or kind not in (*_MORE_IS_BETTER, *_LESS_IS_BETTER):
            return found
        is_more = self.seeds.difference > 0
        return replace(found, winner="b" if is_more == (kind in _MORE_IS_BETTER) else "a")

    @property
    def is_told_apart(self) -> bool:
        """Whether test and interval agree that the arms differ, whichever way is better."""
        significant = self.p_adjusted is not None and self.p_adjusted < 1 - LEVEL
        return significant and self.seeds is not None and self.seeds.excludes_zero

    def to_json(self) -> dict[str, Any]:
        """The number as `wb compare --json` prints it; `why` says what it lacks, and why."""
        test, documents = self.seeds, self.documents
        lacks = {"values": self.blank, "seeds": self.no_seeds, "documents": self.no_documents}
        why = {what: reason for what, reason in lacks.items() if reason}
        return {
            "a": self.mean_a,
            "b": self.mean_b,
            "difference": self.difference,
            "unit": self.unit,
            "seeds": test
            and {
                "n": test.n[0] if test.n[0] == test.n[1] else list(test.n),
                "interval": list(test.interval),
                "p": test.p,
                "p_adjusted": self.p_adjusted,
                "level": test.level,
                "design": test.design,
                "spread": test.spread,
                "lower": test.lower,
                "higher": test.higher,
            },
            "documents": documents
            and {"n": documents.n, "interval": list(documents.interval), "level": self.level},
            "winner": self.winner,
            "values": {"a": list(self.a), "b": list(self.b)},
            **({"why": why} if why else {}),
        }


@dataclass(frozen=True)
class ArmSeries:
    """One evaluation number of both arms where all runs measured it: P points.

    `a`, `b`: [P, n] by seed; `interval`: [P, 2] over seeds, NaN where there is none.
    """

    unit: str
    tokens: tuple[int, ...]
    a: Floats
    b: Floats
    interval: Floats
    level: float

    @property
    def difference(self) -> Floats:
        """[P] the mean of the second arm minus that of the first."""
        return np.asarray(self.b.mean(axis=1) - self.a.mean(axis=1))


@dataclass(frozen=True)
class ArmResults:
    """All numbers of two arms at the point compared, the evaluation curves up to it, and the mean
    NLL of every document."""

    numbers: dict[str, ArmNumber]
    series: dict[str, ArmSeries]
    documents: dict[str, DocumentMeans] = field(default_factory=dict)


def arm_results(
    a: Sequence[RunData],
    b: Sequence[RunData],
    tokens: int,
    refused: Mapping[Claim, str],
    design: Design,
    level: float = LEVEL,
    over_documents: bool = True,
) -> ArmResults:
    """The numbers of two arms at `tokens`, those of refused claims blank.

    Args:
        a: the runs of the first arm, in the order of their seeds.
        b: those of the second; where the design is paired, of the same seeds in the same order.
        refused: claim -> the rules that refuse it.
        level: of every interval.
        over_documents: whether to draw the intervals over documents, which take longest.
    """
    runs = [*a, *b]
    numbers: dict[str, ArmNumber] = {}
    series: dict[str, ArmSeries] = {}
    documents: dict[str, DocumentMeans] = {}

    def number(values: Sequence[float | None], *about: Any, claim: Claim | None) -> ArmNumber:
        unit, what = about
        if claim is not None and claim in refused:
            none = (None,)
            blank = f"refused: {refused[claim]}"
            return ArmNumber(none * len(a), none * len(b), unit, claim, what, blank)
        first, second = tuple(values[: len(a)]), tuple(values[len(a) :])
        return _tested(ArmNumber(first, second, unit, claim, what, level=level), design)

    for name in evaluated_sets(*(run.metrics for run in runs)):
        means: dict[str, DocumentMeans | str] = {}
        what = set_words(name, runs[0].record)
        for score, unit in SCORES.items():
            claim: Claim = "nll" if score == "nll" else "bpb"
            metric = f"{name}/{score}"
            values = [measured_at(run, metric, tokens) for run in runs]
            numbers[metric] = number(values, unit, what, claim=claim)
            if claim in refused:
                continue
            series[metric] = _series(a, b, metric, unit, tokens, design, level)
            if over_documents:
                means[metric] = document_means(a, b, name, score, tokens)
        numbers |= _over_documents(numbers, means)
        documents |= {key: one for key, one in means.items() if isinstance(one, DocumentMeans)}
        values = [measured_at(run, f"{name}/perplexity", tokens) for run in runs]
        numbers[f"{name}/perplexity"] = number(values, "1", "exp of the NLL", claim="nll")
        if all(f"{name}/clean_nll" in run.metrics for run in runs):
            about = "over the documents alone that do not overlap the training text"
            values = [measured_at(run, f"{name}/clean_nll", tokens) for run in runs]
            clean = number(values, "nats/token", about, claim="nll")
            kept = [clean_documents(run, name) for run in runs]
            if not clean.blank and any(one != kept[0] for one in kept):
                none = (None,)
                blank = "other documents are clean in each"
                clean = replace(clean, a=none * len(a), b=none * len(b), blank=blank, seeds=None)
            numbers[f"{name}/clean_nll"] = clean
    added = added_to_arms(a, b, tokens, refused, level=level, over_documents=over_documents)
    for name, one in added.items():
        drawn = Documents(*one.documents) if one.documents else None
        tested = number(one.values, one.unit, one.what, claim=one.claim)
        if one.blank is not None:
            tested = replace(tested, blank=one.blank, no_seeds=None)
        numbers[name] = replace(tested, documents=drawn, no_documents=one.no_documents)
    stream = [train_nll(run.metrics, tokens) for run in runs]
    for name, (per_run, unit, about, claim_of) in training_numbers(runs, tokens, stream).items():
        numbers[name] = number(per_run, unit, about, claim=claim_of)
    return ArmResults(numbers, series, documents)


def _tested(number: ArmNumber, design: Design) -> ArmNumber:
    """The number with its interval over seeds, or why there is none."""
    if any(value is None for value in (*number.a, *number.b)):
        return replace(number, no_seeds="not every seed has it")
    first, second = ([float(v) for v in values if v is not None] for values in (number.a, number.b))
    if design == "paired" and len(first) != len(second):
        return replace(number, no_seeds="the arms have other seeds")
    test = seed_test(first, second, design, number.level)
    if isinstance(test, str):
        return replace(number, no_seeds=test)
    return replace(number, seeds=test)


def _over_documents(
    numbers: dict[str, ArmNumber], means: Mapping[str, DocumentMeans | str]
) -> dict[str, ArmNumber]:
    """The numbers of one set with their intervals over documents: the models are held fixed."""
    found = {
        metric: replace(numbers[metric], no_documents=why)
        for metric, why in means.items()
        if isinstance(why, str)
    }
    drawn = {metric: one for metric, one in means.items() if isinstance(one, DocumentMeans)}
    if not drawn:
        return found
    # A generator of its own for each set and point: the interval does not depend on the others.
    rng = np.random.default_rng([BOOTSTRAP_SEED, next(iter(drawn.values())).tokens])
    intervals = document_intervals(
        [one.b - one.a for one in drawn.values()],
        [one.weight for one in drawn.values()],
        rng,
        level=numbers[next(iter(drawn))].level,
    )
    for (metric, one), interval in zip(drawn.items(), intervals, strict=True):
        if interval is None:
            few = "there are fewer than two documents, or some that nothing can be drawn from"
            found[metric] = replace(numbers[metric], no_documents=few)
        else:
            documents = Documents(len(one.weight), interval)
            found[metric] = replace(numbers[metric], documents=documents)
    return found


def _series(
    a: Sequence[RunData],
    b: Sequence[RunData],
    metric: str,
    unit: str,
    tokens: int,
    design: Design,
    level: float,
) -> ArmSeries:
    runs = [*a, *b]
    shared = set.intersection(*({point.tokens for point in run.record.points} for run in runs))
    points, rows = [], []
    for at in sorted(shared):
        values = [measured_at(run, metric, at) for run in runs]
        if at <= tokens and None not in values:
            points.append(at)
            rows.append([float(value) for value in values if value is not None])
    table = np.array(rows, np.float64).reshape(len(points), len(runs))
    first, second = table[:, : len(a)], table[:, len(a) :]
    with np.errstate(invalid="ignore"):
        interval = bands(first, second, design, level)
    return ArmSeries(unit, tuple(points), first, second, interval, level)


def _mean(values: Values) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None
    return known[0] if len(known) == 1 else math.fsum(known) / len(known)


def _spread(values: Values) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values) or len(known) < 2:
        return None
    return statistics.stdev(known)
