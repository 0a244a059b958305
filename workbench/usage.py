"""A call of `wb` that is not one, in the project's words: the place, the value, what is allowed.

Typer brings a click of its own, so that its errors are known by the names of their classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from workbench.errors import Fault, did_you_mean

_COMMAND = re.compile(r"No such command '(.*?)'(?:\. Did you mean|$)", re.DOTALL)
_EXTRA = re.compile(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", re.DOTALL)


def is_usage_error(error: Exception) -> bool:
    """Whether the arguments could not be read."""
    return any(base.__name__ == "ClickException" for base in type(error).__mro__)


def fault_of_usage(error: Any, arguments: Sequence[str]) -> Fault:
    """What is wrong with the arguments."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    seen = context.command_path if context else "wb"
    allowed = f"see {seen} --help"
    if found := _COMMAND.search(message):
        known = list(error.cmd.commands) if hasattr(error.cmd, "commands") else []
        hint = did_you_mean(found[1], known)
        said = f"{seen} has no such command.{hint}".rstrip(".")
        return Fault("command line", said, found[1], ", ".join(known) or allowed)
    if option := getattr(error, "option_name", None):
        near = getattr(error, "possibilities", None)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return Fault("command line", f"{message}.{hint}".rstrip("."), option, allowed)
    parameter = getattr(error, "param", None)
    if parameter is not None and error.message:
        options = [name for name in parameter.opts if name.startswith("-")]
        place = options[0] if options else str(parameter.name)
        said = str(error.message).rstrip(".").removeprefix("Value error, ")
        value = _value_of(parameter.opts, arguments) if options else _quoted(said)
        return Fault(place, said[:1].lower() + said[1:], value, allowed)
    extra = _EXTRA.search(message)
    return Fault("command line", message, extra[1] if extra else None, allowed)


def _value_of(options: Sequence[str], arguments: Sequence[str]) -> str | None:
    """What was given for an option, the last time it stands there."""
    found = None
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in options:
            found = value if equals else "".join(arguments[index + 1 : index + 2]) or None
    return found


def _quoted(text: str) -> str | None:
    found = re.search(r"'([^']*)'", text)
    return found[1] if found else None
