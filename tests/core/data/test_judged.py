"""A set is called held out only where that was measured; else by what it has earned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.core.data.errors import DataError
from workbench.core.data.loading import Data, load_data
from workbench.core.evaluate import SetScore
from workbench.spec.run import RunSpec


def texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in row) for row in rng.integers(0, 900, (count, 40))]


def write(path: Path, documents: list[str]) -> str:
    path.write_text("\n\n".join(documents))
    return str(path)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Data]:
    train = write(tmp_path / "train.txt", texts(200, 0))

    def build(documents: list[str], **options: Any) -> Data:
        given = {"name": "wiki", "path": write(tmp_path / "wiki.txt", documents)}
        data = {"dataset": "text", "text_file": train, "held_out": [given]} | options
        changes = {"training": {"seq_len": 32}, "tokenizer": {"name": "bytes"}, "data": data}
        spec = RunSpec.model_validate({"name": "x", **changes})
        return load_data(spec, tmp_path / "store", seed=1)

    return build


def trained(data: Data, count: int) -> list[str]:
    """Documents of the training text."""
    one = data.evaluation_sets["train_split"]
    return [bytes(ids.tolist()).decode() for ids in one.documents[:count]]


def facts(data: Data, name: str = "held_out.wiki") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(data.facts))["evaluation"][name]
    return found


def test_new_text_is_held_out(load: Callable[..., Data]) -> None:
    data = load(texts(30, 1))
    assert list(data.evaluation_sets) == ["train_split", "held_out", "held_out.wiki"]
    found = facts(data)
    assert (found["status"], found["documents"]) == ("held_out", 30)
    assert found["overlap"]["ngrams"] == 30 * 28
    assert found["overlap"]["ngrams_in_training"] == 0
    assert facts(data, "held_out")["status"] == "held_out"
    assert facts(data, "train_split")["status"] == "train_split"


def test_a_held_out_set_that_overlaps_training_is_contaminated(load: Callable[..., Data]) -> None:
    """Two of 30 documents: one copied whole, one for a third of its words."""
    fresh = texts(28, 1)
    copy, source = trained(load(fresh), 2)
    third = " ".join([*source.split()[:25], *texts(1, 7)[0].split()])
    data = load([copy, third, *fresh])
    assert list(data.evaluation_sets) == ["train_split", "held_out", "contaminated.wiki"]
    found = facts(data)
    assert found["status"] == "contaminated"
    assert found["overlap"]["overlapping_documents"] == 2
    assert found["overlap"]["copies"] == 1
    assert found["overlap"]["ngrams_in_training"] == 28 + 13
    assert found["overlap"]["histogram"] == [28, 0, 0, 1, *[0] * 7, 1]
    one = data.evaluation_sets["contaminated.wiki"]
    assert one.clean is not None
    overlap = [bytes(one.documents[i].tolist()).decode() for i in np.flatnonzero(~one.clean)]
    assert sorted(overlap) == sorted([copy, third])
    assert found["overlap"]["overlapping_tokens"] == len(copy) + len(third)


def test_copies_and_near_copies_of_training_documents_are_counted(
    load: Callable[..., Data],
) -> None:
    """Of 100 documents ten stand in training verbatim, five more with other case and blanks."""
    fresh = texts(85, 1)
    held_out = load(fresh).evaluation_sets["held_out"].documents
    apart = {bytes(ids.tolist()).decode() for ids in held_out}
    source = [text for text in texts(200, 0) if text not in apart]
    copies, changed = source[:10], [text.upper().replace(" ", "\t ") for text in source[10:15]]
    data = load([*copies, *changed, *fresh])
    found = facts(data)["overlap"]
    assert facts(data)["status"] == "contaminated"
    assert (found["copies"], found["overlapping_documents"]) == (10, 15)
    assert found["ngrams_in_training"] == 15 * 28
    one = data.evaluation_sets["contaminated.wiki"]
    assert one.clean is not None
    assert int(one.clean.sum()) == 85


def test_an_evaluation_set_that_is_the_training_text(load: Callable[..., Data]) -> None:
    """Every document overlaps, so none is clean: there is no NLL over the clean ones."""
    own = trained(load(texts(30, 1)), 8)
    data = load(own)
    found = facts(data)
    assert found["status"] == "contaminated"
    assert found["overlap"]["copies"] == found["documents"] == 8
    assert found["overlap"]["share"] == 1.0
    assert data.evaluation_sets["contaminated.wiki"].clean is not None
    assert not data.evaluation_sets["contaminated.wiki"].clean.any()


def test_the_limits_are_those_of_the_spec(load: Callable[..., Data]) -> None:
    fresh = texts(28, 1)
    copy, _ = trained(load(fresh), 2)
    assert facts(load([copy, *fresh]))["status"] == "contaminated"
    found = facts(load([copy, *fresh], overlap_limit=0.05))
    assert (found["status"], found["overlap"]["overlapping_documents"]) == ("held_out", 1)
    assert found["overlap_rule"].endswith("contaminated above 0.05 of documents or scored tokens")
    part = " ".join([*copy.split()[:20], *texts(1, 7)[0].split()])  # 8 of 48 n-grams
    assert facts(load([part, *fresh]))["status"] == "held_out"
    assert facts(load([part, *fresh], overlap_document_share=0.1))["status"] == "contaminated"
    assert facts(load([part, *fresh], overlap_ngram=5))["status"] == "contaminated"


def test_a_file_that_is_missing_is_named(load: Callable[..., Data], tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    other = [{"name": "other", "path": str(tmp_path / "none/here.txt")}]
    with pytest.raises(DataError, match=r"data\.held_out\[0\]\.path: no such file"):
        load(texts(30, 1), held_out=other)


def test_the_nll_over_the_clean_documents() -> None:
    sums, tokens = np.array([10.0, 2.0, 6.0]), np.array([4, 2, 2])
    score = SetScore("contaminated.x", ["a", "b", "c"], sums, tokens, None)
    assert "contaminated.x/clean_nll" not in score.values()
    clean = np.array([False, True, True])
    score = SetScore("contaminated.x", ["a", "b", "c"], sums, tokens, None, clean)
    assert score.values()["contaminated.x/clean_nll"] == 2.0
    assert math.isclose(score.values()["contaminated.x/nll"] or 0, 18 / 8)
    none = SetScore("contaminated.x", ["a", "b", "c"], sums, tokens, None, clean & False)
    assert none.values()["contaminated.x/clean_nll"] is None
