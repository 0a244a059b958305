"""The documents of one file, each with its place: text, JSON lines, or a column of parquet.

A file is read lazily: one line, block or batch of rows is held at a time.
Text is taken as it stands: a byte-order mark at the start of a file is dropped, line ends (CRLF
too) are kept inside a document, and only a line feed ends a line.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from workbench.core.data.errors import DataError
from workbench.errors import did_you_mean, reason_of

SUFFIXES = (".txt", ".jsonl", ".parquet")
ROWS_PER_BATCH = 256

TextUnit = Literal["auto", "file", "blank_line", "line"]


class Located(NamedTuple):
    """A document, and the place of it that an error names: a file, and a line or row of it."""

    place: str
    text: str


def documents_of(path: Path, field: str, unit: TextUnit) -> Iterator[Located]:
    """The documents of a file; for the arguments see `corpus.text_corpus`.

    Raises:
        DataError: it cannot be read or holds no such text. Says where.
    """
    try:
        match path.suffix.lower():
            case ".txt":
                yield from _read_txt(path, unit)
            case ".jsonl":
                yield from _read_jsonl(path, field)
            case _:
                yield from _read_parquet(path, field)
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {reason_of(error)}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        yield from decoded_lines(path, file)


def decoded_lines(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines, their ends included, decoded strictly.

    Raises:
        DataError: a line that is not UTF-8 text; names the line of `path`.
    """
    offset = 0
    for number, raw in enumerate(lines, 1):
        skip = len(codecs.BOM_UTF8) if number == 1 and raw.startswith(codecs.BOM_UTF8) else 0
        try:
            line = raw[skip:].decode("utf-8")
        except UnicodeDecodeError as error:
            at = offset + skip + error.start
            problem = f"not UTF-8 (byte offset {at}){_mark(raw) if number == 1 else ''}"
            found = "0x" + raw[skip + error.start : skip + error.start + 1].hex()
            raise DataError.at(f"{path}:{number}", problem, found, "UTF-8 text") from error
        if "\0" in line:
            at = offset + raw.index(b"\0")
            problem = f"a zero byte (byte offset {at}): UTF-16 text, or not a text file"
            raise DataError.at(f"{path}:{number}", problem, None, "UTF-8 text")
        yield number, line
        offset += len(raw)


def _mark(raw: bytes) -> str:
    """What the first bytes of a file say of its encoding."""
    for name, marks in (
        ("UTF-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),  # starts with a mark of UTF-16
        ("UTF-16", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
    ):
        if raw.startswith(marks):
            return f"; the file starts with the mark of {name}"
    return ""


def _read_txt(path: Path, unit: TextUnit) -> Iterator[Located]:
    if unit == "file":
        yield Located(str(path), "".join(line for _, line in _lines(path)))
    elif unit == "line":
        for number, line in _lines(path):
            yield Located(f"{path}:{number}", _without_end(line))
    else:
        block: list[str] = []
        first = 1
        for number, line in _lines(path):
            if line.strip():
                first = first if block else number
                block.append(line)
            elif block:
                yield Located(f"{path}:{first}", _without_end("".join(block)))
                block = []
        if block:
            yield Located(f"{path}:{first}", _without_end("".join(block)))


def _without_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _read_jsonl(path: Path, field: str) -> Iterator[Located]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise DataError.at(place, f"not valid JSON: {error}", line[:60]) from error
        if not isinstance(row, dict):
            raise DataError.at(place, "each line is a JSON object", type(row).__name__)
        if field not in row:
            raise missing_field(place, "field", field, list(row))
        yield Located(place, checked_text(row[field], place, field))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no key stands twice: which of the values is meant cannot be told."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} stands twice in one object")
    return found


def _read_parquet(path: Path, field: str) -> Iterator[Located]:
    with _parquet(path, field) as file:
        row = 0
        for batch in file.iter_batches(columns=[field], batch_size=ROWS_PER_BATCH):
            for value in batch.column(0):
                row += 1
                place = f"{path}, row {row}"
                yield Located(place, column_text(value, place, field))


def require_column(path: Path, field: str) -> None:
    """Looks at the end of a parquet file for its column of text.

    Raises:
        DataError: it is no parquet file, or has no such column, or one that holds no text.
    """
    with _parquet(path, field):
        pass


@contextmanager
def _parquet(path: Path, field: str) -> Iterator[Any]:
    """The opened file, whose column is one of text; what reading it raises becomes a DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as handle, pq.ParquetFile(handle) as file:
            require_text_column(file, str(path), field)
            yield file
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {reason_of(error)}") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:  # names of columns are text, too
        raise DataError.at(str(path), f"not a readable parquet file: {error}") from error


def require_text_column(file: Any, name: str, field: str) -> None:
    """Checks the schema of an opened parquet file.

    Raises:
        DataError: no such column, several, or one that holds no text.
    """
    import pyarrow as pa

    schema = file.schema_arrow
    if field not in schema.names:
        raise missing_field(name, "column", field, schema.names)
    if (count := schema.names.count(field)) > 1:
        raise DataError.at(name, f"{count} columns are named {field!r}", allowed="one of them")
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(check(kind) for check in is_text):
        problem = f"the column {field!r} holds no text"
        raise DataError.at(name, problem, str(kind), "a column of strings")


def column_text(value: Any, place: str, field: str) -> str:
    """The text of one value of a column.

    Raises:
        DataError: it is null, or no UTF-8.
    """
    try:
        return checked_text(value.as_py(), place, field)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 (byte {error.start} of the row)"
        raise DataError.at(place, problem, None, "UTF-8 text") from error


def missing_field(place: str, kind: str, field: str, known: list[str]) -> DataError:
    """The error of a field or column that is not there, with those that are."""
    problem = f"{kind} {field!r} is missing.{did_you_mean(field, known)}"
    return DataError.at(place, problem, allowed=f"data.text_field: one of {', '.join(known[:20])}")


def checked_text(value: object, place: str, field: str) -> str:
    """`value` as text that UTF-8 can hold.

    Raises:
        DataError: it is null, no text, or holds half a surrogate pair.
    """
    if not isinstance(value, str):
        shown = "null" if value is None else f"{type(value).__name__} {str(value)[:40]}"
        raise DataError.at(place, f"{field!r} is not text", shown, "a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"{field!r} holds half a surrogate pair at character {error.start}: no UTF-8 text"
        raise DataError.at(place, problem) from error
    return value
