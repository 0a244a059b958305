"""What a run looks like in MLflow: the names, parameters, tags and datasets of a run record.

Pure translation; nothing here needs MLflow. Keys that MLflow would refuse are written so that the
original can be read back from them, and values beyond its limits end in a mark with their hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import yaml

from workbench.spec.datasets import set_name
from workbench.spec.held_out import logged_name
from workbench.track.journal import TWINS, Row
from workbench.track.provenance import redact
from workbench.track.record import Resumption, RunRecord

# MLflow 3's limits, in characters.
KEY_LIMIT = 250
PARAM_LIMITS = (6000, 500, 250)  # of this version, of earlier ones, and of the first
PARAM_LIMIT = PARAM_LIMITS[0]
TAG_LIMIT = 8000
_DIGEST_LIMIT = 36

RUN_ID_TAG = "workbench.run_id"
STATUS_TAG = "workbench.status"
NAMES_TAG = "workbench.renamed"
SPEC_FILE = "spec.yaml"

# The columns of MLflow's table of runs, where it is opened with `viewStateShareKey=VIEW`: by itself
# it shows none of what a run came to.
VIEW = "workbench"
_COLUMNS = (
    "metrics.`held_out/nll`",
    "metrics.`train_split/nll`",
    "params.`seed`",
    "attributes.`Dataset`",
)

# MLflow 3.17 opens an experiment in its view for language-model applications unless told.
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{VIEW}": json.dumps({"selectedColumns": _COLUMNS}),
}
EXPERIMENT_NAME_TAG = "workbench.experiment"  # where the name had to be written otherwise

# A row's tokens are the metric by which a server is asked what it has.
ANCHOR = "tokens"
_NOT_METRICS = {"step", "unix_time", *TWINS}

# What MLflow refuses, and an underscore that would read as the beginning of an escape.
_REFUSED = r"[^A-Za-z0-9_./ -]"
_ODD = re.compile(rf"{_REFUSED}|_(?=u(?:[0-9a-f_]|{_REFUSED}))")
# Of the leaves of a record, those that are no tags: on a run's page they would bury the others.
_BULK = re.compile(
    r"effective\.data\.counts\.|effective\.evaluation\..*\.(overlap|overlap_rule|passed|context)\b"
    r"|provenance\.(cpu|gpus)\b|effective\.hardware\.libraries\."
)
_ESCAPE = re.compile(r"_u((?:[0-9a-f]{2,6})?)_")


@dataclass(frozen=True)
class AddedFields:
    """Metrics that were added after the run, by their keys; `mark` tells one addition from all."""

    mark: str
    step: int
    moment: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class DatasetFields:
    """One dataset input: its name, content hash, and what it is used for."""

    name: str
    digest: str
    source: str
    profile: str
    context: str


def safe_key(name: str) -> str:
    """A key that MLflow accepts everywhere; `original_key` gives the name back.

    A character it refuses becomes `_u<hex>_`, and so does the dot or slash that would make the key
    a path of another form. Only what is longer than MLflow's limit cannot be read back: it is cut,
    and ends in its hash.
    """
    parts = _ODD.sub(lambda match: _escape(match.group()), name).split("/")
    for index, part in enumerate(parts):
        if part == "." or part.startswith(".."):
            parts[index] = _escape(".") + part[1:]
        elif not part:
            parts[index] = "_u_"  # an escape of nothing: an empty part is not a path
    return _cut("/".join(parts), name)


def safe_experiment(name: str) -> str:
    """The name of an experiment as any server takes it; `original_key` gives it back.

    What is not printable becomes `_u<hex>_`, as blanks at the ends do, which a database may drop.
    """

    def is_odd(at: int) -> bool:
        blank = name[at].isspace() and at in (0, len(name) - 1)
        return blank or not name[at].isprintable()

    def reads_as_escape(at: int) -> bool:
        if not name.startswith("_u", at) or at + 2 == len(name):
            return False
        return name[at + 2] in "0123456789abcdef_" or is_odd(at + 2)

    key = "".join(
        _escape(letter) if is_odd(at) or reads_as_escape(at) else letter
        for at, letter in enumerate(name)
    )
    return _cut(key, name)


def experiment_tags(name: str) -> dict[str, str]:
    """The tags of the experiment of this name."""
    is_renamed = safe_experiment(name) != name
    return EXPERIMENT_TAGS | ({EXPERIMENT_NAME_TAG: name} if is_renamed else {})


def _cut(key: str, name: str) -> str:
    if len(key) <= KEY_LIMIT:
        return key
    mark = "..." + _sha(name)[:16]
    return key[: KEY_LIMIT - len(mark)] + mark


def original_key(key: str) -> str:
    """The name that `safe_key` or `safe_experiment` made this key of."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else "", key)


def renamed(names: list[str]) -> dict[str, str]:
    """Those names that had to be written otherwise: key -> name."""
    return {safe_key(name): name for name in names if safe_key(name) != name}


def renamed_sets(record: RunRecord) -> dict[str, str]:
    """Evaluation sets that are logged under another name than the one given: logged -> given."""
    data = record.spec.get("data")
    given = data.get("held_out") if isinstance(data, dict) else None
    found = {}
    for one in given if isinstance(given, list) else ():
        name = one.get("name") if isinstance(one, dict) else None
        if isinstance(name, str) and (asked := set_name(name)) != f"held_out.{name}":
            facts = record.effective.evaluation.get(asked)
            found[logged_name(asked, facts.status if facts else None)] = name
    return found


def metrics_of(row: Row) -> dict[str, float]:
    """The measured numbers of a row, by their names. Columns that only repeat one are left out."""
    return {
        safe_key(name): value
        for name, value in row.items()
        if value is not None and name not in _NOT_METRICS
    }


def params_of(record: RunRecord, limit: int = PARAM_LIMIT) -> dict[str, str]:
    """Every leaf of the resolved spec: dotted path -> value as text of at most `limit` characters.

    What is cut says so, and is whole in the artifact `SPEC_FILE`.
    """
    params = {}
    for path, value in leaves(record.spec).items():
        params[safe_key(path)] = _limited(redact(text_of(value)), limit, SPEC_FILE)
    return params


def tags_of(record: RunRecord, status: str, odd_names: Mapping[str, str]) -> dict[str, str]:
    """Who the run is, the user's tags, those that MLflow itself knows, and the effective facts.

    They come in this order, in which MLflow shows them. Counts of what was read and of overlaps,
    and details of the machine, stand in the record among the artifacts alone.
    """
    tracking = record.spec.get("tracking")
    given = tracking.get("tags") if isinstance(tracking, dict) else None
    theirs = given if isinstance(given, dict) else {}
    own = {
        STATUS_TAG: status,
        RUN_ID_TAG: record.id,
        "workbench.spec_sha256": record.spec_sha256,
        "mlflow.runName": record.name,
        "mlflow.source.name": "workbench",
        "mlflow.source.type": "LOCAL",
    }
    optional = {
        "mlflow.source.git.commit": record.git_commit,
        "mlflow.user": record.provenance.get("user"),
        "workbench.error": record.error,
        "workbench.resumes": "; ".join(map(_resume_words, record.resumes)),
        NAMES_TAG: json.dumps(odd_names, sort_keys=True) if odd_names else None,
    }
    own |= {key: str(value) for key, value in optional.items() if value}
    facts = {}
    effective = record.effective.model_dump(mode="json")
    for section, found in (("effective", effective), ("provenance", record.provenance)):
        for path, value in leaves(found).items():
            key = f"{section}.{path}"
            if value is not None and not _BULK.match(key):
                facts[key] = text_of(value)
    # The order is that of the first time a key stands, the value that of the last.
    return tag_values(own | {str(key): str(value) for key, value in theirs.items()} | facts | own)


def tag_values(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as MLflow takes them, without credentials."""
    return {
        safe_key(key): _limited(redact(value), TAG_LIMIT, "run_config.json")
        for key, value in tags.items()
    }


def _resume_words(resume: Resumption) -> str:
    """Such as "from step 40; to step 47 as logged before": those rows were sent already, and their
    speeds are the ones first measured."""
    text = f"from step {resume.step}"
    if resume.replayed_to is not None:
        text += f" (steps to {resume.replayed_to} were logged before)"
    return text


def datasets_of(record: RunRecord) -> list[DatasetFields]:
    """The training text and the evaluation sets whose content hash is known."""
    data = record.effective.data
    source = redact(data.source or str(record.spec.get("data", {}).get("dataset", "unknown")))
    found = []
    if isinstance(data.train_sha256, str):
        counts = {
            "documents": data.train_documents,
            "tokens": data.train_tokens,
            "bytes": data.train_bytes,
            "sha256": data.train_sha256,
        }
        found.append(_dataset("train", data.train_sha256, source, counts, "training"))
    for asked, facts in record.effective.evaluation.items():
        name = logged_name(asked, facts.status)
        if isinstance(facts.sha256, str):
            counts = {
                "documents": facts.documents,
                "tokens": facts.scored_tokens,
                "bytes": facts.bytes,
                "sha256": facts.sha256,
            }
            found.append(_dataset(name, facts.sha256, source, counts, "evaluation"))
    for added in record.results.additions:
        counts = {key: added.facts.get(key) for key in ("documents", "items", "bytes")}
        counts |= {"tokens": added.facts.get("scored_tokens"), "sha256": added.sha256}
        where = redact(added.source)
        found.append(_dataset(added.name, added.sha256, where, counts, "evaluation"))
    return found


def additions_of(record: RunRecord) -> list[AddedFields]:
    """The numbers that were added after the run."""
    return [
        AddedFields(
            f"{added.name}:{added.step}:{added.sha256}",
            added.step,
            milliseconds(added.when) or 0,
            {safe_key(name): value for name, value in added.values.items()},
        )
        for added in record.results.additions
    ]


def added_names(record: RunRecord) -> list[str]:
    """The names of the numbers that were added after the run."""
    return [name for added in record.results.additions for name in added.values]


def spec_yaml(record: RunRecord) -> str:
    """The resolved spec as the file that would ask for the same run."""
    return redact(yaml.safe_dump(record.spec, sort_keys=False, allow_unicode=True))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value. A fact that does not apply is a leaf; an empty mapping has none."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and set(value) != {"not_applicable"}:
            found |= leaves(value, path + ".")
        else:
            found[path] = value
    return found


def text_of(value: Any) -> str:
    """Text as it is, anything else as JSON; a fact that does not apply says why."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and set(value) == {"not_applicable"}:
        return f"not applicable: {value['not_applicable']}"
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def milliseconds(moment: str | None) -> int | None:
    """An ISO 8601 time as milliseconds since 1970; None where it is not one."""
    try:
        return round(datetime.fromisoformat(moment or "").timestamp() * 1000)
    except ValueError:
        return None


def row_milliseconds(row: Row, record: RunRecord) -> int:
    """When a row was written. A row sent twice has the same time twice, and adds nothing."""
    written = row.get("unix_time")
    if written is not None:
        return round(written * 1000)
    return (milliseconds(record.started) or 0) + int(row["step"] or 0)


def _dataset(
    name: str, sha256: str, source: str, counts: Mapping[str, Any], context: str
) -> DatasetFields:
    # MLflow shows the profile, and of a source only its type.
    known: dict[str, int | str] = {"source": source}
    known |= {key: value for key, value in counts.items() if isinstance(value, int | str)}
    where = json.dumps({"description": source})
    return DatasetFields(safe_key(name), sha256[:_DIGEST_LIMIT], where, json.dumps(known), context)


def _limited(text: str, limit: int, whole: str) -> str:
    if len(text) <= limit:
        return text
    mark = f"... [cut from {len(text)} characters, sha256 {_sha(text)[:16]}; whole in {whole}]"
    return text[: limit - len(mark)] + mark


def _escape(character: str) -> str:
    return f"_u{ord(character):02x}_"


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
