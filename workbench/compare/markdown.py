"""Markdown that any text can be put into: escaping, tables of a bounded width, code blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence

WIDTH = 100

_MIN_CELL = 6


def text(value: str) -> str:
    """Text that Markdown shows as it is: no emphasis, link, HTML, mathematics or new cell."""
    one_line = re.sub(r"\s+", " ", value).strip()
    one_line = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    one_line = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", one_line)
    # Underscores inside a word are no emphasis, and names are full of them.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", one_line)


def code(value: str) -> str:
    """A code span; in a table too, where a bar would end the cell."""
    one_line = re.sub(r"\s+", " ", value).strip() or " "
    fence = "`" * (max((len(run) for run in re.findall("`+", one_line)), default=0) + 1)
    pad = " " if one_line.startswith("`") or one_line.endswith("`") else ""
    return f"{fence}{pad}{one_line}{pad}{fence}".replace("|", r"\|")


def block(lines: Sequence[str]) -> str:
    """A fenced block of commands."""
    body = "\n".join(lines)
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", body)), default=0) + 1)
    return f"{fence}sh\n{body}\n{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> str:
    """A table at most `WIDTH` wide, aligned so that its source reads as well.

    Cells are plain text, escaped here. The widest columns are cut first, with an ellipsis. The last
    `numbers` columns are set right.
    """
    cells = [[text(cell) for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    while sum(widths) + 3 * len(widths) + 1 > WIDTH and max(widths) > _MIN_CELL:
        widths[widths.index(max(widths))] -= 1
    plain = [
        [_fit(cell, width) for cell, width in zip(row, widths, strict=True)]
        for row in (head, *rows)
    ]
    right = [i >= len(head) - numbers for i in range(len(head))]
    rules = [
        "-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)
    ]
    lines = [plain[0], rules, *plain[1:]]
    return "\n".join(
        "| " + " | ".join(_pad(*cell) for cell in zip(line, widths, right, strict=True)) + " |"
        for line in lines
    )


def _fit(value: str, width: int) -> str:
    """Escaped text of at most `width` characters; never cut inside an escape."""
    shown = text(value)
    kept = len(value)
    while len(shown) > width and kept > 0:
        kept -= 1
        shown = text(value[:kept]) + "…"
    return shown


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)
