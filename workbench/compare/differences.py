"""`wb diff`: the values in which two specs or two runs differ, each with the rule that judges it.

Nothing is judged here: no value follows another, and what is free is shown as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.compare.facts import Facts, equal_in_effect, known_at, same, value_of
from workbench.compare.words import show_pair
from workbench.spec.checklist import RULESET_VERSION, tag_of
from workbench.track.record import strict

_ABSENT = "(not there)"


@dataclass(frozen=True)
class Difference:
    """A value that is not the same in both; `in_a` and `in_b` say where there is one."""

    path: str
    a: Any
    b: Any
    in_a: bool
    in_b: bool
    judged_by: str

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        return {
            "path": self.path,
            "a": strict(self.a),
            "b": strict(self.b),
            "in": [side for side, there in (("a", self.in_a), ("b", self.in_b)) if there],
            "rule": tag_of(self.path).rule,
            "judged_by": self.judged_by,
        }


def differences(a: Facts, b: Facts, *, spec_only: bool) -> list[Difference]:
    """Every value that differs, in the order of the spec and then of what ran.

    Args:
        a: the facts of a run, or the leaves of a resolved spec.
        b: the same of the other.
        spec_only: leave out what ran, where one of the two has not run.
    """
    found = []
    for path in dict.fromkeys((*a, *b)):
        if spec_only and path.startswith("effective."):
            continue
        (in_a, first), (in_b, second) = value_of(a, path), value_of(b, path)
        if in_a == in_b and same(first, second):
            continue
        found.append(Difference(path, first, second, in_a, in_b, _judged_by(a, b, path)))
    return found


def document(
    names: tuple[str, str], found: list[Difference], ran: bool, equal: int
) -> dict[str, Any]:
    """The document that `wb diff --json` prints."""
    return {
        "a": names[0],
        "b": names[1],
        "compared": "specs and what ran" if ran else "specs",
        "differences": [one.to_json() for one in found],
        "equal": equal,
        "ruleset": RULESET_VERSION,
    }


def render(names: tuple[str, str], found: list[Difference], ran: bool, equal: int) -> str:
    """The differences as aligned columns."""
    what = "settings and facts" if ran else "settings"
    if not found:
        return f"{names[0]} and {names[1]}: all {equal} {what} are equal"
    rows = [("value", names[0], names[1], "judged by")]
    for one in found:
        shown = list(show_pair(one.a, one.b, 30))
        for index, there in enumerate((one.in_a, one.in_b)):
            if not there:
                shown[index] = _ABSENT
        rows.append((one.path, shown[0], shown[1], one.judged_by))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    count = f"{len(found)} of {len(found) + equal} {what} differ"
    return "\n".join([count, "", *lines, "", "wb check says what that does; wb explain RULE why"])


def leaves_of_spec(document: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a resolved spec as it is dumped."""
    found: dict[str, Any] = {}
    for section, value in document.items():
        if isinstance(value, Mapping):
            found |= {f"{section}.{leaf}": item for leaf, item in value.items()}
        else:
            found[section] = value
    return found


def _judged_by(a: Facts, b: Facts, path: str) -> str:
    tag = tag_of(path)
    if tag.kind == "free":
        return "free"
    if tag.kind == "requested":
        return f"{tag.rule}, by what it becomes"
    both = known_at(a, path) and known_at(b, path)
    same_run = both and equal_in_effect(a, b, path)
    return f"{tag.rule}, the same in effect" if same_run else str(tag.rule)
