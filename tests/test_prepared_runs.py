"""From text to a run: what `wb data prepare` wrote is trained on and scored as what it is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tiny_runs import ROUTED, untracked_run

from workbench import evaluate_run
from workbench.core.data.corpus import text_corpus
from workbench.core.data.inspection import inspect
from workbench.core.data.parts import TokenizerName
from workbench.core.data.prepare import prepare
from workbench.core.data.shards import open_shard
from workbench.core.data.tokenizer import Ids
from workbench.spec.run import RunSpec
from workbench.track.events import NullTracker
from workbench.track.store import Store, read_entry


def write_texts(path: Path) -> Path:
    draw = random.Random(3)
    words = [f"word{number}" for number in range(400)]
    texts = [" ".join(draw.choices(words, k=draw.randint(20, 60))) for _ in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(folder: Path) -> list[Ids]:
    shard = open_shard(folder)
    assert shard.documents is not None
    return [shard.tokens[start:end] for start, end, *_ in shard.documents.tolist()]


def test_a_run_on_prepared_shards(tmp_path: Path) -> None:
    corpus = text_corpus([str(write_texts(tmp_path / "text.jsonl"))], "text", "auto", place="SRC")
    cache = tmp_path / "cache"
    done = prepare(corpus, tmp_path / "out", TokenizerName("bytes", None, cache), 0.1)
    data = {
        "dataset": "tokens",
        "tokens_path": str(done.folder / "train"),
        "eval_tokens_path": str(done.folder / "held_out"),
    }
    spec = RunSpec.model_validate(
        {
            "name": "prepared",
            "model": ROUTED,
            "training": {"steps": 2, "batch_size": 2, "seq_len": 32},
            "evaluation": {"eval_steps": 2},
            "telemetry": {"log_steps": 1},
            "data": data,
        }
    )
    store = Store(tmp_path / "mlruns")
    outcome = untracked_run(spec, store)
    assert outcome.record.status == "FINISHED"
    ran = outcome.record.effective
    assert ran.tokenizer.name == "bytes"
    assert set(ran.evaluation) == {"held_out", "train_split"}
    scored, written = ran.evaluation["held_out"], done.manifest["shards"]["held_out"]
    assert (scored.unit, scored.documents) == ("document", written["documents"])
    assert scored.status == "held_out"
    assert scored.scored_tokens == written["tokens"]
    assert scored.bytes == written["text_bytes"]
    assert isinstance(scored.overlap, dict)
    assert scored.overlap["measured_on"] == "words of the decoded ids (bytes)"
    # The text that was held out, scored afterwards: measured by its words beside those ids.
    held_out_texts = [bytes(ids.tolist()).decode() for ids in documents(done.folder / "held_out")]
    again = tmp_path / "again.jsonl"
    again.write_text("".join(json.dumps({"text": text}) + "\n" for text in held_out_texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_run, "tracker_for", lambda spec, store: NullTracker())
        entry = read_entry(outcome.folder)
        (added,) = evaluate_run.evaluate_run(entry, store, {"again": again}).added
    assert (added.name, added.sha256) == ("held_out.again", scored.sha256)
    assert added.values["held_out.again/nll"] == outcome.record.results.final["held_out/nll"]
    assert added.facts["overlap"]["ngrams"] == scored.overlap["ngrams"]
    train, held_out = inspect(done.folder, cache)
    assert train["holds"]
    assert held_out["holds"]
    assert held_out["documents"]["count"] == scored.documents


@pytest.mark.slow
def test_text_beside_a_run_whose_shards_name_no_hash(tmp_path: Path) -> None:
    """Their ids show which tokenizer it is, so text can be encoded, scored and measured."""
    corpus = text_corpus([str(write_texts(tmp_path / "text.jsonl"))], "text", "auto", place="SRC")
    done = prepare(corpus, tmp_path / "out", TokenizerName("bytes", None, tmp_path), 0.1)
    for file in done.folder.glob("*/tokens.docs.*"):
        file.unlink()
    document = {
        "name": "unnamed",
        "model": ROUTED,
        "training": {"steps": 2, "batch_size": 2, "seq_len": 32},
        "data": {"dataset": "tokens", "tokens_path": str(done.folder / "train")},
    }
    store = Store(tmp_path / "mlruns")
    outcome = untracked_run(RunSpec.model_validate(document), store)
    assert str(outcome.record.effective.tokenizer.sha256).startswith("shards:")
    more = tmp_path / "more.txt"
    more.write_text("a text of its own, which no run has seen before and none will see again soon")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_run, "tracker_for", lambda spec, store: NullTracker())
        entry = read_entry(outcome.folder)
        (added,) = evaluate_run.evaluate_run(entry, store, {"more": more}).added
    assert added.name == "held_out.more"
    assert added.facts["overlap"]["measured_on"] == "words of the text"
    assert added.facts["bytes"] == len(more.read_text())
