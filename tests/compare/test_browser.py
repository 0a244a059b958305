"""Reports in a browser without a network: Chromium, as Debian packages it (`apt-get install
chromium`); skipped where there is none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fake_runs import full_record, full_spec, write_run
from test_page import HOSTILE

from workbench.compare import compare_runs, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"),
]
WIDTHS = (1200, 500)  # no narrower: Chromium opens no smaller window

# Runs in the page once its policy is taken out: what the browser made of it.
_MEASURE = """
<script>
addEventListener("load", () => {
  const page = document.documentElement;
  const measure = () => ({ wide: page.scrollWidth, view: page.clientWidth });
  const found = { closed: measure() };
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  found.open = measure();
  found.pictures = [...document.images].map(one => [one.naturalWidth, one.width]);
  found.loaded = performance.getEntriesByType("resource").map(one => one.name)
    .filter(name => !name.startsWith("data:"));
  found.scripts = document.scripts.length;
  found.text = document.querySelector("main").innerText;
  page.setAttribute("data-found", JSON.stringify(found));
});
</script>
"""


def browse(page: Path, *options: str, width: int = 1200) -> str:
    """What Chromium prints when it opens a file, cut off from every network."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent}/profile"]
    command += [f"--window-size={width},1000", *options, page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout


def measured(report: Path, width: int) -> dict[str, Any]:
    html = (report / "report.html").read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', html)
    assert policy
    page = report / "measured.html"
    page.write_text(html.replace(policy[0], "").replace("</body>", f"{_MEASURE}</body>"))
    dumped = browse(page, "--dump-dom", "--virtual-time-budget=10000", width=width)
    found = re.search(r'data-found="([^"]*)"', dumped)
    assert found
    result = json.loads(unescape(found[1]))
    assert isinstance(result, dict)
    return result


@pytest.fixture(scope="module", params=["comparable", "refused", "hostile"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose free text is markup where it is hostile."""
    home = tmp_path_factory.mktemp("browser")
    nasty = "\n".join(HOSTILE[:-7])
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


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_whole_without_a_network(report: Path, width: int) -> None:
    found = measured(report, width)
    for state in ("closed", "open"):
        assert found[state]["view"] == width
        assert found[state]["wide"] <= width, "the page scrolls sideways"
    pictures = len(list(report.glob("*.png")))
    assert len(found["pictures"]) == pictures
    assert all(natural > 0 and 0 < shown <= width for natural, shown in found["pictures"])
    assert found["loaded"] == []
    assert found["scripts"] == 1  # the one that measures
    assert "Checklist" in found["text"]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_as_it_is_asks_for_nothing_and_can_be_drawn(report: Path, width: int) -> None:
    page, shot, log = report / "report.html", report / "shot.png", report / "log.json"
    before = page.read_bytes()
    browse(page, f"--screenshot={shot}", f"--log-net-log={log}", width=width)
    assert page.read_bytes() == before
    assert len(shot.read_bytes()) > 10_000
    shot.unlink()
    # The browser itself may look for updates; nothing may look for what the page names.
    events = log.read_text()
    assert "URL_REQUEST" in events
    assert "://outside" not in events
    assert "www.outside" not in events
