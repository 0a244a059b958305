"""Every leaf of a run's files, changed, taken away and set to null: named by its rule, or refused.

Through `compare_runs`, as a user meets it: what contradicts the rest of its record is an error with
the place; what does not is a difference of its rule; nothing is taken as equal but what is free.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runs import full_record, write_run
from mutations import SchemaLeaf, other_values, put, record_leaves, removed, value_at
from test_mutations import apart, checklist_name, names_alone

from workbench.compare import Comparison, compare_runs
from workbench.errors import UserError
from workbench.spec.checklist import tag_of
from workbench.spec.run import document_hash
from workbench.track.record import RunRecord, read_record
from workbench.track.record_fields import RECORD_FIELDS

Document = dict[str, Any]

# Free leaves and fields that a record says twice, or that decide how its other files are read.
CHECKED = {
    "data.overlap_limit",
    "effective.evaluation.held_out.overlap",
    "evaluation.eval_steps",
    "seed",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and another that is equal but for its name."""
    home = tmp_path_factory.mktemp("runs")
    write_run(home / "base", full_record("base"))
    shutil.copytree(home / "base", home / "other")
    path = home / "other/run_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id": "0" * 32, "name": "other"}))
    return home


@pytest.fixture(autouse=True)
def _without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdicts are what is tested here: no bootstrap of the numbers."""
    monkeypatch.setattr("workbench.compare.pair.results_of", lambda *_: None)


def outcome(home: Path, document: Document) -> Comparison | UserError:
    """What a comparison with a run of this record comes to."""
    path = home / "other/run_config.json"
    before = path.read_text()
    try:
        if (
            isinstance(document.get("spec"), dict) and "spec_sha256" in document
        ):  # as one who knows of the hash would change it
            document = document | {"spec_sha256": document_hash(document["spec"])}
        path.write_text(json.dumps(document))
        return compare_runs(home / "base", home / "other")
    except UserError as error:
        return error
    finally:
        path.write_text(before)


def document_at(home: Path) -> Document:
    found: Document = json.loads((home / "other/run_config.json").read_text())
    return found


def leaves(home: Path) -> list[SchemaLeaf]:
    document = read_record(home / "other").model_dump(mode="json")
    return record_leaves(document)


def mutations(document: Document, leaf: SchemaLeaf) -> Iterator[tuple[str, Document]]:
    value = value_at(document, leaf.path)
    for other in other_values(leaf.annotation, value):
        yield f"{other!r}", put(document, leaf.path, other)
    yield "deleted", removed(document, leaf.path)
    if value is not None:
        yield "null", put(document, leaf.path, None)


def holds(home: Path, leaf: SchemaLeaf, document: Document) -> str:
    """Asserts that a mutation is an error with its place, its rule's difference, or free."""
    name = checklist_name(leaf)
    tag = tag_of(name)
    found = outcome(home, document)
    if isinstance(found, UserError):
        assert found.exit_code == 2
        assert str(home / "other") in str(found), name
        return "error"
    if not apart(found.judgement):
        if tag.kind == "judged":  # another number for the same run
            assert name in ("evaluation.sets", "training.loss_chunk_tokens"), name
        return "free"
    assert tag.kind == "judged", (name, apart(found.judgement))
    if len(apart(found.judgement)) == 1:
        names_alone(found.judgement, name, {"differs", "missing", "studied"})
    else:  # what is null beside it is missing, or follows it
        assert name in apart(found.judgement)
    return "named"


@pytest.mark.slow
def test_every_mutation_of_the_file_is_named_or_an_error(home: Path) -> None:
    document = document_at(home)
    results: dict[str, set[str]] = {}
    for leaf in leaves(home):
        for _, mutated in mutations(document, leaf):
            results.setdefault(checklist_name(leaf), set()).add(holds(home, leaf, mutated))
    for name, found in results.items():
        if tag_of(name).kind == "judged":
            assert found & {"named", "error"}, name
        elif name not in CHECKED:
            assert "named" not in found


def test_every_fact_that_changes_in_the_file_is_named_or_an_error(home: Path) -> None:
    document = document_at(home)
    count = 0
    for leaf in leaves(home):
        if leaf.path[0] != "effective" or tag_of(checklist_name(leaf)).kind != "judged":
            continue
        other = other_values(leaf.annotation, value_at(document, leaf.path))
        if other:
            assert holds(home, leaf, put(document, leaf.path, other[0])) in ("named", "error")
            count += 1
    assert count > 40


@pytest.mark.parametrize("field", [name for name, how in RECORD_FIELDS.items() if how == "free"])
def test_who_when_and_where_are_free(home: Path, field: str) -> None:
    document = document_at(home)
    value = document.get(field)
    other = {"str": "other", "dict": {"other": "x"}, "list": [], "NoneType": "other"}
    if field in ("resumes", "schema_version"):
        return  # a cadence that held before; see the tests of rulesets
    changed = document | {field: other[type(value).__name__]}
    found = outcome(home, changed)
    assert isinstance(found, Comparison), found
    assert apart(found.judgement) == {}
    assert found.verdict == "comparable"


@pytest.mark.parametrize(
    "field", [name for name, how in RECORD_FIELDS.items() if how in ("checked", "judged")]
)
def test_what_is_said_twice_is_said_alike(home: Path, field: str) -> None:
    document = document_at(home)
    name = "model_config" if field == "model_config_" else field
    if field in ("spec", "effective", "spec_sha256"):
        return  # leaf by leaf above; the hash in the tests of evidence
    changes = {
        "status": "FAILED",
        "points": [one | {"order_digest": "0" * 64} for one in document["points"]],
        "params": 1,
        "model_config": {"hidden_size": 1},
    }
    changed = document | {name: changes.get(name, 7)}
    if field == "params":
        assert document["params"] is None  # as a record that never had it
    found = outcome(home, changed)
    if isinstance(found, UserError):
        of_many = {"world_size": "contradicts the batch settings"}
        assert of_many.get(name, name) in str(found)
    else:
        assert set(apart(found.judgement)) <= {
            "effective.budget.finished",
            "effective.data.order_digest",
        }
        assert found.verdict == "refused"


def test_every_field_is_needed_or_missing(home: Path) -> None:
    """A record without one of its fields is never equal to one with it, where it is judged."""
    document = document_at(home)
    for field, how in RECORD_FIELDS.items():
        name = "model_config" if field == "model_config_" else field
        found = outcome(home, {key: one for key, one in document.items() if key != name})
        required = RunRecord.model_fields[field].is_required()
        if required or how == "judged":
            refused = isinstance(found, UserError) or found.verdict == "refused"
            assert refused, name
