"""Runs from tables of other trackers: what the mapping file says is known, and nothing else."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from workbench.compare import compare_runs
from workbench.errors import UserError
from workbench.import_commands import table as import_table
from workbench.importing.csv_runs import read_csv
from workbench.importing.draft import ImportedRun, keep
from workbench.track.store import Store

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
ALLOW = dict.fromkeys(
    ("tokenizer", "data", "budget", "optimizer", "precision", "evaluation"), "looked at by hand"
)
TABLE = "step,loss,val\n0,6,7\n10,5,6\n20,4,5\n"
MAP: dict[str, Any] = {
    "tokens": {"per_step": 100},
    "settings": {"seed": 1, "training.steps": 20},
    "metrics": {"train/nll": {"column": "loss", "unit": "nats/token", "contains": []}},
    "evaluation": {
        "unproven": {"nll": {"column": "val", "unit": "nats/token", "contains": []}},
    },
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "mlruns")


def bring_in(
    tmp_path: Path,
    store: Store,
    table: str = TABLE,
    name: str = "theirs",
    changes: dict[str, Any] | None = None,
) -> list[ImportedRun]:
    file, mapping = tmp_path / f"{name}.csv", tmp_path / f"{name}.yaml"
    file.write_text(table)
    mapping.write_text(json.dumps({**MAP, **(changes or {})}, indent=1))
    return [keep(draft, store) for draft in read_csv(file, mapping)]


def rows(run: ImportedRun) -> list[dict[str, str]]:
    with (run.folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_example_of_the_documentation(tmp_path: Path, store: Store) -> None:
    said = (EXAMPLES.parent / "importing.md").read_text()
    for name in ("nanogpt.map.yaml", "nanogpt.csv"):
        assert name in said
    assert (EXAMPLES / "nanogpt.map.yaml").read_text() in said
    drafts = read_csv(EXAMPLES / "nanogpt.csv", EXAMPLES / "nanogpt.map.yaml")
    small, moe = (keep(draft, store) for draft in drafts)
    record = small.record
    assert (record.name, record.status) == ("nanogpt-gpt-small", "FINISHED")
    assert record.spec["optimizer"] | {"betas": [0.9, 0.95], "lr": 6e-4} == record.spec["optimizer"]
    assert record.spec["model"]["mlp_type"] == "dense"
    assert record.spec["model"]["num_experts"] is None  # a dense model has none
    assert "num_experts" not in moe.record.spec["model"]  # and of the other nobody said
    assert record.params == record.effective.parameters.total == 10745088
    assert record.effective.budget.finished is True
    assert record.results.final["unproven/nll"] == pytest.approx(math.log(212.725))
    assert [(one.step, one.tokens) for one in record.points] == [
        (0, 0),
        (100, 3276800),
        (300, 9830400),
    ]
    assert record.imported
    assert any("in perplexity" in note for note in record.imported.notes)
    assert any("gpu_util" in note for note in record.imported.notes)
    original = small.folder / "original"
    assert (original / "nanogpt.csv").read_bytes() == (EXAMPLES / "nanogpt.csv").read_bytes()
    assert (original / "map.yaml").exists()

    found = compare_runs(small.folder, moe.folder, treatment=["model"])
    assert found.verdict == "refused"
    assert found.results is None
    missing = {leaf.path for leaf in found.judgement.with_outcome("missing")}
    wanted = ("data.order_digest", "budget.lr_trace", "evaluation.held_out.sha256")
    assert {f"effective.{leaf}" for leaf in wanted} <= missing
    allowed = compare_runs(small.folder, moe.folder, treatment=["model"], allow=ALLOW)
    assert allowed.verdict == "flagged"
    assert allowed.results
    difference = allowed.results.numbers["unproven/nll"].difference
    assert difference == pytest.approx(math.log(181.272 / 212.725))
    assert not any(name.startswith("held_out") for name in allowed.results.numbers)


@pytest.mark.parametrize("name", ["held_out", "held_out.wiki", "contaminated"])
def test_no_imported_number_is_called_held_out(tmp_path: Path, store: Store, name: str) -> None:
    with pytest.raises(UserError, match="nobody measured its overlap"):
        bring_in(tmp_path, store, changes={"evaluation": {name: {}}})


def test_names_of_sets_and_units(tmp_path: Path, store: Store) -> None:
    number = {"column": "val", "unit": "bits/token", "contains": []}
    changes = {
        "evaluation": {
            "train_split": {"nll": {**number, "column": "loss"}},
            "unproven.wiki": {
                "nll": number,
                "bits_per_byte": {"column": "val", "unit": "nats/byte"},
                "facts": {"documents": 7},
            },
        },
        "metrics": {},
    }
    (run,) = bring_in(tmp_path, store, changes=changes)
    last = rows(run)[-1]
    assert float(last["unproven.wiki/nll"]) == pytest.approx(5 * math.log(2))
    assert float(last["unproven.wiki/bits_per_byte"]) == pytest.approx(5 / math.log(2))
    assert float(last["train_split/nll"]) == pytest.approx(4 * math.log(2))
    sets = run.record.effective.evaluation
    assert sets["held_out.wiki"].status == "unproven"
    assert sets["held_out.wiki"].documents == 7
    assert run.record.spec["evaluation"]["sets"] == ["train_split", "held_out.wiki"]


def test_a_loss_with_something_in_it_is_no_nll(tmp_path: Path, store: Store) -> None:
    number = {"column": "val", "unit": "nats/token", "contains": ["label_smoothing"]}
    (run,) = bring_in(tmp_path, store, changes={"evaluation": {"unproven": {"nll": number}}})
    assert run.record.points == []
    assert run.record.results.final == {}
    assert rows(run)[-1]["unproven/loss"] == "5.0"
    assert run.record.imported
    (one,) = run.record.imported.corrections
    assert (one.leaf, one.recorded, one.here) == ("unproven/nll", "val", None)


def test_rows_of_one_step_may_stand_apart(tmp_path: Path, store: Store) -> None:
    """As loggers write them that log training and evaluation each by itself."""
    table = "step,loss,val\n10,5,\n10,,6\n20,4,\n20,,5\n"
    (run,) = bring_in(tmp_path, store, table)
    assert [(row["train/nll"], row["unproven/nll"]) for row in rows(run)] == [
        ("5.0", "6.0"),
        ("4.0", "5.0"),
    ]


def test_the_runs_of_columns_and_a_step_that_counts_from_zero(tmp_path: Path, store: Store) -> None:
    table = "Step,a - val,a - val__MIN,b - val,b - val__MIN\n9,6,6,6,6\n19,5,5,4,4\n"
    number = {"column": "{run} - val", "unit": "nats/token", "contains": []}
    changes = {
        "step": {"column": "Step", "offset": 1},
        "metrics": {},
        "evaluation": {"unproven": {"nll": number}},
    }
    first, second = bring_in(tmp_path, store, table, changes=changes)
    assert (first.record.name, second.record.name) == ("a", "b")
    assert [point.step for point in first.record.points] == [10, 20]
    assert second.record.results.final["unproven/nll"] == 4
    assert second.record.id != first.record.id


def test_tokens_by_a_column(tmp_path: Path, store: Store) -> None:
    table = "step,seen,loss,val\n10,1000,5,6\n20,2500,4,5\n"
    changes = {"tokens": {"column": "seen"}}
    (run,) = bring_in(tmp_path, store, table, changes=changes)
    assert [(one.step, one.tokens) for one in run.record.points] == [(10, 1000), (20, 2500)]
    assert run.record.tokens_per_step is None
    with pytest.raises(UserError, match="count of tokens that grows"):
        bring_in(tmp_path, store, table.replace("2500", "900"), "less", changes)
    (run,) = bring_in(tmp_path, store, table, "unknown", {"tokens": None})
    assert run.record.points == []  # nothing to compare at


def test_a_run_that_did_not_reach_its_plan(tmp_path: Path, store: Store) -> None:
    settings = {"seed": 1, "training.steps": 30}
    (run,) = bring_in(tmp_path, store, changes={"settings": settings})
    assert run.record.status == "UNKNOWN"
    assert "effective.budget.finished" in run.fidelity.missing
    with pytest.raises(UserError, match="there is a row after it"):
        bring_in(tmp_path, store, name="past", changes={"settings": {"training.steps": 10}})


def test_what_a_resumed_run_wrote_again(tmp_path: Path, store: Store) -> None:
    table = "step,loss,val\n5,6,7\n10,5,6\n15,4,5\n10,5.5,6.5\n20,4.5,5.5\n"
    with pytest.raises(UserError, match=r"theirs.csv:5: loss: the steps go back.*repeated_steps"):
        bring_in(tmp_path, store, table)
    (run,) = bring_in(tmp_path, store, table, "later", {"repeated_steps": "last"})
    assert [(row["step"], row["train/nll"]) for row in rows(run)] == [
        ("5", "6.0"),
        ("10", "5.5"),
        ("20", "4.5"),
    ]
    assert run.record.imported
    assert any("trained again" in one.recorded for one in run.record.imported.corrections)


def test_a_nan_is_a_number_or_the_lack_of_one(tmp_path: Path, store: Store) -> None:
    table = TABLE.replace("10,5,6", "10,nan,6")
    with pytest.raises(UserError, match=r"csv:3: loss: loss is NaN.*nan: measured"):
        bring_in(tmp_path, store, table)
    (run,) = bring_in(tmp_path, store, table, "measured", {"nan": "measured"})
    assert rows(run)[1]["train/nll"] == "nan"
    (run,) = bring_in(tmp_path, store, table, "missing", {"nan": "missing"})
    assert rows(run)[1]["train/nll"] == ""


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (TABLE.replace("10,5,6", "10,5;0,6"), r"theirs.csv:3: loss: not a number .*5;0"),
        (TABLE.replace("10,5,6", "10,1_0,6"), "not a number"),
        (TABLE.replace("10,5,6", "10.5,5,6"), r"csv:3: step: not a step"),
        (TABLE.replace("10,5,6", "10,5"), r"csv:3: 2 cells under 3 columns"),
        (TABLE.replace("20,4,5", "10,4,5"), r"csv:4: loss: loss stands twice at this step"),
        (TABLE.replace("loss", "losses"), r"no column 'loss' in theirs.csv.*'losses'"),
        (TABLE.replace("step", "iter"), "no column 'step'"),
        (TABLE.replace("val", "loss"), r"csv:1: a column stands twice"),
        ("step,loss,val\n", "no row below"),
        ("step,loss,val\n1,,\n", "none of the numbers"),
        ('step,loss,val\n1,"2,3\n', r"csv:2: not a row"),
    ],
)
def test_what_is_wrong_with_a_table(tmp_path: Path, store: Store, table: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        bring_in(tmp_path, store, table)
    assert not store.runs.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"setings": {}}, r"yaml:\d+: setings: there is no such key"),
        ({"settings": {"optimizer.learning_rate": 1}}, "optimizer.learning_rate: nothing that"),
        ({"settings": {"seed": "x"}}, r"yaml:\d+: settings.seed: .*integer"),
        ({"settings": {"seed": 10**400}}, r"yaml:\d+: a number of too many digits"),
        ({"settings": {"seed": {"column": "Seed"}}}, r"settings.seed: there is no column 'Seed'"),
        ({"settings": {"seed": {"param": "seed"}}}, r"theirs.csv has no params"),
        ({"settings": {"seed": {"column": "loss"}}}, r"csv:3: the setting in column 'loss' chang"),
        ({"settings": {"seed": {"column": "a", "value": 1}}}, "exactly one of these"),
        ({"facts": {"code.package_sha256": "0"}}, "nothing that can be imported"),
        ({"facts": {"data.train_sha256": "0"}}, "nothing that can be imported"),
        ({"metrics": {"lr": {"column": "loss", "unit": "1"}}}, "metrics.lr: nothing that can"),
        ({"metrics": {"train/nll": {"column": "loss"}}}, "metrics.train/nll.unit: is needed"),
        ({"metrics": {"train/nll": {"column": "loss", "unit": "nats/token"}}}, "has to be said"),
        (
            {"metrics": {"train/nll": {"column": "loss", "unit": "nats", "contains": []}}},
            "cannot be measured in it.*allowed: nats/token, bits/token, perplexity",
        ),
        ({"evaluation": {"validation": {}}}, "no such kind of evaluation set"),
        ({"tokens": {"per_step": 0}}, "an update consumes tokens"),
        ({"status": "done"}, "no such status"),
        (
            {"world_size": 1, "settings": {"training.seq_len": 7, "training.batch_size": 2}
             | {"training.gradient_accumulation_steps": 1}},
            "2 sequences of 7 tokens are not so many",
        ),
        ({"runs": {"column": "step"}, "name": "one"}, "would all have this name"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_mapping_file(
    tmp_path: Path, store: Store, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        bring_in(tmp_path, store, changes=changes)
    assert not store.runs.exists()


def test_values_that_are_texts(tmp_path: Path, store: Store) -> None:
    table = 'step,loss,val,on,n,b,kind,none\n20,4,5,True,4.0,"(0.9, 0.95)",A,None\n'
    settings = {
        "training.compile": {"column": "on"},
        "model.num_experts": {"column": "n"},
        "optimizer.betas": {"column": "b"},
        "model.attention_type": {"column": "kind", "values": {"A": "mha"}},
        "seed": {"column": "none"},
    }
    (run,) = bring_in(tmp_path, store, table, changes={"settings": settings})
    spec = run.record.spec
    assert spec["training"]["compile"] is True
    assert spec["model"] == {"num_experts": 4, "attention_type": "mha"}
    assert spec["optimizer"]["betas"] == [0.9, 0.95]
    assert "seed" not in spec  # what None was there, nobody knows
    settings["model.attention_type"]["values"] = {"B": "mha"}
    with pytest.raises(UserError, match="does not say what this column"):
        bring_in(tmp_path, store, table, "other", {"settings": settings})


@pytest.mark.parametrize("field", ["optimizer.lr", "seed"])
def test_a_whole_number_that_no_float_holds_is_an_error_of_its_place(
    tmp_path: Path, store: Store, field: str
) -> None:
    table = f"step,loss,val,huge\n20,4,5,{'9' * 309}\n"
    with pytest.raises(UserError, match=rf"theirs.csv:2: .*'huge'.*{field}|{field}.*99"):
        bring_in(tmp_path, store, table, changes={"settings": {field: {"column": "huge"}}})


def test_the_same_table_twice_is_the_same_run(tmp_path: Path, store: Store) -> None:
    (first,) = bring_in(tmp_path, store)
    (again,) = bring_in(tmp_path, store, changes={"name": "again", "metrics": {}})
    with pytest.raises(UserError, match="same run twice"):
        compare_runs(first.folder, again.folder)


def test_where_one_name_is_taken_no_run_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    mapping = EXAMPLES / "nanogpt.map.yaml"
    answer = import_table(EXAMPLES / "nanogpt.csv", mapping, ["gpt-moe"], None, True)
    assert isinstance(answer.content, dict)
    assert json.dumps(answer.content)
    assert [run["run"] for run in answer.content["runs"]] == ["nanogpt-gpt-moe"]
    with pytest.raises(UserError, match="exists"):
        import_table(EXAMPLES / "nanogpt.csv", mapping)
    assert [path.name for path in (tmp_path / "mlruns" / "runs").iterdir()] == ["nanogpt-gpt-moe"]
    with pytest.raises(UserError, match=r"no such run in nanogpt.csv.*'gpt-moe'"):
        import_table(EXAMPLES / "nanogpt.csv", mapping, ["gpt-mo"])
    with pytest.raises(UserError, match="2 runs cannot have one name"):
        import_table(EXAMPLES / "nanogpt.csv", mapping, None, "one")
