"""Scores: token-weighted, one per document, the same for every batch size, equal to a reference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny_runs import tiny_parts
from torch import Tensor
from torch.nn import functional as F

from workbench.core import evaluate as evaluation
from workbench.core.data.evaluation_sets import EvaluationSet
from workbench.core.evaluate import SetScore, evaluate, write_scores
from workbench.core.loss_settings import LossSettings
from workbench.core.model import Transformer
from workbench.core.precision import FLOAT32
from workbench.run import Components

SETTINGS = LossSettings()
VOCAB, EOD = 64, 63


def score_of(sums: list[float], tokens: list[int], sizes: list[int] | None = None) -> SetScore:
    names = [f"{number:064x}" for number in range(len(sums))]
    sizes_ = None if sizes is None else np.array(sizes, np.int64)
    return SetScore("held_out", names, np.array(sums), np.array(tokens, np.int64), sizes_)


def documents_of(*lengths: int, first: int = 0, eod: int = EOD) -> EvaluationSet:
    """Documents that count upwards from `first`, so that each next id is the last plus one."""
    documents = [np.arange(first, first + n, dtype=np.uint16) for n in lengths]
    hashes = np.array([[n] * 32 for n in range(len(lengths))], np.uint8)
    return EvaluationSet("held_out", "document", eod, documents, None, hashes)


class Oracle:
    """Puts all mass on the id `ahead` of the present one. Hidden and vocabulary are one-hot."""

    def __init__(self, ahead: int) -> None:
        self.precision = FLOAT32
        self.head_weight = torch.roll(torch.eye(VOCAB), ahead, dims=0)  # row v, column v - ahead

    def __call__(self, ids: Tensor) -> Tensor:
        return 50.0 * F.one_hot(ids, VOCAB).float()


def test_the_mean_is_weighted_by_tokens() -> None:
    """Sums 2 and 90 over 1 and 9 tokens: 9.2, not the mean of the means, 6."""
    score = score_of([2.0, 90.0], [1, 9], [10, 80])
    assert score.nll == pytest.approx(9.2)
    assert score.perplexity == pytest.approx(math.exp(9.2))
    assert score.bits_per_byte == pytest.approx(92 / math.log(2) / 90)


def test_bits_per_byte_by_hand() -> None:
    """Eight bits of surprise over two bytes of text."""
    assert score_of([8 * math.log(2)], [1], [2]).bits_per_byte == pytest.approx(4.0)
    assert score_of([1.0], [1]).bits_per_byte is None


def test_perplexity_overflows_to_infinity_and_names_carry_the_set() -> None:
    score = score_of([1000.0], [1])
    assert score.values() == {
        "held_out/nll": 1000.0,
        "held_out/perplexity": math.inf,
        "held_out/bits_per_byte": None,
    }


@pytest.mark.parametrize(("ahead", "low"), [(1, True), (2, False), (0, False)])
def test_the_target_is_the_next_token(ahead: int, low: bool) -> None:
    """Shifted once: an oracle of the next id scores 0, one of the id after it and a copier do
    not."""
    model: Any = Oracle(ahead)
    score = evaluate(model, documents_of(5, 30, 40), 16, SETTINGS)
    assert score.tokens.tolist() == [5, 30, 40]
    if low:
        assert score.nll == pytest.approx(0.0, abs=1e-12)
    else:
        assert score.nll == pytest.approx(50.0, rel=1e-6)


def test_padding_is_not_scored_and_documents_do_not_meet() -> None:
    """A short and a long document alone or together; the padding id is the end-of-document id."""
    model: Any = Oracle(2)  # every scored token costs 50, so any extra one shows
    together = evaluate(model, documents_of(5, 30), 32, SETTINGS)
    alone = [evaluate(model, documents_of(length), 32, SETTINGS) for length in (5, 30)]
    assert together.nll_sums.tolist() == [float(one.nll_sums[0]) for one in alone]
    assert together.tokens.tolist() == [5, 30]
    # The id that pads may also be a real one: then, too, only the end of documents is left out.
    zero = evaluate(model, documents_of(5, 30, first=1, eod=0), 32, SETTINGS)
    assert zero.tokens.tolist() == [5, 30]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Components:
    """A model with some structure in its logits: weights ten times as wide as at the start."""
    parts = tiny_parts(tmp_path_factory.mktemp("evaluate"))
    with torch.no_grad():
        parts.state.model.embed_tokens.weight.mul_(10)
    return parts


def token_nll(model: Transformer, context: Tensor, target: Tensor) -> float:
    """Plain float64 cross-entropy of one token after its context."""
    with torch.no_grad():
        logits = model.logits(context[None]).double()
    return float(F.cross_entropy(logits[0, -1], target))


def by_token(
    model: Transformer, documents: EvaluationSet, seq_len: int, stride: int
) -> list[float]:
    """Each token by itself, after the context that the policy gives it."""
    sums = []
    for document in documents.documents:
        ids = torch.from_numpy(np.r_[documents.eod_id, document].astype(np.int64))
        total = 0.0
        for token in range(len(document)):
            # Of the windows that hold the token, the first: later ones have it as context.
            start = stride * max(0, -(-(token + 1 - seq_len) // stride))
            total += token_nll(model, ids[start : token + 1], ids[token + 1])
        sums.append(total)
    return sums


def reference(model: Transformer, documents: EvaluationSet, seq_len: int) -> list[float]:
    """Plain float64 cross-entropy, document by document and window by window."""
    sums = []
    for document in documents.documents:
        ids = torch.from_numpy(np.r_[documents.eod_id, document].astype(np.int64))
        total = 0.0
        for start in range(0, len(document), seq_len):
            window = ids[start : start + seq_len + 1]
            with torch.no_grad():
                logits = model.logits(window[None, :-1]).double()
            total += float(F.cross_entropy(logits[0], window[1:], reduction="sum"))
        sums.append(total)
    return sums


def some_of(documents: EvaluationSet, count: int = 2) -> EvaluationSet:
    """The longest document, cut to 60 tokens, and the shortest ones."""
    order = np.argsort([-len(document) for document in documents.documents])
    chosen = np.r_[order[:1], order[1 - count :]]
    cut = [documents.documents[i][:60] for i in chosen]
    hashes = documents.content_sha256[chosen]
    return EvaluationSet(documents.name, "document", documents.eod_id, cut, None, hashes)


def test_equals_plain_cross_entropy_by_document(parts: Components) -> None:
    model = parts.state.model
    for documents in parts.data.evaluation_sets.values():
        score = evaluate(model, documents, 32, SETTINGS)
        expected = reference(model, documents, 32)
        assert len(expected) > 5
        assert score.nll_sums == pytest.approx(expected, rel=1e-6)
        assert score.tokens.tolist() == [len(document) for document in documents.documents]
        assert score.nll == pytest.approx(sum(expected) / score.tokens.sum(), rel=1e-7)
        assert np.array_equal(score.bytes, documents.byte_counts)
        assert score.bytes.tolist() == score.tokens.tolist()  # a byte tokenizer
        assert score.bits_per_byte == pytest.approx(score.nll / math.log(2))


@pytest.mark.parametrize("stride", [1, 5, 8])
def test_each_token_of_a_stride_has_the_context_of_its_window(
    parts: Components, stride: int
) -> None:
    documents = some_of(parts.data.evaluation_sets["held_out"])
    assert len(documents.documents[0]) > 3 * 16, "one document has several windows"
    score = evaluate(parts.state.model, documents, 16, SETTINGS, stride=stride)
    expected = by_token(parts.state.model, documents, 16, stride)
    assert score.nll_sums == pytest.approx(expected, rel=1e-6)
    assert score.tokens.tolist() == [len(document) for document in documents.documents]


def test_a_stride_of_one_gives_every_token_all_the_context_a_window_holds(
    parts: Components,
) -> None:
    model, documents = parts.state.model, some_of(parts.data.evaluation_sets["held_out"])
    expected = []
    for document in documents.documents:
        ids = torch.from_numpy(np.r_[documents.eod_id, document].astype(np.int64))
        nlls = [token_nll(model, ids[max(0, t - 16) : t], ids[t]) for t in range(1, len(ids))]
        expected.append(sum(nlls))
    score = evaluate(model, documents, 16, SETTINGS, stride=1)
    assert score.nll_sums == pytest.approx(expected, rel=1e-6)


def test_a_stride_of_the_whole_window_is_no_stride(parts: Components) -> None:
    documents = parts.data.evaluation_sets["held_out"]
    plain, strided = (
        evaluate(parts.state.model, documents, 16, SETTINGS, stride=stride) for stride in (None, 16)
    )
    assert plain.nll_sums.tolist() == strided.nll_sums.tolist()


def test_sums_are_exact_whatever_their_order(parts: Components) -> None:
    """1 + 1e16 - 1e16 in every order is 1: no addition rounds on the way."""
    values = [1.0, 1e16, -1e16]
    for order in ([0, 1, 2], [1, 0, 2], [1, 2, 0]):
        score = score_of([values[i] for i in order], [1, 1, 1], [8, 8, 8])
        assert score.nll == 1 / 3
        assert score.bits_per_byte == 1 / math.log(2) / 24
    documents = parts.data.evaluation_sets["held_out"]
    order = np.random.default_rng(1).permutation(len(documents.documents))
    shuffled = EvaluationSet(
        "held_out",
        "document",
        documents.eod_id,
        [documents.documents[i] for i in order],
        None,
        documents.content_sha256[order],
    )
    score = evaluate(parts.state.model, documents, 32, SETTINGS)
    other = evaluate(parts.state.model, shuffled, 32, SETTINGS)
    assert other.nll_sums == pytest.approx(score.nll_sums[order], rel=1e-6)
    assert other.documents == [score.documents[i] for i in order]


def test_a_window_with_nothing_to_score_is_no_trouble(parts: Components) -> None:
    """A stretch of end-of-document ids in a block; one window at a time."""
    ids = np.array([1, 2, 256, 256, 256, 3], np.uint16)
    hashes = np.zeros((1, 32), np.uint8)
    block = EvaluationSet("held_out", "block of 1024 tokens", 256, [ids], None, hashes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "TOKENS_AT_ONCE", 2)
        score = evaluate(parts.state.model, block, 2, SETTINGS)
    assert score.tokens.tolist() == [3]
    assert math.isfinite(score.nll)


def test_no_batch_size_changes_a_score(parts: Components, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = parts.data.evaluation_sets["held_out"]
    whole = evaluate(parts.state.model, documents, 32, SETTINGS)
    for windows in (1, 3, 4, 7):
        monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", windows * 32)
        score = evaluate(parts.state.model, documents, 32, SETTINGS)
        assert score.nll_sums == pytest.approx(whole.nll_sums, rel=1e-6)
        assert np.array_equal(score.tokens, whole.tokens)
        assert score.documents == whole.documents


def test_another_context_is_another_score(parts: Components) -> None:
    documents = parts.data.evaluation_sets["held_out"]
    found = {length: evaluate(parts.state.model, documents, length, SETTINGS) for length in (8, 32)}
    assert found[8].tokens.tolist() == found[32].tokens.tolist()
    assert found[8].nll != pytest.approx(found[32].nll, rel=1e-6)


def test_scoring_leaves_no_gradient_and_draws_no_random_number(parts: Components) -> None:
    before = torch.get_rng_state()
    evaluate(parts.state.model, parts.data.evaluation_sets["held_out"], 32, SETTINGS)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in parts.state.model.parameters())


def test_smoothing_and_z_play_no_part(parts: Components) -> None:
    documents = parts.data.evaluation_sets["held_out"]
    extra = LossSettings(label_smoothing=0.2, z_loss=0.1)
    one, other = (evaluate(parts.state.model, documents, 32, s) for s in (SETTINGS, extra))
    assert np.array_equal(one.nll_sums, other.nll_sums)


def test_whoever_is_asked_between_batches_may_end_it(parts: Components) -> None:
    def give_up() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        evaluate(parts.state.model, parts.data.evaluation_sets["held_out"], 32, SETTINGS, give_up)


def test_scores_are_written_by_document(tmp_path: Path) -> None:
    with_text, without = score_of([2.0, 90.0], [1, 9], [3, 40]), score_of([5.0], [2])
    with_text = replace(with_text, clean=np.array([True, False]))
    without = replace(without, name="train_split")
    columns = ("set", "index", "document", "tokens", "bytes", "nll_sum", "clean")
    path = tmp_path / "evaluations" / "step_00000000.parquet"
    write_scores([with_text, without], path)
    rows = pq.read_table(path).to_pylist()
    assert rows == [
        dict(zip(columns, row, strict=True))
        for row in [
            ("held_out", 0, f"{0:064x}", 1, 3, 2.0, True),
            ("held_out", 1, f"{1:064x}", 9, 40, 90.0, False),
            ("train_split", 0, f"{0:064x}", 2, None, 5.0, None),
        ]
    ]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
