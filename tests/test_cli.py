"""The command line: exit codes, one voice for errors, one JSON document."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.track.record import read_record

TINY = """\
model: {profile: custom, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
        num_key_value_heads: 1, intermediate_size: 16, shared_intermediate_size: 32}
tokenizer: {name: bytes}
data: {dataset: random}
training: {steps: 1, batch_size: 2, seq_len: 16}
"""
EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def wb(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WB_HOME": str(home / "store")}
    command = [sys.executable, "-m", "workbench", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "arguments", [("frob",), ("list", "--bogus"), ("compare", "a"), ("compare", "a", "b", "--at=x")]
)
def test_a_wrong_call_is_exit_2_and_no_crash(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    plain = wb(tmp_path, *arguments)
    assert plain.returncode == 2
    assert "fault in wb" not in plain.stderr
    assert "Traceback" not in plain.stderr
    as_json = wb(tmp_path, *arguments, "--json")
    assert as_json.returncode == 2
    assert json.loads(as_json.stdout)["error"]["message"]


def test_every_fault_of_a_spec_is_one_line(tmp_path: Path) -> None:
    spec = tmp_path / "bad.yaml"
    spec.write_text("data: {dataset: random}\nlr: 1\ntraining: {steps: 010}\n")
    done = wb(tmp_path, "run", str(spec))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 2
    assert not (tmp_path / "store" / "runs").exists()


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['wb', '--help']\n"
        "from workbench.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'mlflow', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(tmp_path: Path) -> None:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(TINY)
    done = wb(tmp_path, "run", str(spec), "optimizer.lr=1e300", "schedule.warmup_steps=0")
    assert done.returncode == 4, done.stderr
    folder = tmp_path / "store" / "runs" / "tiny"
    assert read_record(folder).status == "FAILED"
    assert not list(folder.glob("checkpoints/step_*"))


@pytest.mark.parametrize(
    ("change", "code", "rule"),
    [
        ("", 0, None),
        ("seed: 43", 3, "seeds"),
        ("training: {precision: fp32}", 3, "precision"),
        ("training: {steps: 200}", 3, "budget"),
        ("optimizer: {lr: 1e-4}", 3, "optimizer"),
        ("tokenizer: {name: bytes}", 3, "tokenizer"),
    ],
)
def test_the_100m_arms_are_comparable_but_for_what_is_changed(
    tmp_path: Path, change: str, code: int, rule: str | None
) -> None:
    other = tmp_path / "dense.yaml"
    other.write_text(f"extends: [{EXPERIMENTS / '100m_mha_dense.yaml'}]\n{change}\n")
    arm = str(EXPERIMENTS / "100m_mha.yaml")
    done = wb(tmp_path, "check", arm, str(other), "--treatment", "model", "--json")
    assert done.returncode == code, done.stderr
    refusing = [
        entry["rule"]
        for entry in json.loads(done.stdout)["rules"]
        if entry["effects"]["nll"] == "refuse"
    ]
    assert refusing == ([rule] if rule else [])
