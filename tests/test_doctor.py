"""`wb doctor`: the facts of this machine, and what follows from facts of others."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from workbench import doctor
from workbench.cli import _guarded
from workbench.core.precision import choose_precision
from workbench.doctor import (
    Finding,
    cpu_quota,
    exit_code,
    findings,
    render,
    thread_facts,
    write_fault,
)
from workbench.track.store import Store

SOUND: dict[str, Any] = {
    "versions": {"workbench": "1"},
    "extras": dict.fromkeys(doctor.EXTRAS, "1"),
    "compute": {
        "cpu": "a CPU",
        "instruction_sets": ["amx_bf16"],
        "amx": True,
        "avx512": True,
        "device": "cuda",
        "gpus": [{"name": "a GPU", "gb": 80.0}],
        "cuda_build": "12",
        "bf16": "native",
        "bf16_words": "native",
        "compile": True,
    },
    "threads": {
        "used": 8,
        "usable_cores": 8,
        "cores": 8,
        "quota": None,
        "OMP_NUM_THREADS": None,
        "load": 0.1,
    },
    "memory": {"total": 64.0, "available": 60.0, "limit": None},
    "tokenizers": {"cache": "c", "faults": {"o200k_base": None}},
    "store": {
        "home": "h",
        "exists": True,
        "free_bytes": 10**12,
        "file_system": "ext4",
        "fault": None,
        "runs": {"FINISHED": 2},
    },
    "mlflow": {"address": "sqlite:///x", "answers": None, "fault": None},
}


def with_changes(**changes: dict[str, Any]) -> dict[str, Any]:
    """The facts of a sound machine, with changes in its sections."""
    facts = copy.deepcopy(SOUND)
    for section, values in changes.items():
        facts[section] |= values
    return facts


CPU = {"device": "cpu", "gpus": [], "cuda_build": None}


def test_a_sound_machine_has_no_findings() -> None:
    facts = with_changes()
    assert list(findings(facts)) == []
    page = render(facts, [])
    assert page.endswith("nothing is broken")
    assert "a GPU (80 GB)" in page


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compute": CPU}, "there is no GPU here"),
        ({"compute": CPU | {"bf16": "upcast"}}, "no bf16 instructions"),
        ({"compute": CPU | {"amx": False}}, "has no AMX"),
        ({"compute": {"compile": False, "compile_fault": "no compiler"}}, "no compiler"),
        ({"compute": CPU, "threads": {"used": 1, "OMP_NUM_THREADS": "1"}}, "1 of 8 cores train"),
        ({"compute": CPU, "threads": {"quota": 2.0}}, "the 2 CPUs that this container may use"),
        ({"compute": CPU, "threads": {"load": 20.0}}, "busy (load 20.0)"),
        ({"store": {"free_bytes": 10**9}}, "1.0 GB are free"),
        ({"store": {"file_system": "nfs4"}}, "it lies on nfs4"),
        ({"memory": {"limit": 2.0}}, "2.0 GB of memory are free"),
        ({"mlflow": {"answers": False, "fault": "refused"}}, "does not answer: refused"),
    ],
)
def test_what_is_slow_says_why(changes: dict[str, Any], why: str) -> None:
    found = list(findings(with_changes(**changes)))
    assert any(one.kind == "slow" and why in one.why for one in found)
    assert all(one.remedy for one in found)
    assert exit_code(found) == 0
    assert why in render(with_changes(**changes), found)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"compute": {"fault": "torch cannot be loaded"}}, 2),
        ({"tokenizers": {"faults": {"o200k_base": "no file"}}}, 2),
        ({"store": {"fault": "read-only"}}, 74),
    ],
)
def test_what_is_broken_is_an_exit_code(changes: dict[str, Any], code: int) -> None:
    found = list(findings(with_changes(**changes)))
    assert found[0].kind == "broken"
    assert exit_code(found) == code
    assert "nothing is broken" not in render(with_changes(**changes), found)


def test_an_extra_that_is_missing_is_named_with_its_command() -> None:
    (found,) = findings(with_changes(extras={"slurm": None}))
    assert found == Finding(
        "missing",
        "wb study run --launcher slurm",
        "the extra slurm",
        "pip install 'workbench[slurm]'",
    )


def test_the_facts_are_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:9")
    assert _guarded(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    document = json.loads(out)
    assert document["versions"]["torch"] == torch.__version__
    assert document["compute"]["torch_threads"] == torch.get_num_threads()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        chosen = choose_precision("bf16", torch.device("cpu"))
        assert document["compute"]["bf16"] == chosen.matmul
    assert document["tokenizers"]["faults"] == {"o200k_base": None, "cl100k_base": None}
    assert document["store"]["exists"] is False
    assert document["store"]["free_bytes"] > 0
    assert document["mlflow"]["answers"] is False
    assert not list(tmp_path.iterdir())  # nothing is made

    (tmp_path / "mlruns").touch()  # a file, where a folder must be
    assert _guarded(["doctor", "--json"]) == 74
    assert json.loads(capsys.readouterr().out)["broken"] is True


def test_a_store_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    home = tmp_path / "mlruns"
    home.mkdir()
    assert write_fault(home) is None
    assert list(home.iterdir()) == []
    assert doctor.store_facts(Store(home))["runs"] == {}
    if os.geteuid():
        home.chmod(0o500)
        assert write_fault(home)


def test_a_container_may_have_a_quota_of_cpus(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    assert thread_facts(1)["usable_cores"] == len(psutil.Process().cpu_affinity())
