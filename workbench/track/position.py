"""The note beside a run's metrics of what MLflow has of it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

POSITION = "mlflow.json"


class Position(BaseModel):
    """What of a run is known to be in MLflow."""

    model_config = ConfigDict(extra="ignore")

    uri: str
    experiment_id: str
    run_id: str
    last_step: int = -1
    params: bool = False
    tags_sha256: str | None = None
    datasets: list[str] = []
    additions: list[str] = []
    artifacts: dict[str, str] = {}
    models: dict[str, str] = {}  # SHA-256 of a checkpoint -> the logged model; "": it keeps none
    files_sha256: str | None = None
    status: str | None = None

    @property
    def page(self) -> str | None:
        """The address of the run's page, without a user or password; None where MLflow is a file of
        this machine, whose pages have an address only while `wb ui` serves them."""
        try:
            parts = urlsplit(self.uri)
            host, port = parts.hostname, parts.port
        except ValueError:
            return None
        if parts.scheme not in ("http", "https") or not host:
            return None
        host = f"[{host}]" if ":" in host else host
        server = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}"
        return f"{server}/#/experiments/{self.experiment_id}/runs/{self.run_id}"


def read_position(folder: Path) -> Position | None:
    """What was noted in the run folder; None where nothing (readable) was."""
    try:
        return Position.model_validate_json((folder / POSITION).read_bytes())
    except (OSError, ValidationError):
        return None
