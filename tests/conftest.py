"""What holds for every test: no server, store or haste of the machine, no setting of torch left."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from workbench.process import prepare_process

# Also where the machine has much else to do, a run of the tests arrives in MLflow.
os.environ["WB_MLFLOW_WAIT"] = "400"

# A shell ignores Ctrl-C for what it starts in the background, and so would every process tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As a run does, before torch is loaded: threads that spin make tiny steps slow on busy machines.
prepare_process()


@pytest.fixture(autouse=True)
def _own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever server or store the machine is set to, the tests use their own."""
    for name in ("MLFLOW_TRACKING_URI", "WB_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture(autouse=True)
def _torch_settings() -> Iterator[None]:
    """A run sets torch to deterministic kernels for its whole process: put that back."""
    yield
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)
