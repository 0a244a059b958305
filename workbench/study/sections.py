"""The sections of a study's report, each a list of blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import combinations

from workbench.compare.arm_results import ArmNumber
from workbench.compare.arm_sentences import (
    decimals_of,
    difference_digits,
    document_digits,
    selection,
)
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
from workbench.compare.held_out import held_out_section
from workbench.compare.numbers import with_spread, write, write_interval
from workbench.compare.power import seeds_written
from workbench.compare.seeds import POWER, detectable, seeds_needed
from workbench.study.outcome import Decision, StudyResult
from workbench.track.record import RunRecord

_QUALITY = ("held_out/nll", "train_split/nll", "train/nll", "held_out/bits_per_byte")
_COST = ("parameters/total", "parameters/active", "tokens_per_s", "peak_memory_bytes")
_MOST = 6  # decimals


def answer(outcome: StudyResult) -> list[Block]:
    """What came out, how sure it is, and what it leaves open: to be read alone."""
    blocks: list[Block] = [
        paragraph(Strong(headline(outcome)), f" {_sureness(outcome)}{_untested(outcome)}")
    ]
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
    unit, digits = number.unit, difference_digits(number)
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
    pair = f"{decision.arm} against {decision.against}"
    needed = seeds_needed(largest, test.spread, test.design, test.level)
    more = seeds_written(needed)
    return (
        f"{said}{_cannot_answer(outcome)} Of {pair}, with {test.n[0]} seeds an arm and this spread"
        f" between seeds, a difference has to be {least:.2g} {unit} or more to be found with"
        f" {100 * POWER:.0f} % power; {largest:.{digits}f}, were it the true one, takes {more}"
        " seeds an arm."
    )


def _cannot_answer(outcome: StudyResult) -> str:
    """Of how many comparisons nothing that can happen would be found: their intervals are wider, or
    the differences that they need larger, than what a model that guesses evenly is from a perfect
    one. Empty where there are none, and for numbers that have no such bound."""
    vocabulary = _vocabulary(outcome)
    if vocabulary is None or not outcome.metric.endswith("/nll"):
        return ""
    bound, wide, tested, seeds = math.log(vocabulary), 0, 0, 0
    for one in outcome.decisions:
        if one.number is None or one.number.seeds is None:
            continue
        test = one.number.seeds
        low, high = test.interval
        tested, seeds = tested + 1, test.n[0]
        least = detectable(test.spread, test.n[0], test.design, test.level)
        wide += high - low > bound or least > bound
    if not wide:
        return ""
    of = "this" if wide == tested == 1 else f"{wide} of the {tested} comparisons"
    return (
        f" {seeds} seeds cannot answer {of}: the interval is wider, or the difference that would be"
        f" found larger, than the {bound:.1f} nats/token that lie between guessing evenly among"
        f" {vocabulary:,} tokens and knowing the text."
    )


def _vocabulary(outcome: StudyResult) -> int | None:
    """The size of the vocabulary that all runs have; None where they have several, or none."""
    runs = [
        side for arm in (outcome.comparison.arms if outcome.comparison else ()) for side in arm.runs
    ]
    sizes = {side.record.effective.tokenizer.vocab_size for side in runs}
    return sizes.pop() if len(sizes) == 1 else None


def _untested(outcome: StudyResult) -> str:
    """Of arms that cross two settings: that no comparison asks for their interaction."""
    document = outcome.status.plan.latest.document["arms"]
    names = [arm for arm in outcome.arms if arm in document]
    leaves = dict.fromkeys(leaf for arm in names for leaf in document[arm])
    values = {leaf: [document[arm].get(leaf) for arm in names] for leaf in leaves}
    varied = {
        leaf: list(map(repr, found))
        for leaf, found in values.items()
        if None not in found and any(value != found[0] for value in found)
    }
    for (one, first), (other, second) in combinations(varied.items(), 2):
        cells = len(set(first)) * len(set(second))
        if len(set(zip(first, second, strict=True))) == cells > 3:
            return (
                f" Whether what {other} does depends on {one} (an interaction) is not tested: every"
                " comparison of the plan is of two arms."
            )
    return ""


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
    if first is not None:
        base = _cell(metric, (first.a, ""))
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
        digits = difference_digits(number)
        change = write(metric, number.difference, digits, sign=True)
        into.append(
            [
                label,
                *([] if is_contrast else [_cell(metric, (number.b, ""))]),
                change,
                write_interval(test.interval, digits) if test else "-",
                "-" if p is None else f"{p:.2g}",
                _verdict_of(one),
            ]
        )
        if documents:
            interval = write_interval(documents.interval, document_digits(number))
            single.append([label, interval, f"{documents.n:,}"])
    level = first.level if first is not None else comparison.level
    unit = first.unit if first is not None else ""
    if not single:
        single = [["-", "-", "-"]]
    head = ["arm", metric, "difference", "over seeds", "p", "decision"]
    between = [table(["contrast", *head[2:]], further)] if further else []
    return [
        table(head, rows),
        *between,
        table(["arm", "over documents", "documents"], single, numbers=1),
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
        " (Bonferroni); p: of the t test, adjusted by Holm's method. These cover another seed. A"
        " difference is written to the digits that its interval over seeds allows."
    )
    yield (
        "over documents: a bootstrap of whole documents (of fewer than 30 a t interval, which is"
        " approximate) with the trained models held fixed, of the same level. It does not cover"
        " another seed, other text or another budget: where it leaves out zero and the arms are not"
        " told apart, these very models differ, as any two do that were trained with other seeds."
    )


def chosen(outcome: StudyResult) -> list[Block]:
    """What was chosen, and how often one could choose."""
    return [bullets(selection(outcome.comparison))] if outcome.comparison else []


def held_out(outcome: StudyResult) -> list[Block]:
    """What is known of each evaluation set, of all arms at once where it is the same in all."""
    comparison = outcome.comparison
    if comparison is None:
        return []
    alike: dict[str, tuple[RunRecord, dict[str, None]]] = {}
    for arm in comparison.arms:
        for side in arm.runs:
            facts = {
                name: one.model_dump_json()
                for name, one in side.record.effective.evaluation.items()
            }
            found = alike.setdefault(repr(facts), (side.record, {}))
            found[1][arm.name] = None
    if len(alike) == 1:
        return held_out_section({"all": next(iter(alike.values()))[0]})
    return held_out_section({", ".join(names): record for record, names in alike.values()})


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
            digits = decimals_of((high - low) / 2)
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
    return _mean(name, values[0], mean_digits(values[0]))


def mean_digits(values: Sequence[float | None]) -> int:
    """Decimals that show two digits of the spread over seeds: more would say what another seed
    takes back."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return decimals_of(statistics.stdev(known) if len(known) > 1 else 0.0)


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
    return with_spread(said, noise) if any(digit in noise for digit in "123456789") else said


def _value(name: str, value: float | None) -> str:
    return write(name, value, _MOST)


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
