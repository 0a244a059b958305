"""The commands `wb study ...`: plan arms x seeds, train what is missing, report it as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.answers import Answer, AsJson, Debug
from workbench.errors import RefusedError

app = typer.Typer(
    name="study",
    help="Studies: arms x seeds with one declared treatment, planned before any run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

StudyFile = Annotated[Path, typer.Argument(help="A study file (.study.yaml).")]


@app.command()
def check(study: StudyFile, as_json: AsJson = False, debug: Debug = False) -> Answer:
    """Say whether a study can answer its question, before any compute is spent."""
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
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Freeze the plan, train every run that is not finished, several at once."""
    from workbench.signals import StopRequests
    from workbench.study.run import run_study, summary
    from workbench.study.spec import load_study
    from workbench.study.table import StudyDisplay
    from workbench.track.store import Store

    planned, store = load_study(study), Store()
    with StopRequests() as stops, StudyDisplay(quiet=as_json) as display:
        outcome = run_study(planned, store, stops, display, amend=amend, at_once=at_once)
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
def status(
    study: Annotated[str, typer.Argument(help="A study file, or the name of a study that ran.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Show arms, seeds, states and time left, and how the file differs from the frozen plan."""
    from workbench.study.status import render, study_status
    from workbench.track.store import Store

    found = study_status(study, Store())
    return Answer(found.to_json() if as_json else render(found))
