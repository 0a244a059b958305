"""The commands of `wb`: thin calls of the package, each returning what it has to say.

Everything heavy (torch, mlflow, pandas, matplotlib) is imported inside the command that needs it,
so that `wb --help` answers at once.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench import completion
from workbench.answers import Answer, AsJson, Debug, OtherSpecOrRun, SpecOrRun, readable, say
from workbench.compare_command import (
    Allow,
    Claims,
    Strict,
    Treatment,
    compare,
    in_colour,
    parse_allow,
)
from workbench.data_commands import app as data_app
from workbench.errors import StoreError, UserError
from workbench.eval_command import evaluate
from workbench.export_command import export
from workbench.import_commands import app as import_app
from workbench.keep_commands import doctor, sync, verify
from workbench.output import write_document, write_line
from workbench.rule_commands import diff, explain
from workbench.runs_commands import app as runs_app
from workbench.study_commands import app as study_app

if TYPE_CHECKING:
    from workbench.resume import ResumeRequest
    from workbench.spec.run import RunSpec

app = typer.Typer(
    name="wb",
    help="Trains small language models, and knows when two runs may be compared.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode=None,
)
app.add_typer(data_app)
app.add_typer(import_app)
app.add_typer(study_app)
app.add_typer(runs_app)


@app.command()
def run(
    spec: Annotated[
        Path, typer.Argument(help="A run spec (YAML).", autocompletion=completion.specs)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Laid over the spec.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Resolve, validate, print counts, stop.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[RUN|PATH]",
            help="Go on with a run from its newest checkpoint, or from that of a path; "
            "alone: with the run that the spec names.",
        ),
    ] = None,
    force_resume: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="Go on although the guard refuses; it is recorded."),
    ] = None,
    fork: Annotated[
        bool, typer.Option("--fork", help="With --resume RUN or PATH: a new run from there.")
    ] = False,
    nproc: Annotated[
        int, typer.Option(min=1, help="Train with so many processes on this machine.")
    ] = 1,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Train one validated run, tracked in the store and in MLflow.

    Several processes, on several machines too: torchrun ... -m workbench run SPEC.

    Example: wb run experiments/quickstart.yaml seed=43
    """
    from workbench.spec.load import load_spec

    resolved = load_spec(spec, overrides).on(nproc)
    if dry_run:
        return _dry_run(resolved, as_json)
    request = _resume_request(resume, force_resume, fork)
    if nproc > 1:
        from workbench.launch import launch, without_nproc

        return Answer(None, launch(nproc, without_nproc(sys.argv[1:])))

    from workbench.process import prepare_process

    prepare_process()  # before torch is loaded
    from workbench import run as runner
    from workbench.core.parallel import join
    from workbench.track.store import Store
    from workbench.views import closing_lines, draw_curve

    store, team = Store(), join(resolved.training.device, resolved.training.parallel)

    def ended(outcome: runner.RunOutcome) -> None:
        curve = draw_curve(outcome.folder)
        if as_json:
            write_document(outcome.to_json())
        else:
            write_line(closing_lines(outcome.record, outcome.folder, store, curve, _program()))

    outcome = runner.run(resolved, store, sys.argv[1:], as_json, ended, request, team)
    return Answer(None, outcome.exit_code)


@app.command()
def check(
    a: SpecOrRun,
    b: OtherSpecOrRun,
    treatment: Treatment = None,
    allow: Allow = None,
    claim: Claims = None,
    strict: Strict = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Say whether two specs, two runs, or one of each would be comparable, before more compute.

    Example: wb check a.yaml b.yaml --treatment model
    """
    from workbench.compare import check as judge
    from workbench.compare import render_check
    from workbench.specs_and_runs import run_or_plan
    from workbench.track.store import Store

    store = Store()
    found = judge(
        run_or_plan(a, store),
        run_or_plan(b, store),
        treatment=treatment or [],
        allow=parse_allow(allow),
        claims=claim or [],
    )
    exit_code = found.exit_code(strict)
    if as_json:
        return Answer(found.to_json(), exit_code)
    return Answer(render_check(found, color=in_colour()), exit_code)


app.command()(compare)
app.command("eval")(evaluate)
app.command()(verify)
app.command()(explain)
app.command()(diff)
app.command()(sync)
app.command()(doctor)
app.command()(export)


@app.command("list")
def list_runs(as_json: AsJson = False, debug: Debug = False) -> Answer:
    """List the runs of the store, newest first, and those of the server that is set.

    The server is that of MLFLOW_TRACKING_URI.

    Example: wb list
    """
    from workbench.track.server_runs import other_runs
    from workbench.track.store import Store
    from workbench.views import run_row, run_rows, run_table

    store = Store()
    rows = run_rows(store)
    try:
        others, faults = other_runs(store, store.list_runs())
    except StoreError as error:
        others, faults = [], [str(error)]
    for fault in faults:
        say(f"not listed: {fault}")
    rows += [{**run_row(entry), "where": "server"} for entry in others]
    return Answer({"runs": rows} if as_json else run_table(rows))


@app.command()
def show(
    run: Annotated[
        str,
        typer.Argument(help="A run: name, id, or unique prefix.", autocompletion=completion.runs),
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Show what one run was, how it went, and where its files are.

    Example: wb show quickstart
    """
    from workbench.track.record import document_of
    from workbench.track.server_runs import find_run
    from workbench.track.store import Store
    from workbench.views import run_page

    entry = readable(find_run(Store(), run))
    assert entry.record
    if as_json:
        more = {"status": entry.status, "folder": str(entry.folder)}
        return Answer({**document_of(entry.record), **more})
    return Answer(run_page(entry.record, entry.status or "UNKNOWN", entry.folder))


@app.command()
def ui(
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback, all of it can read.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="Default: 5000 or the next free one. 0 takes any free port."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Serve the MLflow UI on the store until Ctrl-C; the page is the newest run's experiment.

    Example: wb ui --port 8080
    """
    from workbench.track.store import Store
    from workbench.track.ui import ui as serve

    store = Store()
    newest = next((entry.record for entry in store.list_runs() if entry.record), None)
    tracking = newest.spec.get("tracking", {}) if newest else {}
    return serve(store, host, port, tracking.get("experiment", "workbench"), write_line)


@app.command()
def bench(
    spec: Annotated[Path, typer.Argument(help="A run spec.", autocompletion=completion.specs)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Laid over the spec.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of A B A B.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each arm in a turn.")] = 2,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="For the timed steps of each arm; at least one is taken.")
    ] = 120.0,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="SPEC", help="Another spec to measure in place of the plain step."),
    ] = None,
    compare_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Laid over the other spec; without --compare, over SPEC itself. Repeatable.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of a step: a new .json or .json.gz."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Measure the spec's training step against a plain step of the same shape, or another spec's.

    With telemetry.moe, what that costs a step, too.

    Example: wb bench a.yaml --compare-set training.compile=false
    """
    from workbench.bench.measure import bench as measure
    from workbench.bench.page import render
    from workbench.bench.store import keep_bench
    from workbench.spec.load import load_spec
    from workbench.track.store import Store

    ours, other = load_spec(spec, overrides), None
    if compare:
        other = load_spec(compare, compare_set)
    elif compare_set:
        other = load_spec(spec, [*(overrides or []), *compare_set])
    result = measure(ours, rounds, steps, max_seconds, say, other=other, trace=profile)
    try:
        keep_bench(ours, result, Store())  # for the expected time of `wb plan`
    except StoreError as error:
        say(f"the result is not kept for wb plan: {error}")
    return Answer(result if as_json else render(result))


@app.command()
def plan(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC...",
            help="Run specs or cluster plans (YAML), and KEY=VALUE laid over each.",
        ),
    ],
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Count parameters, FLOPs, tokens, memory, disk and time of runs, building no model.

    A cluster plan (sections model, parallel, run) is checked, and never launched.

    Example: wb plan a.yaml training.batch_size=8
    """
    from workbench.plan_files import plan_file

    # A file is a file, whatever its name has in it.
    overrides = [text for text in specs if "=" in text and not Path(text).exists()]
    paths = [Path(text) for text in specs if text not in overrides]
    if not paths:
        raise UserError.at("command line", "no spec is named, only overrides", specs[0])
    planned = [plan_file(path, overrides) for path in paths]
    if as_json:
        plans = [document for document, _ in planned]
        return Answer(plans[0] if len(plans) == 1 else {"plans": plans})
    return Answer("\n\n".join(page for _, page in planned))


def _program() -> str:
    """How the user can call `wb` again: by name where that finds it, else as it was called."""
    called = sys.argv[0]
    found = shutil.which("wb")
    if found and Path(found).resolve() == Path(called).resolve():
        return "wb"
    return called if Path(called).name == "wb" else f"{sys.executable} -m workbench"


def call(arguments: Sequence[str]) -> Answer | int:
    """Runs the command that the arguments name; returns its answer, or a bare exit code.

    Raises:
        UserError, OSError and others: whatever the command raises, KeyboardInterrupt too.
        click's errors: the arguments are wrong.
    """
    if "_WB_COMPLETE" in os.environ:
        app(prog_name="wb")  # answers the shell that asks for completions, and exits
    # Not by `app(...)`, which makes exit codes of its own out of an interrupt and a broken pipe.
    command = typer.main.get_command(app)
    try:
        with command.make_context("wb", _rewritten(arguments)) as context:
            result = command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return result if isinstance(result, Answer | int) else 0


def _rewritten(arguments: Sequence[str]) -> list[str]:
    """The arguments as click can read them: options with a value left out, or with several."""
    from workbench.arms_command import with_several

    if list(arguments[:1]) == ["compare"]:
        return with_several(arguments)
    return with_resume_source(arguments)


OWN_RUN = "-"  # what `--resume` alone stands for; no run can be called so


def with_resume_source(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the value that `--resume` alone stands for put after it."""
    given = list(arguments)
    for index, word in enumerate(given):
        if word != "--resume":
            continue
        after = given[index + 1] if index + 1 < len(given) else "-"
        is_source = not (after.startswith("-") or "=" in after or after.endswith((".yaml", ".yml")))
        return given if is_source else [*given[: index + 1], OWN_RUN, *given[index + 1 :]]
    return given


def _resume_request(resume: str | None, force: str | None, fork: bool) -> ResumeRequest | None:
    from workbench.resume import ResumeRequest

    if resume is None and (force is not None or fork):
        option, value = ("--fork", None) if fork else ("--force-resume", force)
        raise UserError.at(option, "there is nothing to go on with", value, "--resume with it")
    if force is not None and fork:
        message = "a fork is a new run, and may differ in all but its model and data"
        raise UserError.at("--force-resume", message, force, "--fork alone")
    if resume is None:
        return None
    return ResumeRequest(None if resume == OWN_RUN else resume, force, fork)


def _dry_run(spec: RunSpec, as_json: bool) -> Answer:
    from workbench.foresee import plan, render_plan
    from workbench.track.store import Store

    counted = plan(spec, Store())
    return Answer(counted if as_json else render_plan(counted))
