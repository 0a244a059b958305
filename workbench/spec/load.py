"""Reads a run spec: YAML with `extends`, then `key=value` overrides, then validation.

YAML is read by the 1.2 core rules: `1e-4` is a number, `010` and `1:30` are not, `yes` is a word,
and a key may stand only once. Every value remembers the file and line it came from, so that an
error can name them.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from workbench.errors import Fault, UserError, did_you_mean
from workbench.spec.run import LARGEST, MOST, RunSpec

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}

# A spec is written by hand: more than this is something else, and would take minutes to parse.
MOST_BYTES = 256 << 10
_MOST_FILES = 100  # read for one spec, those it extends counted each time
_MOST_DIGITS = 400
_MOST_LEVELS = 50

Model = TypeVar("Model", bound=BaseModel)

# Fields that hold a path; written relative to the file they stand in.
_PATHS = (
    ("data", "text_file"),
    ("data", "tokens_path"),
    ("data", "eval_tokens_path"),
    ("data", "stream_path"),
    ("tokenizer", "path"),
)


@dataclass
class Source:
    """A merged mapping and, for each dotted path in it, where it was written."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def merge(self, later: Source) -> None:
        """Lays `later` over this: mappings merge, all else is replaced."""
        _merge(self.values, later.values)
        self.places.update(later.places)


def load_spec(path: Path, overrides: list[str] | None = None) -> RunSpec:
    """The validated, resolved spec of a YAML file with `key=value` overrides laid over it.

    Raises:
        UserError: with every fault found; each names file and line (or the override), the field
            path, the value and what is allowed.
    """
    source = read_source(path)
    if is_cluster_plan(source.values):
        message = "this is a cluster plan: wb plan checks it, and nothing here launches it"
        raise UserError.at(str(path), message, None, "a run spec")
    if is_study(source.values):
        name = shlex.quote(str(path))
        message = f"this is a study of several runs: wb study run {name} trains them"
        raise UserError.at(str(path), message, None, "a run spec")
    source.values.setdefault("name", path.stem)
    apply_overrides(source, overrides or [])
    return validate(source)


def is_cluster_plan(values: Mapping[str, Any]) -> bool:
    """Whether a file's values are those of a cluster plan, right or wrong: its sections `parallel`
    and `run` are no run spec's."""
    return "parallel" in values or ("run" in values and "data" not in values)


def is_study(values: Mapping[str, Any]) -> bool:
    """Whether a file's values are those of a study, right or wrong: no run spec has arms."""
    return "arms" in values or {"base", "seeds"} <= values.keys()


def is_run_spec(values: Mapping[str, Any]) -> bool:
    """Whether a file's values are those of a run spec, right or wrong, and not of a study."""
    return not is_study(values) and not {"model", "data", "training"}.isdisjoint(values)


def apply_overrides(source: Source, overrides: list[str]) -> None:
    """Lays command-line `key=value` pairs over the file; a `seed` also marks the run's name."""
    keys = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key or key.count(".") > _MOST_LEVELS:
            raise UserError.at(text, "an override is written key=value", text, "training.steps=10")
        keys.append(key)
        node = _compose(value, f"override {key}")
        given = _construct(node, key, f"override {key}", source.places)
        source.places[key] = f"override {text}"
        tree: Any = given
        for part in reversed(key.split(".")):
            tree = {part: tree}
        anchor(tree, Path.cwd(), source.places)
        _merge(source.values, tree)
    if "seed" in keys and "name" not in keys:
        source.values["name"] = f"{source.values['name']}-s{source.values['seed']}"


def read_source(
    path: Path, chain: tuple[Path, ...] = (), opened: list[Path] | None = None
) -> Source:
    """One YAML file with everything it extends, merged in order, the file itself last.

    `chain` are the files that lead to it, `opened` all that were read before it.
    """
    opened = [] if opened is None else opened
    opened.append(path)
    if len(opened) > _MOST_FILES:
        raise UserError.at(str(opened[0]), f"extends more than {_MOST_FILES} files")
    if "\0" in str(path):
        raise UserError.at(str(chain[-1]), "extends", str(path), "a path without a null byte")
    real = path.resolve()
    if real in chain:
        loop = " -> ".join(p.name for p in (*chain[chain.index(real) :], real))
        raise UserError.at(str(path), f"extends goes round in a circle: {loop}")
    source = read_mapping(path, _wanted_by(chain))
    values, places = source.values, source.places
    anchor(values, real.parent, places)

    bases = values.pop("extends", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        allowed = "a list of paths relative to this file"
        raise UserError.at(places.get("extends", str(path)), "extends", bases, allowed)
    merged = Source()
    for base in bases:
        merged.merge(read_source(real.parent / base, (*chain, real), opened))
    merged.merge(source)
    return merged


def read_mapping(path: Path, wanted_by: str = "") -> Source:
    """The mapping that one YAML file holds, as it stands there; `wanted_by` ends its errors.

    Raises:
        UserError: it cannot be read, or is not a mapping in the YAML of specs.
    """
    node = _compose(_read(path, wanted_by), str(path))
    places: dict[str, str] = {}
    values = _construct(node, "", str(path), places) if node is not None else {}
    if not isinstance(values, dict):
        raise UserError.at(str(path), "a spec is a mapping", type(values).__name__)
    return Source(values, places)


def validate(source: Source) -> RunSpec:
    """The spec of a merged source; null means "not given", so that it can unset an inherited value.

    Raises:
        UserError: with every fault found.
    """
    return validate_as(RunSpec, without_nulls(source.values), source)


def validate_as(model: type[Model], given: dict[str, Any], source: Source) -> Model:
    """`given` as a model of sections; the faults name the places of `source`.

    Raises:
        UserError: with every fault found.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        fields = field_types(model)
        faults = [fault for item in error.errors() for fault in _faults(item, source, fields)]
        raise UserError(*faults) from None


def _wanted_by(chain: tuple[Path, ...]) -> str:
    return f" (extended by {chain[-1].name})" if chain else ""


def _read(path: Path, wanted_by: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            message = f"longer than a spec ever is{wanted_by}"
            raise UserError.at(str(path), message, str(path), f"up to {MOST_BYTES:,} bytes")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 at byte {error.start}{wanted_by}"
        raise UserError.at(str(path), message, str(path)) from None
    except IsADirectoryError:
        message = f"a folder, not a spec{wanted_by}"
        raise UserError.at(str(path), message, str(path), "a YAML file") from None
    except OSError as error:
        hint = ""
        if path.parent.is_dir():
            hint = did_you_mean(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        reason = (error.strerror or "unreadable").lower()
        message = f"{reason}{wanted_by}.{hint}".rstrip(".")
        raise UserError.at(str(path), message, str(path), "a YAML file") from None


def _compose(text: str, place: str) -> yaml.Node | None:
    level = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            mark = event.start_mark
            where = f"{place}:{mark.line + 1}" if mark else place
            level += isinstance(event, yaml.CollectionStartEvent)
            level -= isinstance(event, yaml.CollectionEndEvent)
            if level > _MOST_LEVELS:  # what is deeper takes the parser minutes
                raise UserError.at(where, "nested too deeply to be a spec")
            if isinstance(event, yaml.AliasEvent):
                message = "an alias cannot stand in a spec; share values with extends"
                raise UserError.at(where, message, f"*{event.anchor}")
            if tag := getattr(event, "tag", None):
                raise UserError.at(where, "a tag cannot stand in a spec", tag, "plain values")
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except UserError:
        raise
    except (ValueError, OverflowError) as error:  # an escape such as "\\U00110000"
        raise UserError.at(place, f"not YAML: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{place}:{mark.line + 1}" if mark else place
        raise UserError.at(where, f"not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError.at(place, f"not YAML: {error}".splitlines()[0]) from None


def _construct(node: yaml.Node | None, path: str, file: str, places: dict[str, str]) -> Any:
    """Plain Python values of a YAML node; `places` gains file:line of every key."""
    if node is None:
        return None
    if path:
        places[path] = f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, f"{file}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, f"{path}[{i}]", file, places) for i, item in enumerate(node.value)]
    values: dict[str, Any] = {}
    assert isinstance(node, yaml.MappingNode)
    for key_node, value_node in node.value:
        where = f"{file}:{key_node.start_mark.line + 1}"
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key == "<<":
            raise UserError.at(where, "a key is a plain word here; use extends to share values")
        _require_text(key, where)
        if key in values:
            raise UserError.at(where, f"the key {key!r} stands twice in one mapping")
        inner = f"{path}.{key}" if path else key
        values[key] = _construct(value_node, inner, file, places)
        places[inner] = where
    return values


def _scalar(node: yaml.ScalarNode, where: str) -> Any:
    _require_text(node.value, where)
    if node.style in ("'", '"', "|", ">"):
        return node.value
    return plain_value(node.value, where)


def plain_value(text: str, where: str) -> Any:
    """What an unquoted word stands for: null, a boolean, a number, or the word itself.

    Raises:
        UserError: a number of too many digits; it names `where`.
    """
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        if len(text) > _MOST_DIGITS:
            raise UserError.at(where, "a number of too many digits", f"{text[:20]}...")
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text)
    return _SPECIAL.get(text.lower(), text)


def _require_text(text: str, where: str) -> None:
    """Nothing, where files and terminals can hold the text.

    Raises:
        UserError: it holds half a surrogate pair, or a null byte, which ends every path.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"half a surrogate pair at character {error.start + 1} is no text"
        raise UserError.at(where, message) from None
    if "\0" in text:
        raise UserError.at(where, f"a null byte at character {text.index(chr(0)) + 1} is no text")


def _merge(base: dict[str, Any], later: dict[str, Any]) -> None:
    for key, value in later.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def anchor(
    values: dict[str, Any], folder: Path, places: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Makes every path of a tree of values absolute: relative ones are taken from `folder`."""
    data = values.get("data")
    further = data.get("held_out") if isinstance(data, dict) else None
    holders = [(values.get(section), key, f"{section}.{key}") for section, key in _PATHS]
    for index, one in enumerate(further if isinstance(further, list) else []):
        holders.append((one, "path", f"data.held_out[{index}].path"))
    for holder, key, name in holders:
        if isinstance(holder, dict) and isinstance(holder.get(key), str):
            try:
                holder[key] = str(Path(folder, Path(holder[key]).expanduser()))
            except RuntimeError:
                place = f"{places[name]}: {name}" if name in places else name
                raise UserError.at(place, "this user has no home folder", holder[key]) from None


def without_nulls(value: Any) -> Any:
    """A tree of mappings without the keys that are null, that is, not given."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _faults(item: Any, source: Source, fields: dict[str, Any]) -> list[Fault]:
    """The faults of one Pydantic error, in the project's words."""
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return [
            Fault(place_of(fault.place, source), fault.message, fault.value, fault.allowed)
            for fault in cause.faults
        ]
    path = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
    shown = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]
    ).removeprefix(".")
    place = place_of(path, source).removesuffix(path) + shown
    value = item["input"]
    match item["type"]:
        case "extra_forbidden":
            return [Fault(place, _unknown_key(path, fields), None, None)]
        case "missing":
            allowed = None if path != shown else _allowed(path, fields)
            return [Fault(place, "is needed and not given", None, allowed)]
        case _:
            said = item["msg"][:1].lower() + item["msg"][1:]
            return [Fault(place, said, value, _allowed(path, fields))]


def place_of(path: str, source: Source) -> str:
    """`file:line: field.path`, or the nearest written parent of a field that was not written."""
    known = path
    while known and known not in source.places:
        known = known.rpartition(".")[0]
    return f"{source.places[known]}: {path}" if known else path


def _unknown_key(path: str, fields: dict[str, Any]) -> str:
    """What is wrong with a key that no section has, and where it may belong."""
    section, _, key = path.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in fields if name.rpartition(".")[0] == section]
    siblings += [name.split(".")[0] for name in fields if "." in name] if not section else []
    hint = did_you_mean(key.replace("-", "_"), siblings)
    elsewhere = [name for name in fields if name.rpartition(".")[2] == key.replace("-", "_")]
    if not hint and elsewhere:
        hint = f" Did you mean {elsewhere[0]!r}?"
    return f"there is no such key.{hint}"


def field_types(root: type[BaseModel] = RunSpec) -> dict[str, Any]:
    """Every leaf field of a model of sections as dotted path -> its annotation."""
    leaves: dict[str, Any] = {}

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, info in model.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                walk(info.annotation, f"{prefix}{name}.")
            else:
                leaves[prefix + name] = info

    walk(root, "")
    return leaves


def _allowed(path: str, fields: dict[str, Any]) -> str | None:
    """What a field accepts, in words."""
    info = fields.get(path)
    if info is None:
        return "a mapping of keys"
    return _type_words(info.annotation) + _limits(info.metadata)


def _limits(metadata: list[Any]) -> str:
    """` >= 1 < 2` for the bounds of a field, without those that every number has."""
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    bounds = [item for entry in metadata for item in getattr(entry, "metadata", [entry])]
    return "".join(
        f" {sign} {getattr(bound, name)}"
        for bound in bounds
        for name, sign in signs
        if getattr(bound, name, None) not in (None, MOST, LARGEST, -LARGEST)
    )


def _type_words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " | ".join(
            str(a).lower() if isinstance(a, bool) else str(a) for a in get_args(annotation)
        )
    if origin in (Union, UnionType):
        return " | ".join(_type_words(a) for a in get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        return _type_words(annotation.__origin__) + _limits(list(annotation.__metadata__))
    if origin is list:
        return f"a list of {_type_words(get_args(annotation)[0])}"
    if origin is dict:
        text = get_args(annotation)[1] is str
        return "a mapping of text to text" if text else "a mapping of names to mappings"
    names = {int: "an integer", float: "a number", bool: "true | false", str: "text"}
    names[NoneType] = "null"
    return names.get(annotation, str(annotation))
