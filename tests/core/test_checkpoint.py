"""Checkpoints: whole or absent, whatever interrupts the writing; by name, not by position."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from tiny_runs import tiny_parts

from workbench.core import checkpoint as module
from workbench.core.checkpoint import checkpoints, is_whole, save_checkpoint
from workbench.core.train import TrainState, train
from workbench.errors import StoreError
from workbench.run import Components

FILES = ["model.safetensors", "optimizer.safetensors", "state.json"]


def trained(folder: Path, steps: int = 2, **changes: Any) -> Components:
    parts = tiny_parts(folder, training={"steps": steps}, **changes)
    list(train(parts.spec, parts.state))
    return parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Components:
    return trained(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def state(parts: Components, monkeypatch: pytest.MonkeyPatch) -> TrainState:
    """The state after two updates, and free to claim another step."""
    monkeypatch.setattr(parts.state, "step", 2)
    return parts.state


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_the_manifest_names_every_file_with_size_and_hash(
    state: TrainState, tmp_path: Path
) -> None:
    saved = save_checkpoint(state, tmp_path, {"seed": 42}, keep=2)
    assert saved.name == "step_00000002"
    manifest = json.loads((saved / "manifest.json").read_text())
    assert sorted(manifest["files"]) == FILES
    assert {p.name for p in saved.iterdir()} == {*FILES, "manifest.json"}
    for name, entry in manifest["files"].items():
        content = (saved / name).read_bytes()
        expected = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert entry == expected
    assert [p.name for p in tmp_path.iterdir()] == [saved.name]


def test_weights_and_position_read_back_equal(state: TrainState, tmp_path: Path) -> None:
    saved = save_checkpoint(state, tmp_path, {"seed": 42}, keep=2)
    weights = load_file(saved / "model.safetensors")
    assert set(weights) == set(state.model.state_dict())
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    document = json.loads((saved / "state.json").read_text())
    assert (document["step"], document["tokens"]) == (2, 256)
    assert document["stream"] == state.stream.state_dict()
    assert document["order_digest"] == state.digest.state_dict()
    assert document["lr_trace"] == state.trace.hexdigest()
    assert document["spec"] == {"seed": 42}


def test_moments_are_kept_by_the_name_of_their_parameter(state: TrainState, tmp_path: Path) -> None:
    """Two experts of equal shape can then not swap theirs."""
    saved = save_checkpoint(state, tmp_path, {}, keep=2)
    moments = load_file(saved / "optimizer.safetensors")
    names = [name for name, _ in state.model.named_parameters()]
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert set(moments) == {f"{name}/{kind}" for name in names for kind in kinds}
    for name, parameter in state.model.named_parameters():
        for kind in kinds:
            kept = state.optimizers[0].state[parameter][kind]
            assert torch.equal(moments[f"{name}/{kind}"], kept)
        assert bool(moments[f"{name}/exp_avg_sq"].any()), name


def test_an_untied_head_is_saved_beside_the_embedding(tmp_path: Path) -> None:
    parts = trained(tmp_path, model={"tie_word_embeddings": False})
    saved = save_checkpoint(parts.state, tmp_path / "c", {}, keep=1)
    weights = load_file(saved / "model.safetensors")
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(weights)


def test_only_the_newest_are_kept(state: TrainState, tmp_path: Path) -> None:
    for step in range(1, 6):
        state.step = step
        save_checkpoint(state, tmp_path, {}, keep=2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_00000004", "step_00000005"]
    assert len(list(tmp_path.iterdir())) == 2


def test_no_half_of_an_old_one_is_left_under_its_name(
    state: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed while it removes a checkpoint leaves what the next resume clears away."""
    save_checkpoint(state, tmp_path, {}, keep=1)
    remove = shutil.rmtree

    def die(path: Path, **options: Any) -> None:
        if (path / "manifest.json").exists():
            (path / "manifest.json").unlink()
            raise Died
        remove(path, **options)

    state.step = 3
    monkeypatch.setattr(module.shutil, "rmtree", die)
    with pytest.raises(Died):
        save_checkpoint(state, tmp_path, {}, keep=1)
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["step_00000003"]
    assert len(list(tmp_path.iterdir())) == 2, "the half that is left has a hidden name"


def test_what_is_not_whole_does_not_exist(state: TrainState, tmp_path: Path) -> None:
    good = save_checkpoint(state, tmp_path, {}, keep=9)
    (tmp_path / "step_00000020").mkdir()
    for number, name in enumerate(("model.safetensors", "manifest.json"), start=30):
        broken = shutil.copytree(good, tmp_path / f"step_{number:08d}")
        content = (broken / name).read_bytes()
        (broken / name).write_bytes(content[: len(content) // 2])
    missing = shutil.copytree(good, tmp_path / "step_00000040")
    (missing / "state.json").unlink()
    shutil.copytree(good, tmp_path / "step_5")
    assert checkpoints(tmp_path) == [good]


# -- interruptions


class Died(BaseException):
    """The process ends here: nothing after it may run."""


Stage = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]


def at_call(owner: Any, name: str, number: int, *, after: bool = False) -> Stage:
    """Something goes wrong at the n-th call of a function, before or after its work."""

    def install(patch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
        function, calls = getattr(owner, name), [0]

        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number and not after:
                fail()
            result = function(*args, **options)
            if calls[0] == number:
                fail()
            return result

        patch.setattr(owner, name, call)

    return install


STAGES: dict[str, Stage] = {
    "no folder": at_call(Path, "mkdir", 1),
    "an empty folder": at_call(safetensors.torch, "save_file", 1),
    "the weights alone": at_call(safetensors.torch, "save_file", 1, after=True),
    "no state": at_call(Path, "write_text", 1),
    "no manifest": at_call(Path, "write_text", 2),
    "nothing synced": at_call(module, "_sync", 1),
    "all but the last sync": at_call(module, "_sync", 5),
    "no rename": at_call(Path, "rename", 1),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("killed", [True, False])
def test_whatever_ends_the_writing_the_earlier_checkpoint_stays_whole(
    state: TrainState, tmp_path: Path, stage: str, killed: bool
) -> None:
    good = save_checkpoint(state, tmp_path, {}, keep=1)
    before = contents(good)

    def fail() -> None:
        raise Died if killed else OSError(errno.ENOSPC, "No space left on device")

    def nothing_runs(*_: Any, **__: Any) -> None:
        raise Died

    state.step = 3
    with pytest.MonkeyPatch.context() as patch:
        STAGES[stage](patch, fail)
        if killed:
            patch.setattr(module.shutil, "rmtree", nothing_runs)
        with pytest.raises(Died if killed else StoreError):
            save_checkpoint(state, tmp_path, {}, keep=1)
    assert checkpoints(tmp_path) == [good]
    assert contents(good) == before
    assert [p.name for p in tmp_path.glob("step_*")] == [good.name]
    if not killed:
        assert [p.name for p in tmp_path.iterdir()] == [good.name], "temporary files are removed"

    # The same process may go on, and a new one may have the number of the one that died.
    newest = save_checkpoint(state, tmp_path, {}, keep=1)
    assert is_whole(newest)
    assert checkpoints(tmp_path) == [newest]


def test_a_full_disk_is_a_clear_error(state: TrainState, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_sync", _full)
        with pytest.raises(StoreError) as caught:
            save_checkpoint(state, tmp_path, {}, keep=1)
    assert caught.value.exit_code == 74
    assert "step 2 (No space left on device)" in str(caught.value)
    assert re.search(r"it needs [\d,]+ bytes, [\d,]+ are free, at least", str(caught.value))
    assert not list(tmp_path.iterdir())


def _full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_limit_of_the_system_inside_safetensors_is_the_same_error(
    state: TrainState, tmp_path: Path
) -> None:
    """Its writer is not Python's, and neither are its errors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StoreError, match="could not write the checkpoint of step 2"):
            save_checkpoint(state, tmp_path, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_saving_does_not_disturb_training(tmp_path: Path) -> None:
    results = {}
    for saves in (True, False):
        parts = tiny_parts(tmp_path, training={"steps": 4})
        results[saves] = []
        for result in train(parts.spec, parts.state):
            results[saves].append((result.nll, result.grad_norm))
            if saves:
                save_checkpoint(parts.state, tmp_path / "c", {}, keep=1)
    assert results[True] == results[False]
