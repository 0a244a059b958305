"""Stores for the tests of tracking: fresh ones, and one with an MLflow database for all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from workbench.track.store import Store

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when mlflow is imported


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of its own, without an MLflow database until somebody needs one."""
    return Store(tmp_path / "mlruns")


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever server the machine is set to, the tests use their own."""
    for name in ("MLFLOW_TRACKING_URI", "WB_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One store with a database for all tests that read MLflow back: to create it takes seconds."""
    home = tmp_path_factory.mktemp("a home with spaces")
    return Store(home / "mlruns")


@pytest.fixture(scope="session")
def target(mlflow_store: Store) -> Any:
    """The connection to that store's database."""
    from workbench.track.mlflow_store import connect

    return connect(mlflow_store.tracking_uri, mlflow_store, "workbench")
