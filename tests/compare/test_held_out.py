"""What a record says of its evaluation sets is checked, judged, and shown."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_runs import DOCUMENTS, LENGTHS, changed_table, full_record, write_run

from workbench.compare import Comparison, compare_runs, render_terminal
from workbench.compare.report import render_markdown
from workbench.errors import UserError
from workbench.views import run_page

Change = Callable[[dict[str, Any]], Any]
CONTAMINATED = {
    "ngrams_in_training": 3_000,
    "share": 0.3,
    "copies": 1,
    "overlapping_documents": 3,
    "overlapping_tokens": int(LENGTHS[:3].sum()),
    "histogram": [DOCUMENTS - 3, 0, 0, 0, 2, *[0] * 6, 1],
}


def facts_of(run: Path) -> dict[str, Any]:
    document = json.loads((run / "run_config.json").read_text())
    found: dict[str, Any] = document["effective"]["evaluation"]["held_out"]
    return found


def change_facts(run: Path, change: Change) -> None:
    path = run / "run_config.json"
    document = json.loads(path.read_text())
    change(document["effective"]["evaluation"]["held_out"])
    path.write_text(json.dumps(document))


def change_rows(run: Path, change: Callable[[list[dict[str, str]]], Any]) -> None:
    path = run / "metrics.csv"
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    change(rows)
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def rename(run: Path, status: str) -> None:
    """The numbers of the held-out set under the name of another status, in every file."""
    path = run / "metrics.csv"
    path.write_text(path.read_text().replace("held_out/", f"{status}/"))
    for file in (run / "evaluations").glob("*.parquet"):
        with changed_table(file) as table:
            table["set"] = [one.replace("held_out", status) for one in table["set"]]


def contaminate(run: Path, first: int = 0) -> Path:
    """Three documents of the held-out set stand in the training text, and it all says so."""
    over = range(first, first + 3)
    change_facts(run, lambda facts: facts.update(status="contaminated"))
    change_facts(run, lambda facts: facts["overlap"].update(CONTAMINATED))
    tokens = int(sum(LENGTHS[i] for i in over))
    change_facts(run, lambda facts: facts["overlap"].update(overlapping_tokens=tokens))
    rename(run, "contaminated")
    means = {}
    for file in (run / "evaluations").glob("*.parquet"):
        with changed_table(file) as table:
            rows = [i for i, one in enumerate(table["set"]) if one == "contaminated"]
            clean = [i for place, i in enumerate(rows) if place not in over]
            for i in rows:
                table["clean"][i] = i in clean
            sums = [sum(table[key][i] for i in clean) for key in ("nll_sum", "tokens")]
        means[int(file.stem.partition("_")[2])] = sums[0] / sums[1]

    def change(rows: list[dict[str, str]]) -> None:
        for row in rows:
            if int(row["step"]) in means:
                row["contaminated/clean_nll"] = repr(means[int(row["step"])])
            row["eval_loss"] = row["eval_ppl"] = ""

    change_rows(run, change)
    return run


def not_shown(run: Path) -> Path:
    why = {"not_applicable": "a stream: what it brings is not known beforehand"}
    change_facts(run, lambda facts: facts.update(status="unproven", overlap=why, overlap_rule=why))
    rename(run, "unproven")
    empty = dict.fromkeys(("unproven/clean_nll", "eval_loss", "eval_ppl"), "")
    change_rows(run, lambda rows: [row.update(empty) for row in rows])
    for file in (run / "evaluations").glob("*.parquet"):
        with changed_table(file) as table:
            table["clean"] = [None] * len(table["clean"])
    return run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    one, two = (
        write_run(tmp_path / name, full_record(name), shift=0.01 * i, seed=i)
        for i, name in enumerate(("one", "two"))
    )
    return one, two


def rule_of(comparison: Comparison, name: str = "evaluation") -> dict[str, Any]:
    (rule,) = [one for one in comparison.to_json()["rules"] if one["rule"] == name]
    return rule


def test_a_report_shows_status_share_and_histogram(pair: tuple[Path, Path]) -> None:
    comparison = compare_runs(*pair)
    assert comparison.verdict == "comparable"
    markdown = render_markdown(comparison)
    section = markdown[markdown.index("## Held out") : markdown.index("## What differs")]
    lines = [" ".join(line.split()) for line in section.splitlines()]
    assert f"| A | held_out | held_out | 0.2 % | 0 of {DOCUMENTS} | 0 |" in lines
    assert "| A | train_split | train_split | - | - | - |" in lines
    assert f"- B, held_out: 0: 2, 0-10 %: {DOCUMENTS - 2}" in lines
    assert any(line.startswith("- n-grams of 13 words; a document overlaps") for line in lines)
    said = " ".join(render_terminal(comparison).split())
    assert f"held_out: 0 of {DOCUMENTS} documents overlap the training text" in said
    assert f"(documents by share: 0: 2, 0-10 %: {DOCUMENTS - 2})" in said
    numbers = comparison.to_json()["results"]
    assert numbers["held_out/clean_nll"]["a"] == pytest.approx(numbers["held_out/nll"]["a"])


def test_contaminated_numbers_are_refused_as_held_out(pair: tuple[Path, Path]) -> None:
    comparison = compare_runs(*map(contaminate, pair))
    assert (comparison.verdict, comparison.exit_code(), comparison.results) == ("refused", 3, None)
    rule = rule_of(comparison)
    assert rule["effects"]["nll"] == "refuse"
    assert f"contaminated: 3 of {DOCUMENTS} documents overlap the training text" in rule["why"]
    assert "30 % of all n-grams" in rule["why"]
    assert "data.held_out" in rule["remedy"]
    said = " ".join(render_terminal(comparison).split())
    assert "30 % of all n-grams" in said
    allowed = compare_runs(*pair, allow={"evaluation": "to see what they have in common"})
    numbers = allowed.to_json()["results"]
    assert allowed.verdict == "flagged"
    assert "held_out/nll" not in numbers
    assert "not held out: 3 of" in render_markdown(allowed)
    clean = numbers["contaminated/clean_nll"]
    assert clean["a"] is not None
    assert clean["a"] != numbers["contaminated/nll"]["a"]


def test_the_clean_documents_of_two_runs_are_compared_where_they_are_the_same(
    pair: tuple[Path, Path],
) -> None:
    contaminate(pair[0])
    contaminate(pair[1], first=1)
    numbers = compare_runs(*pair, allow={"evaluation": "a look"}).to_json()["results"]
    assert numbers["contaminated/nll"]["difference"] is not None
    clean = numbers["contaminated/clean_nll"]
    assert [clean[key] for key in ("a", "b", "difference")] == [None] * 3


def test_a_set_that_is_clean_for_one_run_alone_is_no_common_measure(
    pair: tuple[Path, Path],
) -> None:
    contaminate(pair[1])
    comparison = compare_runs(*pair)
    assert comparison.verdict == "refused"
    assert rule_of(comparison)["effects"]["nll"] == "refuse"


def test_what_is_not_shown_is_flagged(pair: tuple[Path, Path]) -> None:
    comparison = compare_runs(*map(not_shown, pair))
    assert comparison.verdict == "flagged"
    rule = rule_of(comparison)
    assert "held_out: not shown to be disjoint from the training text" in rule["why"]
    assert "data.held_out" in rule["remedy"]
    numbers = comparison.to_json()["results"]
    assert "unproven/nll" in numbers
    assert "unproven/clean_nll" not in numbers or numbers["unproven/clean_nll"]["a"] is None


def test_a_page_of_a_run_says_what_was_shown(pair: tuple[Path, Path]) -> None:
    from workbench.track.record import read_record

    page = " ".join(run_page(read_record(pair[0]), "FINISHED", pair[0]).split())
    assert f"held_out: 0 of {DOCUMENTS} documents overlap the training text" in page
    assert "in which 0.2 % of all n-grams stand" in page
    assert f"0-10 %: {DOCUMENTS - 2}" in page


# -- records that contradict themselves

FAULTS: dict[str, tuple[Change, str]] = {
    "no such status": (lambda f: f.update(status="clean"), "there is no such status"),
    "of another set": (lambda f: f.update(status="train_split"), "contradicts the set's name"),
    "not measured": (lambda f: f.update(overlap=None), "without a measurement"),
    "another rule": (
        lambda f: f.update(overlap_rule="n-grams of 50 words"),
        "contradicts data.overlap_",
    ),
    "contaminated": (
        lambda f: f["overlap"].update(CONTAMINATED),
        "contradicts the overlap that was counted",
    ),
    "histogram": (
        lambda f: f["overlap"].update(histogram=[DOCUMENTS - 1, *[0] * 10, 1]),
        "contradicts the histogram",
    ),
    "sum of the histogram": (
        lambda f: f["overlap"].update(histogram=[DOCUMENTS + 1, *[0] * 11]),
        "no histogram of the set's documents",
    ),
    "share": (lambda f: f["overlap"].update(share=0.001), "not the share that the counts make"),
    "n-grams": (
        lambda f: f["overlap"].update(ngrams_in_training=10_001),
        "more n-grams in training",
    ),
    "documents": (
        lambda f: f["overlap"].update(overlapping_documents=DOCUMENTS + 1),
        "so many cannot overlap",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_record_that_contradicts_itself(pair: tuple[Path, Path], name: str) -> None:
    change, message = FAULTS[name]
    change_facts(pair[1], change)
    with pytest.raises(UserError) as error:
        compare_runs(*pair)
    assert message in str(error.value)
    assert "effective.evaluation.held_out" in str(error.value)


def test_documents_said_to_be_clean_are_counted(pair: tuple[Path, Path]) -> None:
    for file in (pair[1] / "evaluations").glob("*.parquet"):
        with changed_table(file) as table:
            table["clean"][-1] = False
    with pytest.raises(UserError, match="overlapping documents of held_out are not those"):
        compare_runs(*pair)


def test_the_nll_of_the_clean_documents_is_theirs(pair: tuple[Path, Path]) -> None:
    change_rows(pair[1], lambda rows: rows[-1].update({"held_out/clean_nll": "4.0"}))
    with pytest.raises(UserError, match="clean_nll is not that of the clean documents"):
        compare_runs(*pair)


def test_a_run_that_says_nothing_of_it_is_refused(pair: tuple[Path, Path]) -> None:
    """An earlier version measured no overlap: what is not known is not taken as equal."""
    for run in pair:
        change_facts(run, lambda f: f.update(status=None, overlap=None, overlap_rule=None))
        for file in (run / "evaluations").glob("*.parquet"):
            with changed_table(file) as table:
                del table["clean"]
    comparison = compare_runs(*pair)
    assert comparison.verdict == "refused"
    assert rule_of(comparison)["outcome"] == "missing"
