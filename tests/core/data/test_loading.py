"""From spec to data: facts that identify what a run read, and nothing that depends on paths."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.core.data.batches import TokenDigest
from workbench.core.data.encoded import EncodedCorpus, normalised
from workbench.core.data.errors import DataError
from workbench.core.data.loading import load_data
from workbench.core.data.tokenizer import Tokenizer
from workbench.spec.run import RunSpec

MakeSpec = Callable[..., Any]
RANKS_4096 = Path(__file__).parents[3] / "configs/tokenizer/o200k-4096.tiktoken"


@pytest.fixture
def text_file(tmp_path: Path, words: Callable[..., list[str]]) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(words(200)))
    return path


def digest_of(data: Any, count: int = 20) -> str:
    digest = TokenDigest()
    digest.update(data.train_stream().next_batch(count))
    return digest.hexdigest()


def test_sample_by_a_real_spec(sample: EncodedCorpus, store: Path) -> None:
    spec = RunSpec.model_validate({"name": "x", "data": {"dataset": "sample"}})
    data = load_data(spec, store, seed=42)
    facts = json.loads(json.dumps(data.facts))
    assert facts["tokenizer"] == {
        "name": "o200k_base",
        "vocab_size": 200_019,
        "sha256": data.tokenizer.content_sha256,
    }
    held_out = facts["evaluation"]["held_out"]
    assert (held_out.pop("status"), held_out.pop("overlap_rule")) == (
        "held_out",
        "n-grams of 13 words; a document overlaps from 0.2 of them on; contaminated above 0.01 of"
        " documents or scored tokens",
    )
    assert held_out.pop("overlap") == {
        "method": "every n-gram, 64-bit hashes",
        "measured_on": "words of the text",
        "ngrams": 36_729,
        "ngrams_in_training": 651,
        "share": 651 / 36_729,
        "copies": 0,
        "overlapping_documents": 0,
        "overlapping_tokens": 0,
        "histogram": [28, 24, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    }
    assert data.evaluation_sets["held_out"].clean.tolist() == [True] * 54
    assert held_out == {
        "sha256": "7b3b93d9846c5ebef5f0cc73d5b6df72c3cc7a907ee972e61c635f79715bac41",
        "documents": 54,
        "unit": "document",
        "scored_tokens": 47_228,
        "bytes": 194_471,
        "context": "starts with the end-of-document id; windows of 1024, no overlap",
    }
    assert facts["evaluation"]["train_split"]["documents"] == 55
    assert facts["data"]["split"].startswith("document group hash < 0.05, near-")
    assert facts["data"]["train_tokens"] + held_out["scored_tokens"] == 973_918
    assert facts["data"]["train_bytes"] + held_out["bytes"] == 4_053_564
    assert facts["data"]["counts"]["windows_per_epoch"] == 906
    batch = data.train_stream().next_batch(4)
    assert batch.shape == (4, 1025)
    assert int(batch.max()) < 200_019


def test_nothing_in_the_data_but_the_order_depends_on_the_seed(
    make_spec: MakeSpec, text_file: Path, tmp_path: Path
) -> None:
    one, two = (
        load_data(make_spec(text_file=str(text_file)), tmp_path / "s", seed=seed) for seed in (1, 2)
    )
    assert one.facts == two.facts
    assert digest_of(one) != digest_of(two)
    again = load_data(make_spec(text_file=str(text_file)), tmp_path / "s", seed=1)
    assert digest_of(one) == digest_of(again)


def test_a_path_is_no_fact(make_spec: MakeSpec, text_file: Path, tmp_path: Path) -> None:
    copy, link = tmp_path / "copy.txt", tmp_path / "link.txt"
    copy.write_bytes(text_file.read_bytes())
    link.symlink_to(text_file)
    datas = [
        load_data(make_spec(text_file=str(path)), tmp_path / store, seed=1)
        for path, store in ((text_file, "s"), (copy, "s2"), (link, "s"))
    ]
    assert datas[0].facts == datas[1].facts == datas[2].facts
    assert len({digest_of(data) for data in datas}) == 1


def test_the_same_documents_from_jsonl_are_the_same_data(
    make_spec: MakeSpec, text_file: Path, tmp_path: Path, words: Callable[..., list[str]]
) -> None:
    lines = [json.dumps({"body": text}) + "\n" for text in words(200)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    one = load_data(make_spec(text_file=str(text_file)), tmp_path / "s", seed=1)
    spec = make_spec(text_file=str(tmp_path / "a.jsonl"), text_field="body")
    two = load_data(spec, tmp_path / "s", seed=1)
    for key in ("train_sha256", "split", "train_documents", "train_tokens", "train_bytes"):
        assert one.facts["data"][key] == two.facts["data"][key]
    assert one.facts["evaluation"] == two.facts["evaluation"]
    assert digest_of(one) == digest_of(two)


def test_the_stream_holds_training_documents_only(
    make_spec: MakeSpec, text_file: Path, tmp_path: Path
) -> None:
    spec = make_spec(text_file=str(text_file), order="sequential", seq_len=8, held_out_ratio=0.3)
    data = load_data(spec, tmp_path / "s", seed=1)
    stream = data.train_stream()
    assert stream.windows_per_epoch is not None
    ids = stream.next_batch(stream.windows_per_epoch)[:, :-1].ravel()
    text = bytes(np.where(ids == 256, 10, ids).astype(np.uint8)).decode()
    trained = {normalised(line) for line in text.splitlines()}
    held_out = {
        normalised(data.tokenizer.decode(d)) for d in data.evaluation_sets["held_out"].documents
    }
    train_split = [
        normalised(data.tokenizer.decode(d)) for d in data.evaluation_sets["train_split"].documents
    ]
    assert len(held_out) > 40
    assert not trained & held_out
    assert len(trained & set(train_split)) >= len(train_split) - 1  # the last may be cut off
    assert ids[0] == 256


def test_tokenizers_differ_and_the_text_scored_does_not(
    make_spec: MakeSpec, text_file: Path, tmp_path: Path
) -> None:
    one = load_data(make_spec(text_file=str(text_file)), tmp_path / "s", seed=1)
    spec = make_spec(text_file=str(text_file), name="file", path=str(RANKS_4096))
    two = load_data(spec, tmp_path / "s", seed=1)
    assert one.facts["tokenizer"]["sha256"] != two.facts["tokenizer"]["sha256"]
    assert one.facts["data"]["train_sha256"] == two.facts["data"]["train_sha256"]
    for name in ("held_out", "train_split"):
        a, b = one.facts["evaluation"][name], two.facts["evaluation"][name]
        assert (a["sha256"], a["bytes"]) == (b["sha256"], b["bytes"])
        assert a["scored_tokens"] > b["scored_tokens"]


def test_eval_documents_takes_the_first_in_hash_order(
    make_spec: MakeSpec, text_file: Path, tmp_path: Path
) -> None:
    def held_out(count: int) -> Any:
        spec = make_spec(text_file=str(text_file), eval_documents=count, held_out_ratio=0.2)
        return load_data(spec, tmp_path / "s", seed=1)

    some, whole = held_out(3), held_out(0)
    assert some.facts["evaluation"]["held_out"]["documents"] == 3
    first = [d.tolist() for d in whole.evaluation_sets["held_out"].documents[:3]]
    assert [d.tolist() for d in some.evaluation_sets["held_out"].documents] == first
    hashes = whole.evaluation_sets["held_out"].content_sha256
    assert [bytes(row) for row in hashes] == sorted(bytes(row) for row in hashes)
    assert some.facts["evaluation"]["held_out"]["sha256"] == (
        hashlib.sha256(hashes[:3].tobytes()).hexdigest()
    )


def test_a_small_text_is_named_contiguous_tail(make_spec: MakeSpec, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one long document " * 1000)
    data = load_data(make_spec(text_file=str(tmp_path / "a.txt")), tmp_path / "s", seed=1)
    assert data.facts["data"]["split"] == "contiguous_tail 0.05"
    assert data.facts["evaluation"]["held_out"]["unit"] == "block of 1024 tokens"
    assert data.facts["evaluation"]["train_split"]["unit"] == "block of 1024 tokens"
    assert data.facts["evaluation"]["held_out"]["scored_tokens"] == 2048


def test_one_token_and_empty_documents(make_spec: MakeSpec, tmp_path: Path) -> None:
    texts = ["", "x", "  ", *[f"document number {i} of many" for i in range(40)]]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    data = load_data(make_spec(text_file=str(tmp_path / "a.jsonl")), tmp_path / "s", seed=1)
    counts = data.facts["data"]["counts"]
    assert (counts["documents"], counts["skipped_empty"]) == (41, 2)
    assert all(type(value) is int for value in counts.values())


def test_a_text_smaller_than_a_window_is_refused_with_sizes(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a few words only, far too few")
    with pytest.raises(DataError, match=r"training\.seq_len: .*has 24 tokens.*takes 33"):
        load_data(make_spec(text_file=str(tmp_path / "a.txt")), tmp_path / "s", seed=1)


def test_held_out_without_a_ratio_is_refused(
    make_spec: MakeSpec, text_file: Path, tmp_path: Path
) -> None:
    spec = make_spec(text_file=str(text_file), held_out_ratio=0.0)
    with pytest.raises(DataError, match="leaves no documents to hold out"):
        load_data(spec, tmp_path / "s", seed=1)
    spec.evaluation.sets = ["train_split"]
    data = load_data(spec, tmp_path / "s", seed=1)
    assert data.facts["data"]["split"] == "none"
    assert set(data.evaluation_sets) == {"train_split"}


def test_random_ids(make_spec: MakeSpec, tmp_path: Path) -> None:
    one, two = (load_data(make_spec("random"), tmp_path, seed=seed) for seed in (1, 2))
    facts = one.facts
    assert "random" in facts["data"]["source"]
    assert facts["data"]["train_tokens"] == {"not_applicable": "random ids stand for no text"}
    assert facts["evaluation"]["held_out"]["bytes"] == facts["data"]["train_bytes"]
    assert facts["evaluation"]["held_out"]["scored_tokens"] == 8 * 1024 - sum(
        int((d == 256).sum()) for d in one.evaluation_sets["unproven"].documents
    )
    assert facts["evaluation"]["held_out"] == two.facts["evaluation"]["held_out"]
    assert digest_of(one) != digest_of(two)
    trained = one.train_stream().next_batch(40)[:, :-1].ravel().tolist()
    documents = one.evaluation_sets["train_split"].documents
    assert documents[0].tolist() == trained[:1024]
    assert one.evaluation_sets["unproven"].documents[0].tolist() != documents[0].tolist()
    status = {name: facts["evaluation"][name]["status"] for name in ("held_out", "train_split")}
    assert status == {"held_out": "unproven", "train_split": "train_split"}
    assert "smoke test" in facts["evaluation"]["held_out"]["overlap"]["not_applicable"]


def test_random_needs_no_corpus(make_spec: MakeSpec, tmp_path: Path) -> None:
    load_data(make_spec("random"), tmp_path / "s", seed=1)
    assert not (tmp_path / "s").exists()


def test_nothing_is_written_outside_the_cache(
    make_spec: MakeSpec, text_file: Path, tmp_path: Path, small: Tokenizer
) -> None:
    load_data(make_spec(text_file=str(text_file)), tmp_path / "s", seed=1)
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"cache"}


def test_the_data_package_does_not_import_torch() -> None:
    code = (
        "import sys, workbench.core.data.loading as _; "
        "print([m for m in ('torch', 'pyarrow', 'pandas', 'mlflow') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"
