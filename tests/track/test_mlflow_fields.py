"""What MLflow is told: keys that it takes and that can be read back, values within its limits."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from track.tracked_runs import make_record

from workbench.spec.load import field_types
from workbench.track.mlflow_fields import (
    KEY_LIMIT,
    PARAM_LIMIT,
    TAG_LIMIT,
    datasets_of,
    metrics_of,
    original_key,
    params_of,
    renamed,
    row_milliseconds,
    safe_experiment,
    safe_key,
    spec_yaml,
    tags_of,
)

ODD = [
    "wiki (en), v2 @100%",
    "a:b",
    "../x",
    "😀",
    "",
    "a//b",
    "/a",
    "./..",
    "_u28_",
    "_u_",
    "a\0",
    "_u:",
    "..0",
]


@pytest.mark.parametrize("name", ["train/nll", "held_out/bits_per_byte", "a.b-c_d e", "_underline"])
def test_plain_names_stay_as_they_are(name: str) -> None:
    assert safe_key(name) == name


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.sampled_from(ODD), st.text(max_size=30), st.text("_u28/.(:", max_size=12)))
def test_any_name_becomes_a_key_that_gives_it_back(name: str) -> None:
    from mlflow.utils.validation import path_not_unique, validate_param_and_metric_name

    key = safe_key(name)
    assert key
    assert validate_param_and_metric_name(key)
    assert not path_not_unique(key)
    assert original_key(key) == name


def test_names_too_long_are_cut_and_stay_apart() -> None:
    a, b = safe_key("x" * 300), safe_key("x" * 299 + "y")
    assert len(a) == len(b) == KEY_LIMIT
    assert a != b


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.sampled_from(ODD), st.text(max_size=30), st.text("_u0a\n\t ", max_size=12)))
def test_any_experiment_name_is_taken_and_can_be_read_back(name: str) -> None:
    key = safe_experiment(name)
    assert original_key(key) == name
    assert key.isprintable()
    assert key == key.strip()
    if name.isprintable() and name == name.strip() and "_u" not in name:
        assert key == name
    long = safe_experiment(name + "x" * 300)
    assert len(long) == KEY_LIMIT
    assert long != safe_experiment(name + "y" + "x" * 299)


def test_parameters_are_cut_as_short_as_a_server_wants_them() -> None:
    record = make_record(notes="n" * 7000)
    for limit in (6000, 500, 250):
        params = params_of(record, limit)
        assert len(params["notes"]) == limit
        assert "7000 characters" in params["notes"]
        assert all(len(value) <= limit for value in params.values())


def test_a_metric_is_sent_under_one_name_only() -> None:
    row = {"step": 4.0, "unix_time": 1.0, "train_loss": 2.0, "train/nll": 2.0, "lr": None}
    row |= {"held_out.a:b/nll": 3.0, "tok_s": 5.0, "tokens_per_s": 5.0, "shared_gate": 1.0}
    assert metrics_of(row) == {
        "train/nll": 2.0,
        "held_out.a_u3a_b/nll": 3.0,
        "tokens_per_s": 5.0,
        "shared_gate": 1.0,
    }
    assert renamed(list(row)) == {"held_out.a_u3a_b/nll": "held_out.a:b/nll"}


def test_every_spec_leaf_is_a_parameter() -> None:
    record = make_record(tracking={"tags": {"odd key!": "x"}}, notes="long " * 5000)
    params = params_of(record)
    expected = {path for path in field_types() if path != "tracking.tags"}
    assert set(params) == expected | {"tracking.tags.odd key_u21_"}
    assert params["optimizer.betas"] == "[0.9, 0.95]"
    assert params["training.deterministic"] == "true"
    assert params["tracking.uri"] == "null"
    assert params["data.dataset"] == "random"
    assert len(params["notes"]) == PARAM_LIMIT
    assert "sha256" in params["notes"][-120:]
    assert yaml.safe_load(spec_yaml(record)) == record.spec


def test_values_that_differ_only_beyond_the_limit_stay_apart() -> None:
    a = params_of(make_record(notes="n" * 7000 + "a"))["notes"]
    b = params_of(make_record(notes="n" * 7000 + "b"))["notes"]
    assert a != b


def test_tags_hold_effective_facts_and_ours_win_over_the_users() -> None:
    mine = {"workbench.run_id": "fake", "team": "a", "long": "x" * 9000}
    record = make_record(tracking={"tags": mine})
    tags = tags_of(record, "FAILED", {"a_u3a_": "a:"})
    assert tags["workbench.run_id"] == record.id
    assert tags["workbench.status"] == "FAILED"
    assert tags["team"] == "a"
    assert tags["effective.hardware.driver"] == "not applicable: a CPU has no driver"
    assert tags["effective.evaluation.held_out.documents"] == "7"
    assert tags["provenance.versions.torch"] == "2.13.0"
    assert tags["mlflow.source.git.commit"] == "c0ffee"
    assert json.loads(tags["workbench.renamed"]) == {"a_u3a_": "a:"}
    assert len(tags["long"]) == TAG_LIMIT
    # As MLflow shows them: who and how it ended, the user's own, then what ran.
    order = list(tags)
    assert order.index("workbench.status") < order.index("team")
    assert order.index("team") < order.index("effective.hardware.driver")


def test_what_is_bulk_stands_in_the_record_alone() -> None:
    record = make_record()
    record.effective.data.counts = {"files": 3}
    record.effective.evaluation["held_out"].overlap = {"histogram": [1, 2]}
    record.provenance["cpu"] = {"instruction_sets": ["avx"]}
    said = " ".join(tags_of(record, "FINISHED", {}))
    for part in ("counts", "histogram", "instruction_sets"):
        assert part not in said
    assert "effective.evaluation.held_out.sha256" in said


def test_secrets_do_not_reach_parameters_tags_or_the_spec() -> None:
    uri = "https://ada:hunter22@example.org/?token=tok3n-value"
    record = make_record(tracking={"uri": uri, "tags": {"where": uri}})
    record.error = f"cannot reach {uri}"
    said = json.dumps([params_of(record), tags_of(record, "FAILED", {}), spec_yaml(record)])
    assert "hunter22" not in said
    assert "tok3n-value" not in said
    assert "example.org" in said


def test_datasets_are_named_by_their_use_and_content() -> None:
    record = make_record()
    found = {one.name: one for one in datasets_of(record)}
    assert {name: one.context for name, one in found.items()} == {
        "train": "training",
        "held_out": "evaluation",
        "train_split": "evaluation",
    }
    assert found["held_out"].digest == "b" * 36
    profile = {"source": "a corpus", "documents": 7, "sha256": "b" * 64}
    assert json.loads(found["held_out"].profile) == profile
    record.effective.data.train_sha256 = None
    assert {one.name for one in datasets_of(record)} == {"held_out", "train_split"}


def test_a_row_has_the_same_time_whenever_it_is_sent() -> None:
    record = make_record()
    assert row_milliseconds({"step": 3.0, "unix_time": 1700000000.123}, record) == 1700000000123
    assert row_milliseconds({"step": 3.0}, record) == row_milliseconds({"step": 3.0}, record)
