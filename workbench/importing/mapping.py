"""The mapping file of an import: which of another trainer's names means what here, in which unit.

Nothing is guessed from a name. A number that the file does not speak of is left out, and a unit, or
what else is in a loss, has to be said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from workbench.compare.facts import spec_leaves
from workbench.errors import Fault, UserError, did_you_mean
from workbench.spec.load import Source, place_of, read_mapping, validate_as
from workbench.spec.run import Section

# What the numbers are called here -> the units that they may have there, each with what makes it
# the unit of this package.
_NLL: dict[str, Callable[[float], float]] = {
    "nats/token": lambda x: x,
    "bits/token": lambda x: x * math.log(2),
    "perplexity": lambda x: math.log(x) if x < math.inf else x,
}
_BYTES: dict[str, Callable[[float], float]] = {
    "bytes": lambda x: x,
    "MB": lambda x: x * 1e6,
    "GB": lambda x: x * 1e9,
    "MiB": lambda x: x * 2**20,
    "GiB": lambda x: x * 2**30,
}
UNITS: dict[str, dict[str, Callable[[float], float]]] = {
    "nll": _NLL,
    "bits_per_byte": {"bits/byte": lambda x: x, "nats/byte": lambda x: x / math.log(2)},
    "train/nll": _NLL,
    "train/objective": _NLL,
    "grad_norm": {"1": lambda x: x},
    "tokens_per_s": {"tokens/s": lambda x: x, "ktokens/s": lambda x: x * 1e3},
    "peak_memory_bytes": _BYTES,
}
METRICS = ("train/nll", "train/objective", "grad_norm")
RESULTS = ("tokens_per_s", "peak_memory_bytes")
_IS_NLL = ("nll", "train/nll")

RUN = "{run}"  # stands for a run's name

# Settings that an import decides by itself, or that no other trainer can have.
_NOT_SETTINGS = ("name", "notes", "evaluation.sets", "data.held_out")
# Facts that someone can know who only looked; a hash that this package defines is not among them.
FACTS = (
    *(f"tokenizer.{name}" for name in ("name", "vocab_size")),
    *(f"data.{name}" for name in ("source", "train_documents", "train_tokens", "train_bytes")),
    *(f"parameters.{name}" for name in ("total", "active", "embedding", "experts")),
    *(f"optimizer.{name}" for name in ("sequences_per_update", "warmup_steps")),
    *(f"precision.{name}" for name in ("compute_dtype", "master_dtype", "matmul")),
    *(
        f"hardware.{name}"
        for name in ("device_type", "device_name", "device_count", "threads", "torch", "driver")
    ),
    *(
        f"execution.{name}"
        for name in ("loss_backend", "dispatch", "attention", "compiled", "parallel")
    ),
)
SET_FACTS = ("documents", "unit", "scored_tokens", "bytes", "context")


def _one_of(names: str) -> PydanticCustomError:
    return PydanticCustomError(
        "one_of", "exactly one of these is needed: {names}", {"names": names}
    )


class Origin(Section):
    """Where a value comes from: from this file itself, or from the run it is imported from.

    `values` translates what stands there; a text that it does not name is an error.
    """

    value: Any = None
    param: str | None = None
    tag: str | None = None
    column: str | None = None
    items: list[Origin] | None = None
    values: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        """A bare value stands for itself, a list for its items."""
        if isinstance(given, list):
            return {"items": given}
        return given if isinstance(given, dict | Origin) else {"value": given}

    @model_validator(mode="after")
    def _one(self) -> Origin:
        if len(self.model_fields_set & {"value", "param", "tag", "column", "items"}) != 1:
            raise _one_of("a value, param:, tag:, column:")
        return self

    @property
    def asks(self) -> tuple[str, str] | None:
        """The kind of place it is looked up in, and the name there; None: nowhere."""
        for kind in ("param", "tag", "column"):
            if (name := getattr(self, kind)) is not None:
                return kind, name
        return None


class NumberOrigin(Section):
    """Which series of there is a number, in which unit, and what else is in it."""

    metric: str | None = None
    column: str | None = None
    unit: str
    contains: (
        list[Literal["label_smoothing", "z_loss", "balance_loss", "diversity_loss", "other"]] | None
    ) = None

    @model_validator(mode="after")
    def _one(self) -> NumberOrigin:
        if (self.metric is None) == (self.column is None):
            raise _one_of("metric:, column:")
        return self

    @property
    def there(self) -> str:
        """The name there."""
        return self.metric or self.column or ""


class EvaluationMap(Section):
    """The numbers of one evaluation set, and what is known of how they were made."""

    nll: NumberOrigin | None = None
    bits_per_byte: NumberOrigin | None = None
    facts: dict[str, Origin] = Field(default_factory=dict)


class StepMap(Section):
    """How the steps of there count updates: their number plus `offset`."""

    column: str = "step"
    offset: Annotated[int, Field(ge=0)] = 0


class TokensMap(Section):
    """Tokens consumed: so many for each update, or as a series says."""

    per_step: Origin | None = None
    metric: str | None = None
    column: str | None = None

    @model_validator(mode="after")
    def _one(self) -> TokensMap:
        if len(self.model_fields_set) != 1:
            raise _one_of("per_step:, metric:, column:")
        return self


class ImportMap(Section):
    """A whole mapping file."""

    name: str = RUN
    runs: Origin | None = None
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    step: StepMap = StepMap()
    tokens: TokensMap | None = None
    status: Origin | None = None
    world_size: Origin | None = None
    repeated_steps: Literal["error", "last"] = "error"
    nan: Literal["error", "measured", "missing"] = "error"
    settings: dict[str, Origin] = Field(default_factory=dict)
    facts: dict[str, Origin] = Field(default_factory=dict)
    metrics: dict[str, NumberOrigin] = Field(default_factory=dict)
    evaluation: dict[str, EvaluationMap] = Field(default_factory=dict)
    results: dict[str, NumberOrigin] = Field(default_factory=dict)


class MapFile:
    """A mapping file that was read, with the place of everything in it and its text."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Raises:
            UserError: it cannot be read, or something in it is wrong; with every fault found.
        """
        self.path = path
        self._source: Source = read_mapping(path)
        self.map = validate_as(ImportMap, self._source.values, self._source)
        self.content = path.read_bytes()
        if faults := list(self._faults()):
            raise UserError(*faults)

    def for_run(self, run: str) -> MapFile:
        """The same file with a run's name in the place of {run} in the names of columns."""
        other = copy(self)
        other.map = ImportMap.model_validate(_with_run(self._source.values, run))
        return other

    def place(self, path: str) -> str:
        """`file:line: path` of something in the file."""
        return place_of(path, self._source)

    def numbers(self) -> Iterator[tuple[str, str, NumberOrigin]]:
        """Every number: its path in the file, the kind that decides its units, and its origin."""
        for name, origin in self.map.metrics.items():
            yield f"metrics.{name}", name, origin
        for name, one in self.map.evaluation.items():
            for kind, number in (("nll", one.nll), ("bits_per_byte", one.bits_per_byte)):
                if number is not None:
                    yield f"evaluation.{name}.{kind}", kind, number
        for name, origin in self.map.results.items():
            yield f"results.{name}", name, origin

    def origins(self) -> Iterator[tuple[str, Origin]]:
        """Every value that may be looked up, with its path in the file."""
        for section in ("settings", "facts"):
            for name, origin in getattr(self.map, section).items():
                yield f"{section}.{name}", origin
        for name, one in self.map.evaluation.items():
            for fact, origin in one.facts.items():
                yield f"evaluation.{name}.facts.{fact}", origin
        tokens = self.map.tokens
        more = {"status": self.map.status, "world_size": self.map.world_size, "runs": self.map.runs}
        more["tokens.per_step"] = tokens.per_step if tokens else None
        yield from ((path, origin) for path, origin in more.items() if origin is not None)

    def _faults(self) -> Iterator[Fault]:
        """What the schema does not tell: names that mean nothing here, units, what is in a loss."""
        settings = [name for name in spec_leaves() if not name.startswith("tracking.")]
        known = {
            "settings": [name for name in settings if name not in _NOT_SETTINGS],
            "facts": FACTS,
            "metrics": METRICS,
            "results": RESULTS,
        }
        for section, names in known.items():
            for name in getattr(self.map, section):
                if name not in names:
                    yield self._unknown(f"{section}.{name}", name, names)
        for name, one in self.map.evaluation.items():
            path = f"evaluation.{name}"
            yield from self._set_faults(path, name)
            for fact in one.facts:
                if fact not in SET_FACTS:
                    yield self._unknown(f"{path}.facts.{fact}", fact, SET_FACTS)
        for path, kind, number in self.numbers():
            units = UNITS.get(kind, {})
            if units and number.unit not in units:
                message = f"{number.there} cannot be measured in it"
                yield Fault(self.place(f"{path}.unit"), message, number.unit, ", ".join(units))
            if kind in _IS_NLL and number.contains is None:
                message = f"what is in {number.there} beside the NLL has to be said"
                allowed = "[] for nothing, else of label_smoothing, z_loss, balance_loss, ..."
                yield Fault(self.place(f"{path}.contains"), message, None, allowed)
        if RUN not in self.map.name and self.map.runs is not None:
            message = "the runs of one file would all have this name"
            yield Fault(self.place("name"), message, self.map.name, "a name with {run} in it")

    def _set_faults(self, path: str, name: str) -> Iterator[Fault]:
        kind, _, own = name.partition(".")
        allowed = "unproven, unproven.NAME, train_split"
        if kind in ("held_out", "contaminated"):
            message = f"nobody measured its overlap with the training text: it is not {kind} here"
            yield Fault(self.place(path), message, name, allowed)
        elif kind not in ("unproven", "train_split") or (kind == "train_split" and own):
            yield Fault(self.place(path), "there is no such kind of evaluation set", name, allowed)
        elif "." in name and not own.replace("-", "").replace("_", "").isalnum():
            message = "the name of a set holds letters, digits, '_' and '-'"
            yield Fault(self.place(path), message, name, allowed)

    def _unknown(self, path: str, name: str, known: Sequence[str]) -> Fault:
        hint = did_you_mean(name, known)
        section = path.removesuffix(f".{name}")
        message = f"nothing that can be imported has this name in {section}.{hint}".rstrip(".")
        return Fault(self.place(path), message, None, ", ".join(known) if len(known) < 30 else None)


def recorded_set(name: str) -> str:
    """What a record calls the set of a mapping file: `held_out.wiki` for `unproven.wiki`; its
    status, which says that nothing was shown of it, makes the name of its numbers."""
    return name.replace("unproven", "held_out", 1) if name.startswith("unproven") else name


def _with_run(tree: Any, run: str) -> Any:
    if isinstance(tree, list):
        return [_with_run(item, run) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: item.replace(RUN, run)
        if key == "column" and isinstance(item, str)
        else _with_run(item, run)
        for key, item in tree.items()
    }


def converted(kind: str, unit: str, value: float) -> float:
    """A number in the unit of this package; NaN stays.

    Raises:
        ValueError: nothing that is measured in this unit has this value.
    """
    return UNITS[kind][unit](value) if value == value else value


def unit_words(kind: str) -> str:
    """The unit that a number has here."""
    return next(iter(UNITS[kind]))
