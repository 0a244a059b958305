"""Multiple choice: log-likelihoods by hand, the boundary of context and choice, bad lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny_runs import tiny_spec
from torch.nn import functional as F

from workbench.core import downstream
from workbench.core.data.errors import DataError
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer
from workbench.core.downstream import (
    Item,
    ItemScore,
    Task,
    TaskScore,
    encode_choices,
    read_task,
    row_of,
    score_task,
    write_items,
)
from workbench.core.loss_settings import LossSettings
from workbench.core.model import Transformer, build_model
from workbench.core.precision import FLOAT32

RANKS_4096 = Path(__file__).parents[2] / "configs/tokenizer/o200k-4096.tiktoken"
SETTINGS = LossSettings()
QUESTIONS: list[dict[str, Any]] = [
    {"context": "the old cat", "choices": ["sees", "a tree and not a river", "é"], "answer": 1},
    {"context": "dog", "choices": ["likes", "tree"], "answer": "tree"},
    {"context": "", "choices": ["river", "and"], "answer": 0, "more": "is left alone"},
    {"context": "small ", "choices": ["cat", " dog", "tree"], "answer": 2},
    {"context": "no", "choices": ["t", "w"], "answer": "w", "delimiter": ""},
]


def task_of(folder: Path, *rows: Any, name: str = "made-up.jsonl") -> Task:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return read_task(path)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer("bytes", None, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer("file", RANKS_4096, tmp_path_factory.mktemp("cache"))


def model_of(folder: Path, vocab_size: int) -> Transformer:
    """A model with some structure in its logits."""
    model = build_model(tiny_spec(folder).model, vocab_size, 42, FLOAT32)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(10)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return model_of(tmp_path_factory.mktemp("model"), 257)


def log_likelihood(model: Transformer, context: str, choice: str, window: int = 64) -> float:
    """Byte by byte: the log-probability of each byte of the choice after all before it."""
    ids = [256, *context.encode(), *choice.encode()]
    total = 0.0
    for place in range(1 + len(context.encode()), len(ids)):
        first = max(0, len(ids) - 1 - window)
        with torch.no_grad():
            logits = model.logits(torch.tensor([ids[first:place]])).double()
        total += float(F.log_softmax(logits[0, -1], 0)[ids[place]])
    return total


def test_scores_are_those_of_each_byte_by_hand(
    model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    score = score_task(model, task_of(tmp_path, *QUESTIONS), byte_tokenizer, 64, SETTINGS)
    texts = [
        ("the old cat", [" sees", " a tree and not a river", " é"]),
        ("dog", [" likes", " tree"]),
        ("", ["river", "and"]),
        ("small ", ["cat", " dog", "tree"]),
        ("no", ["t", "w"]),
    ]
    hits, hits_norm = 0, 0
    for one, (context, ends) in zip(score.items, texts, strict=True):
        expected = [log_likelihood(model, context, end) for end in ends]
        assert one.log_likelihoods == pytest.approx(expected, rel=1e-6)
        assert one.tokens == tuple(len(end.encode()) for end in ends)
        assert one.bytes == tuple(len(choice.encode()) for choice in one.item.choices)
        per_byte = [e / size for e, size in zip(expected, one.bytes, strict=True)]
        assert one.predicted == expected.index(max(expected))
        assert one.predicted_norm == per_byte.index(max(per_byte))
        hits += one.predicted == one.item.answer
        hits_norm += one.predicted_norm == one.item.answer
    assert [one.item.answer for one in score.items] == [1, 1, 0, 2, 1]
    assert score.items[0].bytes[2] == 2
    assert score.items[0].predicted != score.items[0].predicted_norm, "length decides this one"
    values = score.values()
    assert values["downstream/made-up/acc"] == hits / 5
    assert values["downstream/made-up/acc_norm"] == hits_norm / 5
    p = hits / 5
    assert values["downstream/made-up/acc_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 4))
    assert values["downstream/made-up/items"] == 5
    assert (score.merged, score.truncated) == (0, 0)


def test_predictions_by_hand() -> None:
    """Whole: the second; by byte the first; by token it would be the second. Ties: the first."""
    item = Item("x", ("abcdefgh", "xy"), 0, (" ", " "), 1)
    one = ItemScore(item, (-9.0, -8.0), (3, 8), False, False)
    assert (one.predicted, one.predicted_norm) == (1, 0)
    even = ItemScore(item, (-8.0, -8.0), (3, 8), False, False)
    assert even.predicted == 0
    task = Task("made-up", Path("made-up.jsonl"), (item,))
    values = TaskScore(task, (one,)).values()
    assert values == {
        "downstream/made-up/acc": 0.0,
        "downstream/made-up/acc_norm": 1.0,
        "downstream/made-up/items": 1.0,  # of one item there is no standard error
    }


def test_no_batch_size_or_order_changes_a_score(
    model: Transformer,
    byte_tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = score_task(model, task_of(tmp_path, *QUESTIONS), byte_tokenizer, 64, SETTINGS)
    backwards = task_of(tmp_path, *QUESTIONS[::-1])
    for tokens in (1, 40, 100, 400):
        monkeypatch.setattr(downstream, "TOKENS_AT_ONCE", tokens)
        score = score_task(model, backwards, byte_tokenizer, 64, SETTINGS)
        assert score.values() == whole.values()
        for one, other in zip(score.items[::-1], whole.items, strict=True):
            assert one.log_likelihoods == pytest.approx(other.log_likelihoods, rel=1e-6)


def test_what_does_not_fit_loses_its_beginning_and_is_counted(
    model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    long = {"context": "x" * 10 + "the cat", "choices": [" a", " tree"], "answer": 0}
    task = task_of(tmp_path, long, QUESTIONS[1])
    score = score_task(model, task, byte_tokenizer, 16, SETTINGS)
    assert [one.truncated for one in score.items] == [True, False]
    assert score.truncated == 1
    expected = [log_likelihood(model, long["context"], end, 16) for end in (" a", " tree")]
    assert score.items[0].log_likelihoods == pytest.approx(expected, rel=1e-6)
    assert score.items[0].tokens == (2, 5)
    with pytest.raises(DataError, match=r"made-up\.jsonl:1: a choice of 23 tokens; the window"):
        score_task(model, task_of(tmp_path, QUESTIONS[0]), byte_tokenizer, 16, SETTINGS)


def test_a_row_by_hand() -> None:
    ids = np.array([5, 6, 7, 8], np.int64)
    inputs, targets, truncated = row_of(ids, 2, 99, 8)
    assert (inputs.tolist(), targets.tolist()) == ([99, 5, 6, 7], [-100, -100, 7, 8])
    assert not truncated
    inputs, targets, truncated = row_of(ids, 2, 99, 3)
    assert (inputs.tolist(), targets.tolist()) == ([5, 6, 7], [-100, 7, 8])
    assert truncated


# -- the boundary


def pieces(tokenizer: Tokenizer, ids: Any) -> list[str]:
    return [tokenizer.decode([int(i)]) for i in ids]


def test_a_token_that_spans_the_boundary_is_scored_whole_in_every_choice(
    ranks: Tokenizer, tmp_path: Path
) -> None:
    """`th` + `e` is the token `the` when read as one text, `th` + `x` is not: both start before."""
    assert pieces(ranks, ranks.encode_documents(["in the"])[0]) == ["in", " the"]
    ((whole, start, merged),) = encode_choices(ranks, [("in th", ["e", "x", "e river"])])
    assert merged
    assert {tuple(pieces(ranks, ids[:start])) for ids in whole} == {("in",)}
    assert ["".join(pieces(ranks, ids[start:])) for ids in whole] == [" the", " thx", " the river"]
    assert pieces(ranks, whole[0]) == ["in", " the"], "as training would read it"


def test_blanks_at_the_boundary_go_with_the_choice(ranks: Tokenizer) -> None:
    texts = [("in the ", ["river", "world"]), ("in the", [" river", " world"])]
    trailing, leading = encode_choices(ranks, texts)
    for (whole, start, _), (other, at, _) in ((trailing, leading),):
        assert start == at == 2
        assert [ids.tolist() for ids in whole] == [ids.tolist() for ids in other]
    assert (trailing[2], leading[2]) == (True, False)


def test_the_scores_of_merged_tokens_are_those_of_the_one_text(
    ranks: Tokenizer, tmp_path: Path
) -> None:
    model = model_of(tmp_path, ranks.vocab_size)
    item = {"context": "in th", "choices": ["e", "x"], "answer": 0, "delimiter": ""}
    score = score_task(model, task_of(tmp_path, item), ranks, 32, SETTINGS)
    assert score.merged == 1
    for text, got in zip(("in the", "in thx"), score.items[0].log_likelihoods, strict=True):
        ids = torch.tensor([ranks.eod_id, *ranks.encode_documents([text])[0].tolist()])
        with torch.no_grad():
            logp = F.log_softmax(model.logits(ids[None, :-1]).double()[0], -1)
        expected = sum(float(logp[t - 1, ids[t]]) for t in range(2, len(ids)))  # after `in`
        assert got == pytest.approx(expected, rel=1e-6)


# -- task files


BAD: dict[str, tuple[str, str]] = {
    "no json": ("{", "not valid JSON"),
    "a list": ("[1]", "each line is a JSON object"),
    "a missing field": ('{"context": "a", "choises": ["b"], "answer": 0}', "'choices' is missing"),
    "one choice": ('{"context": "a", "choices": ["b"], "answer": 0}', "two texts or more"),
    "choices in one text": ('{"context": "a", "choices": "bc", "answer": 0}', "two texts or more"),
    "a number as choice": (
        '{"context": "a", "choices": ["b", 1], "answer": 0}',
        r"choices\[1\]: is not text",
    ),
    "an empty choice": ('{"context": "a", "choices": ["b", ""], "answer": 0}', "an empty choice"),
    "beyond the last": ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "0 to 1"),
    "below the first": ('{"context": "a", "choices": ["b", "c"], "answer": -1}', "no choice"),
    "a truth value": ('{"context": "a", "choices": ["b", "c"], "answer": true}', "no choice"),
    "a float": ('{"context": "a", "choices": ["b", "c"], "answer": 1.0}', "no choice"),
    "another text": ('{"context": "a", "choices": ["b", "c"], "answer": "d"}', "no choice"),
    "of two": ('{"context": "a", "choices": ["b", "b"], "answer": "b"}', "more than one choice"),
    "no context": ('{"context": null, "choices": ["b", "c"], "answer": 0}', "context: is not text"),
    "half a pair": (
        '{"context": "\\ud800", "choices": ["b", "c"], "answer": 0}',
        "half a surrogate pair",
    ),
    "a delimiter": (
        '{"context": "a", "choices": ["b", "c"], "answer": 0, "delimiter": 1}',
        "delimiter: is not text",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_line_is_named(tmp_path: Path, fault: str) -> None:
    line, message = BAD[fault]
    with pytest.raises(DataError, match=message) as caught:
        task_of(tmp_path, QUESTIONS[0], "", line)
    assert str(tmp_path / "made-up.jsonl") + ":3" in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        read_task(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no item"):
        task_of(tmp_path, "", "  ")
    (tmp_path / "utf16.jsonl").write_text(json.dumps(QUESTIONS[0]), encoding="utf-16")
    with pytest.raises(DataError, match=r"utf16\.jsonl:1: not UTF-8"):
        read_task(tmp_path / "utf16.jsonl")
    with pytest.raises(DataError, match="needs a letter or digit"):
        task_of(tmp_path, QUESTIONS[0], name="..jsonl")


def test_identity_is_what_decides_a_score(tmp_path: Path) -> None:
    """Not the path, the spelling of the JSON, or how the answer is given."""
    first = task_of(tmp_path, *QUESTIONS)
    again = [{**QUESTIONS[0], "answer": "a tree and not a river", "id": 7}, *QUESTIONS[1:]]
    same = task_of(tmp_path, *again, name="other.jsonl")
    assert first.sha256 == same.sha256
    assert (first.name, same.name) == ("made-up", "other")
    others = [
        QUESTIONS[::-1],
        QUESTIONS[:-1],
        [{**QUESTIONS[0], "answer": 0}, *QUESTIONS[1:]],
        [{**QUESTIONS[0], "delimiter": ""}, *QUESTIONS[1:]],
        [{**QUESTIONS[0], "context": "The old cat"}, *QUESTIONS[1:]],
    ]
    assert len({first.sha256, *(task_of(tmp_path, *rows).sha256 for rows in others)}) == 6


def test_every_item_is_kept(model: Transformer, byte_tokenizer: Tokenizer, tmp_path: Path) -> None:
    score = score_task(model, task_of(tmp_path, *QUESTIONS), byte_tokenizer, 64, SETTINGS)
    write_items(score, tmp_path / "kept/items.parquet")
    rows = pq.read_table(tmp_path / "kept/items.parquet").to_pylist()
    assert [row["index"] for row in rows] == list(range(5))
    for row, one in zip(rows, score.items, strict=True):
        assert row["task"] == "made-up"
        assert row["item"] == one.item.sha256
        assert row["log_likelihoods"] == list(one.log_likelihoods)
        assert (row["bytes"], row["tokens"]) == (list(one.bytes), list(one.tokens))
        assert (
            row["right"] == (row["predicted"] == row["answer"]) == (one.predicted == row["answer"])
        )
        assert row["right_norm"] == (row["predicted_norm"] == row["answer"])
    assert sum(row["right"] for row in rows) / 5 == score.values()["downstream/made-up/acc"]
