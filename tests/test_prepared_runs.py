"""From text to a run: what `wb data prepare` wrote is trained on and scored as what it is."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tiny_runs import ROUTED, untracked_run

from workbench.core.data.corpus import text_corpus
from workbench.core.data.inspection import inspect
from workbench.core.data.parts import TokenizerName
from workbench.core.data.prepare import prepare
from workbench.spec.run import RunSpec
from workbench.track.store import Store


def write_texts(path: Path) -> Path:
    draw = random.Random(3)
    words = [f"word{number}" for number in range(400)]
    texts = [" ".join(draw.choices(words, k=draw.randint(20, 60))) for _ in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_run_on_prepared_shards(tmp_path: Path) -> None:
    corpus = text_corpus([str(write_texts(tmp_path / "text.jsonl"))], "text", "auto", place="SRC")
    cache = tmp_path / "cache"
    done = prepare(corpus, tmp_path / "out", TokenizerName("bytes", None, cache), 0.1)
    data = {
        "dataset": "tokens",
        "tokens_path": str(done.folder / "train"),
        "eval_tokens_path": str(done.folder / "held_out"),
        "overlap_ngram": 64,  # of shards the ids are compared: 13 bytes are two of these words
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
    outcome = untracked_run(spec, Store(tmp_path / "mlruns"))
    assert outcome.record.status == "FINISHED"
    ran = outcome.record.effective
    assert ran.tokenizer.name == "bytes"
    assert set(ran.evaluation) == {"held_out", "train_split"}
    scored, written = ran.evaluation["held_out"], done.manifest["shards"]["held_out"]
    assert (scored.unit, scored.documents) == ("document", written["documents"])
    assert scored.status == "held_out"
    assert scored.scored_tokens == written["tokens"]
    assert scored.bytes == written["text_bytes"]
    train, held_out = inspect(done.folder, cache)
    assert train["holds"]
    assert held_out["holds"]
    assert held_out["documents"]["count"] == scored.documents
