"""What a comparison says in words: its verdict, its one number, what that number leaves open."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from datetime import datetime

from workbench.compare.document import (
    Badge,
    Block,
    Code,
    Inline,
    Paragraph,
    Strong,
    Words,
    paragraph,
)
from workbench.compare.numbers import written
from workbench.compare.pair import Comparison, refusing
from workbench.compare.results import BOOTSTRAP_SEED, Number
from workbench.compare.rules import Judgement
from workbench.compare.stats import DRAWS, FEW
from workbench.spec.checklist import CLAIMS, Claim

_MAIN: dict[Claim, tuple[str, ...]] = {
    "nll": ("held_out*/nll", "unproven*/nll", "train_split/nll"),
    "bpb": ("held_out*/bits_per_byte", "unproven*/bits_per_byte", "train_split/bits_per_byte"),
    "throughput": ("tokens_per_s",),
    "memory": ("peak_memory_bytes",),
}

ONE_SEED = (
    "One seed per arm says nothing about seed noise: another seed of the same two specs may turn"
    " the sign, so no winner is named."
)
FEW_DOCUMENTS = f"Of fewer than {FEW} documents it is approximate."
ONE_RUN = "One run per arm says nothing about the spread between runs, so no winner is named."


def title(comparison: Comparison) -> str:
    """The two names and the verdict on each claim asked for; a refusal in capitals."""
    first, second = comparison.names
    verdicts: dict[str, list[str]] = {}
    for claim in comparison.asked:
        verdicts.setdefault(comparison.judgement.claims[claim], []).append(claim)
    said = [
        f"{verdict.upper() if verdict == 'refused' else verdict} for {', '.join(claims)}"
        for verdict, claims in sorted(verdicts.items(), reverse=True)
    ]
    return f"{first} against {second}: {' · '.join(said)}"


def verdicts_line(judgement: Judgement) -> str:
    """Every claim with its verdict and the rules behind it."""
    return " · ".join("".join(said) for said in _verdicts(judgement).values())


def _verdicts(judgement: Judgement) -> dict[Claim, tuple[str, ...]]:
    """Claim -> its verdict, and the rules behind it where it is not comparable."""
    found: dict[Claim, tuple[str, ...]] = {}
    for claim in CLAIMS:
        verdict = judgement.claims[claim]
        rules = ", ".join(
            ruling.rule for ruling in judgement.rules if ruling.over([claim]) == verdict
        )
        why = () if verdict == "comparable" else (f" ({rules})",)
        found[claim] = (f"{claim} {verdict}", *why)
    return found


def main_number(comparison: Comparison) -> tuple[str, Number] | None:
    """The number that the first claim asked for is about, where it may be shown."""
    if comparison.results is None:
        return None
    numbers = comparison.results.numbers
    for claim in comparison.asked:
        if claim in refusing(comparison.judgement):
            continue
        measured = [
            name
            for name, number in numbers.items()
            if number.a is not None and number.b is not None
        ]
        if (name := main_name(measured, claim)) is not None:
            return name, numbers[name]
    return None


def main_name(measured: Iterable[str], claim: Claim) -> str | None:
    """Of the numbers measured, the one that a claim is about."""
    by_length = sorted(measured, key=lambda name: (len(name), name))
    for pattern in _MAIN[claim]:
        if found := fnmatch.filter(by_length, pattern):
            return found[0]
    return None


def number_sentence(comparison: Comparison) -> str:
    """Both values and the difference, in one plain sentence."""
    found = main_number(comparison)
    if found is None:
        return "The number asked for was not measured in both runs at this point."
    name, number = found
    a, b, difference, _ = written(name, number)
    first, second = comparison.names
    if number.difference is None:
        return (
            f"At {comparison.at:,} tokens the {name} is {a} in {first} and {b} in {second}: there"
            " is no difference, because not both are finite."
        )
    size = difference.lstrip("+-")
    unit = "" if name == "peak_memory_bytes" else f" {number.unit}"
    if difference.strip("+-0.,GB ") == "":
        relation = f"equals that of {first} to the digits shown"
    else:
        way = "lower" if difference.startswith("-") else "higher"
        relation = f"is {size}{unit} {way} than that of {first}"
    return (
        f"At {comparison.at:,} tokens the {name} of {second} {relation}"
        f" ({b} against {a}; difference {difference})."
    )


def interval_sentence(comparison: Comparison) -> str:
    """The interval over documents beside the number, or that there is none."""
    found = main_number(comparison)
    if found is None or found[1].claim not in ("nll", "bpb"):
        return ""
    name, number = found
    if number.documents is None:
        return f"There is no interval over documents: {number.no_interval}."
    n, interval = number.documents.n, written(name, number)[3]
    few = f" {FEW_DOCUMENTS}" if n < FEW else ""
    return f"95 % interval over {n:,} documents, these two runs alone: {interval}.{few}"


def noise_sentence(comparison: Comparison) -> str:
    """What one run per arm cannot say."""
    found = main_number(comparison)
    timed = found is not None and found[1].claim in ("throughput", "memory")
    return ONE_RUN if timed else ONE_SEED


def verdicts(judgement: Judgement) -> Paragraph:
    """Every claim with its verdict and the rules behind it."""
    parts: list[Inline] = []
    for claim, said in _verdicts(judgement).items():
        parts += [" · " if parts else "", Badge(said[0], judgement.claims[claim]), *said[1:]]
    return paragraph(*parts)


def how_judged(
    judgement: Judgement, at: int | None, today: datetime
) -> Iterator[tuple[str, Words]]:
    """The rows of a title block: treatment, overrides, the point compared, the ruleset."""
    treatment = ", ".join(judgement.treatment) or "none"
    if judgement.treatment:
        treatment += " (inferred, not declared)" if judgement.inferred else " (declared)"
    yield "treatment", (treatment,)
    if not judgement.allow:
        yield "overrides", ("none",)
    for rule, reason in judgement.allow.items():
        yield "override", (Code(rule), f": {reason}")
    yield "compared at", ("no common point" if at is None else f"{at:,} tokens",)
    yield "ruleset", (f"{judgement.ruleset}, {today:%Y-%m-%d}",)


def headline(comparison: Comparison) -> list[Block]:
    """The opening paragraphs of a report: what came out, how sure it is, what it leaves open."""
    if comparison.results is None:
        return []
    between = interval_sentence(comparison)
    return [
        paragraph(
            Strong(number_sentence(comparison)),
            f" {between} " if between else " ",
            Strong(noise_sentence(comparison)),
        )
    ]


def document_method(counts: Iterable[int], together: str) -> str:
    """How the intervals over sets of so many documents are made, in one sentence.

    Args:
        together: what the two sides are at every document.
    """
    counts, said = list(counts), []
    if any(n >= FEW for n in counts):
        said.append(
            f"whole documents drawn with replacement ({DRAWS:,} draws at the point compared,"
            f" generator seed {BOOTSTRAP_SEED}; bootstrap t)"
        )
    if any(n < FEW for n in counts):
        said.append(
            f"for fewer than {FEW} documents, of which nothing is drawn, a t interval (HC3 standard"
            " error, effective number of documents less one as degrees of freedom), which is"
            " approximate"
        )
    return f"Over documents ({together}, weighted by their tokens): {'; '.join(said)}."


def statement(comparison: Comparison) -> list[Block]:
    """How the intervals were made, and what they do not cover."""
    numbers = comparison.results.numbers if comparison.results else {}
    counts = [number.documents.n for number in numbers.values() if number.documents]
    if not counts:
        return []
    return [
        paragraph(
            f"{document_method(counts, 'both runs together')} These intervals say how far the"
            " difference depends on which documents were drawn, for these two trained models. They"
            " do not cover the seed (initial weights and order), other text, another budget, or how"
            " well either arm was tuned."
        )
    ]
