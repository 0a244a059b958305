"""What the seeds at hand can find: the smallest detectable difference, and the seeds one needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.compare.seeds import (
    MOST_SEEDS,
    POWER,
    Design,
    SeedTest,
    detectable,
    power_of,
    seeds_needed,
)


@dataclass(frozen=True)
class Power:
    """From the spread over seeds that was seen: what these seeds find in four of five cases.

    `needed` is the seeds an arm that find `difference` (None: more than 10,000); `now` is the
    power that these seeds have for it. The spread is itself an estimate, of few seeds a rough one.
    """

    design: Design
    n: int
    spread: float
    level: float
    smallest: float
    difference: float
    now: float | None
    needed: int | None

    def sentence(self, unit: str, digits: int, asked: bool = False) -> str:
        """Both answers in words; a difference that was asked for is written as it was given."""
        sought = abs(self.difference)
        written = f"{sought:.6g}" if asked else f"{sought:.{digits}f}"
        seeds = seeds_written(self.needed)
        return (
            f"With {self.n} seeds an arm and this spread ({self.spread:.2g} {unit}) the smallest"
            f" difference found with {POWER:.0%} power is {self.smallest:.{digits}f} {unit}; one of"
            f" {written} takes {seeds} seeds an arm."
        ).replace("%", " %")

    def to_json(self) -> dict[str, Any]:
        """For `wb compare --json`."""
        return {
            "power": POWER,
            "seeds": self.n,
            "spread": self.spread,
            "smallest_difference": self.smallest,
            "difference": self.difference,
            "power_now": self.now,
            "seeds_needed": self.needed,
        }


def seeds_written(needed: int | None) -> str:
    """So many seeds in words, rounded up to two digits: the spread that they come from is known to
    no more."""
    if needed is None:
        return f"more than {MOST_SEEDS:,}"
    unit = 10 ** max(0, len(str(needed)) - 2)
    return f"about {-(-needed // unit) * unit:,}"


def power_from(test: SeedTest, difference: float | None = None) -> Power:
    """The power of a test like this one.

    Args:
        difference: the true difference to be found; by default the one that was seen.
    """
    n = min(test.n)
    sought = test.difference if difference is None else difference
    return Power(
        test.design,
        n,
        test.spread,
        test.level,
        detectable(test.spread, n, test.design, test.level),
        sought,
        power_of(sought, test.spread, n, test.design, test.level),
        seeds_needed(sought, test.spread, test.design, test.level),
    )
