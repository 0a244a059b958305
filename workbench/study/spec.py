"""The study spec: arms x seeds of one base, the declared treatment, and what decides.

A study file names a base spec, and for each arm the settings laid over it. Loading it resolves the
`RunSpec` of every planned run; what is wrong in any arm is found at once.
"""

from __future__ import annotations

import copy
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from workbench.errors import Fault, UserError, did_you_mean
from workbench.foresee import recorded
from workbench.spec.consistency import NAME
from workbench.spec.load import (
    Source,
    anchor,
    is_run_spec,
    place_of,
    read_mapping,
    read_source,
    validate,
    validate_as,
)
from workbench.spec.run import NonNegative, Positive, RunSpec, Section
from workbench.track.record import STUDY_ARM_TAG, STUDY_TAG, without_nulls

SUFFIX = re.compile(r"(\.study)?\.ya?ml$")
# What the study itself decides for each of its runs.
_OF_THE_STUDY = ("name", "seed", "extends")


class PrimarySpec(Section):
    """The number that answers the question, and where in the run it is read.

    `step` or `tokens` names an evaluation point of every arm; neither: the last common one.
    """

    metric: str = "held_out/nll"
    step: Positive | None = None
    tokens: Positive | None = None


class DecisionSpec(Section):
    """When one arm is called better than another, decided before any number is seen.

    The interval of their difference over seeds, of this `confidence` for all comparisons of the
    study together, excludes zero, its test agrees (adjusted by Holm's method), and the difference
    is not smaller than `smallest_difference` (in the metric's unit).
    """

    confidence: Annotated[float, Field(gt=0.5, lt=1, allow_inf_nan=False)] = 0.95
    smallest_difference: NonNegative = 0.0


class ContrastSpec(Section):
    """Two arms compared beside the comparisons with the baseline: `arm` minus `against`."""

    arm: str
    against: str


class StudySpec(Section):
    """What a study file asks for. `arms` are settings laid over the base, as in a run spec.

    `baseline` is the arm that every other is compared with; None: the first. `contrasts` are
    further pairs, planned with the rest: the more comparisons, the wider every interval.
    """

    name: str
    question: str = ""
    base: str
    arms: dict[str, dict[str, Any]]
    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]]
    treatment: Annotated[list[str], Field(min_length=1)]
    baseline: str | None = None
    contrasts: list[ContrastSpec] = Field(default_factory=list)
    primary: PrimarySpec = PrimarySpec()
    decision: DecisionSpec = DecisionSpec()

    @model_validator(mode="after")
    def _consistent(self) -> StudySpec:
        if faults := [*_of_names(self), *_of_counts(self), *_of_contrasts(self)]:
            raise UserError(*faults)
        return self


def _of_names(study: StudySpec) -> list[Fault]:
    allowed = "letters, digits, '.', '_', '-'; the first a letter or digit"
    faults = [
        Fault(f"arms.{arm}", "this cannot be the name of an arm", arm, allowed)
        for arm in study.arms
        if not NAME.fullmatch(arm)
    ]
    if study.baseline is not None and study.baseline not in study.arms:
        message = f"the study has no such arm.{did_you_mean(study.baseline, study.arms)}"
        faults.append(Fault("baseline", message.rstrip("."), study.baseline, ", ".join(study.arms)))
    for arm, settings in study.arms.items():
        faults += [
            Fault(f"arms.{arm}.{key}", f"the study sets the {key} of every run", settings[key])
            for key in _OF_THE_STUDY
            if key in settings
        ]
    return faults


def _of_contrasts(study: StudySpec) -> list[Fault]:
    """Every contrast is of two arms of the study, and no pair is compared twice."""
    baseline = study.baseline or next(iter(study.arms), "")
    seen = {frozenset((baseline, arm)): "the baseline's" for arm in study.arms if arm != baseline}
    faults = []
    for number, pair in enumerate(study.contrasts):
        place = f"contrasts[{number}]"
        unknown = {
            field: arm
            for field, arm in (("arm", pair.arm), ("against", pair.against))
            if arm not in study.arms
        }
        for field, arm in unknown.items():
            message = f"the study has no such arm.{did_you_mean(arm, study.arms)}".rstrip(".")
            faults.append(Fault(f"{place}.{field}", message, arm, ", ".join(study.arms)))
        if unknown:
            continue
        said = f"{pair.arm} against {pair.against}"
        both = frozenset((pair.arm, pair.against))
        if len(both) == 1:
            faults.append(Fault(place, "an arm against itself", said, "two arms"))
        elif both in seen:
            message = f"these two are compared already: this is {seen[both]} comparison"
            faults.append(Fault(place, message, said, "each pair of arms once"))
        seen.setdefault(both, f"contrasts[{number}]'s")
    return faults


def _of_counts(study: StudySpec) -> list[Fault]:
    faults = []
    if len(study.arms) < 2:
        message = "one arm answers no question" if study.arms else "there are no arms"
        faults.append(Fault("arms", message, list(study.arms), "two or more, to be compared"))
    if not study.seeds:
        faults.append(Fault("seeds", "there are none", [], "one or more; two give an interval"))
    for seed in sorted({seed for seed in study.seeds if study.seeds.count(seed) > 1}):
        message = f"the seed {seed} is given twice: two equal runs are one observation"
        faults.append(Fault("seeds", message, study.seeds, "each seed once"))
    if study.primary.step is not None and study.primary.tokens is not None:
        message = "the point is named twice, by its step and by its tokens"
        faults.append(Fault("primary", message, None, "step or tokens"))
    return faults


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    arm: str
    seed: int
    spec: RunSpec

    @property
    def name(self) -> str:
        """What the run is to be called."""
        return self.spec.name


@dataclass(frozen=True)
class Study:
    """A study file, read: what it asks for, and the spec of every run, arm by arm."""

    path: Path
    spec: StudySpec
    source: Source
    runs: tuple[PlannedRun, ...]

    @property
    def name(self) -> str:
        """The file's name without its endings, unless the file says another."""
        return self.spec.name

    @cached_property
    def arm_specs(self) -> dict[str, RunSpec]:
        """The spec of each arm, under the first seed."""
        first = self.spec.seeds[0]
        return {run.arm: run.spec for run in self.runs if run.seed == first}

    def place(self, field: str) -> str:
        """File, line and path of a field of the study, for an error."""
        return place_of(field, self.source)


def load_study(path: Path) -> Study:
    """The study of a file, with the resolved spec of every run.

    Raises:
        UserError: with every fault found in the study, its base and its arms; each names file and
            line, the field path, the value and what is allowed.
    """
    source = read_mapping(path)
    if is_run_spec(source.values):
        message = f"this is the spec of one run: wb run {shlex.quote(str(path))} trains it"
        raise UserError.at(str(path), message, None, "a study, with base, arms and seeds")
    source.values.setdefault("name", SUFFIX.sub("", path.name))
    arms = source.values.get("arms")
    if isinstance(arms, dict):
        # An arm may unset what the base has: its nulls are kept. An arm of nothing is the base.
        arms = {arm: {} if given is None else given for arm, given in arms.items()}
    given = without_nulls(source.values) | ({} if arms is None else {"arms": arms})
    if isinstance(given.get("treatment"), str):
        given["treatment"] = [given["treatment"]]
    faults: list[Fault] = []
    spec = None
    try:
        spec = validate_as(StudySpec, given, source)
    except UserError as error:
        faults += error.faults
        faults += _further_faults(given, source)

    seeds = spec.seeds if spec else [0]
    runs: list[PlannedRun] = []
    base = given.get("base")
    if isinstance(base, str) and isinstance(arms, dict):
        try:
            shared = read_source(path.resolve().parent / base)
        except UserError as error:
            place = place_of("base", source)
            raise UserError(*faults, Fault(place, f"the base: {error}")) from None
        for arm, settings in arms.items():
            if isinstance(settings, dict):
                try:
                    laid = _laid_over(shared, arm, settings, source, path)
                    runs += _runs(str(given["name"]), arm, laid, seeds)
                except UserError as error:
                    faults += error.faults
    if faults or spec is None:
        raise UserError(*{str(fault): fault for fault in faults}.values())
    return Study(path, spec, source, tuple(runs))


def _further_faults(given: dict[str, Any], source: Source) -> list[Fault]:
    """What is wrong beside unknown keys and the sections: Pydantic looks no further than those."""
    plain = {key: given[key] for key in StudySpec.model_fields if key in given}
    try:
        validate_as(StudySpec, {**plain, "primary": {}, "decision": {}}, source)
    except UserError as error:
        return list(error.faults)
    return []


def _laid_over(
    base: Source, arm: str, settings: dict[str, Any], source: Source, path: Path
) -> Source:
    """The base with an arm's settings over it; an error then names the arm and its line."""
    merged = Source(copy.deepcopy(base.values), dict(base.places))
    own = {key: value for key, value in settings.items() if key not in _OF_THE_STUDY}
    own = copy.deepcopy(own)
    anchor(own, path.resolve().parent)
    prefix = f"arms.{arm}."
    places = {
        place.removeprefix(prefix): f"{where} (arm {arm})"
        for place, where in source.places.items()
        if place.startswith(prefix)
    }
    merged.merge(Source(own, places))
    return merged


def _runs(study: str, arm: str, source: Source, seeds: list[int]) -> list[PlannedRun]:
    """The runs of one arm.

    Raises:
        UserError: its settings make no valid spec.
    """
    runs = []
    tracking = source.values.get("tracking")
    tracking = tracking if isinstance(tracking, dict) else {}
    tags = tracking.get("tags")
    tags = (tags if isinstance(tags, dict) else {}) | {STUDY_TAG: study, STUDY_ARM_TAG: arm}
    for seed in seeds:
        own: dict[str, Any] = {"name": f"{study}-{arm}-s{seed}", "seed": seed}
        values = source.values | own | {"tracking": {**tracking, "tags": tags}}
        spec = validate(Source(values, source.places))
        runs.append(PlannedRun(arm, seed, _as_recorded(spec)))
    return runs


def _as_recorded(spec: RunSpec) -> RunSpec:
    """The spec as its record will hold it, but for the credentials of a tracking address."""
    document = without_nulls(recorded(spec))
    if spec.tracking.uri is not None:
        document["tracking"]["uri"] = spec.tracking.uri
    return RunSpec.model_validate(document)
