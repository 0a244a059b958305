"""The functions for notebooks: the verdict of the command, tables that are safe, frames, errors;
and the example notebook, cell by cell, on small runs of the names that it reads."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import pytest
from fake_runs import full_record, write_run
from test_page import HOSTILE, Page, assert_harmless, parsed, squeezed
from tiny_runs import tiny_spec, untracked_run

import workbench
from workbench import Run, UserError, cli, compare_arms, compare_runs, load_run, load_runs, to_frame
from workbench.track.record import read_record, write_record
from workbench.track.store import Store

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.py"
DENSE = {"mlp_type": "dense"}
ALLOWED = {"div", "style", "table", "thead", "tbody", "tr", "th", "td", "p", "strong", "code"}
ALLOWED |= {"span", "ul", "li", "h4", "h5"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The four runs of the example: two models, two seeds."""
    home = tmp_path_factory.mktemp("notebook")
    store = Store(home / "mlruns")
    for name, seed, model in (
        ("quickstart", 42, {}),
        ("quickstart_dense", 42, DENSE),
        ("quickstart-s43", 43, {}),
        ("quickstart_dense-s43", 43, DENSE),
    ):
        laid = {"num_hidden_layers": 1, **model}
        untracked_run(tiny_spec(home, name, seed, model=laid), store)
    return store


@pytest.fixture(autouse=True)
def _this_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WB_HOME", str(store.home))


def command(capsys: Any, *arguments: str) -> Any:
    """What `wb compare --json` prints of the same runs."""
    cli._guarded(["compare", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def same(function: dict[str, Any], said: dict[str, Any]) -> None:
    """Two documents without the report, which only the command writes."""
    assert {**function, "report": None} == {**said, "report": None}


@pytest.mark.parametrize(
    ("runs", "options", "words", "verdict"),
    [
        (("quickstart", "quickstart_dense"), {}, [], "flagged"),
        (
            ("quickstart", "quickstart_dense"),
            {"treatment": ["model"], "claims": ["nll", "memory"]},
            ["--treatment", "model", "--claim", "nll", "--claim", "memory"],
            "comparable",
        ),
        (("quickstart", "quickstart-s43"), {}, [], "refused"),
        (
            ("quickstart", "quickstart-s43"),
            {"allow": {"seeds": "a look", "data": "the order follows"}, "at": 256},
            ["--allow", "seeds=a look", "--allow", "data=the order follows", "--at", "256"],
            "flagged",
        ),
    ],
    ids=["inferred", "declared", "refused", "allowed"],
)
def test_the_verdict_and_numbers_are_those_of_the_command(
    runs: tuple[str, str],
    options: Any,
    words: list[str],
    verdict: str,
    capsys: Any,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("workbench.compare.report.draw", lambda *_: {})
    found = compare_runs(*runs, **options)
    assert found.verdict == verdict
    same(found.to_json(), command(capsys, *runs, *words))


def test_arms_are_judged_as_by_the_command(store: Store, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("workbench.compare.arm_report.draw", lambda *_: {})
    arms = {
        "routed": ["quickstart", "quickstart-s43"],
        "dense": [load_run("quickstart_dense"), store.path_of("quickstart_dense-s43")],
    }
    found = compare_arms(arms, treatment="model")  # type: ignore[arg-type]
    words = ["--arm", "routed=quickstart,quickstart-s43", "--treatment", "model"]
    words += ["--arm", "dense=quickstart_dense,quickstart_dense-s43"]
    assert found.verdict == "comparable"
    same(found.to_json(), command(capsys, *words))


def test_a_run_is_found_by_name_id_prefix_and_folder(store: Store) -> None:
    run = load_run("quickstart")
    ways = [run.id, run.id[:12], run.folder, str(run.folder), run]
    assert [load_run(way).id for way in ways] == [run.id] * len(ways)
    assert load_run("quickstart", store=store) == load_run("quickstart", store=store.home) == run
    assert (run.name, run.seed, run.status) == ("quickstart", 42, "FINISHED")
    assert run.final == run.record.results.final
    assert run.curve("held_out/nll")[-1] == (512, run.final["held_out/nll"])
    assert [one.name for one in load_runs("*_dense*")] == [
        "quickstart_dense-s43",
        "quickstart_dense",
    ]
    assert load_runs(study="none") == ()


def test_a_run_that_died_is_not_still_going(tmp_path: Path, store: Store) -> None:
    """Its record says RUNNING for ever; whether it is, the lock of its folder says."""
    record = read_record(store.path_of("quickstart"))
    folder = tmp_path / "mlruns" / "runs" / "died"
    folder.mkdir(parents=True)
    write_record(record.model_copy(update={"status": "RUNNING", "id": "d" * 32}), folder)
    assert load_run(folder).status == "KILLED"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: load_run("quickstrat"), "no such run.*Did you mean 'quickstart'"),
        (lambda: load_run("quick"), "more than one run is meant.*quickstart-s43"),
        (lambda: load_run(Path("nowhere")), "nowhere: there is no run_config.json"),
        (
            lambda: load_run("quickstart").curve("held_out/nl"),
            "metrics.csv.*Did you mean 'held_out",
        ),
        (lambda: compare_runs("quickstart", "quickstart"), "the same run twice"),
        (lambda: compare_runs("quickstart", "quickstart_dense", at=7), "--at.*got 7.*allowed: 256"),
        (lambda: compare_runs("quickstart", "quickstart_dense", claims=["x"]), "got 'x'"),
        (lambda: compare_arms({"one": ["quickstart"]}), "compared with nothing"),
    ],
)
def test_a_mistake_is_one_clear_message(call: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        call()


def test_what_is_no_run_makes_no_frame() -> None:
    for what in ("quickstart", ["quickstart"]):
        with pytest.raises(TypeError, match="not str"):
            to_frame(what)  # type: ignore[arg-type]


def test_frames_hold_every_number_with_its_name() -> None:
    run = load_run("quickstart")
    frame = to_frame(run)
    assert frame.index.tolist() == [0, 1, 2, 3, 4]
    assert frame["held_out/nll"].iloc[-1] == run.final["held_out/nll"]
    assert frame["train/nll"].isna().tolist() == [True, False, False, False, False]
    runs = to_frame(load_runs())
    assert runs.loc["quickstart", "held_out/nll"] == run.final["held_out/nll"]
    assert len(runs) == 4
    pair = compare_runs("quickstart", "quickstart_dense", treatment=["model"])
    numbers = to_frame(pair)
    assert pair.results
    held_out = pair.results.numbers["held_out/nll"]
    assert held_out.documents
    row = numbers.loc["held_out/nll"]
    assert (row.a, row.b, row.difference) == (held_out.a, held_out.b, held_out.difference)
    assert (row.low, row.high, row.n) == (*held_out.documents.interval, held_out.documents.n)
    assert numbers.loc["tokens_per_s", "note"].startswith("refused: ")
    assert numbers.loc["tokens_per_s", ["a", "b", "difference"]].isna().all()
    arms = compare_arms(
        {"r": ["quickstart", "quickstart-s43"], "d": load_runs("*_dense*")}, treatment=["model"]
    )
    decided = to_frame(arms)
    assert decided[decided.decides].index.tolist() == [("d", "held_out/nll")]
    row = decided.loc[("d", "held_out/nll")]
    assert row.against == "r"
    assert row.low < row.difference < row.high
    # A refused comparison is the same table without rows: code that reads it needs no other case.
    refused = to_frame(compare_runs("quickstart", "quickstart-s43"))
    assert len(refused) == 0
    assert refused.columns.tolist() == numbers.columns.tolist()
    assert refused.dtypes.tolist() == numbers.dtypes.tolist()


def shown(value: Any) -> tuple[Page, str]:
    """What a notebook shows of a value, as HTML and as Markdown."""
    page = Page(value._repr_html_())
    assert set(page.tags) <= ALLOWED
    assert {name for _, name, _ in page.attributes} <= {"class", "scope", "tabindex"}
    source = value._repr_markdown_()
    return page, assert_harmless(source)


def test_tables_say_the_verdict_and_the_numbers() -> None:
    flagged = compare_runs("quickstart", "quickstart_dense")
    for text in (shown(flagged)[0].text, shown(flagged)[1]):
        for part in ("nll flagged (model)", "held_out/nll", "seed noise"):
            assert squeezed(part) in text
    refused = compare_runs("quickstart", "quickstart-s43")
    for text in (shown(refused)[0].text, shown(refused)[1]):
        assert squeezed("REFUSED for nll") in text
        assert squeezed("To compare them") in text
        assert "perplexity" not in text
    page, source = shown(load_runs())
    assert page.tags.count("tr") == 5
    assert page.of("td").count("FINISHED") == source.count("FINISHED") == 4
    page, _ = shown(load_run("quickstart"))
    assert "held_out/nll" in page.of("td")
    assert shown(load_runs("none"))[0].text == "noruns"


def test_text_of_runs_is_never_markup(tmp_path: Path) -> None:
    nasty = "\n".join(HOSTILE[:-7])
    a, b = full_record("a"), full_record("b")
    for number, (record, name) in enumerate(((a, HOSTILE[1]), (b, HOSTILE[3]))):
        record.name, record.error = name, nasty
        record.effective.data.source = nasty
        write_run(tmp_path / str(number), record, seed=number + 1)
    runs = [load_run(tmp_path / str(number)) for number in (0, 1)]
    comparison = compare_runs(*runs)
    arms = compare_arms({HOSTILE[0]: [runs[0]], HOSTILE[4]: [runs[1]]})
    for value in (runs[0], workbench.Runs(runs), comparison, arms):
        page, _ = shown(value)
        assert page.tags.count("table") == 1
        types = [token.type for token in parsed(value._repr_markdown_())]
        assert types.count("table_open") == 1


def test_importing_the_package_loads_nothing_and_comparing_neither_torch_nor_mlflow() -> None:
    code = """
import sys
import workbench
heavy = {"torch", "mlflow", "pandas", "numpy", "pydantic", "matplotlib", "scipy"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
assert {"load_run", "compare_runs", "to_frame"} <= set(dir(workbench))
found = workbench.compare_runs("quickstart", "quickstart_dense")
workbench.to_frame(found), workbench.to_frame(workbench.load_runs())
found._repr_html_(), workbench.load_run("quickstart")._repr_markdown_()
assert not {"torch", "mlflow", "matplotlib"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        workbench.nothing  # noqa: B018


def cells() -> list[str]:
    """The code cells of the example."""
    parts = re.split(r"^# %%", NOTEBOOK.read_text(), flags=re.MULTILINE)[1:]
    return [part for part in parts if not part.startswith(" [markdown]")]


def test_the_example_runs_cell_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook does it: the last expression of a cell is shown."""
    mpl.use("Agg")
    names: dict[str, Any] = {}
    values: list[Any] = []
    printed = io.StringIO()
    for cell in cells():
        tree = ast.parse(cell)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, str(NOTEBOOK), "exec"), names)
            if last is not None:
                expression = compile(ast.Expression(last.value), str(NOTEBOOK), "eval")
                values.append(eval(expression, names))
    kinds = [type(value).__name__ for value in values]
    expected = ["Runs", "Run", "str", "Comparison", "DataFrame", "Legend", "Comparison", "list"]
    assert kinds == [*expected, "ArmsComparison", "DataFrame"]
    for value in values:
        if hasattr(value, "_repr_html_") and not isinstance(value, pd.DataFrame):
            shown(value)
    assert len(values[0]) == 4
    assert names["comparison"].verdict == "comparable"
    assert "seeds" in values[7]
    assert len(values[9]) == 1
    assert "Did you mean 'model'" in printed.getvalue()
    import matplotlib.pyplot as plt

    plt.close("all")


def test_a_loaded_run_is_a_snapshot_and_equal_only_to_its_like() -> None:
    run = load_run("quickstart")
    assert isinstance(run, Run)
    assert run != replace(run, status="FAILED")
