"""The sections of a study's report, each a list of blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from workbench.compare.arm_results import ArmNumber
from workbench.compare.arms import ArmPair
from workbench.compare.document import (
    Badge,
    Block,
    Cell,
    Code,
    Fold,
    Strong,
    Words,
    bullets,
    paragraph,
    table,
)
from workbench.compare.numbers import write, write_interval
from workbench.compare.power import seeds_written
from workbench.compare.seeds import POWER, detectable, seeds_needed
from workbench.study.outcome import Decision, StudyResult

_QUALITY = ("held_out/nll", "train_split/nll", "train/nll", "held_out/bits_per_byte")
_COST = ("parameters/total", "parameters/active", "tokens_per_s", "peak_memory_bytes")
_LEAST, _MOST = 3, 6  # decimals


def answer(outcome: StudyResult) -> list[Block]:
    """What came out, how sure it is, and what it leaves open: to be read alone."""
    blocks: list[Block] = [paragraph(Strong(headline(outcome)), " ", _sureness(outcome))]
    told = [one for one in outcome.decisions if one.number is None]
    if told:
        blocks.append(bullets(one.words for one in told))
    return blocks


def headline(outcome: StudyResult) -> str:
    """The answer in one or two sentences."""
    measured = [one for one in outcome.decisions if one.number is not None]
    if not measured:
        return "This study cannot answer its question: no arm may be compared with the baseline."
    better = [one.words for one in measured if one.better is not None]
    words = [f"{listed(better)}." if better else ""]
    same: dict[str, list[str]] = {}
    for one in measured:
        if one.better is None:
            same.setdefault(one.against, []).append(one.arm)
    if same:
        none = same.get(outcome.baseline) == list(outcome.arms[1:])
        said = [
            f"no arm can be told from {against}"
            if none and against == outcome.baseline
            else f"{listed(arms)} cannot be told from {against}"
            for against, arms in same.items()
        ]
        text = f"{'; '.join(said)} at this budget."
        words.append(f"No{text[2:]}" if none else text)
    refused = len(outcome.decisions) - len(measured)
    if refused:
        words.append(f"{refused} of {len(outcome.decisions)} comparisons are refused.")
    return " ".join(filter(None, words))


def _sureness(outcome: StudyResult) -> str:
    """How the largest difference stands to what these seeds can show."""
    found = [
        (abs(one.number.difference), one)
        for one in outcome.decisions
        if one.number is not None and one.number.difference is not None
    ]
    if not found:
        return ""
    largest, decision = max(found, key=lambda pair: pair[0])
    number = decision.number
    assert number is not None
    unit, digits = number.unit, _digits(number)
    lower = "lower" if (number.difference or 0) < 0 else "higher"
    said = (
        f"The largest difference in {outcome.metric}, that of {decision.arm} from"
        f" {decision.against}, is {largest:.{digits}f} {unit} {lower}"
    )
    test = number.seeds
    if test is None:
        return f"{said}; there is no interval over seeds: {number.no_seeds}."
    said += (
        f", {test.level * 100:.4g} % interval over {test.n[0]} {test.design} seeds"
        f" {write_interval(test.interval, digits)}."
    )
    least = detectable(test.spread, test.n[0], test.design, test.level)
    said += (
        f" With {test.n[0]} seeds an arm and this spread between seeds, a difference has to be"
        f" {least:.2g} {unit} or more to be found with {100 * POWER:.0f} % power"
    )
    needed = seeds_needed(largest, test.spread, test.design, test.level)
    more = seeds_written(needed)
    return f"{said}; to find the one seen takes {more} seeds an arm."


def arms(outcome: StudyResult) -> list[Block]:
    """Every arm with the deciding number, its difference from the baseline, and the contrasts."""
    comparison = outcome.comparison
    if comparison is None:
        return []
    metric = outcome.metric
    rows: list[list[Cell]] = []
    further: list[list[Cell]] = []
    single: list[list[Cell]] = []
    first = next((one.number for one in outcome.decisions if one.number is not None), None)
    digits = shared_digits(outcome)
    if first is not None:
        base = _mean(metric, first.a, digits)
        rows.append([outcome.baseline, base, "", "", "", "baseline"])
    for one in outcome.decisions:
        number = one.number
        is_contrast = one in outcome.contrasts
        into = further if is_contrast else rows
        label = one.label(outcome.baseline)
        if number is None:
            mean = [] if is_contrast else ["-"]
            into.append([label, *mean, "-", "-", "-", Badge("refused", "refused")])
            continue
        test, documents = number.seeds, number.documents
        p = number.p_adjusted
        change = write(metric, number.difference, digits, sign=True)
        into.append(
            [
                label,
                *([] if is_contrast else [_mean(metric, number.b, digits)]),
                change,
                write_interval(test.interval, digits) if test else "-",
                "-" if p is None else f"{p:.2g}",
                _verdict_of(one),
            ]
        )
        if documents:
            single.append([label, change, write_interval(documents.interval, digits)])
    level = first.level if first is not None else comparison.level
    unit = first.unit if first is not None else ""
    if not single:
        single = [["-", "-", "-"]]
    head = ["arm", metric, "difference", "over seeds", "p", "decision"]
    between = [table(["contrast", *head[2:]], further)] if further else []
    return [
        table(head, rows),
        *between,
        table(["arm", "difference", "over documents"], single),
        bullets(_legend(outcome, level, unit, first)),
    ]


def _legend(
    outcome: StudyResult, level: float, unit: str, number: ArmNumber | None
) -> Iterable[Words | str]:
    pairs = len(outcome.decisions)
    yield (
        Code(outcome.metric),
        f" in {unit}, mean ± standard deviation over seeds"
        f"{f': {number.what}' if number and number.what else ''}; less is better.",
    )
    contrast = " (a contrast: the first minus the second)" if outcome.contrasts else ""
    yield (
        f"difference: of the means, the arm minus {outcome.baseline}{contrast}; below zero, the arm"
        " is better."
    )
    yield (
        f"over seeds: t intervals of {level * 100:.4g} %, so that all {pairs} together hold with"
        f" {outcome.status.plan.latest.document['decision']['confidence'] * 100:g} %"
        " (Bonferroni); p: of the t test, adjusted by Holm's method. These cover another seed."
    )
    yield (
        "over documents: a bootstrap of whole documents (of fewer than 30 a t interval, which is"
        " approximate) with the trained models held fixed, of the same level. It does not cover"
        " another seed, other text or another budget."
    )


def numbers(outcome: StudyResult) -> list[Block]:
    """The other numbers of every arm, and those of single runs on demand."""
    comparison = outcome.comparison
    found = _by_arm(outcome)
    if comparison is None or not found:
        return []
    blocks: list[Block] = []
    for names in (_QUALITY, _COST):
        names_known = [name for name in names if any(name in one for one in found.values())]
        if not names_known:
            continue
        rows = [
            [arm, *(_cell(name, one.get(name)) for name in names_known)]
            for arm, one in found.items()
        ]
        blocks.append(table(["arm", *names_known], rows, numbers=len(names_known)))
    blanks = {
        f"{name}: blank, {values[1]}"
        for one in found.values()
        for name, values in one.items()
        if values[1] and name in (*_QUALITY, *_COST)
    }
    notes: list[str] = sorted(blanks)
    notes.append(
        "train_split is a fixed part of the training text, train the optimised stream: neither is"
        " held out."
    )
    threads = outcome.status.plan.threads
    shared = [event.detail for event in outcome.status.ledger.events if event.kind == "began"]
    notes.append(
        f"Speed and memory are those of runs on {threads} thread{'s' * (threads > 1)} each that"
        " shared the machine"
        f" ({'; '.join(dict.fromkeys(shared)) or 'not recorded'}); they say what these runs took,"
        " not what one run alone takes."
    )
    blocks.append(bullets(notes))
    rows = [
        [arm.name, str(seed), _value(outcome.metric, value)]
        for arm in comparison.arms
        for seed, value in zip(
            arm.seeds, found.get(arm.name, {}).get(outcome.metric, ((), ""))[0], strict=False
        )
    ]
    if rows:
        inside = table(["arm", "seed", outcome.metric], rows, numbers=1)
        blocks.append(Fold(f"{outcome.metric} of each run", (inside,)))
    return blocks


def evaluations(outcome: StudyResult) -> list[Block]:
    """The differences at every evaluation, with the ends of intervals that no figure may show."""
    pairs: Sequence[ArmPair] = outcome.comparison.pairs if outcome.comparison else ()
    digits = shared_digits(outcome)
    rows: list[list[Cell]] = []
    for pair in pairs:
        series = pair.results.series.get(outcome.metric) if pair.results else None
        if series is None or pair.verdict == "refused":
            continue
        base = pair.a.name == outcome.baseline
        label = pair.b.name if base else f"{pair.b.name} - {pair.a.name}"
        for at, value, ends in zip(series.tokens, series.difference, series.interval, strict=True):
            low, high = map(float, ends)
            known = math.isfinite(low)
            change = write(outcome.metric, float(value), digits, sign=True)
            written = write_interval((low, high), digits) if known else "-"
            rows.append([label, f"{at:,}", change, written])
    if not rows:
        return []
    head = ["arm", "tokens", "difference", "over seeds, pointwise"]
    inside = (table(head, rows, numbers=3),)
    return [Fold(f"Every difference in {outcome.metric} over training", inside)]


_Values = tuple[tuple[float | None, ...], str]


def _by_arm(outcome: StudyResult) -> dict[str, dict[str, _Values]]:
    """Arm -> number -> the value of every seed, and why it is blank."""
    found: dict[str, dict[str, _Values]] = {}
    pairs: Sequence[ArmPair] = outcome.comparison.pairs if outcome.comparison else ()
    for pair in pairs:
        for name, number in (pair.results.numbers if pair.results else {}).items():
            for arm, values in ((pair.a.name, number.a), (pair.b.name, number.b)):
                known = found.setdefault(arm, {})
                if name not in known or known[name][1]:
                    known[name] = (values, number.blank or "")
    return {arm: found[arm] for arm in outcome.arms if arm in found}


def _cell(name: str, values: _Values | None) -> str:
    if values is None or values[1] or any(value is None for value in values[0]):
        return "-"
    known = [value for value in values[0] if value is not None]
    spread = statistics.stdev(known) if len(known) > 1 and all(map(math.isfinite, known)) else 0.0
    # Two digits of the spread: more would say what another seed takes back.
    digits = 4 if spread <= 0 else min(_MOST, max(0, 1 - math.floor(math.log10(spread))))
    return _mean(name, values[0], digits)


def _mean(name: str, values: Sequence[float | None], digits: int) -> str:
    """Mean ± standard deviation over seeds, the latter where there are two and they differ."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "-"
    mean = math.fsum(known) / len(known)
    said = write(name, mean, digits, size=max(map(abs, known)))
    if len(known) < 2 or not all(map(math.isfinite, known)):
        return said
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1))
    noise = write(name, spread, digits, size=max(map(abs, known)))
    return f"{said} ± {noise}" if any(digit in noise for digit in "123456789") else said


def _value(name: str, value: float | None) -> str:
    return write(name, value, _MOST)


def shared_digits(outcome: StudyResult) -> int:
    """Decimals in which the deciding number of all arms is written."""
    return max((_digits(one.number) for one in outcome.decisions if one.number), default=4)


def _digits(number: ArmNumber) -> int:
    """Decimals that show two digits of the smaller interval's half width."""
    widths = [one.interval[1] - one.interval[0] for one in (number.seeds, number.documents) if one]
    half = min(widths, default=0.0) / 2
    return 4 if half <= 0 else min(_MOST, max(_LEAST, 1 - math.floor(math.log10(half))))


def _verdict_of(decision: Decision) -> str:
    if decision.number is not None and decision.number.seeds is None:
        return "no winner"
    if decision.better is None:
        return "not told apart"
    return "better" if decision.better == decision.arm else "worse"


def listed(words: Sequence[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
