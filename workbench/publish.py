"""Tells the runs of a comparison that they took part in it, and MLflow through them."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import UserError
from workbench.track.comparisons import ComparisonNote, note_comparison
from workbench.track.feeder import send_run
from workbench.track.mlflow_store import read_position
from workbench.track.server_files import is_fetched

_UNNOTICED_SECONDS = 2.0


def publish(
    document: Mapping[str, Any],
    allow: Mapping[str, str],
    sides: Sequence[str],
    runs: Sequence[Path],
    report: Path,
    say: Callable[[str], None],
) -> None:
    """Notes the comparison in every run's folder and sends report and tags to MLflow.

    Nothing here fails: a comparison holds without MLflow. What was not sent is said, with the
    command that sends it later.

    Args:
        document: what `wb compare --json` prints.
        allow: rule -> reason, of the rules that were overridden.
        sides: what the two sides are called.
        runs: the folders of all the runs compared.
    """
    treatment = document["treatment"]
    said = ", ".join(treatment["names"]) or "none"
    note = ComparisonNote(
        report="",
        sides=list(sides),
        verdict=document["verdict"],
        claims=document["claims"],
        treatment=f"{said} (inferred)" if treatment["inferred"] else said,
        allow=dict(allow),
        ruleset=document["ruleset"],
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    noted = []
    for folder in runs:
        try:
            note_comparison(folder, report, note)
            noted.append(folder)
        except UserError as error:
            say(f"the comparison is not noted in {folder.name}: {error}")
    unsent, reason = _send(noted, say)
    if unsent:
        names = shlex.join(folder.name for folder in unsent if not is_fetched(folder))
        later = f". Later: wb sync {names}" if names else ""
        say(f"MLflow does not have this report: {reason}{later}")


def _send(runs: Sequence[Path], say: Callable[[str], None]) -> tuple[list[Path], str]:
    """Sends the runs that MLflow knows; the first that fails ends it. Returns the rest, and why."""
    waiting = threading.Timer(
        _UNNOTICED_SECONDS, say, ("sending the report to MLflow (Ctrl-C: do not wait)",)
    )
    waiting.daemon = True
    waiting.start()
    unknown = []
    try:
        for place, folder in enumerate(runs):
            if read_position(folder) is None:
                unknown.append(folder)
            elif reason := send_run(folder):
                return [*unknown, *runs[place:]], reason
    except UserError as error:
        return list(runs), str(error)
    except KeyboardInterrupt:
        return list(runs), "you did not wait"
    finally:
        waiting.cancel()
    return unknown, "it does not have these runs yet"
