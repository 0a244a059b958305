"""The numbers of a comparison: both values, their difference, and its interval over documents.

Differences are always second minus first. With one seed on each side no number has a winner.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.compare.added import added_numbers
from workbench.compare.details import Details, details_of
from workbench.compare.measurements import Metrics, RunData
from workbench.compare.scores import BYTES, NLL_SUM, TOKENS, scores_path
from workbench.compare.stats import DRAWS, document_interval
from workbench.compare.table import Table
from workbench.spec.checklist import Claim
from workbench.spec.held_out import logged_name, overlap_words
from workbench.track.record import RunRecord

BOOTSTRAP_SEED = 20_250
BAND_DRAWS = 2_000  # of each point of a curve; the point compared takes `DRAWS`
TRAIN_ROWS = 20

SCORES = {"nll": "nats/token", "bits_per_byte": "bits/byte"}  # those with per-document sums


@dataclass(frozen=True)
class Documents:
    """A 95 % interval of a difference over the documents of one evaluation set."""

    n: int
    interval: tuple[float, float]


@dataclass(frozen=True)
class Number:
    """One measured number of both runs.

    `blank` says why it may not be shown, `no_interval` why it has no interval over documents.
    """

    a: float | None
    b: float | None
    unit: str
    claim: Claim | None = None
    documents: Documents | None = None
    what: str = ""
    blank: str | None = None
    no_interval: str | None = None

    @property
    def difference(self) -> float | None:
        """Second minus first; None where one of them was not measured or is not finite."""
        return _minus(self.b, self.a)

    def to_json(self) -> dict[str, Any]:
        """The number as `wb compare --json` prints it."""
        documents = self.documents
        return {
            "a": self.a,
            "b": self.b,
            "difference": self.difference,
            "unit": self.unit,
            "seeds": None,
            "documents": documents and {"n": documents.n, "interval": list(documents.interval)},
            "winner": None,
        }


@dataclass(frozen=True)
class Series:
    """One evaluation number of both runs at every token count where both measured it."""

    unit: str
    tokens: list[int] = field(default_factory=list)
    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    documents: list[Documents | None] = field(default_factory=list)
    no_interval: list[str | None] = field(default_factory=list)

    @property
    def difference(self) -> list[float | None]:
        """Second minus first at each token count; None where one of them is not finite."""
        return [_minus(b, a) for a, b in zip(self.a, self.b, strict=True)]


@dataclass(frozen=True)
class Results:
    """All numbers at the point compared, and the evaluation curves up to it."""

    numbers: dict[str, Number]
    series: dict[str, Series]
    details: Details = field(default_factory=Details, repr=False)


def results_of(a: RunData, b: RunData, tokens: int, refused: Mapping[Claim, str]) -> Results:
    """The numbers of two runs at `tokens`, those of refused claims blank.

    Args:
        refused: claim -> the rules that refuse it.
    """
    series: dict[str, Series] = {}
    numbers: dict[str, Number] = {}
    for name in evaluated_sets(a.metrics, b.metrics):
        for score, unit in SCORES.items():
            claim: Claim = "nll" if score == "nll" else "bpb"
            metric = f"{name}/{score}"
            if claim in refused:
                numbers[metric] = _blank(unit, claim, refused[claim], set_words(name, a.record))
                continue
            # The bands of bits per byte are drawn only where those of NLL may not be.
            bands = score == "nll" or "nll" in refused
            series[metric] = _series(a, b, name, score, tokens, bands)
            numbers[metric] = _number(series[metric], tokens, claim, set_words(name, a.record))
        if "nll" in refused:
            numbers[f"{name}/perplexity"] = _blank("1", "nll", refused["nll"], "exp of the NLL")
        else:
            values = [measured_at(run, f"{name}/perplexity", tokens) for run in (a, b)]
            numbers[f"{name}/perplexity"] = Number(
                values[0], values[1], "1", "nll", what="exp of the NLL"
            )
        if any(f"{name}/clean_nll" in run.metrics for run in (a, b)):
            numbers[f"{name}/clean_nll"] = _clean(a, b, name, tokens, refused)
    for name, fields in added_numbers(a, b, tokens, refused).items():
        if found := fields.pop("documents", None):
            fields["documents"] = Documents(*found)
        numbers[name] = Number(**fields)
    numbers |= _of_training(a, b, tokens, refused)
    sets = evaluated_sets(a.metrics, b.metrics)
    return Results(numbers, series, details_of(a, b, tokens, refused, sets))


def evaluated_sets(*metrics: Metrics) -> list[str]:
    """The evaluation sets that have an NLL in all of them, held-out ones first."""
    found = [name.removesuffix("/nll") for name in metrics[0] if name.endswith("/nll")]
    shared = [n for n in found if n != "train" and all(f"{n}/nll" in other for other in metrics)]
    return sorted(shared, key=lambda name: (not name.startswith("held_out"), name))


def _clean(a: RunData, b: RunData, name: str, tokens: int, refused: Mapping[Claim, str]) -> Number:
    """The NLL over the documents that overlap neither training text, where they are the same."""
    what, unit = "over the documents alone that do not overlap the training text", "nats/token"
    if "nll" in refused:
        return _blank(unit, "nll", refused["nll"], what)
    clean = [clean_documents(run, name) for run in (a, b)]
    if clean[0] != clean[1]:
        return Number(None, None, unit, "nll", what=what, blank="other documents are clean in each")
    values = [measured_at(run, f"{name}/clean_nll", tokens) for run in (a, b)]
    return Number(values[0], values[1], unit, "nll", what=what)


def clean_documents(run: RunData, name: str) -> list[tuple[str, ...]] | None:
    """The clean documents of a set; None where they are not kept."""
    scores = next((found[name] for found in run.scores.values() if name in found), None)
    if scores is None or not scores.clean:
        return None
    return [tuple(d for d, c in zip(scores.documents, scores.clean, strict=True) if c)]


def measured_at(run: RunData, metric: str, tokens: int) -> float | None:
    """A metric at an evaluation point; None where it was not measured there."""
    found = _evaluations(run.metrics, metric).get(tokens)
    return found[1] if found else None


def _series(a: RunData, b: RunData, name: str, score: str, tokens: int, bands: bool) -> Series:
    metric = f"{name}/{score}"
    first, second = (_evaluations(run.metrics, metric) for run in (a, b))
    points = [{point.tokens for point in run.record.points} for run in (a, b)]
    series = Series(SCORES[score])
    for at in sorted(first.keys() & second.keys() & points[0] & points[1]):
        if at > tokens:
            break
        (step_a, value_a), (step_b, value_b) = first[at], second[at]
        series.tokens.append(at)
        series.a.append(value_a)
        series.b.append(value_b)
        draws = DRAWS if at == tokens else BAND_DRAWS
        wanted = bands or at == tokens
        found = _documents((a, step_a), (b, step_b), name, score, draws) if wanted else None
        series.documents.append(found if isinstance(found, Documents) else None)
        series.no_interval.append(found if isinstance(found, str) else None)
    return series


def _documents(
    a: tuple[RunData, int], b: tuple[RunData, int], name: str, score: str, draws: int
) -> Documents | str:
    """The interval over the documents that both runs scored at a step of each; or why not."""
    absent = [
        f"{run.record.name} has no {scores_path(run.folder, step).relative_to(run.folder)}"
        for run, step in (a, b)
        if step not in run.scores
    ]
    if absent:
        return " and ".join(absent)
    first, second = (run.scores[step][name].clusters() for run, step in (a, b))
    if first.keys() != second.keys():
        return "the runs scored other documents"
    rows_a = np.array([first[key] for key in sorted(first)])  # [D, (tokens, bytes, nll)]
    rows_b = np.array([second[key] for key in sorted(first)])
    column = TOKENS if score == "nll" else BYTES
    if not np.array_equal(rows_a[:, column], rows_b[:, column]):
        return "the runs scored other parts of the documents"
    scale = 1.0 if score == "nll" else 1 / math.log(2)
    # A generator of its own for each point: the interval does not depend on the other points.
    tokens = a[1] * (a[0].record.tokens_per_step or 0)
    rng = np.random.default_rng([BOOTSTRAP_SEED, tokens])
    difference = (rows_b[:, NLL_SUM] - rows_a[:, NLL_SUM]) * scale
    interval = document_interval(difference, rows_a[:, column], rng, draws=draws)
    if interval is None:
        return "there are fewer than two documents, or some that nothing can be drawn from"
    return Documents(len(first), interval)


def _evaluations(metrics: Metrics, metric: str) -> dict[int, tuple[int, float]]:
    """Tokens -> (step, value) of every row that measured the metric."""
    if metric not in metrics or "tokens" not in metrics:
        return {}
    if isinstance(metrics, Table):
        measured = metrics.known(metric) & metrics.known("tokens") & metrics.known("step")
        columns = [metrics.numbers(name)[measured] for name in ("tokens", "step", metric)]
        values = zip(*(column.tolist() for column in columns), strict=True)
        return {int(tokens): (int(step), value) for tokens, step, value in values}
    rows = zip(metrics["tokens"], metrics["step"], metrics[metric], strict=True)
    return {
        int(tokens): (int(step), value)
        for tokens, step, value in rows
        if tokens is not None and step is not None and value is not None
    }


def _number(series: Series, tokens: int, claim: Claim, what: str) -> Number:
    if not series.tokens or series.tokens[-1] != tokens:
        return Number(None, None, series.unit, claim, what=what)
    return Number(
        series.a[-1],
        series.b[-1],
        series.unit,
        claim,
        series.documents[-1],
        what,
        no_interval=series.no_interval[-1],
    )


def _minus(b: float | None, a: float | None) -> float | None:
    """`b - a`; a number that is not finite has no difference from another."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return None
    return b - a


def training_numbers(
    runs: Sequence[RunData], tokens: int, stream: Sequence[float | None]
) -> dict[str, tuple[list[float | None], str, str, Claim | None]]:
    """Name -> the values of every run, their unit, what they are, and the claim they belong to.

    Args:
        stream: the NLL of the optimised stream of every run.
    """
    last = (
        f"the optimised stream: mean of the last logged rows up to the point, {TRAIN_ROWS} at most"
    )
    speed = "after warm-up; evaluation, saving and compilation outside the clock"
    sizes = [run.record.effective.parameters for run in runs]
    out = [run.record.results for run in runs]
    size, active = "trainable, a tied matrix once", "used for one token; never judged"
    consumed, peak = "consumed at the point compared", "at most, of the device or process"
    memory: list[float | None] = [one.peak_memory_bytes for one in out]
    return {
        "train/nll": (list(stream), "nats/token", last, "nll"),
        "parameters/total": ([one.total for one in sizes], "1", size, None),
        "parameters/active": ([one.active for one in sizes], "1", active, None),
        "tokens": ([tokens] * len(runs), "tokens", consumed, None),
        "tokens_per_s": ([one.tokens_per_s for one in out], "tokens/s", speed, "throughput"),
        "peak_memory_bytes": (memory, "bytes", peak, "memory"),
    }


def _of_training(
    a: RunData, b: RunData, tokens: int, refused: Mapping[Claim, str]
) -> dict[str, Number]:
    stream = [train_nll(run.metrics, tokens) for run in (a, b)]
    numbers = {}
    for name, (values, unit, what, claim) in training_numbers((a, b), tokens, stream).items():
        if claim is not None and claim in refused:
            numbers[name] = _blank(unit, claim, refused[claim], what)
        else:
            numbers[name] = Number(values[0], values[1], unit, claim, what=what)
    return numbers


def train_nll(metrics: Metrics, tokens: int) -> float | None:
    """The mean of the last logged rows of the optimised stream up to a point."""
    if isinstance(metrics, Table) and {"tokens", "train/nll"} <= metrics.keys():
        measured = metrics.known("train/nll") & (metrics.numbers("tokens") <= tokens)
        values = metrics.numbers("train/nll")[measured][-TRAIN_ROWS:].tolist()
    else:
        found = _evaluations(metrics, "train/nll").items()
        values = [value for at, (_, value) in found if at <= tokens][-TRAIN_ROWS:]
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.fmean(values) if values else None


def _blank(unit: str, claim: Claim, rules: str, what: str) -> Number:
    return Number(None, None, unit, claim, what=what, blank=f"refused: {rules}")


def set_words(name: str, record: RunRecord) -> str:
    """What an evaluation set is, in a few words."""
    evaluated = record.effective.evaluation
    logged = {logged_name(asked, facts.status): facts for asked, facts in evaluated.items()}
    facts = logged.get(name)
    unit = (facts and facts.unit) or "document"
    units = unit.replace("document", "documents").replace("block", "blocks")
    count = f"{facts.documents:,} " if facts and facts.documents else ""
    if name == "train_split":
        return f"{count}fixed {units} of the training text: repeatable, not held out"
    if facts is not None and facts.status == "contaminated":
        return f"{count}{units}, not held out: {overlap_words(facts.measured, facts.documents)}"
    if not name.startswith("held_out"):
        return f"{count}{units} that are not shown to be disjoint from training"
    if record.effective.data.split == "contiguous_tail":
        return f"{count}{units} from the end of the text, which was not trained on"
    return f"{count}{units} never trained on, kept apart by their content"
