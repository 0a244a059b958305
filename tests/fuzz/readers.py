"""Every reader of files that the fuzz tests damage: what it reads, and what it must notice.

A reader gets a folder with the files as they were written, one of them damaged. It returns what it
has read, or raises a UserError; nothing else, and within bounds of time and memory. What it returns
for a file whose content is hashed must be what was written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compare.fake_runs import full_record, full_spec, write_run
from damage import Source, damaged
from parquet_streams import made_up, write_files
from tiny_runs import tiny_parts, write_corpus

from workbench.compare import compare_runs
from workbench.core.checkpoint import save_checkpoint
from workbench.core.data import prepared_folder
from workbench.core.data.corpus import text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.inspection import inspect
from workbench.core.data.rank_files import read_rank_file
from workbench.core.data.retry import Patience
from workbench.core.data.shards import ShardWriter, TokenShard, open_shard
from workbench.core.data.stream_files import folder_source
from workbench.core.data.stream_rows import RowReader
from workbench.core.data.tokenizer import load_tokenizer
from workbench.core.restore import newest_checkpoint, open_checkpoint, restore
from workbench.core.train import train
from workbench.errors import UserError
from workbench.importing.csv_runs import read_csv
from workbench.spec.load import load_spec
from workbench.spec.run import spec_hash
from workbench.track.additions import find_addition
from workbench.track.journal import Journal, Tail, columns, read_metrics
from workbench.track.mlflow_fields import datasets_of, params_of, spec_yaml, tags_of
from workbench.track.mlflow_store import read_position
from workbench.track.record import document_of, read_record, strict
from workbench.track.rewind import rewind
from workbench.track.store import Store
from workbench.views import run_page, run_rows, run_table

MOST_SECONDS = 20
MOST_BYTES = 1 << 30  # of memory, beyond what the process has already


@dataclass(frozen=True)
class Reader:
    """`make` writes the files of a folder; `targets` are the patterns of those to be damaged.

    `hashed`: patterns of files whose content a hash protects, so that no change may pass; of the
    others `read` returns nothing that the file alone decides.
    """

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    targets: tuple[str, ...]
    hashed: tuple[str, ...] = ()
    after: Callable[[Path], None] = lambda folder: None  # done to the damaged files
    short: int = 20  # inputs in the default tests: fewer where each takes long


class Case:
    """The files of a reader, written once, and damaged in turn."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader, self.folder = reader, folder / "files"
        self.folder.mkdir(parents=True)
        reader.make(self.folder)
        self.names = _matching(self.folder, reader.targets)
        self._hashed = set(_matching(self.folder, reader.hashed))
        assert self.names
        self._whole = self._files()
        self.right = reader.read(self.folder)
        self._renew()

    def try_one(self, draw: Source) -> str:
        """Damages one file and reads: "refused", "noticed nothing" or "the same".

        Raises:
            AssertionError: a change that a hash protects against was read as if it were right.
            Exception: whatever else than a UserError the reader raises.
        """
        name = draw.choice(self.names)
        (self.folder / name).write_bytes(damaged(name, self._whole[name][0], draw))
        refusal: UserError | None = None
        try:
            self.reader.after(self.folder)
            with bounded():
                found = self.reader.read(self.folder)
        except UserError as error:
            refusal = error
        finally:
            self._renew()
        if refusal is not None:
            assert str(refusal).encode("utf-8", "surrogateescape")
            assert all(fault.place and fault.message for fault in refusal.faults)
            return "refused"
        if found == self.right:
            return "the same"
        assert name not in self._hashed, f"{name}: a change was read as if it were right"
        return "noticed nothing"

    def _files(self) -> dict[str, tuple[bytes, int]]:
        """Content and time of every file. They stay the same files: caches know them by inode."""
        return {
            str(path.relative_to(self.folder)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    def _renew(self) -> None:
        for name, (content, _) in self._files().items():
            if name not in self._whole:
                (self.folder / name).unlink()
            elif content != self._whole[name][0]:
                self._write(name)
        for name in self._whole.keys() - self._files().keys():
            self._write(name)

    def _write(self, name: str) -> None:
        content, mtime_ns = self._whole[name]
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(content)
        os.utime(self.folder / name, ns=(mtime_ns, mtime_ns))


@contextmanager
def bounded() -> Iterator[None]:
    """No more than some seconds and some memory beyond what is in use."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, before[1]))
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def _too_long(number: int, frame: object) -> None:
    raise AssertionError(f"no answer within {MOST_SECONDS} s")


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(folder)) for path in found)


def digest(*arrays: Any) -> str:
    """A hash over the content of arrays."""
    one = hashlib.sha256()
    for array in arrays:
        one.update(np.ascontiguousarray(array).tobytes())
    return one.hexdigest()


# -- spec files

SPEC = """\
# a spec
extends: [base.yaml]
name: fuzzed
seed: 7
notes: "a note"
data:
  dataset: text
  text_file: corpus/*.txt
  text_unit: blank_line
  held_out:
    - {name: wiki, path: more/}
model:
  profile: 100m
  attention_type: gqa
training: {steps: 5_000, batch_size: 4}
optimizer:
  lr: 1e-4
  betas: [0.9, 0.95]
tracking:
  tags: {team: a, "odd key": "b: c"}
"""


def make_spec(folder: Path) -> None:
    (folder / "run.yaml").write_text(SPEC)
    (folder / "base.yaml").write_text("model: {top_k: 1}\nevaluation: {sets: [held_out]}\n")


def read_spec(folder: Path) -> str:
    spec = load_spec(folder / "run.yaml")
    json.dumps(spec.model_dump(mode="json"), allow_nan=False)
    return spec_hash(spec)


# -- runs of other trainers

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def make_table(folder: Path) -> None:
    for name in ("nanogpt.csv", "nanogpt.map.yaml"):
        shutil.copyfile(EXAMPLES / name, folder / name)


def read_table(folder: Path) -> None:
    read_csv(folder / "nanogpt.csv", folder / "nanogpt.map.yaml")


# -- token shards


def make_shard(folder: Path) -> None:
    with ShardWriter(folder / "s", tokenizer="toy", vocab_size=300, eod_id=299) as writer:
        for text in made_up(6):
            raw = text.encode()
            writer.append(np.frombuffer(raw, np.uint8), len(raw), hashlib.sha256(raw).digest())
        writer.finish({"skipped": 1})


def _content(shard: TokenShard) -> Any:
    ids = [shard.tokens[start : start + 50] for start in range(0, len(shard.tokens), 50)]
    if shard.documents is not None:
        for row in shard.documents:
            assert 0 <= row["start"] <= row["end"] <= len(shard.tokens)
    return shard.sha256, digest(*ids)


def read_own(folder: Path) -> Any:
    shard = open_shard(folder / "s")
    documents = shard.documents
    return *_content(shard), None if documents is None else documents.tobytes()


def read_remembered(folder: Path) -> Any:
    """With the outcome of the check kept in a folder that somebody else writes to."""
    return _content(open_shard(folder / "s", memory=folder / "memory"))


def make_remembered(folder: Path) -> None:
    make_shard(folder)
    _age(folder / "s/tokens.bin")
    open_shard(folder / "s", memory=folder / "memory")


def _age(path: Path) -> None:
    """As if it had been written long ago."""
    os.utime(path, ns=(1_700_000_000 * 10**9, 1_700_000_000 * 10**9))
    time.sleep(0.12)  # the time of change of its inode cannot be set


def make_llmc(folder: Path) -> None:
    ids = np.arange(200, dtype="<u2")
    head = struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253)
    (folder / "a.bin").write_bytes(head + ids.tobytes())


def make_nanogpt(folder: Path) -> None:
    (folder / "a.bin").write_bytes(np.arange(200, dtype="<u2").tobytes())


def make_megatron(folder: Path) -> None:
    lengths = [3, 50, 7, 40]
    offsets = [2 * sum(lengths[:n]) for n in range(4)]
    (folder / "a.bin").write_bytes(np.arange(100, dtype="<u2").tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 3)
    index += struct.pack("<4i4q3q", *lengths, *offsets, 0, 2, 4)
    (folder / "a.idx").write_bytes(index)


def reads(name: str, format: str = "auto") -> Callable[[Path], Any]:
    """The reader of one foreign file; nothing in it is hashed."""

    def read(folder: Path) -> Any:
        _content(open_shard(folder / name, format, vocab_size=65_536, tokenizer="gpt2"))

    return read


def rehash_shard(folder: Path) -> None:
    """Makes the hashes of the own shard fit again, as far as there is an index that has them."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        index = json.loads((folder / "s/tokens.idx.json").read_bytes())
        index["sha256"] = hashlib.sha256((folder / "s/tokens.bin").read_bytes()).hexdigest()
        (folder / "s/tokens.idx.json").write_text(json.dumps(index))
        rows = json.loads((folder / "s/tokens.docs.json").read_bytes())
        rows["sha256"] = hashlib.sha256((folder / "s/tokens.docs.npy").read_bytes()).hexdigest()
        rows["bin_sha256"] = index["sha256"]
        (folder / "s/tokens.docs.json").write_text(json.dumps(rows))


def read_rehashed(folder: Path) -> None:
    """Nothing is expected of the content but that it holds together."""
    shard = open_shard(folder / "s")
    _content(shard)
    assert {shard.tokenizer_sha256, shard.eod_id}


def make_prepared(folder: Path) -> None:
    """What `wb data prepare` leaves, as far as it is read again."""
    make_shard(folder)
    (folder / "s").rename(folder / "train")
    index = json.loads((folder / "train/tokens.idx.json").read_bytes())
    documents = open_shard(folder / "train").documents
    assert documents is not None
    shard = {"sha256": index["sha256"], "ids": index["num_tokens"], "documents": len(documents)}
    manifest = {"format": prepared_folder.FORMAT, "inputs": {"n": 1}, "shards": {"train": shard}}
    (folder / prepared_folder.MANIFEST).write_text(json.dumps(manifest))


def read_prepared(folder: Path) -> Any:
    assert prepared_folder.standing(folder, {"n": 1}) is not None
    (facts,) = inspect(folder, folder.parent / "cache")
    return facts["sha256"]


# -- checkpoints

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"intermediate_size": 8, "shared_intermediate_size": 8, "num_hidden_layers": 1}
_parts: dict[str, Any] = {}


def parts(folder: Path) -> Any:
    """What a small run trains with, built once; its state is put back by whoever restores it."""
    if not _parts:
        _parts["one"] = tiny_parts(folder.parent.parent / "built", model=SMALL)
    return _parts["one"]


def make_checkpoints(folder: Path) -> None:
    """Those of the first two updates; made once, since a state goes only forward."""
    one = parts(folder)
    saved = folder.parent.parent / "saved-checkpoints"
    if not _parts.get("saved"):
        _parts["saved"] = saved
        steps = train(one.spec, one.state)
        for _ in range(2):
            next(steps)
            save_checkpoint(one.state, saved, {"seed": 42}, keep=9)
        steps.close()
    shutil.copytree(_parts["saved"], folder / "c")


def _restored(path: Path, folder: Path) -> Any:
    one = parts(folder)
    saved = open_checkpoint(path)
    restore(one.state, saved, one.spec)
    weights = {name: digest(t.float().numpy()) for name, t in saved.weights().items()}
    moments = {name: digest(t.float().numpy()) for name, t in saved.moments().items()}
    return saved.step, weights, moments, saved.state


def read_checkpoint(folder: Path) -> Any:
    return _restored(folder / "c/step_00000002", folder)


def read_newest(folder: Path) -> Any:
    """The newest one that is whole: never an error, and never a damaged one."""
    saved, problems = newest_checkpoint(folder / "c")
    assert saved is not None
    assert bool(problems) == (saved.path.name != "step_00000002")
    return _restored(saved.path, folder) if saved.path.name == "step_00000002" else "older"


def rehash_checkpoint(folder: Path) -> None:
    """Makes the manifest fit the files again: what a hash protects is read all the same."""
    place = folder / "c/step_00000002"
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(place.iterdir())
        if path.name != "manifest.json"
    }
    (place / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))


def read_strange_checkpoint(folder: Path) -> None:
    _restored(folder / "c/step_00000002", folder)


# -- a run's folder


def make_runs(folder: Path) -> None:
    spec = full_spec(training={"steps": 100}, telemetry={"log_steps": 10})
    for seed, name in enumerate(("base", "good")):
        write_run(folder / "mlruns/runs" / name, full_record(name, spec=spec), seed=seed)


def read_run(folder: Path) -> Any:
    """Everything that is shown of a run, or sent to MLflow."""
    store = Store(folder / "mlruns")
    rows = run_rows(store)
    run_table(rows)
    entry = next(one for one in store.list_runs() if one.folder.name == "good")
    if entry.record is None:
        assert entry.fault
        raise UserError.at("listed", entry.fault)
    record = read_record(entry.folder)
    run_page(record, "FINISHED", entry.folder).encode()
    params_of(record), tags_of(record, "FINISHED", {}), datasets_of(record), spec_yaml(record)
    find_addition(record, "another", "0" * 64, 1)
    shown = strict({"runs": rows, "record": document_of(record)})
    json.dumps(shown, allow_nan=False, default=str)


def read_comparison(folder: Path) -> Any:
    """Two runs, one of them damaged."""
    runs = folder / "mlruns/runs"
    compare_runs(runs / "good", runs / "base").to_json()


def make_journal(folder: Path) -> None:
    journal = Journal(folder / "metrics.csv", columns(["held_out"]))
    for step in range(12):
        nll = math.nan if step == 3 else 5 / (step + 1)
        journal.write({"step": step, "tokens": step * 64, "train/nll": nll})
    journal.close()


def read_journal(folder: Path) -> None:
    path = folder / "metrics.csv"
    table = read_metrics(path)
    lengths = {len(column) for column in table.values()}
    assert len(lengths) == 1
    steps = table["step"]
    assert all(isinstance(step, float) and step >= 0 and step.is_integer() for step in steps)
    assert steps == sorted(set(steps))
    tail = Tail(path)
    while tail.rows(most_bytes=1 << 20):
        pass


def read_rewound(folder: Path) -> None:
    rewind(folder, 5, keep_row=True, keep_scores=False, take_row=True)
    left = read_metrics(folder / "metrics.csv")["step"]
    assert max((step or 0 for step in left), default=0) <= 5


def make_position(folder: Path) -> None:
    note = {"uri": "sqlite:///x", "experiment_id": "1", "run_id": "ab", "last_step": 7}
    (folder / "mlflow.json").write_text(json.dumps({**note, "datasets": ["a"], "artifacts": {}}))


def read_note(folder: Path) -> None:
    """A note that cannot be read is no note: the server is asked instead."""
    read_position(folder)


# -- text, streams, caches


def make_text(folder: Path) -> None:
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in made_up(5))
    )
    write_files(folder / "p", made_up(12), rows=4)


def read_text(folder: Path) -> None:
    for name in ("a.jsonl", "p/000.parquet"):
        for text in text_corpus(str(folder / name)).read():
            text.encode()


def make_stream(folder: Path) -> None:
    write_files(folder / "p", made_up(12), made_up(8, 2), rows=4)
    for path in (folder / "p").iterdir():
        _age(path)
    read_stream(folder)


def read_stream(folder: Path) -> Any:
    source = folder_source(str(folder / "p"), "text", folder / "cache")
    rows = RowReader(source.files, "text", Patience(waits=()))
    texts = [row.text for batch in rows.read() for row in batch]
    return source.key, digest(np.frombuffer("\n".join(texts).encode(), np.uint8))


def make_corpus_cache(folder: Path) -> None:
    write_corpus(folder / "corpus.txt")
    read_corpus_cache(folder)


def read_corpus_cache(folder: Path) -> Any:
    """A damaged entry is built again."""
    corpus = text_corpus(str(folder / "corpus.txt"), unit="blank_line")
    encoded = encode_corpus(corpus, load_tokenizer("bytes", None, folder), folder / "cache")
    return digest(encoded.tokens, encoded.offsets, encoded.content_sha256, encoded.groups)


def make_ranks(folder: Path) -> None:
    import base64

    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"he"]
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (folder / "a.tiktoken").write_bytes(b"".join(lines))


def read_ranks(folder: Path) -> None:
    read_rank_file(folder / "a.tiktoken")


READERS: dict[str, Reader] = {
    "spec": Reader(make_spec, read_spec, ("*.yaml",), short=10),
    "table of another trainer": Reader(make_table, read_table, ("*",)),
    "own shard": Reader(make_shard, read_own, ("s/*",), ("s/tokens.bin", "s/tokens.docs.npy")),
    "own shard, hashes made to fit": Reader(make_shard, read_rehashed, ("s/*",), (), rehash_shard),
    "shard checked before": Reader(make_remembered, read_remembered, ("memory/*",), ("memory/*",)),
    "prepared shards": Reader(make_prepared, read_prepared, ("*.json", "train/*.json")),
    "llm.c": Reader(make_llmc, reads("a.bin"), ("a.bin",)),
    "nanoGPT": Reader(make_nanogpt, reads("a.bin", "nanogpt"), ("a.bin",)),
    "Megatron": Reader(make_megatron, reads("a.bin"), ("a.bin", "a.idx")),
    "checkpoint": Reader(
        make_checkpoints,
        read_checkpoint,
        ("c/step_00000002/*",),
        ("c/step_00000002/*",),
    ),
    "newest checkpoint": Reader(make_checkpoints, read_newest, ("c/step_00000002/*",)),
    "checkpoint, hashes made to fit": Reader(
        make_checkpoints,
        read_strange_checkpoint,
        ("c/step_00000002/*s*",),
        (),
        rehash_checkpoint,
    ),
    "run record": Reader(make_runs, read_run, ("mlruns/runs/good/run_config.json",), short=8),
    "compared runs": Reader(
        make_runs,
        read_comparison,
        (
            "mlruns/runs/good/*.json",
            "mlruns/runs/good/*.csv",
            "mlruns/runs/good/evaluations/step_00000100.parquet",
        ),
        short=8,
    ),
    "journal": Reader(make_journal, read_journal, ("metrics.csv",)),
    "journal taken back": Reader(make_journal, read_rewound, ("metrics.csv",)),
    "note of what was sent": Reader(make_position, read_note, ("mlflow.json",)),
    "text files": Reader(make_text, read_text, ("a.jsonl", "p/*")),
    "stream": Reader(
        make_stream, read_stream, ("p/*", "cache/hashes/*"), ("cache/hashes/*",), short=10
    ),
    "encoded corpus": Reader(make_corpus_cache, read_corpus_cache, ("cache/*/*",), ("cache/*/*",)),
    "rank file": Reader(make_ranks, read_ranks, ("a.tiktoken",)),
}
