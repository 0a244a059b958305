"""`wb eval`: scores the checkpoint of a run that has ended, and adds the numbers to its record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.core.data.corpus import text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.evaluation_sets import facts_of, from_spans
from workbench.core.data.overlap import Passages
from workbench.core.data.split import every_document
from workbench.core.data.token_data import tokenizer_by_shards
from workbench.core.data.tokenizer import Tokenizer, load_tokenizer
from workbench.core.device import DeviceName, make_deterministic
from workbench.core.downstream import TaskScore, read_task, score_task, write_items
from workbench.core.evaluate import evaluate, write_scores
from workbench.core.load_model import LoadedModel, load_model
from workbench.core.train import loss_settings
from workbench.errors import UserError
from workbench.proof import judged_for, training_passages
from workbench.run import tracker_for
from workbench.spec.datasets import BY_SHARDS, set_name
from workbench.spec.load import Source, validate
from workbench.spec.run import RunSpec
from workbench.track.additions import Write, add_to_record, find_addition, scores_file
from workbench.track.provenance import code_facts, hardware_facts
from workbench.track.record import Addition, RunRecord
from workbench.track.store import RunEntry, Store

Say = Callable[[str], None]
_TEXT = {"not_applicable": "the set has no text"}


@dataclass(frozen=True)
class EvalOutcome:
    """What was added to a run's record, and what stood there already; both as it stands now.

    `pending` says what MLflow still lacks.
    """

    record: RunRecord
    folder: Path
    step: int
    added: list[Addition]
    already: list[Addition]
    pending: str | None

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "run": self.record.name,
            "id": self.record.id,
            "step": self.step,
            "folder": str(self.folder),
            "added": [one.model_dump(mode="json") for one in self.added],
            "already": [one.model_dump(mode="json") for one in self.already],
            "mlflow_pending": self.pending,
        }


@dataclass(frozen=True)
class OpenRun:
    """A run that has ended, its model at one step, and its tokenizer."""

    folder: Path
    record: RunRecord
    loaded: LoadedModel
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Job:
    """One thing to score: its name in the record and its content, and how it is scored."""

    name: str
    sha256: str
    what: str
    score: Callable[[], tuple[Addition, Write]]


def evaluate_run(
    entry: RunEntry,
    store: Store,
    sets: Mapping[str, Path],
    tasks: Sequence[Path] = (),
    *,
    harness: Sequence[str] = (),
    include_path: Path | None = None,
    step: int | None = None,
    device: DeviceName | None = None,
    say: Say = lambda line: None,
) -> EvalOutcome:
    """Scores the newest checkpoint of a run, or that of `step`, and adds the numbers to its record.

    `harness` names tasks of lm-evaluation-harness, `include_path` a folder of their definitions.
    Every file is read before anything is scored, and everything is scored before anything is
    written. What the record holds already is not scored again.

    Raises:
        UserError: the run is going on or has no such checkpoint, a file cannot be used, or a name
            stands for another content in the record.
        StoreError: the store cannot be written.
    """
    run = open_run(entry, store, step, device)
    training = training_passages(run.record, run.loaded.spec, store) if sets else ""
    jobs = [_set_job(run, training, store, *one) for one in sets.items()]
    jobs += [_task_job(run, path) for path in tasks]
    if harness:
        from workbench.lm_eval_jobs import harness_jobs

        jobs += harness_jobs(run, harness, include_path, say)
    return _add_scores(run, store, jobs, say)


def open_run(
    entry: RunEntry, store: Store, step: int | None = None, device: DeviceName | None = None
) -> OpenRun:
    """The model and the tokenizer of a run that has ended, each shown to be the run's.

    Raises:
        UserError: the run is going on, has no such checkpoint or a damaged one, or its tokenizer
            cannot be had.
    """
    record = _ended(entry)
    loaded = load_model(entry.folder, step, device)
    if validate(Source(record.spec)) != loaded.spec:
        message = "this checkpoint is of another spec than the run's record"
        raise UserError.at(str(loaded.folder), message, None, "a run's files as the run wrote them")
    make_deterministic(loaded.spec.training.deterministic, loaded.model.head_weight.device)
    return OpenRun(entry.folder, record, loaded, _tokenizer(record, loaded, store))


def _add_scores(run: OpenRun, store: Store, jobs: Sequence[Job], say: Say) -> EvalOutcome:
    """Scores what the record does not hold yet, writes it there, and feeds the tracker."""
    record, loaded = run.record, run.loaded
    if twice := [job.name for n, job in enumerate(jobs) if job.name in {j.name for j in jobs[:n]}]:
        raise UserError.at("command line", "the same name twice", twice[0], "a name for each")
    found = {job.name: find_addition(record, job.name, job.sha256, loaded.step) for job in jobs}
    scored = []
    for job in jobs:
        if found[job.name] is None:
            say(f"scoring {job.name} at step {loaded.step:,}: {job.what}")
            scored.append(job.score())
    pending = None
    if scored:
        record = add_to_record(run.folder, scored)
        tracker = tracker_for(_tracked(loaded.spec), store)
        tracker.start(record, run.folder)
        pending = tracker.finish(record, say)
    names = {added.name for added, _ in scored}
    kept = [find_addition(record, job.name, job.sha256, loaded.step) for job in jobs]
    present = [one for one in kept if one is not None]
    return EvalOutcome(
        record,
        run.folder,
        loaded.step,
        [one for one in present if one.name in names],
        [one for one in present if one.name not in names],
        pending,
    )


def render(outcome: EvalOutcome) -> str:
    """What was added, for a person."""
    lines = [f"{outcome.record.name}, checkpoint of step {outcome.step:,}"]
    for title, additions in (("added", outcome.added), ("already there", outcome.already)):
        for one in additions:
            lines.append(f"  {title}: {one.name}  ({_size(one)})")
            width = max(map(len, one.values))
            lines += [f"    {name.ljust(width)}  {value:.6f}" for name, value in one.values.items()]
    lines.append(f"in {outcome.folder / 'run_config.json'}")
    return "\n".join(lines)


def addition(
    name: str,
    loaded: LoadedModel,
    source: str,
    sha256: str,
    values: Mapping[str, float | None],
    facts: dict[str, Any],
) -> Addition:
    """What the record keeps of one set or task, scored now."""
    model, code = loaded.model, code_facts()
    hardware = hardware_facts(model.head_weight.device)
    return Addition(
        name=name,
        step=loaded.step,
        tokens=loaded.tokens,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        source=source,
        sha256=sha256,
        checkpoint_sha256=loaded.sha256,
        values={key: value for key, value in values.items() if value is not None},
        facts=facts,
        ran={
            "package_sha256": code.package_sha256,
            "version": code.version,
            "compute_dtype": str(model.precision.compute).removeprefix("torch."),
            "matmul": model.precision.describe(model.head_weight.device),
            "device_type": hardware.device_type,
            "device_name": hardware.device_name,
            "torch": hardware.torch,
        },
        scores=scores_file(name, loaded.step),
    )


def _tracked(spec: RunSpec) -> RunSpec:
    """The spec with the address at which MLflow can be reached now: a recorded one lacks its
    credentials, so that of the environment goes first."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or spec.tracking.uri
    return spec.model_copy(update={"tracking": spec.tracking.model_copy(update={"uri": uri})})


def _ended(entry: RunEntry) -> RunRecord:
    if entry.record is None:
        raise UserError.at(str(entry.folder), f"this run has no readable record: {entry.fault}")
    if entry.status == "RUNNING":
        raise UserError.at(str(entry.folder), "this run is still going", None, "a run that ended")
    return entry.record


def _tokenizer(record: RunRecord, loaded: LoadedModel, store: Store) -> Tokenizer:
    """The tokenizer that the run's text was encoded with, by content."""
    wanted, spec = record.effective.tokenizer, loaded.spec.tokenizer
    name = spec.name or wanted.name
    if name is None or not isinstance(wanted.sha256, str):
        message = "text cannot be encoded as the run's was: its tokenizer is not known"
        raise UserError.at(f"{record.name}: effective.tokenizer", message, name)
    if wanted.sha256.startswith(BY_SHARDS):
        found = tokenizer_by_shards(loaded.spec, store.home, wanted.sha256)
        if isinstance(found, str):
            message = f"text cannot be encoded as the run's was: {found}"
            raise UserError.at(f"{record.name}: effective.tokenizer", message, name)
        return found
    tokenizer = load_tokenizer(name, spec.path, store.cache / "tiktoken")
    if tokenizer.content_sha256 != wanted.sha256:
        message = f"the tokenizer {name!r} is not the one the run was trained with"
        raise UserError.at(
            f"{record.name}: effective.tokenizer.sha256",
            message,
            tokenizer.content_sha256,
            wanted.sha256,
        )
    return tokenizer


def _set_job(run: OpenRun, training: Passages | str, store: Store, name: str, path: Path) -> Job:
    loaded, tokenizer, spec = run.loaded, run.tokenizer, run.loaded.spec
    field, unit = spec.data.text_field or "text", spec.data.text_unit or "auto"
    corpus = text_corpus(str(path), field, unit, f"--set {name}")
    encoded = encode_corpus(corpus, tokenizer, store.cache / "corpus")
    spans = every_document(encoded)
    asked = from_spans(set_name(name), encoded.tokens, spans, tokenizer.eod_id)
    judged = judged_for(training, asked, encoded.tokens, spans, tokenizer, spec, store)
    documents = judged.documents
    seq_len, stride = spec.training.seq_len, spec.evaluation.stride
    facts = facts_of(documents, seq_len, stride, _TEXT) | judged.facts

    def score() -> tuple[Addition, Write]:
        found = evaluate(loaded.model, documents, seq_len, loss_settings(spec), stride=stride)
        added = addition(
            documents.name, loaded, corpus.source, documents.sha256, found.values(), facts
        )
        return added, lambda file: write_scores([found], file)

    what = f"{len(documents.documents):,} documents, {documents.scored_tokens:,} tokens"
    return Job(documents.name, documents.sha256, what, score)


def _task_job(run: OpenRun, path: Path) -> Job:
    task = read_task(path)
    loaded, spec, tokenizer = run.loaded, run.loaded.spec, run.tokenizer

    def score() -> tuple[Addition, Write]:
        settings, window = loss_settings(spec), spec.training.seq_len
        found = score_task(loaded.model, task, tokenizer, window, settings)
        added = addition(
            found.name, loaded, path.name, task.sha256, found.values(), _task_facts(found, window)
        )
        return added, lambda file: write_items(found, file)

    return Job(f"downstream/{task.name}", task.sha256, f"{len(task.items):,} items", score)


def _task_facts(score: TaskScore, seq_len: int) -> dict[str, Any]:
    return {
        "items": len(score.items),
        "scored_tokens": sum(sum(one.tokens) for one in score.items),
        "bytes": sum(sum(one.bytes) for one in score.items),
        "context": f"starts with the end-of-document id; the last {seq_len} tokens",
        "merged": score.merged,
        "truncated": score.truncated,
    }


def _size(one: Addition) -> str:
    unit = "items" if "items" in one.facts else "documents"
    return f"{one.facts.get(unit, 0):,} {unit}, sha256 {one.sha256[:12]}"
