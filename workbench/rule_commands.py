"""`wb explain` and `wb diff`: the rules by their pages, and two specs or runs by their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.answers import Answer, AsJson, Debug, OtherSpecOrRun, SpecOrRun

if TYPE_CHECKING:
    from workbench.spec.run import RunSpec
    from workbench.track.store import RunEntry


def explain(
    rule: Annotated[
        str | None, typer.Argument(help="A rule of the checklist; without it, all are listed.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """Say what a rule of the comparison checklist guards, why it matters, and what to do.

    Example: wb explain budget
    """
    from workbench.compare import explain as pages
    from workbench.spec.checklist import RULESET_VERSION

    if rule is None:
        document = {"ruleset": RULESET_VERSION, "rules": pages.rows()}
        return Answer(document if as_json else pages.render_list())
    page = pages.page_of(rule)
    return Answer(page.to_json() if as_json else pages.render_page(page))


def diff(
    a: SpecOrRun,
    b: OtherSpecOrRun,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Answer:
    """List the resolved values in which two specs or runs differ, with the rule of each.

    Example: wb diff a.yaml quickstart
    """
    from workbench.compare import differences as diffs
    from workbench.specs_and_runs import spec_or_entry
    from workbench.track.store import Store

    store = Store()
    sides = [spec_or_entry(text, store) for text in (a, b)]
    ran = not any(_is_spec(one) for one in sides)
    facts = [_values(one) for one in sides]
    found = diffs.differences(*facts, spec_only=not ran)
    every = {leaf for one in facts for leaf in one if ran or not leaf.startswith("effective.")}
    equal = len(every) - len(found)
    names = (a, b)
    if as_json:
        return Answer(diffs.document(names, found, ran, equal))
    return Answer(diffs.render(names, found, ran, equal))


def _is_spec(one: RunSpec | RunEntry) -> bool:
    from workbench.spec.run import RunSpec

    return isinstance(one, RunSpec)


def _values(one: RunSpec | RunEntry) -> dict[str, Any]:
    """The leaves of a resolved spec, or the facts of a run at its end."""
    from workbench.compare.differences import leaves_of_spec
    from workbench.compare.facts import facts_of_record
    from workbench.foresee import recorded
    from workbench.spec.run import RunSpec

    if isinstance(one, RunSpec):
        return leaves_of_spec(recorded(one))
    record = one.record
    assert record
    return facts_of_record(record, record.points[-1] if record.points else None)
