"""Notes in a run's folder of the comparisons it took part in; MLflow is fed from them.

One file for each comparison, named like the folder of its report, so that several processes may
note theirs at once. The same comparison made again replaces its note.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from workbench.errors import storing
from workbench.spec.checklist import CLAIMS
from workbench.track.record import write_json

NOTES = "comparisons"
TAG = "workbench.comparison"


class ComparisonNote(BaseModel):
    """A comparison as one of its runs remembers it.

    `report` is the folder of the report, seen from the run's folder. `claims` holds the verdict on
    each claim, and `allow` the rules that were overridden, with their reasons.
    """

    model_config = ConfigDict(extra="ignore")

    report: str
    sides: list[str]
    verdict: str
    claims: dict[str, str]
    treatment: str
    allow: dict[str, str] = {}
    ruleset: int
    when: str

    @property
    def words(self) -> str:
        """The note in one line."""
        claims = ", ".join(f"{c} {self.claims[c]}" for c in CLAIMS if c in self.claims)
        overrides = "".join(f"; override of {rule}: {why}" for rule, why in self.allow.items())
        return (
            f"{claims}; {' against '.join(self.sides)}; treatment: {self.treatment}{overrides};"
            f" ruleset {self.ruleset}; {self.when}"
        )


def note_comparison(folder: Path, report: Path, note: ComparisonNote) -> None:
    """Leaves the note in the folder of a run, whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    where = folder / NOTES
    seen_from_run = os.path.relpath(report.resolve(), folder.resolve())
    with storing(where):
        where.mkdir(exist_ok=True)
    document = note.model_copy(update={"report": seen_from_run}).model_dump()
    write_json(where / f"{report.name}.json", document)


def notes_of(folder: Path) -> dict[str, ComparisonNote]:
    """Name of the report -> note; what cannot be read is left out."""
    found = {}
    for path in sorted((folder / NOTES).glob("*.json")):
        try:
            found[path.stem] = ComparisonNote.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue
    return found


def comparison_tags(notes: Mapping[str, ComparisonNote]) -> dict[str, str]:
    """A tag for each comparison: the name of its report, and what came out."""
    return {f"{TAG}.{name}": note.words for name, note in notes.items()}


def report_files(folder: Path) -> list[tuple[Path, str]]:
    """Every file of those reports that are still there, and where it belongs among artifacts."""
    found = []
    for name, note in notes_of(folder).items():
        report = folder / note.report
        paths = sorted(report.iterdir()) if report.is_dir() else []
        found += [(path, f"{NOTES}/{name}/{path.name}") for path in paths if path.is_file()]
    return found
