"""The commands of `wb import`: runs that other programs made, as records that can be compared.

Everything heavy is imported inside the command that needs it, as in `commands`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.answers import Answer, AsJson, Debug

if TYPE_CHECKING:
    from workbench.importing.draft import Draft

app = typer.Typer(
    name="import",
    help="Brings in runs of other programs, with what is known of them and no more.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[
    str | None, typer.Option(help="What to call the run here; default: what it was called there.")
]


@app.command()
def complexity(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Holds run_config.json and metrics.csv.")
    ],
    name: Name = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Bring in a run of the original runner; what it is known to have claimed wrongly is corrected.

    Example: wb import complexity old/runs/gqa-42 --name old-gqa-42
    """
    from workbench.importing.complexity import read_complexity
    from workbench.importing.draft import keep, render
    from workbench.track.store import Store

    kept = keep(read_complexity(folder, name), Store())
    return Answer(kept.to_json() if as_json else render(kept))


MapOption = Annotated[
    Path, typer.Option("--map", metavar="FILE", help="What their names mean here (YAML).")
]
Runs = Annotated[
    list[str] | None, typer.Option("--run", help="Only this run of there. Repeatable.")
]


@app.command("csv")
def table(
    file: Annotated[Path, typer.Argument(help="A table with a row for each logged step.")],
    mapping: MapOption,
    run: Runs = None,
    name: Name = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Bring in runs from a table that another tracker exported.

    Example: wb import csv history.csv --map history.map.yaml
    """
    from workbench.importing.csv_runs import read_csv

    return _keep_all(read_csv(file, mapping, run, name), as_json)


@app.command("mlflow")
def logged(
    experiment: Annotated[str, typer.Argument(help="The name or id of an experiment.")],
    mapping: MapOption,
    uri: Annotated[
        str | None,
        typer.Option(help="A server, a database or a folder; default: MLFLOW_TRACKING_URI."),
    ] = None,
    run: Runs = None,
    name: Name = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Bring in runs that another trainer logged to MLflow.

    Example: wb import mlflow my-experiment --uri http://host:5000 --map theirs.map.yaml
    """
    from workbench.importing.mlflow_runs import read_mlflow
    from workbench.track.feeder import tracking_address
    from workbench.track.store import Store

    return _keep_all(
        read_mlflow(experiment, tracking_address(uri, Store()), mapping, run, name), as_json
    )


def _keep_all(drafts: list[Draft], as_json: bool) -> Answer:
    """Puts runs into the store; none of them where the name of one is taken."""
    from workbench.importing.draft import keep, render, require_free
    from workbench.track.store import Store

    store = Store()
    for draft in drafts:
        require_free(draft.name, store)
    kept = [keep(draft, store) for draft in drafts]
    if as_json:
        return Answer({"runs": [one.to_json() for one in kept]})
    return Answer("\n".join(map(render, kept)))


@app.command()
def weights(
    file: Annotated[Path, typer.Argument(help="Weights of the original runner, as safetensors.")],
    config: Annotated[
        Path, typer.Option(help="Its model's configuration, or its run_config.json (JSON).")
    ],
    out: Annotated[Path, typer.Option(help="The folder that gets the checkpoint.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="The update it was saved after; default: the last.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Put weights of the original runner into a checkpoint that can be loaded and scored.

    Example: wb import weights old.safetensors --config run_config.json --out old
    """
    from workbench.process import prepare_process

    prepare_process()  # before torch is loaded
    from workbench.importing.weights import import_weights

    kept = import_weights(file, config, out, step)
    said = f"{kept.folder}: {kept.parameters:,} parameters after step {kept.step}"
    return Answer(kept.to_json() if as_json else said)
