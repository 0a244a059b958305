"""Reports in a browser without a network: Chromium, as Debian packages it (`apt-get install
chromium chromium-driver`); skipped where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, Browser
from fake_arms import write_arm
from fake_runs import full_record, full_spec, write_run
from test_page import HOSTILE

from workbench.compare import compare_arms, compare_runs, write_arms_report, write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no Chromium with its driver"),
]
WIDTHS = (1200, 390)  # a desk and a telephone
PAPER = 703  # CSS pixels between the margins of A4
_WIDE = "const page = document.documentElement; return [page.scrollWidth, page.clientWidth]"
_OPEN = "for (const fold of document.querySelectorAll('details')) fold.open = true"


@pytest.fixture(scope="module", params=["comparable", "refused", "hostile", "arms"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose free text is markup where it is hostile."""
    home = tmp_path_factory.mktemp("report")
    nasty = "\n".join(HOSTILE[:-7])
    if request.param == "arms":
        long = "a" * 100
        arms = {
            long: write_arm(home, "a", {1: 0.0, 2: 0.01}),
            HOSTILE[1]: write_arm(home, "b", {1: -0.02, 2: -0.4}, model={"attention_type": "mha"}),
        }
        comparison = compare_arms(arms, treatment=["model"])
        found = write_arms_report(comparison, home / "reports").report
        assert found is not None
        return found
    changes: dict[str, Any] = {"spec": full_spec(model={"attention_type": "mha"})}
    if request.param == "refused":
        changes = {"spec": full_spec(seed=43)}
    if request.param == "hostile":
        changes["name"] = HOSTILE[1] + "y" * 10_000
        changes["provenance"] = {"python": nasty, "command": f"run {HOSTILE[2]}"}
        changes["mlflow"] = {"url": "javascript:alert(1)"}
    write_run(home / "a", full_record("a"))
    write_run(home / "b", full_record(**{"name": "b", **changes}), shift=-0.01, seed=2)
    found = write_report(compare_runs(home / "a", home / "b"), home / "reports").report
    assert found is not None
    return found


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    one = Browser(tmp_path)
    one.requests()  # those of the window's first page
    one.complaints()
    yield one
    one.close()


def test_the_page_asks_for_nothing_and_no_text_is_markup(report: Path, browser: Browser) -> None:
    """The page as it is, its policy with it."""
    page = report / "report.html"
    before = page.read_bytes()
    browser.open(page)
    browser.run(_OPEN)
    pictures = len(list(report.glob("*.png")))
    asked = browser.requests()
    assert asked[0] == page.resolve().as_uri()
    assert len([one for one in asked[1:] if one.startswith("data:image/png;base64,")]) == pictures
    assert len(asked) == 1 + pictures, [one[:200] for one in asked]
    assert browser.complaints() == []  # the policy had nothing to forbid
    assert (
        browser.run("return document.querySelectorAll('script, svg, a, iframe, link').length") == 0
    )
    assert browser.run("return document.querySelectorAll('h1').length") == 1
    sizes = browser.run("return [...document.images].map(one => one.naturalWidth)")
    assert len(sizes) == pictures
    assert all(size > 0 for size in sizes)
    text = browser.run("return document.querySelector('main').innerText")
    assert "Checklist" in text
    if "img" in page.read_text().partition("<h1>")[2].partition("</h1>")[0]:
        assert "<img src=http://outside/x" in text
    assert page.read_bytes() == before


def test_a_request_would_be_seen(report: Path, browser: Browser, tmp_path: Path) -> None:
    """The check above can fail: a picture from elsewhere shows as a request or as a complaint."""
    html = (report / "report.html").read_text()
    marked = html.replace("<main>", "<main><img src='http://outside/x.png'>")
    (tmp_path / "policy.html").write_text(marked)
    browser.open(tmp_path / "policy.html")
    assert any("outside" in one for one in [*browser.requests(), *browser.complaints()])
    open_to_all = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", marked)
    (tmp_path / "open.html").write_text(open_to_all)
    browser.open(tmp_path / "open.html")
    assert "http://outside/x.png" in browser.requests()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_whole_at_any_width(
    report: Path, browser: Browser, width: int, tmp_path: Path
) -> None:
    browser.resize(width)
    browser.open(report / "report.html")
    for state in ("closed", "open"):
        wide, view = browser.run(_WIDE)
        assert view == width
        assert wide <= width, f"the page scrolls sideways with its folds {state}"
        browser.screenshot(tmp_path / f"{state}.png")
        assert len((tmp_path / f"{state}.png").read_bytes()) > 10_000
        browser.run(_OPEN)
    shown = browser.run("return [...document.images].map(one => one.width)")
    assert all(0 < one <= width for one in shown)


def test_paper_shows_all_of_it(report: Path, browser: Browser) -> None:
    """On paper nothing is folded or cut off, and every verdict is read without its colour."""
    browser.resize(PAPER)
    browser.open(report / "report.html")
    folded = (
        "return [...document.querySelectorAll('details > :not(summary)')]"
        ".map(one => one.checkVisibility())"
    )
    assert not any(browser.run(folded)), "folds are closed on the screen"
    browser.print_media()
    assert all(browser.run(folded))
    wide, view = browser.run(_WIDE)
    assert wide <= view == PAPER
    right = (
        "return [...document.querySelectorAll('td, img')]"
        ".map(one => one.getBoundingClientRect().right)"
    )
    assert max(browser.run(right)) <= PAPER
    colours = (
        "return [...document.querySelectorAll('.badge')].map(one => {"
        " const look = getComputedStyle(one); return [look.color, look.backgroundColor] })"
    )
    badges = browser.run(colours)
    assert badges
    assert {tuple(one) for one in badges} == {("rgb(0, 0, 0)", "rgba(0, 0, 0, 0)")}
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") >= 1
