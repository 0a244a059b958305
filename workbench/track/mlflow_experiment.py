"""The experiment of a run in MLflow, found or made; MLflow's client is handed in."""

from __future__ import annotations

from typing import Any

from workbench.track.mlflow_fields import experiment_tags, safe_experiment


def find_or_create(client: Any, name: str, location: str | None) -> str:
    """The id of the experiment of this name, created and marked where needed.

    Args:
        location: where the artifacts of a new one go; None: the server knows.

    Raises:
        mlflow.exceptions.MlflowException and others: the server did not take it.
    """
    wanted, name = experiment_tags(name), safe_experiment(name)
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, location, tags=wanted))
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(name)  # another process was faster
        assert found is not None, f"experiment {name!r} exists and is not found"
    for key, value in wanted.items():
        if key not in found.tags:
            client.set_experiment_tag(found.experiment_id, key, value)
    return str(found.experiment_id)
