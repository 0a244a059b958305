"""The trained model as an MLflow model: a few files that name the checkpoint, and its metrics.

The weights stay where the run saved them: the model refers to the checkpoint by place and hash, so
that nothing is stored twice. `mlflow.pyfunc.load_model` reads it through `workbench.mlflow_model`.
Nothing here imports MLflow; its client and classes are handed in.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from workbench.errors import UserError
from workbench.json_files import read_json
from workbench.track import mlflow_fields as fields
from workbench.track.journal import read_metrics
from workbench.track.record import RunRecord

NAME = "model"
REFERENCE = "checkpoint.json"
LOADER = "workbench.mlflow_model"
CHECKPOINT_TAG = "workbench.checkpoint_sha256"
_FLAVOR = "workbench"
_EXAMPLE_TOKENS = 8
# What a server answers that keeps no models: one of MLflow 2, or a store that is a folder.
_UNSUPPORTED = ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED")


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that a run stands for; `sha256` is that of its manifest."""

    folder: Path
    step: int
    sha256: str


def checkpoint_of(folder: Path, record: RunRecord) -> Checkpoint | None:
    """The checkpoint of the last step of a run that has finished; None: there is none here."""
    tokens, each = record.results.tokens, record.tokens_per_step
    if record.status != "FINISHED" or record.imported or not tokens or not each:
        return None
    step = tokens // each
    path = folder / "checkpoints" / f"step_{step:08d}"
    try:
        sha256 = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    except OSError:
        return None
    return Checkpoint(path.resolve(), step, sha256)


def files_of(record: RunRecord, found: Checkpoint, run_id: str, model_id: str) -> dict[str, str]:
    """The files of the MLflow model: name -> text."""
    vocabulary = record.effective.tokenizer.vocab_size or -1
    ids: list[Any] = [_tensor("int64", [-1, -1])]
    logits = [_tensor("float32", [-1, -1, vocabulary])]
    example = [list(range(min(_EXAMPLE_TOKENS, max(vocabulary, 1))))]
    model = {
        "artifact_path": NAME,
        "flavors": {
            "python_function": {
                "loader_module": LOADER,
                "python_version": platform.python_version(),
                "env": {"virtualenv": "python_env.yaml"},
            },
            _FLAVOR: {"checkpoint": REFERENCE, "step": found.step, "sha256": found.sha256},
        },
        "mlflow_version": _version("mlflow"),
        "model_id": model_id,
        "model_uuid": model_id,
        "run_id": run_id,
        "signature": {"inputs": json.dumps(ids), "outputs": json.dumps(logits), "params": None},
        "saved_input_example_info": {
            "artifact_path": "input_example.json",
            "serving_input_path": "serving_input_example.json",
            "type": "ndarray",
        },
        "utc_time_created": str(record.ended or record.started or "").replace("T", " ")[:19],
    }
    reference = {
        "run": record.name,
        "run_id": record.id,
        "step": found.step,
        "checkpoint": str(found.folder),
        "sha256": found.sha256,
    }
    needed = [f"workbench=={_version('workbench')}", f"torch=={_version('torch')}"]
    environment = {
        "python": platform.python_version(),
        "build_dependencies": ["pip"],
        "dependencies": ["-r requirements.txt"],
    }
    return {
        "MLmodel": yaml.safe_dump(model, sort_keys=True),
        REFERENCE: json.dumps(reference, indent=1) + "\n",
        "input_example.json": json.dumps(example),
        "serving_input_example.json": json.dumps({"inputs": example}),
        "requirements.txt": "\n".join(needed) + "\n",
        "python_env.yaml": yaml.safe_dump(environment, sort_keys=True),
    }


def send(
    client: Any,
    entities: Any,
    experiment_id: str,
    run_id: str,
    folder: Path,
    record: RunRecord,
    sent: Mapping[str, str],
) -> tuple[str, str] | None:
    """Logs the run's model, linked to the run and to its last evaluation.

    Args:
        entities: the module `mlflow.entities`.
        sent: SHA-256 of a checkpoint -> the model that was logged of it.

    Returns:
        The checkpoint and its model; None: there is nothing to log, it is there, or the server
        keeps no models.

    Raises:
        mlflow.exceptions.MlflowException and others: the server did not take it.
    """
    found = checkpoint_of(folder, record)
    if found is None or found.sha256 in sent:
        return None
    try:
        model_id = _find_or_create(client, experiment_id, run_id, record, found)
    except Exception as error:
        if not _is_unsupported(error):
            raise
        return found.sha256, ""
    with tempfile.TemporaryDirectory(prefix="wb-model-") as temporary:
        for name, text in files_of(record, found, run_id, model_id).items():
            Path(temporary, name).write_text(text, encoding="utf-8")
        client.log_model_artifacts(model_id, temporary)
    client.finalize_logged_model(model_id, "READY")
    outputs = client.get_run(run_id).outputs
    if model_id not in [one.model_id for one in (outputs.model_outputs if outputs else [])]:
        client.log_outputs(run_id, [entities.LoggedModelOutput(model_id, found.step)])
    if metrics := _metrics(entities, run_id, model_id, folder, record, found):
        client.log_batch(run_id, metrics=metrics, synchronous=True)
    return found.sha256, model_id


def _is_unsupported(error: Exception) -> bool:
    """Whether a server has no such thing as a model, by its answer."""
    if isinstance(error, NotImplementedError | AttributeError):
        return True
    unknown_method = "failed with error code 405" in str(error)
    return unknown_method or getattr(error, "error_code", None) in _UNSUPPORTED


def _find_or_create(
    client: Any, experiment_id: str, run_id: str, record: RunRecord, found: Checkpoint
) -> str:
    """A process may have died between creating the model and noting so."""
    there = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'")
    for one in there:
        if one.tags.get(CHECKPOINT_TAG) == found.sha256:
            return str(one.model_id)
    model = record.spec.get("model", {})
    params = {key: fields.text_of(value) for key, value in model.items() if value is not None}
    made = client.create_logged_model(
        experiment_id,
        name=NAME,
        source_run_id=run_id,
        tags={CHECKPOINT_TAG: found.sha256, fields.RUN_ID_TAG: record.id},
        params={"step": str(found.step), **params},
        model_type=str(model.get("mlp_type", "")),
    )
    return str(made.model_id)


def _metrics(
    entities: Any, run_id: str, model_id: str, folder: Path, record: RunRecord, found: Checkpoint
) -> list[Any]:
    """The numbers of the model's own step, as they were sent before: the run has them once."""
    try:
        table = read_metrics(folder / "metrics.csv")
    except UserError:
        return []
    lines = [at for at, step in enumerate(table["step"]) if step == found.step]
    if not lines:
        return []
    row = {name: column[lines[-1]] for name, column in table.items()}
    sets = {one.name: one.digest for one in fields.datasets_of(record)}
    moment = fields.row_milliseconds(row, record)
    made = []
    for key, value in fields.metrics_of(row).items():
        name = key.rpartition("/")[0]
        more = {"dataset_name": name, "dataset_digest": sets[name]} if name in sets else {}
        made.append(
            entities.Metric(
                key, value, moment, found.step, model_id=model_id, run_id=run_id, **more
            )
        )
    return made


def _tensor(dtype: str, shape: list[int]) -> dict[str, Any]:
    return {"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "0"


def read_reference(folder: Path) -> dict[str, Any]:
    """What an MLflow model refers to.

    Raises:
        UserError: the file is not there, or not what was written.
    """
    path = folder / REFERENCE
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError.at(str(path), f"not a reference to a checkpoint: {error}") from None
    wanted = {"run": str, "run_id": str, "step": int, "checkpoint": str, "sha256": str}
    if not isinstance(found, dict) or any(type(found.get(k)) is not t for k, t in wanted.items()):
        raise UserError.at(str(path), "not a reference to a checkpoint", None, ", ".join(wanted))
    return found
