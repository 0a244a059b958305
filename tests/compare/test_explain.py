"""Each rule has its page, with an example that it tells apart; reports name the command."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from fake_runs import full_record, full_spec, write_run

from workbench import cli
from workbench.compare import check, compare_runs, render_terminal
from workbench.compare.explain import page_of, render_list, render_page, rows
from workbench.compare.report import render_markdown
from workbench.errors import UserError
from workbench.spec.checklist import CLAIMS, RULES, tag_of
from workbench.spec.load import load_spec
from workbench.specs_and_runs import run_or_plan
from workbench.track.store import Store

ROOT = Path(__file__).parents[2]
# Rules whose difference is none of the spec's: the machine, and the sources.
OUTSIDE = {"hardware", "code"}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_a_whole_page(rule: str) -> None:
    page = page_of(rule)
    assert page.guards.endswith(".")
    assert page.why.endswith(".")
    assert page.do
    assert re.search(r"\d", page.example.measured), "an example is measured"
    assert page.leaves
    assert all(tag_of(leaf.replace("<set>", "held_out")).rule == rule for leaf in page.leaves)
    text = render_page(page)
    assert text.startswith(f"{rule}: {RULES[rule].must_match}")
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("  $"))
    assert json.loads(json.dumps(page.to_json()))["rule"] == rule


def test_there_is_no_page_without_a_rule() -> None:
    import yaml

    path = ROOT / "workbench/compare/rule_pages.yaml"
    assert list(yaml.safe_load(path.read_text())["rules"]) == list(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_an_example_is_two_runs_and_their_comparison(rule: str) -> None:
    """The commands can be run as they stand: specs, options, and the rule that tells them apart."""
    *trained, compared = [shlex.split(line) for line in page_of(rule).example.commands]
    specs = {}
    for words in trained:
        if words[0] == "sed":
            path = ROOT / words[-1]
            old = words[2].split("/")[1]
            assert re.search(old, path.read_text(), re.MULTILINE), "the line that it edits"
            continue
        at = words.index("run") + 1
        spec = load_spec(ROOT / words[at], words[at + 1 :])
        specs[spec.name] = spec
    assert compared[:2] == ["wb", "compare"]
    a, b = (specs[name] for name in compared[2:4])
    options = dict(zip(compared[4::2], compared[5::2], strict=True))
    assert set(options) <= {"--treatment", "--claim"}
    documents = [one.model_dump(mode="json", exclude={"name"}) for one in (a, b)]
    assert (documents[0] == documents[1]) == (rule in OUTSIDE)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in OUTSIDE])
def test_the_example_is_told_apart_by_its_rule(rule: str, tmp_path: Path) -> None:
    sides = []
    for number, line in enumerate(page_of(rule).example.commands[:2]):
        words = shlex.split(line)
        at = words.index("run") + 1
        spec = load_spec(ROOT / words[at], words[at + 1 :])
        path = tmp_path / f"{number}.yaml"
        path.write_text(json.dumps(spec.model_dump(mode="json")))
        sides.append(run_or_plan(str(path), Store(tmp_path / "store")))
    judgement = check(*sides, claims=CLAIMS).judgement
    assert judgement.ruling(rule).outcome in ("differs", "studied")


def test_an_unknown_rule_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UserError, match="'seeds'") as error:
        page_of("seed")
    assert error.value.exit_code == 2


def test_the_command(capsys: Any) -> None:
    assert cli._guarded(["explain", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["rule"] for row in listed["rules"]] == list(RULES) == [r["rule"] for r in rows()]
    assert cli._guarded(["explain", "seeds"]) == 0
    assert capsys.readouterr().out.startswith("seeds: the seed")
    assert cli._guarded(["explain", "sedes"]) == 2
    capsys.readouterr()
    for rule in RULES:
        assert rule in render_list()


def test_reports_name_the_command(tmp_path: Path) -> None:
    write_run(tmp_path / "a", full_record("a"))
    write_run(tmp_path / "b", full_record("b", spec=full_spec(seed=43)))
    comparison = compare_runs(tmp_path / "a", tmp_path / "b")
    assert "wb explain RULE" in render_terminal(comparison)
    assert "wb explain RULE" in render_markdown(comparison)
    for rule in comparison.to_json()["rules"]:
        assert rule["explain"] == f"wb explain {rule['rule']}"
