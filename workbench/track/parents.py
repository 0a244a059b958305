"""The MLflow run of a study, under which its runs are nested: found by the study's id, or made.

A run that a study planned carries its name as a tag; the study's folder in the store holds its
frozen plan with an id, and in `summary.json` how its last `wb study run` ended. Nothing here needs
MLflow: its client is passed in.

`python -m workbench.track.parents STUDY_FOLDER` brings MLflow up to the state of the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from workbench.errors import StoreError, UserError
from workbench.track.description import escaped
from workbench.track.feeder import short_reason, tracking_address
from workbench.track.mlflow_fields import milliseconds
from workbench.track.provenance import redact
from workbench.track.record import RunRecord
from workbench.track.store import Store

STUDY_ID_TAG = "workbench.study_id"
PARENT_TAG = "mlflow.parentRunId"
SUMMARY = "summary.json"
_PLAN = "plan.json"
_FILES = (_PLAN, "ledger.jsonl", SUMMARY)


def folder_of_study(record: RunRecord, run_folder: Path) -> Path | None:
    """The folder of the study that planned a run; None: there is none, or it is gone."""
    if record.study is None:
        return None
    folder = run_folder.resolve().parents[1] / "studies" / record.study[0]
    return folder if (folder / _PLAN).is_file() else None


def find_or_create(client: Any, experiment_id: str, folder: Path) -> str:
    """The id of the study's MLflow run. Call it while no other process does.

    Raises:
        what the client raises; OSError, ValueError or KeyError: the plan cannot be read.
    """
    plan = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
    study_id = "".join(filter(str.isalnum, str(plan["id"])))
    found = client.search_runs([experiment_id], f"tags.`{STUDY_ID_TAG}` = '{study_id}'", 1, 1)
    if found:
        return str(found[0].info.run_id)
    frozen = plan["versions"][0]
    run = client.create_run(
        experiment_id,
        start_time=milliseconds(frozen["when"]),
        tags={
            STUDY_ID_TAG: study_id,
            "workbench.study": plan["name"],
            "workbench.plan_sha256": frozen["sha256"],
            "mlflow.source.name": "workbench",
            "mlflow.source.type": "LOCAL",
        },
        run_name=plan["name"],
    )
    return str(run.info.run_id)


def push(client: Any, run_id: str, folder: Path, reports: list[Path]) -> None:
    """Sends how the study stands: its summary, and the files of its folder and reports."""
    plan = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
    summary = _summary(folder)
    said = (plan.get("question", ""), summary.get("summary", ""))
    note = "\n\n".join(escaped(text) for text in said if text)
    latest = plan["versions"][-1]
    tags = {
        "mlflow.note.content": note,
        "workbench.plan_sha256": latest["sha256"],
        "workbench.plan_changes": str(len(plan["versions"]) - 1),
        "workbench.treatment": ", ".join(latest["document"]["treatment"]),
        "workbench.primary": latest["document"]["primary"]["metric"],
        "workbench.summary": summary.get("summary", ""),
    }
    if verdict := summary.get("verdict"):
        tags["workbench.verdict"] = verdict
    for key, value in tags.items():
        client.set_tag(run_id, key, redact(value))
    for name in _FILES:
        if (folder / name).is_file():
            client.log_artifact(run_id, str(folder / name))
    for report in reports:
        client.log_artifacts(run_id, str(report), f"reports/{report.name}")
    if status := summary.get("status"):
        client.set_terminated(run_id, status, milliseconds(summary.get("when")))


def send_study(folder: Path) -> str | None:
    """Sends MLflow what it does not have of a study; returns why it did not take it."""
    from workbench.track.file_lock import exclusive
    from workbench.track.mlflow_store import connect

    summary, store = _summary(folder), Store(folder.resolve().parents[1])
    uri = os.environ.get("MLFLOW_TRACKING_URI") or summary.get("uri")
    try:
        target = connect(uri, store, summary.get("experiment", "workbench"))
        with exclusive(folder / ".mlflow.lock"):
            run_id = find_or_create(target.client, target.experiment_id, folder)
        reports = [Path(path) for path in summary.get("reports", []) if Path(path).is_dir()]
        push(target.client, run_id, folder, reports)
    except Exception as error:
        where = redact(tracking_address(uri, store))
        return f"MLflow at {where} did not take it: {short_reason(error)}"
    return None


def _summary(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def main(arguments: list[str]) -> int:
    """Sends one study; the exit code."""
    try:
        reason = send_study(Path(arguments[0]))
    except UserError as error:
        reason = str(error)
    if reason:
        print(f"error: {reason}", file=sys.stderr)
    return StoreError.exit_code if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
