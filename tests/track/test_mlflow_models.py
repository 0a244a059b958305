"""The trained model in MLflow: read back by MLflow alone, it gives the logits of the checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import tiny_spec, untracked_run
from track.tracked_runs import assert_equal_to_file

from workbench.core.load_model import load_model
from workbench.errors import UserError
from workbench.track import mlflow_models as models
from workbench.track.mlflow_store import Feed, read_position
from workbench.track.store import Store

pytestmark = pytest.mark.slow


class NoModels:
    """A server of MLflow 2: it has never heard of models of their own."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def search_logged_models(self, *arguments: Any) -> Any:
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND

        raise MlflowException("404 != 200", error_code=ENDPOINT_NOT_FOUND)


def test_the_model_reads_back_and_is_linked_to_its_metrics(
    mlflow_store: Store, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    run = untracked_run(tiny_spec(tmp_path, "modelled"), mlflow_store)
    position = Feed(run.folder, target).push()
    (model_id,) = position.models.values()
    assert_equal_to_file(target, run.folder)  # the link did not log a number twice
    found = target.client.get_logged_model(model_id)
    assert str(found.status) == "READY"
    assert found.source_run_id == position.run_id
    assert found.params["mlp_type"] == "token_routed"
    linked = {(one.key, one.step): one for one in found.metrics}
    final = run.record.results.final
    for name, value in final.items():
        assert linked[name, 4].value == value
    digest = run.record.effective.evaluation["held_out"].sha256
    assert digest
    assert linked["unproven/nll" if "unproven/nll" in final else "held_out/nll", 4].dataset_digest
    (output,) = target.client.get_run(position.run_id).outputs.model_outputs
    assert (output.model_id, output.step) == (model_id, 4)

    local = tmp_path / "model"
    shutil.copytree(
        Path(found.artifact_location.removeprefix("file://").replace("%20", " ")), local
    )
    assert sum(path.stat().st_size for path in local.iterdir()) < 10_000  # and no weights
    loaded = mlflow.pyfunc.load_model(str(local))
    assert loaded.metadata.signature.outputs.inputs[0].shape == (-1, -1, 257)
    assert np.asarray(loaded.input_example).shape == (1, 8)
    ids = np.arange(64, dtype=np.int64).reshape(2, 32)
    expected = load_model(run.folder).model.logits(torch.from_numpy(ids))
    np.testing.assert_array_equal(loaded.predict(ids), expected.numpy())
    with pytest.raises(Exception, match=r"(?i)shape|type|schema"):
        loaded.predict(np.zeros(3, dtype=np.float32))

    # Sent again, from nothing but the folder, it stays one model.
    (run.folder / "mlflow.json").unlink()
    again = Feed(run.folder, target).push()
    assert list(again.models.values()) == [model_id]
    assert_equal_to_file(target, run.folder)

    # The checkpoint is another one, or gone: said, not loaded.
    reference = json.loads((local / models.REFERENCE).read_text())
    manifest = Path(reference["checkpoint"], "manifest.json")
    before = manifest.read_text()
    manifest.write_text(before + "\n")
    with pytest.raises(UserError, match="not the checkpoint that was logged"):
        mlflow.pyfunc.load_model(str(local))
    manifest.write_text(before)
    moved = tmp_path / "elsewhere"
    monkeypatch.setenv("WB_HOME", str(moved))
    (moved / "runs").mkdir(parents=True)
    shutil.move(run.folder, moved / "runs" / run.record.name)
    np.testing.assert_array_equal(
        mlflow.pyfunc.load_model(str(local)).predict(ids), expected.numpy()
    )
    shutil.rmtree(moved)
    with pytest.raises(UserError, match="are not on this machine"):
        mlflow.pyfunc.load_model(str(local))


def test_a_server_that_keeps_no_models_gets_all_else(
    mlflow_store: Store, target: Any, tmp_path: Path
) -> None:
    run = untracked_run(tiny_spec(tmp_path, "plainly"), mlflow_store)
    older = type(target)(NoModels(target.client), target.experiment_id, target.uri)
    Feed(run.folder, older).push()
    position = read_position(run.folder)
    assert position
    assert list(position.models.values()) == [""]
    assert position.status == "FINISHED"
    assert_equal_to_file(target, run.folder)


def test_a_run_of_the_command_line_logs_its_model(tmp_path: Path) -> None:
    """By its feeder, and MLflow's own address of the model loads it."""
    run = tiny_spec(tmp_path, "tiny")
    spec = tmp_path / "tiny.yaml"
    spec.write_text(run.model_dump_json())
    environment = {**os.environ, "WB_HOME": str(tmp_path / "store")}
    command = [sys.executable, "-m", "workbench", "run", str(spec)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    store = Store(tmp_path / "store")
    position = read_position(store.path_of("tiny"))
    assert position
    (model_id,) = position.models.values()
    script = (
        "import mlflow, numpy as np, sys; mlflow.set_tracking_uri(sys.argv[1]);"
        "m = mlflow.pyfunc.load_model('models:/' + sys.argv[2]);"
        "print(m.predict(np.arange(8).reshape(1, 8)).shape)"
    )
    command = [sys.executable, "-c", script, store.tracking_uri, model_id]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 8, 257)"
