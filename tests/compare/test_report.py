"""Report folders: order, honesty, safety of any text, and who may replace them."""

from __future__ import annotations

import json
import re
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fake_runs import full_record, full_spec, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.compare import Comparison, compare_runs, write_report
from workbench.compare.figures import draw
from workbench.compare.markdown import WIDTH, block, code, table, text
from workbench.compare.numbers import write, write_interval, written
from workbench.compare.plots import short_count
from workbench.compare.report import render_markdown
from workbench.compare.results import Documents, Number
from workbench.compare.words import show, show_pair
from workbench.errors import StoreError, UserError
from workbench.spec.checklist import RULESET_VERSION

NASTY = "*bold* | <b>x</b> [link](http://x) `tick` $m$ _u_ \\ # & ~s~ ![i](j)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    records: dict[str, dict[str, Any]] = {
        "base": {},
        "mha": {"spec": full_spec(model={"attention_type": "mha"})},
        "seed": {"spec": full_spec(seed=43)},
        "telemetry": {"spec": full_spec(telemetry={"log_steps": 5})},
        "nasty": {
            "name": NASTY,
            "spec": full_spec(
                notes=NASTY + "\n# heading",
                model={"attention_type": "mha"},
                tracking={"uri": "http://me:secret@host", "tags": {"a|b": NASTY}},
            ),
        },
    }
    for index, (name, changes) in enumerate(records.items()):
        shift = 0.0 if name == "base" else -0.01
        record = full_record(**{"name": name, **changes})
        write_run(home / name, record, shift=shift, seed=index)
    return home


def compared(runs: Path, b: str, **options: Any) -> Comparison:
    return compare_runs(runs / "base", runs / b, **options)


def tables_of(markdown: str) -> list[str]:
    return [line for line in markdown.splitlines() if line.startswith("|")]


def test_a_comparable_pair(runs: Path, tmp_path: Path) -> None:
    comparison = write_report(compared(runs, "mha", treatment=["model"]), tmp_path)
    assert comparison.report is not None
    assert re.fullmatch(r"base--mha--[0-9a-f]{8}", comparison.report.name)
    assert sorted(path.name for path in comparison.report.iterdir()) == [
        "curves-held_out.png",
        "curves-train.png",
        "curves-train_split.png",
        "difference-train_split.png",
        "difference.png",
        "documents.png",
        "memory.png",
        "report.html",
        "report.md",
        "results.csv",
        "results.json",
        "throughput.png",
    ]
    markdown = (comparison.report / "report.md").read_text()
    headings = [line for line in markdown.splitlines() if line.startswith("#")]
    assert headings == [
        "# base against mha: comparable for nll",
        "## Numbers",
        "## Curves and documents",
        "## Throughput and memory",
        "## Checklist",
        "## Held out",
        "## What differs",
        "## Runs",
        "## Reproduce",
    ]
    order = [
        "treatment: model (declared)",
        "overrides: none",
        f"ruleset: {RULESET_VERSION}",
        "**At 1,024,000 tokens the held_out/nll of mha is 0.0",
        "95 % interval over 12 documents",
        "One seed per arm says nothing about seed noise",
        "](difference.png)",
        "| held_out/nll ",
        "never trained on",
        "repeatable, not held out",
        "They do not cover the seed",
        "](curves-held_out.png)",
        "](documents.png)",
        "](throughput.png)",
        "## Checklist",
        "| model      | studied | f f f f |",
        "## Held out",
    ]
    places = [markdown.index(words) for words in order]
    assert places == sorted(places)
    assert all(len(line) <= WIDTH for line in tables_of(markdown))
    assert "wb compare base mha --treatment model" in markdown
    document = json.loads((comparison.report / "results.json").read_text())
    assert document["report"] == comparison.report.name
    assert document["series"]["held_out/nll"]["tokens"][-1] == 1_024_000


def test_the_evaluations_stand_side_by_side(runs: Path) -> None:
    markdown = render_markdown(compared(runs, "mha", treatment=["model"]))
    (head,) = [line for line in tables_of(markdown) if "held_out B - A" in line]
    assert "train_split B - A" in head
    rows = [line for line in tables_of(markdown) if line.startswith("|   409,600 |")]
    assert len(rows) == 1
    assert rows[0].count("\\[-0.0") == 2


def test_a_refused_pair_shows_no_number_no_winner_no_plot(runs: Path, tmp_path: Path) -> None:
    comparison = write_report(compared(runs, "seed"), tmp_path)
    assert comparison.report is not None
    assert sorted(path.name for path in comparison.report.iterdir()) == [
        "report.html",
        "report.md",
        "results.csv",
        "results.json",
    ]
    markdown = (comparison.report / "report.md").read_text()
    assert markdown.startswith("# base against seed: REFUSED for nll\n")
    for words in ("held_out/nll", "difference of", "B - A", "95 %", ".png", "winner", "perplexity"):
        assert words not in markdown
    for words in (
        "The two runs do not answer one question:",
        "- **seeds**: seed 42 against 43",
        "wb run experiments/seed.yaml seed=42 name=seed-matched",
        "wb compare base seed-matched",
        "| seeds      | differs | R R - - |",
    ):
        assert words in markdown
    assert json.loads((comparison.report / "results.json").read_text())["series"] == {}


def test_a_refused_claim_blanks_its_own_number_only(runs: Path) -> None:
    markdown = render_markdown(compared(runs, "telemetry"))
    (speed,) = [line for line in tables_of(markdown) if "tokens_per_s" in line]
    assert set(speed.split()) == {"|", "tokens_per_s", "-"}
    assert "Blank here: refused: telemetry." in markdown
    assert "throughput refused (telemetry)" in markdown


def test_an_override_stands_in_the_title_block(runs: Path) -> None:
    comparison = compared(runs, "seed", allow={"seeds": "a *deliberate* A/A look"})
    markdown = render_markdown(comparison)
    assert markdown.startswith("# base against seed: flagged for nll")
    assert "override: `seeds`: a \\*deliberate\\* A/A look" in markdown
    assert markdown.index("override: ") < markdown.index("**At 1,024,000 tokens")
    assert "'seeds=a *deliberate* A/A look'" in markdown  # in the command that reproduces it


def test_the_date_is_the_only_thing_that_changes(runs: Path) -> None:
    comparison = compared(runs, "mha")
    one, two = (
        render_markdown(comparison, today=datetime(2026, 1, day, tzinfo=UTC)) for day in (1, 2)
    )
    assert one.replace("2026-01-01", "2026-01-02") == two


# -- who may replace a report


def test_a_report_is_replaced_by_the_same_comparison(runs: Path, tmp_path: Path) -> None:
    first = write_report(compared(runs, "seed"), tmp_path).report
    assert first is not None
    (first / "stale.txt").write_text("from before")
    assert write_report(compared(runs, "seed"), tmp_path).report == first
    assert not (first / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_every_other_comparison_has_a_folder_of_its_own(runs: Path, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"treatment": ["seed"]},
        {"allow": {"seeds": "x"}},
        {"claims": ["throughput"]},
        {"at": 409_600},
    ]
    folders = {write_report(compared(runs, "seed", **one), tmp_path).report for one in options}
    assert len(folders) == len(options)


@pytest.mark.parametrize("found", ["nothing", "other", "garbage"])
def test_what_is_not_its_own_report_is_never_touched(
    runs: Path, tmp_path: Path, found: str
) -> None:
    comparison = compared(runs, "seed")
    folder = write_report(comparison, tmp_path).report
    assert folder is not None
    data = {"nothing": None, "other": '{"key": "x"}', "garbage": "["}[found]
    (folder / "results.json").unlink()
    if data is not None:
        (folder / "results.json").write_text(data)
    (folder / "report.md").write_text("mine")
    with pytest.raises(UserError, match="left alone"):
        write_report(comparison, tmp_path)
    assert (folder / "report.md").read_text() == "mine"


def test_nothing_is_half_written(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = compared(runs, "mha")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.compare.report.draw", full)
    with pytest.raises(StoreError, match="No space left"):
        write_report(comparison, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_writers_at_once_leave_one_whole_report(runs: Path, tmp_path: Path) -> None:
    comparison = compared(runs, "seed")
    failures: list[BaseException] = []

    def write() -> None:
        try:
            write_report(comparison, tmp_path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    (folder,) = tmp_path.iterdir()
    assert (folder / "report.md").exists()


# -- any text


def test_text_from_specs_cannot_change_the_report(runs: Path, tmp_path: Path) -> None:
    comparison = write_report(compared(runs, "nasty", treatment=["model"]), tmp_path)
    assert comparison.report is not None
    assert comparison.report.parent == tmp_path
    markdown = (comparison.report / "report.md").read_text()
    assert "secret" not in markdown
    assert "\n# heading" not in markdown
    body = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    assert "<b>" not in body
    for raw in ("*bold*", "[link](", "![i]"):
        assert re.search(r"(?<!\\)" + re.escape(raw), body) is None
    for line in tables_of(body):
        columns = len(re.findall(r"(?<!\\)\|", line))
        assert 3 <= columns <= 8
        assert len(line) <= WIDTH


@pytest.mark.parametrize("name", ["../../x", "/etc", "..", "", "a" * 300, "ä/ö"])
def test_a_name_cannot_leave_the_folder_of_reports(runs: Path, tmp_path: Path, name: str) -> None:
    comparison = compared(runs, "seed", names=(name, name))
    folder = write_report(comparison, tmp_path).report
    assert folder is not None
    assert folder.resolve().parent == tmp_path.resolve()
    assert len(folder.name) < 255


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.text(max_size=60), min_size=3, max_size=3), max_size=4))
def test_a_table_keeps_its_shape_whatever_it_holds(rows: list[list[str]]) -> None:
    lines = table(["one", "two", "three"], rows, numbers=1).split("\n")
    assert len(lines) == len(rows) + 2
    for line in lines:
        assert len(line) <= WIDTH
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 4


def test_text_code_and_blocks() -> None:
    assert text("100m_mha_dense v1.2") == "100m_mha_dense v1.2"
    assert text("_x_ a\nb") == "\\_x\\_ a b"
    assert text("<script>&") == "&lt;script&gt;&amp;"
    assert code("a|b`c") == "``a|b`c``"
    assert block(["echo ```"]).startswith("````sh\n")


def test_values_for_people() -> None:
    assert show("0123456789abcdef" * 4) == "0123456789ab…"
    assert show({"not_applicable": "a CPU"}) == "n/a: a CPU"
    assert show("http://me:word@host/x") == "http://***@host/x"
    assert (show(None), show(True), show(1_000_000), show(3e-4)) == (
        "-",
        "true",
        "1,000,000",
        "0.0003",
    )
    same_start = "x" * 100
    a, b = show_pair(same_start + "left", same_start + "right", 20)
    assert a != b
    assert max(len(a), len(b)) <= 20
    assert show_pair(0.1, 0.1 + 1e-12) != ("0.1", "0.1")
    assert show_pair("1", 1) == ("'1'", "1")
    assert show_pair("long " * 9, "long " * 9, 9) == ("long lon…", "long lon…")


def test_numbers_have_as_many_digits_as_mean_something() -> None:
    number = Number(5.40001, 5.39649, "nats/token", documents=Documents(9, (-0.0068, -0.0011)))
    assert written("held_out/nll", number) == ("5.4000", "5.3965", "-0.0035", "[-0.0068, -0.0011]")
    wide = Number(5.4, 5.1, "nats/token", documents=Documents(9, (-0.9, 0.3)))
    assert written("held_out/nll", wide)[2:] == ("-0.300", "[-0.900, +0.300]")
    # What is made of an NLL is known as well as that is.
    nll = Number(5.5537, 5.6121, "nats/token", documents=Documents(12, (0.047, 0.070)))
    perplexity = Number(258.204, 273.719, "1")
    assert written("held_out/perplexity", perplexity, nll)[:3] == ("258.2", "273.7", "+15.5")
    assert written("held_out/perplexity", perplexity)[:3] == ("258.20", "273.72", "+15.51")
    clean = Number(5.55371, 5.61214, "nats/token")
    assert written("held_out/clean_nll", clean, nll)[:3] == ("5.554", "5.612", "+0.058")
    assert write("parameters/total", 99_487_680) == "99,487,680"
    assert write("peak_memory_bytes", 3.6e9) == "3.60 GB"
    assert write("x", None) == "-"
    assert write("x", float("nan")) == "NaN"
    assert write("tokens", 5, sign=True) == "+5"
    for name in ("x", "parameters/total", "peak_memory_bytes", "tokens_per_s", "x/perplexity"):
        for tiny in (0.0, -0.0, 1e-9, -1e-9):
            assert not write(name, tiny, sign=True).startswith(("+", "-"))
    assert write_interval((-1e-9, 1e-9), 6) == "[0.000000, 0.000000]"


def test_figures_of_bits_per_byte_where_nll_is_refused(tmp_path: Path, runs: Path) -> None:
    effective = full_record().effective.model_dump(mode="json")
    effective["tokenizer"]["sha256"] = "other"
    folder = write_run(tmp_path / "other", full_record("other", effective=effective))
    comparison = compare_runs(runs / "base", folder, claims=["bpb"])
    drawn = draw(comparison, tmp_path)
    assert drawn["answer"].figures[0].file == "difference.png"
    assert "bits/byte" in drawn["curves"].figures[0].alt
    assert "held_out/bits\\_per\\_byte" not in render_markdown(comparison)
    assert "in bits/byte" in render_markdown(comparison)


def test_a_path_is_shown_from_where_the_reader_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert show(f"{tmp_path}/experiments/../configs/ranks.tiktoken") == "configs/ranks.tiktoken"
    assert show("/elsewhere/ranks.tiktoken") == "/elsewhere/ranks.tiktoken"


def test_a_point_on_an_axis_keeps_three_digits() -> None:
    counts = [0, 999, 1_000, 1_536, 245_760, 1_024_000, 10**9]
    written_ = [short_count(count) for count in counts]
    assert written_ == ["0", "999", "1k", "1.54k", "246k", "1.02M", "1G"]
