"""The guard of a resume: what has changed since the checkpoint, and whether the run may go on.

It reads the tags of the comparison checklist: what a rule guards there is guarded here, with the
effects of `checklist.ON_RESUME`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workbench.errors import Fault, RefusedError, UserError
from workbench.spec.checklist import FLAGGED_ON_RESUME, ON_RESUME, REFUSED_ON_RESUME, tag_of
from workbench.track.record import RunRecord, strict

# Requested settings that no recorded fact stands for.
_JUDGED_AS_ASKED = ("training.steps",)
# Facts that a run only has at its end, or that tell of its own resumes.
_NOT_OF_THE_START = (
    "effective.budget.finished",
    "effective.interval.",
    "effective.execution.recompilations",
    "effective.execution.graph_breaks",
    "effective.code.forced_resume",
    "effective.code.resumed_with",
    "effective.code.forked_from",
)


@dataclass(frozen=True)
class Difference:
    """A leaf of spec or record that was another one then."""

    path: str
    then: Any
    now: Any
    effect: Literal["refuse", "flag", "free"]

    def to_json(self) -> dict[str, Any]:
        """As the record keeps it."""
        return {"path": self.path, "then": self.then, "now": self.now, "effect": self.effect}


def changes(old: RunRecord, new: RunRecord, spec_then: Mapping[str, Any]) -> list[Difference]:
    """Every leaf that differs, in the order of the spec and then of the facts.

    Args:
        old: the record of the run that is to go on.
        new: the record that the present spec would have here, before it trains.
        spec_then: the resolved spec in the checkpoint.
    """
    found = []
    spec = dict(_leaves(spec_then)), dict(_leaves(new.spec))
    facts = dict(_facts(old)), dict(_facts(new))
    for then, now in (spec, facts):
        for path in dict.fromkeys([*then, *now]):
            if then.get(path) != now.get(path) and (effect := _effect(path, now.get(path))):
                found.append(Difference(path, then.get(path), now.get(path), effect))
    return found


def require_no_refusal(found: list[Difference], name: str, force: str | None) -> None:
    """Lets the run go on, or says all that has changed.

    Raises:
        RefusedError: a difference that decides numbers, and no reason to go on all the same.
        UserError: the reason is empty.
    """
    if force is not None and not force.strip():
        raise UserError.at("--force-resume", "going on against the guard needs its reason")
    refused = [one for one in found if one.effect == "refuse"]
    if not refused or force is not None:
        return
    allowed = "the spec and the environment of the checkpoint; --fork for a new run from it; "
    allowed += "--force-resume REASON, which stays in the record"
    faults = [
        Fault(
            f"{name}: {one.path}",
            f"changed since the checkpoint: {strict(one.then)!r} then, {strict(one.now)!r} now",
            None,
            allowed if one is refused[-1] else None,
        )
        for one in refused
    ]
    raise RefusedError(*faults)


def _effect(path: str, now: Any) -> Literal["refuse", "flag", "free"] | None:
    """What a difference of this leaf does; None: it is none."""
    tag = tag_of(path)
    if path.startswith(_NOT_OF_THE_START):
        return None
    if path.startswith("effective."):
        if tag.kind != "judged" or now is None:  # what is not known before it trains
            return None
    elif tag.kind == "requested" and path not in _JUDGED_AS_ASKED:
        return None  # what it became is compared
    if tag.rule is None:
        return "free"
    if path in FLAGGED_ON_RESUME:
        return "flag"
    return "refuse" if path in REFUSED_ON_RESUME else ON_RESUME[tag.rule]


def _leaves(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in spec.items():
        if isinstance(value, Mapping):
            yield from ((f"{section}.{leaf}", item) for leaf, item in value.items())
        else:
            yield section, value


def _facts(record: RunRecord) -> Iterator[tuple[str, Any]]:
    for part, values in record.effective.model_dump(mode="json").items():
        named = values if part == "evaluation" else {"": values}
        for name, leaves in named.items():
            prefix = f"effective.{part}.{name}." if name else f"effective.{part}."
            yield from ((prefix + leaf, value) for leaf, value in leaves.items())
