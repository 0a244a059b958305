"""The sections of a report on arms, each a list of blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from shlex import quote

from workbench.compare.arm_results import ArmNumber
from workbench.compare.arm_sentences import (
    decimals_of,
    difference_digits,
    document_digits,
    value_digits,
)
from workbench.compare.arms import Arm, ArmPair, ArmsComparison
from workbench.compare.commands import options, run_words
from workbench.compare.document import (
    Block,
    Code,
    Commands,
    Fold,
    Inline,
    bullets,
    paragraph,
    table,
)
from workbench.compare.numbers import (
    between,
    decimals_more,
    with_spread,
    write,
    write_interval,
)
from workbench.compare.sections import description
from workbench.compare.words import show


def numbers(pair: ArmPair) -> list[Block]:
    """Every number of both arms with its interval over seeds, and a list of what each is."""
    assert pair.results is not None
    rows: list[list[str]] = []
    notes: dict[str, list[Inline]] = {}  # what is said -> the numbers that it is said of
    for name, number in pair.results.numbers.items():
        rows.append([name, *_written(name, number)])
        unit = "" if number.unit == "1" else f" ({number.unit})"
        names = notes.setdefault(f": {number.what}.{_note(number)}", [])
        names += [", " if names else "", Code(name), unit]
    level = next(iter(pair.results.numbers.values())).level
    head = ["number", *pair.names, "difference", f"{100 * level:.4g} % over seeds"]
    legend = (
        "Mean over the seeds ± their standard deviation. Intervals of numbers that do not decide"
        " are shown for each by itself: of twenty such, one stands out by chance."
    )
    said = bullets((*names, text) for text, names in notes.items())
    return [table(head, rows, numbers=4), paragraph(legend), said]


def by_seed(pair: ArmPair) -> list[Block]:
    """The number that decides under every seed: the values that the test is made of."""
    assert pair.results is not None
    found: list[Block] = []
    for name in pair.deciding:
        number = pair.results.numbers[name]
        digits = value_digits(number)
        if pair.seeds.design == "paired":
            rows = [
                [
                    str(seed),
                    *(write(name, value, digits) for value in (x, y)),
                    _change(name, x, y, digits),
                ]
                for seed, x, y in zip(pair.a.seeds, number.a, number.b, strict=True)
            ]
            head = ["seed", *pair.names, "difference"]
            found.append(Fold(f"{name} by seed", (table(head, rows, numbers=3),)))
            continue
        rows = [
            [arm.name, str(seed), write(name, value, digits)]
            for arm, values in ((pair.a, number.a), (pair.b, number.b))
            for seed, value in zip(arm.seeds, values, strict=True)
        ]
        found.append(Fold(f"{name} by seed", (table(["arm", "seed", name], rows, numbers=1),)))
    return found


def evaluations(pair: ArmPair) -> list[Block]:
    """The difference with its pointwise interval at every common evaluation."""
    assert pair.results is not None
    found: list[Block] = []
    for metric, series in pair.results.series.items():
        if not series.tokens or not metric.endswith(("/nll", "/bits_per_byte")):
            continue
        if metric.endswith("/bits_per_byte") and f"{metric.rpartition('/')[0]}/nll" in (
            pair.results.series
        ):
            continue
        digits = difference_digits(pair.results.numbers[metric])
        rows = []
        for at, value, ends in zip(series.tokens, series.difference, series.interval, strict=True):
            known = bool(math.isfinite(ends[0]))
            interval = write_interval((float(ends[0]), float(ends[1])), digits) if known else "-"
            rows.append([f"{at:,}", write(metric, float(value), digits, sign=True), interval])
        head = ["tokens", "difference", f"{100 * series.level:.4g} % over seeds, pointwise"]
        summary = f"{metric} at each of {len(rows)} evaluations, in {series.unit}"
        found.append(Fold(summary, (table(head, rows, numbers=3),)))
    return found


def runs(comparison: ArmsComparison) -> list[Block]:
    """Every run of every arm, and what all runs have in common."""
    arms = (comparison.baseline, *comparison.others)
    described = [
        (arm.name, description(side, {"seed": side.record.spec.get("seed")}))
        for arm in arms
        for side in arm.runs
    ]
    keys = list(dict.fromkeys(key for _, one in described for key in one))
    alike = [key for key in keys if len({one.get(key) for _, one in described}) == 1]
    columns = ["run", "id", "seed", "status", "hours", "commit", "device"]
    shown = [key for key in columns if key in keys and (key not in alike or key in columns[:4])]
    rows = [[arm, *(one.get(key, "-") for key in shown)] for arm, one in described]
    other = [key for key in keys if key not in shown and key not in alike]
    parts: list[Block] = [table(["arm", *shown], rows)]
    if other:
        every = [[one["run"], key, one.get(key, "-")] for _, one in described for key in other]
        parts.append(Fold("Further facts of each run", (table(["run", "", "value"], every),)))
    same = [[key, described[0][1].get(key, "-")] for key in alike if key not in shown]
    same = [row for row in same if row[1] != show(None)]
    if same:
        parts.append(Fold("The same of all runs", (table(["", "all"], same),)))
    return parts


def reproduce(comparison: ArmsComparison) -> list[Block]:
    """The commands from install to this report."""
    lines = ["python3 -m venv .venv && . .venv/bin/activate"]
    lines += ["pip install -c constraints.txt -e '.[sample]'"]
    sides = [side for arm in comparison.arms for side in arm.runs]
    commits = {str(side.record.effective.code.git_commit) for side in sides}
    if len(commits) == 1 and commits != {"None"}:
        dirty = any(side.record.effective.code.git_dirty for side in sides)
        note = "  # not all: there were uncommitted changes" if dirty else ""
        lines.insert(0, f"git checkout {commits.pop()}{note}")
    for side in sides:
        words = run_words(side.record)
        lines.append(" ".join(["wb run", *(w if w == "SPEC" else quote(w) for w in words)]))
    lines.append(compare_command(comparison))
    parts: list[Block] = [Commands(tuple(lines))]
    if any(run_words(side.record) == ["SPEC"] for side in sides):
        where = (Code("run_config.json"), ", under ", Code("spec"))
        parts.append(paragraph("What SPEC was is in the run's ", *where, "."))
    return parts


def compare_command(comparison: ArmsComparison) -> str:
    """The command that makes this report."""
    judgement = comparison.pairs[0].judgement
    treatment = () if judgement.inferred else judgement.treatment
    at = comparison.at if comparison.at_given else None
    words = options(treatment, judgement.allow, comparison.asked, at)
    if comparison.primary is not None:
        words.append(f"--primary {quote(comparison.primary)}")
    if len(comparison.arms) == 2:
        first, second = comparison.baseline, comparison.others[0]
        arms = [f"--a {_runs(first, ' ')}", f"--b {_runs(second, ' ')}"]
        arms.append(f"--names {quote(f'{first.name},{second.name}')}")
    else:
        arms = [f"--arm {quote(arm.name)}={_runs(arm, ',')}" for arm in comparison.arms]
        arms.append(f"--baseline {quote(comparison.baseline.name)}")
    return " ".join(["wb compare", *arms, *words])


def _runs(arm: Arm, between: str) -> str:
    return between.join(quote(side.record.name) for side in arm.runs)


def _written(name: str, number: ArmNumber) -> Iterator[str]:
    digits = difference_digits(number)
    size = max((abs(v) for v in (*number.a, *number.b) if v is not None), default=0.0)
    ends = [decimals_of(spread) if spread else digits for spread in number.spreads]
    for mean, spread, end in zip((number.mean_a, number.mean_b), number.spreads, ends, strict=True):
        said = write(name, mean, end, size=size)
        if spread and mean is not None:
            said = with_spread(said, write(name, spread, end, size=size))
        yield said
    more = 0
    if number.mean_a is not None and number.mean_b is not None and set(ends) == {digits}:
        more = decimals_more(name, number.mean_a, number.mean_b, digits, size)
    yield write(name, number.difference, digits, size=size, sign=True, more=more)
    test = number.seeds
    if test is None:
        yield "-"
        return
    low, high = (write(name, end, digits, size=size, sign=True, more=more) for end in test.interval)
    yield between(low, high)


def _note(number: ArmNumber) -> str:
    if number.blank:
        return f" Blank here: {number.blank}."
    said = ""
    if number.no_seeds and number.claim is not None:
        said = f" No interval over seeds: {number.no_seeds}."
    if number.documents is not None:
        interval = write_interval(number.documents.interval, document_digits(number))
        said += f" Over {number.documents.n:,} documents, these models held fixed: {interval}."
    elif number.no_documents:
        said += f" No interval over documents: {number.no_documents}."
    return said


def _change(name: str, a: float | None, b: float | None, digits: int) -> str:
    if a is None or b is None:
        return "-"
    more = decimals_more(name, a, b, digits, 0.0)
    return write(name, b - a, digits, sign=True, more=more)
