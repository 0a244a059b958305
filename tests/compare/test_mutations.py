"""Every leaf of every kind of record, changed, taken away and set to null: its rule, no other.

The leaves come from the models of the schema, so that a new field is mutated the day it is added.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from base_records import NAMES, base_record
from mutations import (
    SchemaLeaf,
    other_values,
    put,
    record_leaves,
    removed,
    schema_leaves,
    value_at,
)
from pydantic import ValidationError
from test_rules import EFFECTS, VERDICT

from workbench.compare.facts import (
    all_leaves,
    facts_of_record,
    nullable_leaves,
    set_of,
)
from workbench.compare.rules import Judgement, Planned, judge
from workbench.spec.checklist import CLAIMS, RULES, Tag, matches, tag_of
from workbench.spec.run import RunSpec
from workbench.track.record import (
    Effective,
    Point,
    RunRecord,
    SetFacts,
    without_nulls,
)
from workbench.track.record_fields import RECORD_FIELDS

Document = dict[str, Any]

# Whose differences are never compared: a second list, so that none is added by the way.
FREE = {
    "name",
    "notes",
    "model.profile",
    "data.stream_eval_documents",
    "data.eval_tokens_path",
    "data.held_out",
    "data.overlap_limit",
    "evaluation.eval_steps",
    "checkpoint.save_steps",
    "checkpoint.save_minutes",
    "checkpoint.save_total_limit",
    "tracking.uri",
    "tracking.experiment",
    "tracking.tags",
    "effective.data.source",
    "effective.data.order_proof",
    "effective.data.counts",
    "effective.parameters.active",
    "effective.parameters.embedding",
    "effective.parameters.experts",
    "effective.evaluation.<set>.overlap",
    "effective.evaluation.<set>.passed",
    "effective.code.git_commit",
    "effective.code.git_dirty",
    "effective.code.git_diff_sha256",
}
# Judged by what they became, which stands in the effective facts.
REQUESTED = {
    "model.top_k_primary_weight_schedule_ratio",
    "model.top_k_primary_weight_schedule_steps",
    "model.gate_schedule_ratio",
    "model.gate_schedule_steps",
    "model.expert_diversity_schedule_ratio",
    "model.expert_diversity_schedule_steps",
    "tokenizer.name",
    "tokenizer.path",
    "tokenizer.vocab_size",
    "data.dataset",
    "data.text_file",
    "data.text_field",
    "data.text_unit",
    "data.tokens_path",
    "data.tokens_format",
    "data.stream_path",
    "data.stream_name",
    "data.stream_config",
    "data.stream_revision",
    "data.held_out_ratio",
    "data.overlap_ngram",
    "data.overlap_document_share",
    "training.steps",
    "training.stop_at_step",
    "training.precision",
    "training.device",
    "training.parallel",
    "training.global_batch_size",
    "training.loss_backend",
    "schedule.warmup_steps",
    "evaluation.eval_documents",
    "evaluation.stride",
}
# Judged leaves of which two values can come to the same run: where one did here, another value is
# tried too, and must be named.
SAME_IN_EFFECT = {
    "evaluation.sets",
    "model.shared_expert_chunk_tokens",
    "schedule.min_lr_ratio",
    "training.loss_block_vocab",
    "training.loss_chunk_tokens",
}
# ... and those of which all values do: a floor that a constant rate never reaches; what a shard of
# no known tokenizer calls it.
WITHOUT_EFFECT = {
    ("learned_router", "schedule.min_lr_ratio"),
    ("tokens", "effective.tokenizer.name"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


def facts_of(document: Document) -> dict[str, Any]:
    record = RunRecord.model_validate(document)
    return facts_of_record(record, record.points[-1])


def checklist_name(leaf: SchemaLeaf) -> str:
    return leaf.name.removeprefix("spec.")


def generic(name: str) -> str:
    """The name of a leaf whatever set it belongs to."""
    return name.replace(f".{one}.", ".<set>.") if (one := set_of(name)) else name


def apart(judgement: Judgement) -> dict[str, str]:
    """Every leaf that does not match, with its outcome."""
    leaves = (leaf for rule in judgement.rules for leaf in rule.leaves)
    return {leaf.path: leaf.outcome for leaf in leaves if leaf.outcome != "match"}


def names_alone(judgement: Judgement, leaf: str, outcomes: set[str]) -> None:
    """Asserts that the rule of the leaf names it and nothing else, with its effect on claims."""
    rule = str(tag_of(leaf).rule)
    found = apart(judgement)
    assert found.pop(leaf) in outcomes, (leaf, found)
    # What a comparison makes of a leaf follows it, and no other rule has an effect.
    made = {"effective.budget.decay_tokens"}
    if leaf == "training.gradient_accumulation_steps":  # of a batch given for all processes
        made.add("training.batch_size")
        if "missing" in outcomes:  # nor is the batch known then
            assert found.pop("training.batch_size", "missing") in {"missing", "follows"}
    assert found.keys() <= made - {leaf}, (leaf, found)
    for one in judgement.with_outcome("follows"):
        assert one.follows == (leaf,)
    unknown = leaf == "schedule.decay" and "missing" in outcomes  # nor is where it ends
    assert set(found.values()) <= {"follows", *(["differs"] if unknown else [])}
    assert [one.rule for one in judgement.rules if one.outcome in outcomes] == [rule]
    effects = EFFECTS[rule].split()
    if unproven(judgement):
        pairs = zip(effects, UNPROVEN, strict=True)
        effects = [max("flag", one) if flagged else one for one, flagged in pairs]
    expected = {claim: VERDICT[one] for claim, one in zip(CLAIMS, effects, strict=True)}
    assert judgement.claims == expected, leaf


# What an evaluation set that was never shown to be held out does to each claim, in any pair.
UNPROVEN = (True, True, False, False)


def unproven(judgement: Judgement) -> bool:
    return bool(judgement.ruling("evaluation").unproven)


def matches_all(judgement: Judgement) -> bool:
    flagged = set(UNPROVEN) if unproven(judgement) else {False}
    verdicts = {VERDICT["flag"] if one else "comparable" for one in flagged}
    return not apart(judgement) and set(judgement.claims.values()) == verdicts


def lacks(document: Document, leaf: SchemaLeaf, value: Any) -> set[str]:
    """The settings that would not be null beside this one: a record without them lacks them."""
    spec = put(document, leaf.path, value)["spec"]
    try:
        resolved = RunSpec.model_validate(without_nulls(spec)).model_dump(mode="json")
    except ValidationError:
        return set()
    return {
        f"{section}.{name}"
        for section, fields in resolved.items()
        if isinstance(fields, dict)
        for name, one in fields.items()
        if one is not None and spec[section].get(name) is None
    }


def differs(leaf: str) -> set[str]:
    """What a changed leaf may come out as: a setting of the model alone is taken as studied."""
    return (
        {"studied"} if leaf.startswith("model.") and tag_of(leaf).rule == "model" else {"differs"}
    )


# -- the schema


def test_every_leaf_is_judged_requested_or_one_of_the_free_ones() -> None:
    spec = [leaf.name for leaf in schema_leaves(RunSpec)]
    effective = [leaf.name for leaf in schema_leaves(Effective, ("effective",))]
    effective.remove("effective.evaluation")
    sets = [f"effective.evaluation.<set>.{leaf.name}" for leaf in schema_leaves(SetFacts)]
    kinds: dict[str, set[str]] = {"judged": set(), "requested": set(), "free": set()}
    for name in (*spec, *effective, *sets):
        tag = tag_of(name.replace("<set>", "held_out"))
        assert (tag.rule in RULES) != (tag.kind == "free"), name
        kinds[tag.kind].add(name)
    assert kinds["free"] == FREE
    assert kinds["requested"] == REQUESTED
    assert len(kinds["judged"]) > 90


def test_every_field_of_a_record_and_of_its_points_says_how_it_is_judged() -> None:
    assert set(RECORD_FIELDS) == set(RunRecord.model_fields)
    assert set(Point.model_fields) == {"step", "tokens", "order_digest", "lr_trace", "bytes"}


def test_what_a_requested_setting_becomes_is_there_and_judged() -> None:
    known = [leaf.name for leaf in schema_leaves(Effective, ("effective",))]
    known += [f"effective.evaluation.held_out.{leaf.name}" for leaf in schema_leaves(SetFacts)]
    known += [
        f"effective.budget.{name}" for name in ("tokens", "bytes", "lr_trace", "decay_tokens")
    ]
    known.append("training.batch_size")
    for name in REQUESTED:
        tag = tag_of(name)
        for pattern in tag.becomes:
            found = [leaf for leaf in known if matches(leaf, (pattern,))]
            assert {tag_of(leaf).rule for leaf in found} - {None}, (name, pattern)


# -- one leaf of one record


def not_mutated_before(base: str, folder: Path) -> list[SchemaLeaf]:
    """The leaves of a record that are null in all the kinds of record before it."""
    names = [NAMES[-1], *NAMES[:-1]]  # the fullest first
    documents = [
        base_record(name, folder).model_dump(mode="json") for name in names[: names.index(base) + 1]
    ]
    leaves = [
        {generic(checklist_name(leaf)): leaf for leaf in record_leaves(one)} for one in documents
    ]
    before = {
        name
        for document, found in zip(documents[:-1], leaves, strict=False)
        for name, leaf in found.items()
        if value_at(document, leaf.path) is not None
    }
    return [leaf for name, leaf in leaves[-1].items() if name not in before]


@pytest.mark.parametrize(
    ("base", "every"),
    [
        *((base, False) for base in NAMES),
        *(pytest.param(base, True, marks=pytest.mark.slow) for base in NAMES),
    ],
)
def test_every_mutation_is_named_by_its_rule_alone(base: str, every: bool, folder: Path) -> None:
    document = base_record(base, folder).model_dump(mode="json")
    facts = facts_of(document)
    assert matches_all(judge(facts, facts_of(json.loads(json.dumps(document)))))
    for leaf in record_leaves(document) if every else not_mutated_before(base, folder):
        name, value = checklist_name(leaf), value_at(document, leaf.path)
        tag = tag_of(name)
        if base == "dense" and name == "effective.optimizer.sequences_per_update":
            continue  # of this kind alone the batch of one process comes from it: two rules
        changes = [one for one in other_values(leaf.annotation, value) if one != "random"]
        assert changes or value is None, f"no other value is known of {name}"
        if not every and name not in SAME_IN_EFFECT:
            changes = changes[:1]
        named = 0
        for change in changes:
            judgement = judge(facts, facts_of(put(document, leaf.path, change)))
            if lacking := lacks(document, leaf, change):  # no spec of the schema is like that
                judged = {one for one in (name, *lacking) if tag_of(one).kind == "judged"}
                assert apart(judgement).keys() == judged, (name, change)
            elif tag.kind == "judged" and not matches_all(judgement):
                names_alone(judgement, name, differs(name))
                named += 1
            else:
                assert matches_all(judgement), (name, change, apart(judgement))
                silent = tag.kind != "judged" or name in SAME_IN_EFFECT
                assert silent or (base, name) in WITHOUT_EFFECT, (name, change)
        judged = tag.kind == "judged" and value is not None
        silent = (base, name) in WITHOUT_EFFECT or any(lacks(document, leaf, c) for c in changes)
        assert named or not judged or silent, name
        without = judge(facts, facts_of(removed(document, leaf.path)))
        nulled = judge(facts, facts_of(put(document, leaf.path, None)))
        if tag.kind != "judged":
            assert matches_all(without)
            # Without the batch of all processes nothing says that of one.
            unsaid = name == "training.global_batch_size" and value is not None
            assert set(apart(nulled)) == ({"training.batch_size"} if unsaid else set())
        elif value is not None or name not in nullable_leaves():
            names_alone(without, name, {"missing"})
            allowed = {"missing", *differs(name)} if name in nullable_leaves() else {"missing"}
            names_alone(nulled, name, allowed)


def test_every_leaf_has_a_value_somewhere(folder: Path) -> None:
    """What is null in one kind of run is mutated in another: nothing is left out altogether."""
    mutated: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for base in NAMES:
        document = base_record(base, folder).model_dump(mode="json")
        for leaf in record_leaves(document):
            count = skipped if value_at(document, leaf.path) is None else mutated
            count[generic(checklist_name(leaf))] += 1
    never = {name for name in skipped if not mutated[name]}
    assert never == set()
    assert sum(mutated.values()) > 600


@pytest.mark.parametrize(
    ("base", "planned"),
    [
        ("compiled", (False, True)),
        *(
            pytest.param(base, planned, marks=pytest.mark.slow)
            for base in NAMES
            for planned in ((True, True), (False, True), (True, False))
        ),
    ],
)
def test_a_check_judges_the_same_and_waits_for_what_a_run_will_show(
    base: str, folder: Path, planned: Planned
) -> None:
    """What the run of a spec has yet to show has no effect, all else has its own."""
    record = base_record(base, folder)
    facts = facts_of_record(record, record.points[-1])
    other_is_plan = planned[1]
    for name, value in facts.items():
        tag = tag_of(name)
        if tag.kind != "judged":
            continue
        without = {key: one for key, one in facts.items() if key != name}
        judgement = judge(facts, without, planned=planned)
        if tag.instead_of:  # not needed, where that one matches
            assert apart(judgement) == apart(judge(facts, {**facts, name: None})) == {}
            continue
        if name.startswith("effective.") and other_is_plan:
            assert apart(judgement) == {name: "not yet known"}
            assert judgement.verdict(CLAIMS) == ("flagged" if unproven(judgement) else "comparable")
        elif value is not None or name not in nullable_leaves():
            names_alone(judgement, name, {"missing"})
        if name.startswith("effective."):  # what will not be known
            names_alone(judge(facts, {**facts, name: None}, planned=planned), name, {"missing"})
        changed = next(iter(other_values(type(value), value)), None)
        if changed is not None and (base, name) not in WITHOUT_EFFECT:
            judgement = judge(facts, {**facts, name: changed}, planned=planned)
            if name not in SAME_IN_EFFECT:
                names_alone(judgement, name, differs(name))


# -- what else a record holds


@pytest.mark.parametrize(
    ("field", "value", "leaf"),
    [
        ("status", "FAILED", "effective.budget.finished"),
        ("status", "KILLED", "effective.budget.finished"),
        ("total_tokens", 999_999, "effective.budget.decay_tokens"),
        ("points.tokens", 999_999, "effective.budget.tokens"),
        ("points.bytes", 999_999, "effective.budget.bytes"),
        ("points.order_digest", "0" * 64, "effective.data.order_digest"),
        ("points.lr_trace", "0" * 64, "effective.budget.lr_trace"),
    ],
)
def test_fields_beside_spec_and_facts(folder: Path, field: str, value: Any, leaf: str) -> None:
    document = base_record("compiled", folder).model_dump(mode="json")
    path = ("points", -1, field.removeprefix("points.")) if "." in field else (field,)
    other = put(document, path, value)  # type: ignore[arg-type]
    names_alone(judge(facts_of(document), facts_of(other)), leaf, {"differs"})


@pytest.mark.parametrize("base", NAMES)
def test_order_spelling_names_and_paths_never_matter(base: str, folder: Path) -> None:
    document = base_record(base, folder).model_dump(mode="json")
    other = shuffled(document, random.Random(5))
    other["spec"] |= {"name": "other", "notes": "other"}
    other["spec"]["tracking"] = {"uri": None, "experiment": "x", "tags": {"b": "c"}}
    other["spec"]["checkpoint"] |= {"save_steps": 7, "save_minutes": 1.0}
    for key, value in other["spec"]["data"].items():
        if value is not None and key.endswith(("_path", "_file")):
            other["spec"]["data"][key] = f"/elsewhere/{value}"
    other |= dict.fromkeys(("id", "name", "started", "ended", "error"), "other")
    other |= {"provenance": {"command": "other"}, "git_commit": "other", "mlflow": {"run": "o"}}
    text = json.dumps(other)
    lr = json.dumps(document["spec"]["optimizer"]["lr"])
    assert text.count(f'"lr": {lr}') == 1
    text = text.replace(f'"lr": {lr}', f'"lr": {float(lr):e}')
    text = text.replace('"max_grad_norm": 1.0', '"max_grad_norm": 1')
    assert matches_all(judge(facts_of(document), facts_of(json.loads(text))))


def shuffled(value: Any, draw: random.Random) -> Any:
    """The same mappings, each in another order; lists of sets too."""
    if isinstance(value, dict):
        items = [(key, shuffled(one, draw)) for key, one in value.items()]
        draw.shuffle(items)
        found = dict(items)
        if "sets" in found:
            found["sets"] = found["sets"][::-1]
        return found
    return [shuffled(one, draw) for one in value] if isinstance(value, list) else value


# -- what follows


def causes() -> Iterator[tuple[str, str, Tag]]:
    """Every judged leaf with each leaf that its tag says it follows."""
    record = base_record("compiled", Path())
    facts = facts_of_record(record, record.points[-1])
    leaves = [leaf for leaf in all_leaves(facts, facts) if leaf in facts]
    for leaf in leaves:
        tag = tag_of(leaf)
        own = set_of(leaf) or ""
        follows = tuple(pattern.replace("<set>", own) for pattern in tag.follows)
        for cause in leaves:
            if cause != leaf and matches(cause, follows) and tag_of(cause).kind == "judged":
                yield leaf, cause, tag


@pytest.mark.parametrize("treated", [False, True])
def test_what_follows_from_a_difference_is_listed_as_following(treated: bool) -> None:
    record = base_record("compiled", Path())
    facts = dict(facts_of_record(record, record.points[-1]))
    facts |= {leaf: 0.25 for leaf, value in facts.items() if value is None}
    count = 0
    for leaf, cause, _ in causes():
        both = {
            one: next(iter(other_values(type(facts[one]), facts[one]))) for one in (leaf, cause)
        }
        rule = str(tag_of(cause).rule)
        options = {"treatment": [f"rule:{rule}"]} if treated else {}
        if treated and tag_of(leaf).rule == rule:
            continue
        judgement = judge(facts, {**facts, **both}, **options)
        found = apart(judgement)
        assert found[leaf] == "follows", (leaf, cause)
        assert found[cause] in ("studied", "differs")
        assert found.keys() == {leaf, cause}
        (listed,) = [one for one in judgement.with_outcome("follows") if one.path == leaf]
        assert listed.follows == (cause,)
        count += 1
    assert count > 50


def test_a_setting_that_one_arm_lacks_follows_what_decides_that_it_exists() -> None:
    """A null against a value, and only that: two values that differ are a difference."""
    record = base_record("compiled", Path())
    facts = dict(facts_of_record(record, record.points[-1]))
    facts |= {leaf: 0.25 for leaf, value in facts.items() if value is None}
    count = 0
    for leaf in facts:
        for cause in facts:
            if not matches(cause, tag_of(leaf).exists_by):
                continue
            decided = {cause: other_values(type(facts[cause]), facts[cause])[0]}
            rule = str(tag_of(cause).rule)
            for other, expected in (
                (None, {"follows"}),
                (other_values(type(facts[leaf]), facts[leaf])[0], {"differs", "studied"}),
            ):
                for treatment in ([], [f"rule:{rule}"]):
                    if treatment and tag_of(leaf).rule == rule:
                        continue
                    if other is None and not treatment and tag_of(leaf).rule == rule == "model":
                        expected = {"follows", "studied"}  # the whole model is taken as studied
                    changed = {**facts, **decided, leaf: other}
                    found = apart(judge(facts, changed, treatment=treatment))
                    assert found[leaf] in expected, (leaf, cause, found)
                    assert found.keys() == {leaf, cause}
                    count += 1
    assert count > 50


# Settings that another one leaves no choice: heads of mha and mqa; gates without a shared path; the
# batch of one process where that of all is given.
FORCED = {
    "model.num_key_value_heads": ("model.attention_type",),
    "model.learn_shared_routed_gates": ("model.shared_expert",),
    "training.batch_size": ("training.gradient_accumulation_steps",),
}


def test_two_settings_that_differ_are_two_differences() -> None:
    """What was chosen in both specs follows nothing, but where there was no choice."""
    for leaf in schema_leaves(RunSpec):
        tag = tag_of(leaf.name)
        assert tag.follows == FORCED.get(leaf.name, ()), leaf.name
        assert tag.under == tag.unless == (), leaf.name


# What follows although its own rule is the stricter one, as the checklist has it: what a model or
# a tokenizer brings along counts as theirs, and so do the settings that exist in one arm only.
WEAKER_BY_DESIGN = {
    ("effective.optimizer.groups_sha256", "model"),
    ("effective.optimizer.groups_sha256", "tokenizer"),
    ("effective.budget.ramp_tokens", "model"),
    ("effective.execution.dispatch", "model"),
    ("effective.execution.attention", "model"),
    ("effective.data.train_tokens", "tokenizer"),
    ("effective.data.order_digest", "tokenizer"),
    ("effective.data.order_digest", "seeds"),
    ("effective.data.order_digest", "budget"),
    ("effective.budget.tokens", "tokenizer"),
    ("effective.budget.bytes", "tokenizer"),
    ("effective.evaluation.<set>.scored_tokens", "tokenizer"),
}


def test_a_strict_rule_is_not_hidden_behind_a_weak_one() -> None:
    strength = {"-": 0, "flag": 1, "refuse": 2}
    weaker = set()
    for leaf, cause, tag in causes():
        of_leaf, of_cause = (EFFECTS[str(one.rule)].split() for one in (tag, tag_of(cause)))
        if any(strength[a] > strength[b] for a, b in zip(of_leaf, of_cause, strict=True)):
            weaker.add((generic(leaf), str(tag_of(cause).rule)))
    assert weaker == WEAKER_BY_DESIGN
