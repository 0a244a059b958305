"""Cluster plans: their arithmetic, what they say of a device's memory, and every fault at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench import commands
from workbench.answers import Answer
from workbench.cli import _guarded
from workbench.cluster_plan import NO_LAUNCH, cluster_plan, render
from workbench.core.cluster_memory import DeviceMemory, device_memory, device_parameters
from workbench.core.counts import count_parameters
from workbench.core.footprint import footprint
from workbench.errors import UserError
from workbench.spec.cluster import ClusterSpec, load_cluster_plan

PLANS = Path(__file__).parents[1] / "configs" / "cluster"
SMALL: dict[str, Any] = {
    "model": {
        "profile": "custom",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "shared_intermediate_size": 128,
    },
    "parallel": {"world_size": 8, "tensor": 2, "pipeline": 2, "data": 2},
    "run": {
        "target_tokens": 1_000_000,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "seq_len": 128,
        "vocab_size": 1000,
    },
}


def write(folder: Path, **changes: Any) -> Path:
    """A plan in a file; `changes` are merged into its sections."""
    document = json.loads(json.dumps(SMALL))
    for section, values in changes.items():
        if isinstance(values, dict):
            document.setdefault(section, {}).update(values)
        else:
            document[section] = values
    path = folder / "small.yaml"
    path.write_text(json.dumps(document, indent=1))
    return path


def plan(folder: Path, **changes: Any) -> ClusterSpec:
    return load_cluster_plan(write(folder, **changes))


def alone(**ways: Any) -> dict[str, Any]:
    """One device, unless told otherwise."""
    return {"world_size": 1, "tensor": 1, "pipeline": 1, "data": 1} | ways


def faults(path: Path, *overrides: str) -> dict[str, tuple[Any, str | None]]:
    """Field -> value and what is allowed, of every fault."""
    with pytest.raises(UserError) as caught:
        load_cluster_plan(path, list(overrides))
    return {
        fault.place.rpartition(" ")[2]: (fault.value, fault.allowed)
        for fault in caught.value.faults
    }


def asked(*arguments: str) -> Any:
    answer = commands.call(["plan", *arguments])
    assert isinstance(answer, Answer)
    return answer.content


@pytest.mark.parametrize(
    ("name", "devices", "parameters"),
    [("1b_16gpu", 16, 1_030_812_160), ("8b_4608gpu", 4608, 8_201_527_296)],
)
def test_the_plans_that_come_along_hold(name: str, devices: int, parameters: int) -> None:
    path = PLANS / f"{name}.yaml"
    document = asked(str(path), "--json")
    ways = document["parallel"]
    assert ways["tensor"] * ways["pipeline"] * ways["data"] == ways["world_size"] == devices
    assert document["parameters"]["total"] == parameters
    assert document["launches"] is False
    assert 0 <= document["overshoot"] < document["tokens_per_step"]
    assert document["tokens"] == document["target_tokens"] + document["overshoot"]
    assert document["memory_gb"] < ways["device_memory_gb"]
    assert document["remarks"] == []
    page = asked(str(path))
    assert page.endswith(NO_LAUNCH)
    assert "a prediction" in page
    assert "left out: the device's context" in page


def test_every_yaml_in_the_folder_is_a_plan_that_holds() -> None:
    for path in PLANS.glob("*.yaml"):
        cluster_plan(load_cluster_plan(path))


def test_every_fault_is_found_at_once_with_place_value_and_what_is_allowed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        model={"num_attention_heads": 3},
        parallel={"world_size": 9, "tensor": 3, "pipeline": 3, "devices_per_node": 2},
        run={"global_batch_size": 15, "steps": 3, "seq_len": 4096},
    )
    found = faults(path, "run.lr=1")
    assert found["run.lr"] == (None, None)
    assert found["parallel.world_size"] == (
        9,
        "a multiple of 2, or another parallel.devices_per_node",
    )
    assert found["parallel.tensor"] == (3, "1")
    assert found["parallel.pipeline"] == (3, "1, 2, 4")
    assert found["run.global_batch_size"] == (15, "a multiple of 4, such as 12 or 16")
    assert found["run.steps"][0] == 3
    assert found["run.seq_len"] == (4096, "1 to 2048")
    assert found["model.hidden_size"] == (64, "a multiple of 3")
    with pytest.raises(UserError, match=rf"{path}:\d+: parallel.tensor: .*got 3"):
        load_cluster_plan(path)


@pytest.mark.parametrize(("world", "allowed"), [(12, "8, or parallel.data 3"), (7, "8")])
def test_the_ways_make_the_world_size(tmp_path: Path, world: int, allowed: str) -> None:
    path = write(tmp_path, parallel={"world_size": world, "devices_per_node": world})
    assert faults(path) == {"parallel.world_size": (world, allowed)}


def test_steps_are_the_fewest_that_reach_the_target(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert found.tokens_per_step == 16 * 128
    assert found.steps == 489  # 1,000,000 / 2,048 = 488.3
    document = cluster_plan(found)
    assert document["tokens"] == 489 * 2048
    assert document["overshoot"] == 489 * 2048 - 1_000_000
    assert plan(tmp_path, run={"steps": 489}).steps == 489
    for steps in (488, 490):
        value, allowed = faults(write(tmp_path, run={"steps": steps}))["run.steps"]
        assert (value, allowed) == (steps, "null or 489, which come to 1,001,472 tokens")
    exact = cluster_plan(plan(tmp_path, run={"target_tokens": 2048 * 7}))
    assert (exact["steps"], exact["overshoot"]) == (7, 0)


def test_micro_batches_and_the_idle_share_of_a_pipeline(tmp_path: Path) -> None:
    document = cluster_plan(plan(tmp_path))
    assert document["micro_batches"] == 4
    assert document["pipeline_idle_share"] == pytest.approx(1 / 5)
    assert "20.0% of an update idle" in render(document)
    short = cluster_plan(plan(tmp_path, run={"global_batch_size": 4}))
    assert any("never fill 2 pipeline stages" in said for said in short["remarks"])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("grad_ckpt", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon_tr"])
def test_one_device_takes_what_a_run_on_it_takes(
    tmp_path: Path, precision: str, grad_ckpt: bool, optimizer: str
) -> None:
    """The parts of `wb plan` of the same run, which are compared with real processes elsewhere."""
    run = {"precision": precision, "grad_ckpt": grad_ckpt, "optimizer": optimizer}
    found = plan(tmp_path, parallel=alone(), run=run)
    (stage,) = device_memory(found)
    whole = footprint(found.run_spec(), 1000, "native" if precision == "bf16" else "float32")
    expected = vars(whole) | {"process": 0, "holes": 0}
    assert stage.parts == {name: size for name, size in expected.items() if size}


def parameters(found: ClusterSpec, *stages: Any) -> int:
    return sum(size for stage in stages for _, size in device_parameters(found, stage))


@pytest.mark.parametrize("tied", [True, False])
def test_the_parts_of_a_model_are_the_whole(tmp_path: Path, tied: bool) -> None:
    """Over stages all parameters but a tied matrix are there once; over tensors only norms are
    there in each."""
    model = {"tie_word_embeddings": tied}
    total = count_parameters(plan(tmp_path, model=model).model, 1000).total
    assert parameters(plan(tmp_path, model=model, parallel=alone()), "only") == total
    staged = plan(tmp_path, model=model, parallel=alone(world_size=4, pipeline=4))
    twice = 1000 * 64 if tied else 0
    assert parameters(staged, "first", "middle", "middle", "last") == total + twice
    split = plan(tmp_path, model=model, parallel=alone(world_size=2, tensor=2))
    norms = sum(size for kind, size in device_parameters(split, "only") if kind == "vector")
    assert 2 * parameters(split, "only") == total + norms


def memory(folder: Path, run: dict[str, Any] | None = None, **ways: Any) -> list[DeviceMemory]:
    return device_memory(plan(folder, parallel=alone(**ways), run=run or {}))


def test_each_way_takes_off_what_it_should(tmp_path: Path) -> None:
    (whole,) = memory(tmp_path)
    (tensor,) = memory(tmp_path, world_size=2, tensor=2)
    assert 0.5 < tensor.weights / whole.weights < 0.6
    assert 0.5 < tensor.activations / whole.activations < 1
    (ddp,) = memory(tmp_path, world_size=2, data=2)
    assert ddp.buckets == ddp.gradients == whole.gradients
    assert ddp.optimizer == whole.optimizer
    (fsdp,) = memory(tmp_path, world_size=4, data=4, engine="fsdp")
    assert fsdp.optimizer == whole.optimizer // 4
    assert fsdp.gathered > 2 * 1000 * 64  # the vocabulary, rounded
    assert fsdp.buckets == 0
    first, last = memory(tmp_path, world_size=2, pipeline=2)
    assert (first.stage, last.stage) == ("first", "last")
    assert first.loss == 0 < last.loss
    assert first.activations > last.activations  # of two micro-batches
    once = memory(tmp_path, run={"global_batch_size": 2}, world_size=2, pipeline=2)
    assert once[0].activations == last.activations


def test_a_plan_that_does_not_fit_is_exit_2_with_the_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, parallel={"device_memory_gb": 0.001})
    assert _guarded(["plan", str(path), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["place"].endswith("parallel.device_memory_gb")
    assert error["value"] == 0.001
    assert "are predicted, without what is left out (weights" in error["message"]


def test_what_is_wise_is_said_and_not_refused(tmp_path: Path) -> None:
    found = cluster_plan(plan(tmp_path, parallel={"devices_per_node": 1}))
    assert any("2 tensor ways do not fit into machines of 1 devices" in r for r in found["remarks"])
    assert any("whether it fits was not judged" in said for said in found["remarks"])


@pytest.mark.parametrize("engine", [{"pipeline": 1, "tensor": 4, "data": 1}, {}])
def test_fsdp_shares_with_other_copies_and_not_in_a_pipeline(
    tmp_path: Path, engine: dict[str, int]
) -> None:
    changes = {"engine": "fsdp", **engine}
    if engine:
        changes |= {"world_size": 4, "tensor": 2, "pipeline": 2}
    assert "parallel.engine" in faults(write(tmp_path, parallel=changes))


def test_a_plan_is_no_run_and_a_run_is_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    for command in (["run", str(path)], ["check", str(path), str(path)]):
        assert _guarded(command) == 2
        assert "this is a cluster plan: wb plan checks it" in capsys.readouterr().err
    path = write(tmp_path, parallel=None)
    assert set(faults(path)) == {"parallel"}


def test_fragments_and_overrides_as_in_a_run_spec(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "other.yaml"
    path.write_text("extends: [small.yaml]\nrun: {target_tokens: 4096}\n")
    found = load_cluster_plan(path, ["parallel.world_size=4", "parallel.data=1"])
    assert (found.name, found.steps, found.parallel.data) == ("other", 2, 1)
