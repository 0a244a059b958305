"""Runs that another trainer logged to MLflow: to a folder, to a database, to a server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from mlflow_servers import Server

from workbench.compare import compare_runs
from workbench.errors import StoreError, UserError
from workbench.importing.draft import ImportedRun, keep
from workbench.importing.mlflow_runs import read_mlflow
from workbench.track.store import Store

MAP: dict[str, Any] = {
    "name": "their-{run}",
    "tokens": {"metric": "tokens_seen"},
    "settings": {
        "seed": {"param": "seed"},
        "training.steps": {"param": "max_steps"},
        "optimizer.name": {"param": "optim", "values": {"adamw_torch": "adamw"}},
        "optimizer.lr": {"param": "learning_rate"},
        "training.grad_ckpt": {"param": "gradient_checkpointing"},
    },
    "facts": {"hardware.device_name": {"tag": "gpu"}},
    "metrics": {"train/nll": {"metric": "loss", "unit": "nats/token", "contains": []}},
    "evaluation": {
        "unproven": {"nll": {"metric": "eval_loss", "unit": "nats/token", "contains": []}},
    },
}


def log_runs(client: Any, experiment: str = "theirs") -> dict[str, str]:
    """Two runs of a trainer as it logs them, one that is still going, and one of this package."""
    found = {}
    where = client.create_experiment(experiment)
    for name, seed, end in (("a", 1, 4.0), ("b b", 2, 4.25), ("going", 3, 5.0), ("own", 4, 5.0)):
        run = client.create_run(where, run_name=name, tags={"gpu": "H100"}).info.run_id
        params = {"seed": seed, "max_steps": 20, "optim": "adamw_torch", "learning_rate": 3e-4}
        for key, value in (params | {"gradient_checkpointing": False, "extra": "x"}).items():
            client.log_param(run, key, value)
        for step in (10, 20):
            client.log_metric(run, "tokens_seen", step * 64, step=step)
            client.log_metric(run, "loss", 8.0 - step / 10, step=step)
            client.log_metric(run, "eval_loss", end + (20 - step) / 10, step=step)
        if name == "own":
            client.set_tag(run, "workbench.run_id", "0" * 32)
        if name != "going":
            client.set_terminated(run)
        found[name] = run
    return found


def mapping(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "theirs.map.yaml"
    path.write_text(json.dumps(MAP | changes, indent=1))
    return path


def check(tmp_path: Path, uri: str, ids: dict[str, str]) -> list[ImportedRun]:
    store = Store(tmp_path / "store")
    kept = [keep(draft, store) for draft in read_mlflow("theirs", uri, mapping(tmp_path))]
    assert [run.record.name for run in kept] == ["their-a", "their-b-b"]
    first = kept[0].record
    assert first.status == "FINISHED"
    assert first.started
    assert first.spec["optimizer"]["lr"] == 3e-4
    assert first.spec["training"] == {"steps": 20, "grad_ckpt": False}
    assert first.effective.hardware.device_name == "H100"
    assert [(one.step, one.tokens) for one in first.points] == [(10, 640), (20, 1280)]
    assert first.imported
    assert any("going" in note for note in first.imported.notes)
    assert any("params extra" in note for note in first.imported.notes)
    original = json.loads((kept[0].folder / "original" / "run.json").read_text())
    assert original["run_id"] == ids["a"]
    compared = compare_runs(kept[0].folder, kept[1].folder, treatment=["seed"])
    assert compared.verdict == "refused"
    missing = {leaf.path for leaf in compared.judgement.with_outcome("missing")}
    assert "effective.data.order_digest" in missing
    rules = ("tokenizer", "data", "budget", "seeds", "optimizer", "precision", "evaluation")
    allowed = compare_runs(
        kept[0].folder, kept[1].folder, allow=dict.fromkeys(rules, "looked at by hand")
    )
    assert allowed.verdict == "flagged"
    assert allowed.results
    assert allowed.results.numbers["unproven/nll"].difference == pytest.approx(0.25)
    return kept


def test_a_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "theirs"
    folder.mkdir()
    client = MlflowClient(folder.as_uri())
    ids = log_runs(client)
    check(tmp_path, str(folder), ids)

    def read(**options: Any) -> Any:
        return read_mlflow("theirs", str(folder), mapping(tmp_path), **options)

    (one,) = read(chosen=[ids["b b"]], name="mine")
    assert one.name == "mine"
    for name, said in (("going", "RUNNING there"), ("own", "wb list shows it"), ("c", "no such")):
        with pytest.raises(UserError, match=said):
            read(chosen=[name])
    number = MAP["metrics"]["train/nll"] | {"metric": "lose"}
    changed = mapping(tmp_path, metrics={"train/nll": number})
    with pytest.raises(UserError, match=r"no metric 'lose' in theirs at .*'loss'"):
        read_mlflow("theirs", str(folder), changed)
    mapping(tmp_path)
    with pytest.raises(UserError, match=r"no such experiment at .*'theirs'"):
        read_mlflow("their", str(folder), mapping(tmp_path))

    # A step that was logged twice, a NaN, an infinity: said, and taken as the file says.
    run = ids["a"]
    client.log_metric(run, "loss", math.nan, step=30, timestamp=2**41)
    with pytest.raises(UserError, match="loss at step 30: loss is NaN"):
        read()
    client.log_metric(run, "eval_loss", 3.0, step=20, timestamp=2**41)
    with pytest.raises(UserError, match="eval_loss stands twice"):
        read_mlflow("theirs", str(folder), mapping(tmp_path, nan="missing"))
    later = mapping(tmp_path, nan="missing", repeated_steps="last")
    first, _ = read_mlflow("theirs", str(folder), later)
    assert first.final["unproven/nll"] == 3.0


def test_what_is_not_there_is_said_and_not_made(tmp_path: Path) -> None:
    database, folder = tmp_path / "no.db", tmp_path / "folder"
    folder.mkdir()
    for uri in (f"sqlite:///{database}", str(folder), "nowhere"):
        with pytest.raises(UserError, match="--uri"):
            read_mlflow("theirs", uri, mapping(tmp_path))
    assert not database.exists()
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_database_and_a_server_over_it(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'theirs.db'}"
    client = MlflowClient(uri)
    ids = log_runs(client)
    client.log_metric(ids["a"], "loss", math.inf, step=15)
    run = check(tmp_path, uri, ids)[0]
    assert "15,,inf," in (run.folder / "metrics.csv").read_text()
    again = tmp_path / "again"
    again.mkdir()
    with Server(tmp_path / "server", uri) as server:
        check(again, server.address, ids)
    with pytest.raises(StoreError, match="MLflow cannot be read there"):
        read_mlflow("theirs", server.address, mapping(tmp_path))
