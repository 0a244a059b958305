"""Judges specs and runs before compute is spent, by all that can be known of them now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.compare.evidence import check_record
from workbench.compare.facts import facts_of_record, facts_of_spec
from workbench.compare.measurements import read_run
from workbench.compare.pair import (
    Side,
    compare_runs,
    distinct,
    document,
    exit_of,
    not_finite,
    points,
    require_ended,
)
from workbench.compare.rules import Judgement, Verdict, check_claims, judge
from workbench.spec.checklist import Claim
from workbench.spec.foreseen import Foreseen
from workbench.spec.run import RunSpec


@dataclass(frozen=True)
class PlannedRun:
    """A spec that has not run: the file it was read from, and what is foreseen of its run."""

    spec: RunSpec
    path: str
    foreseen: Foreseen

    @property
    def name(self) -> str:
        """The name that its run would have."""
        return self.spec.name


@dataclass(frozen=True)
class Check:
    """The verdict on two specs, two runs, or one of each, from what can be known now.

    `paths` are the specs' files, None of a run; `at` is the token count that was looked at.
    """

    names: tuple[str, str]
    paths: tuple[str | None, str | None]
    judgement: Judgement
    asked: tuple[Claim, ...]
    at: int | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the claims asked for."""
        return self.judgement.verdict(self.asked)

    def exit_code(self, strict: bool = False) -> int:
        """0 comparable or flagged, 1 flagged with `strict`, 3 refused."""
        return exit_of(self.verdict, strict)

    def to_json(self) -> dict[str, Any]:
        """The document that `wb check --json` prints; strict JSON."""
        found = document(self.judgement, self.asked, self.names)
        return found | {"at": self.at, "results": None, "report": None}


def check(
    a: PlannedRun | Side,
    b: PlannedRun | Side,
    *,
    treatment: Sequence[str] = (),
    allow: Mapping[str, str] | None = None,
    claims: Iterable[str] = ("nll",),
) -> Check:
    """Judges two runs, two specs, or one of each, as a comparison of them would.

    They are looked at where the comparison would be made: at the last token count at which both
    were, or will be, evaluated. What only a run will show is not yet known, and has no effect.

    Raises:
        UserError: an option names nothing; a run is still going, of a newer version or the same
            twice, or its files contradict one another.
    """
    asked = check_claims(claims)
    if isinstance(a, Side) and isinstance(b, Side):
        compared = compare_runs(
            a.folder,
            b.folder,
            treatment=treatment,
            allow=allow,
            claims=asked,
            statuses=(a.status, b.status),
        )
        return Check(compared.names, (None, None), compared.judgement, asked, compared.at)
    for one in (a, b):
        if isinstance(one, Side):
            require_ended(one)
            check_record(one.folder, one.record)
    at = _last_common(a, b)
    judgement = judge(
        _facts(a, at),
        _facts(b, at),
        treatment=treatment,
        allow=allow,
        planned=(isinstance(a, PlannedRun), isinstance(b, PlannedRun)),
    )
    paths = _path(a), _path(b)
    return Check(distinct(a.name, b.name), paths, judgement, asked, at)


def check_specs(
    a: RunSpec,
    b: RunSpec,
    foreseen_a: Foreseen,
    foreseen_b: Foreseen,
    *,
    paths: tuple[str, str] | None = None,
    **options: Any,
) -> Check:
    """Judges two specs by what can be known of them before a run; `options` as `check` has them.

    Args:
        foreseen_a: what is foreseen of the first run.
        foreseen_b: the same of the second.
        paths: the files they were read from, for the commands that are suggested.

    Raises:
        UserError: an option names nothing.
    """
    first, second = paths or (a.name, b.name)
    return check(PlannedRun(a, first, foreseen_a), PlannedRun(b, second, foreseen_b), **options)


def _last_common(a: PlannedRun | Side, b: PlannedRun | Side) -> int | None:
    """The last point of both; of one alone, where nobody knows those of the other."""
    known = [found for one in (a, b) if (found := _points(one)) is not None]
    return max(set.intersection(*known), default=None) if known else None


def _points(one: PlannedRun | Side) -> set[int] | None:
    if isinstance(one, Side):
        return set(points(one.record))
    return None if one.foreseen.points is None else set(one.foreseen.points)


def _facts(one: PlannedRun | Side, at: int | None) -> dict[str, Any]:
    if isinstance(one, PlannedRun):
        return facts_of_spec(one.spec, one.foreseen, at)
    # Its status now: a run that died still says RUNNING.
    record = one.record.model_copy(update={"status": one.status})
    if at is None:
        return facts_of_record(record, None)
    unknown = not_finite(read_run(one.folder, record), at)
    return facts_of_record(record, points(record)[at]) | unknown


def _path(one: PlannedRun | Side) -> str | None:
    return one.path if isinstance(one, PlannedRun) else None
