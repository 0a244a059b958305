"""`wb import`, as a process: what it answers, and what the other commands make of such a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from importing.legacy_runs import ORIGINAL, legacy_run


def wb(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WB_HOME": str(home / "store")}
    command = [sys.executable, "-m", "workbench", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )


def test_an_original_run_is_imported_shown_and_refused(tmp_path: Path) -> None:
    done = wb(tmp_path, "import", "complexity", str(ORIGINAL), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["run"] == "legacy-gqa"
    assert "effective.data.order_digest" in answer["missing"]
    leaf = "effective.execution.loss_backend"
    assert leaf in {one["leaf"] for one in answer["corrections"]}

    other = legacy_run(tmp_path / "old", lambda document: document["args"].update(seed=43))
    assert wb(tmp_path, "import", "complexity", str(other), "--name", "other").returncode == 0
    shown = wb(tmp_path, "show", "other").stdout
    assert "Liger's kernels need a GPU" in shown
    assert wb(tmp_path, "list").stdout.count("FINISHED") == 2

    compared = wb(tmp_path, "compare", "legacy-gqa", "other", "--treatment", "seed")
    assert compared.returncode == 3, compared.stderr
    assert "data.train_sha256 is not recorded in either" in compared.stdout

    verified = wb(tmp_path, "verify", "other")
    assert verified.returncode == 2
    assert "it has no whole spec" in verified.stderr


def test_what_is_no_run_of_that_runner_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    done = wb(tmp_path, "import", "complexity", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "run_config.json" in done.stderr
    assert not (tmp_path / "store" / "runs").exists()


@pytest.mark.slow
def test_mlflow_takes_an_imported_run_whose_end_is_not_known(tmp_path: Path) -> None:
    old = legacy_run(tmp_path / "old", table=lambda lines: lines[:-1])
    assert wb(tmp_path, "import", "complexity", str(old)).returncode == 0
    sent = wb(tmp_path, "sync", "legacy-gqa")
    assert sent.returncode == 0, sent.stdout
    assert "complete" in sent.stdout
