"""The commands `wb study ...`: plan arms x seeds, train what is missing, report it as one."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench import completion
from workbench.answers import Answer, AsJson, Debug, say
from workbench.errors import RefusedError, UserError

if TYPE_CHECKING:
    from workbench.study.launchers import Launcher
    from workbench.study.outcome import StudyResult
    from workbench.track.store import Store

app = typer.Typer(
    name="study",
    help="Studies: arms x seeds with one declared treatment, planned before any run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Where(enum.StrEnum):
    """What trains the runs of a study."""

    PROCESSES = "processes"
    SLURM = "slurm"
    SUBMITIT_LOCAL = "submitit-local"


StudyFile = Annotated[
    Path, typer.Argument(help="A study file (.study.yaml).", autocompletion=completion.specs)
]


@app.command()
def check(study: StudyFile, as_json: AsJson = False, debug: Debug = False) -> Answer:
    """Say whether a study can answer its question, before any compute is spent.

    Example: wb study check experiments/quick_matched.study.yaml
    """
    from workbench.study.check import check_study, render
    from workbench.study.spec import load_study
    from workbench.track.store import Store

    found = check_study(load_study(study), Store())
    if as_json:
        return Answer(found.to_json(), RefusedError.exit_code if found.refused else 0)
    found.require()
    return Answer(render(found))


@app.command()
def run(
    study: StudyFile,
    amend: Annotated[
        str | None,
        typer.Option(
            metavar="REASON",
            help="Go on although the plan has changed since it was frozen; the report shows it.",
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, help="Most runs at a time; default: what cores and memory take."),
    ] = None,
    launcher: Annotated[
        Where,
        typer.Option(help="What trains the runs: processes of this machine, or jobs by submitit."),
    ] = Where.PROCESSES,
    job: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="An option of the jobs, such as partition=gpu or timeout_min=600. Repeatable.",
        ),
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Train also runs whose earlier job cannot be asked."),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Freeze the plan, train every run that is not finished, several at once.

    Example: wb study run experiments/quick_matched.study.yaml --at-once 2
    """
    from workbench.signals import StopRequests
    from workbench.study.run import run_study, summary
    from workbench.study.spec import load_study
    from workbench.study.table import StudyDisplay
    from workbench.track.store import Store

    planned, store = load_study(study), Store()
    with StopRequests() as stops, StudyDisplay(quiet=as_json) as display:
        outcome = run_study(
            planned,
            store,
            stops,
            display,
            amend=amend,
            at_once=at_once,
            launcher=_launcher(launcher, job or [], planned.name, store),
            take_over=take_over,
        )
    if as_json:
        return Answer(outcome.to_json(), outcome.exit_code)
    command = "report" if not any(state.is_open for state in outcome.states) else "run"
    lines = [
        f"{planned.name}: {summary(outcome.states)}",
        f"  files      {outcome.folder}",
        f"next: wb study {command} {study}",
    ]
    return Answer("\n".join(lines), outcome.exit_code)


@app.command()
def report(
    study: Annotated[
        str,
        typer.Argument(
            help="A study file, or the name of a study that ran.", autocompletion=completion.studies
        ),
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Write the report of a study: the answer, how sure it is, and all that happened.

    Example: wb study report quick_matched
    """
    from workbench.compare.report_folder import report_lines
    from workbench.study.outcome import outcome_of
    from workbench.study.report import data, write_study_report
    from workbench.study.sections import headline
    from workbench.study.status import study_status
    from workbench.track.store import Store

    store = Store()
    found = outcome_of(study_status(study, store))
    folder = write_study_report(found, store.reports)
    _publish(found, folder)
    exit_code = RefusedError.exit_code if found.verdict == "refused" else 0
    if as_json:
        return Answer(data(found) | {"report": str(folder)}, exit_code)
    lines = [f"{found.verdict.upper()}: {headline(found)}", *report_lines(folder)]
    return Answer("\n".join(lines), exit_code)


@app.command()
def status(
    study: Annotated[
        str,
        typer.Argument(
            help="A study file, or the name of a study that ran.", autocompletion=completion.studies
        ),
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Show arms, seeds, states and time left, and how the file differs from the frozen plan.

    Example: wb study status quick_matched
    """
    from workbench.study.status import render, study_status
    from workbench.track.store import Store

    found = study_status(study, Store())
    return Answer(found.to_json() if as_json else render(found))


def _launcher(where: Where, options: list[str], study: str, store: Store) -> Launcher:
    """What begins the runs.

    Raises:
        UserError: it cannot here, or an option is not one of its.
    """
    from workbench.study.launchers import Processes
    from workbench.study.plan import folder_of

    if where is Where.PROCESSES:
        if options:
            message = "processes of this machine are no jobs"
            raise UserError.at("--job", message, options[0], "--launcher slurm with it")
        return Processes()
    from workbench.study.cluster import LAUNCHERS, JobLauncher, options_of

    return JobLauncher(LAUNCHERS[where.value], options_of(options), folder_of(study, store))


def _publish(found: StudyResult, report: Path) -> None:
    """Tells the runs that were compared, and MLflow, of the report."""
    from workbench.publish import publish
    from workbench.spec.checklist import RULESET_VERSION
    from workbench.study.mlflow import tell_mlflow
    from workbench.study.run import summary
    from workbench.study.sections import headline
    from workbench.study.states import mlflow_status

    status, comparison = found.status, found.comparison
    if comparison is not None:
        document = {
            "verdict": found.verdict,
            "claims": comparison.claims,
            "treatment": {"names": status.plan.latest.document["treatment"], "inferred": False},
            "ruleset": RULESET_VERSION,
        }
        runs = [state.entry.folder for state in found.compared if state.entry is not None]
        publish(document, {}, [f"study {status.plan.name}"], runs, report, say)
    records = [state.entry.record for state in status.states if state.entry]
    tracking = next((one.spec.get("tracking") for one in records if one), None) or {}
    where = tracking.get("experiment", "workbench"), tracking.get("uri")
    if records:
        said = f"{headline(found)} ({summary(status.states)})"
        ended, verdict = mlflow_status(status.states), found.verdict
        tell_mlflow(status.folder, where, ended, said, [report], say, verdict)
