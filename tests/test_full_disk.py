"""Every writer on a full disk: an error that names the file, and nothing left half-written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from full_disks import largest_file, tree
from tiny_runs import tiny_parts, tiny_spec, untracked_run, write_corpus

from workbench.compare import compare_runs, write_report
from workbench.core.checkpoint import save_checkpoint
from workbench.core.data.corpus import text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.tokenizer import load_tokenizer
from workbench.core.evaluate import SetScore, write_scores
from workbench.errors import StoreError
from workbench.run import RunOutcome
from workbench.track.journal import Journal, columns
from workbench.track.record import write_record
from workbench.track.store import Store
from workbench.views import CURVE, draw_curve

Writer = Callable[[Path], object]
ROOM = 64  # bytes: the first blocks still fit


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunOutcome:
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("finished")
    return untracked_run(tiny_spec(folder), Store(folder / "mlruns"))


def scores(folder: Path) -> None:
    names = [f"{number:064x}" for number in range(50)]
    score = SetScore("held_out", names, np.ones(50), np.ones(50, np.int64), None)
    with largest_file(ROOM):
        write_scores([score], folder / "step_00000004.parquet")


def corpus(folder: Path) -> None:
    text = text_corpus(str(write_corpus(folder.parent / "corpus.txt")), unit="blank_line")
    with largest_file(ROOM):
        encode_corpus(text, load_tokenizer("bytes", None, folder), folder)


def checkpoint(folder: Path) -> None:
    parts = tiny_parts(folder.parent)
    with largest_file(ROOM):
        save_checkpoint(parts.state, folder, {}, keep=2)


@pytest.mark.parametrize("write", [scores, corpus, checkpoint])
def test_a_writer_without_room_leaves_nothing(tmp_path: Path, write: Writer) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(StoreError) as caught:
        write(folder)
    assert str(folder) in str(caught.value)
    assert "file too large" in str(caught.value).lower()
    assert tree(folder) == {}


def test_a_record_without_room_leaves_the_one_before(finished: RunOutcome, tmp_path: Path) -> None:
    write_record(finished.record, tmp_path)
    before = tree(tmp_path)
    with largest_file(ROOM), pytest.raises(StoreError, match=r"run_config\.json"):
        write_record(finished.record, tmp_path)
    assert tree(tmp_path) == before


def test_a_journal_that_cannot_begin_does_not_exist(tmp_path: Path) -> None:
    with largest_file(ROOM), pytest.raises(StoreError, match=r"metrics\.csv"):
        Journal(tmp_path / "metrics.csv", columns(["held_out"]))
    assert tree(tmp_path) == {}
    Journal(tmp_path / "metrics.csv", columns(["held_out"])).close()


def test_a_report_without_room_leaves_nothing(finished: RunOutcome, tmp_path: Path) -> None:
    store = Store(finished.folder.parents[1])
    other = untracked_run(tiny_spec(store.home.parent, "other", optimizer={"lr": 1e-3}), store)
    comparison = compare_runs(finished.folder, other.folder, treatment=["optimizer.lr"])
    assert comparison.results is not None  # so that there are figures
    with largest_file(ROOM), pytest.raises(StoreError):
        write_report(comparison, tmp_path)
    assert tree(tmp_path) == {}


def test_a_curve_without_room_is_a_warning(
    finished: RunOutcome, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    before = tree(finished.folder)
    with largest_file(ROOM):
        assert draw_curve(finished.folder) is None
    assert tree(finished.folder) == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert draw_curve(finished.folder) == finished.folder / CURVE
    assert set(tree(finished.folder)) == {*before, CURVE}
