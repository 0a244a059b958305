"""Saving beside training: the state of the step, one checkpoint at a time, and no error lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from core.test_checkpoint import contents, trained

from workbench.core import saving
from workbench.core.checkpoint import Snapshot, checkpoints, save_checkpoint, write_checkpoint
from workbench.core.saving import Saver, overlaps
from workbench.core.train import train
from workbench.errors import StoreError

CPU = torch.device("cpu")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every device is one beside which is saved; a checkpoint is written once this is set."""
    monkeypatch.setattr(saving, "overlaps", lambda device, nbytes: True)
    go = threading.Event()

    def write(taken: Snapshot, folder: Path, keep: int) -> Path:
        assert go.wait(60)
        return write_checkpoint(taken, folder, keep)

    monkeypatch.setattr(saving, "write_checkpoint", write)
    return go


def test_it_is_safe_beside_another_device_and_with_room() -> None:
    cuda = torch.device("cuda")
    assert overlaps(cuda, 1000)
    assert not overlaps(CPU, 1000)
    assert not overlaps(cuda, psutil.virtual_memory().available)


def test_what_is_saved_is_the_state_of_the_step(tmp_path: Path, held: threading.Event) -> None:
    parts = trained(tmp_path, steps=6)  # trained twice over: the state goes on from there
    parts.state.step = 2
    beside = save_checkpoint(parts.state, tmp_path / "between", {"seed": 1}, keep=2)
    saver = Saver(tmp_path / "beside", 2, CPU)
    saver.save(parts.state, {"seed": 1})
    before = parts.state.model.head_weight.clone()
    list(train(parts.spec, parts.state))
    assert not torch.equal(before, parts.state.model.head_weight), "nothing was trained meanwhile"
    assert checkpoints(tmp_path / "beside") == []
    held.set()
    saver.wait()
    (saved,) = checkpoints(tmp_path / "beside")
    assert contents(saved) == contents(beside)


def test_one_at_a_time(tmp_path: Path, held: threading.Event) -> None:
    parts = trained(tmp_path)
    saver = Saver(tmp_path / "c", 9, CPU)
    saver.save(parts.state, {})
    parts.state.step = 7
    second = threading.Thread(target=saver.save, args=(parts.state, {}))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second did not wait for the first"
    assert sum(thread.name == "checkpoint" for thread in threading.enumerate()) == 1
    held.set()
    second.join()
    saver.wait()
    assert [path.name for path in checkpoints(tmp_path / "c")] == ["step_00000002", "step_00000007"]


@pytest.mark.parametrize("told", ["wait", "save"])
def test_an_error_is_told_once_to_who_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setattr(saving, "overlaps", lambda device, nbytes: True)
    parts = trained(tmp_path)
    (tmp_path / "c").write_text("a file where the folder should be")
    saver = Saver(tmp_path / "c", 2, CPU)
    saver.save(parts.state, {})
    calls: dict[str, tuple[Any, ...]] = {"wait": (), "save": (parts.state, {})}
    with pytest.raises(StoreError, match="checkpoint of step 2"):
        getattr(saver, told)(*calls[told])
    saver.wait()
