"""Runs whose evaluation sets overlap the training text: named so everywhere, and refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny_runs import tiny_spec, untracked_run

from workbench import run as runner
from workbench import views
from workbench.compare import compare_runs, render_terminal, write_report
from workbench.run import RunOutcome
from workbench.track.events import NullTracker, Values
from workbench.track.mlflow_fields import datasets_of
from workbench.track.record import read_record
from workbench.track.store import Store


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in row) for row in rng.integers(0, 300, (count, 40))]


def write(path: Path, documents: Sequence[str]) -> str:
    path.write_text("\n\n".join(documents))
    return str(path)


class Collector(NullTracker):
    """Keeps what a tracker would log."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, values: Values) -> None:
        self.rows.append(dict(values))


class World:
    """Runs on one training text, by the names of their evaluation sets."""

    def __init__(self, home: Path) -> None:
        self.home, self.store = home, Store(home / "mlruns")
        self.trained = texts(200, 0)
        self.train = write(home / "train.txt", self.trained)
        half = [" ".join([*one.split()[:30], *texts(1, 50)[0].split()]) for one in self.trained]
        self.files = {
            "fresh": write(home / "fresh.txt", texts(30, 1)),
            "mixed": write(home / "mixed.txt", [*texts(28, 1), *half[2:4], self.trained[9]]),
            "own": self.train,
        }
        self.tracked: dict[str, list[dict[str, Any]]] = {}

    def run(self, name: str, sets: Sequence[str], evaluated: Sequence[str]) -> RunOutcome:
        data = {
            "dataset": "text",
            "text_file": self.train,
            "text_unit": "blank_line",
            "held_out": [{"name": one, "path": self.files[one]} for one in sets],
        }
        evaluation = {"eval_steps": 2, "sets": list(evaluated)}
        changes = {"data": data, "evaluation": evaluation, "training": {"steps": 4}}
        spec = tiny_spec(self.home, name, **changes)
        collector = Collector()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "tracker_for", lambda spec, store: collector)
            outcome = runner.run(spec, self.store, ["run"], quiet=True)
        self.tracked[name] = collector.rows
        return outcome


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("held_out_runs"))


@pytest.fixture(scope="module")
def mixed(world: World) -> RunOutcome:
    return world.run(
        "mixed", ["fresh", "mixed"], ["train_split", "held_out.fresh", "held_out.mixed"]
    )


def test_a_contaminated_set_is_named_so_everywhere(world: World, mixed: RunOutcome) -> None:
    expected = {"train_split", "held_out.fresh", "contaminated.mixed"}
    with (mixed.folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    logged = {name.removesuffix("/nll") for name in rows[0] if name.endswith("/nll")}
    assert logged - {"train"} == expected
    assert "held_out.mixed" not in (mixed.folder / "metrics.csv").read_text()
    for row in world.tracked["mixed"]:
        assert not [name for name in row if name.startswith("held_out.mixed")]
    last = world.tracked["mixed"][-1]
    assert last["contaminated.mixed/nll"] == float(rows[-1]["contaminated.mixed/nll"])
    assert last["contaminated.mixed/clean_nll"] == float(rows[-1]["contaminated.mixed/clean_nll"])
    assert set(mixed.record.results.final) >= {f"{name}/nll" for name in expected}
    table = pq.read_table(mixed.folder / "evaluations/step_00000004.parquet").to_pydict()
    assert set(table["set"]) == expected
    assert {one.name for one in datasets_of(mixed.record)} == {"train", *expected}


def test_the_record_says_what_was_measured(mixed: RunOutcome) -> None:
    document = json.loads((mixed.folder / "run_config.json").read_text())
    facts = document["effective"]["evaluation"]
    assert {name: one["status"] for name, one in facts.items()} == {
        "train_split": "train_split",
        "held_out.fresh": "held_out",
        "held_out.mixed": "contaminated",
    }
    found = facts["held_out.mixed"]["overlap"]
    assert (found["overlapping_documents"], found["copies"]) == (3, 1)
    assert found["ngrams_in_training"] == 2 * 18 + 28
    again = read_record(mixed.folder).effective.evaluation
    assert again == mixed.record.effective.evaluation


def test_the_clean_nll_is_that_of_the_clean_documents(mixed: RunOutcome) -> None:
    table = pq.read_table(mixed.folder / "evaluations/step_00000004.parquet").to_pydict()
    rows = [i for i, name in enumerate(table["set"]) if name == "contaminated.mixed"]
    clean = [i for i in rows if table["clean"][i]]
    assert (len(rows), len(clean)) == (31, 28)
    nll = sum(table["nll_sum"][i] for i in clean) / sum(table["tokens"][i] for i in clean)
    final = mixed.record.results.final
    assert final["contaminated.mixed/clean_nll"] == pytest.approx(nll, rel=1e-12)
    assert final["contaminated.mixed/clean_nll"] != final["contaminated.mixed/nll"]
    assert final["held_out.fresh/clean_nll"] == final["held_out.fresh/nll"]
    assert {table["clean"][i] for i, name in enumerate(table["set"]) if name == "train_split"} == {
        None
    }


def test_a_page_and_a_list_show_it(world: World, mixed: RunOutcome) -> None:
    page = " ".join(views.run_page(mixed.record, "FINISHED", mixed.folder).split())
    assert "contaminated.mixed contaminated: 3 of 31 documents overlap the training text" in page
    assert "100 %: 1" in page
    table = views.run_table(views.run_rows(world.store))
    assert any(line.startswith("mixed ") for line in table.splitlines())


def test_the_held_out_set_is_the_training_text(world: World) -> None:
    """Beside nothing else: its numbers are refused as held out, with the share and a remedy."""
    runs = [world.run(name, ["own"], ["train_split", "held_out.own"]) for name in ("own", "again")]
    final = runs[0].record.results.final
    assert "contaminated.own/nll" in final
    assert not [name for name in final if name.startswith("held_out")]
    comparison = compare_runs(*(one.folder for one in runs))
    assert (comparison.verdict, comparison.exit_code()) == ("refused", 3)
    said = " ".join(render_terminal(comparison).split())
    facts = runs[0].record.effective.evaluation["held_out.own"]
    assert isinstance(facts.overlap, dict)
    over = facts.overlap["overlapping_documents"]
    assert over > 150
    assert f"contaminated: {over} of {facts.documents} documents overlap the training text" in said
    assert "evaluate on documents that the training text does not hold" in said


def test_runs_with_a_clean_set_are_compared_on_it(world: World, mixed: RunOutcome) -> None:
    other = world.run(
        "other", ["fresh", "mixed"], ["train_split", "held_out.fresh", "held_out.mixed"]
    )
    comparison = compare_runs(mixed.folder, other.folder)
    assert comparison.verdict == "comparable"
    assert "the held_out.fresh/nll of other" in " ".join(render_terminal(comparison).split())
    report = write_report(comparison, world.home / "reports").report
    assert report is not None
    markdown = " ".join((report / "report.md").read_text().split())
    assert "| A | contaminated.mixed | contaminated |" in markdown
    assert "not held out: 3 of 31 documents overlap the training text" in markdown


def test_random_ids_are_a_smoke_test(world: World) -> None:
    unset = dict.fromkeys(("text_file", "text_unit", "held_out_ratio", "order"))
    spec = tiny_spec(world.home, "random", data={"dataset": "random", **unset})
    outcome = untracked_run(spec, world.store)
    assert "unproven/nll" in outcome.record.results.final
    assert not [name for name in outcome.record.results.final if name.startswith("held_out")]
    said = views.closing_lines(outcome.record, outcome.folder, world.store, None, "wb")
    assert "none: random ids, a smoke test" in said
    assert "nll" not in said
    table = views.run_table(views.run_rows(world.store))
    (row,) = [line for line in table.splitlines() if line.startswith("random ")]
    assert "smoke test" in row
    assert f"{outcome.record.results.final['train_split/nll']:.4f}" not in row
    page = views.run_page(outcome.record, "FINISHED", outcome.folder)
    assert "no number of this run is a result" in page
