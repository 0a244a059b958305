"""What each kind of data set needs: its fields, their defaults, and what contradicts them.

It speaks for the sections `data`, `tokenizer` and `evaluation` of a run spec.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.errors import UNSET, Fault, did_you_mean

if TYPE_CHECKING:
    from workbench.spec.run import DataSpec, RunSpec

# Before a hash that stands for a tokenizer known only by the token shards that it wrote.
BY_SHARDS = "shards:"

# The fields of `data` that only some kinds of data set have.
_TEXT = ("text_file", "text_field", "text_unit")
_TOKENS = ("tokens_path", "eval_tokens_path", "tokens_format")
_STREAM = (
    "stream_path",
    "stream_name",
    "stream_config",
    "stream_revision",
    "stream_eval_documents",
)
_OVERLAP = ("overlap_ngram", "overlap_document_share", "overlap_limit")

FIELDS_OF: dict[str, tuple[str, ...]] = {
    "sample": ("held_out_ratio", "order", *_OVERLAP),
    "text": ("held_out_ratio", "order", *_TEXT, *_OVERLAP),
    "tokens": ("held_out_ratio", "order", *_TOKENS, *_OVERLAP),
    "fineweb": ("held_out_ratio", "text_field", *_STREAM, *_OVERLAP),
    "random": (),
}
# What further evaluation sets (`data.held_out`) are read with, whatever trains.
FIELDS_OF_HELD_OUT = ("text_field", "text_unit")

SPECIFIC = tuple(dict.fromkeys(name for names in FIELDS_OF.values() for name in names))

_DEFAULTS: dict[str, Any] = {
    "held_out_ratio": 0.05,
    "order": "shuffled",
    "text_field": "text",
    "text_unit": "auto",
    "tokens_format": "auto",
    "stream_eval_documents": 200,
    "overlap_ngram": 13,
    "overlap_document_share": 0.2,
    "overlap_limit": 0.01,
}
_HUB = {"stream_name": "HuggingFaceFW/fineweb-edu", "stream_config": "sample-10BT"}

_REVISION = "the full hash of a commit of the data set, 40 hexadecimal digits"


def set_name(name: str) -> str:
    """The name that the numbers of a further evaluation set are logged under.

    It keeps letters, digits, `_` and `-`; each stretch of anything else becomes one `-`.
    """
    return "held_out." + re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def fields_of(dataset: str, further_sets: bool) -> tuple[str, ...]:
    """The fields of `data` that apply to a kind of data set."""
    return FIELDS_OF[dataset] + (FIELDS_OF_HELD_OUT if further_sets else ())


def complete_data(given: dict[str, Any]) -> dict[str, Any]:
    """The data section with the defaults of its kind."""
    full = {key: value for key, value in given.items() if value is not None}
    dataset = full.get("dataset")
    if not isinstance(dataset, str) or dataset not in FIELDS_OF:
        return full
    if dataset == "tokens" and full.get("eval_tokens_path") is not None:
        full.setdefault("held_out_ratio", 0.0)  # a whole shard is held out already
    for name in fields_of(dataset, bool(full.get("held_out"))):
        if name in _DEFAULTS:
            full.setdefault(name, _DEFAULTS[name])
    if dataset == "fineweb" and "stream_path" not in full:
        full = _HUB | full
    return full


def complete_tokenizer(given: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer section: o200k_base, but what the shard says where the data are tokens, and
    none for random ids below a number."""
    full = {key: value for key, value in given.items() if value is not None}
    if data.get("dataset") != "tokens" and not (
        data.get("dataset") == "random" and "vocab_size" in full
    ):
        full.setdefault("name", "o200k_base")
    return full


def complete_evaluation(given: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """The evaluation section with every set there is, unless it names some."""
    full = {key: value for key, value in given.items() if value is not None}
    if "sets" not in full:
        full["sets"] = available_sets(data)
    return full


def available_sets(data: dict[str, Any]) -> list[str]:
    """The evaluation sets that a data section brings, by the names of their numbers."""
    full = complete_data(data)
    own = full.get("held_out_ratio") != 0 or full.get("eval_tokens_path") is not None
    further = full.get("held_out")
    names = [
        set_name(one["name"])
        for one in (further if isinstance(further, list) else [])
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    ]
    return ["train_split", *(["held_out"] if own else []), *names]


def data_faults(spec: RunSpec) -> list[Fault]:
    """What the sections `data`, `tokenizer` and `evaluation` cannot be together."""
    return [
        *_field_faults(spec.data),
        *_path_faults(spec.data),
        *_tokenizer_faults(spec),
        *_set_faults(spec),
    ]


def _field_faults(data: DataSpec) -> Iterator[Fault]:
    applying = fields_of(data.dataset, bool(data.held_out))
    for key in SPECIFIC:
        if key not in applying and (value := getattr(data, key)) is not None:
            message = f"does not apply to dataset {data.dataset!r}"
            yield Fault(f"data.{key}", message, value, UNSET)
    if data.dataset == "random" and data.held_out:
        message = "random ids stand for no text, so no text can be held out"
        yield Fault("data.held_out", message, [one.name for one in data.held_out], UNSET)
    seen: dict[str, str] = {}
    for number, one in enumerate(data.held_out):
        place = f"data.held_out[{number}].name"
        if not re.search(r"[A-Za-z0-9]", one.name):
            yield Fault(
                place, "holds no letter from a to z and no digit", one.name, "a name such as wiki"
            )
        elif one.set_name in seen:
            message = f"is logged as {one.set_name}, as {seen[one.set_name]!r} is"
            yield Fault(place, message, one.name, "names that differ in letters or digits")
        seen.setdefault(one.set_name, one.name)


def _path_faults(data: DataSpec) -> Iterator[Fault]:
    if data.dataset == "text" and data.text_file is None:
        allowed = "a file, folder or glob of .txt, .jsonl or .parquet"
        yield Fault("data.text_file", "dataset 'text' needs it", None, allowed)
    if data.dataset == "tokens" and data.tokens_path is None:
        allowed = "a token shard: its folder or its .bin file"
        yield Fault("data.tokens_path", "dataset 'tokens' needs it", None, allowed)
    if data.eval_tokens_path is not None and data.held_out_ratio:
        message = "a whole shard is held out already: data.eval_tokens_path"
        yield Fault("data.held_out_ratio", message, data.held_out_ratio, "0 or null")
    if data.dataset != "fineweb":
        return
    hub = ("stream_name", "stream_config", "stream_revision")
    if data.stream_path is not None:
        for key in hub:
            if (value := getattr(data, key)) is not None:
                message = "does not apply to a local folder: data.stream_path"
                yield Fault(f"data.{key}", message, value, UNSET)
    elif data.stream_revision is None:
        message = "a stream from the hub is pinned, since what it brings may change"
        yield Fault("data.stream_revision", message, None, _REVISION)
    elif not re.fullmatch(r"[0-9a-f]{40}", data.stream_revision):
        message = "is no full hash of a commit: branches and tags move"
        yield Fault("data.stream_revision", message, data.stream_revision, _REVISION)


def _tokenizer_faults(spec: RunSpec) -> Iterator[Fault]:
    tokenizer, is_tokens = spec.tokenizer, spec.data.dataset == "tokens"
    if tokenizer.name == "file" and tokenizer.path is None:
        allowed = "a .tiktoken rank file"
        yield Fault("tokenizer.path", "tokenizer 'file' needs it", None, allowed)
    if tokenizer.name != "file" and tokenizer.path is not None:
        message = f"only tokenizer 'file' reads a path, not {tokenizer.name!r}"
        yield Fault("tokenizer.path", message, tokenizer.path, UNSET)
    is_number = spec.data.dataset == "random" and tokenizer.name is None
    if tokenizer.vocab_size is not None and not is_tokens and not is_number:
        message = f"the tokenizer {tokenizer.name!r} knows it"
        yield Fault("tokenizer.vocab_size", message, tokenizer.vocab_size, UNSET)


def _set_faults(spec: RunSpec) -> Iterator[Fault]:
    sets, data = spec.evaluation.sets, spec.data
    if len(set(sets)) != len(sets):
        yield Fault("evaluation.sets", "a set is named twice", sets, "each set once")
    available = available_sets(data.model_dump())
    for name in sets:
        if name == "held_out" and name not in available:
            message = "held_out_ratio 0 leaves no documents to hold out"
            yield Fault("evaluation.sets", message, sets, f"[{', '.join(available)}]")
        elif name not in available:
            hint = did_you_mean(name, available)
            message = f"there is no evaluation set {name!r}.{hint}"
            yield Fault("evaluation.sets", message, sets, f"[{', '.join(available)}]")
    stride, seq_len = spec.evaluation.stride, spec.training.seq_len
    if stride is not None and stride > seq_len:
        message = "a longer stride would leave tokens out"
        yield Fault("evaluation.stride", message, stride, f"null or 1 to {seq_len}")
