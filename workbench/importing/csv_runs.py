"""Runs in a table that another tracker exported: one row for each logged step, in CSV."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import Fault, UserError, did_you_mean, reason_of
from workbench.importing.draft import Draft
from workbench.importing.foreign import ForeignRun, Reading, pick, unique_names
from workbench.importing.mapped import draft_of
from workbench.importing.mapping import RUN, MapFile

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(inf|infinity|nan)", re.I)


def read_csv(
    path: Path, mapping: Path, chosen: list[str] | None = None, name: str | None = None
) -> list[Draft]:
    """What is known of the runs in a table.

    Args:
        path: the table; its first row names the columns.
        mapping: the mapping file.
        chosen: only the runs of these names.
        name: what to call the run, where there is one.

    Raises:
        UserError: a file is not what it should be, or the two do not fit; with every fault found.
    """
    file = MapFile(mapping)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError.at(str(path), reason_of(error), str(path), "a table in CSV") from None
    table = _Table(path, content, file.map.delimiter)
    runs = {run.name: run for run in _runs(table, file)}
    picked = pick(list(runs), path.name, chosen, name)
    faults: list[Fault] = []
    drafts = []
    for key in picked:
        run = runs[key]
        run.originals = {path.name: content}
        try:
            drafts.append(draft_of(run, file.for_run(key), "csv", name))
        except UserError as error:
            faults += [fault for fault in error.faults if fault not in faults]
    if faults:
        raise UserError(*faults)
    return list(unique_names(drafts).values())


class _Table:
    """Rows of texts with the line each begins at."""

    def __init__(self, path: Path, content: bytes, delimiter: str) -> None:
        self.path = path
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError.at(str(path), f"not UTF-8 at byte {error.start}") from None
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        self.rows: list[tuple[int, list[str]]] = []
        line = 1
        try:
            for row in reader:
                if row:
                    self.rows.append((line, row))
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError.at(f"{path}:{line}", f"not a row of a table: {error}") from None
        if len(self.rows) < 2:
            message = "there is no row below the names of the columns"
            raise UserError.at(str(path), message, None, "a table with a row for each logged step")
        self.names = self.rows.pop(0)[1]
        if twice := next((n for n in self.names if self.names.count(n) > 1), None):
            raise UserError.at(f"{path}:1", "a column stands twice", twice)
        for line, row in self.rows:
            if len(row) != len(self.names):
                message = f"{len(row)} cells under {len(self.names)} columns"
                raise UserError.at(
                    f"{path}:{line}", message, None, "a cell for each, or delimiter:"
                )

    def index(self, name: str, place: str) -> int:
        """Where a column stands.

        Raises:
            UserError: there is none of this name.
        """
        if name not in self.names:
            hint = did_you_mean(name, self.names)
            message = f"there is no column {name!r} in {self.path.name}.{hint}".rstrip(".")
            raise UserError.at(place, message, None, ", ".join(self.names[:40]))
        return self.names.index(name)


def _runs(table: _Table, file: MapFile) -> Iterator[ForeignRun]:
    """Every run of the table: by the column that names it, by the columns' names, or the one."""
    step = table.index(file.map.step.column, file.place("step.column"))
    groups: dict[str, list[tuple[int, list[str]]]] = {}
    by_column = file.map.runs and file.map.runs.asks
    if file.map.runs is not None and (not by_column or by_column[0] != "column"):
        raise UserError.at(file.place("runs"), "runs are told by a column", None, "{column: NAME}")
    if by_column:
        owner = table.index(by_column[1], file.place("runs"))
        for line, row in table.rows:
            if not row[owner].strip():
                place = f"{table.path}:{line}"
                raise UserError.at(place, "no run is named here", by_column[1])
            groups.setdefault(row[owner].strip(), []).append((line, row))
    else:
        groups = dict.fromkeys(_named_in_columns(table, file) or [table.path.stem], table.rows)
    columns = _columns(file)
    for name, rows in groups.items():
        series = {n for column in columns["series"] if (n := column.replace(RUN, name))}
        texts = {column.replace(RUN, name) for column in columns["texts"]}
        yield ForeignRun(
            name=name,
            identity=f"csv:{table.sha256}:{name}",
            place=table.path.name,
            names={"column": table.names},
            texts={"column": {n: _constant(table, rows, n) for n in texts if n in table.names}},
            series={n: _series(table, rows, step, n) for n in series if n in table.names},
        )


def _columns(file: MapFile) -> dict[str, set[str]]:
    """The columns that the mapping file names, with {run} in them as it stands."""
    series = {number.column for _, _, number in file.numbers() if number.column}
    if file.map.tokens and file.map.tokens.column:
        series.add(file.map.tokens.column)
    origins = [o for _, one in file.origins() for o in (one, *(one.items or []))]
    texts = {o.column for o in origins if o.column and o is not file.map.runs}
    return {"series": series, "texts": texts}


def _named_in_columns(table: _Table, file: MapFile) -> list[str]:
    """The runs whose names stand in the names of columns, such as "{run} - val/loss"."""
    found: dict[str, None] = {}
    patterns = sorted(name for name in _columns(file)["series"] if RUN in name)
    for pattern in patterns:
        before, _, after = pattern.partition(RUN)
        wanted = re.compile(f"{re.escape(before)}(.+){re.escape(after)}")
        found |= {match[1]: None for name in table.names if (match := wanted.fullmatch(name))}
    if patterns and not found:
        allowed = ", ".join(table.names[:40])
        message = f"no column of {table.path.name} has a name of this form"
        raise UserError.at(str(file.path), message, patterns[0], allowed)
    return list(found)


def _constant(table: _Table, rows: list[tuple[int, list[str]]], name: str) -> str:
    """The one value of a setting's column in all rows of a run, where any has one.

    Raises:
        UserError: it changes.
    """
    index, value = table.names.index(name), ""
    for line, row in rows:
        text = row[index].strip()
        if not text:
            continue
        if value and text != value:
            message = f"the setting in column {name!r} changes within a run, and was {value!r}"
            raise UserError.at(f"{table.path}:{line}", message, text)
        value = text
    return value


def _series(
    table: _Table, rows: list[tuple[int, list[str]]], step: int, name: str
) -> list[Reading]:
    """The cells of a column that hold something.

    Raises:
        UserError: one is not a number, or its step is not one.
    """
    index, found = table.names.index(name), []
    for line, row in rows:
        cell = row[index].strip()
        if not cell:
            continue
        place = f"{table.path}:{line}"
        if not _NUMBER.fullmatch(cell):
            raise UserError.at(f"{place}: {name}", "not a number", row[index], "a number, or empty")
        at = row[step].strip()
        if not _NUMBER.fullmatch(at) or not float(at).is_integer() or not 0 <= float(at) < 2**53:
            message = "not a step"
            raise UserError.at(f"{place}: {table.names[step]}", message, row[step], "0, 1, 2, ...")
        found.append(Reading(int(float(at)), float(cell), f"{place}: {name}"))
    return found
