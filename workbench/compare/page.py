"""Blocks as one HTML page that needs nothing beside itself: no network, no script, no other file.

The page is built as a tree of elements, so that every text is escaped where the tree is written.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from workbench.compare import document as doc

_SHORT = 28  # characters of a cell that is not broken into lines

# Even if markup came in, a browser would load and run nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light; --ink: #1a1a1a; --soft: #5a5a5a; --line: #d5d5d5; --shade: #f6f6f4; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 72rem; background: #fff;
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .5rem;
  border-top: 1px solid var(--line); }
p, ul, figure, details, .scroll, pre, dl { margin: .75rem 0; }
p, li, figcaption { max-width: 50rem; }
ul { padding-left: 1.25rem; }
dl { display: grid; grid-template-columns: fit-content(40%) minmax(0, 1fr); gap: .2rem 1rem;
  padding: .75rem 1rem; background: var(--shade); border-left: 4px solid var(--ink); }
dt { color: var(--soft); }
dd { margin: 0; }
code, pre { font: .875em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }
pre { padding: .75rem 1rem; background: var(--shade); border: 1px solid var(--line);
  overflow-x: auto; white-space: pre-wrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top; overflow-wrap: normal;
  border-bottom: 1px solid var(--line); }
td { max-width: 24rem; overflow-wrap: break-word; }
th { border-bottom-color: var(--ink); }
.short { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.badge { padding: 0 .45rem; border: 1px solid currentColor; border-radius: .25rem;
  font-weight: 600; white-space: nowrap; }
.comparable { color: #14532d; background: #e8f5ec; }
.flagged { color: #6b4400; background: #fff4d6; border-style: dashed; }
.refused { color: #fff; background: #8b1a1a; }
.figures { display: flex; flex-wrap: wrap; gap: 0 1.5rem; }
figure { flex: none; margin: .75rem 0; max-width: 100%; }
img { display: block; max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .875rem; line-height: 1.45; }
summary { cursor: pointer; color: var(--soft); }
@media (max-width: 40rem) {
  body { padding: 1rem .75rem 3rem; }
  h1 { font-size: 1.3rem; }
  dl { gap: .2rem .75rem; padding: .5rem .75rem; }
  th, td { padding: .3rem .4rem; }
}
@page { margin: 14mm 12mm; }
@media print {
  body { max-width: none; padding: 0; font-size: 10.5pt; line-height: 1.4; color: #000; }
  h1 { font-size: 15pt; }
  h2 { font-size: 12pt; margin: 1.2rem 0 .4rem; break-after: avoid; }
  p, li { orphans: 3; widows: 3; }
  figure, tr, dl, pre, li { break-inside: avoid; }
  figure { max-width: 48%; }
  figure:only-child { max-width: 75%; }
  figure { --soft: #000; } dl, details { --soft: #333; }
  dl, pre { background: none; border: 1px solid #999; border-left: 3px solid #000; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; }
  thead { display: table-header-group; }
  th, td { padding: .15rem .4rem; overflow-wrap: anywhere; }
  td { max-width: none; }
  .short, .number, .badge { white-space: normal; }
  .comparable, .flagged, .refused { color: #000; background: none; }
  .refused { border-width: 2px; }
}
/* On paper nothing can be unfolded: what stands in folds is printed. */
@media print { details::details-content { content-visibility: visible; block-size: auto; } }
"""

# Of a part of another page, whose own colours stay: it may be dark.
_NESTED_STYLE = """
.workbench table { border-collapse: collapse; }
.workbench td, .workbench th { text-align: left; vertical-align: top; padding: .2rem .6rem; }
.workbench .number { text-align: right; font-variant-numeric: tabular-nums; }
.workbench .badge { padding: 0 .4rem; border: 1px solid; border-radius: .25rem; font-weight: 600; }
.workbench .comparable { color: #14532d; background: #e8f5ec; }
.workbench .flagged { color: #6b4400; background: #fff4d6; border-style: dashed; }
.workbench .refused { color: #fff; background: #8b1a1a; }
"""


def render(blocks: Iterable[doc.Block], title: str, folder: Path) -> str:
    """The blocks as an HTML document, the pictures of `folder` in it.

    Raises:
        OSError: a picture cannot be read.
    """
    html = Element("html", lang="en")
    head = SubElement(html, "head")
    SubElement(head, "meta", charset="utf-8")
    meta = {"http-equiv": "Content-Security-Policy", "content": _POLICY}
    SubElement(head, "meta", meta)
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "title").text = doc.plain(title)
    SubElement(head, "style").text = _STYLE
    main = SubElement(SubElement(html, "body"), "main")
    for one in blocks:
        _block(main, one, folder)
    written = ElementTree.tostring(html, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{written}\n"


def fragment(blocks: Iterable[doc.Block]) -> str:
    """The blocks as one HTML element to be put into another's page, such as a notebook's.

    There are no figures in it: it has no folder to take them from.
    """
    box = Element("div", {"class": "workbench"})
    SubElement(box, "style").text = _NESTED_STYLE
    for one in blocks:
        assert not isinstance(one, doc.Figures)
        _block(box, one, Path())
    return ElementTree.tostring(box, encoding="unicode", method="html")


def _block(parent: Element, one: doc.Block, folder: Path) -> None:
    match one:
        case doc.Heading(words, level):
            SubElement(parent, f"h{level}").text = doc.plain(words)
        case doc.Paragraph(words):
            _words(SubElement(parent, "p"), words)
        case doc.Facts(rows):
            facts = SubElement(parent, "dl")
            for name, words in rows:
                SubElement(facts, "dt").text = doc.plain(name)
                _words(SubElement(facts, "dd"), words)
        case doc.Bullets(items):
            bullets = SubElement(parent, "ul")
            for words in items:
                _words(SubElement(bullets, "li"), words)
        case doc.Table():
            _table(parent, one)
        case doc.Commands(lines):
            commands = SubElement(SubElement(parent, "pre"), "code")
            commands.text = "".join(
                character if character in "\n\t" else doc.visible(character)
                for character in "\n".join(lines)
            )
        case doc.Figures(figures):
            group = SubElement(parent, "div", {"class": "figures"})
            for figure in figures:
                _figure(group, figure, folder)
        case doc.Fold(summary, blocks):
            fold = SubElement(parent, "details")
            SubElement(fold, "summary").text = doc.plain(summary)
            for inner in blocks:
                _block(fold, inner, folder)


def _table(parent: Element, one: doc.Table) -> None:
    # Reachable by the keyboard, which scrolls what does not fit.
    scroll = SubElement(parent, "div", {"class": "scroll", "tabindex": "0"})
    table = SubElement(scroll, "table")
    first_number = len(one.head) - one.numbers
    head = SubElement(SubElement(table, "thead"), "tr")
    for index, name in enumerate(one.head):
        cell = SubElement(head, "th", {"scope": "col", **_cell_class(index >= first_number)})
        cell.text = doc.plain(name)
    body = SubElement(table, "tbody")
    for row in one.rows:
        line = SubElement(body, "tr")
        for index, value in enumerate(row):
            whole = value.whole if isinstance(value, doc.Brief) else value
            short = isinstance(whole, str) and len(whole) <= _SHORT
            cell = SubElement(line, "td", _cell_class(index >= first_number, short))
            _words(cell, (whole,))


def _cell_class(number: bool, short: bool = False) -> dict[str, str]:
    if number or short:
        return {"class": "number" if number else "short"}
    return {}


def _figure(parent: Element, one: doc.Figure, folder: Path) -> None:
    figure = SubElement(parent, "figure", {"style": f"width: {one.size[0]}px"})
    data = base64.b64encode((folder / one.file).read_bytes()).decode("ascii")
    width, height = map(str, one.size)
    source = {"src": f"data:image/png;base64,{data}", "width": width, "height": height}
    SubElement(figure, "img", {"alt": doc.plain(one.alt, 2_000), **source})
    SubElement(figure, "figcaption").text = doc.plain(one.caption, 2_000)


def _words(parent: Element, words: doc.Words) -> None:
    for part in words:
        match part:
            case doc.Strong(text):
                SubElement(parent, "strong").text = doc.plain(text, 2_000)
            case doc.Code(text):
                SubElement(parent, "code").text = doc.plain(text)
            case doc.Badge(text, kind):
                badge = SubElement(parent, "span", {"class": f"badge {kind}"})
                badge.text = doc.plain(text)
            case str():
                _add(parent, doc.plain(part, 2_000))


def _add(parent: Element, text: str) -> None:
    """Text after what the element holds so far."""
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text
