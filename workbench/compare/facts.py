"""Fact mappings: everything that is known of one run or one spec, flat, leaf by leaf.

A leaf is a dotted name: `optimizer.lr` of the resolved spec, `effective.precision.matmul` of what
ran. A missing key, or None for an effective leaf, is a fact that is not known; None for a leaf of
the spec means that the setting does not apply, where the schema knows of such a thing. The rules
see nothing but these mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from workbench.compare.budgets import BYTES, TOKENS, same_in_bytes
from workbench.compare.held_out import refusals
from workbench.errors import Fault, UserError
from workbench.spec.checklist import tag_of
from workbench.spec.datasets import BY_SHARDS
from workbench.spec.foreseen import Foreseen
from workbench.spec.run import RunSpec
from workbench.track.record import (
    COMPILER_COUNTS,
    NOT_COMPILED,
    Effective,
    Point,
    RunRecord,
    SetFacts,
)

Facts = Mapping[str, Any]

EVALUATION = "effective.evaluation."

ORDER_DIGEST = "effective.data.order_digest"

# What a comparison adds, for the point at which two runs are compared.
POINT_LEAVES = (
    TOKENS,
    BYTES,
    "effective.budget.lr_trace",
    "effective.budget.decay_tokens",
    ORDER_DIGEST,
)

# What is added for a set that no claim may rest on: the reason, and a fact that is not known.
PROOF = "proof"

# What is added for a set whose NLL at that point is not finite: null, a fact that is not known.
FINITE = "finite_nll"

_NO_POINT = {"not_applicable": "the runs have no evaluation point in common"}
_NO_DECAY = {"not_applicable": "the learning rate is constant after warm-up"}
_NOT_EVALUATED = {"not_applicable": "this run does not evaluate the set"}


@cache
def spec_leaves() -> tuple[str, ...]:
    """Every leaf of `RunSpec`, in the order of its fields."""
    return tuple(_schema_leaves(RunSpec))


@cache
def nullable_leaves() -> frozenset[str]:
    """The leaves of `RunSpec` that do not apply to every run, and are null where they do not."""
    return frozenset(leaf for leaf, field in _schema_fields(RunSpec) if _takes_null(field))


@cache
def effective_leaves() -> tuple[str, ...]:
    """Every effective leaf that does not belong to an evaluation set."""
    recorded = [f"effective.{leaf}" for leaf in _schema_leaves(Effective) if leaf != "evaluation"]
    return (*recorded, *POINT_LEAVES)


def set_leaves(name: str) -> tuple[str, ...]:
    """Every leaf of the evaluation set `name`."""
    return tuple(f"{EVALUATION}{name}.{leaf}" for leaf in SetFacts.model_fields)


def set_of(leaf: str) -> str | None:
    """The evaluation set that a leaf belongs to; names of sets may hold dots."""
    if not leaf.startswith(EVALUATION):
        return None
    return leaf.removeprefix(EVALUATION).rpartition(".")[0]


def facts_of_record(record: RunRecord, point: Point | None) -> dict[str, Any]:
    """The facts of a run at one of its evaluation points.

    A setting that is null in the record, and would not be in a spec of today, is not known there.
    Without a point (the two runs have none in common) the tokens are not known, so that nothing is
    compared by accident. A run that did not reach FINISHED is not finished, whatever it recorded.

    Raises:
        UserError: the record holds leaves that this version of the checklist has no rule for.
    """
    facts = dict(_spec_facts(record.spec))
    for leaf in _unresolved(record):
        del facts[leaf]
    _resolve_batch(facts, record)
    for part, values in _effective(record).model_dump(mode="json").items():
        named = values if part == "evaluation" else {"": values}
        for name, leaves in named.items():
            prefix = f"effective.{part}.{name}." if name else f"effective.{part}."
            facts |= {prefix + leaf: value for leaf, value in leaves.items()}

    if record.status not in ("FINISHED", "UNKNOWN"):
        facts["effective.budget.finished"] = False
    facts["effective.budget.decay_tokens"] = _decay_tokens(facts, record.total_tokens)
    facts[TOKENS] = point.tokens if point else None
    facts[BYTES] = point.bytes if point else None
    facts["effective.budget.lr_trace"] = point.lr_trace if point else _NO_POINT
    facts[ORDER_DIGEST] = point.order_digest if point else _NO_POINT
    facts |= _refused_sets(record.effective.evaluation, facts)
    _refuse_unknown(facts, record.name)
    return facts


def facts_of_spec(spec: RunSpec, foreseen: Foreseen, at: int | None) -> dict[str, Any]:
    """The facts of a spec before it runs: its own leaves, and the effective leaves foreseen.

    `at` is the point to compare at, None where there is no common one; it plays no part for a run
    whose end is not known. What is left out is not yet known.

    Raises:
        UserError: `foreseen` names a leaf that has no rule.
    """
    facts = dict(_spec_facts(spec.model_dump(mode="json")))
    facts["training.batch_size"] = spec.micro_batch_size
    if (ends := _decay_tokens(facts, spec.total_tokens)) is not None:
        facts["effective.budget.decay_tokens"] = ends
    facts |= foreseen.facts
    if foreseen.points is not None:
        facts[TOKENS] = at
        no_point = dict.fromkeys(("effective.budget.lr_trace", ORDER_DIGEST), _NO_POINT)
        facts |= no_point if at is None else foreseen.at(at)
    sets: dict[str, dict[str, Any]] = {}
    for leaf, value in foreseen.facts.items():
        if (name := set_of(leaf)) is not None:
            sets.setdefault(name, {})[leaf.rpartition(".")[2]] = value
    facts |= _refused_sets({k: SetFacts.model_validate(v) for k, v in sets.items()}, facts)
    _refuse_unknown(facts, spec.name)
    return facts


def all_leaves(a: Facts, b: Facts) -> tuple[str, ...]:
    """Every leaf that the schema or either mapping names: what both lack is not overlooked."""
    sets = dict.fromkeys([*_sets_asked_for(a), *_sets_asked_for(b)])
    for leaf in (*a, *b):
        if (name := set_of(leaf)) is not None:
            sets[name] = None
    evaluated = (leaf for name in sets for leaf in set_leaves(name))
    return tuple(dict.fromkeys((*spec_leaves(), *effective_leaves(), *evaluated, *a, *b)))


def value_of(facts: Facts, leaf: str) -> tuple[bool, Any]:
    """Whether the leaf is there, and its value.

    A set that the run was not asked to evaluate cannot have facts: they are not applicable.
    """
    if leaf in facts:
        return True, facts[leaf]
    name = set_of(leaf)
    asked = facts.get("evaluation.sets")
    if name is not None and isinstance(asked, list | tuple) and name not in asked:
        return True, _NOT_EVALUATED
    return False, None


def known_at(facts: Facts, leaf: str) -> bool:
    """Whether the leaf has a value, or is a setting that does not apply."""
    present, value = value_of(facts, leaf)
    return present and (is_known(value) or (value is None and leaf in nullable_leaves()))


def is_known(value: Any) -> bool:
    """Whether a value is known: None and NaN are not, at any depth."""
    if isinstance(value, Mapping):
        return all(is_known(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(is_known(item) for item in value)
    return value is not None and value == value


def same(a: Any, b: Any) -> bool:
    """Whether two values are one value: 1 is 1.0 but not True; mappings have no order."""
    if isinstance(a, bool) or isinstance(b, bool):
        return isinstance(a, bool) and isinstance(b, bool) and a == b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def equal_in_effect(a: Facts, b: Facts, leaf: str) -> bool:
    """Whether a leaf of which both values are known is the same in what it does."""
    first, second = value_of(a, leaf)[1], value_of(b, leaf)[1]
    if (decided := same_in_bytes(a, b, leaf)) is not None:
        return decided
    if same(first, second):
        return True
    if leaf == "effective.tokenizer.name":
        # Of shards that name no tokenizer by its content, whatever else they call it.
        sha256, other = (value_of(facts, "effective.tokenizer.sha256")[1] for facts in (a, b))
        return str(sha256).startswith(BY_SHARDS) and same(sha256, other)
    if first is None or second is None or (effect := _EFFECTS.get(leaf)) is None:
        return False
    became = effect(a, first), effect(b, second)
    return None not in became and same(*became)


def _tokens_at_once(facts: Facts, value: Any) -> Any:
    """Of a number of tokens in one block, where 0 is all: those of a micro-batch at most."""
    batch, window = (facts.get(f"training.{name}") for name in ("batch_size", "seq_len"))
    tokens = batch * window if isinstance(batch, int) and isinstance(window, int) else None
    return tokens and min(value or tokens, tokens)


def _entries_at_once(facts: Facts, value: Any) -> Any:
    entries = facts.get("effective.tokenizer.vocab_size")
    return min(value, entries) if isinstance(entries, int) else None


def _floor(facts: Facts, value: Any) -> Any:
    return "never reached" if facts.get("schedule.decay") == "constant" else value


# What a setting comes to in a run, where more than one value comes to the same.
_EFFECTS: dict[str, Callable[[Facts, Any], Any]] = {
    "training.loss_chunk_tokens": _tokens_at_once,
    "training.loss_block_vocab": _entries_at_once,
    "model.shared_expert_chunk_tokens": _tokens_at_once,
    "schedule.min_lr_ratio": _floor,
    "evaluation.sets": lambda _, names: sorted(map(str, names)),
}


def _schema_leaves(model: type[BaseModel]) -> Iterator[str]:
    return (leaf for leaf, _ in _schema_fields(model))


def _schema_fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The leaves of a model whose fields are sections or values, at a depth of two."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from ((f"{name}.{leaf}", one) for leaf, one in section.model_fields.items())
        else:
            yield name, field


def _takes_null(field: FieldInfo) -> bool:
    return type(None) in (field.annotation, *get_args(field.annotation))


def _unresolved(record: RunRecord) -> Iterator[str]:
    """The settings that are null in a record and would have a value in the spec that it makes."""
    recorded = dict(_spec_facts(record.spec))
    if record.imported is not None or None not in recorded.values():
        return  # what an imported run does not know, it leaves out
    try:
        resolved = dict(_spec_facts(record.run_spec.model_dump(mode="json")))
    except ValidationError:
        return  # not a spec of this version: nothing is known of its nulls
    lacking = {
        leaf for leaf, value in recorded.items() if value is None and resolved[leaf] is not None
    }
    # What decides whether a setting exists has to be known itself, and not by a default of today.
    settled = recorded.keys() - lacking
    yield from (leaf for leaf in lacking if settled >= set(tag_of(leaf).exists_by))


def _spec_facts(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in spec.items():
        if isinstance(value, Mapping):
            yield from ((f"{section}.{leaf}", item) for leaf, item in value.items())
        else:
            yield section, value


def _effective(record: RunRecord) -> Effective:
    """The effective facts of a record; one of before compilations were counted had none to count,
    where nothing was compiled."""
    ran = record.effective.execution
    if ran.compiled is not False or ran.model_fields_set & {*COMPILER_COUNTS}:
        return record.effective
    counts = dict.fromkeys(COMPILER_COUNTS, NOT_COMPILED)
    return record.effective.model_copy(update={"execution": ran.model_copy(update=counts)})


def _resolve_batch(facts: dict[str, Any], record: RunRecord) -> None:
    """Puts in what the batch of one process came to, where that of all was asked for: then its own
    is null."""
    asked = record.spec.get("training")
    if not isinstance(asked, dict) or asked.get("batch_size", 1) is not None:
        return
    if asked.get("global_batch_size", "not recorded") is None:
        return
    updates, processes = record.effective.optimizer.sequences_per_update, record.world_size
    parts = facts.get("training.gradient_accumulation_steps")
    if updates and processes and isinstance(parts, int) and parts > 0:
        facts["training.batch_size"] = updates // (parts * processes)
    else:
        facts.pop("training.batch_size", None)


def _refused_sets(evaluated: Mapping[str, SetFacts], facts: Facts) -> dict[str, Any]:
    """Of each set that no claim may rest on: the reason, and a proof that is not known."""
    refused = refusals(evaluated, facts.get("data.dataset"))
    return {
        f"{EVALUATION}{name}.{PROOF}": {"reason": reason, "proof": None}
        for name, reason in refused.items()
    }


def _decay_tokens(facts: Facts, total_tokens: int | None) -> Any:
    return _NO_DECAY if facts.get("schedule.decay") == "constant" else total_tokens


def _sets_asked_for(facts: Facts) -> Iterable[str]:
    asked = facts.get("evaluation.sets")
    return [str(name) for name in asked] if isinstance(asked, list | tuple) else []


def _refuse_unknown(facts: Facts, name: str) -> None:
    faults = []
    for leaf in facts:
        try:
            tag_of(leaf)
        except KeyError:
            message = "this version of the checklist has no rule for this value"
            allowed = "compare with the version of workbench that wrote it"
            faults.append(Fault(f"{name}: {leaf}", message, facts[leaf], allowed))
    if faults:
        raise UserError(*faults)
