"""MLflow's own UI over a store, in headless Chromium: what a researcher looks for is there.

Needs Chromium and its driver, as Debian packages them (`apt-get install chromium chromium-driver`),
and selenium (extra `dev`); skipped where one of them is missing. With `WB_SCREENSHOTS=FOLDER` the
pages are also drawn there.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_studies import load_study, train_planned, write_study
from tiny_runs import tiny_spec, untracked_run

from workbench.cli import _guarded
from workbench.errors import TrainingStoppedError
from workbench.study.plan import FrozenPlan, folder_of, version_of, write_plan
from workbench.track.mlflow_store import Feed, connect
from workbench.track.record import read_record
from workbench.track.store import Store

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in (CHROMIUM, DRIVER), reason="there is no Chromium with its driver"),
]

SECONDS = 120.0  # for a page, also on a busy machine
NAMED = (
    "train/nll",
    "train_split/nll",
    "held_out/nll",
    "held_out/bits_per_byte",
    "grad_norm",
    "lr",
)
# A panel that MLflow opens over a third of the page, the first time.
ASSISTANT = '[data-component-id="mlflow.assistant.chat_panel.close"]'


@dataclass(frozen=True)
class Page:
    """A browser on the UI: where it is served, and the MLflow ids of the runs by name."""

    browser: Any
    address: str
    ids: dict[str, str]
    folder: Path
    first: str  # what `wb ui` says that one should open

    def open(self, route: str, *expected: str) -> str:
        """Opens a page, waits for these words, and returns its text."""
        # A page of the same document would keep what it had drawn.
        self.browser.get("about:blank")
        joined = "&" if "?" in route else "?"
        self.browser.get(f"{self.address}/#/{route}{joined}workflowType=machine_learning")
        return self.see(*expected)

    def see(self, *expected: str) -> str:
        """Waits for words on the page; its text."""

        def text() -> str:
            for close in self.browser.find_elements("css selector", ASSISTANT):
                close.click()
            return str(self.browser.find_element("tag name", "body").text)

        return self.until(text, lambda said: all(word in said for word in expected), expected)

    def until(self, read: Callable[[], str], good: Callable[[str], bool], what: Any) -> str:
        """Reads until it is good; elements that are drawn again meanwhile are no fault."""
        from selenium.common.exceptions import WebDriverException

        said, end = "", time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                if good(said := read()):
                    return said
            except WebDriverException:
                pass
            time.sleep(0.5)
        self.shoot("failed")
        raise AssertionError(f"not on the page: {what}\n{said}")

    def run(self, name: str, tab: str = "") -> str:
        """The route of a run's page."""
        return f"experiments/1/runs/{self.ids[name]}{tab}"

    def shoot(self, name: str) -> None:
        """Draws the page where pictures are asked for."""
        if where := os.environ.get("WB_SCREENSHOTS"):
            self.browser.save_screenshot(str(Path(where, f"{name}.png")))


def make_store(folder: Path) -> Store:
    """A study of four finished runs with its report, a run that failed, and a comparison."""
    store = Store(folder / "mlruns")
    question = "Does routing beat a dense feed-forward?"
    study = load_study(write_study(folder, "routing", question=question, primary={"step": 4}))
    plan = FrozenPlan(
        id="0123456789abcdef",
        name=study.name,
        question=study.spec.question,
        file=str(study.path),
        threads=1,
        versions=[version_of(study)],
    )
    write_plan(folder_of(study.name, store), plan)
    train_planned(study, store)
    wild = tiny_spec(folder, "wild", optimizer={"lr": 1e30})
    wild = wild.model_copy(update={"notes": "a rate too high"})
    with pytest.raises(TrainingStoppedError):
        untracked_run(wild, store)
    target = connect(None, store, "workbench")
    for run in sorted(store.runs.iterdir()):
        Feed(run, target).push()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WB_HOME", str(store.home))
        patch.setenv("WB_MLFLOW_WAIT", "400")
        assert _guarded(["study", "report", "routing"]) == 0
        one, other = "routing-routed-s1", "routing-dense-s1"
        assert _guarded(["compare", one, other, "--treatment", "model"]) == 0
        assert _guarded(["compare", one, "routing-dense-s2"]) == 3
    return store


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("ui")
    store = make_store(folder)
    client = connect(None, store, "workbench").client
    ids = {run.info.run_name: run.info.run_id for run in client.search_runs(["1"])}
    server = subprocess.Popen(
        [sys.executable, "-m", "workbench", "ui", "--port", "0"],
        env={**os.environ, "WB_HOME": str(store.home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    options = webdriver.ChromeOptions()
    for option in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"):
        options.add_argument(f"--{option}")
    for option in ("background-networking", "component-update", "sync", "dev-shm-usage"):
        options.add_argument(f"--disable-{option}")
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.add_argument("--window-size=1500,1000")
    options.binary_location = str(CHROMIUM)
    browser = None
    try:
        assert server.stdout is not None
        first = server.stdout.readline().strip()
        address = first.partition("/#/")[0]
        assert address.startswith("http://127.0.0.1:")
        service = webdriver.ChromeService(executable_path=DRIVER)
        browser = webdriver.Chrome(options=options, service=service)
        browser.set_page_load_timeout(SECONDS)
        yield Page(browser, address, ids, folder, first)
    finally:
        if browser is not None:
            browser.quit()
        server.send_signal(signal.SIGINT)
        try:
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_runs_stand_under_their_study_and_a_failed_one_shows_it(page: Page) -> None:
    said = page.open("experiments/1/runs", "routing", "wild")
    assert "routing-dense-s1" not in said
    row = f'[row-id="{page.ids["routing"]}"]'
    page.browser.find_element("css selector", f'{row} [col-id*="Run Name"] button').click()
    children = [f"routing-{arm}-s{seed}" for arm in ("dense", "routed") for seed in (1, 2)]
    page.see(*children)
    page.shoot("runs")
    icons = {
        name: "".join(
            str(part.get_attribute("innerHTML"))
            for part in page.browser.find_elements("css selector", f'[row-id="{page.ids[name]}"]')
        )
        for name in ("wild", "routing-dense-s1", "routing-dense-s2")
    }
    assert _paths(icons["routing-dense-s1"]) == _paths(icons["routing-dense-s2"])
    assert _paths(icons["wild"]) != _paths(icons["routing-dense-s1"])


def test_the_first_page_has_the_held_out_loss_as_a_column(page: Page) -> None:
    page.browser.get("about:blank")
    page.browser.get(page.first)
    page.see("held_out/nll", "routing", "wild")
    row = f'[row-id="{page.ids["routing"]}"]'
    page.browser.find_element("css selector", f'{row} [col-id*="Run Name"] button').click()
    for name in ("routing-dense-s1", "routing-routed-s2"):
        record = read_record(page.folder / "mlruns" / "runs" / name)
        cell = f'[row-id="{page.ids[name]}"] [col-id="metrics.`held_out/nll`"]'
        text = page.until(
            lambda cell=cell: str(page.browser.find_element("css selector", cell).text),
            lambda said: said.strip() not in ("", "-"),
            cell,
        )
        assert abs(float(text) - record.results.final["held_out/nll"]) < 0.01
    page.shoot("columns")


def _paths(html: str) -> list[str]:
    """The drawings of a row, the mark of its status among them."""
    assert "<svg" in html
    return re.findall(r' d="([^"]+)"', html)


def test_a_run_says_what_came_out_with_parameters_tags_and_data(page: Page) -> None:
    record = read_record(page.folder / "mlruns" / "runs" / "routing-routed-s1")
    said = page.open(page.run("routing-routed-s1"), "Description", "Parameters (", "Metrics (")
    held_out = f"{record.results.final['held_out/nll']:.4f}"
    assert f"held_out/nll {held_out}" in said
    assert "gqa, token-routed, 2 layers x 64, 78,272 parameters" in said
    assert "Study routing, arm routed." in said
    assert "nll comparable, bpb comparable" in said
    assert "routing-routed-s1 against routing-dense-s2" in said
    assert "nll refused, bpb refused" in said
    assert "train (" in said
    assert re.search(r"Datasets\s+train \(\w+\)", said)
    assert "Parent run\nrouting" in said
    page.shoot("run")
    for name, value in (("optimizer.lr", "0.003"), ("model.mlp_type", "token_routed")):
        assert name in said
        assert value in said
    for name in NAMED:
        assert name in said
    assert said.index("workbench.status") < said.index("effective.")
    assert "workbench.comparison.routing--study--" in said
    assert "overlap.histogram" not in said


def test_the_failed_run_says_why(page: Page) -> None:
    said = page.open(page.run("wild"), "Description", "Failed")
    assert "not finite" in said
    assert "a rate too high" in said


def test_curves_have_the_names_of_the_numbers(page: Page) -> None:
    route = page.run("routing-routed-s1", "/model-metrics")
    said = page.open(route, "routing-routed-s1 (held_out/nll)", "train_split")
    page.shoot("curves")
    curve = page.browser.find_elements("css selector", ".js-plotly-plot .scatterlayer .trace path")
    assert any(len((one.get_attribute("d") or "").split("L")) == 3 for one in curve), said


def test_the_study_says_its_answer_and_its_report_opens(page: Page) -> None:
    said = page.open(page.run("routing"), "Description", "Child runs")
    assert "Does routing beat a dense feed-forward?" in said
    assert "can be told from" in said
    assert "4 of 4 runs finished" in said
    assert re.search(r"workbench\.verdict\s*:\s*comparable", said)
    report = next((page.folder / "reports").glob("routing--study--*")).name
    page.open(page.run("routing", f"/artifacts/reports/{report}/report.html"), "report.html")
    _see_report(page, "Does routing beat a dense feed-forward?")
    page.shoot("study-report")


def test_the_report_of_a_comparison_opens_from_its_run(page: Page) -> None:
    report = next((page.folder / "reports").glob("routing-routed-s1--routing-dense-s1--*")).name
    route = f"/artifacts/comparisons/{report}/report.html"
    page.open(page.run("routing-dense-s1", route), "report.html")
    _see_report(page, "routing-routed-s1 against routing-dense-s1: comparable for nll")
    page.shoot("report")


def _see_report(page: Page, title: str) -> None:
    """The page within the page, with its pictures drawn."""

    def inside() -> str:
        for frame in page.browser.find_elements("tag name", "iframe"):
            page.browser.switch_to.frame(frame)
            try:
                said = str(page.browser.find_element("tag name", "body").text)
                drawn = page.browser.execute_script(
                    "return [...document.images].every(one => one.naturalWidth > 0)"
                    " && document.images.length"
                )
                if drawn:
                    return said
            finally:
                page.browser.switch_to.default_content()
        return ""

    page.until(inside, lambda said: title in said and "Checklist" in said, title)


def test_datasets_open_with_their_hash_and_counts(page: Page) -> None:
    page.open("experiments/1/runs", "wild", "train (")
    train = read_record(page.folder / "mlruns" / "runs" / "wild").effective.data
    opener = f'[row-id="{page.ids["wild"]}"] [data-testid="open-dataset-drawer"]'
    page.browser.find_element("css selector", opener).click()
    page.see("held_out", "train_split", f"documents: {train.train_documents}")
    page.see(f"source: {train.source}", str(train.train_sha256)[:36])
    page.shoot("dataset")
