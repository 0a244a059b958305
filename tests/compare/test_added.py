"""Numbers that were added to two runs are compared where both scored the same, and in pairs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_runs import tiny_spec, untracked_run

from workbench import evaluate_run as module
from workbench.compare import (
    Comparison,
    compare_arms,
    compare_runs,
    write_arms_report,
    write_report,
)
from workbench.compare.arm_results import ArmNumber
from workbench.compare.arms import ArmsComparison
from workbench.compare.seeds import SeedTest, seed_test
from workbench.errors import UserError
from workbench.evaluate_run import evaluate_run
from workbench.track.events import NullTracker
from workbench.track.record import read_record, write_record
from workbench.track.store import Store, read_entry

ENDS = ["sees", "likes a river", "tree", "and", "a", "the small old cat", "not"]


def write_inputs(folder: Path) -> tuple[Path, Path]:
    draw = np.random.default_rng(3)
    lines = []
    for number in range(60):
        choices = [str(end) for end in draw.choice(ENDS, 3, replace=False)]
        lines.append(json.dumps({"context": f"{number}", "choices": choices, "answer": number % 3}))
    (folder / "cats.jsonl").write_text("\n".join(lines))
    (folder / "more.txt").write_text("a cat\n\na river and a tree\n\nnot the dog\n")
    return folder / "cats.jsonl", folder / "more.txt"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their learning rate, with the same set and task added."""
    home = tmp_path_factory.mktemp("added")
    task, text = write_inputs(home)
    store = Store(home / "mlruns")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "tracker_for", lambda spec, store: NullTracker())
        for name, rate in (("a", 3e-3), ("b", 3e-2)):
            spec = tiny_spec(home, name, optimizer={"lr": rate}, training={"steps": 8})
            folder = untracked_run(spec, store).folder
            evaluate_run(read_entry(folder), store, {"more": text}, [task])
    return home / "mlruns/runs"


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def compared(runs: Path, **options: Any) -> Comparison:
    return compare_runs(runs / "a", runs / "b", **{"treatment": ["optimizer.lr"], **options})


def change(runs: Path, **values: Any) -> None:
    """Changes what the second run says of its task."""
    record = read_record(runs / "b")
    (task,) = (one for one in record.results.additions if one.name == "downstream/cats")
    for name, value in values.items():
        setattr(task, name, value)
    write_record(record, runs / "b")


def test_both_values_and_a_paired_interval_are_shown(runs: Path, tmp_path: Path) -> None:
    comparison = compared(runs, claims=["nll", "bpb"])
    numbers = comparison.to_json()["results"]
    records = [read_record(runs / name) for name in "ab"]
    for name in ("downstream/cats/acc", "downstream/cats/acc_norm", "held_out.more/nll"):
        number, prefix = numbers[name], name.rpartition("/")[0]
        own = [
            next(one for one in record.results.additions if one.name == prefix).values[name]
            for record in records
        ]
        assert [number["a"], number["b"]] == own
        low, high = number["documents"]["interval"]
        assert low <= number["difference"] <= high
        assert number["winner"] is None
        assert number["documents"]["n"] == (60 if name.startswith("downstream") else 3)
    difference = numbers["held_out.more/nll"]["difference"]
    assert difference != 0
    tables = [
        pq.read_table(runs / f"{name}/evaluations/step_00000008.downstream.cats.parquet")
        for name in "ab"
    ]
    hits = [np.array(table["right"].to_pylist(), float) for table in tables]
    assert numbers["downstream/cats/acc"]["difference"] == pytest.approx((hits[1] - hits[0]).mean())
    assert not any("stderr" in name or name.endswith("/items") for name in numbers)
    report = (write_report(comparison, tmp_path / "reports").report or tmp_path) / "report.md"
    assert "downstream/cats/acc" in report.read_text()
    assert "60 items, added by wb eval" in report.read_text()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sha256": "0" * 64}, "another content under this name"),
        ({"tokens": 256}, "not both were scored at 1,024 tokens"),
        ({"facts": {"context": "short"}}, "in another context"),
        ({"facts": {}}, "in another context"),
        ({"ran": {}}, "in another precision"),
    ],
)
def test_what_was_scored_otherwise_is_not_compared(
    runs: Path, changes: dict[str, Any], why: str
) -> None:
    change(runs, **changes)
    comparison = compared(runs)
    assert comparison.results is not None
    number = comparison.results.numbers["downstream/cats/acc"]
    assert (number.a, number.b, number.difference) == (None, None, None)
    assert why in (number.blank or "")


def test_what_one_run_alone_has_is_left_out_and_a_refused_claim_is_blank(runs: Path) -> None:
    change(runs, name="downstream/dogs")
    comparison = compared(runs)
    assert comparison.results is not None
    assert not [name for name in comparison.results.numbers if name.startswith("downstream")]
    refused = compare_runs(runs / "a", runs / "b", claims=["memory"])
    assert refused.results is not None
    assert refused.results.numbers["held_out.more/nll"].a is None
    assert "refused: optimizer" in (refused.results.numbers["held_out.more/nll"].blank or "")


def test_scores_that_contradict_the_record_are_an_error(runs: Path) -> None:
    path = runs / "b/evaluations/step_00000008.downstream.cats.parquet"
    table = pq.read_table(path)
    right = [not one for one in table["right"].to_pylist()]
    place = table.schema.get_field_index("right")
    pq.write_table(table.set_column(place, "right", pa.array(right)), path)
    with pytest.raises(UserError, match=r"not the items of downstream/cats"):
        compared(runs)
    path.write_bytes(b"no table")
    with pytest.raises(UserError, match="not a table of items"):
        compared(runs)
    path.unlink()
    comparison = compared(runs)
    assert comparison.results is not None
    number = comparison.results.numbers["downstream/cats/acc"]
    assert number.a is not None
    assert "not at hand" in (number.no_interval or "")
    text = runs / "b/evaluations/step_00000008.held_out.more.parquet"
    table = pq.read_table(text)
    place = table.schema.get_field_index("nll_sum")
    pq.write_table(table.set_column(place, "nll_sum", pa.array([1.0, 2.0, 3.0])), text)
    with pytest.raises(UserError, match=r"not the scores of held_out\.more"):
        compared(runs)


# -- arms of several seeds


@pytest.fixture(scope="module")
def of_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms of two seeds, with the same set and task added to every run."""
    home = tmp_path_factory.mktemp("arms")
    task, text = write_inputs(home)
    store = Store(home / "mlruns")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "tracker_for", lambda spec, store: NullTracker())
        for name, rate in (("a", 3e-3), ("b", 3e-2)):
            for seed in (1, 2):
                changes: dict[str, Any] = {"optimizer": {"lr": rate}, "training": {"steps": 4}}
                spec = tiny_spec(home, f"{name}-s{seed}", seed, **changes)
                folder = untracked_run(spec, store).folder
                evaluate_run(read_entry(folder), store, {"more": text}, [task])
    return home / "mlruns/runs"


def arms_of(home: Path, **options: Any) -> ArmsComparison:
    arms = {name: [home / f"{name}-s{seed}" for seed in (1, 2)] for name in "ab"}
    return compare_arms(arms, treatment=["optimizer.lr"], **options)


def test_arms_have_both_intervals_of_what_was_added(of_seeds: Path, tmp_path: Path) -> None:
    comparison = arms_of(of_seeds, primary="downstream/cats/acc", claims=["bpb"])
    results = comparison.pairs[0].results
    assert results is not None
    for name, size in (("downstream/cats/acc", 60), ("held_out.more/nll", 3)):
        number, prefix = results.numbers[name], name.rpartition("/")[0]
        own = [
            next(one for one in read_record(folder).results.additions if one.name == prefix)
            for folder in sorted(of_seeds.glob("[ab]-s*"))
        ]
        assert [*number.a, *number.b] == [one.values[name] for one in own]
        assert number.seeds is not None
        assert number.seeds.design == "paired"
        assert number.documents is not None
        assert number.documents.n == size
        low, high = number.documents.interval
        assert number.difference is not None
        assert low <= number.difference <= high
    assert comparison.pairs[0].deciding == ("downstream/cats/acc",)
    report = write_arms_report(comparison, tmp_path / "reports").report
    assert report is not None
    text = (report / "report.md").read_text()
    assert "downstream/cats/acc" in text
    assert "60 items, added by wb eval" in text
    assert "held_out.more/nll" in text


def test_an_arm_of_which_one_run_was_scored_otherwise_is_blank(
    of_seeds: Path, tmp_path: Path
) -> None:
    home = Path(shutil.copytree(of_seeds, tmp_path / "runs"))
    record = read_record(home / "b-s2")
    for one in record.results.additions:
        if one.name == "downstream/cats":
            one.sha256 = "0" * 64
        else:
            one.name = "held_out.other"
    write_record(record, home / "b-s2")
    results = arms_of(home).pairs[0].results
    assert results is not None
    number = results.numbers["downstream/cats/acc"]
    assert number.blank == "the runs scored another content under this name"
    assert (number.difference, number.seeds, number.documents) == (None, None, None)
    assert not [name for name in results.numbers if name.startswith("held_out.")]


def test_more_is_better_of_what_was_right_and_nobody_wins_what_is_not_known() -> None:
    test = seed_test([0.5, 0.51, 0.49], [0.6, 0.615, 0.588], "paired")
    assert isinstance(test, SeedTest)
    number = ArmNumber((0.5,), (0.6,), "1", "bpb", seeds=test)
    won = {
        name: number.decided(name, test.p).winner
        for name in ("downstream/cats/acc", "downstream/lm-eval.x/word_perplexity", "held_out/nll")
    }
    assert list(won.values()) == ["b", None, "a"]
    assert number.decided("downstream/lm-eval.x/brier_score", test.p).is_told_apart
