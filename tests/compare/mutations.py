"""Every leaf of a record, found by walking its models, and other values for each of them."""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from workbench.spec.run import RunSpec
from workbench.track.record import Effective, NotApplicable, SetFacts

Path = tuple[str, ...]


@dataclass(frozen=True)
class SchemaLeaf:
    """A value that the schema knows: where it stands, and of which type it is."""

    path: Path
    annotation: Any

    @property
    def name(self) -> str:
        """The name that the checklist has for it."""
        return ".".join(self.path)


def parts_of(annotation: Any) -> list[Any]:
    """The types that a value may have, one by one."""
    if get_origin(annotation) is Annotated:
        return parts_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for one in get_args(annotation) for part in parts_of(one)]
    return [annotation]


def schema_leaves(model: type[BaseModel], prefix: Path = ()) -> Iterator[SchemaLeaf]:
    """The leaves of a model: a section that is always there is gone into, all else is a value."""
    for name, annotation in typing.get_type_hints(model, include_extras=True).items():
        if name not in model.model_fields:
            continue
        (first, *more) = parts_of(annotation)
        is_section = isinstance(first, type) and issubclass(first, BaseModel)
        if is_section and not more and first is not NotApplicable:
            yield from schema_leaves(first, (*prefix, name))
        else:
            yield SchemaLeaf((*prefix, name), annotation)


def record_leaves(document: dict[str, Any]) -> list[SchemaLeaf]:
    """The leaves of spec and effective facts, and of every evaluation set in this record."""
    found = [SchemaLeaf(("spec", *one.path), one.annotation) for one in schema_leaves(RunSpec)]
    for one in schema_leaves(Effective, ("effective",)):
        if one.path != ("effective", "evaluation"):
            found.append(one)
            continue
        for name in document["effective"]["evaluation"]:
            found += schema_leaves(SetFacts, (*one.path, name))
    return found


def value_at(document: dict[str, Any], path: Path) -> Any:
    for part in path:
        document = document[part]
    return document


def other_values(annotation: Any, value: Any) -> list[Any]:
    """Values of the type of this one that are not it; none of null, which has none."""
    found: list[Any] = []
    for kind in parts_of(annotation):
        if get_origin(kind) is Literal:
            found += get_args(kind)
    if isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int):
        found += [value + 1, 2 * value, 2 * value + 2, max(1, value // 2), 1, 3]
    elif isinstance(value, float):
        found += [value / 2, value * 1.5 + 0.125, 0.25]
    elif isinstance(value, str) and len(found) < 2:
        found.append(value + "x")
    elif isinstance(value, list):
        found += [value[:-1], value[::-1]] if value else [["other"]]
        found += [[item / 2 for item in value]] if all(isinstance(i, float) for i in value) else []
    elif isinstance(value, dict):
        found.append(
            {"not_applicable": "for another reason"}
            if "not_applicable" in value
            else {**value, "other": next(iter(value.values()), 1)}
        )
    if value is None:
        return []
    return [one for one in found if one != value or type(one) is not type(value)]


def put(document: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy of the document with another value at a path."""
    changed = copy.deepcopy(document)
    value_at(changed, path[:-1])[path[-1]] = value
    return changed


def removed(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """A copy of the document without what stands at a path."""
    changed = copy.deepcopy(document)
    del value_at(changed, path[:-1])[path[-1]]
    return changed
