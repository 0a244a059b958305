"""What the proof costs: 100 million training tokens within 3 minutes and 2 GB on two cores."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from workbench.core.data.corpus import sample_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.shards import ShardWriter
from workbench.core.data.tokenizer import load_tokenizer
from workbench.core.data.workers import cores

# The chapters of the sample, read again and again, as a run reads them: decoded from their ids.
CODE = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from workbench.core.data.corpus import sample_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.overlap import Passages, measure
from workbench.core.data.passages import passages_of_documents
from workbench.core.data.split import every_document
from workbench.core.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer("o200k_base", None, Path(sys.argv[1]))
encoded = encode_corpus(sample_corpus(), tokenizer, Path(sys.argv[1]))
spans = every_document(encoded)
times = -(-100_000_000 // int(spans.lengths.sum()))
ranges, hashes = np.tile(spans.ranges, (times, 1)), np.tile(spans.sha256, (times, 1))
training = passages_of_documents(encoded.tokens, ranges, hashes, tokenizer)
words = np.random.default_rng(0).integers(0, 50_000, (5_000, 200))
texts = [" ".join(f"word{i}" for i in row) for row in words]
evaluation = Passages("e", None, lambda: iter(texts))
start = time.perf_counter()
found = measure(evaluation, training, 13)
seconds = time.perf_counter() - start
tokens = times * int(spans.lengths.sum())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([seconds, tokens, peak, int(found.found.sum())]))
"""


@pytest.mark.slow
@pytest.mark.skipif(cores() < 2, reason="the limits are stated for two cores")
def test_a_hundred_million_tokens(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    seconds, tokens, peak, found = json.loads(done.stdout)
    print(f"{tokens / 1e6:.0f} million tokens in {seconds:.0f} s, peak {peak / 1e9:.2f} GB")
    assert tokens >= 100_000_000
    assert found == 0
    assert seconds < 180
    assert peak < 2e9


@pytest.mark.slow
@pytest.mark.skipif(cores() < 2, reason="the limits are stated for two cores")
def test_a_shard_of_a_hundred_million_tokens(tmp_path: Path) -> None:
    """The whole command, on documents too long to be decoded at once: ids drawn at random, each as
    often as in the sample, so that no passage comes twice."""
    tokenizer = load_tokenizer("o200k_base", None, tmp_path / "home/cache/tiktoken")
    encoded = encode_corpus(sample_corpus(), tokenizer, tmp_path / "corpus")
    rng = np.random.default_rng(0)
    with ShardWriter(
        tmp_path / "train",
        tokenizer="o200k_base",
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.content_sha256,
    ) as writer:
        for _ in range(25):
            ids = encoded.tokens[rng.integers(0, len(encoded.tokens), 4_000_000)]
            writer.append(ids, int(tokenizer.byte_lengths[ids].sum()), rng.bytes(32))
        writer.finish()
    words = rng.integers(0, 50_000, (5_000, 200))
    texts = "\n\n".join(" ".join(f"word{i}" for i in row) for row in words)
    (tmp_path / "eval.txt").write_text(texts)
    command = [sys.executable, "-m", "workbench", "data", "overlap", "train", "eval.txt", "--json"]
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": root, "WB_HOME": str(tmp_path / "home")}
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=True, env=environment, cwd=tmp_path)
    seconds = time.perf_counter() - start
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)["overlap"]
    print(
        f"{seconds:.0f} s, {spent.ru_utime + spent.ru_stime:.0f} s of processor time, peak"
        f" {spent.ru_maxrss * 1024 / 1e9:.2f} GB, load {os.getloadavg()[0]:.1f}"
    )
    assert found["measured_on"] == "words of the text"
    assert found["ngrams"] == 5_000 * 188
    assert seconds < 180
    assert spent.ru_maxrss * 1024 < 2e9
