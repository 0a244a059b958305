"""Statistics over seeds: differences of two arms, their t intervals and tests, and their power.

Sizes: n seeds of each arm. The tests are those of `scipy.stats` and held to it by tests; here is
what they need of it, on the distributions of `scipy.special`: `scipy.stats` takes longer to load
than two arms of ten runs take to compare. No bootstrap: of two to five values its 95 % interval
covers 50 to 84 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from workbench.compare.stats import LEVEL, Floats

Design = Literal["paired", "unpaired"]

POWER = 0.8
MOST_SEEDS = 10_000  # beyond which the number of seeds needed is not looked for


@dataclass(frozen=True)
class SeedTest:
    """The difference of two arms over their seeds, second minus first.

    `n` is the seeds of each arm, `interval` of this `level`, `p` two-sided and not adjusted,
    `spread` the standard deviation that the difference is measured by: of the paired differences,
    or pooled over the arms. `lower`, `higher` count the pairs (of all pairs of seeds, where they
    are not paired) in which the second arm is below and above.
    """

    design: Design
    n: tuple[int, int]
    difference: float
    interval: tuple[float, float]
    level: float
    p: float
    df: float
    spread: float
    lower: int
    higher: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def effect(self) -> float:
        """The difference in units of the seed spread."""
        return self.difference / self.spread

    @property
    def standard_error(self) -> float:
        """Of the difference."""
        half = (self.interval[1] - self.interval[0]) / 2
        return half / _quantile(self.df, self.level)


def seed_test(
    a: Sequence[float] | Floats, b: Sequence[float] | Floats, design: Design, level: float = LEVEL
) -> SeedTest | str:
    """The t test of two arms: over paired differences, or Welch's.

    Args:
        a: [n] one value for each seed of the first arm.
        b: [n] the same of the second; where the design is paired, in the order of the same seeds.

    Returns:
        The test; or, in words, why there is none: one seed, values that are not finite, or a
        spread of zero, from which no noise can be estimated.
    """
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if min(len(first), len(second)) < 2:
        return "one seed says nothing about the spread between seeds"
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return "not every seed's value is finite"
    if design == "paired":
        assert len(first) == len(second), "paired arms have the same seeds"
        differences = second - first
        if _is_constant(differences, first, second):
            return "the difference is the same under every seed, so that its noise is not known"
        spread, signs = float(np.std(differences, ddof=1)), differences
        centre, error, df = differences.mean(), spread / math.sqrt(len(first)), len(first) - 1.0
    else:
        if _is_constant(first, first) and _is_constant(second, second):
            return "the value is the same under every seed, so that its noise is not known"
        centre, (error, df) = second.mean() - first.mean(), _welch(first, second)
        pooled = (len(first) - 1) * np.var(first, ddof=1) + (len(second) - 1) * np.var(
            second, ddof=1
        )
        spread = float(math.sqrt(pooled / (len(first) + len(second) - 2)))
        signs = (second[:, None] - first[None, :]).ravel()
    from scipy import special

    half = _quantile(df, level) * error
    return SeedTest(
        design,
        (len(first), len(second)),
        float(second.mean() - first.mean()),
        (float(centre - half), float(centre + half)),
        level,
        float(2 * special.stdtr(df, -abs(centre) / error)),
        df,
        spread,
        int((signs < 0).sum()),
        int((signs > 0).sum()),
    )


def _welch(first: Floats, second: Floats) -> tuple[float, float]:
    """The standard error of a difference of means, and its degrees of freedom (Welch 1947)."""
    each = [float(np.var(one, ddof=1)) / len(one) for one in (first, second)]
    df = sum(each) ** 2 / sum(
        part**2 / (len(one) - 1) for part, one in zip(each, (first, second), strict=True)
    )
    return math.sqrt(sum(each)), df


def _quantile(df: float, level: float) -> float:
    """Of Student's t: how many standard errors an interval of this level reaches to each side."""
    from scipy import special

    return float(special.stdtrit(df, (1 + level) / 2))


def bands(a: Floats, b: Floats, design: Design, level: float = LEVEL) -> Floats:
    """Pointwise t intervals of the difference at many points.

    Args:
        a: [P, n] values of the first arm at P points.
        b: [P, n] of the second; paired: in the order of the same seeds.

    Returns:
        [P, 2] the ends; NaN where there is no interval.
    """
    rows = [seed_test(x, y, design, level) for x, y in zip(a, b, strict=True)]
    none = (math.nan, math.nan)
    return np.array(
        [row.interval if isinstance(row, SeedTest) else none for row in rows], np.float64
    ).reshape(-1, 2)


def holm(p: Sequence[float], family: int | None = None) -> list[float]:
    """Holm's step-down adjustment of p values (Holm 1979), in their order.

    Args:
        family: how many tests there are in all; those not given count as if their p were 1.
    """
    size = max(family or 0, len(p))
    adjusted = [0.0] * len(p)
    most = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        most = max(most, min(1.0, (size - rank) * p[index]))
        adjusted[index] = most
    return adjusted


def bonferroni_level(pairs: int, level: float = LEVEL) -> float:
    """The level of each interval at which all of them together cover with `level` or more."""
    return 1 - (1 - level) / max(1, pairs)


def power_of(
    difference: float, spread: float, n: int, design: Design, level: float = LEVEL
) -> float:
    """The probability that a two-sided t test of this level finds a true difference.

    The statistic follows the noncentral t distribution (Cohen 1988, chapter 2): paired with n - 1
    degrees of freedom and noncentrality sqrt(n) d / s; two arms of n seeds each and one spread with
    2 n - 2 and sqrt(n / 2) d / s.

    Args:
        spread: s, of the paired differences, or of the seeds within an arm.
        n: seeds of each arm, 2 or more.
    """
    from scipy import stats

    df = n - 1 if design == "paired" else 2 * n - 2
    centre = abs(difference) / spread * math.sqrt(n if design == "paired" else n / 2)
    critical = stats.t.ppf((1 + level) / 2, df)
    above = float(stats.nct.sf(critical, df, centre))
    below = float(stats.nct.cdf(-critical, df, centre))
    # Where a tail vanishes, scipy's noncentral t may be nan.
    above = above if math.isfinite(above) else float(centre > critical)
    return above + (below if math.isfinite(below) else 0.0)


def detectable(
    spread: float, n: int, design: Design, level: float = LEVEL, power: float = POWER
) -> float:
    """The smallest true difference that n seeds an arm find with this power."""
    from scipy import optimize

    def lacking(units: float) -> float:
        return power_of(units, 1.0, n, design, level) - power

    high = 1.0
    while lacking(high) < 0:
        high *= 2
    return spread * float(optimize.brentq(lacking, 0.0, high, xtol=1e-9))


def seeds_needed(
    difference: float, spread: float, design: Design, level: float = LEVEL, power: float = POWER
) -> int | None:
    """The fewest seeds an arm that find a true difference with this power.

    None: more than `MOST_SEEDS`.
    """
    if difference == 0 or power_of(difference, spread, MOST_SEEDS, design, level) < power:
        return None
    low, high = 1, 2  # power grows with n: `low` is too few, `high` enough
    while power_of(difference, spread, high, design, level) < power:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if power_of(difference, spread, middle, design, level) < power:
            low = middle
        else:
            high = middle
    return high


def _is_constant(values: Floats, *sizes: Floats) -> bool:
    """Whether values differ by no more than rounding of the numbers they come from."""
    largest = max(float(np.abs(one).max()) for one in sizes)
    return float(np.ptp(values)) <= float(8 * np.finfo(np.float64).eps) * largest
