"""What every command of `wb` has in common: its answer, the options all take, a run by its name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import completion
from workbench.errors import UserError

if TYPE_CHECKING:
    from workbench.track.store import RunEntry

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
SpecOrRun = Annotated[
    str,
    typer.Argument(
        help="A run spec (YAML), or a run: name, id or prefix.",
        autocompletion=completion.specs_and_runs,
    ),
]
OtherSpecOrRun = Annotated[
    str, typer.Argument(help="Another spec or run.", autocompletion=completion.specs_and_runs)
]


@dataclass(frozen=True)
class Answer:
    """What a command says on standard output, text or a JSON document, and its exit code.

    None: it has said everything itself.
    """

    content: str | dict[str, Any] | None
    exit_code: int = 0


def readable(entry: RunEntry) -> RunEntry:
    """The entry of a run with a record.

    Raises:
        UserError: it has none, or a damaged one.
    """
    if entry.record is None:
        raise UserError.at(str(entry.folder), f"this run has no readable record: {entry.fault}")
    return entry


def say(text: str) -> None:
    """A line for the person who waits, on standard error."""
    print(text, file=sys.stderr, flush=True)
