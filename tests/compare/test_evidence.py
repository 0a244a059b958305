"""Runs whose files contradict one another are never compared, and the contradiction is named."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_runs import TOKENS_PER_STEP, TOTAL, changed_table, full_record, full_spec, sha, write_run

from workbench.compare import Comparison, compare_runs
from workbench.errors import UserError
from workbench.spec.run import document_hash

Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("base", "good")):
        write_run(home / name, full_record(name), shift=0.01 * seed, seed=seed)
    return home


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A copy of the good run, to be damaged."""
    return Path(shutil.copytree(runs / "good", tmp_path / "good"))


def fault_of(runs: Path, run: Path, **options: Any) -> str:
    """What a comparison with a damaged run says."""
    with pytest.raises(UserError) as error:
        compare_runs(run, runs / "base", **options)
    assert error.value.exit_code == 2
    assert all(fault.allowed for fault in error.value.faults)
    return str(error.value)


def edit_record(
    run: Path, change: Callable[[dict[str, Any]], Any], *, rehash: bool = False
) -> None:
    path = run / "run_config.json"
    document = json.loads(path.read_text())
    change(document)
    if rehash:
        document["spec_sha256"] = document_hash(document["spec"])
    path.write_text(json.dumps(document))


def edit_rows(run: Path, change: Callable[[Rows], Any]) -> None:
    path = run / "metrics.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = list(rows[0])
    change(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def row_of(rows: Rows, step: int) -> dict[str, str]:
    return next(row for row in rows if row["step"] == str(step))


def without(rows: Rows, step: int) -> None:
    rows.remove(row_of(rows, step))


def put(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        document = document[int(name) if isinstance(document, list) else name]
    document[last] = value


def test_untouched_runs_are_compared(runs: Path, run: Path) -> None:
    assert compare_runs(runs / "base", run).verdict == "comparable"


def test_either_side_may_be_the_damaged_one(runs: Path, run: Path) -> None:
    edit_rows(run, lambda rows: without(rows, 200))
    with pytest.raises(UserError) as error:
        compare_runs(runs / "base", run)
    assert str(error.value) == fault_of(runs, run)


# -- the record with its spec


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", 43),
        ("notes", "another"),
        ("training.steps", 500),
        ("training.precision", "fp32"),
        ("optimizer.lr", 1e-3),
        ("tracking.experiment", "other"),
        ("evaluation.select", "best"),
    ],
)
def test_a_spec_that_was_changed_by_hand(runs: Path, run: Path, path: str, value: Any) -> None:
    edit_record(run, lambda document: put(document["spec"], path, value))
    said = fault_of(runs, run)
    assert f"{run / 'run_config.json'}: spec_sha256" in said
    assert "not the hash of the spec" in said


def test_a_changed_spec_is_named_before_a_rule_refuses(runs: Path, run: Path) -> None:
    edit_record(run, lambda document: put(document["spec"], "seed", 43))
    assert "spec_sha256" in fault_of(runs, run, treatment=["seed"])
    assert "spec_sha256" in fault_of(runs, run, allow={"seeds": "x"}, claims=["memory"])


def test_a_hash_does_not_depend_on_credentials() -> None:
    spec = full_spec(tracking={"uri": "http://me:word@host"})
    redacted = full_spec(tracking={"uri": "http://host"})
    assert document_hash(spec) == document_hash(redacted) != document_hash(full_spec(seed=1))


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("training.precision", "fp32", "effective.precision.compute_dtype"),
        ("training.compile", False, "effective.execution.compiled"),
        ("training.batch_size", 8, "tokens_per_step"),
        ("training.gradient_accumulation_steps", 2, "effective.optimizer.sequences_per_update"),
        ("training.seq_len", 512, "tokens_per_step"),
        ("training.steps", 500, "total_tokens"),
        ("training.device", "cpu", "effective.hardware.device_type"),
        ("schedule.warmup_steps", 5, "effective.optimizer.warmup_steps"),
        ("tokenizer", {"name": "bytes", "path": None}, "effective.tokenizer.name"),
        ("evaluation.eval_documents", 3, "effective.evaluation.held_out.documents"),
    ],
)
def test_settings_that_are_not_what_ran(
    runs: Path, run: Path, path: str, value: Any, place: str
) -> None:
    """The hash is made to fit, as one who knows of it would do."""

    def change(document: dict[str, Any]) -> None:
        put(document["spec"], path, value)
        if path == "training.compile":
            document["spec"]["training"]["compile_mode"] = None

    edit_record(run, change, rehash=True)
    assert f"run_config.json: {place}: this contradicts" in fault_of(runs, run)


NOT_TIMED = {"not_applicable": "throughput is measured from 15 steps on"}


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("effective.precision.compute_dtype", "float32", "effective.precision.compute_dtype"),
        ("effective.execution.compiled", False, "effective.execution.compiled"),
        ("effective.interval.last_step", 200, "effective.interval.last_step"),
        ("effective.interval.first_step", NOT_TIMED, "effective.interval.first_step"),
        ("effective.parameters.total", 7, "params"),
        ("tokens_per_step", 2048, "tokens_per_step"),
        ("total_tokens", 2 * TOTAL, "total_tokens"),
        ("world_size", 2, "tokens_per_step"),
        ("model_config", {"hidden_size": 7}, "model_config.hidden_size"),
        ("model_config", {"vocab_size": 7}, "model_config.vocab_size"),
        ("points.3.tokens", 3, "points[3].tokens"),
        ("points.3.step", 200, "points[4].step"),
        ("points.3.bytes", 7, "points[3].bytes"),
        ("points.5.step", 300, "points[5].step"),
        ("results.tokens", 4096, "results.tokens"),
        ("results.tokens_per_s", "NaN", "results.tokens_per_s"),
        ("results.tokens_per_s", "Infinity", "results.tokens_per_s"),
        ("results.tokens_per_s", -1500.0, "results.tokens_per_s"),
        ("results.peak_memory_bytes", 0, "results.peak_memory_bytes"),
        ("results.final", {"held_out/nll": 1.0}, "results.final.held_out/nll"),
    ],
)
def test_facts_that_contradict_one_another(
    runs: Path, run: Path, path: str, value: Any, place: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        document["params"] = document["effective"]["parameters"]["total"]
        put(document, path, value)

    edit_record(run, change)
    assert f"run_config.json: {place}: " in fault_of(runs, run)


def test_a_finished_run_that_did_not_reach_its_end(runs: Path, run: Path) -> None:
    edit_record(run, lambda document: document["points"].pop())
    said = fault_of(runs, run)
    assert "points: this contradicts total_tokens" in said
    assert f"(got {200 * TOKENS_PER_STEP}); allowed: {TOTAL}" in said


def test_every_contradiction_of_a_record_is_listed(runs: Path, run: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["tokens_per_step"], document["total_tokens"] = 1, 2

    edit_record(run, change)
    with pytest.raises(UserError) as error:
        compare_runs(runs / "base", run)
    assert len(error.value.faults) > 2


# -- the metrics


CHANGES: dict[str, tuple[Callable[[Rows], Any], str]] = {
    "an evaluated row is not there": (lambda rows: without(rows, 200), "step 200"),
    "the last row is not there": (lambda rows: without(rows, 250), "step 250"),
    "a logged row is not there": (lambda rows: without(rows, 130), "step 130"),
    "a row stands twice": (lambda rows: rows.insert(7, dict(rows[6])), "step 50"),
    "rows are out of order": (lambda rows: rows.insert(3, rows.pop(8)), "step 20"),
    "a row is beyond the end": (
        lambda rows: rows.append({**rows[-1], "step": "260", "tokens": str(260 * TOKENS_PER_STEP)}),
        "step 260",
    ),
    "a step is no number": (lambda rows: rows[4].update(step="nan"), "metrics.csv:6"),
    "a step is empty": (lambda rows: rows[4].update(step=""), "metrics.csv:6"),
    "a step is no whole number": (lambda rows: rows[4].update(step="30.5"), "metrics.csv:6"),
    "tokens of another step": (lambda rows: row_of(rows, 200).update(tokens="4096"), "step 200"),
    "tokens that are no number": (lambda rows: row_of(rows, 200).update(tokens="nan"), "step 200"),
    "no tokens": (lambda rows: row_of(rows, 200).update(tokens=""), "step 200"),
    "no training loss": (lambda rows: row_of(rows, 60).update({"train/nll": ""}), "step 60"),
    "no number of an evaluation": (
        lambda rows: row_of(rows, 250).update(
            {"held_out/nll": "", "held_out/perplexity": "", "eval_loss": "", "eval_ppl": ""}
        ),
        "step 250",
    ),
    "a better training loss": (lambda rows: row_of(rows, 60).update({"train/nll": "1"}), "step 60"),
    "another perplexity": (
        lambda rows: row_of(rows, 250).update({"train_split/perplexity": "1.5"}),
        "step 250",
    ),
    "other bits per byte": (
        lambda rows: row_of(rows, 250).update({"held_out/bits_per_byte": "1.5"}),
        "step 250",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_metrics_that_were_changed(runs: Path, run: Path, what: str) -> None:
    change, place = CHANGES[what]
    edit_rows(run, change)
    said = fault_of(runs, run)
    assert str(run / "metrics.csv") in said
    assert place in said


def better(factor: float) -> Callable[[Rows], None]:
    """A change of an NLL that all the other columns of its row agree to."""

    def change(rows: Rows) -> None:
        row, nll = row_of(rows, 250), float(row_of(rows, 250)["held_out/nll"]) * factor
        row["held_out/nll"] = row["eval_loss"] = repr(nll)
        import math

        row["held_out/perplexity"] = row["eval_ppl"] = repr(math.exp(nll))
        row["held_out/bits_per_byte"] = repr(nll / math.log(2) / 4)

    return change


@pytest.mark.parametrize("factor", [0.9, 1 - 1e-6, float("nan"), float("inf")])
def test_an_nll_that_is_not_that_of_its_documents(runs: Path, run: Path, factor: float) -> None:
    edit_rows(run, better(factor))
    said = fault_of(runs, run, claims=["nll", "throughput"])
    assert "step 250: held_out/nll is not that of the documents in step_00000250.parquet" in said
    # Also at a point before it: the run's files are not those that it wrote.
    assert "step 250" in fault_of(runs, run, at=204_800)


def test_a_last_line_that_was_cut_is_a_row_that_is_missing(runs: Path, run: Path) -> None:
    path = run / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-20])
    assert "step 250: there is no row" in fault_of(runs, run)


@pytest.mark.parametrize("name", ["tokens", "held_out/nll", "train/nll", "held_out/bits_per_byte"])
def test_a_column_that_is_not_there(runs: Path, run: Path, name: str) -> None:
    path = run / "metrics.csv"
    head, rest = path.read_text().split("\n", 1)
    path.write_text(head.replace(name, name + "_") + "\n" + rest)
    assert name in fault_of(runs, run)


def test_an_evaluation_set_that_the_record_does_not_know(runs: Path, run: Path) -> None:
    """Both runs have it, so that nothing but this would tell."""
    path = run / "metrics.csv"
    head, *rest = path.read_text().splitlines()
    lines = [f"{head},held_out.easy/nll", *(f"{line},0.1" for line in rest)]
    path.write_text("\n".join(lines) + "\n")
    assert "held_out.easy" in fault_of(runs, run)


# -- the scores


def scores(run: Path, step: int = 250) -> Path:
    return run / "evaluations" / f"step_{step:08d}.parquet"


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("nll_sum", 1.0, "held_out/nll is not that of the documents"),
        ("nll_sum", float("nan"), "held_out/nll is not that of the documents"),
        ("document", "not hexadecimal", "sha256 of held_out"),
        ("document", sha("another"), "sha256 of held_out"),
        ("tokens", 1, "scored_tokens of held_out"),
        ("tokens", -1, "so many scored tokens"),
        ("bytes", 1, "bytes of held_out"),
        ("bytes", None, "bytes of held_out"),
        ("set", "held_out.other", "documents of held_out"),
    ],
)
def test_scores_that_were_changed(
    runs: Path, run: Path, column: str, value: Any, words: str
) -> None:
    with changed_table(scores(run)) as table:
        table[column][-1] = value
    said = fault_of(runs, run)
    assert words in said
    assert "step_00000250.parquet" in said


def test_scores_without_a_set(runs: Path, run: Path) -> None:
    with changed_table(scores(run, 100)) as table:
        table["set"] = ["train_split"] * len(table["set"])
    assert "step_00000100.parquet" in fault_of(runs, run)


def test_scores_of_another_step(runs: Path, run: Path) -> None:
    shutil.copy(scores(run, 200), scores(run))
    assert "not that of the documents in step_00000250.parquet" in fault_of(runs, run)


def test_scores_that_are_damaged(runs: Path, run: Path) -> None:
    scores(run).write_bytes(scores(run).read_bytes()[:-9])
    assert "not a table of document scores" in fault_of(runs, run)


def test_scores_that_are_not_there_leave_the_number(runs: Path, run: Path) -> None:
    scores(run).unlink()
    results = compare_runs(runs / "base", run).results
    assert results is not None
    number = results.numbers["held_out/nll"]
    assert number.difference is not None
    assert number.documents is None
    assert number.no_interval == "good has no evaluations/step_00000250.parquet"
    assert results.series["held_out/nll"].documents[-2] is not None
    shutil.rmtree(run / "evaluations")
    both = compare_runs(run, write_run(run.parent / "more", full_record("more"))).results
    assert both is not None
    assert both.numbers["held_out/nll"].documents is None
    # Without them the other columns, and the record, still have to agree.
    edit_rows(run, lambda rows: row_of(rows, 250).update({"held_out/nll": "1.0"}))
    assert "step 250" in fault_of(runs, run)


# -- numbers that are not finite


def not_finite(runs: Path, folder: Path, value: float, steps: set[int]) -> Path:
    """A run that measured such a number in the held-out set, and says so everywhere."""
    run = Path(shutil.copytree(runs / "good", folder / "bad"))
    for step in steps:
        with changed_table(scores(run, step)) as table:
            table["nll_sum"][-1] = value

    def change(rows: Rows) -> None:
        for step in steps:
            for name in ("nll", "clean_nll", "bits_per_byte"):
                row_of(rows, step)[f"held_out/{name}"] = repr(value)
            row_of(rows, step)["eval_loss"] = repr(value)
            for name in ("held_out/perplexity", "eval_ppl"):
                row_of(rows, step)[name] = "inf"

    edit_rows(run, change)
    return run


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("treatment", [[], ["evaluation"], ["rule:evaluation"]])
def test_a_number_that_is_not_finite_refuses_its_claim(
    runs: Path, tmp_path: Path, value: float, treatment: list[str]
) -> None:
    run = not_finite(runs, tmp_path, value, {250})
    for pair in ((runs / "base", run), (run, runs / "base")):
        comparison = compare_runs(*pair, treatment=treatment)
        assert comparison.exit_code() == 3
        assert comparison.results is None
        (rule,) = [r for r in comparison.to_json()["rules"] if r["effects"]["nll"] == "refuse"]
        assert rule["rule"] == "evaluation"
        assert "held_out/nll is not finite in the" in rule["why"]
        assert "--at" in rule["remedy"]


def test_two_numbers_that_are_not_finite_are_refused_too(runs: Path, tmp_path: Path) -> None:
    run = not_finite(runs, tmp_path, float("nan"), {250})
    other = Path(shutil.copytree(run, tmp_path / "other"))
    edit_record(other, lambda document: document.update(id=sha("other")))
    comparison = compare_runs(run, other)
    assert comparison.verdict == "refused"
    assert "is not finite in either" in json.dumps(comparison.to_json())


def test_other_claims_and_other_points_stand(runs: Path, tmp_path: Path) -> None:
    run = not_finite(runs, tmp_path, float("nan"), {200, 250})
    speed = compare_runs(runs / "base", run, claims=["throughput", "nll"])
    assert speed.verdict == "refused"
    numbers = speed.to_json()["results"]
    assert numbers["tokens_per_s"]["difference"] == 0
    assert (numbers["held_out/nll"]["a"], numbers["held_out/nll"]["b"]) == (None, None)
    assert compare_runs(runs / "base", run, claims=["throughput"]).verdict == "comparable"
    early = compare_runs(runs / "base", run, at=614_400)
    assert early.verdict == "comparable"


def test_an_allowed_one_has_no_difference_in_any_form(runs: Path, tmp_path: Path) -> None:
    from workbench.compare import render_terminal, write_report

    run = not_finite(runs, tmp_path, float("nan"), {150, 250})
    comparison = compare_runs(runs / "base", run, allow={"evaluation": "to look at it"})
    assert comparison.verdict == "flagged"
    number = comparison.to_json()["results"]["held_out/nll"]
    assert (number["b"], number["difference"]) == ("NaN", None)
    said = " ".join(render_terminal(comparison).split())
    assert "there is no difference, because not both are finite" in said
    for word in ("higher", "lower", "nan "):
        assert word not in said
    report = write_report(comparison, tmp_path / "reports").report
    assert report is not None
    document = json.loads((report / "results.json").read_text())
    curve = document["series"]["held_out/nll"]
    assert [value is None for value in curve["difference"]] == [False] * 3 + [True, False, True]
    rows = [
        line for line in (report / "report.md").read_text().splitlines() if "held_out/nll" in line
    ]
    (row,) = [line for line in rows if line.startswith("| held_out/nll")]
    assert [cell.strip() for cell in row.split("|")[3:6]] == ["NaN", "-", "-"]


def shown(comparison: Comparison) -> str:
    from workbench.compare.report import render_markdown

    return render_markdown(comparison)


def test_equal_numbers_have_no_sign(runs: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copytree(runs / "base", tmp_path / "twin"))
    edit_record(twin, lambda document: document.update(id=sha("twin")))
    markdown = shown(compare_runs(runs / "base", twin))
    for zero in ("-0.0000", "+0.0000", "-0.00 GB", "+0.00"):
        assert zero not in markdown
    assert "equals that of" in markdown
