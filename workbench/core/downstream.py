"""Multiple choice by continuation log-likelihood: a task file, its scores, and every item's.

A task is a file of JSON lines with `context`, `choices` and `answer` (the index of a choice from 0,
or its text). Each choice is scored as the continuation of the context; the one predicted has the
highest summed log-likelihood (`acc`), or the highest per UTF-8 byte of the choice (`acc_norm`).

Context and choice are joined by one blank where neither has white space there; `delimiter` says
otherwise. The boundary: context and choice are encoded as one text, as training would read it. Of
these tokens those are scored that follow the last token which the context alone begins with, too,
in all choices of the item. So where a token spans the boundary it is scored whole, in every choice
after the same tokens, and never cut; `merged` counts the items where the context alone ends in
other tokens. The input starts with the end-of-document id. What does not fit the window of S tokens
loses its beginning; `truncated` counts those items.

Shapes: B rows of a batch, S sequence length.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.data import atomic
from workbench.core.data.errors import DataError
from workbench.core.data.evaluation_sets import IGNORED
from workbench.core.data.text_files import decoded_lines
from workbench.core.data.tokenizer import Tokenizer
from workbench.errors import did_you_mean, storing

if TYPE_CHECKING:
    from workbench.core.loss_settings import LossSettings
    from workbench.core.model import Transformer

TOKENS_AT_ONCE = 4096  # memory, not the result, depends on it
FIELDS = "context, choices, answer"

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Item:
    """One question; `answer` is an index. `delimiters` stand between context and each choice."""

    context: str
    choices: tuple[str, ...]
    answer: int
    delimiters: tuple[str, ...]
    line: int

    @property
    def sha256(self) -> str:
        """Identity of the item: all that decides its score."""
        content = [self.context, self.choices, self.answer, self.delimiters]
        return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()


@dataclass(frozen=True)
class Task:
    """The items of a task file in its order. `name` is the file's stem, letters and digits kept."""

    name: str
    path: Path
    items: tuple[Item, ...]

    @property
    def sha256(self) -> str:
        """Identity of the task: over its items in order."""
        return hashlib.sha256("\n".join(item.sha256 for item in self.items).encode()).hexdigest()


class Row(NamedTuple):
    """Up to S inputs [n] and the targets that follow them [n], -100 where not scored."""

    inputs: Int64
    targets: Int64
    truncated: bool = False


@dataclass(frozen=True)
class ItemScore:
    """One item: summed log-likelihood (nats), bytes and scored tokens of each choice."""

    item: Item
    log_likelihoods: tuple[float, ...]
    tokens: tuple[int, ...]
    merged: bool
    truncated: bool

    @property
    def bytes(self) -> tuple[int, ...]:
        """UTF-8 bytes of each choice."""
        return tuple(len(choice.encode()) for choice in self.item.choices)

    @property
    def predicted(self) -> int:
        """The choice of the highest log-likelihood; of equal ones the first."""
        return int(np.argmax(self.log_likelihoods))

    @property
    def predicted_norm(self) -> int:
        """The choice of the highest log-likelihood per byte; of equal ones the first."""
        return int(np.argmax(np.array(self.log_likelihoods) / np.array(self.bytes)))


@dataclass(frozen=True)
class TaskScore:
    """The scores of a task's items in its order."""

    task: Task
    items: tuple[ItemScore, ...]

    @property
    def name(self) -> str:
        """The name its numbers begin with."""
        return f"downstream/{self.task.name}"

    def values(self) -> dict[str, float]:
        """Accuracies with their standard errors (of the mean over items; none for one item), and
        how many items there are."""
        values: dict[str, float] = {}
        right = {
            "acc": [one.predicted == one.item.answer for one in self.items],
            "acc_norm": [one.predicted_norm == one.item.answer for one in self.items],
        }
        count = len(self.items)
        for kind, hits in right.items():
            mean = sum(hits) / count
            values[f"{self.name}/{kind}"] = mean
            if count > 1:
                error = math.sqrt(mean * (1 - mean) / (count - 1))
                values[f"{self.name}/{kind}_stderr"] = error
        return values | {f"{self.name}/items": float(count)}

    @property
    def merged(self) -> int:
        """Items whose context ends inside a token of some choice."""
        return sum(one.merged for one in self.items)

    @property
    def truncated(self) -> int:
        """Items of which a choice did not fit the window with all of its context."""
        return sum(one.truncated for one in self.items)


def read_task(path: Path) -> Task:
    """The task in a file of JSON lines; blank lines are left out.

    Raises:
        DataError: the file cannot be read, holds no item, or a line is not an item; names the line.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem)
    if not re.search(r"[A-Za-z0-9]", name):
        problem = "the name of a task file needs a letter or digit: its numbers are named by it"
        raise DataError.at("--task", problem, str(path))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError.at(str(path), f"cannot be read: {error.strerror or error}") from error
    lines = decoded_lines(path, io.BytesIO(content))
    items = tuple(_item(f"{path}:{n}", n, line) for n, line in lines if line.strip())
    if not items:
        raise DataError.at(str(path), "holds no item", allowed=f"JSON lines with {FIELDS}")
    return Task(name, path, items)


def score_task(
    model: Transformer,
    task: Task,
    tokenizer: Tokenizer,
    seq_len: int,
    settings: LossSettings,
    between: Callable[[], None] = lambda: None,
) -> TaskScore:
    """Scores every item. `between` is called between batches and may raise to give up.

    Raises:
        DataError: a choice is longer than a window.
    """
    texts = [
        (item.context, [d + c for d, c in zip(item.delimiters, item.choices, strict=True)])
        for item in task.items
    ]
    encoded = encode_choices(tokenizer, texts)
    rows, merged = [], []
    for item, (whole, start, is_merged) in zip(task.items, encoded, strict=True):
        merged.append(is_merged)
        for choice, ids in zip(item.choices, whole, strict=True):
            if len(ids) - start > seq_len:
                problem = f"a choice of {len(ids) - start} tokens; the window has {seq_len}"
                raise DataError.at(f"{task.path}:{item.line}", problem, choice[:60])
            rows.append(row_of(ids, start, tokenizer.eod_id, seq_len))
    sums = iter(
        [math.fsum(nlls) for nlls in token_nlls(model, rows, tokenizer.eod_id, settings, between)]
    )
    shapes = iter(rows)
    scores = []
    for item, is_merged in zip(task.items, merged, strict=True):
        mine = [next(shapes) for _ in item.choices]
        scores.append(
            ItemScore(
                item,
                tuple(-next(sums) for _ in item.choices),
                tuple(int((row.targets != IGNORED).sum()) for row in mine),
                is_merged,
                any(row.truncated for row in mine),
            )
        )
    return TaskScore(task, tuple(scores))


def encode_choices(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, Sequence[str]]]
) -> list[tuple[list[Int64], int, bool]]:
    """Of each (context, continuations): the ids of context + continuation for every continuation,
    the index of the first scored id, and whether the context alone ends in other tokens."""
    flat = [text for context, ends in texts for text in (context, *(context + e for e in ends))]
    ids = iter([one.astype(np.int64) for one in tokenizer.encode_documents(flat)])
    found = []
    for _, ends in texts:
        context = next(ids)
        whole = [next(ids) for _ in ends]
        start = min(_common(context, one) for one in whole)
        found.append((whole, start, start < len(context)))
    return found


def row_of(ids: Int64, start: int, eod_id: int, seq_len: int) -> Row:
    """The inputs and targets that score `ids[start:]`, after as much before it as fits."""
    inputs = np.r_[eod_id, ids[:-1]].astype(np.int64)
    targets = ids.copy()
    targets[:start] = IGNORED
    return Row(inputs[-seq_len:], targets[-seq_len:], len(ids) > seq_len)


def token_nlls(
    model: Transformer,
    rows: Sequence[Row],
    pad_id: int,
    settings: LossSettings,
    between: Callable[[], None] = lambda: None,
) -> list[npt.NDArray[np.float64]]:
    """The NLL in nats of every scored target of each row, in the order of the rows."""
    import torch

    from workbench.core.losses import linear_nll

    device = model.head_weight.device
    found: list[npt.NDArray[np.float64]] = [np.zeros(0)] * len(rows)
    with torch.no_grad():
        for numbers, inputs, targets in batches(rows, pad_id):
            between()
            hidden = model(torch.from_numpy(inputs).to(device)).flatten(0, 1)
            ids = torch.from_numpy(targets).to(device).flatten()
            nll = linear_nll(hidden, model.head_weight, ids, settings, model.precision)
            table = nll.view(targets.shape).cpu().double().numpy()
            for place, number in enumerate(numbers):
                found[number] = table[place][targets[place] != IGNORED]
    return found


def batches(rows: Sequence[Row], pad_id: int) -> Iterator[tuple[list[int], Int64, Int64]]:
    """Numbers of rows, their inputs [B, S] and targets [B, S], padded at the right; long first."""
    order = sorted(range(len(rows)), key=lambda number: (-len(rows[number].inputs), number))
    while order:
        width = len(rows[order[0]].inputs)
        count = max(1, TOKENS_AT_ONCE // width)
        numbers, order = order[:count], order[count:]
        inputs = np.full((len(numbers), width), pad_id, np.int64)
        targets = np.full((len(numbers), width), IGNORED, np.int64)
        for place, number in enumerate(numbers):
            length = len(rows[number].inputs)
            inputs[place, :length] = rows[number].inputs
            targets[place, :length] = rows[number].targets
        yield numbers, inputs, targets


def write_items(score: TaskScore, path: Path) -> None:
    """The score of every item as a parquet file, whole or not at all.

    Columns: `task`, `index` (of the item in its task, from 0), `item` (content hash), `answer`,
    `predicted`, `predicted_norm`, `right`, `right_norm`, `merged`, `truncated`; and of each choice
    `log_likelihoods` (nats), `bytes` and `tokens`.

    Raises:
        StoreError: it cannot be written; nothing is left behind.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    items = score.items
    table = pa.table(
        {
            "task": [score.task.name] * len(items),
            "index": list(range(len(items))),
            "item": [one.item.sha256 for one in items],
            "answer": [one.item.answer for one in items],
            "predicted": [one.predicted for one in items],
            "predicted_norm": [one.predicted_norm for one in items],
            "right": [one.predicted == one.item.answer for one in items],
            "right_norm": [one.predicted_norm == one.item.answer for one in items],
            "merged": [one.merged for one in items],
            "truncated": [one.truncated for one in items],
            "log_likelihoods": [list(one.log_likelihoods) for one in items],
            "bytes": [list(one.bytes) for one in items],
            "tokens": [list(one.tokens) for one in items],
        }
    )
    content = io.BytesIO()
    with storing(path):
        pq.write_table(table, content)
        atomic.write_file(path, content.getvalue())


def _common(a: Int64, b: Int64) -> int:
    """How many ids two sequences begin with alike."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _item(place: str, line: int, text: str) -> Item:
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError.at(place, f"not valid JSON: {error}", text[:60]) from error
    if not isinstance(row, dict):
        raise DataError.at(place, "each line is a JSON object", type(row).__name__, FIELDS)
    for field in ("context", "choices", "answer"):
        if field not in row:
            hint = did_you_mean(field, row)
            raise DataError.at(place, f"field {field!r} is missing.{hint}", None, FIELDS)
    context = _text(place, "context", row["context"])
    given = row["choices"]
    if not isinstance(given, list) or len(given) < 2:
        raise DataError.at(place, "choices are a list of two texts or more", _shown(given))
    choices = tuple(_text(place, f"choices[{i}]", one) for i, one in enumerate(given))
    for number, choice in enumerate(choices):
        if not choice:
            problem = "an empty choice has no likelihood per byte"
            raise DataError.at(f"{place}: choices[{number}]", problem)
    answer = _answer(place, row["answer"], choices)
    return Item(context, choices, answer, _delimiters(place, context, choices, row), line)


def _answer(place: str, given: Any, choices: tuple[str, ...]) -> int:
    """The index of the right choice, given as such or as the choice's text."""
    allowed = f"an index from 0 to {len(choices) - 1}, or the text of one choice"
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(choices):
        return given
    if isinstance(given, str) and choices.count(given) == 1:
        return choices.index(given)
    problem = "answer names no choice"
    if isinstance(given, str) and choices.count(given) > 1:
        problem = "answer is the text of more than one choice"
    raise DataError.at(f"{place}: answer", problem, _shown(given), allowed)


def _delimiters(
    place: str, context: str, choices: tuple[str, ...], row: dict[str, Any]
) -> tuple[str, ...]:
    if "delimiter" in row:
        return (_text(place, "delimiter", row["delimiter"]),) * len(choices)
    open_end = bool(context) and not context[-1].isspace()
    return tuple(" " if open_end and not choice[0].isspace() else "" for choice in choices)


def _text(place: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError.at(f"{place}: {field}", "is not text", _shown(value), "a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"holds half a surrogate pair at character {error.start}: no UTF-8 text"
        raise DataError.at(f"{place}: {field}", problem) from error
    return value


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]
