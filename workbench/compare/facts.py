"""Fact mappings: everything that is known of one run or one spec, flat, leaf by leaf.

A leaf is a dotted name: `optimizer.lr` of the resolved spec, `effective.precision.matmul` of what
ran. A missing key, or None for an effective leaf, is a fact that is not known; None for a spec leaf
means that the setting does not apply. The rules see nothing but these mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from workbench.compare.held_out import refusals
from workbench.errors import Fault, UserError
from workbench.spec.checklist import tag_of
from workbench.spec.run import RunSpec
from workbench.track.record import Effective, Point, RunRecord, SetFacts

Facts = Mapping[str, Any]

EVALUATION = "effective.evaluation."

# What a comparison adds, for the point at which two runs are compared.
POINT_LEAVES = (
    "effective.budget.tokens",
    "effective.budget.lr_trace",
    "effective.budget.decay_tokens",
    "effective.data.order_digest",
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

    Without a point (the two runs have none in common) the tokens are not known, so that nothing is
    compared by accident. A run that did not reach FINISHED is not finished, whatever it recorded.

    Raises:
        UserError: the record holds leaves that this version of the checklist has no rule for.
    """
    facts = dict(_spec_facts(record.spec))
    for part, values in record.effective.model_dump(mode="json").items():
        named = values if part == "evaluation" else {"": values}
        for name, leaves in named.items():
            prefix = f"effective.{part}.{name}." if name else f"effective.{part}."
            facts |= {prefix + leaf: value for leaf, value in leaves.items()}

    if record.status != "FINISHED":
        facts["effective.budget.finished"] = False
    facts["effective.budget.decay_tokens"] = _decay_tokens(facts, record.total_tokens)
    facts["effective.budget.tokens"] = point.tokens if point else None
    facts["effective.budget.lr_trace"] = point.lr_trace if point else _NO_POINT
    facts["effective.data.order_digest"] = point.order_digest if point else _NO_POINT
    facts |= _refused_sets(record.effective.evaluation, facts)
    _refuse_unknown(facts, record.name)
    return facts


def facts_of_spec(spec: RunSpec, foreseen: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a spec before it runs: its own leaves, and the effective leaves foreseen.

    `foreseen` maps effective leaves to the values that the run would have; what it leaves out is
    not yet known.

    Raises:
        UserError: `foreseen` names a leaf that has no rule.
    """
    facts = dict(_spec_facts(spec.model_dump(mode="json")))
    facts["effective.budget.tokens"] = spec.end_tokens
    facts["effective.budget.decay_tokens"] = _decay_tokens(facts, spec.total_tokens)
    facts |= {leaf: value for leaf, value in foreseen.items() if value is not None}
    sets: dict[str, dict[str, Any]] = {}
    for leaf, value in foreseen.items():
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


def is_known(value: Any) -> bool:
    """Whether an effective value is known: None and NaN are not, at any depth."""
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


def _schema_leaves(model: type[BaseModel]) -> Iterator[str]:
    """The leaves of a model whose fields are sections or values, at a depth of two."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from (f"{name}.{leaf}" for leaf in section.model_fields)
        else:
            yield name


def _spec_facts(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in spec.items():
        if isinstance(value, Mapping):
            yield from ((f"{section}.{leaf}", item) for leaf, item in value.items())
        else:
            yield section, value


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
