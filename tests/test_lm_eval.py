"""lm-evaluation-harness on a checkpoint: offline, with a task over a local file of JSON lines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny_runs import tiny_spec, untracked_run
from torch.nn import functional as F

from workbench import evaluate_run as module
from workbench.cli import _guarded
from workbench.track.events import NullTracker
from workbench.track.record import read_record
from workbench.track.store import Store

CONTEXTS = ["the old cat", "a small dog", "not", "", "dog likes the river and the tree, and not"]
ENDS = ["sees", "likes a river", "tree", "and", "a", "the small old cat", "not"]
TASK = """\
task: cats
dataset_path: json
dataset_kwargs: {{data_files: "{data}"}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def items() -> list[dict[str, Any]]:
    """Forty questions with contexts, and made-up answers."""
    draw = np.random.default_rng(3)
    found = []
    for number in range(40):
        choices = [str(end) for end in draw.choice(ENDS, 3, replace=False)]
        context = f"{CONTEXTS[number % 3]} {number}"
        found.append({"context": context, "choices": choices, "answer": int(draw.integers(3))})
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run, a file of items, and the harness's definition of a task over it."""
    home = tmp_path_factory.mktemp("harness")
    untracked_run(tiny_spec(home), Store(home / "mlruns"))
    data = home / "cats.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items()))
    (home / "tasks").mkdir()
    (home / "tasks/cats.yaml").write_text(TASK.format(data=data))
    return home


@pytest.fixture(autouse=True)
def _offline(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WB_HOME", str(home / "mlruns"))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(home / "huggingface"))
    monkeypatch.setattr(module, "tracker_for", lambda spec, store: NullTracker())
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)  # the harness seeds every generator


@pytest.fixture
def model() -> Any:
    from workbench.lm_eval_adapter import WorkbenchLM

    return WorkbenchLM.of_run("tiny")


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> Any:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, 0) for one in arguments]


def log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    """Of every entry after `ids`, float64."""
    with torch.no_grad():
        return F.log_softmax(model._model.logits(torch.tensor([ids])).double()[0, -1], 0)


def test_without_the_package_the_error_says_how_to_get_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert _guarded(["eval", "tiny", "--lm-eval", "cats"]) == 2
    assert 'pip install "workbench[lm-eval]"' in capsys.readouterr().err


@pytest.mark.slow
def test_the_harness_finds_the_accuracy_that_the_workbench_finds(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = ["--task", str(home / "cats.jsonl")]
    theirs = ["--lm-eval", "cats", "--include-path", str(home / "tasks")]
    assert _guarded(["eval", "tiny", *ours, *theirs, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    numbers = {name: v for one in document["added"] for name, v in one["values"].items()}
    for kind in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr"):
        ours_is, theirs_is = (numbers[f"downstream/{n}cats/{kind}"] for n in ("", "lm-eval."))
        assert ours_is == pytest.approx(theirs_is, rel=1e-12), kind
    assert 0 < numbers["downstream/cats/acc"] < 1
    assert numbers["downstream/cats/acc"] != numbers["downstream/cats/acc_norm"]
    # Item by item, too.
    folder = home / "mlruns/runs/tiny/evaluations"
    own = pq.read_table(folder / "step_00000004.downstream.cats.parquet").to_pylist()
    kept = pq.read_table(folder / "step_00000004.downstream.lm-eval.cats.parquet").to_pylist()
    assert len(own) == len(kept) == 40
    for mine, other in zip(own, kept, strict=True):
        scores = [float(response[0][0]) for response in json.loads(other["responses"])]
        assert scores == pytest.approx(mine["log_likelihoods"], rel=1e-6)
        assert json.loads(other["metrics"]) == {
            "acc": float(mine["right"]),
            "acc_norm": float(mine["right_norm"]),
        }
    # The same again adds nothing; an unknown task is one clear error.
    before = read_record(folder.parent)
    assert _guarded(["eval", "tiny", *theirs, "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["added"]
    assert read_record(folder.parent) == before
    assert _guarded(["eval", "tiny", "--lm-eval", "dogs", *theirs[2:], "--json"]) == 2
    assert "knows no such task" in json.loads(capsys.readouterr().out)["error"]["message"]
    (home / "tasks/bad.yaml").write_text(
        TASK.format(data=home / "none.jsonl").replace("cats", "bad")
    )
    assert _guarded(["eval", "tiny", "--lm-eval", "bad", *theirs[2:], "--json"]) == 2
    assert "the harness cannot run this" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.slow
def test_log_likelihoods_are_those_of_each_byte_by_hand(home: Path, model: Any) -> None:
    pairs = [("the old", " cat"), ("", "dog"), ("a ", "tree"), ("the old", " river"), ("x", "")]
    found = model.loglikelihood(requests("loglikelihood", pairs))
    for (context, end), (total, greedy) in zip(pairs, found, strict=True):
        ids = [256, *context.encode()]
        expected, best = 0.0, True
        for byte in end.encode():
            logp = log_probabilities(model, ids)
            expected += float(logp[byte])
            best = best and int(logp.argmax()) == byte
            ids.append(byte)
        assert total == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert greedy == best
    # What the model itself would say is greedy.
    (text,) = model.generate_until(requests("generate_until", [("the", {"max_gen_toks": 3})]))
    ((_, greedy),) = model.loglikelihood(requests("loglikelihood", [("the", text)]))
    assert greedy
    with pytest.raises(ValueError, match="a continuation of 40 tokens; the window has 32"):
        model.loglikelihood(requests("loglikelihood", [("a", "b" * 40)]))


@pytest.mark.slow
def test_rolling_scores_every_token_once_with_the_last_window_full(home: Path, model: Any) -> None:
    text = "the old cat sees a river and the small dog likes a tree, and not the cat"
    assert 64 < len(text) < 96
    ids = [256, *text.encode()]
    expected = 0.0
    for place in range(1, len(ids)):
        block = (place - 1) // 32 * 32
        first = block if block + 32 < len(ids) else len(ids) - 33
        expected += float(log_probabilities(model, ids[first:place])[ids[place]])
    found = model.loglikelihood_rolling(
        requests("loglikelihood_rolling", [(text,), ("",), (text[:5],)])
    )
    assert found[0] == pytest.approx(expected, rel=1e-6)
    assert found[1] == 0.0
    assert math.isfinite(found[2])


@pytest.mark.slow
def test_generation_is_greedy_and_stops_where_it_is_told(home: Path, model: Any) -> None:
    ids, made = [256, *b"the old"], []
    for _ in range(12):
        byte = int(log_probabilities(model, ids[-32:]).argmax())
        if byte == 256:
            break
        ids, made = [*ids, byte], [*made, byte]
    whole = bytes(made).decode("utf-8", "replace")
    asked = {"max_gen_toks": 12, "until": []}
    assert model.generate_until(requests("generate_until", [("the old", asked)])) == [whole]
    assert len(whole) > 2
    stop = whole[2]
    asked = {"max_gen_toks": 12, "until": ["never said", stop]}
    found = model.generate_until(requests("generate_until", [("the old", asked)]))
    assert found == [whole[: whole.index(stop)]]
    for wrong in ({"do_sample": True}, {"temperature": 0.7}, {"num_beams": 4}):
        with pytest.raises(ValueError, match="only greedy generation is built"):
            model.generate_until(requests("generate_until", [("a", wrong)]))
