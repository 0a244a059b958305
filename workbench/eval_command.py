"""The command `wb eval`; everything heavy is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench import completion
from workbench.answers import Answer, AsJson, Debug, readable, say
from workbench.errors import UserError


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            help="A run that ended: name, id, or unique prefix.", autocompletion=completion.runs
        ),
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=PATH", help="Text to score: file, folder or glob."),
    ] = None,
    task: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Multiple choice, as JSON lines. Repeatable."),
    ] = None,
    harness: Annotated[
        list[str] | None,
        typer.Option("--lm-eval", metavar="TASK", help="A task of lm-evaluation-harness."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder of task definitions for lm-evaluation-harness.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="The checkpoint of this step; default: the newest.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or mps; default: as the run's spec says.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Score a run's checkpoint on further text and tasks; the numbers join its record.

    Example: wb eval quickstart --set news=news/*.txt
    """
    from workbench.process import prepare_process

    named = parse_sets(sets)
    if not (named or task or harness):
        allowed = "--set, --task or --lm-eval"
        raise UserError.at("command line", "nothing to score is named", None, allowed)
    prepare_process()  # before torch is loaded
    from workbench.core.device import device_named
    from workbench.evaluate_run import evaluate_run, render
    from workbench.track.server_runs import find_own
    from workbench.track.store import Store

    store = Store()
    entry = readable(find_own(store, run, "its checkpoints are not"))
    chosen = device_named(device) if device else None
    outcome = evaluate_run(
        entry,
        store,
        named,
        task or [],
        harness=harness or [],
        include_path=include_path,
        step=step,
        device=chosen,
        say=say,
    )
    return Answer(outcome.to_json() if as_json else render(outcome))


def parse_sets(pairs: list[str] | None) -> dict[str, Path]:
    """`NAME=PATH` options as a mapping.

    Raises:
        UserError: one has no name or no path, or a name stands twice.
    """
    named: dict[str, Path] = {}
    for pair in pairs or []:
        name, _, path = pair.partition("=")
        if not any(letter.isascii() and letter.isalnum() for letter in name) or not path:
            message = "a set needs a name with a letter or digit, and a path"
            raise UserError.at("--set", message, pair, "NAME=PATH")
        if name in named:
            raise UserError.at("--set", "the same name twice", name, "a name for each")
        named[name] = Path(path)
    return named
