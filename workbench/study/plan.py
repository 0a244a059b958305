"""The frozen plan of a study: written before its first run, hashed, and never replaced.

`studies/<name>/plan.json` of the store holds every version of the plan with its time, hash and
reason: the first is what was planned before anything was known, later ones are changes of plan.
What counts is what decides numbers or the verdict on them; titles, notes, paths of folders and
cadences of saving may change freely.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import UserError, storing
from workbench.spec.checklist import tag_of
from workbench.spec.load import field_types
from workbench.study.spec import Study
from workbench.track.record import write_json
from workbench.track.store import Store

PLAN = "plan.json"
_KEPT = ("evaluation.eval_steps",)  # free for a run, but it decides where a study can be read
PATHS = ("tokenizer.path", "data.text_file", "data.tokens_path", "data.stream_path")


class PlannedName(BaseModel):
    """One run of a plan: the arm and seed that it stands for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    arm: str
    seed: int


class Version(BaseModel):
    """The plan as it was from `when` on. `reason` is None for the first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    when: str
    reason: str | None = None
    finished_runs: int = 0  # that were known when the plan became this one
    document: dict[str, Any]
    runs: list[PlannedName]


class FrozenPlan(BaseModel):
    """The plan of a study in all its versions, and how its runs share the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    id: str
    name: str
    question: str
    file: str
    threads: int
    versions: list[Version]

    @property
    def first(self) -> Version:
        """What was planned before the first run."""
        return self.versions[0]

    @property
    def latest(self) -> Version:
        """The plan that holds now."""
        return self.versions[-1]

    @property
    def seeds(self) -> list[int]:
        """Every seed that any version planned: none of them may be left out of a comparison."""
        every = (seed for version in self.versions for seed in version.document["seeds"])
        return list(dict.fromkeys(every))

    @property
    def runs(self) -> list[PlannedName]:
        """Every run that any version planned, the present plan's first."""
        every = (run for version in reversed(self.versions) for run in version.runs)
        return list(dict.fromkeys(every))

    def is_dropped(self, run: PlannedName) -> bool:
        """Whether an earlier version planned this run and the present one does not."""
        return run not in self.latest.runs


def document_of_study(study: Study) -> dict[str, Any]:
    """What of a study is frozen: all that decides numbers, and how they will be judged."""
    spec = study.spec
    folder = study.path.resolve().parent
    contrasts = [contrast.model_dump(mode="json") for contrast in spec.contrasts]
    # Left out where there are none: so are they in plans frozen before there were contrasts.
    further = {"contrasts": contrasts} if contrasts else {}
    return further | {
        "seeds": list(spec.seeds),
        "treatment": sorted(spec.treatment),
        "baseline": spec.baseline or next(iter(spec.arms)),
        "primary": spec.primary.model_dump(mode="json"),
        "decision": spec.decision.model_dump(mode="json"),
        "arms": {
            arm: dict(_deciding(one.model_dump(mode="json"), folder))
            for arm, one in study.arm_specs.items()
        },
    }


def plan_hash(document: Mapping[str, Any]) -> str:
    """SHA-256 over the frozen part of a plan."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def version_of(study: Study, reason: str | None = None, finished_runs: int = 0) -> Version:
    """The study as a version of its plan, from now on."""
    document = document_of_study(study)
    return Version(
        sha256=plan_hash(document),
        when=now(),
        reason=reason,
        finished_runs=finished_runs,
        document=document,
        runs=[PlannedName(run=run.name, arm=run.arm, seed=run.seed) for run in study.runs],
    )


def plan_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Every leaf that two frozen documents do not share, as `arms.a.optimizer.lr: 0.001 -> 0.01`.

    An arm that only one of them has is one line. A field that no arm of the earlier document names
    was unknown to the version of this package that froze it, or counted as free there: it is no
    difference here, and a run trained with another value is not taken for the planned one. Of a
    path only the file's name counts: a project may be moved, and what its files hold is compared by
    content, by the rules.
    """
    lines = []
    old, new = before["arms"], after["arms"]
    lines += [f"arms: {arm} added" for arm in new if arm not in old]
    lines += [f"arms: {arm} dropped" for arm in old if arm not in new]
    shared = [arm for arm in old if arm in new]
    sides = []
    for document in (before, after):
        kept = {"contrasts": [], **document}
        del kept["arms"]
        kept |= {f"arms.{arm}": document["arms"][arm] for arm in shared}
        sides.append(dict(_leaves(kept)))
    known = {_field(leaf) for leaf in sides[0]}
    for leaf in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = (json.dumps(_named(leaf, side.get(leaf)), sort_keys=True) for side in sides)
        if a != b and (leaf in sides[0] or _field(leaf) in known):
            lines.append(f"{leaf}: {a} -> {b}")
    return lines


def _named(leaf: str, value: Any) -> Any:
    """The value; of a path the last part."""
    is_path = isinstance(value, str) and leaf.endswith(PATHS)
    return Path(value).name if is_path else value


def _field(leaf: str) -> str:
    """`optimizer.lr` of `arms.a.optimizer.lr`, whatever the arm is called."""
    fields = (
        name for name in field_types() if leaf.startswith("arms.") and leaf.endswith(f".{name}")
    )
    return max(fields, key=len, default=leaf)


def folder_of(name: str, store: Store) -> Path:
    """The folder of a study in the store."""
    return store.studies / name


def read_plan(folder: Path) -> FrozenPlan | None:
    """The frozen plan in a study's folder; None: there is none yet.

    Raises:
        UserError: it is damaged, or has been edited: its hash does not hold.
    """
    path = folder / PLAN
    try:
        plan = FrozenPlan.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise UserError.at(str(path), f"this is not a readable plan: {first}") from None
    for number, version in enumerate(plan.versions):
        if plan_hash(version.document) != version.sha256:
            message = "the frozen plan was edited: its hash does not hold"
            allowed = "the file as it was frozen"
            raise UserError.at(f"{path}: versions[{number}]", message, None, allowed)
    return plan


def write_plan(folder: Path, plan: FrozenPlan) -> None:
    """Writes a plan whole or not at all.

    Raises:
        StoreError: the store cannot be written.
    """
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PLAN, plan.model_dump(mode="json"))


def now() -> str:
    """The present time, as plans and ledgers write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def deciding_leaves(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The leaves of a resolved spec that decide its numbers; paths relative to `folder`."""
    return dict(_deciding(document, folder))


def _deciding(document: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Any]]:
    for leaf, value in _leaves({k: v for k, v in document.items() if k not in ("name", "seed")}):
        if tag_of(leaf).kind == "free" and leaf not in _KEPT:
            continue
        if leaf in PATHS and isinstance(value, str):
            yield leaf, os.path.relpath(value, folder)
        else:
            yield leaf, value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
