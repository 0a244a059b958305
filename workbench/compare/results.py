"""The numbers of a comparison: both values, their difference, and its interval over documents.

Differences are always second minus first. With one seed on each side no number has a winner.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.compare.stats import DRAWS, Floats, document_interval
from workbench.errors import UserError
from workbench.spec.checklist import Claim
from workbench.track.record import RunRecord

Metrics = Mapping[str, Sequence[float | None]]

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
    """One measured number of both runs. `blank` says why it may not be shown."""

    a: float | None
    b: float | None
    unit: str
    claim: Claim | None = None
    documents: Documents | None = None
    what: str = ""
    blank: str | None = None

    @property
    def difference(self) -> float | None:
        """Second minus first; None where one of them was not measured."""
        return None if self.a is None or self.b is None else self.b - self.a

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

    @property
    def difference(self) -> list[float]:
        """Second minus first at each token count."""
        return [b - a for a, b in zip(self.a, self.b, strict=True)]


@dataclass(frozen=True)
class RunData:
    """What the numbers are taken from: a run's folder, record and metrics."""

    folder: Path
    record: RunRecord
    metrics: Metrics


@dataclass(frozen=True)
class Results:
    """All numbers at the point compared, and the evaluation curves up to it."""

    numbers: dict[str, Number]
    series: dict[str, Series]


def results_of(a: RunData, b: RunData, tokens: int, refused: Mapping[Claim, str]) -> Results:
    """The numbers of two runs at `tokens`, those of refused claims blank.

    Args:
        refused: claim -> the rules that refuse it.

    Raises:
        UserError: per-document scores are there and cannot be read.
    """
    series: dict[str, Series] = {}
    numbers: dict[str, Number] = {}
    for name in evaluated_sets(a.metrics, b.metrics):
        for score, unit in SCORES.items():
            claim: Claim = "nll" if score == "nll" else "bpb"
            metric = f"{name}/{score}"
            if claim in refused:
                numbers[metric] = _blank(unit, claim, refused[claim], _what(name, a.record))
                continue
            # The bands of bits per byte are drawn only where those of NLL may not be.
            bands = score == "nll" or "nll" in refused
            series[metric] = _series(a, b, name, score, tokens, bands)
            numbers[metric] = _number(series[metric], tokens, claim, _what(name, a.record))
        if "nll" in refused:
            numbers[f"{name}/perplexity"] = _blank("1", "nll", refused["nll"], "exp of the NLL")
        else:
            values = [_at(run.metrics, f"{name}/perplexity", tokens) for run in (a, b)]
            numbers[f"{name}/perplexity"] = Number(
                values[0], values[1], "1", "nll", what="exp of the NLL"
            )
    numbers |= _of_training(a, b, tokens, refused)
    return Results(numbers, series)


def evaluated_sets(*metrics: Metrics) -> list[str]:
    """The evaluation sets that have an NLL in all of them, held-out ones first."""
    found = [name.removesuffix("/nll") for name in metrics[0] if name.endswith("/nll")]
    shared = [n for n in found if n != "train" and all(f"{n}/nll" in other for other in metrics)]
    return sorted(shared, key=lambda name: (not name.startswith("held_out"), name))


def scores_path(folder: Path, step: int) -> Path:
    """Where the per-document scores of an evaluation are kept."""
    return folder / "evaluations" / f"step_{step:08d}.parquet"


def document_sums(path: Path, name: str) -> dict[str, Floats] | None:
    """Per document of one set: scored tokens, bytes, and summed NLL in nats. None: not kept.

    Raises:
        UserError: the file is there and is not a table of scores.
    """
    if not path.exists():
        return None
    import pyarrow.parquet as parquet

    columns = ["set", "document", "tokens", "bytes", "nll_sum"]
    try:
        # Not `read_table`, which imports pandas.
        with parquet.ParquetFile(path) as file:
            table = file.read(columns=columns).to_pydict()
    except Exception as error:  # pyarrow raises many kinds for a damaged file
        raise UserError.at(str(path), f"not a table of document scores: {error}") from None
    sums: dict[str, Floats] = {}
    for owner, document, *row in zip(*(table[column] for column in columns), strict=True):
        if owner == name:  # a text that stands in the set twice is one cluster
            sums[document] = sums.get(document, np.zeros(3)) + np.array(row, dtype=np.float64)
    return sums


def _series(a: RunData, b: RunData, name: str, score: str, tokens: int, bands: bool) -> Series:
    metric = f"{name}/{score}"
    first, second = (_evaluations(run.metrics, metric) for run in (a, b))
    series = Series(SCORES[score])
    for at in sorted(first.keys() & second.keys()):
        if at > tokens:
            break
        (step_a, value_a), (step_b, value_b) = first[at], second[at]
        series.tokens.append(at)
        series.a.append(value_a)
        series.b.append(value_b)
        paths = scores_path(a.folder, step_a), scores_path(b.folder, step_b)
        draws = DRAWS if at == tokens else BAND_DRAWS
        wanted = bands or at == tokens
        series.documents.append(_documents(paths, name, score, draws, at) if wanted else None)
    return series


def _documents(
    paths: tuple[Path, Path], name: str, score: str, draws: int, tokens: int
) -> Documents | None:
    first, second = (document_sums(path, name) for path in paths)
    if not first or not second or first.keys() != second.keys():
        return None
    rows_a = np.array([first[key] for key in sorted(first)])  # [D, (tokens, bytes, nll)]
    rows_b = np.array([second[key] for key in sorted(first)])
    column = 0 if score == "nll" else 1
    if not np.array_equal(rows_a[:, column], rows_b[:, column]):
        return None
    scale = 1.0 if score == "nll" else 1 / math.log(2)
    # A generator of its own for each point: the interval does not depend on the other points.
    rng = np.random.default_rng([BOOTSTRAP_SEED, tokens])
    difference = (rows_b[:, 2] - rows_a[:, 2]) * scale
    interval = document_interval(difference, rows_a[:, column], rng, draws=draws)
    return Documents(len(first), interval) if interval else None


def _evaluations(metrics: Metrics, metric: str) -> dict[int, tuple[int, float]]:
    """Tokens -> (step, value) of every row that measured the metric."""
    if metric not in metrics or "tokens" not in metrics:
        return {}
    rows = zip(metrics["tokens"], metrics["step"], metrics[metric], strict=True)
    return {
        int(tokens): (int(step), value)
        for tokens, step, value in rows
        if tokens is not None and step is not None and value is not None
    }


def _at(metrics: Metrics, metric: str, tokens: int) -> float | None:
    found = _evaluations(metrics, metric).get(tokens)
    return found[1] if found else None


def _number(series: Series, tokens: int, claim: Claim, what: str) -> Number:
    if not series.tokens or series.tokens[-1] != tokens:
        return Number(None, None, series.unit, claim, what=what)
    documents = series.documents[-1]
    return Number(series.a[-1], series.b[-1], series.unit, claim, documents, what)


def _of_training(
    a: RunData, b: RunData, tokens: int, refused: Mapping[Claim, str]
) -> dict[str, Number]:
    stream = (
        f"the optimised stream: mean of the last logged rows up to the point, {TRAIN_ROWS} at most"
    )
    speed = "after warm-up; evaluation, saving and compilation outside the clock"
    size_a, size_b = a.record.effective.parameters, b.record.effective.parameters
    out_a, out_b = a.record.results, b.record.results
    train_a, train_b = (_train_nll(run.metrics, tokens) for run in (a, b))
    size, active = "trainable, a tied matrix once", "used for one token; never judged"
    consumed, peak = "consumed at the point compared", "at most, of the device or process"
    numbers = {
        "train/nll": Number(train_a, train_b, "nats/token", "nll", what=stream),
        "parameters/total": Number(size_a.total, size_b.total, "1", what=size),
        "parameters/active": Number(size_a.active, size_b.active, "1", what=active),
        "tokens": Number(tokens, tokens, "tokens", what=consumed),
        "tokens_per_s": Number(
            out_a.tokens_per_s, out_b.tokens_per_s, "tokens/s", "throughput", what=speed
        ),
        "peak_memory_bytes": Number(
            out_a.peak_memory_bytes, out_b.peak_memory_bytes, "bytes", "memory", what=peak
        ),
    }
    for name, number in numbers.items():
        if number.claim is not None and number.claim in refused:
            rules = refused[number.claim]
            numbers[name] = _blank(number.unit, number.claim, rules, number.what)
    return numbers


def _train_nll(metrics: Metrics, tokens: int) -> float | None:
    values = [
        value for at, (_, value) in _evaluations(metrics, "train/nll").items() if at <= tokens
    ]
    return statistics.fmean(values[-TRAIN_ROWS:]) if values else None


def _blank(unit: str, claim: Claim, rules: str, what: str) -> Number:
    return Number(None, None, unit, claim, what=what, blank=f"refused: {rules}")


def _what(name: str, record: RunRecord) -> str:
    facts = record.effective.evaluation.get(name)
    unit = (facts and facts.unit) or "document"
    units = unit.replace("document", "documents").replace("block", "blocks")
    count = f"{facts.documents:,} " if facts and facts.documents else ""
    if name == "train_split":
        return f"{count}fixed {units} of the training text: repeatable, not held out"
    if not name.startswith("held_out"):
        return f"{count}{units} that are not shown to be disjoint from training"
    if record.effective.data.split == "contiguous_tail":
        return f"{count}{units} from the end of the text, which was not trained on"
    return f"{count}{units} never trained on, kept apart by their content"
