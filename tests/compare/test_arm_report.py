"""Reports on arms, and `wb compare` of arms: the verdict first, then everything it rests on."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from fake_arms import write_arm
from fake_runs import STEPS, changed_table, full_spec
from pyarrow import parquet
from pydantic import ValidationError

from workbench.arms_command import ArmsRequest, single_pair, with_several
from workbench.commands import call
from workbench.compare import compare_arms, render_arms, write_arms_report
from workbench.compare.arm_figures import draw
from workbench.compare.arm_report import render_arms_markdown
from workbench.compare.arm_tidy import figures_json, tidy_arms_csv
from workbench.compare.numbers import between, decimals_more, with_spread, write
from workbench.compare.power import seeds_written
from workbench.compare.sections import _pair
from workbench.compare.sentences import document_method
from workbench.errors import UserError
from workbench.track.store import Store
from workbench.track.tuning import tuning_runs

SEEDS = (1, 2)
MHA: dict[str, Any] = {"model": {"attention_type": "mha"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home") / "mlruns"
    runs = home / "runs"
    runs.mkdir(parents=True)
    write_arm(runs, "gqa", {1: 0.0, 2: 0.01}, tracking={"tags": {"arm": "gqa"}})
    write_arm(runs, "mha", {1: -0.0200, 2: -0.0101}, tracking={"tags": {"arm": "mha"}}, **MHA)
    write_arm(runs, "mixed", {1: 0.03, 2: -0.03}, **MHA)
    return home


def arm(home: Path, name: str) -> list[Path]:
    return [home / "runs" / f"{name}-s{seed}" for seed in SEEDS]


def both(home: Path, other: str = "mha", **options: Any) -> Any:
    arms = {"gqa": arm(home, "gqa"), other: arm(home, other)}
    return compare_arms(arms, treatment=["model"], **options)


def test_a_report_opens_with_the_verdict(home: Path, tmp_path: Path) -> None:
    comparison = write_arms_report(both(home), tmp_path)
    assert comparison.report is not None
    files = {path.name for path in comparison.report.iterdir()}
    assert files >= {"report.md", "report.html", "results.json", "difference-0-0.png"}
    assert files >= {"curves-0.png", "curves-train.png", "documents-0.png"}
    assert files >= {"throughput.png", "memory.png"}
    markdown = (comparison.report / "report.md").read_text()
    order = [
        "# mha against gqa: comparable for nll",
        "gqa (baseline): 2 runs, seeds 1, 2",
        "**mha is better than gqa at this budget: its held_out/nll is lower.**",
        "interval over 2 paired seeds",
        "lower in 2 of 2 seeds",
        "That one says nothing about another seed.",
        "(difference-0-0.png)",
        "| held_out/nll ",
        "(documents-0.png)",
        "(curves-0.png)",
        "## Throughput and memory",
        "Throughput: gqa 1,500 tokens/s; mha 1,500 tokens/s.",
        "Peak memory: gqa 3.60 GB; mha 3.60 GB.",
        "## What was chosen",
        "## Checklist",
        "## Held out",
        "## What differs",
        "## Runs",
        "## Reproduce",
        "wb compare --a gqa-s1 gqa-s2 --b mha-s1 mha-s2 --names gqa,mha --treatment model",
    ]
    places = [markdown.index(words) for words in order]
    assert places == sorted(places)
    document = json.loads((comparison.report / "results.json").read_text())
    assert document["key"] == comparison.key
    assert document["series"]["mha"]["held_out/nll"]["tokens"][-1] == comparison.at


def test_what_cannot_be_told_apart_is_a_result(home: Path) -> None:
    markdown = render_arms_markdown(both(home, "mixed"))
    assert "**mixed is not distinguishable from gqa in held_out/nll at this budget.**" in markdown
    assert "better than" not in markdown
    assert "takes about" in markdown


def test_a_refusal_shows_no_number_and_no_winner(home: Path, tmp_path: Path) -> None:
    arms = {"gqa": arm(home, "gqa"), "mha": arm(home, "mha")[:1]}
    comparison = write_arms_report(compare_arms(arms, treatment=["model"]), tmp_path)
    assert comparison.report is not None
    assert {path.suffix for path in comparison.report.iterdir()} == {
        ".md",
        ".html",
        ".json",
        ".csv",
    }
    markdown = (comparison.report / "report.md").read_text()
    assert markdown.startswith("# mha against gqa: REFUSED for nll")
    assert "**seeds**: unequal numbers of seeds: {1, 2} against {1}" in markdown
    for words in (
        "better than",
        "distinguishable",
        "difference |",
        "| held_out/nll ",
        "perplexity",
    ):
        assert words not in markdown
    assert "REFUSED" in render_arms(comparison)


def test_one_seed_says_what_it_does_not_cover(home: Path) -> None:
    arms = {"gqa": arm(home, "gqa")[:1], "mha": arm(home, "mha")[:1]}
    said = render_arms(compare_arms(arms, treatment=["model"]))
    words = " ".join(said.split())
    assert "No winner is named between mha and gqa" in words
    assert "It says nothing about another seed" in words
    assert "better than" not in words


def said_of(home: Path, a: str, b: str, **options: Any) -> str:
    """What the terminal says of two arms, on one line."""
    arms = {a: sorted(home.glob(f"{a}-s*")), b: sorted(home.glob(f"{b}-s*"))}
    return " ".join(render_arms(compare_arms(arms, **options), power=True).split())


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            {1: 0.0, 2: 0.01},
            {1: 0.0, 2: 0.01},
            "other and base have the same held_out/nll under every seed: nothing is to be told.",
        ),
        (
            {1: 0.0, 2: 0.01},
            {1: -0.02, 2: -0.01},
            "No winner is named between other and base in held_out/nll: the difference is the same"
            " under every seed, so that its noise is not known.",
        ),
    ],
    ids=["all equal", "one difference"],
)
def test_seeds_without_a_spread_name_no_winner(
    first: dict[int, float], second: dict[int, float], words: str, tmp_path: Path
) -> None:
    """A spread of zero is no certainty: with it even a difference of rounding would be certain."""
    write_arm(tmp_path, "base", first)
    write_arm(tmp_path, "other", second, **MHA)
    said = said_of(tmp_path, "base", "other", treatment=["model"])
    assert words in said
    is_same = first == second
    assert f"minus that of base is {'0.0000' if is_same else '-0.0200'} nats/token." in said
    assert "It says nothing about another seed" in said
    assert ("turn the sign" in said) is not is_same
    for wrong in ("better than", "not distinguishable", "p =", "power", "nan", "inf"):
        assert wrong not in said, wrong
    arms = {name: sorted(tmp_path.glob(f"{name}-s*")) for name in ("base", "other")}
    comparison = write_arms_report(compare_arms(arms, treatment=["model"]), tmp_path / "reports")
    assert comparison.report is not None
    text = (comparison.report / "report.md").read_text()
    assert words.replace("_", "\\_") in text or words in text
    (decided,) = json.loads((comparison.report / "results.json").read_text())["deciding"]
    number = json.loads((comparison.report / "results.json").read_text())["results"][decided]
    assert (number["winner"], number["seeds"]) == (None, None)
    found = comparison.to_json()["results"][decided]
    assert found["seeds"] is None
    assert set(found["why"]) == {"seeds"}
    assert found["why"]["seeds"] in text.replace("\\_", "_")


def test_unpaired_seeds_without_a_spread_name_no_winner(tmp_path: Path) -> None:
    """Two runs of one arm that were trained the same are one observation, whatever their seeds."""
    for name, seeds, shift in (("base", (1, 2), 0.0), ("other", (3, 4), 0.1)):
        write_arm(tmp_path, name, dict.fromkeys(seeds, shift), noise=1)
    said = said_of(tmp_path, "base", "other", treatment=["seed"])
    assert "the value is the same under every seed, so that its noise is not known" in said
    assert "better than" not in said


def write_routes(folder: Path, counts: list[list[float]]) -> None:
    """The telemetry of one update: how many routes reached each expert of each layer."""
    rows = [
        {"step": 10, "tokens": 81_920, "layer": layer, "expert": expert, "metric": "route_count"}
        | {"value": value}
        for layer, experts in enumerate(counts)
        for expert, value in enumerate(experts)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "telemetry.parquet")


def test_what_arms_cost_and_where_their_routes_go(tmp_path: Path) -> None:
    """A refused number has no bar; arms without experts have no map."""
    base = write_arm(tmp_path, "base", {1: 0.0, 2: 0.01})
    other = write_arm(tmp_path, "other", {1: 0.0, 2: 0.02}, telemetry={"log_steps": 5}, **MHA)
    third = write_arm(tmp_path, "third", {1: 0.0, 2: 0.03}, **MHA)
    write_routes(other[0], [[30.0, 10.0], [20.0, 20.0]])
    write_routes(third[0], [[25.0, 15.0], [20.0, 20.0]])
    comparison = compare_arms({"base": base, "other": other, "third": third}, treatment=["model"])
    assert comparison.pairs[0].judgement.claims["throughput"] == "refused"
    drawn = draw(comparison, tmp_path)
    speed, memory = drawn["cost"].figures
    assert speed.alt == "Throughput: base 1,500 tokens/s; third 1,500 tokens/s."
    assert memory.alt == "Peak memory: base 3.60 GB; other 3.60 GB; third 3.60 GB."
    first, second = drawn["routes"].figures
    assert "Shares of routes of other by layer and expert; an equal share is 50 %" in first.alt
    assert "the largest is 75.0%, the smallest 25.0%" in first.alt
    assert second.caption == "third, seed 1: routes of 1 logged update."
    routes = figures_json(comparison)["routes"]
    assert routes["other"] == {"seed": 1, "layers": [0, 1], "shares": [[0.75, 0.25], [0.5, 0.5]]}
    assert list(routes) == ["other", "third"]
    both = compare_arms({"base": base, "other": other}, treatment=["model"])
    folder = tmp_path / "both"
    folder.mkdir()
    assert [one.file for one in draw(both, folder)["cost"].figures] == ["memory.png"]
    assert not (folder / "throughput.png").exists()


def test_power_is_said_when_asked(home: Path) -> None:
    plain = render_arms(both(home, "mixed"))
    assert "power" not in plain
    asked = " ".join(render_arms(both(home, "mixed"), power=True, differences=[0.01]).split())
    assert "With 2 seeds an arm and this spread" in asked
    assert "the smallest difference found with 80 % power is" in asked
    assert "one of 0.01 takes about" in asked


def test_unequal_choices_are_stated(home: Path) -> None:
    comparison = both(home, tuning={"gqa": 0, "mha": 7})
    said = " ".join(render_arms(comparison).split())
    assert "same experiment and same model: gqa 0, mha 7. Unequal numbers" in said
    assert "Evaluations of each run up to the point compared: gqa 5, mha 5." in said


def test_unequal_numbers_of_evaluations_are_stated(tmp_path: Path) -> None:
    write_arm(tmp_path, "base", {1: 0.0, 2: 0.01})
    often: dict[str, Any] = {"every": 25, "evaluation": {"eval_steps": 25}}
    write_arm(tmp_path, "other", {1: 0.0, 2: 0.02}, **often, **MHA)
    said = said_of(tmp_path, "base", "other", treatment=["model"])
    assert "Evaluations of each run up to the point compared: base 5, other 10." in said
    assert "Unequal numbers: the best of more looks better by chance." in said


def test_what_choosing_the_best_checkpoint_would_add_is_named(tmp_path: Path) -> None:
    """Nothing is chosen: a spec has no other rule than the last. What choosing would give is said,
    as it is no property of an arm."""
    for name in ("base", "other"):
        write_arm(tmp_path, name, {1: 0.0, 2: 0.01}, spread=3.0, **(MHA if name == "other" else {}))
    arms = {name: sorted(tmp_path.glob(f"{name}-s*")) for name in ("base", "other")}
    comparison = compare_arms(arms, treatment=["model"])
    said = " ".join(render_arms(comparison).split())
    assert "Checkpoint: last of every run." in said
    results = comparison.pairs[0].results
    assert results is not None
    series = results.series["held_out/nll"]
    for name, table in (("base", series.a), ("other", series.b)):
        gain = float((table[-1] - table.min(axis=0)).mean())
        assert gain > 0
        assert f"{gain:.2g} nats/token of held_out/nll in {name}" in said
    assert "by its own choice and not by the arm" in said
    assert "None of it is in the numbers here." in said
    with pytest.raises(ValidationError, match="Input should be 'last'"):
        full_spec(evaluation={"select": "best"})


def test_tuning_runs_are_counted_from_the_store(home: Path) -> None:
    store = Store(home)
    entries = store.list_runs()
    groups = {
        name: [entry for entry in entries if entry.name.startswith(f"{name}-")]
        for name in ("gqa", "mha", "mixed")
    }
    compared = [*groups["gqa"], *groups["mha"]]
    assert tuning_runs(groups["gqa"], compared, entries) == 0
    assert tuning_runs(groups["mha"], compared, entries) == 2  # those of `mixed`


def test_several_runs_after_one_option() -> None:
    given = ["compare", "--a", "x", "y", "--b", "z", "--names", "p,q", "w"]
    found = ["compare", "--a", "x", "--a", "y", "--b", "z", "--names", "p,q", "w"]
    assert with_several(given) == found
    assert with_several(["compare", "a", "b"]) == ["compare", "a", "b"]


def test_single_runs_and_arms_are_two_ways() -> None:
    assert single_pair(ArmsRequest(), "a", "b") == ("a", "b")
    assert single_pair(ArmsRequest(a=["x"], b=["y"]), None, None) is None
    for request, a, b, words in (
        (ArmsRequest(a=["x"]), "a", None, "cannot be compared at once"),
        (ArmsRequest(), "a", None, "two runs or two arms are needed"),
        (ArmsRequest(power=True), "a", "b", "for arms of several seeds"),
    ):
        with pytest.raises(UserError, match=words):
            single_pair(request, a, b)


def code_of(*arguments: str) -> int:
    answer = call(arguments)
    return answer if isinstance(answer, int) else answer.exit_code


def test_a_checklist_cuts_no_seed_off(home: Path) -> None:
    for seeds, shown in (
        (list(range(1, 13)), "1 to 12"),
        ([42, 43], "42, 43"),
        ([42, 7, 1337, 20261], "4 values"),
    ):
        short, other = _pair(seeds, [7], 15)
        assert (short.short, other.short) == (shown, "7")
    assert _pair([42, 7, 1337, 20261], [7], 15)[0].whole == "42, 7, 1337, 20261"
    text = render_arms_markdown(both(home, "mha"))
    (row,) = [line for line in text.splitlines() if line.startswith("| seeds ")]
    assert [cell.strip() for cell in row.split("|")[4:7]] == ["seed", "1, 2", "1, 2"]
    assert "evaluation.held_out.sha256 " in text


def test_the_command_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WB_HOME", str(home))
    tags = ["--a-tag", "arm=gqa", "--b-tag", "arm=mha"]
    assert code_of("compare", *tags, "--treatment", "model", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert list(found["arms"]) == ["gqa", "mha"]
    assert found["results"]["held_out/nll"]["winner"] == "b"
    assert Path(found["report"], "report.md").is_file()
    runs = ["--a", "gqa-s1", "gqa-s2", "--b", "mha-s1"]
    assert code_of("compare", *runs, "--treatment", "model") == 3
    assert "unequal numbers of seeds" in capfd.readouterr().out
    for wrong, words in (
        (["--a", "gqa-s1", "--b-tag", "arm=none"], "no run has this"),
        (["--a", "gqa-s1"], "this arm has no runs"),
        (["--arm", "gqa"], "a name and runs are needed"),
        (["--a", "gqa-s1", "--b", "mha-s1", "--names", "one"], "two names are needed"),
        (["--arm", "x=gqa-s1", "--a", "gqa-s2"], "either here or by --a and --b"),
    ):
        with pytest.raises(UserError, match=words):
            call(["compare", *wrong])


def test_the_table_of_arms_has_every_number_once(home: Path) -> None:
    arms = {"gqa": arm(home, "gqa"), "mha": arm(home, "mha"), "mixed": arm(home, "mixed")}
    comparison = compare_arms(arms, treatment=["model"])
    rows = list(csv.DictReader(io.StringIO(tidy_arms_csv(comparison))))
    documents_of = [row for row in rows if row["document"]]
    rows = [row for row in rows if not row["document"]]
    names = ("metric", "quantity", "arm", "run", "tokens", "interval")
    keys = [tuple(row[name] for name in names) for row in rows]
    assert len(set(keys)) == len(keys)
    found = dict(zip(keys, rows, strict=True))
    at = str(comparison.at)
    for pair in comparison.pairs:
        assert pair.results is not None
        number = pair.results.numbers["held_out/nll"]
        means = pair.results.documents["held_out/nll"]
        for one, sums in ((pair.a, means.a), (pair.b, means.b)):
            told = {r["document"]: float(r["value"]) for r in documents_of if r["arm"] == one.name}
            assert told == dict(zip(means.documents, sums / means.weight, strict=True))
        for one, values, mean in ((pair.a, number.a, number.mean_a), (pair.b, number.b, None)):
            for side, value in zip(one.runs, values, strict=True):
                row = found["held_out/nll", "value", one.name, side.name, at, ""]
                assert (float(row["value"]), row["seed"]) == (value, side.name[-1])
            row = found["held_out/nll", "mean", one.name, "", at, ""]
            assert mean is None or float(row["value"]) == mean
        said = f"{pair.b.name} - gqa"
        seeds = found["held_out/nll", "difference", said, "", at, "seeds"]
        documents = found["held_out/nll", "difference", said, "", at, "documents"]
        assert number.seeds is not None
        assert number.documents is not None
        for row, ends in ((seeds, number.seeds.interval), (documents, number.documents.interval)):
            assert (float(row["low"]), float(row["high"])) == ends
            assert float(row["value"]) == number.difference
            assert float(row["level"]) == number.level
        assert (seeds["n"], documents["n"]) == ("2", "12")
        assert float(seeds["p"]) == number.seeds.p
        assert float(seeds["p_adjusted"]) == number.p_adjusted
    assert len(documents_of) == 3 * 12  # of each arm once, whatever it is compared with


def test_the_table_of_a_refused_pair_of_arms_has_its_head_alone(home: Path) -> None:
    wrong = [*arm(home, "mha")[:1], home / "runs" / "mixed-s1"]  # one seed twice
    comparison = compare_arms({"gqa": arm(home, "gqa"), "twice": wrong}, treatment=["model"])
    assert comparison.verdict == "refused"
    assert tidy_arms_csv(comparison).count("\n") == 1


def three_arms() -> list[str]:
    return [f"--arm={name}={name}-s1,{name}-s2" for name in ("gqa", "mha", "mixed")]


def test_the_command_on_three_arms(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WB_HOME", str(home))
    given = [*three_arms(), "--baseline", "mha", "--treatment", "model"]
    assert code_of("compare", *given, "--power", "--difference", "0.01", "--difference", "2") == 0
    said = capfd.readouterr().out
    words = " ".join(said.split())
    for name in ("gqa", "mixed"):
        assert f"for nll: mha against {name}" in words
        assert f"held_out/nll of {name} minus that of mha is" in words
        assert f"{name} against mha: Over 12 documents" in words
    assert "mixed minus that of gqa" not in words
    assert words.count("97.5 % interval over 2 paired seeds") == 2
    assert words.count("adjusted for the arms (Holm)") == 1  # the larger p stays as it is
    assert words.count("the smallest difference found with 80 % power is") == 4
    for difference in ("0.01", "2"):
        assert words.count(f"one of {difference} takes") == 2
    (report,) = re.findall("report: (.*)", said)
    again = f"wb compare {' '.join(three_arms())} --baseline mha --treatment model"
    assert again.replace("--arm=", "--arm ") in Path(report).read_text()
    found = json.loads(Path(report).with_name("results.json").read_text())
    assert (found["baseline"], len(found["pairs"])) == ("mha", 2)
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [("mha", "gqa"), ("mha", "mixed")]


def test_what_is_wrong_with_the_options_of_arms_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WB_HOME", str(home))
    for wrong, words in (
        (["--baseline", "none"], "there is no such arm"),
        (["--arm", "mha=mixed-s1"], "this name stands twice"),
        (["--at", "7"], "all runs must have been evaluated there"),
    ):
        with pytest.raises(UserError, match=words):
            call(["compare", *three_arms(), *wrong])


def test_the_verdict_is_said_before_the_report_is_made(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where no report can be written, the verdict has been said; and of scores that were changed
    nothing is said, as they are read first."""
    store = Store(tmp_path / "mlruns")
    store.home.mkdir()
    shutil.copytree(home / "runs", store.runs)
    store.reports.write_text("no folder")
    monkeypatch.setenv("WB_HOME", str(store.home))
    given = ["compare", *three_arms()[:2], "--treatment", "model"]
    with pytest.raises(UserError, match="the report cannot be written"):
        call(given)
    said = capfd.readouterr().out
    assert "mha is better than gqa at this budget" in " ".join(said.split())
    assert "Over 12 documents" not in said
    scores = store.runs / "mha-s2" / "evaluations" / f"step_{STEPS:08d}.parquet"
    with changed_table(scores) as table:
        table["nll_sum"][0] += 1
    with pytest.raises(UserError, match="is not that of the documents"):
        call(given)
    assert capfd.readouterr().out == ""


def test_numbers_of_arms_end_where_their_own_uncertainty_does(tmp_path: Path) -> None:
    """A mean with two digits of its spread; a difference, with two of its interval over seeds."""
    write_arm(tmp_path, "base", {1: 0.0, 2: 0.163, 3: -0.12})
    write_arm(tmp_path, "other", {4: 0.02, 5: 0.021, 6: 0.0205}, noise=2)
    arms = {name: sorted(tmp_path.glob(f"{name}-s*")) for name in ("base", "other")}
    seen = 0
    for line in render_arms_markdown(compare_arms(arms, treatment=["seed"])).splitlines():
        if not re.match(r"\| (held_out|train)\S*/(nll|bits)", line) or "±" not in line:
            continue
        cells = [cell.strip() for cell in line.replace("\\", "").split("|")[2:6]]
        *means, difference = [Decimal(one) for cell in cells[:3] for one in re.split(" ± ", cell)]
        low, high = (Decimal(end) for end in cells[3].strip("[]").split(", "))
        ends = [-int(one.as_tuple().exponent) for one in (*means, difference, low, high)]
        assert ends[0] == ends[1] == 1 - means[1].adjusted(), line
        assert ends[2] == ends[3] == 1 - means[3].adjusted(), line
        assert ends[4:] == [1 - ((high - low) / 2).adjusted()] * 3, line
        assert ends[2] > ends[4], "the other arm's small spread gives the difference no digits"
        seen += 1
    assert seen >= 4


def test_a_difference_that_rounding_would_contradict_has_a_decimal_more() -> None:
    assert decimals_more("x/nll", 231.4, 235.6, 0, 0.0) == 1
    assert decimals_more("x/nll", 231.4, 235.4, 0, 0.0) == 0
    assert decimals_more("tokens_per_s", 1231.4, 1235.6, 3, 1236.0) == 1
    assert decimals_more("peak_memory_bytes", 1.004e9, 1.016e9, 3, 1.016e9) == 1  # 1.00, 1.02, 0.01
    assert write("tokens_per_s", -14.62, size=735.0, sign=True, more=1) == "-14.6"


def test_seeds_needed_have_two_digits() -> None:
    assert [seeds_written(n) for n in (2, 99, 100, 101, 303, 1234, None)] == [
        "about 2",
        "about 99",
        "about 100",
        "about 110",
        "about 310",
        "about 1,300",
        "more than 10,000",
    ]


@pytest.mark.parametrize(("speeds", "is_disturbed"), [((1000, 1300), True), ((1000, 1100), False)])
def test_throughput_that_varies_over_seeds_is_no_claim(
    speeds: tuple[int, int], is_disturbed: bool, tmp_path: Path
) -> None:
    write_arm(tmp_path, "base", {1: 0.0, 2: 0.01})
    for seed, speed in zip(SEEDS, speeds, strict=True):
        results = {"results": {"tokens_per_s": speed, "seconds": 54.0, "peak_memory_bytes": 10**9}}
        write_arm(tmp_path, "other", {seed: 0.02 * seed}, record=results, **MHA)
    arms = {name: sorted(tmp_path.glob(f"{name}-s*")) for name in ("base", "other")}
    comparison = compare_arms(arms, treatment=["model"])
    text = render_arms_markdown(comparison)
    section = text.partition("## Throughput and memory")[2].partition("\n## ")[0]
    words = "(18 % in other): these runs shared a machine or were disturbed, and no claim"
    assert (words in section) is is_disturbed
    assert ("shared a machine" in text) is is_disturbed
    asked = compare_arms(arms, treatment=["model"], claims=["throughput"])
    assert ("shared a machine" in " ".join(render_arms(asked).split())) is is_disturbed


def test_intervals_of_few_documents_are_called_approximate(home: Path) -> None:
    few, many = "for fewer than 30 documents", "drawn with replacement"
    text = render_arms_markdown(both(home))
    said = " ".join(render_arms(both(home)).split())
    for one in (text, said):
        assert "Of fewer than 30 documents it is approximate." in one
    assert few in text
    assert many not in text
    assert few in document_method([12, 60], "x")
    assert many in document_method([12, 60], "x")
    assert few not in document_method([30, 60], "x")


def test_a_unit_is_written_once() -> None:
    memory = partial(write, "peak_memory_bytes")
    assert with_spread(memory(8.1e8), memory(2e7)) == "0.81 ± 0.02 GB"
    assert between(memory(-3e7, sign=True), memory(2e7, sign=True)) == "[-0.03, +0.02] GB"
    assert between("-0.10", "+0.14") == "[-0.10, +0.14]"
