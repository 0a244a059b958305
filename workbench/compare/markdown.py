"""Blocks as Markdown that any text can be put into: escaping, tables of a bounded width, fences."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence

from workbench.compare import document as doc

WIDTH = 100

_MIN_CELL = 6
_LONGEST_TEXT = 2_000  # characters of one paragraph's part


def render(blocks: Iterable[doc.Block]) -> str:
    """The blocks as a Markdown document; lines of tables are at most `WIDTH` wide."""
    return "\n\n".join(filter(None, map(_block, blocks))) + "\n"


def text(value: str, longest: int = _LONGEST_TEXT) -> str:
    """Text that Markdown shows as it is: no emphasis, link, HTML, mathematics or new cell."""
    return _escaped(value, longest).strip()


def _escaped(value: str, longest: int = _LONGEST_TEXT) -> str:
    one_line = doc.plain(value, longest)
    one_line = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    one_line = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", one_line)
    # Addresses and :names: become links and pictures on some forges.
    one_line = re.sub(r":(?=//|[a-z][a-z0-9_+-]*:)", r"\\:", one_line)
    one_line = re.sub(r"(?<![A-Za-z0-9])(www)\.", r"\1\\.", one_line, flags=re.IGNORECASE)
    # Underscores inside a word are no emphasis, and names are full of them.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", one_line)


def code(value: str) -> str:
    """A code span; not for a table, where a bar in it would end the cell."""
    one_line = doc.plain(value).strip() or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", one_line)), default=0) + 1)
    pad = " " if one_line.startswith("`") or one_line.endswith("`") else ""
    return f"{fence}{pad}{one_line}{pad}{fence}"


def block(lines: Sequence[str]) -> str:
    """A fenced block of commands."""
    body = "".join(one if one in "\n\t" else doc.visible(one) for one in "\n".join(lines))
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", body)), default=0) + 1)
    return f"{fence}sh\n{body}\n{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> str:
    """A table at most `WIDTH` wide, aligned so that its source reads as well.

    Cells are plain text, escaped here. The widest columns are cut first, with an ellipsis. The last
    `numbers` columns are set right.
    """
    cells = [[text(cell, doc.LONGEST) for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    while sum(widths) + 3 * len(widths) + 1 > WIDTH and max(widths) > _MIN_CELL:
        widths[widths.index(max(widths))] -= 1
    shown = [
        [_fit(cell, width) for cell, width in zip(row, widths, strict=True)]
        for row in (head, *rows)
    ]
    right = [i >= len(head) - numbers for i in range(len(head))]
    rules = [
        "-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)
    ]
    lines = [shown[0], rules, *shown[1:]]
    return "\n".join(
        "| " + " | ".join(_pad(*cell) for cell in zip(line, widths, right, strict=True)) + " |"
        for line in lines
    )


def _block(one: doc.Block) -> str:
    match one:
        case doc.Heading(words, level):
            return f"{'#' * level} {text(words, doc.LONGEST)}"
        case doc.Paragraph(words):
            return _words(words)
        case doc.Facts(rows):
            return "  \n".join(f"{text(name)}: {_words(words)}" for name, words in rows)
        case doc.Bullets(items):
            return "\n".join(f"- {_words(words)}" for words in items)
        case doc.Table(head, rows, numbers):
            return table(head, [[_cell(cell) for cell in row] for row in rows], numbers=numbers)
        case doc.Commands(lines):
            return block(lines)
        case doc.Figures(figures):
            return "\n\n".join(map(_figure, figures))
        case doc.Fold(summary, blocks):
            inside = "\n\n".join(filter(None, map(_block, blocks)))
            return f"<details><summary>{text(summary)}</summary>\n\n{inside}\n\n</details>"


def _cell(cell: doc.Cell) -> str:
    match cell:
        case doc.Badge(words, _) | doc.Brief(words, _):
            return words
        case str():
            return cell


def _figure(figure: doc.Figure) -> str:
    return f"![{text(figure.alt)}]({figure.file})\n\n{_words((figure.caption,))}"


def _words(words: doc.Words) -> str:
    joined = "".join(map(_inline, words)).strip()
    # What would begin a list, a heading or a rule at the beginning of a line.
    return re.sub(r"^([-+=]|\d+(?=[.)]))", _disarmed, joined)


def _disarmed(found: re.Match[str]) -> str:
    start = found.group()
    return f"\\{start}" if start in "-+=" else f"{start}\\"


def _inline(part: doc.Inline) -> str:
    match part:
        case doc.Strong(words):
            return f"**{text(words)}**"
        case doc.Code(words):
            return code(words)
        case doc.Badge(words, _):
            return text(words)
        case str():
            return _escaped(part)


def _fit(value: str, width: int) -> str:
    """Escaped text of at most `width` characters; never cut inside an escape."""
    value = doc.plain(value).strip()
    if len(whole := text(value)) <= width:
        return whole
    # The more is kept, the longer it is.
    kept = bisect.bisect_right(range(len(value)), width - 1, key=lambda n: len(text(value[:n])))
    return text(value[: max(0, kept - 1)]) + "…"


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)
