"""Compares two runs: facts, judgement, and the numbers that it permits."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.compare.evidence import check_record
from workbench.compare.facts import EVALUATION, FINITE, Facts, facts_of_record
from workbench.compare.held_out import SMOKE_TEST
from workbench.compare.measurements import RunData, read_run
from workbench.compare.results import Results, evaluated_sets, measured_at, results_of
from workbench.compare.rules import Judgement, Ruling, Verdict, check_claims, judge
from workbench.compare.words import remedy, why
from workbench.errors import UserError
from workbench.spec.checklist import CLAIMS, Claim
from workbench.spec.held_out import is_smoke_test
from workbench.track.record import SCHEMA_VERSION, Point, RunRecord, Status, read_record, strict


@dataclass(frozen=True)
class Side:
    """One run of a comparison."""

    name: str
    folder: Path
    record: RunRecord
    status: Status


@dataclass(frozen=True)
class Comparison:
    """The verdict on two runs, and their numbers where the verdict permits any.

    `at` is the token count compared, None when the runs have no evaluation point in common;
    `common` are the token counts where both were evaluated.
    """

    a: Side
    b: Side
    judgement: Judgement
    asked: tuple[Claim, ...]
    facts: tuple[Facts, Facts]
    at: int | None
    at_given: bool
    common: tuple[int, ...]
    results: Results | None
    metrics: tuple[Mapping[str, Sequence[float | None]], ...] = field(default=(), repr=False)
    report: Path | None = None

    @property
    def names(self) -> tuple[str, str]:
        """What the two sides are called."""
        return self.a.name, self.b.name

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the claims asked for."""
        return self.judgement.verdict(self.asked)

    @property
    def only(self) -> tuple[list[int], list[int]]:
        """Evaluation points (tokens) that one run has and the other has not."""
        return tuple(  # type: ignore[return-value]
            sorted({point.tokens for point in side.record.points} - {0, *self.common})
            for side in (self.a, self.b)
        )

    @property
    def key(self) -> str:
        """SHA-256 of what was compared and how; the report of another key is never replaced."""
        what = {
            "runs": [self.a.record.id, self.b.record.id],
            "treatment": [] if self.judgement.inferred else sorted(self.judgement.treatment),
            "allow": self.judgement.allow,
            "at": self.at if self.at_given else None,
            "claims": list(self.asked),
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def exit_code(self, strict: bool = False) -> int:
        """0 comparable or flagged, 1 flagged with `strict`, 3 refused."""
        return exit_of(self.verdict, strict)

    def to_json(self) -> dict[str, Any]:
        """The document that `wb compare --json` prints; strict JSON."""
        numbers = None
        if self.results is not None:
            numbers = {name: number.to_json() for name, number in self.results.numbers.items()}
        found = document(self.judgement, self.asked, self.names)
        found |= {"at": self.at, "results": strict(numbers)}
        return found | {"report": str(self.report) if self.report else None}

    def _repr_html_(self) -> str:
        from workbench.compare import page, shown

        return page.fragment(shown.of_pair(self))

    def _repr_markdown_(self) -> str:
        from workbench.compare import markdown, shown

        return markdown.render(shown.of_pair(self))


def compare_runs(
    a: Path | str,
    b: Path | str,
    *,
    treatment: Sequence[str] = (),
    allow: Mapping[str, str] | None = None,
    claims: Iterable[str] = ("nll",),
    at: int | None = None,
    names: tuple[str, str] | None = None,
    statuses: tuple[Status, Status] | None = None,
) -> Comparison:
    """Compares two finished runs.

    Args:
        a: the folder of the first run; differences are second minus first.
        b: the folder of the second run.
        treatment: what is meant to differ: spec fields or sections, `rule:X` for a whole rule.
        allow: rule -> reason; turns a refusal by that rule into a flag.
        claims: what the comparison is used for; these alone set the verdict.
        at: the token count to compare at; by default the last where both were evaluated.
        names: what to call the two; by default their run names.
        statuses: their statuses now, where the caller knows better than the record (a run that
            died still says RUNNING).

    Raises:
        UserError: a folder holds no run record, a run is compared with itself or still going, an
            option names nothing, `at` is no common point, or record, metrics and scores are damaged
            or contradict one another.
    """
    asked = check_claims(claims)
    folders = Path(a), Path(b)
    records = [read_record(folder) for folder in folders]
    given = statuses or (records[0].status, records[1].status)
    labels = names or distinct(records[0].name, records[1].name)
    first, second = (
        Side(name, folder, record.model_copy(update={"status": status}), status)
        for name, folder, record, status in zip(labels, folders, records, given, strict=True)
    )
    if first.record.id == second.record.id or folders[0].resolve() == folders[1].resolve():
        message = "this is the same run twice"
        raise UserError.at(str(folders[1]), message, second.record.id, "another run")
    for side in (first, second):
        require_ended(side)
    for folder, record in zip(folders, records, strict=True):
        check_record(folder, record)

    found = [points(side.record) for side in (first, second)]
    common = tuple(sorted(found[0].keys() & found[1].keys()))
    if at is not None and at not in common:
        allowed = ", ".join(map(str, common)) or "the runs have no evaluation point in common"
        raise UserError.at("--at", "both runs must have been evaluated there", at, allowed)
    tokens = at if at is not None else max(common, default=None)
    facts = (
        facts_of_record(first.record, found[0][tokens] if tokens else None),
        facts_of_record(second.record, found[1][tokens] if tokens else None),
    )
    judgement = judge(*facts, treatment=treatment, allow=allow)

    comparison = Comparison(
        first, second, judgement, asked, facts, tokens, at is not None, common, None
    )
    a_data, b_data = (read_run(side.folder, side.record) for side in (first, second))
    # A pair that is refused for everything it was asked for has no numbers at all.
    if tokens is None or not _permits(judgement, asked):
        return comparison
    unknown = _not_finite(a_data, b_data, tokens)
    if any(unknown):
        facts = {**facts[0], **unknown[0]}, {**facts[1], **unknown[1]}
        judgement = judge(*facts, treatment=treatment, allow=allow)
        comparison = replace(comparison, judgement=judgement, facts=facts)
        if not _permits(judgement, asked):
            return comparison
    blanked = refusing(judgement)
    if any(is_smoke_test(record.spec) for record in records):  # whatever is allowed
        blanked |= dict.fromkeys(("nll", "bpb"), SMOKE_TEST)
    results = results_of(a_data, b_data, tokens, blanked)
    return replace(comparison, results=results, metrics=(a_data.metrics, b_data.metrics))


def refusing(judgement: Judgement) -> dict[Claim, str]:
    """The refused claims, each with the names of the rules that refuse it."""
    return {
        claim: ", ".join(r.rule for r in judgement.rules if r.effects[claim] == "refuse")
        for claim in CLAIMS
        if judgement.claims[claim] == "refused"
    }


def document(
    judgement: Judgement, asked: Sequence[Claim], names: tuple[str, str]
) -> dict[str, Any]:
    """What a comparison and a check print as JSON alike."""
    found: dict[str, Any] = {
        "verdict": judgement.verdict(asked),
        "claims": dict(judgement.claims),
        "rules": [_ruling(ruling, judgement, names) for ruling in judgement.rules],
        "ruleset": judgement.ruleset,
        "treatment": {"names": list(judgement.treatment), "inferred": judgement.inferred},
        "asked": list(asked),
    }
    if any(judgement.planned):
        unknown = judgement.with_outcome("not yet known")
        found["not_yet_known"] = [leaf.path for leaf in unknown]
    return found


def _ruling(ruling: Ruling, judgement: Judgement, names: tuple[str, str]) -> dict[str, Any]:
    leaves = [
        {
            "path": leaf.path,
            "outcome": leaf.outcome,
            "a": strict(leaf.a),
            "b": strict(leaf.b),
            "follows": list(leaf.follows),
        }
        for leaf in ruling.leaves
    ]
    return {
        "rule": ruling.rule,
        "outcome": ruling.outcome,
        "effects": dict(ruling.effects),
        "leaves": leaves,
        "why": why(ruling),
        "remedy": remedy(ruling, judgement, names),
        "allowed": ruling.allowed,
        "explain": f"wb explain {ruling.rule}",
    }


def require_ended(side: Side) -> None:
    """Lets a run be judged whose record this version can read, and that goes on no more.

    Raises:
        UserError: it is of a newer version, or still going.
    """
    version = side.record.schema_version
    if version > SCHEMA_VERSION:
        message = "this record was written by a newer version of workbench"
        allowed = f"version {SCHEMA_VERSION} or older"
        raise UserError.at(str(side.folder), message, version, allowed)
    if side.status == "RUNNING":
        message = "this run is still going"
        raise UserError.at(str(side.folder), message, None, "a run that has ended")


def _permits(judgement: Judgement, asked: Iterable[Claim]) -> bool:
    """Whether any claim asked for may be looked at."""
    return any(judgement.claims[claim] != "refused" for claim in asked)


def _not_finite(a: RunData, b: RunData, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts of the sets whose NLL at the point compared is not finite in both."""
    unknown = not_finite(a, tokens), not_finite(b, tokens)
    known: dict[str, Any] = dict.fromkeys([*unknown[0], *unknown[1]], True)
    return known | unknown[0] if known else {}, known | unknown[1] if known else {}


def not_finite(run: RunData, tokens: int) -> dict[str, None]:
    """A leaf for each set whose NLL at a point is not finite: such a number is not known, so that
    no claim can rest on it and no treatment explains it."""
    found: dict[str, None] = {}
    for name in evaluated_sets(run.metrics, run.metrics):
        value = measured_at(run, f"{name}/nll", tokens)
        if value is not None and not math.isfinite(value):
            found[f"{EVALUATION}{name}.{FINITE}"] = None
    return found


def points(record: RunRecord) -> dict[int, Point]:
    """Tokens -> point, without the start: before training there is nothing to compare."""
    return {point.tokens: point for point in record.points if point.tokens > 0}


def distinct(a: str, b: str) -> tuple[str, str]:
    """What to call two that may have one name."""
    return (a, b) if a != b else (f"{a} (first)", f"{b} (second)")


def exit_of(verdict: Verdict, strict: bool) -> int:
    """0 comparable or flagged, 1 flagged with `strict`, 3 refused."""
    if verdict == "refused":
        return 3
    return 1 if strict and verdict == "flagged" else 0
