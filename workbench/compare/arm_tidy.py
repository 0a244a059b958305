"""The numbers of a comparison of arms as a tidy table: every run's, the means, the differences."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.compare.arm_results import ArmNumber, ArmSeries
from workbench.compare.arms import Arm, ArmPair, ArmsComparison
from workbench.compare.tidy import Row, write_rows


def tidy_arms_csv(comparison: ArmsComparison) -> str:
    """Every number of the arms whose pair may be shown, each once: the baseline's too, which belong
    to every pair."""
    return write_rows(_rows(comparison))


def _rows(comparison: ArmsComparison) -> Iterator[Row]:
    seen: set[tuple[str, str, int | None]] = set()  # arm, metric, tokens whose values were given
    for pair in comparison.pairs:
        if pair.results is None:
            continue
        for metric, number in pair.results.numbers.items():
            base: Row = {"claim": number.claim, "metric": metric, "tokens": comparison.at}
            base |= {"unit": number.unit, "note": number.blank or ""}
            for arm, values, mean in (
                (pair.a, number.a, number.mean_a),
                (pair.b, number.b, number.mean_b),
            ):
                key = arm.name, metric, comparison.at
                if key in seen or (number.blank and arm is pair.a):
                    continue  # what one pair may not show, another may
                seen.add(key)
                yield from _of_arm(base, arm, values, mean)
            yield from _differences(base, pair, number)
        for metric, series in pair.results.series.items():
            claim = pair.results.numbers[metric].claim
            yield from _of_series(comparison, pair, metric, series, claim, seen)


def _of_arm(
    base: Row, arm: Arm, values: tuple[float | None, ...], mean: float | None
) -> Iterator[Row]:
    for side, seed, value in zip(arm.runs, arm.seeds, values, strict=True):
        about: Row = {"arm": arm.name, "run": side.name, "seed": seed}
        yield {**base, **about, "quantity": "value", "value": value}
    if len(arm.runs) > 1:
        yield {**base, "arm": arm.name, "quantity": "mean", "value": mean, "n": len(arm.runs)}


def _differences(base: Row, pair: ArmPair, number: ArmNumber) -> Iterator[Row]:
    row: Row = {**base, "arm": f"{pair.b.name} - {pair.a.name}", "quantity": "difference"}
    row["value"] = number.difference
    spans: list[Row] = []
    if number.seeds is not None:
        low, high = number.seeds.interval
        spans.append({"low": low, "high": high, "level": number.seeds.level, "interval": "seeds"})
        spans[-1] |= {"n": min(number.seeds.n), "p": number.seeds.p}
        spans[-1]["p_adjusted"] = number.p_adjusted
    if number.documents is not None:
        low, high = number.documents.interval
        spans.append({"low": low, "high": high, "level": number.level, "interval": "documents"})
        spans[-1]["n"] = number.documents.n
    why = number.blank or number.no_seeds or number.no_documents or ""
    for span in spans or [{"note": why}]:
        yield {**row, **span}


def _of_series(
    comparison: ArmsComparison,
    pair: ArmPair,
    metric: str,
    series: ArmSeries,
    claim: str | None,
    seen: set[tuple[str, str, int | None]],
) -> Iterator[Row]:
    """The points before the one compared, which is among the numbers."""
    for index, tokens in enumerate(series.tokens):
        if tokens == comparison.at:
            continue
        base: Row = {"claim": claim, "metric": metric, "tokens": tokens, "unit": series.unit}
        for arm, table in ((pair.a, series.a), (pair.b, series.b)):
            if (key := (arm.name, metric, tokens)) in seen:
                continue
            seen.add(key)
            values = tuple(float(value) for value in table[index])
            yield from _of_arm(base, arm, values, float(table[index].mean()))
        low, high = (float(end) for end in series.interval[index])
        row: Row = {**base, "arm": f"{pair.b.name} - {pair.a.name}", "quantity": "difference"}
        row["value"] = float(series.difference[index])
        if low == low:  # NaN: there is no interval over one seed
            row |= {"low": low, "high": high, "level": series.level, "interval": "seeds"}
            row["n"] = min(len(pair.a.runs), len(pair.b.runs))
        yield row
