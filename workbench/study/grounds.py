"""What a study's report rests on: what happened, the checklist, what differs, who the runs are."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from workbench.compare.arms import ArmPair
from workbench.compare.document import (
    Badge,
    Block,
    Brief,
    Cell,
    Code,
    Commands,
    Fold,
    Strong,
    Words,
    bullets,
    paragraph,
    table,
)
from workbench.compare.words import show, why
from workbench.plan import duration
from workbench.spec.checklist import CLAIMS, RULES, tag_of
from workbench.study.ledger import Event
from workbench.study.outcome import StudyResult
from workbench.study.places import portable, seen_from
from workbench.study.plan import plan_differences
from workbench.study.sections import listed
from workbench.study.table import state_rows
from workbench.track.position import read_position
from workbench.track.record import RunRecord

_MOST_COLUMNS = 3  # of arms beside their settings
_LONGEST_NAME = 22  # of a run, in the table of events
_MOST_CONTRASTS = 2  # in one table of rules: their names are long


def history(outcome: StudyResult) -> list[Block]:
    """Every planned run with its state, and all that happened: nothing is dropped."""
    status = outcome.status
    rows: list[list[Cell]] = []
    for state, row in zip(status.states, state_rows(status.states), strict=True):
        counted = "yes" if state in outcome.compared else "no"
        rows.append([*row[:5], counted, portable(row[5], status.project)])
    head = ["arm", "seed", "state", "step", "trained", "compared", "note"]
    blocks: list[Block] = [table(head, rows)]
    lines: list[Words | str] = []
    versions = status.plan.versions
    for before, after in pairwise(versions):
        lines.append(
            (
                Strong(f"The plan was changed on {after.when}"),
                f", when {after.finished_runs} runs had finished: {after.reason}. "
                + "; ".join(plan_differences(before.document, after.document)),
            )
        )
    if status.changes:
        said = "; ".join(status.changes)
        lines.append((Strong("The study file was changed after the last run"), f": {said}"))
    lines += _incidents(outcome)
    if lines:
        blocks.append(bullets(lines))
    else:
        blocks.append(
            paragraph(
                "Every run of the plan was trained once, from start to end; the plan was not"
                " changed."
            )
        )
    prefix = f"{status.plan.name}-"
    events: list[list[Cell]] = [
        [
            _clock(event.when),
            _in_short((event.run or "").removeprefix(prefix)),
            event.kind,
            event.status or "",
            event.detail,
        ]
        for event in _events(outcome)
    ]
    every = table(["when (UTC)", "run", "event", "status", "detail"], events)
    blocks.append(Fold(f"All {len(events)} events", (every,)))
    return blocks


def _in_short(name: str) -> Brief:
    """A run's name; where there is no room, without its middle: its end says which seed it has."""
    head = (_LONGEST_NAME - 1) // 2
    tail = _LONGEST_NAME - 1 - head
    short = name if len(name) <= _LONGEST_NAME else f"{name[:head]}…{name[-tail:]}"
    return Brief(short, name)


def _clock(when: str) -> str:
    """A time as "2026-01-31 12:00:00"; as it is where it is none."""
    try:
        return f"{datetime.fromisoformat(when).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return when


def wall_time(events: Iterable[Event]) -> str:
    """Such as ", in 8 min 49 s of wall time": from every start of the study to the last that is
    known of it, the time between two starts left out; empty where nothing is known."""
    spans: list[tuple[datetime, datetime]] = []
    for event in events:
        try:
            when = datetime.fromisoformat(event.when)
        except ValueError:
            continue
        if event.kind == "began":
            spans.append((when, when))
        elif spans and event.kind in ("started", "ended", "interrupted", "over"):
            spans[-1] = spans[-1][0], when
    seconds = sum((end - start).total_seconds() for start, end in spans)
    return f", in {duration(seconds)} of wall time" if seconds > 0 else ""


def _events(outcome: StudyResult) -> list[Event]:
    """What happened, without the place of the project in any message."""
    status = outcome.status
    return [
        event.model_copy(update={"detail": portable(event.detail, status.project)})
        for event in status.ledger.events
    ]


def _incidents(outcome: StudyResult) -> list[Words | str]:
    """What did not go as planned: interruptions, failures, runs that moved or were lost."""
    lines: list[Words | str] = []
    for event in _events(outcome):
        if event.kind == "interrupted":
            lines.append(
                f"{event.when}: the study was interrupted {event.detail} and went on later."
            )
        elif event.kind == "missed":
            lines.append(f"{event.when}: {event.run} was not in the store: {event.detail}.")
        elif event.kind == "renamed":
            lines.append(
                f"{event.when}: the folder of {event.run} has another name, {event.detail}."
            )
        elif event.kind in ("removed", "restored"):
            lines.append(f"{event.when}: {event.run} was moved {event.detail}.")
        elif event.kind == "ended" and event.status in ("FAILED", "KILLED"):
            said = event.detail or f"exit code {event.exit_code}"
            lines.append(f"{event.when}: {event.run} ended as {event.status}: {said}.")
        elif event.kind == "ended" and event.exit_code:
            lines.append(f"{event.when}: {event.run} did not begin: {event.detail}.")
    for state in outcome.status.states:
        record = state.entry.record if state.entry else None
        if record and record.resumes and state.state == "finished":
            steps = ", ".join(f"{one.step:,}" for one in record.resumes)
            lines.append(f"{state.run} went on from step {steps}, to the bits of an unbroken run.")
    return lines


def checklist(outcome: StudyResult) -> list[Block]:
    """Every rule by arm: its outcome against the baseline; then what differs and why."""
    comparison = outcome.comparison
    if comparison is None:
        return [paragraph("Nothing was compared.")]
    with_base = [pair for pair in comparison.pairs if pair not in comparison.contrasts]
    tables = [_rules(with_base, outcome.baseline)]
    contrasts = comparison.contrasts
    for first in range(0, len(contrasts), _MOST_CONTRASTS):
        tables.append(_rules(contrasts[first : first + _MOST_CONTRASTS], outcome.baseline))
    said: dict[str, list[str]] = {}
    for pair in comparison.pairs:
        for ruling in pair.judgement.rules:
            if any(ruling.effects.values()):
                who = label(pair, outcome.baseline)
                said.setdefault(f"{ruling.rule}: {why(ruling)}", []).append(who)
    written = ", contrasts as they are written" if contrasts else ""
    legend = (
        f"Each arm against {outcome.baseline}{written}. N, B, T, M: what a difference does to nll,"
        " bpb, throughput, memory (r refuses, f flags)."
    )
    blocks: list[Block] = [*tables, paragraph(legend)]
    if said:
        blocks.append(bullets(f"{', '.join(who)}: {text}." for text, who in said.items()))
    return blocks


def _rules(pairs: Sequence[ArmPair], baseline: str) -> Block:
    """Every rule with its outcome for each of the pairs."""
    head = ["rule", "N B T M", *(label(pair, baseline) for pair in pairs)]
    rows: list[list[Cell]] = []
    for name, rule in RULES.items():
        effects = " ".join((rule.effects.get(claim) or "-")[0] for claim in CLAIMS)
        cells: list[Cell] = []
        for pair in pairs:
            ruling = pair.judgement.ruling(name)
            worst = ruling.over(CLAIMS)
            cells.append(ruling.outcome if worst == "comparable" else Badge(ruling.outcome, worst))
        rows.append([name, effects, *cells])
    return table(head, rows)


def label(pair: ArmPair, baseline: str) -> str:
    """What a comparison is called: the arm, or both where the other is not the baseline."""
    return pair.b.name if pair.a.name == baseline else f"{pair.b.name} - {pair.a.name}"


def differences(outcome: StudyResult) -> list[Block]:
    """The settings that are not the same in every arm; the equal ones on demand."""
    document = outcome.status.plan.latest.document["arms"]
    names = [arm for arm in outcome.arms if arm in document]
    found = different_settings(document, names)
    leaves = dict.fromkeys(leaf for arm in names for leaf in document[arm])
    different: list[list[Cell]] = [[leaf, *map(show, values)] for leaf, values in found.items()]
    equal: list[list[Cell]] = [
        [leaf, show(document[names[0]].get(leaf))] for leaf in leaves if leaf not in found
    ]
    guards = {str(tag_of(leaf).rule) for leaf in found}
    blocks: list[Block] = []
    if different and len(names) <= _MOST_COLUMNS:
        blocks.append(table(["setting", *names], different))
    elif different:
        blocks.append(bullets(_by_value(names, row) for row in different))
    if different:
        blocks.append(paragraph(f"They are guarded by: {', '.join(sorted(guards))}."))
    blocks.append(Fold(f"{len(equal)} settings are equal", (table(["setting", "all"], equal),)))
    return blocks


def different_settings(
    document: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, list[Any]]:
    """The settings that are not the same in every arm, each with the value in each of `names`; None
    where an arm has no such setting."""
    leaves = dict.fromkeys(leaf for arm in names for leaf in document[arm])
    values = {leaf: [document[arm].get(leaf) for arm in names] for leaf in leaves}
    return {leaf: found for leaf, found in values.items() if any(v != found[0] for v in found)}


def _by_value(names: Sequence[str], row: Sequence[Cell]) -> Words:
    """A setting with each of its values, and the arms that have it."""
    setting, *values = map(str, row)
    having: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        having.setdefault(value, []).append(name)
    said = "; ".join(f"{value} in {listed(who)}" for value, who in having.items() if value != "-")
    absent = f"; not in {listed(having['-'])}" if "-" in having else ""
    return (Code(setting), f": {said}{absent}")


def provenance(outcome: StudyResult) -> list[Block]:
    """Who the runs are: code, hardware, libraries, and where to find them."""
    records = [
        (state, state.entry.record)
        for state in outcome.status.states
        if state.entry is not None and state.entry.record is not None
    ]
    shared: dict[str, dict[str, None]] = {}
    for _, record in records:
        for key, value in _facts_of(record).items():
            shared.setdefault(key, {})[value] = None
    same = [[key, next(iter(values))] for key, values in shared.items() if len(values) == 1]
    blocks: list[Block] = [table(["of all runs", ""], same)] if same else []
    parted = [key for key, values in shared.items() if len(values) > 1]
    for key in parted:
        blocks.append(
            paragraph(
                Strong(f"{key} is not the same in all runs"), f": {listed(list(shared[key]))}"
            )
        )
    positions = [read_position(state.entry.folder) if state.entry else None for state, _ in records]
    rows = [
        [
            record.name,
            record.id[:8],
            state.state,
            (record.started or "").replace("T", " ")[:16],
            record.spec_sha256[:8],
        ]
        for state, record in records
    ]
    blocks.append(table(["run", "id", "state", "started", "spec"], rows))
    logged = [
        [record.name, position.run_id, *([position.page] if position.page else [])]
        for (_, record), position in zip(records, positions, strict=True)
        if position is not None
    ]
    if logged:
        inside = bullets(f"{name}: {', '.join(where)}" for name, *where in logged)
        blocks.append(Fold(f"MLflow runs of {len(logged)} of {len(records)} runs", (inside,)))
    return blocks


def reproduce(outcome: StudyResult) -> list[Block]:
    """The commands from install to this report."""
    status = outcome.status
    commits = {
        str(state.entry.record.effective.code.git_commit)
        for state in status.states
        if state.entry and state.entry.record
    } - {"None"}
    lines = [f"git checkout {commits.pop()}"] if len(commits) == 1 else []
    lines += [
        "python3 -m venv .venv && . .venv/bin/activate",
        "pip install -c constraints.txt -e '.[sample]'",
    ]
    file = shlex.quote(seen_from(status.project, status.plan.file))
    lines += [f"wb study check {file}", f"wb study run {file}", f"wb study report {file}"]
    return [Commands(tuple(lines))]


def _facts_of(record: RunRecord) -> dict[str, str]:
    code, hardware = record.effective.code, record.effective.hardware
    dirty = {True: " (dirty)", False: "", None: " (state unknown)"}[code.git_dirty]
    versions = record.provenance.get("versions")
    facts: dict[str, Any] = {
        "commit": f"{code.git_commit}{dirty}" if code.git_commit else "-",
        "sources": code.package_sha256,
        "version": code.version,
        "device": hardware.device_name,
        "threads": hardware.threads,
        "precision": record.effective.precision.compute_dtype,
        "training text": record.effective.data.train_sha256,
        "tokenizer": record.effective.tokenizer.sha256,
        "torch": hardware.torch,
        "python": record.provenance.get("python"),
    }
    if isinstance(versions, dict):
        facts |= {name: version for name, version in versions.items() if name not in facts}
    return {key: show(value) for key, value in facts.items()}
