"""The fields of a run record, each with how a difference of it shows."""

from __future__ import annotations

from typing import Literal

# How a difference of each field of a record shows. `judged`: as the leaves that a comparison makes
# of it. `checked`: it repeats what is judged, and contradicting it is an error.
# `measured`: the numbers that are compared. `free`: who, when, where, and other words for a fact.
RECORD_FIELDS: dict[str, Literal["judged", "checked", "measured", "free"]] = {
    "schema_version": "free",  # what an older one lacks is missing; a newer one is not read
    "id": "free",
    "name": "free",
    "status": "judged",
    "started": "free",
    "ended": "free",
    "error": "free",
    "spec": "judged",
    "spec_sha256": "checked",
    "effective": "judged",
    "points": "judged",
    "resumes": "free",  # `effective.code.resumed_with` and its neighbours are judged
    "results": "measured",
    "provenance": "free",
    "git_commit": "free",
    "params": "checked",
    "world_size": "checked",
    "parameter_table": "free",  # `effective.optimizer.groups_sha256` is its hash
    "tokens_per_step": "checked",
    "total_tokens": "judged",
    "backend": "free",
    "model_config_": "checked",
    "mlflow": "free",
    "imported": "checked",  # a record that claims it must not hold what only a run here can prove
}
