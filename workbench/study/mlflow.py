"""Tells MLflow how a study stands, in a process of its own that nothing waits for without end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.study.plan import now
from workbench.track.feeder import patience
from workbench.track.parents import SUMMARY
from workbench.track.provenance import PACKAGE, redact
from workbench.track.record import write_json


def tell_mlflow(
    folder: Path,
    where: tuple[str, str | None],
    status: str,
    summary: str,
    reports: Sequence[Path],
    say: Callable[[str], None],
    verdict: str | None = None,
) -> bool:
    """Writes `summary.json` and sends the study; False where MLflow did not take it in time.

    Args:
        where: the experiment, and the address where the runs name one.
        reports: the folders of its reports.
        verdict: what they come to, where there are any.

    Raises:
        StoreError: the store cannot be written.
    """
    experiment, uri = where
    document = {
        "status": status,
        "when": now(),
        "summary": summary,
        "experiment": experiment,
        "uri": uri and redact(uri),
        "reports": [str(path) for path in reports],
        "verdict": verdict,
    }
    write_json(folder / SUMMARY, document)
    environment = dict(os.environ)
    paths = [str(PACKAGE.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if uri:
        environment["MLFLOW_TRACKING_URI"] = uri
    seconds = patience()
    try:
        subprocess.run(
            [sys.executable, "-P", "-m", "workbench.track.parents", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.1, seconds),
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        say(f"MLflow does not have all of the study {folder.name} yet; to send it: wb sync")
        return False
    return True
