"""What `wb plan` says of a file: of a run spec, or of a cluster plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench import cluster_plan, plan
from workbench.spec.cluster import load_cluster_plan
from workbench.spec.load import is_cluster_plan, load_spec, read_source
from workbench.track.store import Store


def plan_file(path: Path, overrides: list[str]) -> tuple[dict[str, Any], str]:
    """The document and the page of a file.

    Raises:
        UserError: it is neither, or wrong; with every fault found.
    """
    if is_cluster_plan(read_source(path).values):
        found = cluster_plan.cluster_plan(load_cluster_plan(path, overrides))
        return found, cluster_plan.render(found)
    document = plan.plan(load_spec(path, overrides), Store())
    return document, plan.render(document)
