"""A run of another trainer as its source tells it; how values and series are looked up there."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from workbench.errors import Fault, UserError, did_you_mean
from workbench.importing.draft import Draft
from workbench.importing.mapping import MapFile, NumberOrigin, Origin
from workbench.spec.load import plain_value
from workbench.track.record import Status

# What trackers write for a setting that is not there: it is not known what that means here.
NOTHING = ("", "None", "none", "null", "nan", "NaN", "N/A")


class Reading(NamedTuple):
    """One number of a series as it stands there."""

    step: int
    value: float
    place: str


@dataclass
class ForeignRun:
    """What a source says of one run.

    `names` are all that it could be asked for, by kind (param, tag, column, metric), `texts` the
    values of those that are set; `series` the readings by name, in the order of there.
    """

    name: str
    identity: str
    place: str
    status: Status = "UNKNOWN"
    started: str | None = None
    ended: str | None = None
    texts: dict[str, dict[str, str]] = field(default_factory=dict)
    series: dict[str, list[Reading]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    originals: dict[str, bytes] = field(default_factory=dict)


class Reader:
    """Looks values and series up, and gathers what is wrong."""

    def __init__(self, run: ForeignRun, file: MapFile) -> None:
        self.run, self.file, self.map = run, file, file.map
        self.faults: list[Fault] = []
        self.again = 0  # numbers of steps that were trained again, of the earlier branch

    def fault(self, path: str, message: str, value: Any = None, allowed: str | None = None) -> None:
        """Notes that something is wrong with an entry of the mapping file."""
        self.faults.append(Fault(self.file.place(path), message, value, allowed))

    def text(self, path: str, origin: Origin) -> Any:
        """What stands at an origin, or None where nothing does."""
        assert origin.asks
        kind, name = origin.asks
        known = self.run.names.get(kind)
        if known is None:
            self.fault(path, f"{self.run.place} has no {kind}s", name, self._kinds())
            return None
        if name not in known:
            self._absent(path, kind, name, known)
            return None
        text = self.run.texts.get(kind, {}).get(name)
        if origin.values is not None and text is not None:
            if text not in origin.values:
                message = f"values: does not say what this {kind} of run {self.run.name} means"
                self.fault(path, message, text, ", ".join(origin.values))
                return None
            return _Given(origin.values[text])
        return None if text is None or text.strip() in NOTHING else text.strip()

    def _absent(self, path: str, kind: str, name: str, known: Sequence[str]) -> None:
        hint = did_you_mean(name, known)
        message = f"there is no {kind} {name!r} in {self.run.place}.{hint}".rstrip(".")
        self.fault(path, message, None, ", ".join(known[:40]) or f"it has no {kind}s at all")

    def _kinds(self) -> str:
        return ", ".join(f"{kind}:" for kind in self.run.names)

    def typed(self, path: str, origin: Origin, kind: Any) -> tuple[bool, Any]:
        """Whether a value is known, and the value as the field takes it."""
        if origin.items is not None:
            parts = [self.typed(path, item, TypeAdapter(Any)) for item in origin.items]
            if not all(known for known, _ in parts):
                return False, None
            return self._checked(path, [value for _, value in parts], kind)
        if origin.asks is None:
            return self._checked(path, origin.value, kind)
        found = self.text(path, origin)
        if found is None:
            return False, None
        return self._checked(path, found.value if isinstance(found, _Given) else found, kind)

    def _checked(self, path: str, value: Any, kind: TypeAdapter[Any]) -> tuple[bool, Any]:
        """The first reading of a value that fits its field: as it is, or what its text says."""
        error: ValidationError | None = None
        for reading in _readings(value):
            try:
                return True, kind.validate_python(reading, strict=True)
            except ValidationError as first:
                error = error or first
        assert error
        said = error.errors()[0]["msg"]
        self.fault(path, f"{said[:1].lower()}{said[1:]}", value)
        return False, None

    def readings(self, path: str, origin: NumberOrigin) -> list[Reading]:
        """A series, of each step once, its NaNs as the mapping file says."""
        kind = "metric" if origin.metric is not None else "column"
        return self.series(path, kind, origin.there)

    def series(self, path: str, kind: str, name: str) -> list[Reading]:
        """The series of this name, as `readings`."""
        known = self.run.names.get(kind)
        if known is None:
            self.fault(path, f"{self.run.place} has no {kind}s", name, self._kinds())
            return []
        if name not in known:
            self._absent(path, kind, name, known)
            return []
        kept: list[Reading] = []
        for reading in self.run.series.get(name, []):
            if math.isnan(reading.value) and self.map.nan != "measured":
                if self.map.nan == "missing":
                    continue
                message = f"{name} is NaN: a measured NaN, or a number that was not measured?"
                fault = Fault(reading.place, message, None, "nan: measured or nan: missing")
                self.faults.append(fault)
                return []
            if kept and reading.step <= kept[-1].step and self.map.repeated_steps == "error":
                again = reading.step == kept[-1].step
                message = f"{name} stands twice at this step" if again else "the steps go back"
                allowed = "repeated_steps: last, where a resumed run wrote them again"
                self.faults.append(Fault(reading.place, message, reading.step, allowed))
                return []
            while kept and kept[-1].step >= reading.step:
                kept.pop()
                self.again += 1
            kept.append(reading)
        return kept


class _Given(NamedTuple):
    """A value that the mapping file gives in the place of a text."""

    value: Any


def _readings(value: Any) -> Iterator[Any]:
    """A value, then what it says where it is a text: a number, a word for true, a list."""
    yield value
    yield from _as_float(value)
    if isinstance(value, list):
        yield [plain_value(one, "a value") if isinstance(one, str) else one for one in value]
    if not isinstance(value, str):
        return
    plain = plain_value(value, "a value")
    if isinstance(plain, float) and plain.is_integer():
        yield int(plain)  # as tables of numbers write whole ones
    if plain is not None:
        yield plain
    yield from _as_float(plain)
    if value[:1] in "[(" and value[-1:] in ")]":
        yield [plain_value(part.strip(), "a value") for part in value[1:-1].split(",") if part]


def _as_float(value: Any) -> Iterator[float]:
    """A whole number as a float, where one holds it."""
    if isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            yield float(value)


def type_of(info: Any) -> TypeAdapter[Any]:
    """What checks the values of a field of a model."""
    kind: Any = info.annotation
    for limit in info.metadata:
        kind = Annotated[kind, limit]
    return TypeAdapter(kind)


def unique_names(drafts: Sequence[Draft]) -> Mapping[str, Draft]:
    """The drafts by their names.

    Raises:
        UserError: two have one name.
    """
    found: dict[str, Draft] = {}
    for draft in drafts:
        if draft.name in found:
            message = f"two runs would have it: {found[draft.name].source} and {draft.source}"
            raise UserError.at("name", message, draft.name, "--run with one of them, or --name")
        found[draft.name] = draft
    return found


def pick(
    runs: Sequence[str], place: str, chosen: Sequence[str] | None, name: str | None
) -> list[str]:
    """The runs asked for; `name` is for one alone.

    Raises:
        UserError: there is none of a name, or several would have one.
    """
    for one in chosen or []:
        if one not in runs:
            hint = did_you_mean(one, runs)
            message = f"there is no such run in {place}.{hint}".rstrip(".")
            raise UserError.at("--run", message, one, ", ".join(runs[:40]))
    picked = [run for run in runs if not chosen or run in chosen]
    if name is not None and len(picked) > 1:
        message = f"{len(picked)} runs cannot have one name"
        raise UserError.at("--name", message, name, "--run with one of them")
    return picked
