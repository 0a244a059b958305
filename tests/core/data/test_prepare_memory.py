"""The memory of `wb data prepare` is that of its indexes and parts, however long the text is."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = 20_000  # words, each of six characters and a blank
SHORT, LONG = 30, 120  # documents: 4 and 17 MB of text
PER_DOCUMENT = 250  # bytes, as the head of prepare.py says

# The bounds of the indexes, the files mapped and the size of a part, so small that 4 MB of text are
# beyond them all. The peak is asked of the system here: `ru_maxrss` of a program that was started
# is at least that of the process which started it.
PROGRAM = """
import functools, json, re, resource, sys
from pathlib import Path
from workbench.core.data import overlap, prepare
from workbench.core.data.corpus import text_corpus
from workbench.core.data.parts import TokenizerName

overlap.MOST_KEYS = 1 << 12
prepare.MOST_MAPS = 4
prepare.NearDuplicates = functools.partial(prepare.NearDuplicates, most_entries=1 << 14)
path, out = map(Path, sys.argv[1:])
name, part = TokenizerName("bytes", None, out), 1 << 17
done = prepare.prepare(text_corpus(str(path)), out, name, 0.5, 2, part_characters=part)
own = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({"peaks": [int(own[1]) << 10, worker << 10], "counts": done.manifest["counts"]}))
"""


def write(path: Path, documents: int) -> int:
    """So many documents of random words; the bytes of their text."""
    draw = random.Random(documents)
    text = 0
    with path.open("w") as file:
        for _ in range(documents):
            words = draw.randbytes(3 * DOCUMENT).hex()
            joined = " ".join(words[i : i + 6] for i in range(0, len(words), 6))
            text += len(joined)
            file.write(json.dumps({"text": joined}) + "\n")
    return text


def peaks(folder: Path, documents: int) -> tuple[list[int], int]:
    """The peaks of resident memory, of a preparation and of its largest worker, and the text that
    was read; all in bytes."""
    path = folder / f"{documents}.jsonl"
    text = write(path, documents)
    command = [sys.executable, "-c", PROGRAM, str(path), str(folder / f"out-{documents}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["counts"]["documents"] == documents
    assert found["counts"]["near_duplicate_sample"] > 1, "the index was to be beyond its bound"
    return found["peaks"], text


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_no_process_grows_with_the_text(tmp_path: Path) -> None:
    short, of_short = peaks(tmp_path, SHORT)
    long, of_long = peaks(tmp_path, LONG)
    print(f"{of_short:,} bytes of text: peaks {short}; {of_long:,}: {long}")
    assert of_long > 3.9 * of_short
    # Half of the text that was added: less than its ids alone, its words, or itself.
    most = (of_long - of_short) // 2 + PER_DOCUMENT * (LONG - SHORT)
    for before, after in zip(short, long, strict=True):
        assert after - before < most
