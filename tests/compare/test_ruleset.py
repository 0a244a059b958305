"""The ruleset has a version, every report names it, and it reads the records of older versions."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_runs import full_record, full_spec, write_run
from mutations import schema_leaves

from workbench import cli
from workbench.compare import compare_runs, render_terminal, write_report
from workbench.compare.report import render_markdown
from workbench.errors import UserError
from workbench.spec.checklist import RULES, RULESET_VERSION, TAGS, tag_of
from workbench.spec.run import RunSpec, document_hash
from workbench.track.record import SCHEMA_VERSION, Effective, SetFacts, read_record

LEGACY = Path(__file__).parents[1] / "data" / "legacy_run_gqa"

# What a later version has added, and a record of before it does not hold: leaf -> rule.
NEWER = {
    "effective.code.resumed_with": "code",
    "effective.code.forked_from": "code",
    "effective.budget.ramp_tokens": "budget",
    "effective.hardware.libraries": "hardware",
    "effective.execution.recompilations": "execution",
    "effective.execution.graph_breaks": "execution",
    "effective.evaluation.held_out.status": "evaluation",
    "effective.evaluation.held_out.overlap_rule": "evaluation",
    "spec.training.deterministic": "execution",
    "spec.model.qk_norm": "model",
    "spec.telemetry.moe": "telemetry",
    "spec.schedule.min_lr_ratio": "optimizer",
}
# ... and what no rule looks at.
UNSEEN = ("resumes", "parameter_table", "backend", "results.additions", "spec.evaluation.stride")

# By version: what it judges, and how. A change of either is another version.
FINGERPRINTS = {
    2: "50d8de28150ec88c",
    3: "4d6215561ceb86ac",
    4: "cf607ddf97c8add5",
    5: "54a658d84553fd55",
    6: "878357d6938cfaf2",
}


def fingerprint() -> str:
    leaves = [leaf.name for leaf in schema_leaves(RunSpec)]
    leaves += [leaf.name for leaf in schema_leaves(Effective, ("effective",))]
    leaves += [f"effective.evaluation.held_out.{leaf.name}" for leaf in schema_leaves(SetFacts)]
    leaves.remove("effective.evaluation")
    judged = [leaf for leaf in leaves if tag_of(leaf).kind != "free"]
    text = repr(([(rule.name, sorted(rule.effects.items())) for rule in RULES.values()], TAGS))
    return hashlib.sha256(f"{sorted(judged)} {text}".encode()).hexdigest()[:16]


def test_another_ruleset_has_another_version() -> None:
    said = (
        "the rules, the tags or the judged leaves have changed: raise RULESET_VERSION, and put"
        f" {RULESET_VERSION + 1}: {fingerprint()!r} into FINGERPRINTS"
    )
    assert FINGERPRINTS.get(RULESET_VERSION) == fingerprint(), said
    assert max(FINGERPRINTS) == RULESET_VERSION


def without(document: dict[str, Any], path: str) -> None:
    *parents, last = path.split(".")
    for name in parents:
        document = document[name]
    document.pop(last, None)


@pytest.fixture
def runs(written: Path, tmp_path: Path) -> Path:
    """Copies of the runs, to be changed."""
    return Path(shutil.copytree(written, tmp_path / "runs"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of today, one of an older version, and another of that."""
    tmp_path = tmp_path_factory.mktemp("written")
    write_run(tmp_path / "today", full_record("today"))
    for name in ("old", "older"):
        folder = write_run(tmp_path / name, full_record(name))
        path = folder / "run_config.json"
        document = json.loads(path.read_text())
        document["schema_version"] = SCHEMA_VERSION - 1
        for leaf in (*NEWER, *UNSEEN):
            without(document, leaf)
        document["effective"]["evaluation"]["held_out"].pop("overlap")
        document["spec_sha256"] = document_hash(document["spec"])
        path.write_text(json.dumps(document))
    return tmp_path


@pytest.mark.parametrize(("a", "b"), [("today", "old"), ("old", "today"), ("old", "older")])
def test_what_an_older_record_does_not_hold_is_missing_and_does_not_differ(
    runs: Path, a: str, b: str
) -> None:
    judgement = compare_runs(runs / a, runs / b).judgement
    assert judgement.with_outcome("differs", "studied", "follows") == []
    missing = {leaf.path: leaf.rule for leaf in judgement.with_outcome("missing")}
    assert missing == {leaf.removeprefix("spec."): rule for leaf, rule in NEWER.items()}
    assert judgement.claims["nll"] == "refused"
    assert judgement.ruleset == RULESET_VERSION


def test_an_older_record_counts_when_what_it_lacks_is_allowed(runs: Path) -> None:
    rules = dict.fromkeys({"budget", "evaluation", "optimizer"}, "written before it was recorded")
    comparison = compare_runs(runs / "today", runs / "old", allow=rules)
    assert comparison.verdict == "flagged"
    assert comparison.results is not None


def test_a_default_of_today_is_not_put_into_an_older_record(runs: Path) -> None:
    """The spec of today would have a value there; what ran then is not known by that."""
    record = read_record(runs / "old")
    assert record.run_spec.training.deterministic is True
    judgement = compare_runs(runs / "today", runs / "old").judgement
    leaves = {leaf.path: leaf for leaf in judgement.ruling("execution").leaves}
    leaf = leaves["training.deterministic"]
    assert (leaf.outcome, leaf.a, leaf.b) == ("missing", True, None)


def test_a_null_that_no_spec_of_today_has_is_missing(tmp_path: Path) -> None:
    """Also where both have it: two unknown values are not one."""
    for name in ("a", "b"):
        spec = full_spec()
        spec["optimizer"]["lr"] = None  # never null
        spec["model"]["top_k"] = None  # null only where there are no experts
        write_run(tmp_path / name, full_record(name, spec=spec))
    judgement = compare_runs(tmp_path / "a", tmp_path / "b").judgement
    missing = [leaf.path for leaf in judgement.with_outcome("missing")]
    assert missing == ["model.top_k", "optimizer.lr"]


def test_a_newer_record_is_not_read(runs: Path) -> None:
    path = runs / "old/run_config.json"
    document = json.loads(path.read_text()) | {"schema_version": SCHEMA_VERSION + 1}
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="newer version of workbench"):
        compare_runs(runs / "today", runs / "old")


@pytest.mark.parametrize(
    "leaf", ["effective.data.invented", "effective.code.invented", "effective.model.invented"]
)
def test_a_fact_that_no_rule_knows_is_not_taken_for_free(runs: Path, leaf: str) -> None:
    path = runs / "old/run_config.json"
    document = json.loads(path.read_text())
    _, part, name = leaf.split(".")
    document["effective"][part][name] = 1
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="no rule for this value") as error:
        compare_runs(runs / "today", runs / "old")
    assert leaf in str(error.value)


def test_the_runner_before_this_package_is_recognised() -> None:
    """Its records hold none of the facts that the rules need; that is said, not guessed around."""
    with pytest.raises(UserError) as error:
        read_record(LEGACY)
    assert error.value.exit_code == 2
    assert "the runner that this package replaces" in str(error.value)


def test_everything_that_is_said_names_the_version(
    runs: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    comparison = write_report(compare_runs(runs / "today", runs / "old"), tmp_path / "reports")
    assert comparison.to_json()["ruleset"] == RULESET_VERSION
    assert f"ruleset {RULESET_VERSION}" in render_terminal(comparison)
    assert f"ruleset: {RULESET_VERSION}" in render_markdown(comparison)
    assert comparison.report is not None
    assert (
        json.loads((comparison.report / "results.json").read_text())["ruleset"] == RULESET_VERSION
    )
    monkeypatch.setenv("WB_HOME", str(tmp_path / "store"))
    (tmp_path / "store").mkdir()
    (tmp_path / "store/runs").symlink_to(runs)
    assert cli._guarded(["check", "today", "old", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["ruleset"] == RULESET_VERSION
