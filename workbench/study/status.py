"""`wb study status`: the plan, the state of every run, what is left, and what changed since."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import UserError, did_you_mean
from workbench.study.ledger import Ledger
from workbench.study.lock import is_being_run
from workbench.study.machine import cores
from workbench.study.plan import (
    PLAN,
    FrozenPlan,
    document_of_study,
    folder_of,
    plan_differences,
    read_plan,
)
from workbench.study.run import summary
from workbench.study.spec import SUFFIX, Study, load_study
from workbench.study.states import RunState, seconds_left, states_of
from workbench.study.table import text_table, time_left
from workbench.track.store import Store


@dataclass(frozen=True)
class StudyStatus:
    """A study as it stands: its frozen plan, its runs, and how the file differs from the plan.

    `study` is None where its file is gone or no longer valid; `fault` then says why.
    """

    plan: FrozenPlan
    folder: Path
    study: Study | None
    fault: str | None
    ledger: Ledger
    states: list[RunState]
    changes: list[str]
    going: bool

    @property
    def project(self) -> Path:
        """The folder that holds the store."""
        return self.folder.parent.parent.parent

    @property
    def at_once(self) -> int:
        """How many runs train at a time on this machine."""
        return max(1, cores() // self.plan.threads)

    def to_json(self) -> dict[str, Any]:
        """The document that `wb study status --json` prints."""
        latest = self.plan.latest
        return {
            "study": self.plan.name,
            "folder": str(self.folder),
            "file": self.plan.file,
            "frozen": self.plan.first.when,
            "plan_sha256": latest.sha256,
            "changes_of_plan": [
                {"when": version.when, "reason": version.reason, "sha256": version.sha256}
                for version in self.plan.versions[1:]
            ],
            "file_differs": self.changes,
            "fault": self.fault,
            "running": self.going,
            "summary": summary(self.states),
            "seconds_left": seconds_left(self.states, self.at_once),
            "arms": list(dict.fromkeys(run.arm for run in latest.runs)),
            "seeds": self.plan.seeds,
            "runs": [state.to_json() for state in self.states],
        }


def study_status(text: str, store: Store) -> StudyStatus:
    """The status of a study: of a study file, or of the frozen plan of this name.

    Raises:
        UserError: there is no such file or study, or its plan is not frozen yet or damaged.
    """
    path, study, fault = Path(text), None, None
    if path.suffix in (".yaml", ".yml") or path.is_file():
        study = load_study(path)
        name = study.name
    else:
        name = SUFFIX.sub("", path.name)
        _require_known(name, text, store)
    folder = folder_of(name, store)
    plan = read_plan(folder)
    if plan is None:
        message = "this study has not begun: its plan is frozen by the first wb study run"
        raise UserError.at(text, message)
    if study is None:
        try:
            study = load_study(Path(plan.file))
        except UserError as error:
            fault = str(error)
    ledger = Ledger(folder)
    states = states_of(plan, store, ledger, study)
    changes = plan_differences(plan.latest.document, document_of_study(study)) if study else []
    return StudyStatus(
        plan, folder, study, fault, ledger, states, changes, going=is_being_run(folder)
    )


def _require_known(name: str, text: str, store: Store) -> None:
    known = [path.parent.name for path in store.studies.glob(f"*/{PLAN}")]
    if name not in known:
        hint = did_you_mean(name, known)
        message = f"there is no such study in {store.studies}.{hint}".rstrip(".")
        raise UserError.at("study", message, text, "a study file, or the name of a study that ran")


def render(status: StudyStatus) -> str:
    """A status for the terminal."""
    plan, latest = status.plan, status.plan.latest
    lines = [
        f"{plan.name}: {summary(status.states)}" + ("; being run" if status.going else ""),
        f"plan frozen {plan.first.when}, sha256 {plan.first.sha256[:16]}",
    ]
    for version in plan.versions[1:]:
        lines.append(
            f"plan changed {version.when} ({version.finished_runs} runs finished): {version.reason}"
        )
    if status.changes:
        lines.append("the study file now differs from the plan:")
        lines += [f"  {change}" for change in status.changes]
    if status.fault:
        lines.append(f"the study file cannot be read: {status.fault}")
    lines += ["", text_table(status.states), ""]
    if left := time_left(status.states, status.at_once):
        lines.append(f"{left}, {status.at_once} at once, threads of each: {plan.threads}")
    if any(state.is_open for state in status.states) and not status.going:
        lines.append(f"next: wb study run {plan.file}")
    lines.append(f"treatment: {', '.join(latest.document['treatment'])}")
    return "\n".join(lines)
