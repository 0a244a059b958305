"""`wb diff`: only what differs, each value with the rule that judges it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import full_effective, full_record, full_spec, write_run

from workbench import cli
from workbench.compare import check_specs
from workbench.compare.differences import differences, leaves_of_spec
from workbench.errors import UserError
from workbench.spec.foreseen import Foreseen
from workbench.spec.load import load_spec
from workbench.spec.run import spec_hash


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


SPELLINGS = {
    "optimizer.lr": ["1e-4", "1E-4", "0.0001", "1.0e-4", ".0001"],
    "optimizer.weight_decay": ["1e-1", "0.1", "1.0E-1"],
    "optimizer.betas": ["[0.9, 0.95]", "[9e-1, 9.5e-1]", "[0.90, .95]"],
    "training.steps": ["5000", "5_000"],
    "training.max_grad_norm": ["1", "1.0", "1e0"],
    "model.rope_theta": ["10000", "1e4", "10_000", "1.0e+4"],
}


@pytest.mark.parametrize("field", SPELLINGS)
def test_ways_to_write_a_number_are_one_value(tmp_path: Path, field: str) -> None:
    """In the resolved spec, its hash, a check and a list of differences; in lists as well."""
    section, name = field.split(".")
    specs = []
    for index, text in enumerate(SPELLINGS[field]):
        path = tmp_path / f"{index}.yaml"
        path.write_text(f"name: a\ndata: {{dataset: random}}\n{section}:\n  {name}: {text}\n")
        specs.append(load_spec(path))
        specs.append(load_spec(tmp_path / "0.yaml", [f"{field}={text}"]))
    assert {spec_hash(spec) for spec in specs} == {spec_hash(specs[0])}
    values = [leaves_of_spec(spec.model_dump(mode="json")) for spec in specs]
    assert all(differences(values[0], one, spec_only=True) == [] for one in values)
    assert not isinstance(values[0][field], str)
    nothing = Foreseen({}, (), lambda at: {})
    for spec in specs[1:]:
        judgement = check_specs(specs[0], spec, nothing, nothing).judgement
        assert judgement.with_outcome("differs", "studied") == []


@pytest.mark.parametrize("text", ["1:30", "010", "1e3.5", "5_00", "'1e-4'", "yes"])
@pytest.mark.parametrize("field", ["optimizer.weight_decay", "training.steps", "optimizer.betas"])
def test_what_is_no_number_is_refused_with_its_line(tmp_path: Path, field: str, text: str) -> None:
    section, name = field.split(".")
    value = f"[0.9, {text}]" if name == "betas" else text
    path = tmp_path / "a.yaml"
    path.write_text(f"name: a\ndata: {{dataset: random}}\n{section}:\n  {name}: {value}\n")
    with pytest.raises(UserError) as error:
        load_spec(path)
    assert f"a.yaml:4: {field}" in str(error.value)
