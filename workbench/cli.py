"""The `wb` command line: thin commands over the package, exit codes, and errors in one voice.

Everything heavy (torch, mlflow, pandas, matplotlib) is imported inside the command that needs it,
so that `wb --help` answers at once.
"""

from __future__ import annotations

import errno
import json
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.errors import Fault, StoreError, UserError

if TYPE_CHECKING:
    from workbench.track.store import RunEntry

app = typer.Typer(
    name="wb",
    help="Trains small language models, and knows when two runs may be compared.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Treatment = Annotated[
    list[str] | None,
    typer.Option(
        help="What you mean to study: a field or section of the spec, or rule:NAME. Repeatable."
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="RULE=REASON", help="Turn one refusal into a flag. Repeatable."),
]
Claims = Annotated[
    list[str] | None,
    typer.Option("--claim", help="nll (default), bpb, throughput, memory. Repeatable."),
]
Strict = Annotated[bool, typer.Option(help="Exit 1 when the verdict is flagged.")]


@app.command()
def run(
    spec: Annotated[Path, typer.Argument(help="A run spec (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Laid over the spec.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Resolve, validate, print counts, stop.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train one validated run, tracked in the store and in MLflow."""
    from workbench.spec.load import load_spec

    resolved = load_spec(spec, overrides)
    if dry_run:
        _print_dry_run(resolved, as_json)
        return

    from workbench.process import prepare_process

    prepare_process()  # before torch is loaded
    from workbench import run as runner
    from workbench.compare.plots import draw_run
    from workbench.track.journal import read_metrics
    from workbench.track.store import Store
    from workbench.views import closing_lines

    store = Store()
    outcome = runner.run(resolved, store, command=sys.argv[1:], quiet=as_json)
    curve: Path | None = outcome.folder / "curves.png"
    if not draw_run(read_metrics(outcome.folder / "metrics.csv"), outcome.folder / "curves.png"):
        curve = None
    if as_json:
        _print_json(outcome.to_json())
    else:
        print(closing_lines(outcome.record, outcome.folder, store, curve, _program()))
    raise typer.Exit(outcome.exit_code)


@app.command()
def check(
    a: Annotated[Path, typer.Argument(help="A run spec.")],
    b: Annotated[Path, typer.Argument(help="Another run spec.")],
    treatment: Treatment = None,
    allow: Allow = None,
    claim: Claims = None,
    strict: Strict = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say whether two specs would be comparable, before any compute is spent."""
    from workbench.compare import check_specs, render_check
    from workbench.foresee import foresee
    from workbench.spec.load import load_spec
    from workbench.track.store import Store

    store = Store()
    specs = [load_spec(path) for path in (a, b)]
    judgement = check_specs(
        specs[0],
        specs[1],
        foresee(specs[0], store),
        foresee(specs[1], store),
        treatment=treatment or [],
        allow=parse_allow(allow),
        claims=claim or [],
        paths=(str(a), str(b)),
    )
    if as_json:
        _print_json(judgement.to_json())
    else:
        print(render_check(judgement, color=sys.stdout.isatty()))
    raise typer.Exit(judgement.exit_code(strict))


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A run: name, id, or unique prefix.")],
    b: Annotated[str, typer.Argument(help="Another run.")],
    treatment: Treatment = None,
    allow: Allow = None,
    claim: Claims = None,
    at: Annotated[
        int | None, typer.Option(help="Compare at this token count; default: the last common.")
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say whether two runs may be compared, and if so, how they differ."""
    from workbench.compare import compare_runs, render_terminal, write_report
    from workbench.track.store import Store

    store = Store()
    entries = [_readable(store.find_run(text)) for text in (a, b)]
    statuses = [entry.status or "RUNNING" for entry in entries]
    comparison = compare_runs(
        entries[0].folder,
        entries[1].folder,
        treatment=treatment or [],
        allow=parse_allow(allow),
        claims=claim or [],
        at=at,
        statuses=(statuses[0], statuses[1]),
    )
    comparison = write_report(comparison, store.reports)
    if as_json:
        _print_json(comparison.to_json())
    else:
        print(render_terminal(comparison, color=sys.stdout.isatty()))
    raise typer.Exit(comparison.exit_code(strict))


@app.command("list")
def list_runs(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the runs of the store, newest first."""
    from workbench.track.store import Store
    from workbench.views import run_rows, run_table

    rows = run_rows(Store())
    if as_json:
        _print_json({"runs": rows})
    else:
        print(run_table(rows))


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="A run: name, id, or unique prefix.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what one run was, how it went, and where its files are."""
    from workbench.track.record import document_of
    from workbench.track.store import Store
    from workbench.views import run_page

    entry = _readable(Store().find_run(run))
    assert entry.record
    if as_json:
        document = {**document_of(entry.record), "status": entry.status}
        _print_json({**document, "folder": str(entry.folder)})
    else:
        print(run_page(entry.record, entry.status or "UNKNOWN", entry.folder))


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
) -> None:
    """Serve the MLflow UI on the store until Ctrl-C; the page is the newest run's experiment."""
    from workbench.track.store import Store
    from workbench.track.ui import ui as serve

    store = Store()
    newest = next((entry.record for entry in store.list_runs() if entry.record), None)
    experiment = newest.spec["tracking"]["experiment"] if newest else "workbench"
    raise typer.Exit(serve(store, host, port, experiment))


@app.command()
def bench(
    spec: Annotated[Path, typer.Argument(help="A run spec.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of A B A B.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each arm in a turn.")] = 2,
    max_seconds: Annotated[
        float, typer.Option(min=0, help="For the timed steps of each arm; at least one is taken.")
    ] = 120.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure the spec's training step against a plain step of the same shape."""
    from workbench.bench import bench as measure
    from workbench.bench import render
    from workbench.spec.load import load_spec

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = measure(load_spec(spec, overrides), rounds, steps, max_seconds, say)
    if as_json:
        _print_json(result)
    else:
        print(render(result))


def _readable(entry: RunEntry) -> RunEntry:
    """The entry of a run with a record.

    Raises:
        UserError: it has none, or a damaged one.
    """
    if entry.record is None:
        raise UserError.at(str(entry.folder), f"this run has no readable record: {entry.fault}")
    return entry


def _program() -> str:
    """How the user can call `wb` again: by name where that finds it, else as it was called."""
    called = sys.argv[0]
    found = shutil.which("wb")
    if found and Path(found).resolve() == Path(called).resolve():
        return "wb"
    return called if Path(called).name == "wb" else f"{sys.executable} -m workbench"


def parse_allow(pairs: list[str] | None) -> dict[str, str]:
    """`RULE=reason` options as a mapping.

    Raises:
        UserError: one has no reason.
    """
    allowed = {}
    for pair in pairs or []:
        rule, _, reason = pair.partition("=")
        if not rule or not reason.strip():
            message = "an override needs a reason, which will stand in the report"
            raise UserError.at("--allow", message, pair, "RULE=reason")
        allowed[rule] = reason.strip()
    return allowed


def main() -> None:
    """Entry point of `wb`: runs a command and turns every end into its exit code."""
    sys.exit(_guarded(sys.argv[1:]))


def _guarded(arguments: list[str]) -> int:
    debug, as_json = "--debug" in arguments, "--json" in arguments
    try:
        code = app(arguments, prog_name="wb", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except UserError as error:
        if debug:
            traceback.print_exc()
        _print_error(list(error.faults), as_json)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        if debug:
            traceback.print_exc()
        place = str(error.filename or "the system")
        _print_error([Fault(place, (error.strerror or str(error)).lower())], as_json)
        return StoreError.exit_code if error.errno in _STORE_ERRNOS else UserError.exit_code
    except Exception as error:
        # Typer may bring a click of its own, so its errors are known by name.
        if any(base.__name__ == "ClickException" for base in type(error).__mro__):
            message = error.format_message()  # type: ignore[attr-defined]
            _print_error([Fault("command line", message, allowed="see wb --help")], as_json)
            return 2
        return _crash(error, debug, as_json)


_STORE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}


def _crash(error: Exception, debug: bool, as_json: bool) -> int:
    """Reports a fault of the program itself: a file with the traceback, one line on screen."""
    import tempfile

    text = traceback.format_exc()
    if debug:
        print(text, file=sys.stderr)
    command = " ".join(sys.argv[1:])
    with tempfile.NamedTemporaryFile(
        "w", prefix="wb-crash-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(f"wb {command}\n\n{text}")
    what = f"{type(error).__name__}: {error}"
    message = f"a fault in wb itself: {what}; report written to {file.name}"
    _print_error([Fault("wb", message)], as_json)
    return 70


def _print_error(faults: list[Fault], as_json: bool) -> None:
    if as_json:
        documents: list[dict[str, Any]] = [
            {"place": f.place, "value": f.value, "allowed": f.allowed, "message": f.message}
            for f in faults
        ]
        document: dict[str, Any] = {"error": documents[0]}
        if len(documents) > 1:
            document["errors"] = documents
        _print_json(document)
        return
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)


def _print_json(document: Any) -> None:
    from workbench.track.record import strict

    print(json.dumps(strict(document), indent=1, allow_nan=False, default=str))


def _print_dry_run(spec: Any, as_json: bool) -> None:
    from workbench.foresee import plan, render_plan
    from workbench.track.store import Store

    counted = plan(spec, Store())
    if as_json:
        _print_json(counted)
    else:
        print(render_plan(counted))
