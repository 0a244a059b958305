"""What the intervals and the winners of compared arms are worth: thousands of synthetic studies.

Every study goes through the functions that `wb compare` uses: its seeds through `seed_test`,
`holm` and `ArmNumber.decided`, its documents through `document_interval`. The truth is known, so
that false winners and missed truths can be counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from workbench.compare.arm_results import ArmNumber
from workbench.compare.seeds import Design, SeedTest, bonferroni_level, holm, seed_test
from workbench.compare.stats import FEW, document_interval

LEVEL = 0.95
SPREAD = 0.01  # of the seeds, in nats per token


@dataclass
class Counted:
    """Of so many pairs of arms: winners named, and intervals that hold the truth."""

    pairs: int = 0
    studies: int = 0
    winners: int = 0
    wrong: int = 0  # winners on the wrong side of the truth
    false_studies: int = 0  # with a winner in any pair
    covered: int = 0

    @property
    def coverage(self) -> float:
        return self.covered / self.pairs


def studies(
    count: int, seeds: int, design: Design, truth: float, rng: np.random.Generator, others: int = 1
) -> Counted:
    """Studies of a baseline and `others` arms, all of them `truth` above it.

    The seeds' luck is skewed (a shifted gamma distribution) and, where the seeds are paired, half
    of its variance is common to the arms.
    """
    found = Counted()
    level = bonferroni_level(others, LEVEL)
    for _ in range(count):
        common = _luck(rng, seeds)
        base = _arm(rng, seeds, common, design)
        numbers = []
        for _ in range(others):
            values = truth + _arm(rng, seeds, common, design)
            test = seed_test(base, values, design, level)
            assert isinstance(test, SeedTest)
            numbers.append(
                ArmNumber(tuple(base), tuple(values), "nats/token", "nll", seeds=test, level=level)
            )
        tests = [number.seeds for number in numbers if number.seeds]
        adjusted = holm([test.p for test in tests], family=others)
        winners = 0
        for number, test, p in zip(numbers, tests, adjusted, strict=True):
            winner = number.decided("held_out/nll", p).winner
            winners += winner is not None
            found.wrong += winner == ("b" if truth > 0 else "a") and truth != 0
            found.covered += test.interval[0] <= truth <= test.interval[1]
        found.pairs += others
        found.studies += 1
        found.winners += winners
        found.false_studies += winners > 0
    return found


def _luck(rng: np.random.Generator, seeds: int) -> np.ndarray:
    """[n] skewed draws with mean 0 and deviation 1."""
    shape = 4.0
    return np.asarray((rng.gamma(shape, 1.0, seeds) - shape) / math.sqrt(shape))


def _arm(rng: np.random.Generator, seeds: int, common: np.ndarray, design: Design) -> np.ndarray:
    own = _luck(rng, seeds)
    shared = common if design == "paired" else _luck(rng, seeds)
    return np.asarray(5.0 + SPREAD * (shared + own) / math.sqrt(2))


def allowed(rate: float, count: int) -> float:
    """The nominal rate and two Monte Carlo standard errors."""
    return rate + 2 * math.sqrt(rate * (1 - rate) / count)


def document_coverage(
    studies: int, documents: int, draws: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Coverage, and its Monte Carlo standard error: skewed differences, unequal lengths.

    A document's difference per token is a gamma draw; lengths are log-normal, and long documents
    differ less. The truth is the ratio of the expectations.
    """
    truth, covered = 0.01, 0
    for _ in range(studies):
        weight = np.ceil(rng.lognormal(6.0, 0.8, documents))
        skewed = (rng.gamma(2.0, 1.0, documents) - 2.0) / math.sqrt(2.0)
        difference = weight * (truth + 0.5 * skewed / np.sqrt(weight))
        found = document_interval(difference, weight, rng, draws=draws, level=LEVEL)
        assert found is not None
        covered += found[0] <= truth <= found[1]
    share = covered / studies
    return share, math.sqrt(LEVEL * (1 - LEVEL) / studies)


@pytest.mark.parametrize("design", ["paired", "unpaired"])
def test_equal_arms_have_few_winners(design: Design) -> None:
    found = studies(150, 3, design, 0.0, np.random.default_rng(1))
    assert found.winners / found.pairs <= allowed(1 - LEVEL, found.pairs)


@pytest.mark.parametrize("documents", [5, 12, 20])
def test_the_interval_of_few_documents_covers(documents: int) -> None:
    """With the linearised standard error and D - 1 degrees of freedom it is 90 to 92 %."""
    share, error = document_coverage(2_000, documents, 500, np.random.default_rng(documents))
    assert abs(share - LEVEL) <= 0.02 + error


def test_the_document_interval_covers() -> None:
    share, error = document_coverage(200, 60, 500, np.random.default_rng(2))
    assert share >= LEVEL - 0.02 - 2 * error


@pytest.mark.slow
@pytest.mark.parametrize("design", ["paired", "unpaired"])
@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_false_winners_and_coverage_over_seeds(design: Design, seeds: int) -> None:
    rng = np.random.default_rng([seeds, design == "paired"])
    equal = studies(3_000, seeds, design, 0.0, rng)
    assert equal.winners / equal.pairs <= allowed(1 - LEVEL, equal.pairs)
    assert equal.coverage >= LEVEL - 0.02
    # Welch's test is known to keep more than its level with two or three seeds an arm.
    assert equal.coverage <= (LEVEL + 0.02 if design == "paired" or seeds > 3 else 1.0)
    better = studies(1_000, seeds, design, -2 * SPREAD, rng)
    assert abs(better.coverage - equal.coverage) < 0.02
    assert better.winners > equal.winners / 3
    assert better.wrong <= allowed(0.025, better.pairs) * better.pairs


@pytest.mark.slow
@pytest.mark.parametrize("design", ["paired", "unpaired"])
def test_false_winners_among_several_arms(design: Design) -> None:
    found = studies(2_000, 5, design, 0.0, np.random.default_rng(3), others=4)
    assert found.false_studies / found.studies <= allowed(1 - LEVEL, found.studies)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [5, 6, 8, 12, 16, 20, 24, 29, 30, 60, 200, 500])
def test_coverage_over_documents(documents: int) -> None:
    # Those below 30 draw nothing, so that more studies cost little.
    studies = 2_500 if documents >= FEW else 10_000
    share, _ = document_coverage(studies, documents, 500, np.random.default_rng(documents))
    assert abs(share - LEVEL) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("documents", [2, 3, 4])
def test_coverage_over_very_few_documents(documents: int) -> None:
    """Two to four keep more than their level, by up to three points: never less."""
    share, _ = document_coverage(10_000, documents, 500, np.random.default_rng(documents))
    assert LEVEL - 0.02 <= share <= LEVEL + 0.03
