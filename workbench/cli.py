"""Entry point of `wb`: one guard around every command, for its output, errors and exit code.

The commands, and with them everything that takes time to load, are imported inside the guard: a
Ctrl-C during start-up gets the same short answer as one later.
"""

from __future__ import annotations

import gc
import shlex
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from workbench.errors import Fault, StoreError, UserError, out_of_memory, reason_of
from workbench.launched import rank
from workbench.output import (
    PLACE,
    abandon_broken_streams,
    complain,
    write_document,
    write_line,
)
from workbench.signals import EndedError

INPUT_OUTPUT, CRASHED = StoreError.exit_code, 70
BROKEN_PIPE = 128 + signal.SIGPIPE


def main() -> None:
    """Runs the command that was asked for and ends the process with its exit code."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    # What is ignored from outside (nohup, a shell's background job) stays ignored.
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, _end)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")  # a terminal that lacks a letter is no error
    code = _guarded(sys.argv[1:])
    for number in heard:
        signal.signal(number, signal.SIG_DFL)
    abandon_broken_streams()
    # A last search for garbage takes up to a second, and the memory goes with the process anyway.
    # Triton, which comes with torch, takes what is not searched for a leak and says so.
    if "torch" not in sys.modules:
        gc.freeze()
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # whoever asks again does not want to wait
    raise EndedError(number)


def _guarded(arguments: list[str]) -> int:
    """Runs a command, prints its answer or error, and returns the exit code; raises nothing."""
    debug, as_json = "--debug" in arguments, "--json" in arguments
    try:
        try:
            return _run(arguments)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt as interrupt:
            number = interrupt.number if isinstance(interrupt, EndedError) else signal.SIGINT
            message = "interrupted" if number == signal.SIGINT else "terminated"
            complain(message)
            if as_json:
                _write_faults([Fault("wb", message)])
            return 128 + number
        except Exception as error:
            from workbench.track.provenance import redact

            if debug:
                complain(redact(traceback.format_exc()))
            faults, code = _explained(error, arguments)
            own = rank()
            if own and getattr(error, "agreed", False):
                return code  # of several processes the first one says it
            if as_json and not own:
                _write_faults(faults)
            else:
                for fault in faults:
                    said = f"rank {own}: error: {fault}" if own else f"error: {fault}"
                    complain(redact(said))
            return code
    except BrokenPipeError:
        return BROKEN_PIPE
    except StoreError as error:  # standard output takes no error document either
        complain(f"error: {error}")
        return error.exit_code


def _run(arguments: list[str]) -> int:
    from workbench.answers import Answer
    from workbench.commands import call

    answer = call(arguments or ["--help"])
    if not isinstance(answer, Answer):
        return answer if arguments else 2
    if isinstance(answer.content, str):
        write_line(answer.content)
    elif answer.content is not None:
        write_document(answer.content)
    return answer.exit_code


def _explained(error: Exception, arguments: list[str]) -> tuple[list[Fault], int]:
    """What to say of an error, and its exit code."""
    if isinstance(error, UserError):
        return list(error.faults), error.exit_code
    if (shortage := out_of_memory(error)) is not None:
        return [shortage], UserError.exit_code
    if isinstance(error, OSError):
        path = None if error.filename is None else str(error.filename)
        return [Fault(_place(error), reason_of(error), path)], INPUT_OUTPUT
    from workbench.usage import fault_of_usage, is_usage_error

    if is_usage_error(error):
        return [fault_of_usage(error, arguments)], 2
    return [Fault("wb", _crash(error, arguments))], CRASHED


def _place(error: OSError) -> str:
    """The file that an error of the system is about; else the line of ours that met it."""
    if error.filename is not None:
        return str(error.filename)
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].name == "echo":  # click's, for the help
        return PLACE
    package = Path(__file__).parent
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    if not own:
        return "wb"
    path = Path(own[-1].filename).relative_to(package.parent)
    return f"{path}:{own[-1].lineno} ({own[-1].name})"


def _crash(error: Exception, arguments: list[str]) -> str:
    """Writes a report of a fault of the program itself, and says so in one line."""
    import tempfile

    from workbench.track.provenance import redact

    what = f"a fault in wb itself: {type(error).__name__}: {error}"
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="wb-crash-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(redact(f"wb {shlex.join(arguments)}\n\n{text}"))
    except OSError as second:
        return f"{what}; no report could be written ({reason_of(second)}): --debug shows it"
    return f"{what}; report written to {file.name}"


def _write_faults(faults: list[Fault]) -> None:
    """The faults as a JSON document: the first as `error`, all of several as `errors` too."""
    from workbench.track.provenance import redact

    documents: list[dict[str, Any]] = [
        {
            "place": redact(f.place),
            "value": redact(f.value) if isinstance(f.value, str) else f.value,
            "allowed": f.allowed,
            "message": redact(f.message),
        }
        for f in faults
    ]
    more = {"errors": documents} if len(documents) > 1 else {}
    write_document({"error": documents[0], **more})
