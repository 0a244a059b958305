"""Provenance: which code and machine, and never a secret."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workbench.track import provenance as p
from workbench.track.record import NotApplicable


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("http://ada:hunter2@host:5000/x", "hunter2"),
        ("sqlite and postgresql://u:p%40ss@h/db", "p%40ss"),
        ("https://h/?a=1&access_token=abc123&b=2", "abc123"),
        ("wb run x.yaml --api-key ABCDEF", "ABCDEF"),
        ("MLFLOW_TRACKING_PASSWORD='two words'", "two words"),
        ("Authorization: Bearer abcdefgh.ijkl", "abcdefgh.ijkl"),
        ("failed with hf_abcdefghijklmnop", "hf_abcdefghijklmnop"),
        ("the environment's s3cr3t-value, bare", "s3cr3t-value"),
    ],
)
def test_secrets_are_removed(text: str, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-value")
    assert secret in text
    assert secret not in p.redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "wb run a.yaml optimizer.lr=3e-4 name=tokens",
        "tokens=5, tokens_per_s: 3",
        "http://h:5000/#/x",
    ],
)
def test_other_text_is_left_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "a.yaml optimizer")
    assert p.redact(text) == text


def test_the_code_hash_sees_content_names_and_moves(tmp_path: Path) -> None:
    def build(files: dict[str, str]) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        return p.package_hash(root)

    first = build({"a.py": "1", "b/c.py": "2"})
    assert build({"b/c.py": "2", "a.py": "1", "notes.txt": "x"}) == first
    others = [
        build({"a.py": "1", "b/c.py": "3"}),
        build({"a.py": "1", "b/d.py": "2"}),
        build({"a.py": "1", "c.py": "2"}),
        build({"a.py": "1"}),
        build({"a.py": "12", "b/c.py": ""}),
    ]
    assert len({first, *others}) == 6


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True
    )
    return done.stdout.decode().strip()


def test_the_commit_and_what_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    source = package / "__init__.py"
    source.write_text("a = 1\n")
    git(tmp_path, "init")
    assert p._git_state(package) == (None, None)  # there, but not a part of the repository
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert p._git_state(package) == (commit, b"")
    (package / "notes.txt").write_text("not a source")
    assert p._git_state(package) == (commit, b"")
    (package / "new.py").write_text("b = 2\n")
    untracked = p._git_state(package)[1]
    source.write_text("a = 3\n")
    changed = p._git_state(package)[1]
    git(tmp_path, "add", "package/__init__.py")  # staging changes nothing
    assert p._git_state(package)[1] == changed
    assert len({b"", untracked, changed}) == 3
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a git hook
    assert p._git_state(package) == (commit, changed)


def test_what_differs_is_kept_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "tell-nobody-this")
    package, folder = tmp_path / "package", tmp_path / "run"
    for path in (package, folder):
        path.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "x")
    assert p.write_source_diff(folder, package) is None
    assert list(folder.iterdir()) == []
    (package / "__init__.py").write_text("a = 2\nkey = 'tell-nobody-this'\n")
    (package / "new.py").write_bytes(b"b = 'password=hunter2'\n# \xff\n")
    path = p.write_source_diff(folder, package)
    assert path is not None
    assert list(folder.iterdir()) == [path]
    diff = p._git_state(package)[1]
    assert diff is not None
    assert path.name == f"source-{hashlib.sha256(diff).hexdigest()[:8]}.diff"
    text = path.read_text()
    assert "+a = 2" in text
    assert "b = " in text
    assert "tell-nobody-this" not in text
    assert "hunter2" not in text


def test_outside_of_git_there_is_no_commit(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    assert p._git_state(tmp_path) == (None, None)


def test_the_facts_of_this_code_and_machine() -> None:
    code = p.code_facts()
    assert code.package_sha256 == p.package_hash()
    assert code.version
    assert code.forced_resume == "none"
    facts = p.hardware_facts(torch.device("cpu"))
    assert facts.device_type == "cpu"
    assert facts.device_name
    assert facts.threads == torch.get_num_threads()
    assert facts.torch == torch.__version__
    assert isinstance(facts.driver, NotApplicable)
    assert facts.libraries
    assert "cpu_capability" in facts.libraries


def test_provenance_is_json_and_takes_the_secrets_out_of_the_command() -> None:
    found = p.provenance(["wb", "run", "a.yaml", "tracking.uri=http://ada:hunter2@h:1"])
    assert "hunter2" not in json.dumps(found, allow_nan=False)
    assert found["command"].startswith("wb run a.yaml")
    assert found["versions"]["torch"] == torch.__version__
    assert found["memory_bytes"] > 1e8
    assert found["cpu"]["usable_cores"] >= 1


def test_it_does_not_import_torch_by_itself() -> None:
    code = (
        "import sys, workbench.track.provenance as p; p.provenance(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
