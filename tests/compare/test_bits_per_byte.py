"""Real runs of the quickstart's model with two tokenizers: their NLL per token is refused, bits per
byte of the same text is offered, and the table of rules says what each claim rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tiny_runs import untracked_run

from workbench import cli
from workbench.spec.load import load_spec
from workbench.track.record import read_record
from workbench.track.store import Store

ROOT = Path(__file__).parents[2]
RANKS = ROOT / "configs" / "tokenizer" / "o200k-4096.tiktoken"
NAMES = [f"{tokenizer}-s{seed}" for tokenizer in ("large", "small") for seed in (1, 2)]
Wb = Callable[..., tuple[int, str]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two arms of two seeds: one trained with the lowest 1,024 ranks of the other's vocabulary."""
    home = tmp_path_factory.mktemp("bytes")
    small = home / "o200k-1024.tiktoken"
    small.write_bytes(b"".join(RANKS.read_bytes().splitlines(keepends=True)[:1024]))
    store = Store(home / "mlruns")
    for name in NAMES:
        path = small if name.startswith("small") else RANKS
        changes = [f"name={name}", f"seed={name[-1]}", f"tokenizer.path={path}"]
        changes += ["training.steps=8", "evaluation.eval_steps=4"]
        untracked_run(load_spec(ROOT / "experiments" / "quickstart.yaml", changes), store)
    return store


@pytest.fixture
def wb(store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Wb:
    """`wb compare` with these arguments: its exit code, and what it prints."""
    monkeypatch.setenv("WB_HOME", str(store.home))
    monkeypatch.setenv("WB_MLFLOW_WAIT", "0")

    def call(*arguments: str) -> tuple[int, str]:
        code = cli._guarded(["compare", *arguments])
        return code, capfd.readouterr().out

    return call


def effects(document: dict[str, Any], rule: str) -> dict[str, str | None]:
    (found,) = [one for one in document["rules"] if one["rule"] == rule]
    return {claim: found["effects"][claim] for claim in ("nll", "bpb")}


def test_two_runs(wb: Wb, store: Store) -> None:
    pair = ["large-s1", "small-s1", "--treatment", "tokenizer"]
    code, said = wb(*pair)
    assert code == 3
    assert "REFUSED for nll" in said
    assert "or ask for --claim bpb, which counts bytes" in said
    offered = "wb compare large-s1 small-s1 --treatment tokenizer --claim bpb"
    assert offered in " ".join(said.split())
    code, printed = wb(*pair, "--claim", "bpb", "--json")
    document = json.loads(printed)
    assert code == 0
    assert document["claims"]["nll"] == "refused"
    assert document["claims"]["bpb"] == "flagged"  # a larger vocabulary has more parameters
    assert effects(document, "tokenizer") == {"nll": "refuse", "bpb": None}
    assert effects(document, "parameters")["bpb"] == "flag"
    for rule in ("data", "evaluation", "budget", "seeds", "optimizer"):
        assert effects(document, rule)["bpb"] is None, rule
    numbers = document["results"]
    records = [read_record(store.runs / name) for name in ("large-s1", "small-s1")]
    tables = [
        parquet.read_table(
            store.runs / record.name / f"evaluations/step_{8:08d}.parquet"
        ).to_pylist()
        for record in records
    ]
    scored = [[row for row in table if row["set"] == "held_out"] for table in tables]
    bytes_, tokens = (
        [sum(row[key] for row in rows) for rows in scored] for key in ("bytes", "tokens")
    )
    assert bytes_[0] == bytes_[1]
    assert tokens[0] != tokens[1]
    for key, rows, size in zip("ab", scored, bytes_, strict=True):
        by_hand = sum(row["nll_sum"] for row in rows) / math.log(2) / size
        assert numbers["held_out/bits_per_byte"][key] == pytest.approx(by_hand, rel=1e-6)
        assert numbers["held_out/nll"][key] is None
    assert numbers["held_out/perplexity"]["difference"] is None


def test_arms_of_seeds(wb: Wb, store: Store) -> None:
    arms = ["--a", *NAMES[:2], "--b", *NAMES[2:], "--names", "large,small"]
    code, printed = wb(*arms, "--treatment", "tokenizer", "--claim", "bpb", "--json")
    assert code == 0
    document = json.loads(printed)
    assert document["deciding"] == ["held_out/bits_per_byte"]
    number = document["results"]["held_out/bits_per_byte"]
    assert number["seeds"]["n"] == 2
    assert document["results"]["held_out/nll"]["values"]["a"] == [None, None]
    report = (Path(document["report"]) / "report.md").read_text()
    assert "bits/byte" in report
    assert "held_out/nll of" not in report
    assert not any(path.name == "curves-train.png" for path in Path(document["report"]).iterdir())
    code, said = wb(*arms, "--treatment", "tokenizer")
    assert code == 3
    for word in ("better than", "not distinguishable"):
        assert word not in said
