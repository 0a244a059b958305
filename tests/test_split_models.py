"""A model of which each of several processes holds a part: the run of one process all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_ranks import SPEC, WHOLE, Ran, ran, require_same_run, spec_file
from tiny_runs import DENSE, ROUTED, sections

from workbench.core.checkpoint import checkpoints
from workbench.core.load_model import load_model
from workbench.core.restore import open_checkpoint
from workbench.errors import UserError
from workbench.spec.run import RunSpec

pytestmark = pytest.mark.ddp

RAMPED = {
    "learn_shared_routed_gates": True,
    "shared_gate_init": 1.0,
    "routed_gate_init": 0.5,
    "expert_diversity_lambda": 0.01,
    "expert_diversity_target": "all",
    "expert_diversity_schedule_ratio": 0.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "gates, diversity, muon, two micro-batches, recomputed": {
        "model": ROUTED | RAMPED,
        "optimizer": {"name": "muon_tr", "lr": 3e-3, "muon_scope": "all", "muon_lr": 3e-3},
        "training": {"gradient_accumulation_steps": 2, "grad_ckpt": True},
    },
    "learned router, muon, untied head, three experts over two processes": {
        "model": ROUTED
        | {"mlp_type": "learned_router", "tie_word_embeddings": False, "top_k": 2}
        | {"num_experts": 3, "intermediate_size": 36},
        "optimizer": {"name": "muon_tr", "lr": 3e-3, "muon_scope": "expert", "muon_lr": 3e-3},
        "training": {"label_smoothing": 0.1, "z_loss": 1e-4, "gradient_accumulation_steps": 2},
    },
    "dense": {"model": DENSE},
    "bf16": {"training": {"precision": "bf16"}},
}


def sharded(folder: Path, name: str, **changes: Any) -> str:
    """The file of a spec that trains 20 steps under FSDP."""
    training = WHOLE | changes.pop("training", {}) | {"parallel": "fsdp"}
    return spec_file(folder, name, training=training, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_every_model_and_optimizer_trains_as_on_one_process(tmp_path: Path, kind: str) -> None:
    changes = MODELS[kind]
    training = WHOLE | changes.get("training", {})
    changes = changes | {"checkpoint": {"save_steps": 0}}
    whole = spec_file(tmp_path, "whole", **changes | {"training": training})
    split = sharded(tmp_path, "split", **changes)
    cases = [{"name": "one", "processes": 1, "spec": whole}]
    worlds = (2, 4) if kind.startswith("gates") else (2,)
    cases += [{"name": f"on_{n}", "processes": n, "spec": split} for n in worlds]
    found = ran(tmp_path, cases)
    for n in worlds:
        if kind == "bf16":
            require_close(found["one"], found[f"on_{n}"])
        else:
            # Muon orthogonalizes in bfloat16, whose roundings show in what an expert adds.
            require_same_run(found["one"], found[f"on_{n}"], 1e-2 if "muon" in kind else 1e-3)
        assert found[f"on_{n}"].record.effective.execution.parallel == f"fsdp, {n} processes"


def require_close(one: Ran, other: Ran) -> None:
    """As far as bfloat16 products of other shapes allow."""
    assert other.codes == [0] * len(other.codes), other.said
    assert one.rows("train/nll") == pytest.approx(other.rows("train/nll"), rel=1e-3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """A run under FSDP on two processes, killed at step 12 and resumed on 2, 4 and 1 (DDP)."""
    folder = tmp_path_factory.mktemp("saved")
    split = sharded(folder, "split", checkpoint={"save_steps": 5, "save_total_limit": 9})
    names = ("same", "more", "alone", "damaged")
    cases = [{"name": "straight", "processes": 2, "spec": split}]
    cases += [{"name": name, "processes": 2, "spec": split, "kill": [1, 12]} for name in names]
    begun = ran(folder, cases)
    assert [begun[name].codes for name in names] == [[74, -9]] * len(names), begun["same"].said
    shard = begun["damaged"].folder / "checkpoints/step_00000010"
    path = sorted(shard.glob("shard-*"))[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    resumes = [
        {"name": name, "processes": n, "spec": split, "options": ["--resume"]}
        for name, n in (("same", 2), ("more", 4), ("damaged", 2))
    ]
    ddp = spec_file(folder, "alone", training=WHOLE, checkpoint={"save_steps": 5})
    resumes += [{"name": "alone", "processes": 1, "spec": ddp, "options": ["--resume"]}]
    return {"straight": begun["straight"], **ran(folder, resumes)}


def weights_of(run: Ran, step: int = 20) -> dict[str, torch.Tensor]:
    return open_checkpoint(run.folder / "checkpoints" / f"step_{step:08d}").weights()


def moments_of(run: Ran) -> dict[str, torch.Tensor]:
    return open_checkpoint(checkpoints(run.folder / "checkpoints")[-1]).moments()


def require_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["same", "damaged"])
def test_a_resume_on_as_many_processes_ends_in_the_same_bits(
    saved: dict[str, Ran], name: str
) -> None:
    straight, resumed = saved["straight"], saved[name]
    assert resumed.codes == [0, 0], resumed.said
    step = {"same": 10, "damaged": 5}[name]  # a damaged checkpoint is passed over
    assert resumed.record.model_dump()["resumes"][-1]["step"] == step
    assert "step_00000010 is damaged" in resumed.said[0] or name == "same"
    for column in ("train/nll", "grad_norm", "held_out/nll", "expert_1_grad_norm"):
        assert straight.rows(column) == resumed.rows(column), column
    require_equal(weights_of(straight), weights_of(resumed))
    require_equal(moments_of(straight), moments_of(resumed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["more", "alone"])
def test_a_resume_on_other_processes_is_the_same_run(saved: dict[str, Ran], name: str) -> None:
    require_same_run(saved["straight"], saved[name])
    flagged = [one["path"] for one in saved[name].record.model_dump()["resumes"][-1]["changes"]]
    assert "effective.execution.parallel" in flagged


@pytest.mark.slow
def test_every_checkpoint_is_a_model_and_the_last_has_its_weights_in_one_file(
    saved: dict[str, Ran],
) -> None:
    folder = saved["straight"].folder
    with_weights = [p.name for p in checkpoints(folder / "checkpoints") if (p / W).exists()]
    assert with_weights == ["step_00000020"]
    assert len(checkpoints(folder / "checkpoints")) == 4
    last = folder / "checkpoints/step_00000020"
    loaded = load_model(folder).model.state_dict()
    require_equal(load_file(last / W), {name: loaded[name] for name in load_file(last / W)})
    for step in (5, 10, 15):
        load_model(folder, step)
    # The parts hold the same as the file.
    hidden = last / W
    hidden.rename(folder / "aside")
    try:
        require_equal(open_checkpoint_unchecked(last), load_file(folder / "aside"))
    finally:
        (folder / "aside").rename(hidden)


W = "model.safetensors"


def open_checkpoint_unchecked(path: Path) -> dict[str, torch.Tensor]:
    from workbench.core.shard_files import OF_WEIGHTS, read_shards

    return read_shards(path, OF_WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_twenty_processes_end_with_the_exit_code_of_their_run(
    tmp_path: Path, parallel: str
) -> None:
    short = {"steps": 1, "parallel": parallel}
    spec = spec_file(tmp_path, "short", training=WHOLE | short, evaluation={"eval_steps": 0})
    cases = [{"name": f"run_{n}", "processes": 2, "spec": spec} for n in range(9)]
    cases += [{"name": "dying", "processes": 2, "spec": spec, "kill": [1, 1]}]
    found = ran(tmp_path, cases)
    assert {name: run.codes for name, run in found.items()} == {
        **{f"run_{n}": [0, 0] for n in range(9)},
        "dying": [74, -9],
    }, [run.said for run in found.values() if run.codes != [0, 0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_over_nccl_trains_as_one_alone(tmp_path: Path, parallel: str) -> None:
    whole = spec_file(tmp_path, "whole", training=WHOLE | {"device": "cuda"})
    asked = WHOLE | {"device": "cuda", "parallel": parallel}
    split = spec_file(tmp_path, "nccl", training=asked)
    cases: list[dict[str, Any]] = [{"name": "one", "processes": 1, "spec": whole}]
    cases += [{"name": "nccl", "processes": 1, "launched": True, "spec": split}]
    found = ran(tmp_path, cases)
    require_same_run(found["one"], found["nccl"])
    assert found["nccl"].record.backend["distributed"] == "nccl"


def test_fsdp_with_compiled_blocks_is_refused(tmp_path: Path) -> None:
    training = {"parallel": "fsdp", "compile": True}
    given = {"name": "x", "seed": 1, **sections(tmp_path, **SPEC | {"training": training})}
    with pytest.raises((UserError, ValueError), match=r"training\.compile"):
        RunSpec.model_validate(given)
