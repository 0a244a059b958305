"""What a comparison of arms says in words: the verdict first, then the numbers behind it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator

from workbench.compare.arm_results import ArmNumber
from workbench.compare.arms import Arm, ArmPair, ArmsComparison
from workbench.compare.numbers import write, write_interval
from workbench.compare.power import power_from
from workbench.compare.seeds import SeedTest
from workbench.compare.sentences import FEW_DOCUMENTS
from workbench.compare.stats import FEW

_STEADY = 0.1  # of its mean: the spread of throughput over seeds that a machine left alone has


def title(comparison: ArmsComparison) -> str:
    """The arms and the verdict on each claim asked for; a refusal in capitals."""
    base, *others = comparison.names
    verdicts: dict[str, list[str]] = {}
    for claim in comparison.asked:
        verdicts.setdefault(comparison.claims[claim], []).append(claim)
    said = [
        f"{verdict.upper() if verdict == 'refused' else verdict} for {', '.join(claims)}"
        for verdict, claims in sorted(verdicts.items(), reverse=True)
    ]
    return f"{', '.join(others)} against {base}: {' · '.join(said)}"


def difference_digits(number: ArmNumber) -> int:
    """Decimals that show two digits of the half width of its interval over seeds; where there is
    none, of the smaller spread over seeds, or else of the interval over documents."""
    spreads = [spread for spread in number.spreads if spread]
    if number.seeds is None and spreads:
        return decimals_of(min(spreads))
    test = number.seeds or number.documents
    return decimals_of((test.interval[1] - test.interval[0]) / 2 if test else 0.0)


def value_digits(number: ArmNumber) -> int:
    """Decimals of single runs: those of the difference, and of the smaller spread over seeds."""
    spreads = [decimals_of(spread) for spread in number.spreads if spread]
    return max([difference_digits(number), *spreads])


def document_digits(number: ArmNumber) -> int:
    """The same for the interval over documents, which may be far narrower."""
    if number.documents is None:
        return difference_digits(number)
    return decimals_of((number.documents.interval[1] - number.documents.interval[0]) / 2)


def decimals_of(uncertainty: float) -> int:
    """Decimals that show two digits of an uncertainty; four where there is none."""
    if not (math.isfinite(uncertainty) and uncertainty > 0):
        return 4
    return min(6, max(0, 1 - math.floor(math.log10(uncertainty))))


def disturbed(arms: Iterable[Arm]) -> str:
    """That no claim on speed is to be taken from arms whose throughput varies by more than a tenth
    over their seeds, which their specs do not explain; empty where none does."""
    found: dict[str, float] = {}
    for arm in arms:
        speeds = [side.record.results.tokens_per_s for side in arm.runs]
        known = [one for one in speeds if one is not None and math.isfinite(one)]
        if len(known) == len(speeds) > 1 and (mean := math.fsum(known) / len(known)) > 0:
            share = statistics.stdev(known) / mean
            if share > _STEADY:
                found[arm.name] = share
    if not found:
        return ""
    listed = ", ".join(f"{100 * share:.0f} % in {name}" for name, share in found.items())
    return (
        f"Throughput varies over the seeds by more than {100 * _STEADY:.0f} % of its mean"
        f" ({listed}): these runs shared a machine or were disturbed, and no claim on throughput is"
        " to be taken from them."
    )


def verdict_sentence(pair: ArmPair, name: str) -> str:
    """Who is better in a number that decides, or that they cannot be told apart."""
    assert pair.results is not None
    number = pair.results.numbers[name]
    first, second = pair.names
    if number.winner is not None:
        better, worse = (second, first) if number.winner == "b" else (first, second)
        way = "lower" if _is_lower(number, better == second) else "higher"
        return f"{better} is better than {worse} at this budget: its {name} is {way}."
    if number.is_told_apart:
        return f"{second} and {first} differ in {name}; of this number no way is known as better."
    if number.seeds is not None:
        return f"{second} is not distinguishable from {first} in {name} at this budget."
    if _is_same(number):
        return f"{second} and {first} have the same {name} under every seed: nothing is to be told."
    return f"No winner is named between {second} and {first} in {name}: {number.no_seeds}."


def difference_sentence(pair: ArmPair, name: str) -> str:
    """The difference with its interval over seeds, its signs, and its size beside the noise."""
    assert pair.results is not None
    number = pair.results.numbers[name]
    first, second = pair.names
    digits = difference_digits(number)
    if number.difference is None:
        return f"There is no difference in {name}, because not all values are finite."
    shown = write(name, number.difference, digits, sign=True)
    unit = "" if name == "peak_memory_bytes" else f" {number.unit}"
    said = f"{name} of {second} minus that of {first} is {shown}{unit}"
    test = number.seeds
    if test is None:
        return said + "."
    words = [f"{_level(test.level)} interval over {_seeds(test)} {_interval(name, test, digits)}"]
    p = number.p_adjusted
    if p is not None and p != test.p:
        words.append(f"p = {test.p:.2g}, {p:.2g} adjusted for the arms (Holm)")
    else:
        words.append(f"p = {test.p:.2g}")
    words += [signs(test), f"{abs(test.effect):.2g} times the seed spread"]
    return f"{said}: {'; '.join(words)}."


def documents_sentence(pair: ArmPair, name: str) -> str:
    """The interval over documents, and what it does not cover."""
    assert pair.results is not None
    number = pair.results.numbers[name]
    if number.documents is None:
        if number.claim not in ("nll", "bpb"):
            return ""
        return f"There is no interval over documents: {number.no_documents}."
    interval = write_interval(number.documents.interval, document_digits(number))
    said = (
        f"Over {number.documents.n:,} documents, these trained models held fixed, the"
        f" {_level(number.level)} interval is {interval}."
    )
    if number.documents.n < FEW:
        said += f" {FEW_DOCUMENTS}"
    if number.seeds is None:
        turn = "" if _is_same(number) else ", which may turn the sign"
        return f"{said} It says nothing about another seed{turn}."
    return f"{said} That one says nothing about another seed."


def power_sentence(pair: ArmPair, name: str, difference: float | None = None) -> str:
    """What these seeds can find; empty without a test over seeds."""
    assert pair.results is not None
    number = pair.results.numbers[name]
    if number.seeds is None:
        return ""
    power = power_from(number.seeds, difference)
    return power.sentence(number.unit, difference_digits(number), asked=difference is not None)


def signs(test: SeedTest) -> str:
    """In how many of the seeds, or pairs of seeds, the second arm is lower or higher."""
    paired = test.design == "paired"
    total = test.n[0] if paired else test.n[0] * test.n[1]
    more = max(test.lower, test.higher)
    way = "lower" if test.lower == more else "higher"
    return f"{way} in {more} of {total} {'seeds' if paired else 'pairs of seeds'}"


def selection(comparison: ArmsComparison) -> Iterator[str]:
    """What was chosen, and how often one could choose: checkpoints, evaluations, tuning runs."""
    arms = (comparison.baseline, *comparison.others)
    rules = {arm.name: _selected(arm) for arm in arms}
    if len(set(rules.values())) == 1:
        yield f"Checkpoint: {next(iter(rules.values()))} of every run."
    else:
        listed = ", ".join(f"{rule} in {name}" for name, rule in rules.items())
        yield f"Checkpoints are chosen by unlike rules: {listed}."
    counts = {arm.name: sorted(set(arm.evaluations(comparison.at))) for arm in arms}
    listed = ", ".join(
        f"{name} {' to '.join(map(str, dict.fromkeys((n[0], n[-1]))))}"
        for name, n in counts.items()
    )
    equal = len({tuple(n) for n in counts.values()}) == 1
    unlike = "" if equal else " Unequal numbers: the best of more looks better by chance."
    yield f"Evaluations of each run up to the point compared: {listed}.{unlike}"
    yield from _optimism(comparison)
    if any(arm.tuning is not None for arm in arms):
        listed = ", ".join(f"{arm.name} {arm.tuning}" for arm in arms)
        equal = len({arm.tuning for arm in arms}) == 1
        unlike = "" if equal else " Unequal numbers: the arm with more was tuned harder."
        yield f"Other runs in the store, same experiment and same model: {listed}.{unlike}"


def _optimism(comparison: ArmsComparison) -> Iterator[str]:
    """By how much the best evaluation is below the last: what choosing it would have added."""
    said: dict[str, str] = {}
    for pair in comparison.pairs:
        for metric in pair.deciding:
            series = pair.results.series.get(metric) if pair.results else None
            if series is None or len(series.tokens) < 2:
                continue
            for arm, table in ((pair.a, series.a), (pair.b, series.b)):
                gain = float((table[-1] - table.min(axis=0)).mean())
                if math.isfinite(gain) and gain > 0:
                    said[arm.name] = f"{gain:.2g} {series.unit} of {metric} in {arm.name}"
    if said:
        yield (
            "The best evaluation in place of the last would lower every mean, by its own choice"
            f" and not by the arm: {', '.join(said.values())}. None of it is in the numbers here."
        )


def _selected(arm: Arm) -> str:
    rules = {str(side.record.spec.get("evaluation", {}).get("select")) for side in arm.runs}
    return " or ".join(sorted(rules))


def _is_lower(number: ArmNumber, of_second: bool) -> bool:
    difference = number.difference
    assert difference is not None
    return (difference < 0) == of_second


def _seeds(test: SeedTest) -> str:
    if test.design == "paired":
        return f"{test.n[0]} paired seeds"
    if test.n[0] == test.n[1]:
        return f"{test.n[0]} unpaired seeds an arm (Welch)"
    return f"{test.n[0]} and {test.n[1]} unpaired seeds (Welch)"


def _interval(name: str, test: SeedTest, digits: int) -> str:
    low, high = (write(name, end, digits, sign=True) for end in test.interval)
    return f"[{low}, {high}]"


def _is_same(number: ArmNumber) -> bool:
    """Whether two arms of several seeds have the same value under each of them."""
    return len(number.a) > 1 and number.a == number.b and None not in number.a


def _level(level: float) -> str:
    return f"{100 * level:.4g} %"
