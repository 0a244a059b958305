"""`wb export`: a run's weights and configuration for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from workbench.answers import Answer, AsJson, Debug, readable


def export(
    run: Annotated[str, typer.Argument(help="A run: name, id, or unique prefix.")],
    out: Annotated[Path, typer.Option(help="The folder that gets the files; a new one.")],
    format_: Annotated[
        Literal["safetensors"], typer.Option("--format", help="How the weights are written.")
    ] = "safetensors",
    step: Annotated[
        int | None, typer.Option(min=1, help="Of the checkpoint of this step; default: the newest.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Write a run's weights with a configuration and code that need nothing of this package.

    Example: wb export quickstart --out quickstart-weights
    """
    from workbench.process import prepare_process
    from workbench.track.server_runs import find_own
    from workbench.track.store import Store

    prepare_process()  # before torch is loaded
    entry = readable(find_own(Store(), run, "its checkpoints are not"))
    from workbench.export import export as write

    assert entry.record
    written = write(entry.folder, entry.record, out, step)
    said = f"{written.folder}: {written.parameters:,} parameters after step {written.step}"
    return Answer(written.to_json() if as_json else said)
