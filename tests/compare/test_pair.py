"""Two run folders compared: points, options, numbers, and the document for machines."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_runs import (
    TOTAL,
    changed_table,
    full_effective,
    full_record,
    full_spec,
    points,
    set_of_documents,
    sha,
    write_run,
)

from workbench.compare import Comparison, check_specs, compare_runs, render_check, render_terminal
from workbench.compare.pair import refusing
from workbench.errors import UserError
from workbench.spec.checklist import CLAIMS, RULES, RULESET_VERSION
from workbench.spec.foreseen import Foreseen
from workbench.spec.run import RunSpec
from workbench.track.record import write_record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that are all like `base` but for what their name says."""
    home = tmp_path_factory.mktemp("runs")

    def effective(part: str, **facts: Any) -> dict[str, Any]:
        whole = full_effective()
        whole[part] |= facts
        return whole

    mha = full_spec(model={"attention_type": "mha"})
    records: dict[str, dict[str, Any]] = {
        "base": {},
        "same": {},
        "mha": {"spec": mha},
        "seed": {"spec": full_spec(seed=43), "points": _points("another order")},
        "long": {"spec": full_spec(training={"steps": 375}, schedule={"decay": "constant"})},
        "constant": {"spec": full_spec(schedule={"decay": "constant"})},
        "sparse": {"points": points(every=1000), "spec": full_spec(evaluation={"eval_steps": 0})},
        "elsewhere": {
            "spec": full_spec(
                training={"steps": 245},
                evaluation={"eval_steps": 49},
                schedule={"decay": "constant"},
            ),
            "points": points(245, every=49)[1:],
        },
        "telemetry": {"spec": full_spec(telemetry={"log_steps": 5})},
        "tokenizer": {"effective": effective("tokenizer", sha256=sha("other ranks"))},
        "killed": {"status": "KILLED", "effective": effective("budget", finished=False)},
        "claims_to_be_finished": {"status": "FAILED"},
        "going": {"status": "RUNNING", "effective": effective("budget", finished=False)},
    }
    for index, (name, changes) in enumerate(records.items()):
        shift = 0.0 if name == "base" else 0.01
        write_run(home / name, full_record(name, **changes), shift=shift, seed=index)
    return home


def _points(order: str) -> list[Any]:
    return [{**point, "order_digest": sha(f"{order} {point['tokens']}")} for point in points()]


def compared(runs: Path, a: str, b: str, **options: Any) -> Comparison:
    return compare_runs(runs / a, runs / b, **options)


def test_two_runs_of_one_spec_are_comparable(runs: Path) -> None:
    comparison = compared(runs, "base", "same")
    assert comparison.verdict == "comparable"
    assert comparison.exit_code(strict=True) == 0
    assert comparison.at == TOTAL


def test_numbers_are_second_minus_first_with_an_interval_and_no_winner(runs: Path) -> None:
    results = compared(runs, "base", "same").results
    assert results is not None
    number = results.numbers["held_out/nll"]
    assert number.difference == pytest.approx(0.01, abs=0.003)
    assert number.documents is not None
    assert number.documents.n == 12
    low, high = number.documents.interval
    assert low < number.difference < high
    document = number.to_json()
    assert document["winner"] is None
    assert document["seeds"] is None
    assert results.numbers["train/nll"].difference == pytest.approx(0.01)
    perplexity = results.numbers["held_out/perplexity"]
    assert perplexity.a == pytest.approx(math.exp(number.a or 0))
    curve = results.series["held_out/nll"]
    assert curve.tokens == [0, *(k * 204_800 for k in range(1, 6))]
    assert curve.difference[0] == 0
    assert all(curve.documents)


def test_the_same_comparison_twice_gives_the_same_numbers(runs: Path) -> None:
    first, second = (json.dumps(compared(runs, "base", "same").to_json()) for _ in range(2))
    assert first == second


def test_the_mean_of_the_training_stream_stops_at_the_point_compared(runs: Path) -> None:
    early = compared(runs, "base", "same", at=204_800).results
    late = compared(runs, "base", "same").results
    assert early is not None
    assert late is not None
    assert (early.numbers["train/nll"].a or 0) > (late.numbers["train/nll"].a or 0) + 0.5
    assert early.series["held_out/nll"].tokens == [0, 204_800]


def test_the_training_stream_is_the_mean_of_the_last_twenty_rows(runs: Path) -> None:
    comparison = compared(runs, "base", "same")
    assert comparison.results is not None
    rows = [value for value in comparison.metrics[0]["train/nll"] if value is not None]
    assert len(rows) == 26
    assert comparison.results.numbers["train/nll"].a == pytest.approx(sum(rows[-20:]) / 20)


def test_runs_meet_at_the_last_common_token_count(runs: Path) -> None:
    comparison = compared(runs, "constant", "long")
    assert comparison.at == TOTAL
    assert comparison.verdict == "comparable"
    assert comparison.only == ([], [k * 204_800 for k in (6, 7)] + [375 * 4096])
    assert compared(runs, "base", "sparse").at == TOTAL


def test_another_point_is_named_with_at(runs: Path) -> None:
    assert compared(runs, "base", "same", at=409_600).at == 409_600
    for wrong in (0, 5, 2 * TOTAL):
        with pytest.raises(UserError, match="204800, 409600") as error:
            compared(runs, "base", "same", at=wrong)
        assert error.value.faults[0].place == "--at"


def test_runs_that_never_meet_are_refused_by_budget_alone(runs: Path) -> None:
    comparison = compared(runs, "constant", "elsewhere")
    assert comparison.at is None
    assert comparison.results is None
    assert refusing(comparison.judgement) == {
        "nll": "budget",
        "bpb": "budget",
        "throughput": "interval",
    }
    (budget,) = [rule for rule in comparison.to_json()["rules"] if rule["rule"] == "budget"]
    assert budget["outcome"] == "missing"
    assert "common evaluation point" in budget["why"]
    # No treatment makes two runs comparable that never stood at one token count.
    assert (
        compared(runs, "constant", "elsewhere", treatment=["training.steps"]).verdict == "refused"
    )
    allowed = compared(runs, "constant", "elsewhere", allow={"budget": "only the diff"})
    assert allowed.verdict == "flagged"
    assert allowed.results is None


@pytest.mark.parametrize("name", ["killed", "claims_to_be_finished"])
def test_a_run_that_did_not_finish_is_refused_by_budget(runs: Path, name: str) -> None:
    comparison = compared(runs, "base", name)
    assert refusing(comparison.judgement) == {"nll": "budget", "bpb": "budget"}
    assert comparison.exit_code() == 3


def test_the_status_that_the_caller_knows_counts(runs: Path) -> None:
    comparison = compared(runs, "base", "going", statuses=("FINISHED", "KILLED"))
    assert comparison.verdict == "refused"
    assert comparison.b.status == "KILLED"


def test_a_run_that_is_still_going_is_an_error(runs: Path) -> None:
    with pytest.raises(UserError, match="still going"):
        compared(runs, "base", "going")


def test_a_run_is_not_compared_with_itself(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="same run twice"):
        compared(runs, "base", "base")
    copy = write_run(tmp_path / "copy", full_record("base"))
    with pytest.raises(UserError, match="same run twice"):
        compare_runs(runs / "base", copy)


def test_a_folder_without_a_record_is_an_error(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run record"):
        compare_runs(runs / "base", tmp_path)


def test_a_record_with_values_that_no_rule_knows_is_an_error(runs: Path, tmp_path: Path) -> None:
    effective = full_effective()
    effective["budget"]["novelty"] = 1
    folder = write_run(tmp_path / "future", full_record("future", effective=effective))
    with pytest.raises(UserError, match=r"effective\.budget\.novelty"):
        compare_runs(runs / "base", folder)
    spec = full_spec()
    spec["training"]["novelty"] = 1  # falls under `training.*`
    write_record(full_record("future", spec=spec), folder)
    with pytest.raises(UserError, match=r"spec\.training\.novelty.*version of workbench"):
        compare_runs(runs / "base", folder)
    newer = write_run(tmp_path / "newer", full_record("newer", schema_version=99))
    with pytest.raises(UserError, match="newer version"):
        compare_runs(runs / "base", newer)


# -- claims


def test_claims_not_asked_for_are_judged_and_do_not_set_the_verdict(runs: Path) -> None:
    comparison = compared(runs, "base", "telemetry")
    assert comparison.verdict == "comparable"
    assert comparison.judgement.claims["throughput"] == "refused"
    numbers = comparison.to_json()["results"]
    assert numbers["held_out/nll"]["difference"] is not None
    # A refused claim blanks its own numbers only.
    assert (numbers["tokens_per_s"]["a"], numbers["tokens_per_s"]["difference"]) == (None, None)
    assert numbers["peak_memory_bytes"]["a"] is not None


def test_a_claim_that_is_refused_beside_one_that_is_not(runs: Path) -> None:
    comparison = compared(runs, "base", "telemetry", claims=["throughput", "nll"])
    assert comparison.verdict == "refused"
    assert comparison.exit_code() == 3
    numbers = comparison.to_json()["results"]
    assert numbers["held_out/nll"]["difference"] is not None
    assert numbers["tokens_per_s"]["difference"] is None


def test_other_tokenizers_leave_bits_per_byte(runs: Path) -> None:
    refused = compared(runs, "base", "tokenizer")
    assert refused.verdict == "refused"
    assert refused.results is None
    comparison = compared(runs, "base", "tokenizer", claims=["bpb"])
    assert comparison.verdict == "flagged"
    assert comparison.exit_code(strict=True) == 1
    numbers = comparison.to_json()["results"]
    assert numbers["held_out/bits_per_byte"]["documents"]["n"] == 12
    for name in ("held_out/nll", "held_out/perplexity", "train/nll", "train_split/nll"):
        assert {numbers[name][key] for key in ("a", "b", "difference", "documents")} == {None}
    assert "held_out/nll" not in comparison.results.series  # type: ignore[union-attr]


def test_an_unknown_claim_is_an_error(runs: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'nll'"):
        compared(runs, "base", "same", claims=["nl"])


# -- documents for machines


def test_the_document_holds_what_it_promises(runs: Path) -> None:
    document = compared(runs, "base", "seed").to_json()
    json.dumps(document, allow_nan=False)
    assert document["verdict"] == "refused"
    assert document["claims"] == {
        "nll": "refused",
        "bpb": "refused",
        "throughput": "comparable",
        "memory": "comparable",
    }
    assert document["results"] is None
    assert document["report"] is None
    assert document["ruleset"] == RULESET_VERSION
    assert [rule["rule"] for rule in document["rules"]] == list(RULES)
    seeds = document["rules"][list(RULES).index("seeds")]
    assert seeds["outcome"] == "differs"
    assert seeds["effects"] == {
        "nll": "refuse",
        "bpb": "refuse",
        "throughput": None,
        "memory": None,
    }
    assert [(leaf["path"], leaf["a"], leaf["b"]) for leaf in seeds["leaves"]] == [("seed", 42, 43)]
    assert "42 against 43" in seeds["why"]
    assert "seed=42" in seeds["remedy"]


def test_results_follow_the_promised_shape(runs: Path) -> None:
    document = compared(runs, "base", "mha", treatment=["model"]).to_json()
    keys = {"a", "b", "difference", "unit", "seeds", "documents", "winner"}
    assert all(set(number) == keys for number in document["results"].values())
    assert set(document["results"]["held_out/nll"]["documents"]) == {"n", "interval"}
    assert {"parameters/total", "parameters/active", "tokens", "train/nll"} <= set(
        document["results"]
    )


def test_numbers_that_are_not_finite_are_words(tmp_path: Path, runs: Path) -> None:
    folder = write_run(tmp_path / "inf", full_record("inf"), shift=math.inf)
    comparison = compare_runs(runs / "base", folder, allow={"evaluation": "to see them"})
    document = comparison.to_json()
    json.dumps(document, allow_nan=False)
    for name in ("held_out/nll", "held_out/bits_per_byte", "held_out/perplexity", "train/nll"):
        assert isinstance(document["results"][name]["a"], float)
        assert document["results"][name]["difference"] is None
    assert document["results"]["held_out/nll"]["b"] == "Infinity"
    assert document["results"]["held_out/nll"]["documents"] is None
    text = " ".join(render_terminal(comparison).split())
    assert "there is no difference, because not both are finite" in text
    assert "higher" not in text


@pytest.mark.parametrize("treatment", [[], ["seed"]])
def test_a_run_without_metrics_is_an_error_also_where_the_pair_is_refused(
    tmp_path: Path, runs: Path, treatment: list[str]
) -> None:
    folder = write_run(tmp_path / "other", full_record("other", spec=full_spec(seed=1)))
    assert compare_runs(runs / "base", folder).verdict == "refused"
    (folder / "metrics.csv").unlink()
    with pytest.raises(UserError, match=r"other/metrics\.csv"):
        compare_runs(runs / "base", folder, treatment=treatment)


def test_an_evaluation_without_document_scores_has_no_interval(tmp_path: Path, runs: Path) -> None:
    folder = write_run(tmp_path / "bare", full_record("bare"), shift=0.01)
    for path in (folder / "evaluations").iterdir():
        path.unlink()
    comparison = compare_runs(runs / "base", folder)
    document = comparison.to_json()["results"]["held_out/nll"]
    assert document["documents"] is None
    assert document["difference"] == pytest.approx(0.01, abs=0.003)
    said = " ".join(render_terminal(comparison).split())
    assert "no interval over documents: bare has no evaluations/step_00000250.parquet" in said


def test_other_documents_are_never_paired(tmp_path: Path, runs: Path) -> None:
    effective = full_effective()
    effective["evaluation"]["held_out"]["sha256"] = set_of_documents("held_out", "another document")
    folder = write_run(tmp_path / "renamed", full_record("renamed", effective=effective))
    for path in (folder / "evaluations").iterdir():
        with changed_table(path) as table:
            table["document"][-1] = sha("another document")
    assert compare_runs(runs / "base", folder).verdict == "refused"
    allowed = {"evaluation": "one document of twelve"}
    numbers = compare_runs(runs / "base", folder, allow=allowed).to_json()["results"]
    assert numbers["held_out/nll"]["documents"] is None
    assert numbers["train_split/nll"]["documents"] is not None


# -- the terminal


def test_the_terminal_says_the_verdict_and_what_is_not_match(runs: Path) -> None:
    text = render_terminal(compared(runs, "base", "mha"))
    assert text.startswith("FLAGGED for nll")
    assert "inferred, not declared" in text
    said = " ".join(text.split())
    assert "One seed per arm says nothing about seed noise" in said
    assert "95 % interval over 12 documents" in said
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert "\x1b[" in render_terminal(compared(runs, "base", "mha"), color=True)


def test_a_refused_pair_on_the_terminal_has_the_remedy_and_no_number(runs: Path) -> None:
    text = render_terminal(compared(runs, "base", "seed"))
    assert text.startswith("REFUSED for nll")
    assert "wb run experiments/seed.yaml seed=42 name=seed-matched" in text
    assert "wb compare base seed-matched" in text
    assert "nats/token lower" not in text
    assert "nats/token higher" not in text


# -- specs


def rates(spec: RunSpec, tokens: int) -> dict[str, Any]:
    settings = f"{tokens} {spec.optimizer.lr} {spec.schedule} {spec.training.steps}"
    return {"effective.budget.lr_trace": sha(settings)}


def check(a: dict[str, Any], b: dict[str, Any], **options: Any) -> Any:
    specs = [
        RunSpec.model_validate({"name": n, "data": {"dataset": "sample"}, **changes})
        for n, changes in (("a", a), ("b", b))
    ]
    foreseen = [
        Foreseen(
            {
                "effective.tokenizer.sha256": sha(spec.tokenizer.name),
                "effective.tokenizer.name": spec.tokenizer.name,
                "effective.precision.compute_dtype": spec.training.precision,
                "effective.optimizer.warmup_steps": spec.warmup_steps,
                "effective.optimizer.sequences_per_update": spec.sequences_per_update,
                "effective.parameters.total": 1,
            },
            (50 * spec.tokens_per_step, spec.total_tokens or 0),
            partial(rates, spec),
        )
        for spec in specs
    ]
    return check_specs(*specs, *foreseen, paths=("a.yaml", "b.yaml"), **options)


DENSE = {"model": {"mlp_type": "dense"}}


def test_specs_that_differ_in_the_model_alone() -> None:
    assert check({}, DENSE, treatment=["model"]).verdict == "comparable"
    inferred = check({}, DENSE)
    assert inferred.verdict == "flagged"
    assert inferred.exit_code() == 0
    assert inferred.exit_code(strict=True) == 1


@pytest.mark.parametrize(
    ("change", "rule", "following"),
    [
        ({"seed": 43}, "seeds", "effective.data.order_digest"),
        ({"training": {"precision": "bf16"}}, "precision", "effective.precision.matmul"),
        ({"optimizer": {"lr": 1e-3}}, "optimizer", "effective.budget.lr_trace"),
        ({"training": {"steps": 375}}, "budget", "effective.optimizer.warmup_steps"),
        ({"tokenizer": {"name": "bytes"}}, "tokenizer", "effective.data.order_digest"),
    ],
)
def test_a_check_refuses_by_the_rule_of_the_difference(
    change: dict[str, Any], rule: str, following: str
) -> None:
    found = check({}, DENSE | change, treatment=["model"])
    assert found.verdict == "refused"
    assert found.exit_code() == 3
    refusing_rules = [r.rule for r in found.judgement.rules if "refuse" in r.effects.values()]
    assert refusing_rules == [rule]
    assert following in {leaf.path for leaf in found.judgement.with_outcome("follows")}
    text = render_check(found)
    assert text.startswith("REFUSED for nll")
    assert rule in text
    document = found.to_json()
    json.dumps(document, allow_nan=False)
    assert document["results"] is None
    assert "effective.code.package_sha256" in document["not_yet_known"]


def test_a_check_suggests_the_command_that_matches() -> None:
    text = render_check(check({}, {"seed": 43, "optimizer": {"lr": 1e-3}}))
    assert "wb run b.yaml seed=42 optimizer.lr=0.0003" in text


def test_a_budget_is_matched_by_steps_only_where_nothing_else_restores_it() -> None:
    twice = {"training": {"batch_size": 8}}
    assert "choose training.steps" not in render_check(check({}, twice))
    declared = " ".join(render_check(check({}, twice, treatment=["training.batch_size"])).split())
    assert "choose training.steps so that both plan 1,024,000 tokens" in declared
    half = {"training": {"batch_size": 8, "steps": 125}}
    assert check({}, half, treatment=["training.batch_size"]).verdict == "comparable"


def test_claims_are_those_of_the_checklist() -> None:
    assert tuple(check({}, {}).to_json()["claims"]) == CLAIMS
