"""`wb data`: what it prints, its exit codes, and what a stop from outside leaves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workbench.core.data.shards import FORMATS
from workbench.data_commands import ShardFormat

REPOSITORY = Path(__file__).parents[1]
RANKS = REPOSITORY / "configs/tokenizer/o200k-4096.tiktoken"
SHARD = REPOSITORY / "tests/data/token_shard/train"


def wb(folder: Path, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", "data", *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "WB_HOME": str(folder / "home")}


def write_texts(path: Path, count: int, words: int = 40) -> Path:
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            text = " ".join(f"word{draw.randrange(5000)}" for _ in range(words))
            file.write(json.dumps({"body": text}) + "\n")
    return path


PREPARE = ("prepare", "text.jsonl", "--out", "out", "--text-field", "body", "--processes", "2")


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    write_texts(tmp_path / "text.jsonl", 100)
    command = [sys.executable, "-m", "workbench", "data", *PREPARE]
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [*command, "--tokenizer", "file", "--tokenizer-path", str(RANKS)],
        cwd=tmp_path,
        env={**environment(tmp_path), "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    ) as preparing:
        os.close(theirs)
        drawn = b""
        with contextlib.suppress(OSError):  # Linux's end of a terminal that nobody holds
            while part := os.read(ours, 1 << 16):
                drawn += part
    os.close(ours)
    assert preparing.returncode == 0, drawn
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in drawn.decode()
    assert "kB" in drawn.decode()


def test_prepare_and_inspect_print_one_document_each(tmp_path: Path) -> None:
    write_texts(tmp_path / "text.jsonl", 100)
    arguments = (*PREPARE, "--tokenizer", "file", "--tokenizer-path", str(RANKS), "--json")
    done = wb(tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    first = json.loads(done.stdout)
    assert (first["was_there"], Path(first["out"])) == (False, tmp_path / "out")
    assert first["counts"]["documents"] == 100
    again = wb(tmp_path, *arguments)
    assert (again.returncode, json.loads(again.stdout)) == (0, {**first, "was_there": True})

    path = ("--tokenizer-path", str(RANKS))
    shown = wb(tmp_path, "inspect", "out", *path, "--json")
    assert shown.returncode == 0
    train, held_out = json.loads(shown.stdout)["shards"]
    for side, shard in (("train", train), ("held_out", held_out)):
        written = first["shards"][side]
        assert (shard["sha256"], shard["ids"]) == (written["sha256"], written["ids"])
        assert shard["documents"]["count"] == written["documents"]
        assert shard["documents"]["tokens"] == written["tokens"]
        assert shard["documents"]["text_bytes"] == written["text_bytes"]
        assert shard["documents"]["split"]["side"] == side
        assert shard["first_text"].startswith("<|endoftext|>word")
        assert (shard["dtype"], shard["vocab_size"], shard["holds"]) == ("<u2", 4097, True)
    page = wb(tmp_path, "inspect", "out/train").stdout
    assert train["sha256"] in page
    assert "the tokenizer cannot be loaded" in page  # no rank file is named
    assert f"{train['ids']:,}" in page


def test_prepare_says_plain_lines_and_what_it_wrote(tmp_path: Path) -> None:
    write_texts(tmp_path / "text.jsonl", 50)
    done = wb(tmp_path, *PREPARE, "--tokenizer", "bytes")
    assert done.returncode == 0
    steps = ["reading and encoding", "grouping near-duplicates", "choosing what is held out"]
    assert done.stderr.splitlines() == [*steps, "writing train", "writing held_out"]
    assert "held_out" in done.stdout
    assert "near-duplicates" in done.stdout
    other = wb(tmp_path, *PREPARE, "--tokenizer", "bytes", "--held-out-ratio", "0.3")
    assert other.returncode == 2
    assert "another preparation (held_out_ratio differ)" in other.stderr
    assert len(other.stderr.splitlines()) == 1


def test_a_shard_that_does_not_hold_is_exit_2(tmp_path: Path) -> None:
    for name in ("tokens.bin", "tokens.idx.json"):
        (tmp_path / name).write_bytes((SHARD / name).read_bytes())
    good = wb(tmp_path, "inspect", ".", "--json")
    assert good.returncode == 0
    (shard,) = json.loads(good.stdout)["shards"]
    assert (shard["ids"], shard["max_id"], shard["documents"]) == (6000, 511, None)
    assert (shard["tokenizer"], shard["first_text"]) == ("toy-512", None)
    raw = bytearray((tmp_path / "tokens.bin").read_bytes())
    raw[100] ^= 1
    (tmp_path / "tokens.bin").write_bytes(raw)
    bad = wb(tmp_path, "inspect", ".", "--json")
    assert bad.returncode == 2
    assert "holds other ids" in json.loads(bad.stdout)["error"]["message"]


def test_raw_ids_are_inspected_by_their_format(tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(b"\x01\x00\x02\x00\x61\x00")
    assert wb(tmp_path, "inspect", "raw.bin").returncode == 2
    arguments = ("--format", "nanogpt", "--vocab-size", "257", "--tokenizer", "bytes", "--json")
    shown = wb(tmp_path, "inspect", "raw.bin", *arguments)
    (shard,) = json.loads(shown.stdout)["shards"]
    assert (shard["first_ids"], shard["first_text"]) == ([1, 2, 97], "\x01\x02a")


def test_the_formats_are_those_that_are_read() -> None:
    assert set(ShardFormat) == set(FORMATS)


def test_a_full_disk_is_exit_74(tmp_path: Path) -> None:
    write_texts(tmp_path / "text.jsonl", 3000)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    full = wb(tmp_path, *PREPARE, "--tokenizer", "bytes", preexec_fn=limit)
    assert full.returncode == 74
    assert len(full.stderr.splitlines()) == 2
    assert "out.prepare" in full.stderr
    assert not (tmp_path / "out").exists()


def test_a_stop_says_how_to_go_on(tmp_path: Path) -> None:
    write_texts(tmp_path / "text.jsonl", 2500, 900)
    command = [sys.executable, "-m", "workbench", "data", *PREPARE]
    command += ["--tokenizer", "file", "--tokenizer-path", str(RANKS)]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "reading and encoding\n"
        parts = tmp_path / ".out.prepare/parts"
        while not list(parts.glob("part-*")):
            time.sleep(0.01)
        other = wb(tmp_path, *PREPARE, "--tokenizer", "bytes")  # meanwhile
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers hear it too
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "the same command goes on from here" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()
    assert list(parts.glob("part-*"))
    assert other.returncode == 2
    assert "another process is preparing" in other.stderr
