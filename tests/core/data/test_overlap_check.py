"""`wb data overlap`: two sources beside each other, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from workbench.core.data.errors import DataError
from workbench.core.data.overlap import Settings
from workbench.core.data.overlap_check import Reading, overlap_of
from workbench.core.data.shards import ShardWriter
from workbench.data_commands import app


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in row) for row in rng.integers(0, 900, (count, 40))]


def write(path: Path, documents: list[str]) -> str:
    path.write_text("\n\n".join(documents))
    return str(path)


def shard(path: Path, documents: list[list[int]], named: bool = True) -> str:
    with ShardWriter(path, tokenizer="none", vocab_size=60_001, eod_id=60_000) as writer:
        for ids in documents:
            digest = np.array(ids, "<u4").tobytes()[:32].ljust(32, b"\0")
            writer.append(np.array(ids), len(ids), digest)
        writer.finish()
    if not named:
        for file in path.glob("tokens.docs.*"):
            file.unlink()
    return str(path)


def check(one: str, other: str, **settings: Any) -> dict[str, Any]:
    return overlap_of(one, other, Reading(), Settings(**settings), Path("unused"))


def test_text_beside_text(tmp_path: Path) -> None:
    train = texts(50, 0)
    part = " ".join([*train[3].split()[:25], *texts(1, 9)[0].split()])  # 13 of 53 n-grams
    fresh = texts(20, 1)
    evaluation = [train[7], part, *fresh, train[7]]  # the copy twice: counted once
    one, two = write(tmp_path / "a.txt", train), write(tmp_path / "b.txt", evaluation)
    found = check(one, two)
    assert found["status"] == "contaminated"
    assert (found["documents"], found["unit"]) == (22, "document")
    counted = found["overlap"]
    assert (counted["copies"], counted["overlapping_documents"]) == (1, 2)
    assert counted["ngrams_in_training"] == 28 + 13
    assert counted["overlapping_bytes"] == len(train[7]) + len(part)
    assert found["bytes"] == sum(map(len, {*evaluation}))
    assert found["overlap_rule"].endswith("of documents or bytes of text")
    assert check(one, write(tmp_path / "c.txt", fresh))["status"] == "held_out"
    assert check(one, two, limit=0.2)["status"] == "held_out"


def test_a_shard_beside_a_shard(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    train = rng.integers(0, 60_000, (30, 50)).tolist()
    fresh = rng.integers(0, 60_000, (10, 50)).tolist()
    one = shard(tmp_path / "a", train)
    found = check(one, shard(tmp_path / "b", [train[4], *fresh]))
    assert (found["status"], found["documents"], found["tokens"]) == ("contaminated", 11, 550)
    counted = found["overlap"]
    assert (counted["copies"], counted["ngrams_in_training"]) == (1, 38)
    assert counted["overlapping_tokens"] == 50
    assert found["overlap_rule"].startswith("n-grams of 13 tokens")
    assert counted["measured_on"].startswith("token ids: the tokenizer 'none' is not here")
    assert check(one, shard(tmp_path / "c", fresh))["status"] == "held_out"
    blocks = check(one, shard(tmp_path / "d", [train[4] * 30, *fresh], named=False))
    assert (blocks["unit"], blocks["documents"]) == ("block of 1024 tokens", 2)
    assert blocks["status"] == "contaminated"


def test_text_beside_ids_that_nothing_decodes_has_no_measure(tmp_path: Path) -> None:
    text, ids = write(tmp_path / "a.txt", texts(3, 0)), shard(tmp_path / "s", [[1, 2, 3]])
    with pytest.raises(
        DataError, match=r"EVAL: is a token shard beside text, .*'none' is not here"
    ):
        check(text, ids)
    with pytest.raises(DataError, match=r"TRAIN: is a token shard beside text"):
        check(ids, text)
    other = tmp_path / "o"
    with ShardWriter(other, tokenizer="some", vocab_size=60_001) as writer:
        writer.append(np.arange(20))
        writer.finish()
    with pytest.raises(DataError, match=r"EVAL: ids of another tokenizer \(tokenizer\)"):
        check(ids, str(other))
    with pytest.raises(DataError, match="TRAIN: no such file"):
        check(str(tmp_path / "none.txt"), text)


def test_the_command(tmp_path: Path) -> None:
    train = texts(50, 0)
    one, two = write(tmp_path / "a.txt", train), write(tmp_path / "b.txt", [*texts(20, 1)])
    done = CliRunner().invoke(app, ["overlap", one, two], standalone_mode=False)
    page = " ".join(done.return_value.content.split())
    assert done.return_value.exit_code == 0
    assert page.startswith("status held_out n-grams 560, of which 0 stand in TRAIN: 0 %")
    assert " of words of the text " in page
    assert "0 20 ####" in page
    arguments = ["overlap", one, one, "--json"]
    answer = CliRunner().invoke(app, arguments, standalone_mode=False).return_value
    assert (answer.exit_code, answer.content["status"]) == (3, "contaminated")
    assert answer.content["overlap"]["histogram"] == [0] * 11 + [50]
    assert json.loads(json.dumps(answer.content)) == answer.content
