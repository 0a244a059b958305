"""The sections of a report, each a list of blocks."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from workbench.compare.commands import matched_name, matched_run, options, run_words
from workbench.compare.document import (
    Badge,
    Block,
    Brief,
    Cell,
    Code,
    Commands,
    Fold,
    Inline,
    Strong,
    Words,
    bullets,
    paragraph,
    table,
)
from workbench.compare.facts import Facts, same, spec_leaves, value_of
from workbench.compare.figures import score_of, series_of
from workbench.compare.numbers import decimals, write, write_interval, written
from workbench.compare.pair import Comparison, Side
from workbench.compare.rules import Judgement, Leaf, Ruling
from workbench.compare.words import remedy, show, show_pair, why
from workbench.spec.checklist import CLAIMS, RULES, tag_of
from workbench.track.position import read_position
from workbench.track.record import RunRecord

_LONGEST_VALUE = 120

# The leaf whose values stand for a rule that matches.
_SHOWN = {
    "model": "model.mlp_type",
    "tokenizer": "effective.tokenizer.name",
    "data": "effective.data.order_digest",
    "budget": "effective.budget.tokens",
    "parameters": "effective.parameters.total",
    "seeds": "seed",
    "optimizer": "optimizer.lr",
    "precision": "effective.precision.compute_dtype",
    "hardware": "effective.hardware.device_name",
    "telemetry": "telemetry.log_steps",
    "execution": "effective.execution.loss_backend",
    "evaluation": "effective.evaluation.held_out.sha256",
    "interval": "effective.interval.last_step",
    "code": "effective.code.package_sha256",
}


class Compared(Protocol):
    """Two runs, or two arms, as the checklist shows them."""

    @property
    def names(self) -> tuple[str, str]:
        """What the two are called."""

    @property
    def judgement(self) -> Judgement:
        """What the judge made of them."""

    @property
    def facts(self) -> tuple[Facts, Facts]:
        """What is known of each."""


def numbers(comparison: Comparison) -> list[Block]:
    """Every number of both runs, and a list of what each is."""
    assert comparison.results is not None
    rows: list[list[str]] = []
    notes: dict[str, list[Inline]] = {}  # what is said -> the numbers that it is said of
    for name, number in comparison.results.numbers.items():
        nll = comparison.results.numbers.get(f"{name.rpartition('/')[0]}/nll")
        rows.append([name, *written(name, number, nll)])
        unit = "" if number.unit == "1" else f" ({number.unit})"
        note = f" Blank here: {number.blank}." if number.blank else ""
        if number.no_interval:
            note = f" No interval: {number.no_interval}."
        names = notes.setdefault(f": {number.what}.{note}", [])
        names += [", " if names else "", Code(name), unit]
    head = ["number", "A", "B", "B - A", "95 % over documents"]
    return [table(head, rows, numbers=4), bullets((*names, said) for said, names in notes.items())]


def evaluations(comparison: Comparison) -> list[Block]:
    """The differences of every evaluation set side by side, at each common point."""
    results = comparison.results
    score = score_of(results)
    if results is None or score is None:
        return []
    curves = series_of(results, score)
    points = sorted({at for series in curves.values() for at in series.tokens})
    head = ["tokens"]
    for name in curves:
        head += [f"{name} B - A", "95 %"]
    rows = []
    for at in points:
        row = [f"{at:,}"]
        for name, series in curves.items():
            if at not in series.tokens:
                row += ["-", "-"]
                continue
            index = series.tokens.index(at)
            digits = decimals(results.numbers[f"{name}/{score}"])
            documents = series.documents[index]
            row.append(write(f"{name}/{score}", series.difference[index], digits, sign=True))
            row.append(write_interval(documents.interval, digits) if documents else "-")
        rows.append(row)
    unit = next(iter(curves.values())).unit
    notes = [
        f"Only {side.name} was evaluated at {', '.join(f'{at:,}' for at in only)} tokens."
        for side, only in zip((comparison.a, comparison.b), comparison.only, strict=True)
        if only
    ]
    summary = f"Differences at each of {len(points)} evaluations, in {unit}"
    inside: list[Block] = [table(head, rows, numbers=len(head))]
    if notes:
        inside.append(paragraph(" ".join(notes)))
    return [Fold(summary, tuple(inside))]


def checklist(comparison: Compared) -> list[Block]:
    """Every rule with its outcome and two values; then every value that does not match."""
    rows: list[list[Cell]] = []
    for ruling in comparison.judgement.rules:
        leaf = _representative(ruling)
        path = leaf.path if leaf else _SHOWN[ruling.rule]
        a, b = (value_of(facts, path)[1] for facts in comparison.facts)
        row: list[Cell] = [ruling.rule, _outcome(ruling), _guards(ruling), _short(path)]
        rows.append([*row, *_pair(a, b, 15)])
    head = ["rule", "outcome", "N B T M", "value", "A", "B"]
    legend = (
        "N, B, T, M: what a difference does to nll, bpb, throughput, memory"
        " (r refuses, f flags; in capitals where it does so here)."
    )
    page = (
        " ",
        Code("wb explain RULE"),
        " says what a rule guards and why, by a measured example.",
    )
    parts: list[Block] = [table(head, rows), paragraph(legend, *page)]
    leaves = [leaf for ruling in comparison.judgement.rules for leaf in ruling.leaves]
    leaves = [leaf for leaf in leaves if leaf.outcome != "match"]
    if leaves:
        every: list[list[Cell]] = [
            [leaf.rule, _short(leaf.path), leaf.outcome, *_pair(leaf.a, leaf.b, 17)]
            for leaf in leaves
        ]
        parts.append(bullets(_sentences(comparison)))
        shown = table(["rule", "value", "outcome", "A", "B"], every)
        parts.append(Fold(f"Every value that does not match ({len(leaves)})", (shown,)))
    return parts


def spec_difference(comparison: Compared) -> list[Block]:
    """The settings that differ, the treatment marked; the equal ones folded."""
    judged = {leaf.path: leaf for rule in comparison.judgement.rules for leaf in rule.leaves}
    a, b = comparison.facts
    different: list[list[Cell]] = []
    equal: list[list[Cell]] = []
    leaves = dict.fromkeys([*spec_leaves(), *(leaf for leaf in (*a, *b) if _of_spec(leaf))])
    for path in leaves:
        (_, first), (_, second) = value_of(a, path), value_of(b, path)
        if same(first, second):
            equal.append([path, show(first)])
        else:
            pair = _pair(first, second, 24)
            different.append([path, *pair, _guard(path, judged.get(path))])
    parts: list[Block] = [paragraph("No setting differs.")]
    if different:
        parts = [table(["setting", "A", "B", "judged by"], different)]
    both = table(["setting", "both"], equal)
    return [*parts, Fold(f"{len(equal)} settings are equal", (both,))]


def runs(comparison: Comparison) -> list[Block]:
    """Who the two runs are: facts that are shown and not judged among them."""
    first, second = comparison.a, comparison.b
    described = [
        description(side, facts)
        for side, facts in zip((first, second), comparison.facts, strict=True)
    ]
    keys = dict.fromkeys(key for one in described for key in one)
    rows = [[key, *(one.get(key, "-") for one in described)] for key in keys]
    rows = [row for row in rows if row[1:] != ["-", "-"]]
    return [table(["", "A", "B"], rows), *imports(first.record, second.record)]


def imports(*records: RunRecord) -> list[Block]:
    """Of imported runs: from where, and what of their source was not taken at its word."""
    parts: list[Block] = []
    for record in records:
        if (found := record.imported) is not None:
            said = f" was imported from {found.source} ({found.importer}), not trained here."
            parts.append(paragraph(Strong(record.name), said))
            parts.append(bullets((Code(one.leaf), f": {one.why}") for one in found.corrections))
            parts.append(bullets(found.notes))
    return parts


def reproduce(comparison: Comparison) -> list[Block]:
    """The commands from install to this report."""
    lines = ["python3 -m venv .venv && . .venv/bin/activate"]
    lines += ["pip install -c constraints.txt -e '.[sample]'"]
    commits = {str(side.record.effective.code.git_commit) for side in _sides(comparison)}
    if len(commits) == 1 and commits != {"None"}:
        dirty = any(side.record.effective.code.git_dirty for side in _sides(comparison))
        note = "  # not all: there were uncommitted changes" if dirty else ""
        lines.insert(0, f"git checkout {commits.pop()}{note}")
    for side in _sides(comparison):
        if (imported := side.record.imported) is not None:
            lines.append(f"# {side.record.name} was imported: wb import {imported.importer}")
            continue
        words = run_words(side.record)
        lines.append(" ".join(["wb run", *map(_quote, words)]))
    lines.append(_compare_command(comparison, comparison.b.record.name, with_allow=True))
    data = (Code("results.json"), " and, one row for each number, ", Code("results.csv"))
    beside = paragraph("The numbers of this report are beside it in ", *data, ".")
    parts: list[Block] = [Commands(tuple(lines)), beside]
    own = [side.record for side in _sides(comparison) if side.record.imported is None]
    if any(run_words(record) == ["SPEC"] for record in own):
        where = (Code("run_config.json"), ", under ", Code("spec"))
        parts.append(paragraph("What SPEC was is in the run's ", *where, "."))
    return parts


def remedies(comparison: Compared) -> dict[str, str]:
    """Rule -> what would make it match, for the rules that have an effect."""
    found = {
        ruling.rule: remedy(ruling, comparison.judgement, comparison.names)
        for ruling in comparison.judgement.rules
    }
    return {rule: said for rule, said in found.items() if said}


def matching_commands(comparison: Comparison) -> list[str]:
    """The commands that make a refused pair comparable, as far as settings can."""
    command = matched_run(comparison.b.record, comparison.judgement, comparison.asked)
    record = comparison.b.record
    name = matched_name(record) if command else record.name
    judgement = comparison.judgement
    refusing = [one.rule for one in judgement.rules if one.over(comparison.asked) == "refused"]
    if not command and refusing == ["tokenizer"] and judgement.claims["bpb"] != "refused":
        # No setting gives two tokenizers a common unit of NLL; bytes are one.
        comparison = replace(comparison, asked=("bpb",))
    return [*([command] if command else []), _compare_command(comparison, name, with_allow=False)]


def _compare_command(comparison: Comparison, second: str, *, with_allow: bool) -> str:
    judgement = comparison.judgement
    treatment = [] if judgement.inferred and with_allow else list(judgement.treatment)
    model_counts = any(leaf.path.startswith("model.") for leaf in judgement.ruling("model").counted)
    if not with_allow and model_counts:
        treatment.append("model")
    allow = judgement.allow if with_allow else {}
    at = comparison.at if comparison.at_given and with_allow else None
    words = options(treatment, allow, comparison.asked, at)
    return " ".join(["wb compare", _quote(comparison.a.record.name), _quote(second), *words])


def _sentences(comparison: Compared) -> list[Words]:
    said = remedies(comparison)
    lines: list[Words] = []
    for ruling in comparison.judgement.rules:
        effective = any(ruling.effects.values())
        if ruling.outcome == "match" and not effective:
            continue
        line = f" {ruling.outcome}: {why(ruling)}."
        if ruling.rule in said:
            line += f" Remedy: {said[ruling.rule]}."
        lines.append((Strong(ruling.rule), line))
    return lines


def _outcome(ruling: Ruling) -> Cell:
    worst = ruling.over(CLAIMS)
    return ruling.outcome if worst == "comparable" else Badge(ruling.outcome, worst)


def _pair(a: Any, b: Any, width: int) -> tuple[Brief, Brief]:
    """Two values, in short so that their difference can be seen in `width` characters."""
    if isinstance(a, list) and isinstance(b, list):  # the seeds of two arms: none is cut off
        return _listed(a, width), _listed(b, width)
    short, whole = show_pair(a, b, width), show_pair(a, b, _LONGEST_VALUE)
    return Brief(short[0], whole[0]), Brief(short[1], whole[1])


def _listed(values: list[Any], width: int) -> Brief:
    """A list whole, as "1 to 6" where that says the same, or as how many there are."""
    whole = ", ".join(map(str, values))
    if len(values) > 2 and all(type(one) is int for one in values):
        first, last = values[0], values[-1]
        if values == list(range(first, last + 1)):
            whole = f"{first} to {last}"
    return Brief(whole if len(whole) <= width else f"{len(values)} values", whole)


def _representative(ruling: Ruling) -> Leaf | None:
    first = [*ruling.counted, *ruling.leaves]
    return first[0] if first else None


def _guards(ruling: Ruling) -> str:
    letters = []
    for claim in CLAIMS:
        acts = ruling.effects[claim]
        effect = acts or RULES[ruling.rule].effects.get(claim)
        letter = effect[0] if effect else "-"
        letters.append(letter.upper() if acts else letter)
    return " ".join(letters)


def _guard(path: str, leaf: Leaf | None) -> str:
    tag = tag_of(path)
    if tag.kind == "free":
        return "never compared"
    if tag.kind == "requested":
        return f"{tag.rule}, by what it became"
    if leaf is not None and leaf.outcome == "studied":
        return f"{tag.rule} (the treatment)"
    return f"{tag.rule}"


def description(side: Side, facts: Facts) -> dict[str, str]:
    """Who a run is, by what it is shown under."""
    record = side.record
    code_facts, hardware = record.effective.code, record.effective.hardware
    dirty = {True: " (dirty)", False: "", None: " (state unknown)"}[code_facts.git_dirty]
    commit = f"{code_facts.git_commit[:12]}{dirty}" if code_facts.git_commit else "-"
    hours = _hours(record.started, record.ended)
    versions = record.provenance.get("versions")
    shown: dict[str, Any] = {
        "run": record.name,
        "id": record.id,
        "seed": facts.get("seed"),
        "status": side.status,
        "started": record.started,
        "hours": "-" if hours is None else f"{hours:.2f}",
        "commit": commit,
        "sources": code_facts.package_sha256,
        "spec": record.spec_sha256,
        "training text": record.effective.data.train_sha256,
        "tokenizer": record.effective.tokenizer.sha256,
        "version": code_facts.version,
        "device": hardware.device_name,
        "torch": hardware.torch,
        "python": record.provenance.get("python"),
    }
    if isinstance(versions, dict):
        shown |= {name: version for name, version in versions.items() if name not in shown}
    said = {key: show(value) for key, value in shown.items()}
    if (position := read_position(side.folder)) is not None:
        said["MLflow run"] = position.run_id  # whole: it is looked up by it
        if position.page is not None:
            said["MLflow page"] = position.page
    return said


def _hours(started: str | None, ended: str | None) -> float | None:
    try:
        span = datetime.fromisoformat(ended or "") - datetime.fromisoformat(started or "")
    except (ValueError, TypeError):
        return None
    return span.total_seconds() / 3600


def _of_spec(path: str) -> bool:
    return not path.startswith("effective.")


def _short(path: str) -> str:
    return path.removeprefix("effective.")


def _sides(comparison: Comparison) -> tuple[Side, Side]:
    return comparison.a, comparison.b


def _quote(word: str) -> str:
    from shlex import quote

    return word if word == "SPEC" else quote(word)
