"""Evaluation sets that a spec brings from files of their own (`data.held_out`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core.data.corpus import text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.overlap import Passages
from workbench.core.data.passages import passages_of_documents
from workbench.core.data.split import Spans, every_document
from workbench.core.data.tokenizer import Ids, Tokenizer

if TYPE_CHECKING:
    from workbench.spec.run import RunSpec


def from_files(
    spec: RunSpec, name: str, tokenizer: Tokenizer, cache: Path
) -> tuple[Ids, Spans, Passages]:
    """The documents of a further evaluation set: every text of its files once."""
    data = spec.data
    number, given = next(
        (number, one) for number, one in enumerate(data.held_out) if one.set_name == name
    )
    unit, place = data.text_unit or "auto", f"data.held_out[{number}].path"
    corpus = text_corpus(given.path, data.text_field or "text", unit, place)
    encoded = encode_corpus(corpus, tokenizer, cache / "corpus")
    spans = every_document(encoded)
    passages = passages_of_documents(encoded.tokens, spans.ranges, spans.sha256, tokenizer)
    return encoded.tokens, spans, passages


def some_of(spans: Spans, spec: RunSpec) -> Spans:
    """As many documents as the spec evaluates."""
    return spans.first(spec.evaluation.eval_documents) if spec.evaluation.eval_documents else spans
