"""How numbers are written in reports: as many digits as mean something."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from workbench.compare.results import Number
from workbench.track.record import strict

_GB = " GB"
_COUNTS = ("parameters/total", "parameters/active", "tokens")


def written(name: str, number: Number, nll: Number | None = None) -> tuple[str, str, str, str]:
    """First value, second value, their difference, the interval over documents; `-` for none.

    Args:
        nll: that of the same evaluation set, by whose interval a number without one is written
            that is made of the same scores.
    """
    digits = decimals(number)
    if number.documents is None and nll is not None and nll.documents is not None:
        digits = _decimals_of_kin(name, number, nll, digits)
    known = [abs(value) for value in (number.a, number.b) if value is not None]
    size = max(filter(math.isfinite, known), default=0.0)
    values = [write(name, value, digits, size=size) for value in (number.a, number.b)]
    difference = write(name, number.difference, digits, size=size, sign=True)
    interval = "-"
    if number.documents:
        interval = write_interval(number.documents.interval, digits)
    return values[0], values[1], difference, interval


def write(
    name: str,
    value: float | None,
    digits: int = 4,
    *,
    size: float = 0.0,
    sign: bool = False,
    more: int = 0,
) -> str:
    """One value of the number `name`; `size` is that of the values it stands beside, `more` the
    decimals beyond those that it would have."""
    if value is None:
        return "-"
    plus = "+" if sign else ""
    if not math.isfinite(value):
        return str(strict(value))
    if name in _COUNTS:
        return _unsigned_zero(f"{round(value):{plus},}")
    if name == "peak_memory_bytes":
        return _unsigned_zero(f"{value / 1e9:{plus}.{2 + more}f} GB")
    if name == "tokens_per_s":
        return _unsigned_zero(f"{value:{plus},.{(0 if size >= 100 else 2) + more}f}")
    if name.endswith("/perplexity"):
        return _unsigned_zero(f"{value:{plus},.{min(digits, 2 if size < 1000 else 0) + more}f}")
    return _unsigned_zero(f"{value:{plus}.{digits + more}f}")


def decimals_more(name: str, a: float, b: float, digits: int, size: float) -> int:
    """1 where b - a as it is written is not the difference of both as they are written (231.4 and
    235.6 are 231 and 236, and 4.2 apart), so that it needs a decimal of its own; else 0."""
    if not all(map(math.isfinite, (a, b, b - a))) or name in _COUNTS:
        return 0
    first, second, between = (
        Decimal(write(name, one, digits, size=size).removesuffix(" GB").replace(",", ""))
        for one in (a, b, b - a)
    )
    return int(second - first != between)


def write_interval(interval: tuple[float, float], digits: int = 4) -> str:
    """An interval with its ends signed."""
    low, high = (_unsigned_zero(f"{end:+.{digits}f}") for end in interval)
    return f"[{low}, {high}]"


def with_spread(mean: str, spread: str) -> str:
    """Both as `write` gives them, their unit once."""
    return f"{mean.removesuffix(_GB)} ± {spread}"


def between(low: str, high: str) -> str:
    """The interval between two ends as `write` gives them, their unit once."""
    unit = _GB if low.endswith(_GB) else ""
    return f"[{low.removesuffix(_GB)}, {high.removesuffix(_GB)}]{unit}"


def _unsigned_zero(written: str) -> str:
    """A number that is zero to the digits shown has no sign."""
    return written if re.search("[1-9]", written) else written.lstrip("+-")


def _decimals_of_kin(name: str, number: Number, nll: Number, otherwise: int) -> int:
    """Decimals of the NLL over clean documents, and of a perplexity, whose uncertainty is that of
    the NLL times itself."""
    kind = name.rpartition("/")[2]
    if kind == "clean_nll":
        return decimals(nll)
    known = [one for one in (number.a, number.b) if one is not None and math.isfinite(one)]
    if kind != "perplexity" or not known or nll.documents is None:
        return otherwise
    half = (nll.documents.interval[1] - nll.documents.interval[0]) / 2 * max(known)
    return otherwise if half <= 0 else min(2, max(0, 1 - math.floor(math.log10(half))))


def decimals(number: Number) -> int:
    """Decimals that show two digits of the interval's half width; four without an interval."""
    if number.documents is None:
        return 4
    half = (number.documents.interval[1] - number.documents.interval[0]) / 2
    return 4 if half <= 0 else min(6, max(3, 1 - math.floor(math.log10(half))))
