"""A run's description in MLflow: what came of it, safe as Markdown, never over a person's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from track.tracked_runs import end_run, make_record, make_run

from workbench.track.comparisons import ComparisonNote, note_comparison
from workbench.track.description import (
    NOTE_TAG,
    OWN_NOTE_TAG,
    description,
    escaped,
    is_ours,
    with_digest,
)
from workbench.track.mlflow_store import Feed, connect
from workbench.track.record import Point
from workbench.track.store import Store

NOTE = ComparisonNote(
    report="",
    sides=["a", "b"],
    verdict="refused",
    claims={"nll": "refused", "memory": "flagged"},
    treatment="model",
    ruleset=4,
    when="2026-01-01T00:00:00+00:00",
)
HOSTILE = "[x](javascript:alert(1)) <img src=x> **b** `c` http://out.org _e_\n# h\n- i | j"


def test_it_says_what_came_out_what_ran_and_who_compared_it() -> None:
    record = make_record(notes="first try")
    record.results.final = {"train_split/nll": 2.0, "held_out/nll": 1.25, "held_out/clean_nll": 1.0}
    record.points = [Point(step=4, tokens=4096, order_digest="d", lr_trace="t")]
    record.spec["data"]["dataset"] = "sample"
    said = description(record, "FINISHED", {"a--b--12345678": NOTE})
    first, what, *rest = said.split("\n\n")
    assert first == "**held_out/nll 1.2500**, train_split/nll 2.0000 nats/token at 4,096 tokens."
    assert "seed 42" in what
    assert "nll refused, memory flagged; a against b" in said
    assert "`comparisons/a--b--12345678/report.html`" in said
    assert rest[-1] == "first try"
    record.error = "no room"
    assert description(record, "FAILED", {}).startswith("**FAILED**: no room. **held_out/nll")


def test_random_ids_are_no_result() -> None:
    record = make_record()
    assert record.spec["data"]["dataset"] == "random"
    record.results.final = {"held_out/nll": 1.0}
    assert "1.0" not in description(record, "FINISHED", {}).splitlines()[0]


def test_text_is_no_markup() -> None:
    record = make_record(notes=HOSTILE)
    record.error = HOSTILE
    note = NOTE.model_copy(update={"sides": [HOSTILE, "b"]})
    said = description(record, "FAILED", {"a` [x](y)": note})
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(said)
    kinds = [inner.type for token in tokens for inner in (token, *(token.children or ()))]
    for kind in ("link_open", "image", "html_inline", "html_block", "heading_open", "em_open"):
        assert kind not in kinds
    assert kinds.count("bullet_list_open") == 1
    assert kinds.count("strong_open") == 1
    for line in ("- x", "+ x", "1. x", "12) x", "= x", "# x"):
        (token, *_) = MarkdownIt("commonmark").parse(escaped(line))
        assert token.type == "paragraph_open", line


def test_a_note_that_a_person_wrote_is_kept(store: Store) -> None:
    note = "**held_out/nll 1.2500** and more"
    folder, record, _ = make_run(store, "noted", 3)
    target = connect(None, store, "workbench")
    position = Feed(folder, target).push()

    def tags() -> dict[str, str]:
        return dict(target.client.get_run(position.run_id).data.tags)

    before = tags()
    assert is_ours(before)
    assert before[NOTE_TAG]
    # Another process follows the end of the run: ours is replaced.
    end_run(folder, record)
    Feed(folder, target).push()
    note_comparison(folder, folder.parent / "a--b--12345678", NOTE)
    Feed(folder, target).push()
    assert "a against b" in tags()[NOTE_TAG]
    target.client.set_tag(position.run_id, NOTE_TAG, note)
    note_comparison(folder, folder.parent / "a--c--12345678", NOTE)
    Feed(folder, target).push()
    after = tags()
    assert after[NOTE_TAG] == note
    assert "workbench.comparison.a--c--12345678" in after


def test_only_an_unchanged_note_is_ours() -> None:
    tags: dict[str, Any] = with_digest("said")
    assert is_ours(tags)
    assert is_ours({})
    assert not is_ours({**tags, NOTE_TAG: "said otherwise"})
    assert not is_ours({NOTE_TAG: "said"})
    assert set(tags) == {NOTE_TAG, OWN_NOTE_TAG}


def test_the_folder_of_a_run_without_comparisons_has_none(tmp_path: Path) -> None:
    assert "Compared" not in description(make_record(), "RUNNING", {})
