"""Complete run records and run folders, made without training.

`full_record` has a value in every leaf that can have one, so that every leaf can be changed, taken
away and set to null. `write_run` makes the folder that a run leaves behind.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from workbench.compare.facts import facts_of_record
from workbench.spec.held_out import overlap_rule
from workbench.spec.run import RunSpec, document_hash
from workbench.track.journal import Journal, columns
from workbench.track.record import RunRecord, write_record

STEPS, EVERY, TOKENS_PER_STEP = 250, 50, 4096
TOTAL = STEPS * TOKENS_PER_STEP
SETS = ("train_split", "held_out")
DOCUMENTS = 12
LENGTHS = np.random.default_rng(0).integers(200, 2_000, DOCUMENTS)  # scored tokens
BYTES_PER_TOKEN = 4


# What is measured of a set: nothing overlaps, though a few n-grams stand in training.
OVERLAPS: dict[str, dict[str, Any]] = {
    "train_split": {
        "status": "train_split",
        "overlap": {"not_applicable": "a part of the training text"},
        "overlap_rule": {"not_applicable": "a part of the training text"},
    },
    "held_out": {
        "status": "held_out",
        "overlap": {
            "method": "every n-gram, 64-bit hashes",
            "ngrams": 10_000,
            "ngrams_in_training": 20,
            "share": 0.002,
            "copies": 0,
            "overlapping_documents": 0,
            "overlapping_tokens": 0,
            "histogram": [2, DOCUMENTS - 2, *[0] * 10],
        },
        "overlap_rule": overlap_rule(13, 0.2, 0.01),
    },
}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def full_spec(**changes: Any) -> dict[str, Any]:
    """A resolved spec with no null that could be something else. `changes`: section -> fields."""
    spec: dict[str, Any] = {
        "name": "full",
        "seed": 42,
        "notes": "a note",
        "model": {
            "profile": "100m",
            "attention_type": "gqa",
            "learn_shared_routed_gates": True,
        },
        "tokenizer": {"name": "file", "path": "ranks.tiktoken"},
        "data": {"dataset": "text", "text_file": "text/*.txt"},
        "training": {"compile": True, "precision": "bf16"},
        "schedule": {"warmup_steps": 12},
        "tracking": {"uri": "http://localhost:5000", "tags": {"team": "a"}},
    }
    for section, fields in changes.items():
        spec[section] = {**spec.get(section, {}), **fields} if isinstance(fields, dict) else fields
    return RunSpec.model_validate(spec).model_dump(mode="json")


def documents(name: str) -> list[str]:
    """The content hashes of an evaluation set."""
    return [sha(f"{name} {index}") for index in range(DOCUMENTS)]


def set_of_documents(name: str, *last: str) -> str:
    """The identity of an evaluation set, its last documents replaced by these."""
    kept = documents(name)[: DOCUMENTS - len(last)]
    return hashlib.sha256(bytes.fromhex("".join([*kept, *map(sha, last)]))).hexdigest()


def full_effective(steps: int = STEPS) -> dict[str, Any]:
    evaluated = {
        name: {
            "sha256": set_of_documents(name),
            "documents": DOCUMENTS,
            "unit": "document",
            "scored_tokens": int(LENGTHS.sum()),
            "bytes": int(LENGTHS.sum()) * BYTES_PER_TOKEN,
            "context": "windows of 1024 from the end-of-document id",
            **OVERLAPS[name],
        }
        for name in SETS
    }
    return {
        "model": {"route_tables_sha256": sha("routes")},
        "tokenizer": {"name": "file", "vocab_size": 200_019, "sha256": sha("ranks")},
        "data": {
            "source": "text/*.txt",
            "train_sha256": sha("text"),
            "train_documents": 1_000,
            "train_tokens": 900_000,
            "train_bytes": 4_000_000,
            "split": "documents by hash, 0.05 held out",
            "counts": {"dropped": 3},
        },
        "budget": {"finished": True, "ramp_tokens": {"not_applicable": "no value is ramped"}},
        "parameters": {
            "total": 99_487_680,
            "active": 98_000_000,
            "embedding": 76_807_296,
            "experts": 1_843_200,
        },
        "optimizer": {
            "sequences_per_update": 4,
            "warmup_steps": 12,
            "groups_sha256": sha("groups"),
        },
        "precision": {"compute_dtype": "bfloat16", "master_dtype": "float32", "matmul": "upcast"},
        "hardware": {
            "device_type": "cuda",
            "device_name": "H200",
            "device_count": 1,
            "threads": 2,
            "torch": "2.13.0",
            "driver": "570.1",
            "libraries": {"cuda": "12.8", "cudnn": "9.1"},
        },
        "execution": {
            "loss_backend": "chunked",
            "dispatch": "masked",
            "attention": "flash",
            "compiled": True,
            "parallel": "one process",
            "recompilations": 0,
            "graph_breaks": 0,
        },
        "evaluation": evaluated,
        "interval": {"first_step": 11, "last_step": steps},
        "code": {
            "package_sha256": sha("code"),
            "version": "0.1.0",
            "forced_resume": "none",
            "resumed_with": "none",
            "forked_from": "none",
            "git_commit": "abc123",
            "git_dirty": True,
            "git_diff_sha256": sha("diff"),
        },
    }


def points(steps: int = STEPS, per_step: int = TOKENS_PER_STEP, every: int = EVERY) -> list[Any]:
    found = sorted({*range(0, steps + 1, every), steps})
    return [
        {
            "step": step,
            "tokens": step * per_step,
            "order_digest": sha(f"order {step * per_step}"),
            "lr_trace": sha(f"rates {step * per_step}"),
            "bytes": step * per_step * BYTES_PER_TOKEN,
        }
        for step in found
    ]


def full_record(name: str = "a", **changes: Any) -> RunRecord:
    """A finished run's record; `changes` replaces its own top-level fields."""
    spec = changes.get("spec", full_spec())
    steps = spec["training"]["steps"]
    document = {
        "id": sha(name)[:32],
        "name": name,
        "status": "FINISHED",
        "started": "2026-05-01T10:00:00+00:00",
        "ended": "2026-05-01T11:30:00+00:00",
        "spec": spec,
        "spec_sha256": document_hash(spec),
        "effective": full_effective(steps),
        "points": points(steps),
        "results": {"tokens_per_s": 1500.0, "seconds": 5400.0, "peak_memory_bytes": 3_600_000_000},
        "provenance": {"command": f"run experiments/{name}.yaml", "python": "3.12.3"},
        "tokens_per_step": TOKENS_PER_STEP,
        "total_tokens": steps * TOKENS_PER_STEP,
    }
    return RunRecord.model_validate(copy.deepcopy({**document, **changes}))


def full_facts() -> dict[str, Any]:
    """The facts of the full record at its end."""
    record = full_record()
    return copy.deepcopy(facts_of_record(record, record.points[-1]))


def write_run(
    folder: Path, record: RunRecord, *, shift: float = 0.0, spread: float = 0.002, seed: int = 1
) -> Path:
    """The folder of a run whose NLL is `shift` above that of a run with shift 0."""
    folder.mkdir(parents=True)
    write_record(record, folder)
    journal = Journal(folder / "metrics.csv", columns(SETS))
    per_step = record.tokens_per_step
    steps = record.total_tokens // per_step
    evaluated = {point.step: point.tokens for point in record.points}
    every = record.run_spec.telemetry.log_steps
    for step in sorted({1, *range(every, steps + 1, every), *evaluated}):
        tokens = step * per_step
        level = 5.0 + 5.0 * math.exp(-tokens / 3e5)
        row: dict[str, Any] = {"step": step, "tokens": tokens}
        if step:
            row["train/nll"] = level + shift + 0.05 * math.sin(step)
        if step in evaluated:
            scores = _scores(folder, step, level, shift, spread, seed)
            for name, (nll, bits) in scores.items():
                row |= {f"{name}/nll": nll, f"{name}/perplexity": math.exp(nll)}
                row[f"{name}/bits_per_byte"] = bits
            row["held_out/clean_nll"] = row["held_out/nll"]
        journal.write(row)
    journal.close()
    return folder


def _scores(
    folder: Path, step: int, level: float, shift: float, spread: float, seed: int
) -> dict[str, tuple[float, float]]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    noise = np.random.default_rng([seed, step]).normal(0, spread, (len(SETS), DOCUMENTS))
    table: dict[str, list[Any]] = {key: [] for key in ("set", "document", "tokens", "bytes")}
    table |= {"nll_sum": [], "clean": []}
    scores = {}
    for index, name in enumerate(SETS):
        per_token = level + 0.1 * index + (shift + noise[index] if step else 0)
        sums = per_token * LENGTHS
        table["set"] += [name] * DOCUMENTS
        table["document"] += documents(name)
        table["tokens"] += [int(n) for n in LENGTHS]
        table["clean"] += [True if name == "held_out" else None] * DOCUMENTS
        table["bytes"] += [int(n) * BYTES_PER_TOKEN for n in LENGTHS]
        table["nll_sum"] += [float(value) for value in sums]
        nll = float(sums.sum() / LENGTHS.sum())
        scores[name] = nll, nll / math.log(2) / BYTES_PER_TOKEN
    path = folder / "evaluations" / f"step_{step:08d}.parquet"
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pa.table(table), path)
    return scores


@contextmanager
def changed_table(path: Path) -> Iterator[dict[str, list[Any]]]:
    """The columns of a parquet file, written back as they were left."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(path) as file:
        table = file.read().to_pydict()
    yield table
    parquet.write_table(pa.table(table), path)
