"""Damages files as disks, editors and strangers do; every choice comes from a source that is given.

The source may be `random.Random`, what hypothesis draws, or a fuzzer that looks at coverage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

_Item = TypeVar("_Item")


class Source(Protocol):
    """Where the choices come from."""

    def randint(self, a: int, b: int) -> int:
        """A number from a to b, both included."""

    def choice(self, seq: Sequence[_Item]) -> _Item:
        """One of a sequence."""


DEEP = 30_000  # levels: more than any parser's stack
_EXTREMES = (0, 1, -1, 2**15, 2**16 - 1, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**63 - 1, 2**62)
_ODD_BYTES = (
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",  # half a surrogate pair
    b"\xf4\x90\x80\x80",  # beyond Unicode
    "\u202e\u0000\u2028".encode(),
    b"\xef\xbb\xbf",
    b"\r\n",
    b'"',
    b"\n" * 50,
    b"{" * 200,
)
# Values of JSON as text, so that also what no writer writes can stand there.
_ODD_JSON = (
    "null",
    "true",
    "-1",
    "0",
    "1.5",
    "-0.0",
    "1e308",
    "1e999",
    "NaN",
    "-Infinity",
    str(2**31),
    str(2**63),
    str(2**64),
    "9" * 400,
    "9" * 5000,
    '""',
    '"x"',
    '"7"',
    '"NaN"',
    '"\\ud800"',
    '"\\u0000"',
    '"../../../etc/passwd"',
    '"/dev/zero"',
    '"<u8"',
    json.dumps("☃\n\u202e|<script>`"),
    json.dumps("long " * 2000),
    "[]",
    "{}",
    "[null]",
    "[[1, 2], {}]",
    '{"not_applicable": 3}',
    '{"a": 1, "a": 2}',
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
)
_ODD_YAML = (
    *(odd for odd in _ODD_JSON if len(odd) <= DEEP),  # its parser takes seconds for those
    "[" * 2000 + "]" * 2000,
    "~nobody-of-this-name/x",
    '"a\\0b"',
    '"\\ud800"',
    '"\\U00110000"',
    "!!python/object/apply:os.system [x]",
    "&a [*a]",
    "*a",
    "010",
    "1:30",
    "0x10",
    "1_000",
    ".inf",
    ".nan",
    "2026-01-02",
    "'",
    "|",
    "? x",
    "<<: 1",
    "- 1",
    "- " * 300 + "1",
    "{" * 300,
    "@",
    "%YAML 9",
    "# x",
)
_ODD_CELLS = ("", "nan", "inf", "-inf", "1e999", "x", "1_0", " 1", "0x1", "1.5", "-1", "9" * 400)
_ODD_CELLS = (*_ODD_CELLS, '"', '"1\n2"', "\0", "٣", "1,2", "9" * 200_000)

Kind = Callable[[bytes, Source], bytes]


def damage_bytes(raw: bytes, draw: Source) -> bytes:
    """One change of the bytes."""
    at = draw.randint(0, max(len(raw) - 1, 0))
    end = min(len(raw), at + draw.randint(1, 64))
    kind = draw.randint(0, 8)
    if kind <= 2 and raw:
        return raw[:at] + bytes([raw[at] ^ (1 << draw.randint(0, 7))]) + raw[at + 1 :]
    if kind == 3:
        return raw[:at]
    if kind == 4:
        return raw[:at] + raw[end:]
    if kind == 5:
        return raw[:end] + raw[at:end] * draw.randint(1, 3) + raw[end:]
    if kind == 6:
        size = draw.choice((1, 2, 4, 8))
        number = draw.choice(_EXTREMES) % (1 << (8 * size))
        return raw[:at] + number.to_bytes(size, "little") + raw[at + size :]
    if kind == 7:
        return raw[:at] + draw.choice(_ODD_BYTES) + raw[at:]
    return raw + draw.choice(_ODD_BYTES) * draw.randint(1, 4)


def damage_json(raw: bytes, draw: Source) -> bytes:
    """One change of a document: a value, a name, one twice, one missing; else of its bytes."""
    if draw.randint(0, 3) == 0:
        return damage_bytes(raw, draw)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return damage_bytes(raw, draw)
    mark = "<<the odd value>>"
    places = list(_places(document))
    if not places:
        return draw.choice(_ODD_JSON).encode()
    holder, key = places[draw.randint(0, len(places) - 1)]
    kind = draw.randint(0, 9)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(("", "../x", "☃", str(key) + "x"))] = holder.pop(key)
    else:
        holder[key] = mark
    text = json.dumps(document)
    odd = draw.choice(_ODD_JSON)
    if kind == 2 and isinstance(key, str):  # a name that stands twice
        odd += f", {json.dumps(key)}: {draw.choice(_ODD_JSON)}"
    return text.replace(json.dumps(mark), odd).encode()


def damage_yaml(raw: bytes, draw: Source) -> bytes:
    """One change of a line of a spec; else of its bytes."""
    if draw.randint(0, 2) == 0:
        return damage_bytes(raw, draw)
    lines = raw.decode("utf-8", "replace").split("\n")
    at = draw.randint(0, len(lines) - 1)
    odd = draw.choice(_ODD_YAML)
    kind = draw.randint(0, 5)
    if kind <= 2:
        lines[at] = re.sub(r":.*", lambda _: f": {odd}", lines[at], count=1)
    elif kind == 3:
        lines.insert(at, lines[at])
    elif kind == 4:
        lines.insert(at, " " * draw.randint(0, 6) + odd)
    else:
        lines[at] = " " * draw.randint(0, 6) + lines[at].lstrip()
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def damage_csv(raw: bytes, draw: Source) -> bytes:
    """One change of a row or a cell; else of the bytes."""
    if draw.randint(0, 2) == 0:
        return damage_bytes(raw, draw)
    rows = [line.split(",") for line in raw.decode("utf-8", "replace").split("\n")]
    at = draw.randint(0, len(rows) - 1)
    cell = draw.randint(0, len(rows[at]) - 1) if draw.randint(0, 1) else 0
    kind = draw.randint(0, 5)
    if kind <= 2:
        rows[at][cell] = draw.choice(_ODD_CELLS)
    elif kind == 3:
        rows.insert(at, list(rows[at]))
    elif kind == 4:
        del rows[at][cell]
    else:
        other = draw.randint(0, len(rows) - 1)
        rows[at], rows[other] = rows[other], rows[at]
    return "\n".join(map(",".join, rows)).encode("utf-8", "surrogatepass")


def kind_of(name: str) -> Kind:
    """How a file of this name is damaged."""
    if name.endswith(".json"):
        return damage_json
    if name.endswith((".yaml", ".yml")):
        return damage_yaml
    return damage_csv if name.endswith(".csv") else damage_bytes


def damaged(name: str, raw: bytes, draw: Source) -> bytes:
    """A file after one to three changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        raw = kind_of(name)(raw, draw)
    return raw


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every value below a document, as what holds it and its key."""
    found: list[tuple[Any, Any]] = []
    pending = [document]
    while pending:
        one = pending.pop()
        items = one.items() if isinstance(one, dict) else enumerate(one)
        for key, value in items:
            found.append((one, key))
            if isinstance(value, dict | list):
                pending.append(value)
    return found
