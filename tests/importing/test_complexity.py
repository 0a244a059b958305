"""Runs of the original runner as records: what is known, what is missing, what is corrected."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from importing.legacy_runs import ORIGINAL, Document, legacy_run

from workbench.compare import compare_runs, write_report
from workbench.errors import UserError
from workbench.importing.complexity import read_complexity
from workbench.importing.draft import ImportedRun, keep, render
from workbench.track.record import read_record, without_nulls
from workbench.track.store import Store

ALLOW = dict.fromkeys(
    ("tokenizer", "data", "budget", "optimizer", "precision", "evaluation"), "looked at by hand"
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "mlruns")


def bring_in(store: Store, folder: Path, name: str | None = None) -> ImportedRun:
    return keep(read_complexity(folder, name), store)


def corrections(run: ImportedRun) -> dict[str, tuple[Any, Any]]:
    assert run.record.imported
    return {one.leaf: (one.recorded, one.here) for one in run.record.imported.corrections}


def changed(tmp_path: Path, store: Store, name: str, **values: Any) -> ImportedRun:
    """The committed run with other values: of `args`, and of other parts as `part__key`."""

    def change(document: Document) -> None:
        for key, value in values.items():
            part, _, leaf = key.rpartition("__")
            document[part or "args"][leaf] = value

    return bring_in(store, legacy_run(tmp_path / name, change), name)


def test_what_the_runner_wrote_stands_in_the_record(store: Store) -> None:
    record = bring_in(store, ORIGINAL).record
    assert (record.name, record.status, record.params) == ("legacy-gqa", "FINISHED", 119172)
    assert (record.tokens_per_step, record.total_tokens, record.world_size) == (128, 2560, 1)
    assert record.spec["seed"] == 42
    assert record.spec["optimizer"]["lr"] == 3e-4
    assert record.spec["model"]["mlp_type"] == "token_routed"
    assert record.spec["model"]["top_k_primary_weight_final"] == 0.85
    assert [(one.step, one.tokens) for one in record.points] == [(10, 1280), (20, 2560)]
    assert record.results.final["unproven/nll"] == 5.884970
    # Read back from the disk it is the same, and its originals stand beside it.
    folder = store.path_of("legacy-gqa")
    assert read_record(folder) == record
    for name in ("run_config.json", "metrics.csv"):
        assert (folder / "original" / name).read_bytes() == (ORIGINAL / name).read_bytes()
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["train/nll"]) for row in rows][-1] == 5.903047
    assert [row["unproven/nll"] for row in rows] == ["", "", "5.974131", "", "5.88497"]


def test_what_was_asked_for_is_not_what_ran(store: Store) -> None:
    """Nothing that only a run here can know is there, and nothing is taken from a request."""
    run = bring_in(store, ORIGINAL)
    ran = run.record.effective
    assert ran.data.train_sha256 is None  # the index said so, and nobody hashed the tokens
    assert ran.evaluation["held_out"].sha256 is None
    assert ran.optimizer.warmup_steps is None
    assert (ran.precision.matmul, ran.precision.master_dtype) == (None, None)
    assert ran.code.package_sha256 is None
    assert all(p.order_digest is None and p.lr_trace is None for p in run.record.points)
    assert run.record.results.tokens_per_s is None
    assert run.fidelity.known > 60
    assert {"effective.data.order_digest", "effective.budget.lr_trace"} <= set(run.fidelity.missing)


def test_liger_on_a_cpu_was_the_fallback(tmp_path: Path, store: Store) -> None:
    run = bring_in(store, ORIGINAL)
    leaf = "effective.execution.loss_backend"
    assert run.record.effective.execution.loss_backend == "full logits"
    assert corrections(run)[leaf] == ("liger", "full logits")
    assert run.record.spec["training"]["loss_backend"] == "auto"
    on_gpu = changed(tmp_path, store, "gpu", backend__device="cuda:0", backend__device_name="X")
    assert on_gpu.record.effective.execution.loss_backend == "liger"
    assert leaf not in corrections(on_gpu)
    chunked = changed(tmp_path, store, "chunked", loss_backend_active="chunked")
    assert chunked.record.effective.execution.loss_backend == "chunked"


def test_bf16_on_a_cpu_was_float32_and_elsewhere_is_not_known(tmp_path: Path, store: Store) -> None:
    leaf = "effective.precision.compute_dtype"
    plain = bring_in(store, ORIGINAL)
    assert plain.record.effective.precision.compute_dtype == "float32"
    assert leaf not in corrections(plain)
    claimed = changed(tmp_path, store, "bf16", bf16=True)
    assert claimed.record.effective.precision.compute_dtype == "float32"
    assert corrections(claimed)[leaf][1] == "float32"
    gpu = changed(tmp_path, store, "gpu", bf16=True, backend__device="cuda")
    assert gpu.record.effective.precision.compute_dtype is None
    assert leaf in gpu.fidelity.missing


@pytest.mark.parametrize(
    "paths",
    [
        {"eval_tokens_path": None},
        {"eval_tokens_path": "token_shard/train"},
        {"eval_tokens_path": None, "dataset": "text"},
    ],
)
def test_an_eval_from_the_training_split_is_not_held_out(
    tmp_path: Path, store: Store, paths: dict[str, Any]
) -> None:
    run = changed(tmp_path, store, "tail", **paths)
    assert run.record.spec["evaluation"]["sets"] == ["train_split"]
    assert run.record.results.final.keys() == {"train_split/nll", "train_split/perplexity"}
    assert "evaluation.sets" in corrections(run)
    assert run.record.effective.evaluation["train_split"].status == "train_split"


def test_a_shard_of_the_same_content_is_the_training_split(tmp_path: Path, store: Store) -> None:
    def same(document: Document) -> None:
        shards = document["dataset_shards"]
        shards["eval"]["sha256"] = shards["train"]["sha256"]

    run = bring_in(store, legacy_run(tmp_path / "old", same))
    assert run.record.spec["evaluation"]["sets"] == ["train_split"]


def test_losses_with_other_terms_inside_are_no_nll(tmp_path: Path, store: Store) -> None:
    for values in ({"label_smoothing": 0.1}, {"z_loss": 1e-4}):
        run = changed(tmp_path, store, f"with-{next(iter(values))}", **values)
        assert run.record.results.final == {}
        assert run.record.points == []
        head = (run.folder / "metrics.csv").read_text().partition("\n")[0]
        assert "nll" not in head
        assert "train_loss" in head


def test_several_processes(tmp_path: Path, store: Store) -> None:
    """The loss was the first one's alone; the gradient norms were inflated."""

    def two(document: Document) -> None:
        document.update(world_size=2, tokens_per_step=256, total_tokens=5120)

    run = bring_in(store, legacy_run(tmp_path / "old", two))
    head = (run.folder / "metrics.csv").read_text().partition("\n")[0].split(",")
    assert "train/nll" not in head
    assert "routed_grad_norm" not in head
    assert run.record.effective.optimizer.sequences_per_update == 4
    assert run.record.effective.execution.parallel is None


def test_mha_had_as_many_kv_heads_as_heads(tmp_path: Path, store: Store) -> None:
    run = changed(tmp_path, store, "mha", model_config__attention_type="mha")
    assert run.record.spec["model"]["num_key_value_heads"] == 4
    assert corrections(run)["model.num_key_value_heads"] == (2, 4)


def test_a_width_that_was_cut_off(tmp_path: Path, store: Store) -> None:
    run = changed(tmp_path, store, "cut", model_config__intermediate_size=66)
    assert run.record.spec["model"]["intermediate_size"] == 64


def test_a_mechanism_without_a_name_here_equals_nothing(tmp_path: Path, store: Store) -> None:
    run = changed(tmp_path, store, "guided", model_config__use_mu_guidance=True)
    assert "mlp_type" not in run.record.spec["model"]
    assert "model.mlp_type" in run.fidelity.missing
    again = changed(tmp_path, store, "guided-43", model_config__use_mu_guidance=True, seed=43)
    found = compare_runs(run.folder, again.folder, treatment=["seed"])
    missing = {leaf.path for leaf in found.judgement.with_outcome("missing")}
    assert "model.mlp_type" in missing


def test_a_dense_run_has_no_experts(tmp_path: Path, store: Store) -> None:
    run = changed(tmp_path, store, "dense", model_config__mlp_type="swiglu")
    assert run.record.spec["model"]["mlp_type"] == "dense"
    assert run.record.spec["model"]["num_experts"] is None
    assert run.record.spec["optimizer"]["expert_lr_scale"] is None


def test_rows_that_a_resume_trained_again_are_left_out(tmp_path: Path, store: Store) -> None:
    def resumed(lines: list[str]) -> list[str]:
        again = lines[4].replace("5.924377", "5.111111")
        return [*lines[:5], *lines[3:4], again, *lines[5:]]  # 10 and 15 twice

    run = bring_in(store, legacy_run(tmp_path / "old", table=resumed))
    with (run.folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 5, 10, 15, 20]
    assert rows[3]["train/nll"] == "5.111111"
    assert "metrics.csv" in corrections(run)


def test_a_run_without_its_last_row_may_not_have_ended(tmp_path: Path, store: Store) -> None:
    run = bring_in(store, legacy_run(tmp_path / "old", table=lambda lines: lines[:-1]))
    assert run.record.status == "UNKNOWN"
    assert "effective.budget.finished" in run.fidelity.missing


def test_a_comparison_is_refused_for_what_is_missing_and_names_it(
    tmp_path: Path, store: Store
) -> None:
    first = bring_in(store, ORIGINAL)
    second = changed(tmp_path, store, "other", model_config__top_k=1)
    found = compare_runs(first.folder, second.folder)
    assert found.verdict == "refused"
    assert found.results is None
    missing = {leaf.path for leaf in found.judgement.with_outcome("missing")}
    assert {
        "effective.data.order_digest",
        "effective.data.train_sha256",
        "effective.budget.lr_trace",
        "effective.evaluation.held_out.sha256",
        "effective.tokenizer.sha256",
    } <= missing
    reported = write_report(found, tmp_path / "reports")
    assert reported.report
    text = (reported.report / "report.md").read_text()
    assert "was imported from" in text
    assert "Liger's kernels need a GPU" in text
    assert "wb run SPEC" not in text


def test_what_is_missing_can_be_allowed_with_a_reason(tmp_path: Path, store: Store) -> None:
    def better(lines: list[str]) -> list[str]:
        return [line.replace("5.884970", "5.784970") for line in lines]

    first = bring_in(store, ORIGINAL)
    second = bring_in(store, legacy_run(tmp_path / "old", table=better), "better")
    found = compare_runs(first.folder, second.folder, allow=ALLOW)
    assert found.verdict == "flagged"
    assert found.at == 2560
    assert found.results
    number = found.results.numbers["unproven/nll"]
    assert number.difference == pytest.approx(-0.1)
    assert number.documents is None  # and no interval is drawn from nothing


def test_the_same_run_under_two_names_is_the_same_run(store: Store) -> None:
    first, second = bring_in(store, ORIGINAL), bring_in(store, ORIGINAL, "again")
    with pytest.raises(UserError, match="same run twice"):
        compare_runs(first.folder, second.folder)


def test_an_existing_run_is_not_overwritten_and_nothing_is_left(store: Store) -> None:
    before = bring_in(store, ORIGINAL).record
    with pytest.raises(UserError, match="exists"):
        bring_in(store, ORIGINAL)
    assert read_record(store.path_of("legacy-gqa")) == before
    assert [path.name for path in store.home.iterdir()] == ["runs"]


def test_numbers_changed_after_the_import_are_noticed(tmp_path: Path, store: Store) -> None:
    first = bring_in(store, ORIGINAL)
    second = changed(tmp_path, store, "other", seed=43)
    path = first.folder / "metrics.csv"
    path.write_text(path.read_text().replace("5.88497", "4.88497"))
    with pytest.raises(UserError, match="when the run was imported"):
        compare_runs(first.folder, second.folder)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("points", 0, "order_digest"), "0" * 64),
        (("effective", "code", "package_sha256"), "0" * 64),
        (("effective", "evaluation", "held_out", "status"), "held_out"),
        (("points", 1, "tokens"), 7),
        (("params",), 7),
    ],
)
def test_an_imported_record_cannot_prove_what_it_has_not_seen(
    tmp_path: Path, store: Store, path: tuple[Any, ...], value: Any
) -> None:
    first = bring_in(store, ORIGINAL)
    second = changed(tmp_path, store, "other", seed=43)
    record = second.folder / "run_config.json"
    document = json.loads(record.read_text())
    tree: Any = document
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value
    record.write_text(json.dumps(document))
    with pytest.raises(UserError):
        compare_runs(first.folder, second.folder)


def test_a_run_that_was_not_imported_knows_its_own_facts(tmp_path: Path, store: Store) -> None:
    """Without the mark of an import, what is not known is a damaged record."""
    folder = bring_in(store, ORIGINAL).folder
    document = json.loads((folder / "run_config.json").read_text())
    del document["imported"]
    (folder / "run_config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="knows its"):
        read_record(folder)


def test_every_fault_of_a_record_is_told_at_once(tmp_path: Path) -> None:
    def broken(document: Document) -> None:
        document["args"]["seed"] = "x"
        del document["args"]["steps"]
        document["params"] = None

    with pytest.raises(UserError) as caught:
        read_complexity(legacy_run(tmp_path / "a", broken))
    assert {fault.place.rpartition(": ")[2] for fault in caught.value.faults} == {
        "args.seed",
        "args.steps",
        "params",
    }

    def contradictory(document: Document) -> None:
        document.update(tokens_per_step=1, schema_version=9)

    with pytest.raises(UserError) as caught:
        read_complexity(legacy_run(tmp_path / "b", contradictory))
    assert len(caught.value.faults) == 3
    (tmp_path / "b" / "metrics.csv").unlink()
    with pytest.raises(UserError, match=r"metrics\.csv"):
        read_complexity(tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(UserError, match=r"run_config\.json"):
        read_complexity(tmp_path / "b")


def test_what_is_said_of_an_import(store: Store) -> None:
    run = bring_in(store, ORIGINAL)
    text = render(run)
    assert f"known      {run.fidelity.known} of the" in text
    assert "effective.data: train_sha256" in text
    assert json.dumps(run.to_json())
    # Its spec is no whole one, and whoever needs one is told so.
    with pytest.raises(UserError, match="imported"):
        assert run.record.run_spec
    assert without_nulls(run.record.spec)["seed"] == 42
