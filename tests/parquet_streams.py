"""Small streams for the tests: parquet files of made-up documents, and specs that read them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tiny_runs import ROUTED

from workbench.spec.run import RunSpec

_WORDS = ["the", "a", "cat", "dog", "sees", "likes", "old", "small", "tree", "river", "and", "not"]


def made_up(count: int, seed: int = 0, least: int = 5) -> list[str]:
    """That many different documents of `least` to 60 words; the same ones every time."""
    draw = random.Random(seed)
    return [
        f"{seed}-{number} " + " ".join(draw.choices(_WORDS, k=draw.randint(least, 60)))
        for number in range(count)
    ]


def write_files(folder: Path, *files: list[Any], column: str = "text", rows: int = 10) -> Path:
    """A parquet file for each list, `rows` in a row group, beside a column that is not text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(files):
        table = pa.table({column: texts, "score": [1.5] * len(texts)})
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=rows)
    return folder


def three_files(folder: Path) -> tuple[Path, list[str]]:
    """110 documents in three files of several row groups, and their texts in order."""
    files = [made_up(45, 1), made_up(25, 2), made_up(40, 3)]
    return write_files(folder, *files), [text for texts in files for text in texts]


def stream_spec(folder: Path, name: str = "tiny", **changes: Any) -> RunSpec:
    """A spec that trains on a folder in less than a second."""
    base: dict[str, dict[str, Any]] = {
        "model": ROUTED,
        "tokenizer": {"name": "bytes"},
        "data": {
            "dataset": "fineweb",
            "stream_path": str(folder),
            "stream_eval_documents": 6,
            "held_out_ratio": 0.2,
        },
        "training": {"steps": 6, "batch_size": 4, "seq_len": 32},
        "evaluation": {"eval_steps": 3},
        "telemetry": {"log_steps": 1},
    }
    laid = {key: base.get(key, {}) | changes.get(key, {}) for key in base | changes}
    return RunSpec.model_validate({"name": name, **laid})
