"""The page of a report: that it says what the Markdown says, needs nothing outside, and that no
text in it becomes markup."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_runs import full_record, full_spec, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from workbench.compare import Comparison, compare_runs, document, markdown, page, write_report
from workbench.compare.document import Block
from workbench.track.position import POSITION, Position

# Each would do something, were it markup: of HTML, of Markdown, of a forge's additions to it.
HOSTILE = [
    "<script>alert(1)</script>",
    "</style><img src=http://outside/x onerror=alert(1)>",
    "</details></main></body></html><h1>new page</h1>",
    "\"><svg onload='alert(1)'>",
    "[link](javascript:alert(1))",
    "<javascript:alert(1)>",
    "![picture](http://outside/y.png)",
    "[a]: http://outside/z",
    "http://outside/ www.outside.org :smile:",
    "a | b || c \\| d",
    "`tick` ``` fence\n```\n# heading",
    "- item\n- item",
    "1. first\n2. second",
    "+ plus = === --- ***",
    "> quote &lt; &#60; &amp;",
    "line\r\n\r\nbreak\u2028and\u0085other",
    "$x^2$ $$y$$ *em* __strong__ ~~gone~~ #1 @someone",
    "\u202eturned\u202c \u200b\ufeff zero",
    "nul\x00 bell\x07 escape\x1b[31m",
    "half a pair \ud800 and \udfff",
    '=HYPERLINK("http://outside")',
    "x" * 10_000,
    "|" * 10_000,
    "*" * 10_000,
    "",
    " ",
]
EVERY_TAG = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "dl", "dt", "dd"),
    *("ul", "li", "strong", "code", "span", "div", "table", "thead", "tbody", "tr", "th", "td"),
    *("pre", "figure", "img", "figcaption", "details", "summary"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "style", "scope", "tabindex"),
    *("src", "alt", "width", "height"),
}
LEAVES = {"meta", "img"}


class Page(HTMLParser):
    """What a browser would find on a page: its elements, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in LEAVES:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append((self._open[-1], data))

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    @property
    def text(self) -> str:
        return squeezed("".join(text for _, text in self.texts))

    def of(self, tag: str) -> list[str]:
        return [text for owner, text in self.texts if owner == tag]


def squeezed(text: str) -> str:
    """Text without white space, which both formats may put between blocks."""
    return re.sub(r"\s+", "", text)


def assert_closed(html: str, *, pictures: int | None = None) -> Page:
    """The page has only elements and attributes of ours, and none that points outside of it."""
    found = Page(html)
    assert set(found.tags) <= EVERY_TAG
    assert {name for _, name, _ in found.attributes} <= ATTRIBUTES
    for tag, name, value in found.attributes:
        if name == "src":
            assert tag == "img"
            head, _, data = value.partition(",")
            assert head == "data:image/png;base64"
            assert base64.b64decode(data, validate=True).startswith(b"\x89PNG\r\n")
        if name == "style":
            assert re.fullmatch(r"width: \d+px", value)
    assert pictures in (None, found.tags.count("img"))
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style
    assert not re.search(r"url\(|@import|@font-face|expression", style[1])
    policy = [value for _, name, value in found.attributes if name == "content"]
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in policy
    return found


def parsed(source: str) -> Iterator[Any]:
    """The tokens of a Markdown text as forges read it: with tables, and HTML let through."""
    reader = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    for token in reader.parse(source):
        yield token
        yield from token.children or ()


def assert_harmless(source: str) -> str:
    """Nothing of the Markdown is a link, raw HTML other than our folds, or a picture from
    elsewhere. Returns the text that it shows."""
    text = []
    for token in parsed(source):
        assert token.type not in ("link_open", "s_open", "em_open", "hr", "blockquote_open")
        if token.type == "image":
            assert re.fullmatch(r"[A-Za-z0-9_-]+\.png", token.attrs["src"])
        elif token.type in ("html_block", "html_inline"):
            inner = re.fullmatch(
                r"<details><summary>([^<>]*)</summary>\s*|</details>\s*", token.content
            )
            assert inner, token.content
            text.append(inner[1] or "")
        elif token.type in ("text", "code_inline", "fence", "text_special"):
            text.append(token.content)
    import html

    return squeezed(html.unescape("".join(text)))


def blocks_of(text: str) -> list[Block]:
    """Every kind of block, with the text wherever text can stand."""
    words = (text, document.Strong(text or "x"), " ", document.Code(text), f" {text} ")
    return [
        document.Heading(f"A {text}", 1),
        document.Facts((("A", (text,)), ("B", words))),
        document.paragraph(*words),
        document.paragraph(text),
        document.bullets([text, words]),
        document.table(["one", text], [[text, document.Badge(text, "refused")]] * 2, numbers=1),
        document.table(["one"], [[document.Brief(text, text)]]),
        document.Commands((f"wb run {text}", text)),
        document.Fold(f"F {text}", (document.paragraph(text), document.Heading(text or "x"))),
    ]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_text_is_shown_and_never_obeyed(text: str, tmp_path: Path) -> None:
    blocks = blocks_of(text)
    found = assert_closed(page.render(blocks, text, tmp_path), pictures=0)
    assert found.tags.count("h1") == found.tags.count("details") == 1
    assert found.tags.count("table") == 2
    assert found.tags.count("li") == 2
    source = markdown.render(blocks)
    assert_harmless(source)
    types = [token.type for token in parsed(source)]
    assert types.count("heading_open") == 2
    assert types.count("bullet_list_open") == 1
    assert "ordered_list_open" not in types
    assert types.count("table_open") == 2
    assert types.count("fence") == 1
    assert len(source) < 100_000  # not all of it, twelve times
    for format in (source, page.render(blocks, text, tmp_path)):
        shown = format.encode("utf-8", "backslashreplace").decode("utf-8")
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069]", shown)


def test_addresses_become_no_links_by_themselves() -> None:
    """Forges link what looks like an address, and draw what looks like the name of a picture."""
    said = markdown.text("http://outside/ www.outside.org javascript:x :smile: 10:00:00+00:00")
    expected = "http\\://outside/ www\\.outside.org javascript:x \\:smile: 10:00:00+00:00"
    assert said == expected
    (token,) = [one for one in parsed(said) if one.type == "inline"]
    shown = "".join(part.content for part in token.children)
    assert shown == said.replace("\\", "")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80))
def test_any_text_reads_the_same_in_both_formats(text: str) -> None:
    """The reference is another reader of Markdown: what it finds is what the page says."""
    blocks: list[Block] = [
        document.Heading(f"A {text}", 1),
        document.paragraph(text),
        document.bullets([f"x {text}", (document.Code(f"c{text}"), f" {text}")]),
        document.Fold("more", (document.paragraph("y ", document.Strong(f"z{text}z")),)),
    ]
    html, source = page.render(blocks, "t", Path()), markdown.render(blocks)
    said = Page(html).text.removeprefix("t")
    assert assert_harmless(source) == said


# -- whole reports


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: `base`; `mha`, another model; `seed`, another seed; `hostile`, all of whose free text
    is markup."""
    home = tmp_path_factory.mktemp("runs")
    nasty = "\n".join(HOSTILE[:-7])
    records: dict[str, dict[str, Any]] = {
        "base": {},
        "mha": {"spec": full_spec(model={"attention_type": "mha"})},
        "seed": {"spec": full_spec(seed=43)},
        "hostile": {
            "name": HOSTILE[1],
            "spec": full_spec(
                notes=nasty,
                model={"attention_type": "mha"},
                tracking={"uri": "http://localhost", "tags": {nasty: nasty}},
            ),
            "provenance": {"command": f"run {nasty}", "python": HOSTILE[0], "user": nasty},
            "error": nasty,
        },
    }
    for index, (name, changes) in enumerate(records.items()):
        record = full_record(**{"name": name, **changes})
        if name == "hostile":
            record.effective.data.source = nasty
            record.effective.hardware.device_name = nasty
            record.effective.evaluation["held_out"].context = nasty
        shift = 0.0 if name == "base" else -0.01
        write_run(home / name, record, shift=shift, seed=index)
    place = {"uri": "https://me:secret@host:5000/?x", "experiment_id": "7", "run_id": HOSTILE[3]}
    (home / "hostile" / POSITION).write_text(json.dumps(place))
    place = {"uri": "sqlite:////home/me/mlflow.db", "experiment_id": "7", "run_id": "0123abcd" * 4}
    (home / "mha" / POSITION).write_text(json.dumps(place))
    return home


def written(home: Path, b: str, where: Path, **options: Any) -> tuple[Comparison, Path]:
    comparison = write_report(compare_runs(home / "base", home / b, **options), where)
    assert comparison.report is not None
    return comparison, comparison.report


@pytest.fixture(scope="module")
def report(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a comparable pair."""
    return written(home, "mha", tmp_path_factory.mktemp("reports"), treatment=["model"])[1]


def test_the_page_needs_nothing_beside_itself(report: Path) -> None:
    found = assert_closed((report / "report.html").read_text(), pictures=8)
    pictures = {value for _, name, value in found.attributes if name == "src"}
    files = {path.read_bytes() for path in report.glob("*.png")}
    assert {base64.b64decode(value.partition(",")[2]) for value in pictures} == files


def test_page_and_markdown_say_the_same_in_the_same_order(report: Path) -> None:
    found = Page((report / "report.html").read_text())
    source = (report / "report.md").read_text()
    assert_harmless(source)
    headings = [line.lstrip("# ") for line in source.splitlines() if line.startswith("#")]
    assert found.of("h1") + found.of("h2") == headings
    assert headings[1:] == [
        "Numbers",
        "Curves and documents",
        "Throughput and memory",
        "Checklist",
        "Held out",
        "What differs",
        "Runs",
        "Reproduce",
    ]
    pictures = [token for token in parsed(source) if token.type == "image"]
    assert all((report / token.attrs["src"]).is_file() for token in pictures)
    alternatives = [value for _, name, value in found.attributes if name == "alt"]
    said = ["".join(part.content for part in token.children) for token in pictures]
    assert list(map(squeezed, said)) == list(map(squeezed, alternatives))
    tables = [token.type for token in parsed(source)].count("table_open")
    assert tables == found.tags.count("table")


def test_a_picture_says_in_words_what_it_shows(report: Path) -> None:
    document = json.loads((report / "results.json").read_text())
    number = document["results"]["held_out/nll"]
    low, high = number["documents"]["interval"]
    alternatives = [
        value
        for _, name, value in Page((report / "report.html").read_text()).attributes
        if name == "alt"
    ]
    assert all(len(words) > 25 for words in alternatives)
    assert f"{number['difference']:.4f}" in alternatives[0]
    assert f"[{low:.4f}, {high:.4f}]" in alternatives[0]
    assert "does not hold zero" in alternatives[0]
    speed = next(words for words in alternatives if words.startswith("Throughput"))
    assert speed == "Throughput: A 1,500 tokens/s, B 1,500 tokens/s."


def test_hostile_specs_and_tags_change_nothing_of_the_page(home: Path, tmp_path: Path) -> None:
    reason = HOSTILE[0] + HOSTILE[2]
    allow = {"hardware": reason, "evaluation": reason}
    comparison, folder = written(home, "hostile", tmp_path, treatment=["model"], allow=allow)
    assert comparison.verdict == "flagged"
    assert folder.parent == tmp_path
    html = (folder / "report.html").read_text()
    found = assert_closed(html, pictures=8)
    assert "alert(1)" in found.text  # shown
    assert found.tags.count("h1") == 1
    source = (folder / "report.md").read_text()
    assert_harmless(source)
    assert [t.type for t in parsed(source)].count("heading_open") == len(
        re.findall(r"<h[12]>", html)
    )
    json.loads((folder / "results.json").read_text())
    assert "secret" not in html


def test_a_report_says_which_run_of_mlflow_it_speaks_of(
    home: Path, report: Path, tmp_path: Path
) -> None:
    """Of the run that MLflow has, and of it alone."""
    source = (report / "report.md").read_text()
    (row,) = [line for line in source.splitlines() if line.startswith("| MLflow run")]
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["-", "0123abcd" * 4]
    assert "MLflow page" not in source  # a file of this machine has none
    assert "mlflow.db" not in source
    place = home / "hostile" / POSITION
    known = Position.model_validate_json(place.read_bytes())
    assert known.page == f"https://host:5000/#/experiments/7/runs/{HOSTILE[3]}"
    assert known.model_copy(update={"uri": "javascript:alert(1)"}).page is None
    assert "MLflow" not in written(home, "seed", tmp_path)[1].joinpath("report.md").read_text()


def test_very_long_names_stay_short(home: Path, tmp_path: Path) -> None:
    names = ("x" * 10_000, "|" * 10_000)
    comparison = compare_runs(home / "base", home / "seed", names=names)
    folder = write_report(comparison, tmp_path).report
    assert folder is not None
    for file in ("report.html", "report.md"):
        assert (folder / file).stat().st_size < 40_000


def test_a_refused_pair_has_no_number_and_no_picture(home: Path, tmp_path: Path) -> None:
    _, folder = written(home, "seed", tmp_path)
    html = (folder / "report.html").read_text()
    found = assert_closed(html, pictures=0)
    assert found.of("h1") == ["base against seed: REFUSED for nll"]
    for word in ("B - A", "95%", "winner", "lower", "higher", "perplexity", "nats"):
        assert word not in found.text
    assert squeezed("wb run experiments/seed.yaml seed=42 name=seed-matched") in found.text
    assert (folder / "results.csv").read_text().count("\n") == 1
    assert not list(folder.glob("*.png"))


# -- the numbers as data


def test_the_table_has_every_number_once(report: Path) -> None:
    document = json.loads((report / "results.json").read_text())
    rows = list(csv.DictReader(io.StringIO((report / "results.csv").read_text())))
    keys = [
        tuple(row[name] for name in ("metric", "quantity", "arm", "tokens", "document"))
        for row in rows
    ]
    assert len(set(keys)) == len(keys)
    found = dict(zip(keys, rows, strict=True))
    at = str(document["at"])
    for metric, number in document["results"].items():
        for arm, key in (("A", "a"), ("B", "b"), ("B - A", "difference")):
            quantity = "difference" if arm == "B - A" else "value"
            row = found[metric, quantity, arm, at, ""]
            assert float(row["value"]) == number[key]
            assert row["unit"] == number["unit"]
        low_high = number["documents"] and number["documents"]["interval"]
        assert (low_high is None) == (row["low"] == "")
        if low_high:
            assert [float(row["low"]), float(row["high"])] == low_high
            assert (row["interval"], row["level"], row["n"]) == ("documents", "0.95", "12")
    for metric, series in document["series"].items():
        for index, tokens in enumerate(series["tokens"]):
            row = found[metric, "value", "B", str(tokens), ""]
            assert float(row["value"]) == series["b"][index]
            assert (row["run"], row["seed"]) == ("mha", "42")
    pairs = document["details"]["documents"]
    for sha, value in zip(pairs["documents"], pairs["a"], strict=True):
        assert float(found["held_out/nll", "value", "A", at, sha]["value"]) == value
    weight = pairs["weight"]
    mean = sum(v * w for v, w in zip(pairs["a"], weight, strict=True)) / sum(weight)
    assert mean == pytest.approx(document["results"]["held_out/nll"]["a"], rel=1e-12)
    assert {row["claim"] for row in rows} == {"nll", "bpb", "throughput", "memory", ""}


def test_a_blank_number_says_why_in_the_table(home: Path, tmp_path: Path) -> None:
    spec = full_spec(telemetry={"log_steps": 5})
    write_run(tmp_path / "telemetry", full_record("telemetry", spec=spec))
    comparison = compare_runs(home / "base", tmp_path / "telemetry")
    from workbench.compare.tidy import tidy_csv

    rows = list(csv.DictReader(io.StringIO(tidy_csv(comparison))))
    blank = [row for row in rows if row["metric"] == "tokens_per_s"]
    assert [row["value"] for row in blank] == ["", "", ""]
    assert {row["note"] for row in blank} == {"refused: telemetry"}


@pytest.mark.parametrize("name", ['=HYPERLINK("http://x")', "@x", "+1", "-1", "\t=x", "a\n=b,c"])
def test_no_name_is_a_formula_or_another_row(home: Path, name: str) -> None:
    from workbench.compare.tidy import tidy_csv

    comparison = compare_runs(home / "base", home / "mha", names=(name, "b"))
    rows = list(csv.DictReader(io.StringIO(tidy_csv(comparison))))
    runs = {row["run"] for row in rows if row["arm"] == "A"}
    assert runs == {name if name[0] == "a" else f"'{name}"}
