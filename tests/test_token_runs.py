"""Runs on token shards: the same files as without a break, data known by content alone."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tiny_runs import ROUTED, untracked_run

from workbench import run as runner
from workbench.core.data.batches import Order
from workbench.core.data.errors import DataError
from workbench.core.data.evaluation_sets import scoring_windows
from workbench.core.data.loading import Data, load_data, vocab_size_of
from workbench.core.data.shards import ShardWriter
from workbench.resume import ResumeRequest
from workbench.spec.run import RunSpec
from workbench.track.events import NullTracker, Values
from workbench.track.record import read_record
from workbench.track.store import Store

REFERENCE = Path(__file__).parent / "data/token_shard"


def token_spec(name: str = "tiny", tokenizer: dict[str, Any] | None = None, **data: Any) -> RunSpec:
    given = {"dataset": "tokens", "tokens_path": str(REFERENCE / "train")} | data
    if "eval_tokens_path" not in data and "held_out_ratio" not in data:
        given["eval_tokens_path"] = str(REFERENCE / "eval")
    changed: dict[str, Any] = {
        "model": ROUTED,
        "training": {"steps": 4, "batch_size": 4, "seq_len": 32},
    }
    changed |= {"evaluation": {"eval_steps": 2}, "telemetry": {"log_steps": 1}}
    changed |= {"data": given, "tokenizer": tokenizer or {}}
    return RunSpec.model_validate({"name": name, **changed})


def load(tmp_path: Path, **options: Any) -> Data:
    return load_data(token_spec(**options), tmp_path / "store", seed=1)


def test_a_run_on_the_reference_shard(tmp_path: Path) -> None:
    store = Store(tmp_path / "mlruns")
    outcome = untracked_run(token_spec(), store)
    ran = outcome.record.effective
    assert outcome.record.status == "FINISHED"
    assert (ran.tokenizer.name, ran.tokenizer.vocab_size) == ("toy-512", 512)
    assert str(ran.tokenizer.sha256).startswith("shards:")
    held_out = ran.evaluation["held_out"]
    assert (held_out.documents, held_out.unit) == (3, "block of 1024 tokens")
    assert held_out.scored_tokens == 2499  # the first id has none before it
    assert str(held_out.context).startswith("starts with the id before it in the shard")
    assert vocab_size_of(token_spec(), tmp_path) == 512


def test_every_token_is_scored_once_after_the_one_before_it(tmp_path: Path) -> None:
    ids = np.fromfile(REFERENCE / "eval/tokens.bin", "<u2").astype(np.int64)
    one = load(tmp_path).evaluation_sets["held_out"]
    pairs = [
        (int(before), int(target))
        for window in scoring_windows(one, 32)
        for before, target in zip(window.inputs, window.targets, strict=True)
    ]
    assert sorted(pairs) == sorted(zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True))


def test_the_tail_is_held_out_and_never_trains(tmp_path: Path) -> None:
    ids = np.fromfile(REFERENCE / "train/tokens.bin", "<u2")
    data = load(tmp_path, held_out_ratio=0.05, order="sequential")
    stream = data.train_stream()
    stream.next_batch(stream.windows_per_epoch or 0)
    assert data.facts["data"]["split"] == "last 300 of 6000 ids"
    assert data.facts["data"]["counts"]["stream_tokens"] == 5700
    held_out = np.concatenate(list(data.evaluation_sets["held_out"].documents))
    assert held_out.tolist() == ids[5700:].tolist()
    first = data.train_stream().next_batch(1)[0]
    assert first.tolist() == ids[:33].tolist()


def test_the_same_content_is_the_same_data(tmp_path: Path) -> None:
    shutil.copytree(REFERENCE / "train", tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    facts = [
        load(tmp_path, tokens_path=str(path)).facts
        for path in (REFERENCE / "train", tmp_path / "copy", tmp_path / "link")
    ]
    assert facts[0] == facts[1] == facts[2]
    with pytest.raises(DataError, match=r"eval_tokens_path: holds the ids of the training shard"):
        load(tmp_path, eval_tokens_path=str(tmp_path / "link"))


def test_documents_are_split_whole(tmp_path: Path) -> None:
    with ShardWriter(
        tmp_path / "s", tokenizer="bytes", vocab_size=257, tokenizer_sha256="ab" * 32, eod_id=256
    ) as writer:
        for number in range(40):
            ids = np.full(20 + number, number)
            writer.append(ids, len(ids) * 2, bytes([number * 6]) + bytes(31))
        writer.finish()
    data = load(tmp_path, tokens_path=str(tmp_path / "s"), held_out_ratio=0.2, order="sequential")
    stream = data.train_stream()
    trained = set(stream.next_batch(stream.windows_per_epoch or 0).ravel().tolist())
    one = data.evaluation_sets["held_out"]
    held_out = {int(ids[0]) for ids in one.documents}
    assert held_out == set(range(9))
    assert not trained & held_out
    assert one.scored_bytes == 2 * sum(20 + n for n in range(9))
    assert data.facts["tokenizer"]["sha256"] == "ab" * 32


def write_shard(folder: Path, documents: list[list[int]]) -> str:
    with ShardWriter(folder, tokenizer="toy-512", vocab_size=512, eod_id=0) as writer:
        for number, ids in enumerate(documents):
            writer.append(np.array(ids), len(ids), bytes([number]) + bytes(31))
        writer.finish()
    return str(folder)


def test_a_shard_that_repeats_the_training_shard_is_contaminated(tmp_path: Path) -> None:
    """Found by its ids: the tokenizer need not be known. Where nothing says where documents end, a
    passage is found wherever it stands."""
    ids = np.fromfile(REFERENCE / "train/tokens.bin", "<u2").tolist()
    fresh = np.random.default_rng(0).integers(1, 512, (9, 60)).tolist()
    half = [*ids[2_000:2_030], *fresh[0][:30]]
    shard = write_shard(tmp_path / "s", [*fresh, half])
    plain = load(tmp_path, eval_tokens_path=write_shard(tmp_path / "plain", fresh))
    assert plain.facts["evaluation"]["held_out"]["status"] == "held_out"
    data = load(tmp_path, eval_tokens_path=shard)
    assert set(data.evaluation_sets) == {"train_split", "contaminated"}
    facts = data.facts["evaluation"]["held_out"]
    assert facts["overlap"]["ngrams_in_training"] == 30 - 12
    assert facts["overlap"]["overlapping_documents"] == 1
    assert facts["overlap_rule"].startswith("n-grams of 13 tokens;")


def test_a_document_in_both_shards_is_a_copy(tmp_path: Path) -> None:
    documents = np.random.default_rng(0).integers(1, 512, (40, 30)).tolist()
    train, other = (
        write_shard(tmp_path / "a", documents),
        write_shard(tmp_path / "b", documents[7:]),
    )
    data = load(tmp_path, tokens_path=train, eval_tokens_path=other)
    found = data.facts["evaluation"]["held_out"]["overlap"]
    assert (found["share"], found["overlapping_documents"]) == (1.0, 33)
    assert data.train_passages is not None
    assert data.train_passages.unit == "token"


class Interrupter(NullTracker):
    """Asks the run to stop when the row of step 3 has been written."""

    def log(self, values: Values) -> None:
        if values["step"] == 3:
            signal.raise_signal(signal.SIGINT)


def beside_text(folder: Path) -> dict[str, Any]:
    """A shard of documents that is split, and text beside it."""
    documents = [f"document {i}: " + " ".join(map(str, range(i, 9 * i, 7))) for i in range(40)]
    with ShardWriter(folder / "shard", tokenizer="bytes", vocab_size=257, eod_id=256) as writer:
        for text in documents:
            raw = text.encode()
            digest = hashlib.sha256(raw).digest()
            writer.append(np.frombuffer(raw, np.uint8), len(raw), digest)
        writer.finish()
    (folder / "more.txt").write_text("\n\n".join(f"a new text, {i} of a few" for i in range(5)))
    return {
        "tokens_path": str(folder / "shard"),
        "held_out_ratio": 0.2,
        "held_out": [{"name": "more", "path": str(folder / "more.txt")}],
    }


@pytest.mark.parametrize(
    "kind",
    [
        "beside_text",
        *(pytest.param(order, marks=pytest.mark.slow) for order in get_args(Order)),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    data = beside_text(tmp_path) if kind == "beside_text" else {"order": kind}
    spec, store = token_spec(**data), Store(tmp_path / "broken")
    straight = untracked_run(spec, Store(tmp_path / "straight"))
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: Interrupter())
    stopped = runner.run(spec, store, ["run"], quiet=True)
    assert stopped.record.status == "KILLED"
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    resumed = runner.run(spec, store, ["run"], quiet=True, resume=ResumeRequest())
    assert resumed.record.id == stopped.record.id
    assert resumed.record.effective.evaluation == straight.record.effective.evaluation
    assert resumed.record.points == straight.record.points
    assert resumed.record.results.final == straight.record.results.final
    weights = "checkpoints/*/model*.safetensors"
    one = sorted(straight.folder.glob(weights))[-1]
    other = sorted(resumed.folder.glob(weights))[-1]
    assert one.read_bytes() == other.read_bytes()


class Cutter(NullTracker):
    """Cuts a file when the row of step 2 has been written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def log(self, values: Values) -> None:
        if values["step"] == 2:
            os.truncate(self._file, 2_000)


def test_a_shard_that_is_cut_while_it_trains_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with the bytes that are there and those that should be, and not trained on; with the
    whole file the run goes on as if nothing had been."""
    shutil.copytree(REFERENCE / "train", tmp_path / "s")
    spec, store = token_spec(tokens_path=str(tmp_path / "s")), Store(tmp_path / "m")
    spec = spec.model_copy(
        update={"checkpoint": spec.checkpoint.model_copy(update={"save_steps": 1})}
    )
    file = tmp_path / "s/tokens.bin"
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: Cutter(file))
    with pytest.raises(DataError, match=r"tokens.bin: is too short.*2,000 bytes.*12,000 bytes"):
        runner.run(spec, store, ["run"], quiet=True)
    record = read_record(store.path_of("tiny"))
    assert (record.status, record.points[-1].tokens) == ("FAILED", 2 * 4 * 32)
    with pytest.raises(DataError, match=r"tokens.bin: is not the file that its index was written"):
        runner.run(spec, store, ["run"], quiet=True, resume=ResumeRequest())
    shutil.copy(REFERENCE / "train/tokens.bin", file)
    monkeypatch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
    resumed = runner.run(spec, store, ["run"], quiet=True, resume=ResumeRequest())
    assert resumed.record.status == "FINISHED"
    straight = untracked_run(token_spec(), Store(tmp_path / "straight"))
    assert resumed.record.points == straight.record.points
