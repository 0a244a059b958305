"""A report as data: blocks of words, tables, figures and commands that any renderer can write.

All text in them is as it was found. What makes it safe belongs to each renderer, which is the only
one to know what its format takes for markup; `plain` is common to all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LONGEST = 300  # characters of one cell; the whole value stands in the runs' own files


@dataclass(frozen=True)
class Strong:
    """Words that are stressed."""

    text: str


@dataclass(frozen=True)
class Code:
    """A name as a machine reads it."""

    text: str


@dataclass(frozen=True)
class Badge:
    """A verdict or an outcome; `kind` chooses its colour where there is one, never its words."""

    text: str
    kind: str


@dataclass(frozen=True)
class Brief:
    """A value that stands whole where there is room, and else in short."""

    short: str
    whole: str


Inline = str | Strong | Code | Badge
Words = tuple[Inline, ...]
Cell = str | Badge | Brief


@dataclass(frozen=True)
class Heading:
    """A heading; there is one of level 1."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Sentences."""

    words: Words


@dataclass(frozen=True)
class Facts:
    """Short facts, each with its name, one under another."""

    rows: tuple[tuple[str, Words], ...]


@dataclass(frozen=True)
class Bullets:
    """A list without an order."""

    items: tuple[Words, ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells under their heads; the last `numbers` columns are set right."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numbers: int = 0


@dataclass(frozen=True)
class Commands:
    """Lines for a shell."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A picture in the report's folder; `alt` says what it shows to whoever cannot see it."""

    file: str
    alt: str
    caption: str
    size: tuple[int, int]  # as it is shown where there is room, in CSS pixels


@dataclass(frozen=True)
class Figures:
    """Pictures that belong together, side by side where there is room."""

    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on demand."""

    summary: str
    blocks: tuple[Block, ...]


Block = Heading | Paragraph | Facts | Bullets | Table | Commands | Figures | Fold


def paragraph(*words: Inline) -> Paragraph:
    """A paragraph of these words."""
    return Paragraph(words)


def bullets(items: Iterable[Words | str]) -> Bullets:
    """A list of these items."""
    return Bullets(tuple((item,) if isinstance(item, str) else item for item in items))


def table(head: Iterable[str], rows: Iterable[Iterable[Cell]], *, numbers: int = 0) -> Table:
    """A table of these rows."""
    return Table(tuple(head), tuple(tuple(row) for row in rows), numbers)


def plain(value: str, longest: int = LONGEST) -> str:
    """Text on one line of at most `longest` characters, without what a page would obey unseen.

    Control characters, marks that turn the direction of writing, and halves of surrogate pairs are
    shown by their numbers.
    """
    one_line = re.sub(r"\s+", " ", value[: 8 * longest])
    shown = "".join(map(visible, one_line))
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def visible(character: str) -> str:
    """The character, or its number where it cannot be seen."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
