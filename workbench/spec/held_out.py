"""What an evaluation set may be called: the rule that decides whether it is held out, and names.

The statuses of a set:

- `held_out`: its overlap with the training text was measured, and is within the limits;
- `contaminated`: it was measured, and is not;
- `unproven`: it was not measured, or not on all of the training text;
- `train_split`: it is a part of the training text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

SetStatus = Literal["held_out", "contaminated", "unproven", "train_split"]
STATUSES: tuple[SetStatus, ...] = get_args(SetStatus)

# The classes of the histogram of documents by their share of n-grams in training; a record holds a
# count for each, in this order. The first holds shares of exactly 0, the last of exactly 1, those
# between them what is above 0 and below 1, each without its upper end.
HISTOGRAM = ("0", *(f"{low}-{low + 10} %" for low in range(0, 100, 10)), "100 %")


def logged_name(name: str, status: str | None) -> str:
    """The name that a set's numbers are logged under: `contaminated.wiki` for `held_out.wiki`.

    Only a set whose status is `held_out` is called so.
    """
    if status in ("contaminated", "unproven") and name.partition(".")[0] == "held_out":
        return status + name.removeprefix("held_out")
    return name


def overlap_rule(ngram: int, document_share: float, limit: float, unit: str = "word") -> str:
    """The settings of the measurement in one sentence, as a record holds them.

    `unit` is what an n-gram is made of: `word`, or `token` where only ids exist.
    """
    return (
        f"n-grams of {ngram} {unit}s; a document overlaps from {document_share:.6g} of them on;"
        f" contaminated above {limit:.6g} of documents or scored tokens"
    )


def measured_status(
    documents: int, overlapping: int, tokens: int, overlapping_tokens: int, limit: float
) -> SetStatus:
    """What the measurement makes of a set.

    Args:
        documents: in the set.
        overlapping: of them, those that overlap the training text.
        tokens: scored tokens of the set.
        overlapping_tokens: scored tokens of the overlapping documents.
        limit: the share of either up to which the set is still held out.
    """
    beyond = overlapping > limit * documents or overlapping_tokens > limit * tokens
    return "contaminated" if beyond else "held_out"


def is_smoke_test(spec: Mapping[str, Any]) -> bool:
    """Whether a run of this spec is trained on random ids."""
    data = spec.get("data")
    return isinstance(data, Mapping) and data.get("dataset") == "random"


def overlap_words(overlap: object, documents: int | None) -> str:
    """What a record says was measured of a set of so many documents, in a few words."""
    if not isinstance(overlap, Mapping):
        return str(getattr(overlap, "not_applicable", "not recorded"))
    if "outcome" in overlap:  # of a stream
        consumed = f"the {overlap.get('checked_documents')} documents consumed"
        return (
            f"{overlap['outcome']} by what passed: {overlap.get('overlapping_documents')} of"
            f" {documents} documents overlap {consumed}, in which {percent(overlap.get('share'))}"
            " of all n-grams stand"
        )
    said = (
        f"{overlap.get('overlapping_documents')} of {documents} documents overlap the training"
        f" text, in which {percent(overlap.get('share'))} of all n-grams stand"
    )
    measured_on = str(overlap.get("measured_on", ""))
    return f"{said}, measured on {measured_on}" if measured_on.startswith("token ids") else said


def histogram_words(overlap: object) -> str:
    """The classes of the histogram that hold documents; empty where nothing was measured."""
    counts = overlap.get("histogram") if isinstance(overlap, Mapping) else None
    if not isinstance(counts, list) or not all(isinstance(count, int) for count in counts):
        return ""
    return ", ".join(
        f"{label}: {count:,}" for label, count in zip(HISTOGRAM, counts, strict=False) if count
    )


def percent(share: Any) -> str:
    """A share in percent, so many digits that none but 0 reads as 0."""
    return f"{100 * share:.3g} %" if isinstance(share, int | float) else "-"


def set_words(name: str, status: str | None, overlap: object, documents: int | None) -> str:
    """A line on one set: the name it is logged under, what was measured, and the histogram."""
    said = f"{logged_name(name, status)}: {overlap_words(overlap, documents)}"
    classes = histogram_words(overlap)
    return f"{said} (documents by share: {classes})" if classes else said
