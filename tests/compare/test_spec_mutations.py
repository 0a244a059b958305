"""Every field of a spec given another value: what its run would be refused for, and its treatment.

The facts are those that the runner finds when it builds the model and reads the data; nothing is
trained. So the table says what one setting really brings along, and no tag excuses more than that.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from base_records import KINDS
from mutations import SchemaLeaf, other_values, put, schema_leaves, value_at
from pydantic import ValidationError
from test_mutations import SAME_IN_EFFECT

from workbench.compare.facts import POINT_LEAVES, facts_of_record, facts_of_spec
from workbench.compare.rules import Judgement, judge
from workbench.errors import UserError
from workbench.foresee import foresee
from workbench.run import build, new_record
from workbench.spec.checklist import tag_of
from workbench.spec.foreseen import Foreseen
from workbench.spec.run import RunSpec
from workbench.track.record import without_nulls
from workbench.track.store import Store

# Rules beside its own by which a field shows, undeclared: total parameters never follow, other
# documents are another measurement, other batches another plan.
ALSO = {
    "data.dataset": {"evaluation"},
    "data.held_out_ratio": {"evaluation"},
    "data.overlap_ngram": {"evaluation"},
    "data.overlap_document_share": {"evaluation"},
    "training.steps": {"interval"},
    "training.stop_at_step": {"interval"},
    "training.batch_size": {"optimizer", "budget"},
    "training.gradient_accumulation_steps": {"optimizer", "budget"},
    "training.global_batch_size": {"budget", "execution"},
    "training.seq_len": {"budget"},
    "model.shared_expert_chunk_tokens": set(),
}
# Ramps end in tokens: a schedule of the model is judged by what it becomes, under the budget.
RULE = {
    name: "budget"
    for prefix in ("top_k_primary_weight", "gate", "expert_diversity")
    for name in (f"model.{prefix}_schedule_ratio", f"model.{prefix}_schedule_steps")
}
# What stays when the field alone is declared as the treatment.
BEYOND = {
    **ALSO,
    "training.batch_size": {"budget"},
    "training.gradient_accumulation_steps": {"budget"},
    "training.global_batch_size": {"budget"},
    "data.overlap_limit": {"evaluation"},
}
# Free themselves: their sets are judged as what they hold.
THROUGH = {
    "data.held_out": "evaluation",
    "data.overlap_limit": "evaluation",
    "data.stream_eval_documents": "evaluation",
    "data.eval_tokens_path": "evaluation",
}
SOME = ("model.mlp_type", "optimizer.name", "training.batch_size")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("specs")


def other_spec(document: dict[str, Any], leaf: SchemaLeaf) -> RunSpec | None:
    """A valid spec with another value there; what contradicts it is left to its default."""
    for value in other_values(leaf.annotation, value_at(document, leaf.path)):
        changed = put(document, leaf.path, value)
        for _ in range(4):
            try:
                spec = RunSpec.model_validate(without_nulls(changed))
            except ValidationError as error:
                cause = error.errors()[0].get("ctx", {}).get("error")
                faults = cause.faults if isinstance(cause, UserError) else ()
                places = [fault.place.split(".") for fault in faults]
                others = [place for place in places if ".".join(place) != leaf.name]
                if not others:
                    break
                for section, *field in others:
                    if field and field[0] in changed.get(section, {}):
                        changed[section][field[0]] = None
                continue
            if value_at(spec.model_dump(mode="json"), leaf.path) == value:
                return spec
            break
    return None


@cache
def built(text: str, folder: Path) -> tuple[Foreseen, dict[str, Any]]:
    """What is foreseen of a spec, and the effective facts of the run that it begins."""
    spec, store = RunSpec.model_validate_json(text), Store(folder / "mlruns")
    record = new_record(build(spec, store), ["run"])
    record.status, record.effective.budget.finished = "FINISHED", True
    facts = facts_of_record(record, None)
    effective = {
        leaf: value
        for leaf, value in facts.items()
        if leaf.startswith("effective.") and leaf not in POINT_LEAVES and ".interval." not in leaf
    }
    return foresee(spec, store), effective


def judged(a: RunSpec, b: RunSpec, folder: Path, treatment: list[str]) -> Judgement:
    made = [built(spec.model_dump_json(exclude_none=True), folder) for spec in (a, b)]
    points = [set(foreseen.points or ()) for foreseen, _ in made]
    at = max(points[0] & points[1], default=None)
    facts = [
        {**facts_of_spec(spec, foreseen, at), **copy.deepcopy(effective)}
        for spec, (foreseen, effective) in zip((a, b), made, strict=True)
    ]
    return judge(*facts, treatment=treatment)


@pytest.mark.parametrize(
    ("kind", "only"),
    [
        ("token_routed", SOME),
        *(
            pytest.param(kind, (), marks=pytest.mark.slow)
            for kind in ("token_routed", "dense", "learned_router", "muon", "tokens")
        ),
    ],
)
def test_each_field_shows_by_its_rule_and_is_excused_as_the_treatment(
    kind: str, only: tuple[str, ...], folder: Path
) -> None:
    spec = KINDS[kind](folder)
    document = spec.model_dump(mode="json")
    tried = 0
    wrong: list[Any] = []
    for leaf in schema_leaves(RunSpec):
        if (only and leaf.name not in only) or (kind, leaf.name) == ("tokens", "data.dataset"):
            continue  # text in place of shards has another tokenizer too
        other = other_spec(document, leaf)
        if other is None:
            continue
        tag = tag_of(leaf.name)
        try:
            judgement = judged(spec, other, folder, [])
        except UserError:
            continue  # no such file, tokenizer or compiler here
        tried += 1
        total = "effective.parameters.total"
        differing = judgement.with_outcome("differs", "missing", "studied")
        found = {one.rule for one in differing if one.path != total}
        own = RULE.get(leaf.name) or tag.rule or THROUGH.get(leaf.name)
        silent = leaf.name in SAME_IN_EFFECT
        if tag.kind == "judged" and own not in found and not silent:
            wrong.append((leaf.name, "is silent"))
        if beyond := found - {own} - ALSO.get(leaf.name, set()):
            wrong.append((leaf.name, beyond, [one.path for one in differing]))
        if any(one.path == total for one in differing) and own not in ("model", "tokenizer"):
            wrong.append((leaf.name, total))
        if tag.kind == "free" or not found:
            continue
        declared = judged(spec, other, folder, [leaf.name])
        counted = declared.with_outcome("differs", "missing")
        if {one.rule for one in counted} - {"parameters"} - BEYOND.get(leaf.name, set()):
            wrong.append((leaf.name, "declared", [one.path for one in counted]))
        if own in found and not declared.with_outcome("studied"):
            wrong.append((leaf.name, "is not studied"))
    assert not wrong, "\n".join(map(str, wrong))
    assert tried >= (len(only) or 55)
