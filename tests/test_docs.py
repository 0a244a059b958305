"""The documentation builds from the docstrings, strictly: a link that leads nowhere fails it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sphinx") is None
        or importlib.util.find_spec("myst_parser") is None,
        reason="the extra `docs` is not installed",
    ),
]


def build(source: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does it."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(source), str(to)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_pages_hold_the_docstrings_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path / "html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html" / "api.html").read_text()
    for name in ("load_run", "compare_runs", "to_frame"):
        assert f'id="workbench.notebook.{name}"' in page
    assert "Raises" in page
    assert "routed_gate_init" in (tmp_path / "html" / "spec.html").read_text()
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    with (copy / "arms.md").open("a") as file:
        file.write("\n[gone](nowhere.md) and [away](data.md#no-such-heading)\n")
    done = build(copy, tmp_path / "broken")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "no-such-heading" in done.stderr
