"""The report of a study: the answer by the rule of the plan, and all that happened on the way."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, Browser
from scipy import stats
from small_studies import ARMS, train_planned, write_study

from workbench import commands
from workbench.answers import Answer
from workbench.compare import markdown
from workbench.compare.document import Code
from workbench.errors import StoreError, UserError
from workbench.study import sections
from workbench.study.grounds import _by_value, provenance, wall_time
from workbench.study.ledger import Event, Ledger
from workbench.study.outcome import StudyResult, outcome_of
from workbench.study.places import portable, seen_from
from workbench.study.plan import FrozenPlan, folder_of, read_plan, version_of, write_plan
from workbench.study.report import compose, tidy_csv, title, write_study_report
from workbench.study.sections import headline
from workbench.study.spec import Study, load_study
from workbench.study.status import study_status
from workbench.track.comparisons import TAG, comparison_tags, notes_of
from workbench.track.position import POSITION
from workbench.track.record import read_record, write_record
from workbench.track.store import Store
from workbench.views import run_rows, run_table

Made = tuple[Path, Store]


def freeze(study: Study, store: Store) -> None:
    """The plan as the first `wb study run` leaves it."""
    plan = FrozenPlan(
        id="0123456789abcdef",
        name=study.name,
        question=study.spec.question,
        file=str(study.path),
        threads=1,
        versions=[version_of(study)],
    )
    write_plan(folder_of(study.name, store), plan)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of four runs that have finished."""
    folder = tmp_path_factory.mktemp("study")
    store = Store(folder / "mlruns")
    study = load_study(write_study(folder, question="Dense or | routed?", primary={"step": 4}))
    freeze(study, store)
    train_planned(study, store)
    ledger = Ledger(folder_of("small", store))
    ledger.add("began", detail="4 runs, 1 at once, 1 threads each")
    for run in study.runs:
        record = read_record(store.runs / run.name)
        ledger.add("ended", run.name, id=record.id, status="FINISHED", exit_code=0)
    return folder


@pytest.fixture
def made(trained: Path, tmp_path: Path) -> Made:
    """A copy of it that a test may change."""
    shutil.copytree(trained, tmp_path / "study")
    store = Store(tmp_path / "study" / "mlruns")
    plan = read_plan(folder_of("small", store))
    assert plan is not None
    path = tmp_path / "study" / "small.study.yaml"
    write_plan(folder_of("small", store), plan.model_copy(update={"file": str(path)}))
    return path, store


def result(made: Made) -> StudyResult:
    return outcome_of(study_status("small", made[1]))


def written(made: Made, found: StudyResult | None = None) -> Path:
    return write_study_report(found or result(made), made[1].reports)


def values(store: Store, arm: str) -> list[float]:
    return [
        read_record(store.runs / f"small-{arm}-s{seed}").results.final["held_out/nll"]
        for seed in (1, 2)
    ]


def test_the_answer_is_the_t_interval_of_paired_seeds(made: Made) -> None:
    found = result(made)
    assert found.verdict == "comparable"
    assert found.complete
    routed, dense = values(made[1], "routed"), values(made[1], "dense")
    change = [b - a for a, b in zip(routed, dense, strict=True)]
    (decision,) = found.decisions
    assert decision.number is not None
    assert decision.number.difference == pytest.approx(statistics.fmean(change), rel=1e-9)
    half = stats.t.ppf(0.975, 1) * statistics.stdev(change) / math.sqrt(2)
    seeds = decision.number.seeds
    assert seeds is not None
    expected = (statistics.fmean(change) - half, statistics.fmean(change) + half)
    assert seeds.interval == pytest.approx(expected, rel=1e-6)
    assert decision.better is None
    assert headline(found) == "No arm can be told from routed at this budget."


def test_the_report_is_whole_and_says_what_a_newcomer_asks(made: Made) -> None:
    folder = written(made)
    assert {"report.md", "report.html", "results.json", "results.csv", "answer.png"} <= {
        path.name for path in folder.iterdir()
    }
    text = (folder / "report.md").read_text()
    first = text.index("No arm can be told from routed")
    assert text.startswith("# small: Dense or \\| routed?")
    for part in (
        "verdict: comparable",
        "treatment: model (declared)",
        "they differ in: `model.intermediate_size` (32, 96), `model.mlp_type`",
        "frozen",
        "before the first run",
        "4 of 4 runs finished",
        "![Difference of held_out/nll",
        "## The arms",
        "## The plan and what happened",
        "Every run of the plan was trained once",
        "## Checklist",
        "## What differs",
        "wb study run",
    ):
        assert part in text, part
    assert first < text.index("![Difference of held_out/nll") < text.index("## The arms")
    for run in ("small-routed-s1", "small-routed-s2", "small-dense-s1", "small-dense-s2"):
        assert run in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert max(map(len, tables)) <= 100
    for name in ("answer.png", "curves.png", "difference-1.png", "documents-1.png"):
        assert f"({name})" in text
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    html = (folder / "report.html").read_text()
    assert "http://" not in html
    assert "https://" not in html
    assert "<script" not in html


def test_numbers_have_as_many_digits_as_their_uncertainty_allows(made: Made) -> None:
    """Two digits of the interval over seeds or of the spread, and each number in one way alone."""
    found = result(made)
    number = found.decisions[0].number
    assert number is not None
    assert number.seeds is not None
    text = (written(made, found) / "report.md").read_text().replace("\\", "")
    half = (number.seeds.interval[1] - number.seeds.interval[0]) / 2
    (row,) = [line for line in text.splitlines() if line.startswith("| dense") and "told" in line]
    mean, change, interval = (cell.strip() for cell in row.split("|")[2:5])
    for written_as, uncertainty in (
        (change, half),
        *((end, half) for end in interval.strip("[]").split(", ")),
        *((part, statistics.stdev(values(made[1], "dense"))) for part in mean.split(" ± ")),
    ):
        decimals = len(written_as.partition(".")[2])
        assert 10 <= uncertainty * 10**decimals < 100 or (decimals, uncertainty > 10) == (0, True)
    assert text.count(mean) == 2  # among the arms, and among all numbers
    (end,) = re.findall(r"dense from [\d.]+ to ([\d.]+\d)\.?[;\]]", text)  # of the curves' picture
    assert end == mean.partition(" ")[0]
    assert f" {interval}" in text.partition("![")[0]


def test_a_study_says_what_was_held_out_and_what_was_chosen(made: Made) -> None:
    text = (written(made) / "report.md").read_text()
    chosen = text.partition("## What was chosen")[2].partition("## ")[0]
    assert "Checkpoint: last of every run." in chosen
    assert "Other runs in the store, same experiment and same model: routed 0, dense 0." in chosen
    held_out = text.partition("## Held out")[2].partition("## ")[0]
    facts = read_record(made[1].runs / "small-dense-s1").effective.evaluation["held_out"]
    assert f"| all | held_out    | {facts.status} " in held_out
    assert isinstance(facts.overlap, dict)
    assert f"{facts.overlap['overlapping_documents']} of {facts.documents}" in held_out
    copy = made[1].runs / "tuned"
    shutil.copytree(made[1].runs / "small-dense-s1", copy)
    changed = {"id": "e" * 32, "name": "tuned", "study": None}
    write_record(read_record(copy).model_copy(update=changed), copy)
    again = markdown.render(sections.chosen(result(made)))
    assert "same model: routed 0, dense 1. Unequal numbers" in again
    record = read_record(made[1].runs / "small-dense-s2")
    record.effective.evaluation["held_out"].documents = 1
    apart = replace(result(made))
    assert apart.comparison is not None
    object.__setattr__(apart.comparison.arms[1].runs[1], "record", record)
    said = markdown.render(sections.held_out(apart))
    assert "| routed, dense |" in said
    assert "| dense " in said


def test_the_first_paragraph_says_what_the_study_cannot_answer(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds whose interval is wider than all that a loss can be, and an effect on an effect."""
    found = result(made)
    first = written(made, found).joinpath("report.md").read_text().partition("![")[0]
    assert "cannot answer" not in first
    assert "interaction" not in first
    assert "dense against routed, with 2 seeds an arm" in first
    (decision,) = found.decisions
    assert decision.number is not None
    assert decision.number.seeds is not None
    test = replace(decision.number.seeds, interval=(-16.508, 16.241), spread=1.3)
    wide = replace(decision, number=replace(decision.number, seeds=test))
    said = sections.answer(replace(found, decisions=(wide,)))
    vocabulary = found.compared[0].entry.record.effective.tokenizer.vocab_size  # type: ignore[union-attr]
    assert "2 seeds cannot answer this: the interval is wider" in markdown.render(said)
    assert "seeds [-17, +16]." in markdown.render(said).replace("\\", "")
    assert f"than the {math.log(vocabulary or 0):.1f} nats/token" in markdown.render(said)
    crossed = {
        f"{one}-{two}": {"model.attention_type": one, "model.mlp_type": two}
        for one in ("mha", "gqa")
        for two in ("dense", "routed")
    }
    monkeypatch.setitem(found.status.plan.latest.document, "arms", crossed)
    monkeypatch.setattr(StudyResult, "arms", tuple(crossed))
    words = markdown.render(sections.answer(found))
    assert "Whether what model.mlp_type does depends on model.attention_type" in words


def test_the_report_says_how_long_the_study_took() -> None:
    times = ["00:00:00", "00:00:10", "00:05:00", "09:00:00", "09:01:00", "12:00:00"]
    kinds: list[Any] = ["began", "started", "interrupted", "began", "over", "removed"]
    events = [
        Event(when=f"2026-01-31T{time}+00:00", kind=kind)
        for time, kind in zip(times, kinds, strict=True)
    ]
    assert wall_time(events) == ", in 6 min 0 s of wall time"
    assert wall_time(events[:1]) == ""
    assert wall_time([Event(when="?", kind="began")]) == ""


def test_the_events_of_long_names_are_whole(made: Made) -> None:
    ledger = Ledger(folder_of("small", made[1]))
    run = f"small-{'routed-and-wide-' * 2}s42"
    ledger.add("ended", run, id="x", status="FAILED", exit_code=2, detail="what it said " * 9)
    text = (written(made) / "report.md").read_text()
    events = text.partition("events</summary>")[2].partition("</details>")[0]
    (row,) = [line for line in events.splitlines() if "what it said" in line]
    when, name = (cell.strip() for cell in row.split("|")[1:3])
    assert name == "routed-and…nd-wide-s42"
    assert when == ledger.events[-1].when.partition("+")[0].replace("T", " ")


def test_the_numbers_as_data(made: Made) -> None:
    folder = written(made)
    lines = list(csv.reader(io.StringIO((folder / "results.csv").read_text())))
    assert len(set(lines[0])) == len(lines[0])
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    deciding = [row for row in rows if row["metric"] == "held_out/nll"]
    last = max(int(row["tokens"]) for row in deciding)
    single = {
        (row["arm"], int(row["seed"])): float(row["value"])
        for row in deciding
        if row["quantity"] == "value" and int(row["tokens"]) == last
    }
    assert single == {
        (arm, seed): value
        for arm in ARMS
        for seed, value in zip((1, 2), values(made[1], arm), strict=True)
    }
    change = [row for row in deciding if row["quantity"] == "difference"]
    assert {row["interval"] for row in change if int(row["tokens"]) == last} == {
        "seeds",
        "documents",
    }
    test = result(made).decisions[0].number
    assert test is not None
    assert test.seeds is not None
    (found,) = [row for row in change if row["p"]]
    assert (float(found["p"]), float(found["p_adjusted"])) == (test.seeds.p, test.p_adjusted)
    document = json.loads(
        (folder / "results.json").read_text(), parse_constant=lambda word: pytest.fail(word)
    )
    assert document["verdict"] == "comparable"
    assert document["decisions"][0]["better"] is None
    assert len(document["study"]["runs"]) == 4
    # What the figures show is there too.
    curve = document["series"]["dense"]["held_out/nll"]
    assert len(curve["tokens"]) > 1
    assert {int(row["tokens"]) for row in change} == set(curve["tokens"])
    assert curve["a"][-1] == values(made[1], "routed")
    drawn = document["documents"]["dense"]["held_out/nll"]
    for arm, side in (("routed", "a"), ("dense", "b")):
        told = {
            r["document"]: float(r["value"]) for r in deciding if r["document"] and r["arm"] == arm
        }
        assert told == dict(zip(drawn["documents"], drawn[side], strict=True))
        weighed = sum(x * w for x, w in zip(drawn[side], drawn["weight"], strict=True))
        mean = statistics.fmean(values(made[1], arm))
        assert weighed / sum(drawn["weight"]) == pytest.approx(mean, rel=1e-6)


def test_a_report_says_which_runs_of_mlflow_it_speaks_of(made: Made) -> None:
    assert "MLflow" not in markdown.render(provenance(result(made)))
    for index, run in enumerate(sorted(made[1].runs.glob("small-dense-*"))):
        place = {"uri": "http://host:5000", "experiment_id": "7", "run_id": f"{index}" * 32}
        (run / POSITION).write_text(json.dumps(place))
    text = markdown.render(provenance(result(made)))
    assert "MLflow runs of 2 of 4 runs" in text
    page = "http\\://host:5000/\\#/experiments/7/runs/" + "1" * 32  # as Markdown escapes it
    assert f"- small-dense-s2: {'1' * 32}, {page}" in text


def test_a_report_names_no_place_of_this_machine(made: Made) -> None:
    path, store = made
    project = store.home.parent
    error = f"UserError: {project}/corpus.txt: it is not there"
    set_record(store, "small-dense-s2", status="FAILED", error=error)
    Ledger(folder_of("small", store)).add(
        "ended", "small-dense-s2", id="x", status="FAILED", exit_code=2, detail=error
    )
    folder = written(made)
    for name in ("report.md", "report.html", "results.json", "results.csv"):
        text = (folder / name).read_text()
        assert str(project) not in text, name
        assert str(Path.home()) not in text, name
    document = json.loads((folder / "results.json").read_text())
    assert document["study"]["file"] == document["plan"]["file"] == path.name
    assert document["study"]["folder"] == "mlruns/studies/small"
    assert document["study"]["runs"][0]["folder"] == "mlruns/runs/small-routed-s1"
    assert "corpus.txt: it is not there" in (folder / "report.md").read_text()
    absolute = [word for word in _strings(document) if word.startswith("/")]
    assert absolute == []
    assert "wb study run small.study.yaml" in (folder / "report.md").read_text()


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [word for one in value.values() for word in _strings(one)]
    if isinstance(value, list):
        return [word for one in value for word in _strings(one)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/project/experiments/a.study.yaml", "experiments/a.study.yaml"),
        ("/elsewhere/a.study.yaml", "a.study.yaml"),
        ("/project-2/a.study.yaml", "a.study.yaml"),
        ("a.study.yaml", "a.study.yaml"),
    ],
)
def test_a_place_is_seen_from_the_project(path: str, seen: str) -> None:
    project = Path("/project")
    assert seen_from(project, path) == seen
    said = {"detail": [f"{path}: not there", "in /project"]}
    inside = path.replace("/project/", "")
    assert portable(said, project) == {"detail": [f"{inside}: not there", "in ."]}


def test_a_file_of_a_project_that_was_moved_is_found_where_it_lies_now(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "a.study.yaml").touch()
    before = "/home/someone/project/experiments/a.study.yaml"
    assert seen_from(tmp_path, before) == "experiments/a.study.yaml"
    assert seen_from(tmp_path, "/home/someone/project/other/b.study.yaml") == "b.study.yaml"


def set_record(store: Store, run: str, **changes: Any) -> None:
    record = read_record(store.runs / run)
    write_record(record.model_copy(update=changes), store.runs / run)


def failed(made: Made) -> None:
    set_record(made[1], "small-dense-s2", status="FAILED", error="TrainingStoppedError: not finite")


def deleted(made: Made) -> None:
    shutil.rmtree(made[1].runs / "small-dense-s2")


def stopped(made: Made) -> None:
    set_record(made[1], "small-dense-s2", status="KILLED", error="stopped by SIGINT")


@pytest.mark.parametrize(
    ("change", "state", "said"),
    [
        (failed, "failed", "not finite"),
        (deleted, "deleted", "no longer in the store"),
        (stopped, "stopped", "stopped by SIGINT"),
    ],
)
def test_a_run_that_is_missing_is_shown_and_refuses_its_arm(
    change: Callable[[Made], None], state: str, said: str, made: Made
) -> None:
    change(made)
    found = result(made)
    assert found.verdict == "refused"
    assert not found.complete
    (decision,) = found.decisions
    assert decision.refused
    assert "planned seed 2 is left out" in decision.words
    text = (written(made, found) / "report.md").read_text()
    assert "INCOMPLETE" in text
    assert "because of: seeds (dense): see Checklist" in text
    assert "planned seed 2 is left out" in text
    row = next(line for line in text.splitlines() if line.startswith("| dense") and state in line)
    assert "| no" in row
    assert said.split()[0] in row
    assert f"{values(made[1], 'routed')[0]:.3f}" not in text  # nothing of a refused arm is shown
    assert not (written(made, found) / "answer.png").exists()


def test_without_any_run_of_an_arm_there_is_still_a_report(made: Made) -> None:
    for run in made[1].runs.glob("small-dense-*"):
        shutil.rmtree(run)
    found = result(made)
    assert found.verdict == "refused"
    text = (written(made, found) / "report.md").read_text()
    assert "dense against routed: no run of dense has finished" in text
    assert "This study cannot answer its question" in text


def test_a_seed_that_was_dropped_after_the_fact_is_still_counted(made: Made) -> None:
    path, store = made
    write_study(path.parent, seeds=[1], primary={"step": 4})
    plan = read_plan(folder_of("small", store))
    assert plan is not None
    changed = version_of(load_study(path), "seed 2 looked odd", 4)
    write_plan(
        folder_of("small", store), plan.model_copy(update={"versions": [plan.first, changed]})
    )
    found = result(made)
    assert found.comparison is not None
    assert [arm.seeds for arm in found.comparison.arms] == [(1, 2), (1, 2)]
    text = (written(made, found) / "report.md").read_text()
    assert "PLAN CHANGED" in text
    assert "seed 2 looked odd" in text
    assert "4 runs had finished" in text
    deleted(made)
    again = result(made)
    assert again.verdict == "refused"
    assert "planned seed 2 is left out" in again.decisions[0].words


def test_a_study_file_changed_after_the_last_run_shows(made: Made) -> None:
    path, _ = made
    write_study(path.parent, primary={"step": 4}, decision={"confidence": 0.8})
    text = (written(made) / "report.md").read_text()
    assert "The study file was changed after the last run" in text
    assert "decision.confidence: 0.95 -&gt; 0.8" in text


def test_what_happened_on_the_way_stands_in_the_report(made: Made) -> None:
    ledger = Ledger(folder_of("small", made[1]))
    ledger.add("interrupted", detail="by SIGINT")
    ledger.add("ended", "small-dense-s1", id="x", status="KILLED", exit_code=130, detail="SIGINT")
    ledger.add("missed", "small-dense-s2", detail="it had finished")
    (made[1].runs / "small-routed-s1").rename(made[1].runs / "lucky")
    text = (written(made) / "report.md").read_text()
    assert "the study was interrupted by SIGINT" in text
    assert "small-dense-s1 ended as KILLED: SIGINT" in text
    assert "small-dense-s2 was not in the store: it had finished" in text
    assert "its folder is now lucky" in text
    assert "was trained once" not in text


def test_the_list_of_runs_shows_the_study(made: Made) -> None:
    rows = run_rows(made[1])
    assert {(row["study"], row["arm"]) for row in rows} == {("small", "dense"), ("small", "routed")}
    assert "small: dense" in run_table(rows)
    assert "study" not in run_table([row | {"study": None} for row in rows])


@pytest.mark.slow
def test_a_winner_is_named_by_the_rule_of_the_plan(tmp_path: Path) -> None:
    store = Store(tmp_path / "mlruns")
    model = ARMS["dense"]["model"]
    arms = {
        "slow": {"model": model, "optimizer": {"lr": 1e-5}},
        "fast": {"model": model, "optimizer": {"lr": 3e-3}},
    }
    path = write_study(tmp_path, treatment=["optimizer.lr"], arms=arms, seeds=[1, 2, 3])
    study = load_study(path)
    freeze(study, store)
    train_planned(study, store)
    found = outcome_of(study_status("small", store))
    assert found.decisions[0].better == "fast"
    assert headline(found) == "fast is better than slow."

    plan = read_plan(folder_of("small", store))
    assert plan is not None
    write_study(tmp_path, treatment=["optimizer.lr"], arms=arms, seeds=[1, 2, 3], baseline="fast")
    turned = version_of(load_study(path), "the other way round")
    write_plan(folder_of("small", store), plan.model_copy(update={"versions": [turned]}))
    found = outcome_of(study_status("small", store))
    assert found.arms == ("fast", "slow")
    assert found.decisions[0].better == "fast"

    rule = {"confidence": 0.95, "smallest_difference": 5.0}
    write_study(tmp_path, treatment=["optimizer.lr"], arms=arms, seeds=[1, 2, 3], decision=rule)
    small = version_of(load_study(path), "only large ones count")
    write_plan(folder_of("small", store), plan.model_copy(update={"versions": [small]}))
    found = outcome_of(study_status("small", store))
    assert found.decisions[0].better is None
    assert "by less than the plan counts" in found.decisions[0].words


def test_a_planned_contrast_is_answered_beside_the_baseline(tmp_path: Path) -> None:
    store = Store(tmp_path / "mlruns")
    wide = {"model": ARMS["dense"]["model"] | {"intermediate_size": 128}}
    contrasts = [{"arm": "wide", "against": "dense"}]
    path = write_study(tmp_path, arms=ARMS | {"wide": wide}, contrasts=contrasts)
    study = load_study(path)
    freeze(study, store)
    train_planned(study, store)
    found = outcome_of(study_status("small", store))
    assert [(one.arm, one.against) for one in found.decisions] == [
        ("dense", "routed"),
        ("wide", "routed"),
        ("wide", "dense"),
    ]
    contrast = found.decisions[2].number
    assert contrast is not None
    assert contrast.seeds is not None
    assert contrast.seeds.level == pytest.approx(1 - 0.05 / 3)
    change = [b - a for a, b in zip(values(store, "dense"), values(store, "wide"), strict=True)]
    assert contrast.difference == pytest.approx(statistics.fmean(change), rel=1e-9)
    said = "No arm can be told from routed; wide cannot be told from dense at this budget."
    assert headline(found) == said
    folder = write_study_report(found, store.reports)
    text = (folder / "report.md").read_text()
    for part in (
        "for 3 comparisons together",
        "3, each against `routed`; wide against dense",
        "| contrast ",
        "| wide - dense ",
    ):
        assert part in text, part
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) <= 100
    rows = list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))
    assert "wide - dense" in {row["arm"] for row in rows}
    shutil.rmtree(store.runs / "small-wide-s2")
    left = outcome_of(study_status("small", store))
    assert [one.refused for one in left.decisions] == [False, True, True]
    number = left.decisions[0].number
    assert number is not None
    assert number.seeds is not None
    assert number.seeds.level == pytest.approx(1 - 0.05 / 3)  # of all that were planned


def test_only_a_report_of_the_same_study_is_replaced(made: Made) -> None:
    folder = written(made)
    before = (folder / "results.json").read_text()
    assert written(made) == folder
    assert json.loads((folder / "results.json").read_text()) == json.loads(before)
    (folder / "results.json").write_text("{}")
    with pytest.raises(UserError, match="this is not an earlier report of the same"):
        written(made)
    assert not list(made[1].reports.glob(".report-*"))


def test_a_report_that_cannot_be_replaced_stays(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(made)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new" and not folder.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StoreError, match="cannot be written"):
        written(made)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_text_of_the_study_cannot_become_markup(made: Made) -> None:
    path, store = made
    plan = read_plan(folder_of("small", store))
    assert plan is not None
    bad = "<script>alert(1)</script> | **x** =cmd()"
    write_plan(folder_of("small", store), plan.model_copy(update={"question": bad}))
    folder = written(made)
    assert "<script>" not in (folder / "report.html").read_text()
    assert "<script>" not in (folder / "report.md").read_text()
    assert bad in title(result(made))
    assert path.exists()


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no Chromium with its driver")
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_of_a_study_in_a_browser_without_a_network(
    made: Made, tmp_path: Path, width: int
) -> None:
    folder = written(made)
    browser = Browser(tmp_path, width)
    try:
        browser.requests()
        browser.complaints()
        browser.open(folder / "report.html")
        asked = browser.requests()
        assert asked[0] == (folder / "report.html").resolve().as_uri()
        assert all(one.startswith("data:image/png;base64,") for one in asked[1:])
        assert len(asked) == 1 + len(list(folder.glob("*.png")))
        assert browser.complaints() == []
        assert browser.run("return document.documentElement.scrollWidth") <= width
        browser.screenshot(tmp_path / "page.png")
        assert len((tmp_path / "page.png").read_bytes()) > 10_000
    finally:
        browser.close()


def test_the_command_writes_the_report(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WB_HOME", str(made[1].home))
    monkeypatch.setenv("WB_MLFLOW_WAIT", "0")
    answer = commands.call(["study", "report", "small"])
    assert isinstance(answer, Answer)
    assert answer.exit_code == 0
    assert "COMPARABLE: No arm can be told from routed" in str(answer.content)
    folder = next(made[1].reports.glob("small--study--*"))
    for run in made[1].runs.iterdir():
        assert "study small" in comparison_tags(notes_of(run))[f"{TAG}.{folder.name}"]
    failed(made)
    answer = commands.call(["study", "report", str(made[0]), "--json"])
    assert isinstance(answer, Answer)
    assert answer.exit_code == 3
    document: Any = answer.content
    assert document["verdict"] == "refused"
    assert Path(document["report"]).is_dir()


def compared(*arguments: str) -> dict[str, Any]:
    """What `wb compare --json` says, with the ruling on the seeds beside it."""
    with pytest.MonkeyPatch.context() as patch:
        told: list[Any] = []
        patch.setattr("workbench.arms_command.write_document", told.append)
        patch.setattr("workbench.compare.arm_report.draw", lambda *_: {})  # takes seconds
        answer = commands.call(["compare", *arguments, "--treatment", "model", "--json"])
    assert isinstance(answer, Answer)
    (document,) = told
    (seeds,) = [rule for rule in document["rules"] if rule["rule"] == "seeds"]
    return document | {"code": answer.exit_code, "seeds": seeds}


def test_arms_of_a_study_need_all_its_seeds_in_any_comparison(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Picked from a plan, the lucky seed would look like any other."""
    monkeypatch.setenv("WB_HOME", str(made[1].home))
    monkeypatch.setenv("WB_MLFLOW_WAIT", "0")
    lucky = ["--a", "small-routed-s1", "--b", "small-dense-s1"]
    found = compared(*lucky)
    assert (found["code"], found["verdict"], found["results"]) == (3, "refused", None)
    assert "planned seed 2 is left out" in found["seeds"]["why"]
    assert compared(*lucky, "--allow", "seeds=a first look")["verdict"] == "flagged"
    both = ["--a", "small-routed-s1", "small-routed-s2", "--b", "small-dense-s1", "small-dense-s2"]
    assert compared(*both)["verdict"] == "comparable"
    tags = ["--a-tag", "workbench.arm=routed", "--b-tag", "workbench.arm=dense"]
    assert compared(*tags)["verdict"] == "comparable"
    # A seed that a later version of the plan dropped is still one that was planned.
    write_study(made[0].parent, seeds=[1], question="Dense or | routed?", primary={"step": 4})
    plan = read_plan(folder_of("small", made[1]))
    assert plan is not None
    later = version_of(load_study(made[0]), "one will do", 4)
    write_plan(
        folder_of("small", made[1]),
        plan.model_copy(update={"versions": [*plan.versions, later]}),
    )
    assert compared(*lucky)["verdict"] == "refused"
    # Of a study that is no longer in the store nothing is known.
    shutil.rmtree(folder_of("small", made[1]))
    assert compared(*lucky)["verdict"] == "comparable"


def test_a_pair_of_runs_out_of_a_study_points_to_all_of_it(
    made: Made, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WB_HOME", str(made[1].home))
    monkeypatch.setenv("WB_MLFLOW_WAIT", "0")
    monkeypatch.setattr("workbench.compare.report.draw", lambda *_: {})
    pair = ["small-routed-s1", "small-dense-s1", "--treatment", "model"]
    answer = commands.call(["compare", *pair])
    assert isinstance(answer, Answer)
    assert answer.exit_code == 0
    out, err = capfd.readouterr()
    said = "the study small planned the seeds 1, 2; this is of one alone: wb study report small"
    assert err.count(said) == 1
    assert "no winner is named" in " ".join(out.split())


def test_a_rerun_is_not_counted_twice(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WB_HOME", str(made[1].home))
    monkeypatch.setenv("WB_MLFLOW_WAIT", "0")
    copy = made[1].runs / "again"
    shutil.copytree(made[1].runs / "small-dense-s1", copy)
    write_record(read_record(copy).model_copy(update={"id": "f" * 32, "name": "again"}), copy)
    dense = ["small-dense-s1", "small-dense-s2", "again"]
    found = compared("--a", "small-routed-s1", "small-routed-s2", "--b", *dense)
    assert (found["code"], found["results"]) == (3, None)
    assert "seed 1 stands twice in one arm: a rerun is no further seed" in found["seeds"]["why"]


def test_the_table_of_a_refused_study_is_its_head_alone(made: Made) -> None:
    failed(made)
    found = result(made)
    rows = list(csv.DictReader(io.StringIO(tidy_csv(found))))
    assert all(row["value"] == "" for row in rows)
    assert compose(found, {})


def test_settings_of_many_arms_are_listed_by_value() -> None:
    words = _by_value(("a", "b", "c", "d"), ("model.top_k", "1", "1", "2", "-"))
    assert words == (Code("model.top_k"), ": 1 in a and b; 2 in c; not in d")
