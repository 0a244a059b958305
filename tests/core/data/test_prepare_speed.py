"""How fast text becomes shards: against tiktoken's own batches."""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiktoken

from workbench.core.data.corpus import sample_corpus
from workbench.core.data.parts import TokenizerName, tokenizer_of
from workbench.core.data.workers import cores

REPOSITORY = Path(__file__).parents[3]
COPIES = 25  # of the sample corpus, 4 MB each
CHANGED = 0.3  # of the words of each copy: 1 % of its 13-word sequences stay


def write_varied(path: Path, copies: int, seed: int = 0) -> int:
    """Copies of the sample corpus in which words are exchanged; returns the bytes of text."""
    draw = random.Random(seed)
    texts = [text.split(" ") for text in sample_corpus().read()]
    words = [word for text in texts for word in text]
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for _ in range(copies):
            for text in texts:
                new = [
                    words[int(draw.random() * len(words))] if draw.random() < CHANGED else word
                    for word in text
                ]
                joined = " ".join(new)
                size += len(joined.encode())
                file.write(json.dumps({"text": joined}, ensure_ascii=False) + "\n")
    return size


def prepare(path: Path, out: Path, home: Path) -> tuple[float, float]:
    """Seconds of the whole command, and its processor time."""
    command = [sys.executable, "-m", "workbench", "data", "prepare", str(path), "--out", str(out)]
    command += ["--tokenizer", "o200k_base", "--json"]
    environment = {**os.environ, "WB_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["was_there"] is False
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, spent


@pytest.mark.slow
def test_at_least_60_percent_of_the_rate_of_tiktoken(tmp_path: Path) -> None:
    path, home = tmp_path / "text.jsonl", tmp_path / "home"
    size = write_varied(path, COPIES)
    assert size > 100e6
    tokenizer_of(TokenizerName("o200k_base", None, home / "cache/tiktoken"))  # keeps its file
    encoding = tiktoken.get_encoding("o200k_base")
    texts = [json.loads(line)["text"] for line in path.open(encoding="utf-8")]
    ratios = []
    for turn in range(4):
        start, before = time.perf_counter(), time.process_time()
        ids = encoding.encode_ordinary_batch(texts, num_threads=cores())
        own, own_spent = time.perf_counter() - start, time.process_time() - before
        tokens = sum(map(len, ids))
        del ids
        whole, spent = prepare(path, tmp_path / f"out{turn}", home)
        manifest = json.loads((tmp_path / f"out{turn}/prepare.json").read_text())
        assert sum(s["tokens"] for s in manifest["shards"].values()) == tokens
        ratios.append(own / whole)
        print(
            f"turn {turn}: tiktoken {size / own / 1e6:.1f} MB/s, prepare {size / whole / 1e6:.1f} "
            f"MB/s, ratio {own / whole:.2f}, processor time {own_spent:.1f} s and {spent:.1f} s, "
            f"load {os.getloadavg()[0]:.1f}"
        )
    assert statistics.median(ratios) >= 0.6
