"""An imported run before it stands in the store: what is known of it, and how it is written.

Every importer fills a `Draft`; `keep` turns it into a run folder, whole or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.compare.facts import all_leaves, facts_of_record, known_at, set_of
from workbench.compare.imported import imported_faults
from workbench.errors import UserError, storing
from workbench.spec.checklist import tag_of
from workbench.spec.run import document_hash
from workbench.track.imported import Correction, Imported, Importer
from workbench.track.journal import Journal
from workbench.track.record import Effective, Point, RunRecord, Status, write_record
from workbench.track.store import METRICS, Store

ORIGINALS = "original"  # the folder of a run that holds what it was imported from


@dataclass
class Draft:
    """What is known of a run of another program.

    `spec` holds the known settings by section; a setting that does not apply is None there, one
    that is not known is left out. `rows` are the metrics, each with `step` and `tokens`, in the
    order of the steps; `evaluated` the steps at which an evaluation set was measured. `identity` is
    what tells the run from all others where it comes from; without it, its content does.
    """

    name: str
    importer: Importer
    source: str
    identity: str | None = None
    status: Status = "UNKNOWN"
    started: str | None = None
    ended: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    effective: dict[str, Any] = field(default_factory=dict)
    params: int | None = None
    world_size: int | None = None
    tokens_per_step: int | None = None
    total_tokens: int | None = None
    rows: list[dict[str, float | int | None]] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    final: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    model_config: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    git_commit: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    originals: dict[str, bytes] = field(default_factory=dict)
    corrections: list[Correction] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def setting(self, path: str, value: Any) -> None:
        """Records a known setting by its dotted path."""
        _put(self.spec, path, value)

    def fact(self, path: str, value: Any) -> None:
        """Records a known effective fact by its path below `effective`."""
        _put(self.effective, path, value)

    def correct(self, leaf: str, recorded: Any, here: Any, why: str) -> None:
        """Notes that a claim of the source does not hold."""
        self.corrections.append(Correction(leaf=leaf, recorded=recorded, here=here, why=why))


@dataclass(frozen=True)
class Fidelity:
    """How much of what the checklist judges is known of an imported run."""

    known: int
    missing: tuple[str, ...]
    corrected: tuple[str, ...]


@dataclass(frozen=True)
class ImportedRun:
    """A run that now stands in the store."""

    record: RunRecord
    folder: Path
    fidelity: Fidelity

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        assert self.record.imported is not None
        return {
            "run": self.record.name,
            "id": self.record.id,
            "status": self.record.status,
            "folder": str(self.folder),
            "known": self.fidelity.known,
            "missing": list(self.fidelity.missing),
            "corrections": [one.model_dump() for one in self.record.imported.corrections],
            "notes": self.record.imported.notes,
        }


def keep(draft: Draft, store: Store) -> ImportedRun:
    """Writes an imported run into the store, whole or not at all.

    Raises:
        UserError: a run of this name exists, or what was imported contradicts itself.
        StoreError: the store cannot be written.
    """
    final = require_free(draft.name, store)
    temporary = store.home / f".import-{uuid.uuid4().hex[:12]}"
    with storing(store.home):
        store.runs.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    try:
        files = _write_originals(draft, temporary)
        _write_metrics(draft.rows, temporary / METRICS)
        files[METRICS] = _sha256(temporary / METRICS)
        record = _record(draft, files)
        if faults := list(imported_faults(record)):
            raise UserError(*faults)
        facts_of_record(record, None)  # every leaf has a rule
        write_record(record, temporary)
        try:
            temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
            raise UserError.at("name", "a run of this name exists", draft.name) from None
    except OSError as error:
        with storing(final):
            raise error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ImportedRun(record, final, fidelity(record))


def require_free(name: str, store: Store) -> Path:
    """The folder that a run of this name may have.

    Raises:
        UserError: it is no name, or a run has it.
    """
    final = store.path_of(name)
    if final.exists():  # says whose it is; an abandoned folder is cleared away
        store.discard_run(store.create_run(name))
    return final


def fidelity(record: RunRecord) -> Fidelity:
    """Which of the judged leaves an imported run knows at its last evaluation point."""
    facts = facts_of_record(record, record.points[-1] if record.points else None)
    judged = [leaf for leaf in all_leaves(facts, facts) if tag_of(leaf).kind == "judged"]
    missing = tuple(leaf for leaf in judged if not known_at(facts, leaf))
    corrections = record.imported.corrections if record.imported else []
    corrected = tuple(dict.fromkeys(one.leaf for one in corrections))
    return Fidelity(len(judged) - len(missing), missing, corrected)


def render(run: ImportedRun) -> str:
    """What was imported, what is missing, what was corrected and why."""
    record, found = run.record, run.fidelity
    assert record.imported is not None
    total = found.known + len(found.missing)
    lines = [
        f"{record.name}: imported from {record.imported.source}",
        f"  status     {record.status.lower()}",
        f"  points     {len(record.points)} evaluations, {len(record.results.final)} final numbers",
        f"  known      {found.known} of the {total} facts that the checklist judges",
        f"  missing    {_by_section(found.missing)}",
    ]
    for one in record.imported.corrections:
        lines.append(f"  corrected  {one.leaf}: {_shown(one.recorded)} -> {_shown(one.here)}")
        lines.append(f"             {one.why}")
    lines += [f"  note       {note}" for note in record.imported.notes]
    return "\n".join([*lines, f"  files      {run.folder}"])


def _record(draft: Draft, files: Mapping[str, str]) -> RunRecord:
    rows = {int(row["step"] or 0): row for row in draft.rows}
    points = [
        Point(step=step, tokens=int(tokens), order_digest=None, lr_trace=None)
        for step in draft.evaluated
        if (tokens := rows[step].get("tokens")) is not None
    ]
    reached = [row["tokens"] for row in draft.rows if row.get("tokens") is not None]
    told_by = draft.identity or repr(sorted(files.items()))
    identity = hashlib.sha256(told_by.encode()).hexdigest()
    return RunRecord.model_validate(
        {
            # Of where it comes from, so that the same run imported twice is the same run.
            "id": identity[:32],
            "name": draft.name,
            "status": draft.status,
            "started": draft.started,
            "ended": draft.ended,
            "spec": {"name": draft.name, **draft.spec},
            "spec_sha256": document_hash({"name": draft.name, **draft.spec}),
            "effective": Effective.model_validate(draft.effective),
            "points": points,
            "results": {
                "tokens": int(reached[-1] or 0) if reached else None,
                "tokens_per_s": draft.tokens_per_s,
                "peak_memory_bytes": draft.peak_memory_bytes,
                "final": draft.final,
            },
            "provenance": draft.provenance,
            "git_commit": draft.git_commit,
            "params": draft.params,
            "world_size": draft.world_size,
            "tokens_per_step": draft.tokens_per_step,
            "total_tokens": draft.total_tokens,
            "backend": draft.backend,
            "model_config_": draft.model_config,
            "imported": Imported(
                importer=draft.importer,
                source=draft.source,
                when=datetime.now(UTC).isoformat(timespec="seconds"),
                files=dict(files),
                corrections=draft.corrections,
                notes=draft.notes,
            ),
        }
    )


def _write_originals(draft: Draft, folder: Path) -> dict[str, str]:
    files = {}
    if draft.originals:
        (folder / ORIGINALS).mkdir()
    for name, content in draft.originals.items():
        (folder / ORIGINALS / name).write_bytes(content)
        files[f"{ORIGINALS}/{name}"] = hashlib.sha256(content).hexdigest()
    return files


def _write_metrics(rows: Sequence[Mapping[str, float | int | None]], path: Path) -> None:
    names = dict.fromkeys(["step", "tokens", *(name for row in rows for name in row)])
    journal = Journal(path, list(names))
    try:
        for row in rows:
            journal.write({**row, "step": int(row["step"] or 0)})
        journal.sync()
    finally:
        journal.close()


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, leaf = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[leaf] = value


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _by_section(leaves: Iterable[str]) -> str:
    """Such as "optimizer: eps; effective.data: split, order_digest"."""
    sections: dict[str, list[str]] = {}
    for leaf in leaves:
        name = set_of(leaf)
        section = f"effective.evaluation.{name}" if name else leaf.rpartition(".")[0]
        sections.setdefault(section, []).append(leaf.rpartition(".")[2])
    said = [
        f"{name}: {', '.join(found)}" if name else ", ".join(found)
        for name, found in sections.items()
    ]
    return "; ".join(said) or "nothing"


def _shown(value: Any) -> str:
    return "not known" if value is None else str(value)
