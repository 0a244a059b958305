"""Whether evaluation sets may be called held out: checked in a record, said in a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workbench.compare.document import Block, bullets, paragraph, table
from workbench.errors import Fault
from workbench.spec.held_out import (
    HISTOGRAM,
    STATUSES,
    histogram_words,
    logged_name,
    measured_status,
    overlap_rule,
    overlap_words,
    percent,
)
from workbench.spec.run import RunSpec
from workbench.track.record import RunRecord, SetFacts

SMOKE_TEST = "random ids: a smoke test, whose numbers say nothing of any text"


def refusals(evaluated: Mapping[str, SetFacts], dataset: Any) -> dict[str, str]:
    """Evaluation sets for whose sake no claim may rest on a run's NLL, each with the reason.

    On random ids these are all. Else they are the contaminated ones, where the run evaluated no
    other set that may be held out.
    """
    if dataset == "random":
        return dict.fromkeys(evaluated, SMOKE_TEST)
    if any(facts.status in ("held_out", "unproven") for facts in evaluated.values()):
        return {}
    return {
        name: f"contaminated: {overlap_words(facts.overlap, facts.documents)}"
        for name, facts in evaluated.items()
        if facts.status == "contaminated"
    }


def held_out_section(records: Mapping[str, RunRecord]) -> list[Block]:
    """The status of every evaluation set, the share of its n-grams in training, the histogram.

    Args:
        records: what each run is called in the tables -> its record.
    """
    rows: list[list[str]] = []
    histograms: list[str] = []
    notes: dict[str, None] = {}
    for label, record in records.items():
        for name, facts in record.effective.evaluation.items():
            logged = logged_name(name, facts.status)
            found = facts.measured
            if not isinstance(found, dict):
                why = found.not_applicable if found is not None else "not recorded"
                rows.append([label, logged, str(facts.status or "-"), "-", "-", "-"])
                notes[f"{logged}: {why}"] = None
                continue
            over = f"{found.get('overlapping_documents')} of {facts.documents}"
            copies = str(found.get("copies"))
            share = percent(found.get("share"))
            rows.append([label, logged, str(facts.status), share, over, copies])
            if isinstance(facts.overlap_rule, str):
                how = [found[key] for key in ("method", "measured_on") if key in found]
                notes[f"{facts.overlap_rule} ({'; '.join(map(str, how))})"] = None
            if classes := histogram_words(facts.measured):
                histograms.append(f"{label}, {logged}: {classes}")
    if not rows:
        return []
    head = ["run", "set", "status", "n-grams in training", "documents overlapping", "copies"]
    parts: list[Block] = [table(head, rows, numbers=3)]
    if histograms:
        said = "Documents by the share of their n-grams that stand in the training text:"
        parts += [paragraph(said), bullets(histograms)]
    if notes:
        parts += [paragraph("How it was measured:"), bullets(notes)]
    return parts


def overlap_faults(record: RunRecord, spec: RunSpec) -> Iterator[Fault]:
    """What a record says of its evaluation sets that its own counts or its spec contradict."""
    for name, facts in record.effective.evaluation.items():
        place = f"effective.evaluation.{name}"
        if facts.status is None:
            continue  # the rules count it as missing
        if facts.status not in STATUSES:
            message = "there is no such status"
            yield Fault(f"{place}.status", message, facts.status, ", ".join(STATUSES))
        elif (name == "train_split") != (facts.status == "train_split"):
            expected = "train_split" if name == "train_split" else "a status of a held-out set"
            message = f"this contradicts the set's name, {name}"
            yield Fault(f"{place}.status", message, facts.status, expected)
        elif facts.status in ("held_out", "contaminated"):
            yield from _measured_faults(place, facts, spec)


def _measured_faults(place: str, facts: SetFacts, spec: RunSpec) -> Iterator[Fault]:
    found, data = facts.overlap, spec.data
    if not isinstance(found, dict):
        message = f"a set cannot be {facts.status} without a measurement"
        yield Fault(f"{place}.overlap", message, None, "what was counted")
        return
    share, limit = data.overlap_document_share, data.overlap_limit
    if data.overlap_ngram is None or share is None or limit is None:
        message = f"the overlap of dataset {data.dataset!r} cannot be measured"
        yield Fault(f"{place}.status", message, facts.status, "unproven")
        return
    rules = [overlap_rule(data.overlap_ngram, share, limit, unit) for unit in ("word", "token")]
    if facts.overlap_rule is not None and facts.overlap_rule not in rules:
        message = "this contradicts data.overlap_* of the spec"
        yield Fault(f"{place}.overlap_rule", message, facts.overlap_rule, rules[0])
    counts = [found.get(key) for key in ("overlapping_documents", "overlapping_tokens")]
    over, tokens = (value if isinstance(value, int) else -1 for value in counts)
    all_documents, all_tokens = facts.documents, facts.scored_tokens
    if all_documents is None or all_tokens is None:
        return
    if not (0 <= over <= all_documents and 0 <= tokens <= all_tokens):
        message = "so many cannot overlap"
        allowed = f"0 to {all_documents:,} documents, 0 to {all_tokens:,} tokens"
        yield Fault(f"{place}.overlap", message, counts, allowed)
        return
    expected = measured_status(all_documents, over, all_tokens, tokens, limit)
    if facts.status != expected:
        message = "this contradicts the overlap that was counted"
        yield Fault(f"{place}.status", message, facts.status, expected)
    yield from _count_faults(place, found, all_documents, over, share)


def _count_faults(
    place: str, found: Mapping[str, Any], documents: int, over: int, share: float
) -> Iterator[Fault]:
    """Counts of one measurement that cannot stand beside each other."""
    inside, looked_up = found.get("ngrams_in_training"), found.get("ngrams")
    if not (isinstance(inside, int) and isinstance(looked_up, int) and 0 <= inside <= looked_up):
        message = "more n-grams in training than there are"
        yield Fault(f"{place}.overlap.ngrams_in_training", message, inside, f"up to {looked_up}")
    elif found.get("share") != (inside / looked_up if looked_up else 0.0):
        message = "this is not the share that the counts make"
        yield Fault(f"{place}.overlap.share", message, found.get("share"), f"{inside}/{looked_up}")
    counts = found.get("histogram")
    counts = counts if isinstance(counts, list) else []
    is_counts = all(type(one) is int and one >= 0 for one in counts)
    if not is_counts or len(counts) != len(HISTOGRAM) or sum(counts) != documents:
        message = "this is no histogram of the set's documents"
        yield Fault(f"{place}.overlap.histogram", message, counts, f"{documents} documents")
        return
    # A class from i/10 on: all of it overlaps when its lower end does, none when its end does not.
    lows = [0.0, *(i / 10 for i in range(10)), 1.0]
    ends = [0.0, *((i + 1) / 10 for i in range(10)), 1.0]
    surely = sum(c for c, low in zip(counts[1:], lows[1:], strict=True) if low >= share)
    perhaps = sum(c for c, end in zip(counts[1:], ends[1:], strict=True) if end >= share)
    if not surely <= over <= perhaps:
        message = "this contradicts the histogram"
        where = f"{place}.overlap.overlapping_documents"
        yield Fault(where, message, over, f"{surely} to {perhaps}")
