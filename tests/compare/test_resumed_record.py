"""A run that was resumed, also with other code or against the guard: every leaf of its record."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from mutations import other_values, put, record_leaves, removed, value_at
from test_mutations import checklist_name, facts_of, matches_all, names_alone
from test_resume import Interrupter, start, tracker
from tiny_runs import tiny_spec

from workbench.compare import compare_runs
from workbench.compare.rules import judge
from workbench.resume import ResumeRequest
from workbench.spec.checklist import tag_of
from workbench.track.events import NullTracker
from workbench.track.store import Store

Track = Callable[[NullTracker], None]

__all__ = ["tracker"]  # a fixture


@pytest.mark.slow
def test_a_resumed_run_is_judged_leaf_by_leaf(tmp_path: Path, tracker: Track) -> None:
    spec = tiny_spec(tmp_path, training={"steps": 32})
    straight = start(spec, Store(tmp_path / "straight"))
    tracker(Interrupter(8, signal.SIGINT))
    store = Store(tmp_path / "resumed")
    assert start(spec, store).record.status == "KILLED"
    resumed = start(spec, store, ResumeRequest())
    assert resumed.record.status == "FINISHED"
    assert len(resumed.record.resumes) == 1
    comparison = compare_runs(straight.folder, resumed.folder)
    assert comparison.judgement.claims["nll"] == "comparable"

    document = resumed.record.model_dump(mode="json")
    facts = facts_of(document)
    for leaf in record_leaves(document):
        name, value = checklist_name(leaf), value_at(document, leaf.path)
        if tag_of(name).kind != "judged" or not leaf.name.startswith("effective.") or value is None:
            continue
        names_alone(judge(facts, facts_of(removed(document, leaf.path))), name, {"missing"})
        changed = judge(
            facts, facts_of(put(document, leaf.path, other_values(leaf.annotation, value)[0]))
        )
        names_alone(changed, name, {"differs"})


@pytest.mark.slow
def test_what_a_resume_left_in_the_record_is_judged(tmp_path: Path) -> None:
    """Other code after the resume shows, though the hash of the last sources is the same."""
    spec = tiny_spec(tmp_path, training={"steps": 16})
    record = start(spec, Store(tmp_path / "m")).record
    document = record.model_dump(mode="json")
    facts = facts_of(document)
    for name in ("resumed_with", "forced_resume", "forked_from"):
        path = ("effective", "code", name)
        judgement = judge(facts, facts_of(put(document, path, "step 2: other sources")))
        names_alone(judgement, f"effective.code.{name}", {"differs"})
    assert matches_all(judge(facts, facts_of(document | {"resumes": []})))
