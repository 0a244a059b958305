"""Statistics over seeds: published values, values by hand, and what has no interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from workbench.compare.seeds import (
    Design,
    SeedTest,
    bands,
    bonferroni_level,
    detectable,
    holm,
    power_of,
    seed_test,
    seeds_needed,
)


def found_of(a: list[float], b: list[float], design: Design) -> SeedTest:
    found = seed_test(a, b, design)
    assert isinstance(found, SeedTest)
    return found


@pytest.mark.parametrize(
    ("first", "second", "difference", "interval"),
    [
        ((7.596686, 7.536167), (7.530082, 7.492290), -0.049156, (-0.194, 0.095)),
        ((7.586145, 7.536471), (7.726971, 7.541488), -0.117579, (-0.980, 0.745)),
    ],
)
def test_two_seeds_of_two_pretrained_arms(
    first: tuple[float, float],
    second: tuple[float, float],
    difference: float,
    interval: tuple[float, float],
) -> None:
    """Each tuple is one seed: the NLL of the first arm, and of the second."""
    found = found_of([first[0], second[0]], [first[1], second[1]], "paired")
    assert found.difference == pytest.approx(difference, abs=1e-6)
    assert found.interval == pytest.approx(interval, abs=1e-3)
    assert not found.excludes_zero
    assert (found.lower, found.higher) == (2, 0)


@pytest.mark.parametrize("design", ["paired", "unpaired"])
@pytest.mark.parametrize("level", [0.95, 1 - 0.05 / 9])
def test_the_tests_are_those_of_scipy(design: Design, level: float) -> None:
    """To the last digits, however far the values lie from each other."""
    rng = np.random.default_rng(8)
    for n in (2, 3, 5, 10):
        for shift, spread in ((0.0, 1e-6), (1e-3, 0.02), (3.0, 1.0), (-40.0, 0.001)):
            a = 5 + spread * rng.standard_normal(n)
            b = 5 + shift + 3 * spread * rng.standard_normal(n)
            found = seed_test(a, b, design, level)
            assert isinstance(found, SeedTest)
            if design == "paired":
                expected = stats.ttest_rel(b, a)
            else:
                expected = stats.ttest_ind(b, a, equal_var=False)
            assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
            assert found.df == pytest.approx(expected.df, rel=1e-9)
            interval = expected.confidence_interval(level)
            assert found.interval == pytest.approx((interval.low, interval.high), rel=1e-9)
            quantile = stats.t.ppf((1 + level) / 2, expected.df)
            half = (interval.high - interval.low) / 2
            assert found.standard_error == pytest.approx(half / quantile, rel=1e-9)


def test_paired_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, deviation 1, t = 2 sqrt(3); t(0.975, 2) = 4.302653 (tables)."""
    found = found_of([10, 20, 30], [11, 22, 33], "paired")
    half = 4.302653 / math.sqrt(3)
    assert found.interval == pytest.approx((2 - half, 2 + half), abs=1e-6)
    assert (found.spread, found.effect, found.df) == (1.0, 2.0, 2)
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    # Of two degrees of freedom p has a closed form: 1 - t / sqrt(2 + t^2).
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))


# Student (1908): additional hours of sleep of ten patients under two soporifics.
SLEEP_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_published_paired_test() -> None:
    """The `sleep` data of R: t.test(paired) gives p = 0.002833 and 0.7001142 to 2.4598858."""
    found = found_of(SLEEP_1, SLEEP_2, "paired")
    assert found.difference == pytest.approx(1.58)
    assert found.p == pytest.approx(0.002833, abs=5e-7)
    assert found.interval == pytest.approx((0.7001142, 2.4598858), abs=5e-8)


def test_published_welch_test() -> None:
    """The `sleep` data of R: t.test gives df = 17.776, p = 0.07939, -0.2054832 to 3.3654832."""
    found = found_of(SLEEP_1, SLEEP_2, "unpaired")
    assert found.df == pytest.approx(17.776, abs=5e-4)
    assert found.p == pytest.approx(0.07939, abs=5e-6)
    assert found.interval == pytest.approx((-0.2054832, 3.3654832), abs=5e-8)


def test_pairing_removes_what_the_seed_does_to_both_arms() -> None:
    luck = np.random.default_rng(0).normal(0, 1, 5)
    noise = np.random.default_rng(1).normal(0, 0.01, 5)
    a, b = luck.tolist(), (luck + 0.1 + noise).tolist()
    assert found_of(a, b, "paired").excludes_zero
    assert not found_of(a, b, "unpaired").excludes_zero


def test_exchanging_the_arms_turns_everything_round() -> None:
    a, b = [1.0, 2.0, 4.0], [2.0, 2.5, 4.1]
    for design in ("paired", "unpaired"):
        there, back = found_of(a, b, design), found_of(b, a, design)  # type: ignore[arg-type]
        assert back.interval == pytest.approx((-there.interval[1], -there.interval[0]))
        assert back.p == pytest.approx(there.p)
        assert (back.lower, back.higher) == (there.higher, there.lower)


@pytest.mark.parametrize(
    ("a", "b", "design", "words"),
    [
        ([1.0], [2.0], "paired", "one seed"),
        ([1.0], [2.0, 3.0], "unpaired", "one seed"),
        ([1.0, 2.0], [2.0, 3.0], "paired", "the same under every seed"),
        ([0.1, 0.2, 0.3], [0.2, 0.3, 0.4], "paired", "the same under every seed"),  # but rounding
        ([1.0, 1.0], [2.0, 2.0], "unpaired", "the same under every seed"),
        ([1.0, math.nan], [2.0, 3.0], "paired", "not every seed's value is finite"),
        ([1.0, 2.0], [math.inf, 3.0], "unpaired", "not every seed's value is finite"),
    ],
)
def test_no_interval_without_a_spread(
    a: list[float], b: list[float], design: Design, words: str
) -> None:
    found = seed_test(a, b, design)
    assert isinstance(found, str)
    assert words in found


def test_bands_are_the_interval_at_each_point() -> None:
    a = np.array([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]])
    b = np.array([[2.0, 2.5, 4.1], [1.0, 1.0, 1.0]])
    found = bands(a, b, "paired", 0.9)
    first = seed_test([1, 2, 4], [2, 2.5, 4.1], "paired", 0.9)
    assert isinstance(first, SeedTest)
    assert found[0] == pytest.approx(first.interval)
    assert np.isnan(found[1]).all()
    assert bands(np.zeros((0, 3)), np.zeros((0, 3)), "paired").shape == (0, 2)


def test_holm_by_hand_and_published() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    # Wright (1992), table 1, as in R's p.adjust examples.
    raw = [0.001, 0.010, 0.012, 0.050]
    assert holm(raw) == pytest.approx([0.004, 0.030, 0.030, 0.050])
    assert holm([0.02], family=3) == pytest.approx([0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_bonferroni() -> None:
    assert bonferroni_level(1) == pytest.approx(0.95)
    assert bonferroni_level(5) == pytest.approx(0.99)
    assert bonferroni_level(2, 0.9) == pytest.approx(0.95)


def test_published_power() -> None:
    """Cohen's medium effect, d = 0.5: 64 in each of two groups, 34 pairs (G*Power 3.1)."""
    assert power_of(0.5, 1, 64, "unpaired") == pytest.approx(0.8014596, abs=1e-6)
    assert power_of(0.5, 1, 34, "paired") == pytest.approx(0.8077775, abs=1e-6)
    assert seeds_needed(0.5, 1, "unpaired") == 64
    assert seeds_needed(0.5, 1, "paired") == 34


def test_power_is_what_tests_of_draws_find() -> None:
    rng = np.random.default_rng(3)
    a = rng.normal(0, 1, (4_000, 5))
    b = a + rng.normal(1.2, 1, (4_000, 5))
    ends = bands(a[:1_000], b[:1_000], "paired")
    found = float(((ends[:, 0] > 0) | (ends[:, 1] < 0)).mean())
    expected = power_of(1.2, 1, 5, "paired")
    assert found == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / 1_000))


@pytest.mark.parametrize("design", ["paired", "unpaired"])
@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_smallest_detectable_difference_has_the_power_asked_for(design: Design, n: int) -> None:
    smallest = detectable(0.01, n, design)
    assert power_of(smallest, 0.01, n, design) == pytest.approx(0.8, abs=1e-6)
    assert seeds_needed(smallest * 1.001, 0.01, design) == n


def test_seeds_needed_ends() -> None:
    assert seeds_needed(0.0, 1, "paired") is None
    assert seeds_needed(1e-6, 1, "paired") is None
    assert seeds_needed(1e6, 1, "paired") == 2
