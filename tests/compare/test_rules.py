"""The judge: no difference is silently equal, none counts twice, and equal facts always match."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_runs import full_facts, full_record, full_spec, sha
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.compare import rules
from workbench.compare.facts import (
    POINT_LEAVES,
    effective_leaves,
    facts_of_record,
    nullable_leaves,
    set_leaves,
    spec_leaves,
)
from workbench.compare.rules import Judgement, judge
from workbench.errors import UserError
from workbench.spec.checklist import CLAIMS, RULES, Tag, tag_of
from workbench.track.record import RunRecord

# The checklist's effects, written down a second time: nll, bpb, throughput, memory.
EFFECTS = {
    "model": "flag flag flag flag",
    "tokenizer": "refuse flag flag flag",
    "data": "refuse refuse flag -",
    "budget": "refuse refuse - -",
    "parameters": "flag flag flag flag",
    "seeds": "refuse refuse - -",
    "optimizer": "refuse refuse flag flag",
    "precision": "refuse refuse refuse refuse",
    "hardware": "flag flag refuse refuse",
    "telemetry": "- - refuse flag",
    "execution": "flag flag refuse refuse",
    "evaluation": "refuse refuse - -",
    "interval": "- - refuse -",
    "code": "flag flag flag flag",
}
SPECS = (True, True)
VERDICT = {"-": "comparable", "flag": "flagged", "refuse": "refused"}

# No one spec has every setting: those that do not apply to the full one get a value here, so that
# every leaf of the schema is mutated.
STAND_INS = {leaf: 0.25 for leaf, value in full_facts().items() if value is None}
FACTS = full_facts() | STAND_INS
JUDGED = [leaf for leaf in FACTS if tag_of(leaf).kind == "judged"]
FREE = [leaf for leaf in FACTS if tag_of(leaf).kind == "free"]
REQUESTED = [leaf for leaf in FACTS if tag_of(leaf).kind == "requested"]
# What need not be known, where the leaf that it stands in for matches.
SPARE = [leaf for leaf in JUDGED if tag_of(leaf).instead_of]
NEEDED = [leaf for leaf in JUDGED if leaf not in SPARE]
EFFECTIVE = [leaf for leaf in NEEDED if leaf.startswith("effective.")]


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return value[:-1]
    if isinstance(value, dict):
        return {**value, "other": "1"}
    return "something"


def with_leaf(leaf: str, value: Any) -> dict[str, Any]:
    return {**FACTS, leaf: value}


def without(leaf: str) -> dict[str, Any]:
    return {key: value for key, value in FACTS.items() if key != leaf}


def names_only(judgement: Judgement, rule: str, leaf: str, outcome: str) -> None:
    """Asserts that this rule names this leaf, that no other rule says anything, and the effects."""
    outcomes = {ruling.rule: ruling.outcome for ruling in judgement.rules}
    assert outcomes.pop(rule) == outcome
    assert set(outcomes.values()) == {"match"}
    found = [(one.path, one.outcome) for one in judgement.ruling(rule).leaves]
    assert (leaf, outcome) in found
    assert {path for path, said in found if said != "match"} == {leaf}
    expected = dict(zip(CLAIMS, EFFECTS[rule].split(), strict=True))
    assert judgement.claims == {claim: VERDICT[effect] for claim, effect in expected.items()}
    shown = {claim: effect or "-" for claim, effect in judgement.ruling(rule).effects.items()}
    assert shown == expected


def test_every_leaf_of_the_schema_has_a_tag_and_a_known_rule() -> None:
    for leaf in (*spec_leaves(), *effective_leaves(), *set_leaves("held_out")):
        tag = tag_of(leaf)
        assert (tag.rule in RULES) != (tag.kind == "free"), leaf


def test_the_synthetic_record_covers_the_schema() -> None:
    every = {
        *spec_leaves(),
        *effective_leaves(),
        *set_leaves("held_out"),
        *set_leaves("train_split"),
    }
    assert set(FACTS) == every
    assert {leaf for leaf, value in FACTS.items() if value is None} == set()


def test_equal_facts_match_for_every_claim() -> None:
    judgement = judge(FACTS, copy.deepcopy(FACTS))
    assert {ruling.outcome for ruling in judgement.rules} == {"match"}
    assert set(judgement.claims.values()) == {"comparable"}


@pytest.mark.parametrize("leaf", JUDGED)
@pytest.mark.parametrize("swap", [False, True])
def test_a_changed_leaf_is_named_by_its_rule_alone(leaf: str, swap: bool) -> None:
    pair = FACTS, with_leaf(leaf, changed(FACTS[leaf]))
    judgement = judge(*(pair[::-1] if swap else pair))
    rule = tag_of(leaf).rule
    inferred = rule == "model" and leaf.startswith("model.")
    assert judgement.inferred == inferred
    names_only(judgement, str(rule), leaf, "studied" if inferred else "differs")


@pytest.mark.parametrize("leaf", NEEDED)
def test_a_leaf_that_is_not_there_is_missing(leaf: str) -> None:
    for pair in ((FACTS, without(leaf)), (without(leaf), FACTS), (without(leaf), without(leaf))):
        names_only(judge(*pair), str(tag_of(leaf).rule), leaf, "missing")


@pytest.mark.parametrize("unknown", [None, math.nan])
@pytest.mark.parametrize("leaf", EFFECTIVE)
def test_an_unknown_fact_equals_nothing_not_even_itself(leaf: str, unknown: Any) -> None:
    null = with_leaf(leaf, unknown)
    for pair in ((FACTS, null), (null, FACTS), (null, dict(null))):
        names_only(judge(*pair), str(tag_of(leaf).rule), leaf, "missing")


@pytest.mark.parametrize("leaf", [leaf for leaf in NEEDED if leaf not in EFFECTIVE])
def test_a_setting_that_does_not_apply_differs_from_one_that_does(leaf: str) -> None:
    """Where the schema has no null for it, it is a setting that is not known."""
    null = with_leaf(leaf, None)
    if leaf not in nullable_leaves():
        for pair in ((FACTS, null), (null, FACTS), (null, dict(null))):
            names_only(judge(*pair), str(tag_of(leaf).rule), leaf, "missing")
        return
    assert judge(null, dict(null)).verdict(CLAIMS) == "comparable"
    judgement = judge(FACTS, null)
    assert judgement.ruling(str(tag_of(leaf).rule)).outcome in ("differs", "studied")
    assert judgement.verdict(CLAIMS) != "comparable"


@pytest.mark.parametrize("leaf", [*FREE, *REQUESTED])
def test_free_and_requested_leaves_never_matter_themselves(leaf: str) -> None:
    for other in (with_leaf(leaf, changed(FACTS[leaf])), with_leaf(leaf, None), without(leaf)):
        judgement = judge(FACTS, other)
        assert {ruling.outcome for ruling in judgement.rules} == {"match"}


@pytest.mark.parametrize(
    "leaf", sorted(set(EFFECTIVE) & set(effective_leaves()) - set(POINT_LEAVES))
)
def test_a_recorded_fact_taken_from_the_record_is_missing(leaf: str) -> None:
    _, part, name = leaf.split(".")
    document = full_record().model_dump(mode="json")
    del document["effective"][part][name]
    other = RunRecord.model_validate(document)
    judgement = judge(FACTS, {**facts_of_record(other, other.points[-1]), **STAND_INS})
    names_only(judgement, str(tag_of(leaf).rule), leaf, "missing")


def test_a_fact_that_is_unknown_in_part_is_missing() -> None:
    leaf = "effective.hardware.libraries"
    part = with_leaf(leaf, {"cuda": "12.8", "cudnn": None})
    names_only(judge(part, copy.deepcopy(part)), "hardware", leaf, "missing")


def test_what_cannot_exist_equals_itself_and_no_value() -> None:
    leaf = "effective.hardware.driver"
    none, other = ({leaf: {"not_applicable": why}} for why in ("a CPU has none", "another reason"))
    assert judge(FACTS | none, FACTS | copy.deepcopy(none)).verdict(CLAIMS) == "comparable"
    names_only(judge(FACTS, FACTS | none), "hardware", leaf, "differs")
    names_only(judge(FACTS | other, FACTS | none), "hardware", leaf, "differs")


def test_order_of_mappings_and_ways_to_write_a_number_do_not_matter() -> None:
    leaves = list(FACTS.items())
    random.Random(3).shuffle(leaves)
    shuffled = dict(leaves)
    libraries = "effective.hardware.libraries"
    shuffled[libraries] = dict(reversed(FACTS[libraries].items()))
    shuffled["optimizer.lr"] = float("3e-4")
    shuffled["training.max_grad_norm"] = 1
    shuffled["optimizer.betas"] = tuple(FACTS["optimizer.betas"])
    assert judge(FACTS, shuffled).verdict(CLAIMS) == "comparable"


def test_a_truth_value_is_not_a_number() -> None:
    leaf = "training.deterministic"
    names_only(judge(FACTS, with_leaf(leaf, 1)), "execution", leaf, "differs")


def test_two_unfinished_runs_do_not_match() -> None:
    leaf = "effective.budget.finished"
    unfinished = with_leaf(leaf, False)
    names_only(judge(unfinished, dict(unfinished)), "budget", leaf, "differs")


def test_every_difference_is_listed_not_only_the_first() -> None:
    other = {**FACTS, "seed": 43, "optimizer.lr": 1e-3, "optimizer.eps": 1e-6}
    other |= {"effective.hardware.torch": "2.14", "effective.hardware.threads": 8}
    judgement = judge(FACTS, other)
    assert [leaf.path for leaf in judgement.with_outcome("differs")] == [
        "seed",
        "optimizer.lr",
        "optimizer.eps",
        "effective.hardware.threads",
        "effective.hardware.torch",
    ]


# -- what follows


def outcomes(judgement: Judgement) -> dict[str, str]:
    return {leaf.path: leaf.outcome for rule in judgement.rules for leaf in rule.leaves}


def test_the_order_follows_the_seed() -> None:
    other = {**FACTS, "seed": 43, "effective.data.order_digest": sha("other")}
    judgement = judge(FACTS, other)
    assert judgement.ruling("seeds").outcome == "differs"
    assert judgement.ruling("data").outcome == "follows"
    assert judgement.ruling("data").leaves[0].follows == ("seed",)
    assert set(judgement.ruling("data").effects.values()) == {None}
    assert judgement.claims["throughput"] == "comparable"


def test_another_tokenizer_is_named_once() -> None:
    other = {
        **FACTS,
        "tokenizer.name": "bytes",
        "effective.tokenizer.name": "bytes",
        "effective.tokenizer.vocab_size": 257,
        "effective.tokenizer.sha256": sha("bytes"),
        "effective.model.route_tables_sha256": sha("other routes"),
        "effective.data.train_tokens": 4_000_000,
        "effective.data.order_digest": sha("other order"),
        "effective.evaluation.held_out.scored_tokens": 200_000,
        "effective.evaluation.train_split.scored_tokens": 200_000,
        "effective.parameters.total": 20_000_000,
    }
    judgement = judge(FACTS, other)
    counted = {leaf.path for leaf in judgement.with_outcome("differs")}
    # Total parameters never follow.
    assert counted == {"effective.tokenizer.sha256", "effective.parameters.total"}
    assert judgement.claims["nll"] == "refused"
    assert judgement.claims["bpb"] == "flagged"


def test_a_longer_run_is_another_budget() -> None:
    longer = {
        **FACTS,
        "training.steps": 375,
        "schedule.warmup_steps": None,
        "effective.optimizer.warmup_steps": 19,
        "effective.budget.lr_trace": sha("other rates"),
        "effective.budget.decay_tokens": 1_536_000,
    }
    base = {**FACTS, "schedule.warmup_steps": None}
    found = outcomes(judge(base, longer))
    assert found["effective.budget.decay_tokens"] == "differs"
    assert found["effective.budget.lr_trace"] == "follows"
    assert found["effective.optimizer.warmup_steps"] == "follows"
    assert judge(base, longer, treatment=["training.steps"]).verdict(["nll"]) == "comparable"


def test_a_warm_up_asked_for_follows_nothing() -> None:
    other = {
        **FACTS,
        "training.steps": 375,
        "schedule.warmup_steps": 100,
        "effective.optimizer.warmup_steps": 100,
        "effective.budget.lr_trace": sha("other rates"),
        "effective.budget.decay_tokens": 1_536_000,
    }
    found = outcomes(judge(FACTS, other, treatment=["training.steps"]))
    assert found["effective.optimizer.warmup_steps"] == "differs"


def test_leaves_that_explain_each_other_in_a_circle_all_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No tags form a circle today; if some ever do, neither difference may hide the other."""
    rates, warm_up = "effective.budget.lr_trace", "effective.optimizer.warmup_steps"
    circle = {
        warm_up: Tag("optimizer", follows=(rates,)),
        rates: Tag("budget", follows=(warm_up,)),
    }
    monkeypatch.setattr(rules, "tag_of", lambda leaf: circle.get(leaf) or tag_of(leaf))
    other = {
        **FACTS,
        "effective.optimizer.warmup_steps": 5,
        "effective.budget.lr_trace": sha("other rates"),
    }
    judgement = judge(FACTS, other)
    assert judgement.ruling("optimizer").outcome == "differs"
    assert judgement.ruling("budget").outcome == "differs"
    # With a cause outside the circle, it counts and both follow.
    circle[warm_up] = Tag("optimizer", follows=(rates, "seed"))
    judgement = judge(FACTS, {**other, "seed": 43})
    assert [leaf.path for leaf in judgement.with_outcome("differs")] == ["seed"]
    assert len(judgement.with_outcome("follows")) == 2


def test_a_requested_setting_explains_only_when_what_it_became_counts() -> None:
    """Steps differ, but nothing they become does: the warm-up has no excuse."""
    other = {**FACTS, "training.steps": 375, "effective.optimizer.warmup_steps": 19}
    judgement = judge(FACTS, other)
    assert outcomes(judgement)["effective.optimizer.warmup_steps"] == "differs"


def test_a_doubled_batch_is_not_excused_by_a_weaker_rule() -> None:
    other = {
        **FACTS,
        "training.batch_size": 8,
        "effective.optimizer.sequences_per_update": 8,
        "effective.budget.lr_trace": sha("other rates"),
    }
    judgement = judge(FACTS, other)
    assert judgement.ruling("optimizer").outcome == "differs"
    assert judgement.claims["nll"] == "refused"
    declared = judge(FACTS, other, treatment=["training.batch_size"])
    assert declared.ruling("execution").outcome == "studied"
    assert declared.ruling("optimizer").outcome == "follows"
    assert declared.verdict(CLAIMS) == "comparable"
    # Twice the batch for as many steps is also twice the budget, which the treatment is not.
    twice = {**other, "effective.budget.decay_tokens": 2_048_000}
    assert judge(FACTS, twice, treatment=["training.batch_size"]).claims["nll"] == "refused"


def test_other_documents_are_another_measurement_also_when_data_is_studied() -> None:
    other = {
        **FACTS,
        "effective.data.train_sha256": sha("other"),
        "effective.data.order_digest": sha("other order"),
    }
    assert judge(FACTS, other, treatment=["data"]).claims["nll"] == "comparable"
    other["effective.evaluation.held_out.sha256"] = sha("other documents")
    judgement = judge(FACTS, other, treatment=["data"])
    assert judgement.ruling("evaluation").outcome == "differs"
    assert judgement.claims["nll"] == "refused"


def test_facts_of_one_set_are_not_explained_by_another_set() -> None:
    other = {
        **FACTS,
        "effective.evaluation.train_split.sha256": sha("other"),
        "effective.evaluation.held_out.documents": 3,
    }
    assert outcomes(judge(FACTS, other))["effective.evaluation.held_out.documents"] == "differs"


def test_a_set_that_one_run_did_not_evaluate_follows_the_list_of_sets() -> None:
    fewer = {k: v for k, v in FACTS.items() if not k.startswith("effective.evaluation.train_split")}
    fewer["evaluation.sets"] = ["held_out"]
    judgement = judge(FACTS, fewer)
    assert [leaf.path for leaf in judgement.with_outcome("differs")] == ["evaluation.sets"]
    assert judgement.with_outcome("missing") == []
    declared = judge(FACTS, fewer, treatment=["evaluation.sets"])
    assert declared.verdict(CLAIMS) == "comparable"


def test_two_best_checkpoints_are_flagged() -> None:
    best = with_leaf("evaluation.select", "best")
    judgement = judge(best, dict(best))
    assert judgement.ruling("evaluation").outcome == "match"
    assert judgement.claims == {
        "nll": "flagged",
        "bpb": "flagged",
        "throughput": "comparable",
        "memory": "comparable",
    }
    assert judge(best, FACTS).claims["nll"] == "refused"


# -- treatments


def as_dense() -> dict[str, Any]:
    """The facts of a dense run beside the full, token-routed one."""
    record = full_record(
        spec=full_spec(model={"mlp_type": "dense", "learn_shared_routed_gates": None})
    )
    facts = dict(facts_of_record(record, record.points[-1]))
    facts |= {leaf: 0.25 for leaf in STAND_INS if leaf.startswith("optimizer.muon_")}
    absent = {"not_applicable": "a dense model has no routes"}
    facts |= {
        "effective.model.route_tables_sha256": absent,
        "effective.execution.dispatch": absent,
        "effective.optimizer.groups_sha256": sha("dense groups"),
        "effective.parameters.active": 99_487_680,
    }
    return facts


def test_a_declared_model_is_comparable() -> None:
    judgement = judge(FACTS, as_dense(), treatment=["model"])
    assert set(judgement.claims.values()) == {"comparable"}
    assert not judgement.inferred
    assert judgement.ruling("model").outcome == "studied"
    assert judgement.ruling("optimizer").outcome == "follows"
    assert judgement.ruling("execution").outcome == "studied"  # shared_expert_chunk_tokens


def test_a_model_that_is_not_declared_is_inferred_and_flagged() -> None:
    judgement = judge(FACTS, as_dense())
    assert judgement.inferred
    assert judgement.treatment == ("model",)
    assert set(judgement.claims.values()) == {"flagged"}
    assert {ruling.rule for ruling in judgement.rules if ruling.over(CLAIMS) != "comparable"} == {
        "model"
    }


def test_total_parameters_never_follow() -> None:
    other = {**as_dense(), "effective.parameters.total": 1}
    judgement = judge(FACTS, other, treatment=["model"])
    assert judgement.ruling("parameters").outcome == "differs"
    assert set(judgement.claims.values()) == {"flagged"}
    assert judge(FACTS, other).inferred


def test_total_parameters_are_shown_also_where_they_match() -> None:
    leaf = judge(FACTS, FACTS).ruling("parameters").leaves[0]
    assert (leaf.outcome, leaf.a, leaf.b) == ("match", 99_487_680, 99_487_680)


def test_a_model_beside_another_difference_is_not_inferred() -> None:
    judgement = judge(FACTS, {**as_dense(), "effective.code.version": "0.2"})
    assert not judgement.inferred
    assert judgement.ruling("model").outcome == "differs"
    assert judgement.ruling("code").outcome == "differs"


def test_beyond_the_treatment_every_difference_keeps_its_effect() -> None:
    other = {**as_dense(), "seed": 43, "effective.data.order_digest": sha("other")}
    judgement = judge(FACTS, other, treatment=["model"])
    assert judgement.claims["nll"] == "refused"
    assert [leaf.path for leaf in judgement.with_outcome("differs")] == ["seed"]


@pytest.mark.parametrize(
    ("treatment", "changes"),
    [
        ("seed", {"seed": 43, "effective.data.order_digest": "other"}),
        (
            "training.precision",
            {"training.precision": "fp32", "effective.precision.compute_dtype": "float32"},
        ),
        ("optimizer.lr", {"optimizer.lr": 1e-3, "effective.budget.lr_trace": "other"}),
        ("optimizer", {"optimizer.lr": 1e-3, "optimizer.eps": 1e-6}),
        ("schedule", {"schedule.decay": "linear", "effective.budget.lr_trace": "other"}),
        ("training.seq_len", {"training.seq_len": 512, "effective.data.order_digest": "other"}),
        ("rule:hardware", {"effective.hardware.torch": "2.14", "effective.hardware.threads": 8}),
        ("rule:code", {"effective.code.package_sha256": "other"}),
        ("training.device", {"effective.hardware.device_type": "cpu"}),
    ],
)
def test_a_declared_treatment_is_studied(treatment: str, changes: dict[str, Any]) -> None:
    other = {**FACTS, **changes}
    assert judge(FACTS, other).verdict(CLAIMS) != "comparable"
    judgement = judge(FACTS, other, treatment=[treatment])
    assert judgement.verdict(CLAIMS) == "comparable"
    assert judgement.with_outcome("studied") != []


@pytest.mark.parametrize("treatment", ["rule:budget", "training.steps", "training"])
def test_a_run_that_broke_off_is_no_treatment(treatment: str) -> None:
    judgement = judge(FACTS, FACTS | {"effective.budget.finished": False}, treatment=[treatment])
    assert judgement.ruling("budget").outcome == "differs"
    assert judgement.claims["nll"] == "refused"


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "tokenizer"])
def test_a_whole_rule_may_be_studied(rule: str) -> None:
    other = {k: changed(v) if tag_of(k).rule == rule else v for k, v in FACTS.items()}
    other["effective.budget.finished"] = True
    judgement = judge(FACTS, other, treatment=[f"rule:{rule}"])
    assert judgement.ruling(rule).outcome == "studied"
    assert set(judgement.ruling(rule).effects.values()) == {None}


def test_a_studied_tokenizer_still_leaves_nats_per_token_without_a_unit() -> None:
    other = with_leaf("effective.tokenizer.sha256", sha("other"))
    judgement = judge(FACTS, other, treatment=["tokenizer"])
    assert judgement.ruling("tokenizer").outcome == "studied"
    assert judgement.claims["nll"] == "refused"
    assert judgement.claims["bpb"] == "comparable"


def test_what_is_unknown_cannot_be_studied() -> None:
    leaf = "effective.precision.compute_dtype"
    judgement = judge(FACTS, without(leaf), treatment=["training.precision"])
    names_only(judgement, "precision", leaf, "missing")


def test_a_device_treatment_does_not_excuse_another_torch() -> None:
    other = with_leaf("effective.hardware.torch", "2.14")
    assert judge(FACTS, other, treatment=["training.device"]).claims["throughput"] == "refused"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("modle", "'model'"),
        ("optimizer.learning_rate", ""),
        ("rule:seed", "'seeds'"),
        ("notes", "never compared"),
        ("checkpoint", "never compared"),
        ("effective.precision.matmul", ""),
        ("", ""),
    ],
)
def test_a_treatment_that_names_nothing_is_an_error(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=r"--treatment") as error:
        judge(FACTS, FACTS, treatment=[name])
    assert hint in str(error.value)


# -- allowances


@pytest.mark.parametrize("rule", [rule for rule, effects in EFFECTS.items() if "refuse" in effects])
def test_an_allowance_turns_refusals_into_flags_never_into_comparable(rule: str) -> None:
    leaf = next(leaf for leaf in JUDGED if tag_of(leaf).rule == rule)
    other = without(leaf)
    judgement = judge(FACTS, other, allow={rule: "known and small"})
    expected = EFFECTS[rule].replace("refuse", "flag").split()
    assert [judgement.claims[claim] for claim in CLAIMS] == [VERDICT[e] for e in expected]
    assert judgement.ruling(rule).allowed == "known and small"


def test_an_allowance_is_for_its_own_rule_only() -> None:
    other = {**FACTS, "seed": 43, "optimizer.lr": 1.0}
    assert judge(FACTS, other, allow={"seeds": "why not"}).claims["nll"] == "refused"


@pytest.mark.parametrize(("rule", "reason"), [("seed", "x"), ("seeds", " "), ("", "x")])
def test_an_allowance_needs_a_rule_and_a_reason(rule: str, reason: str) -> None:
    with pytest.raises(UserError, match="--allow"):
        judge(FACTS, FACTS, allow={rule: reason})


# -- specs


def spec_facts(**changes: Any) -> dict[str, Any]:
    known = {leaf: FACTS[leaf] for leaf in FACTS if not leaf.startswith("effective.")}
    foreseen = (
        "effective.tokenizer.sha256",
        "effective.budget.tokens",
        "effective.parameters.total",
    )
    return {**known, **{leaf: FACTS[leaf] for leaf in foreseen}, **changes}


def test_what_only_a_run_shows_is_not_yet_known_and_without_effect() -> None:
    judgement = judge(spec_facts(), spec_facts(), planned=SPECS)
    assert set(judgement.claims.values()) == {"comparable"}
    assert judgement.ruling("code").outcome == "not yet known"
    assert judgement.ruling("budget").outcome == "match"
    unknown = {leaf.path for leaf in judgement.with_outcome("not yet known")}
    assert "effective.data.order_digest" in unknown
    assert judge(spec_facts(), spec_facts()).verdict(CLAIMS) == "refused"  # as runs they would be


def test_what_is_not_yet_known_follows_what_differs() -> None:
    judgement = judge(spec_facts(), spec_facts(seed=43), planned=SPECS)
    assert judgement.claims["nll"] == "refused"
    assert judgement.ruling("data").outcome == "follows"
    assert judgement.with_outcome("missing") == []


def test_a_request_whose_result_is_not_yet_known_is_pointed_out() -> None:
    asked = {"training.precision": "fp32"}
    judgement = judge(spec_facts(), spec_facts(**asked), planned=SPECS)
    leaf = next(
        leaf
        for leaf in judgement.with_outcome("not yet known")
        if leaf.path == "effective.precision.compute_dtype"
    )
    assert leaf.asked == ("training.precision",)


# -- properties


MUTATIONS: list[Callable[[Any], Any]] = [changed, lambda _: None, lambda _: math.nan]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_judging_is_symmetric_and_silent_on_nothing(data: st.DataObject) -> None:
    leaves = data.draw(st.lists(st.sampled_from(list(FACTS)), max_size=8, unique=True))
    other = dict(FACTS)
    for leaf in leaves:
        if data.draw(st.booleans()):
            other[leaf] = data.draw(st.sampled_from(MUTATIONS))(other[leaf])
        else:
            del other[leaf]
    treatment = data.draw(
        st.lists(st.sampled_from(["model", "seed", "data", "training"]), max_size=2)
    )
    planned = data.draw(st.tuples(st.booleans(), st.booleans()))
    forth = judge(FACTS, other, treatment=treatment, planned=planned)
    back = judge(other, FACTS, treatment=treatment, planned=planned[::-1])
    assert [r.outcome for r in forth.rules] == [r.outcome for r in back.rules]
    assert forth.claims == back.claims
    assert outcomes(forth) == outcomes(back)
    listed = set(outcomes(forth))
    assert {leaf for leaf in leaves if tag_of(leaf).kind == "judged"} <= listed
    for leaf in forth.with_outcome("follows"):
        grounds = {one for one in leaf.follows if tag_of(one).kind == "judged"}
        assert grounds <= listed
    # Where something differs and nothing is declared, something counts.
    if not any(planned) and forth.with_outcome("follows"):
        assert forth.with_outcome("differs", "missing", "studied")


# -- bytes of text

TOKENIZER, READ = "effective.tokenizer.sha256", "effective.budget.bytes"
CONSUMED, DECAY = "effective.budget.tokens", "effective.budget.decay_tokens"
RAMPS, WARMUP = "effective.budget.ramp_tokens", "effective.optimizer.warmup_steps"
RAMPED = {**FACTS, RAMPS: {"model.top_k_primary_weight_final": FACTS[CONSUMED] // 2}}
UPDATE = FACTS["effective.optimizer.sequences_per_update"] * FACTS["training.seq_len"]


def of_bytes(share: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A run by another tokenizer, of twice the tokens, that has read a share of the bytes."""
    twice = {leaf: 2 * RAMPED[leaf] for leaf in (CONSUMED, DECAY, WARMUP)}
    ramps = {name: 2 * tokens for name, tokens in RAMPED[RAMPS].items()}
    other = {TOKENIZER: sha("other ranks"), READ: round(share * RAMPED[READ]), RAMPS: ramps}
    digests = {"effective.budget.lr_trace": sha("r"), "effective.data.order_digest": sha("o")}
    return {**RAMPED, **twice, **other, **digests, **changes}


def test_two_tokenizers_may_have_one_budget_in_bytes() -> None:
    for pair in ((RAMPED, of_bytes()), (of_bytes(), RAMPED)):
        judgement = judge(*pair)
        assert judgement.ruling("budget").outcome == "follows"
        assert judgement.claims["bpb"] == "flagged"
        assert judgement.claims["nll"] == "refused"
        found = outcomes(judgement)
        assert found[CONSUMED] == "follows"
        assert found.keys() & {READ, DECAY, RAMPS, WARMUP} == set()


def test_bytes_match_to_within_one_update_and_are_shown() -> None:
    update = UPDATE * RAMPED[READ] / RAMPED[CONSUMED]
    near = of_bytes(1 - 0.9 * update / RAMPED[READ])
    leaves = {leaf.path: leaf for leaf in judge(RAMPED, near).ruling("budget").leaves}
    assert (leaves[READ].outcome, leaves[READ].b) == ("match", near[READ])
    assert leaves[CONSUMED].outcome == "follows"


@pytest.mark.parametrize("share", [0.97, 1.03, 0.5, 2.0])
def test_neither_tokens_nor_bytes_is_another_budget(share: float) -> None:
    for pair in ((RAMPED, of_bytes(share)), (of_bytes(share), RAMPED)):
        judgement = judge(*pair)
        found = outcomes(judgement)
        assert (found[CONSUMED], found[READ]) == ("differs", "follows")
        assert judgement.claims["bpb"] == "refused"


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_unknown_bytes_match_nothing(unknown: Any) -> None:
    found = outcomes(judge(RAMPED, of_bytes(**{READ: unknown})))
    assert (found[CONSUMED], found[READ]) == ("differs", "missing")


@pytest.mark.parametrize("leaf", SPARE)
def test_bytes_need_not_be_known_at_equal_tokens(leaf: str) -> None:
    for other in (without(leaf), with_leaf(leaf, None)):
        for pair in ((FACTS, other), (other, FACTS), (other, dict(other))):
            assert judge(*pair).verdict(CLAIMS) == "comparable"


@pytest.mark.parametrize("leaf", [DECAY, WARMUP])
def test_a_schedule_is_looked_at_in_bytes_too(leaf: str) -> None:
    """As many tokens are another place of the text, where tokens are not what matches."""
    found = outcomes(judge(RAMPED, of_bytes(**{leaf: RAMPED[leaf]})))
    assert found[leaf] == "differs"


def test_a_ramp_is_looked_at_in_bytes_too() -> None:
    assert outcomes(judge(RAMPED, of_bytes(**{RAMPS: RAMPED[RAMPS]})))[RAMPS] == "differs"
    others = {"model.routed_gate_final": 2 * FACTS[CONSUMED]}
    assert outcomes(judge(RAMPED, of_bytes(**{RAMPS: others})))[RAMPS] == "differs"


def test_bytes_excuse_nothing_of_one_tokenizer() -> None:
    judgement = judge(RAMPED, of_bytes(**{TOKENIZER: RAMPED[TOKENIZER]}))
    assert outcomes(judgement)[CONSUMED] == "differs"


# -- what comes to the same run

TOKENS = FACTS["training.batch_size"] * FACTS["training.seq_len"]
ENTRIES = FACTS["effective.tokenizer.vocab_size"]


@pytest.mark.parametrize(
    ("leaf", "a", "b", "same_run"),
    [
        ("training.loss_chunk_tokens", 0, TOKENS, True),
        ("training.loss_chunk_tokens", TOKENS, 10 * TOKENS, True),
        ("training.loss_chunk_tokens", 0, TOKENS - 1, False),
        ("model.shared_expert_chunk_tokens", 0, TOKENS, True),
        ("model.shared_expert_chunk_tokens", 0, TOKENS - 1, False),
        ("training.loss_block_vocab", ENTRIES, 2 * ENTRIES, True),
        ("training.loss_block_vocab", ENTRIES - 1, ENTRIES, False),
        ("evaluation.sets", ["train_split", "held_out"], ["held_out", "train_split"], True),
        ("schedule.min_lr_ratio", 0.1, 0.2, False),
    ],
)
def test_two_values_for_one_run_match(leaf: str, a: Any, b: Any, same_run: bool) -> None:
    for first, second in ((a, b), (b, a)):
        judgement = judge(with_leaf(leaf, first), with_leaf(leaf, second))
        if same_run:
            assert judgement.verdict(CLAIMS) == "comparable"
        else:
            names_only(judgement, str(tag_of(leaf).rule), leaf, "differs")


def test_a_floor_that_a_constant_rate_never_reaches_is_none() -> None:
    constant = {**FACTS, "schedule.decay": "constant"}
    assert judge(constant, {**constant, "schedule.min_lr_ratio": 0.5}).claims["nll"] == "comparable"


def test_what_a_shard_without_a_tokenizer_is_called_proves_nothing() -> None:
    name, content = "effective.tokenizer.name", "effective.tokenizer.sha256"
    shard = {**FACTS, content: "shards:" + sha("ids")}
    assert judge(shard, {**shard, name: "other"}).claims["nll"] == "comparable"
    other = {**shard, name: "other", content: "shards:" + sha("other ids")}
    assert judge(shard, other).claims["nll"] == "refused"


@pytest.mark.parametrize(
    ("treatment", "leaf"),
    [
        ("evaluation.eval_documents", "effective.evaluation.held_out.context"),
        ("evaluation.eval_documents", "effective.evaluation.held_out.status"),
        ("training.device", "effective.hardware.device_count"),
        ("model.rope_theta", "effective.optimizer.groups_sha256"),
        ("model.rope_theta", "effective.budget.ramp_tokens"),
        ("optimizer.lr", "effective.optimizer.groups_sha256"),
    ],
)
def test_a_treatment_excuses_no_more_than_it_brings(treatment: str, leaf: str) -> None:
    both = {one: changed(FACTS[one]) for one in (treatment, leaf)}
    judgement = judge(FACTS, {**FACTS, **both}, treatment=[treatment])
    assert [one.path for one in judgement.with_outcome("differs")] == [leaf]
