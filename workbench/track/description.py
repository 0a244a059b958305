"""The description of a run on its page in MLflow: what came of it, what it was, who compared it.

MLflow shows it as Markdown, so that whatever comes from a spec, a record or a note is escaped.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from workbench.spec.held_out import is_smoke_test
from workbench.track.comparisons import NOTES, ComparisonNote
from workbench.track.record import RunRecord

NOTE_TAG = "mlflow.note.content"
OWN_NOTE_TAG = "workbench.note_sha256"  # by which a note that a person wrote is told from ours
_LONGEST = 600


def description(record: RunRecord, status: str, compared: Mapping[str, ComparisonNote]) -> str:
    """The run in a few lines of Markdown.

    Args:
        status: how the run stands now.
        compared: name of a report -> what the run noted of that comparison.
    """
    lines = [_outcome(record, status), _model(record)]
    if record.study is not None:
        study, arm = map(escaped, record.study)
        lines.append(f"Study {study}, arm {arm}.")
    if compared:
        lines.append("Compared:")
        lines.append("\n".join(_comparison(name, one) for name, one in compared.items()))
    if notes := record.spec.get("notes"):
        lines.append(escaped(str(notes)))
    return "\n\n".join(filter(None, lines))


def escaped(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    one_line = " ".join(text.split())
    if len(one_line) > _LONGEST:
        one_line = one_line[: _LONGEST - 1] + "…"
    one_line = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    marked = re.sub(r"([\\`*\[\]|#~$!])", r"\\\1", one_line)
    marked = re.sub(r"^([-+=]|\d+(?=[.)]))", r"\\\1" if marked[:1] in "-+=" else "\\1\\\\", marked)
    # Underscores inside a word are no emphasis; addresses would become links.
    marked = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", marked)
    return re.sub(r":(?=//)", r"\\:", re.sub(r"\bwww\.", r"www\\.", marked))


def with_digest(note: str) -> dict[str, str]:
    """The tags of a description that is ours."""
    return {
        NOTE_TAG: note,
        OWN_NOTE_TAG: hashlib.sha256(note.encode(errors="surrogatepass")).hexdigest(),
    }


def is_ours(tags: Mapping[str, str]) -> bool:
    """Whether a run's description, as MLflow has it, may be replaced: nobody has edited it."""
    note = tags.get(NOTE_TAG)
    return not note or with_digest(note)[OWN_NOTE_TAG] == tags.get(OWN_NOTE_TAG)


def _outcome(record: RunRecord, status: str) -> str:
    final = record.results.final
    names = [name for name in final if name.endswith("/nll") and name != "train/nll"]
    names.sort(key=lambda name: (not name.startswith("held_out"), name))
    numbers = [f"{escaped(name)} {final[name]:.4f}" for name in names]
    said = ""
    if is_smoke_test(record.spec):
        said = "Random ids, a smoke test: no number of this run is a result."
    elif numbers:
        at = f" at {record.points[-1].tokens:,} tokens" if record.points else ""
        said = f"**{numbers[0]}**{''.join(f', {one}' for one in numbers[1:])} nats/token{at}."
    if status not in ("RUNNING", "FINISHED"):
        why = f": {escaped(record.error)}" if record.error else ""
        said = " ".join(filter(None, (f"**{status}**{why}.", said)))
    return said


def _model(record: RunRecord) -> str:
    model: dict[str, Any] = record.spec.get("model", {})
    kind = [model.get(name) for name in ("attention_type", "mlp_type")]
    parts = [str(one).replace("_", "-") for one in kind if one is not None]
    layers, hidden = model.get("num_hidden_layers"), model.get("hidden_size")
    if layers is not None and hidden is not None:
        parts.append(f"{layers} layers x {hidden}")
    sizes = record.effective.parameters
    if sizes.total is not None:
        parts.append(f"{sizes.total:,} parameters")
    if sizes.active is not None and sizes.active != sizes.total:
        parts.append(f"{sizes.active:,} active per token")
    if record.effective.precision.compute_dtype is not None:
        parts.append(record.effective.precision.compute_dtype)
    if record.spec.get("seed") is not None:
        parts.append(f"seed {record.spec['seed']}")
    return escaped(", ".join(parts)) + "." if parts else ""


def _comparison(name: str, note: ComparisonNote) -> str:
    return f"- {escaped(note.words)}; report: `{NOTES}/{name.replace('`', '')}/report.html`"
