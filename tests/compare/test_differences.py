"""`wb diff`: only what differs, each value with the rule that judges it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import full_effective, full_record, full_spec, write_run

from workbench import cli


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two runs, and two specs beside it."""
    monkeypatch.setenv("WB_HOME", str(tmp_path / "store"))
    changed = full_spec(seed=43, notes="another", training={"loss_chunk_tokens": 8192})
    ran = full_effective()
    ran["hardware"]["torch"] = "2.14.0"
    ran["code"]["git_commit"] = "def456"
    write_run(tmp_path / "store/runs/a", full_record("a"))
    write_run(tmp_path / "store/runs/b", full_record("b", spec=changed, effective=ran))
    for name, spec in (("a", full_spec()), ("b", changed)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(spec))
    return tmp_path


SETTINGS = {
    "seed": "seeds",
    "notes": "free",
    "training.loss_chunk_tokens": "execution, the same in effect",
}
FACTS = {"effective.hardware.torch": "hardware", "effective.code.git_commit": "free"}


@pytest.mark.parametrize(
    ("a", "b", "ran"),
    [
        ("a", "b", True),
        ("a.yaml", "b.yaml", False),
        ("a", "b.yaml", False),
        ("a.yaml", "b", False),
    ],
)
def test_only_what_differs_with_its_rule(
    home: Path, capsys: Any, a: str, b: str, ran: bool
) -> None:
    given = [str(home / one) if one.endswith(".yaml") else one for one in (a, b)]
    assert cli._guarded(["diff", *given, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {one["path"]: one["judged_by"] for one in document["differences"]}
    for path in ("data.text_file", "tokenizer.path"):  # which a file names beside itself
        assert found.pop(path, "").endswith("by what it becomes") == (a[1:] != b[1:])
    assert found == (SETTINGS | FACTS if ran else SETTINGS)
    seed = next(one for one in document["differences"] if one["path"] == "seed")
    assert (seed["a"], seed["b"], seed["in"], seed["rule"]) == (42, 43, ["a", "b"], "seeds")
    assert document["equal"] > 80
    assert cli._guarded(["diff", *given]) == 0
    text = capsys.readouterr().out
    assert "seed" in text
    assert ("2.14.0" in text) == ran


def test_equal_specs_have_no_difference(home: Path, capsys: Any) -> None:
    assert cli._guarded(["diff", str(home / "a.yaml"), str(home / "a.yaml")]) == 0
    assert "are equal" in capsys.readouterr().out


def test_a_value_that_one_record_lacks_is_said_to_be_not_there(home: Path, capsys: Any) -> None:
    path = home / "store/runs/b/run_config.json"
    document = json.loads(path.read_text())
    del document["spec"]["model"]["qk_norm"]
    path.write_text(json.dumps(document))
    assert cli._guarded(["diff", "a", "b"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "model.qk_norm" in one]
    assert "(not there)" in line


def test_credentials_are_not_shown(home: Path, capsys: Any) -> None:
    path = home / "b.yaml"
    document = json.loads(path.read_text())
    document["tracking"]["uri"] = "http://me:secret-word@host"
    path.write_text(json.dumps(document))
    for options in ([], ["--json"]):
        assert cli._guarded(["diff", str(home / "a.yaml"), str(path), *options]) == 0
        assert "secret-word" not in capsys.readouterr().out


def test_what_is_neither_is_an_error(home: Path, capsys: Any) -> None:
    assert cli._guarded(["diff", "a", "nothing"]) == 2
    assert "no such file" in capsys.readouterr().err
