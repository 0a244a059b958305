"""What a set that comes after a run has earned: measured against the text that trained the run."""

from __future__ import annotations

from workbench.core.data.evaluation_sets import EvaluationSet
from workbench.core.data.judged import JudgedSet, judge, settings_of, unproven
from workbench.core.data.loading import load_data
from workbench.core.data.overlap import Passages
from workbench.core.data.passages import passages_of_documents
from workbench.core.data.split import Spans
from workbench.core.data.tokenizer import Ids, Tokenizer
from workbench.errors import StoreError, UserError
from workbench.spec.run import RunSpec
from workbench.track.record import RunRecord
from workbench.track.store import Store


def training_passages(record: RunRecord, spec: RunSpec, store: Store) -> Passages | str:
    """The text that trained a run, read again; or why nothing can be shown with it.

    Raises:
        StoreError: the cache cannot be written.
    """
    try:
        data = load_data(spec, store.home, seed=spec.seed)
    except StoreError:
        raise
    except UserError as error:
        fault = error.faults[0]
        return f"the training text cannot be read any more: {fault.place}: {fault.message}"
    trained = record.effective.data.train_sha256
    if not isinstance(trained, str):
        return "what the run was trained on is not known by its content"
    if data.facts["data"]["train_sha256"] != trained:
        return "where the training text was, there is another text now"
    if data.train_passages is None:
        return "there is no training text to look into"
    return data.train_passages


def judged_for(
    training: Passages | str,
    one: EvaluationSet,
    tokens: Ids,
    spans: Spans,
    tokenizer: Tokenizer,
    spec: RunSpec,
    store: Store,
) -> JudgedSet:
    """A set of whole documents under the name that it earns beside this training text.

    Raises:
        StoreError: the cache cannot be written.
    """
    if isinstance(training, str):
        return unproven(one, training)
    passages = passages_of_documents(tokens, spans.ranges, spans.sha256, tokenizer)
    if training.unit == "token":
        passages = Passages(
            f"{passages.identity} as ids of {tokenizer.content_sha256}",
            spans.sha256,
            read_ids=lambda: iter(one.documents),
        )
    return judge(one, passages, training, settings_of(spec.data), store.cache / "overlap")
