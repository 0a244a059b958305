"""Text into shards: the same bytes however computed, stopped or resumed, split as a run splits."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from full_disks import largest_file, tree

from workbench.core.data import parts
from workbench.core.data import prepare as prepare_module
from workbench.core.data.corpus import text_corpus
from workbench.core.data.encoded import encode_corpus
from workbench.core.data.errors import DataError
from workbench.core.data.inspection import inspect
from workbench.core.data.parts import TokenizerName, tokenizer_of
from workbench.core.data.prepare import Prepared, Progress, prepare
from workbench.core.data.shards import open_shard
from workbench.core.data.split import split_corpus
from workbench.core.data.workers import WorkerDiedError
from workbench.errors import StoreError

REPOSITORY = Path(__file__).parents[3]
BYTES = TokenizerName("bytes", None, Path("unused"))
SMALL = TokenizerName(
    "file", str(REPOSITORY / "configs/tokenizer/o200k-4096.tiktoken"), Path("unused")
)
RATIO = 0.2
PART = 3000  # characters: some twenty parts

Report = Callable[[Progress], None]


def texts_with_duplicates() -> list[str]:
    """150 documents, among them copies, near-duplicates and some that differ in blanks alone."""
    draw = random.Random(4)
    texts = [" ".join(f"wörd{draw.randrange(4000)}" for _ in range(60)) for _ in range(130)]
    texts += [texts[3], texts[40], texts[40], f"  {texts[7].upper()}\n", "", "  \n "]
    texts += texts[10:25]  # of both sides
    for i in range(50, 64):  # half of another document
        texts.append(" ".join([*texts[i].split()[:35], *(f"new{i}x{k}" for k in range(25))]))
    return texts


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "text.jsonl", texts_with_duplicates())


def run(source: Path, out: Path, processes: int = 1, part: int = PART, **more: Any) -> Prepared:
    tokenizer = more.pop("tokenizer", BYTES)
    ratio = more.pop("ratio", RATIO)
    corpus = text_corpus(str(source))
    return prepare(corpus, out, tokenizer, ratio, processes, part_characters=part, **more)


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> dict[str, bytes | None]:
    return tree(run(source, tmp_path / "unbroken").folder)


@pytest.mark.parametrize(("processes", "part"), [(1, 10**6), (2, PART), (3, 700)])
def test_no_byte_depends_on_the_processes_or_the_parts(
    source: Path, tmp_path: Path, expected: dict[str, bytes | None], processes: int, part: int
) -> None:
    done = run(source, tmp_path / "out", processes, part)
    assert tree(done.folder) == expected
    assert set(expected) == {
        "prepare.json",
        *(
            f"{side}/{name}".removesuffix("/")
            for side in ("train", "held_out")
            for name in ("", *(f"tokens.{s}" for s in ("bin", "idx.json", "docs.npy", "docs.json")))
        ),
    }
    assert not list(tmp_path.glob(".*"))


def test_no_byte_depends_on_how_much_is_hashed_at_once(
    source: Path,
    tmp_path: Path,
    expected: dict[str, bytes | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 900)
    monkeypatch.setattr(prepare_module, "WORDS_AT_ONCE", 100)
    monkeypatch.setattr(prepare_module, "MOST_MAPS", 2)
    assert tree(run(source, tmp_path / "out").folder) == expected


@pytest.mark.parametrize("tokenizer", [BYTES, SMALL])
def test_the_same_documents_are_held_out_as_in_a_run_on_the_text(
    source: Path, tmp_path: Path, tokenizer: TokenizerName
) -> None:
    done = run(source, tmp_path / "out", tokenizer=tokenizer)
    loaded = tokenizer_of(tokenizer)
    split = split_corpus(
        encode_corpus(text_corpus(str(source)), loaded, tmp_path / "cache"), loaded, RATIO
    )
    train, held_out = (open_shard(done.folder / side) for side in ("train", "held_out"))
    stream = np.concatenate([split.tokens[a:b] for a, b in split.train_segments])
    assert train.tokens[:].tolist() == stream.tolist()
    assert held_out.documents is not None
    held = {row["sha256"].tobytes() for row in held_out.documents}
    assert held == {row.tobytes() for row in split.held_out.sha256}
    assert len(held) == len(held_out.documents) == len(split.held_out) > 5
    assert done.manifest["split"] == split.rule
    for name in ("documents", "skipped_empty", "exact_duplicates", "normalised_duplicates"):
        assert done.manifest["counts"][name] == split.counts[name]
    assert done.manifest["counts"]["near_duplicate_groups"] == split.counts["near_duplicate_groups"]
    assert done.manifest["counts"]["exact_duplicates"] == 18
    assert done.manifest["counts"]["near_duplicate_groups"] >= 14
    counts, shards = done.manifest["counts"], done.manifest["shards"]
    assert counts["held_out_dropped"] > 0
    written = shards["train"]["documents"] + shards["held_out"]["documents"]
    assert written + counts["held_out_dropped"] == counts["documents"]


def test_the_shards_hold_the_text(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "out", tokenizer=SMALL)
    tokenizer = tokenizer_of(SMALL)
    found = []
    for side in ("train", "held_out"):
        shard = open_shard(done.folder / side)
        assert shard.documents is not None
        assert (shard.eod_id, shard.tokenizer_sha256) == (4096, tokenizer.content_sha256)
        for row in shard.documents:
            text = tokenizer.decode(shard.tokens[row["start"] : row["end"]].tolist())
            assert len(text.encode()) == row["bytes"]
            assert shard.tokens[row["start"] - 1 : row["start"]].tolist() == [4096]
            found.append(text)
        assert done.manifest["shards"][side]["documents"] == len(shard.documents)
    texts = [text for text in texts_with_duplicates() if text.strip()]
    assert set(found) == set(texts)


def test_several_sources_are_read_in_turn(tmp_path: Path) -> None:
    texts = [text for text in texts_with_duplicates() if text.strip()]
    write_lines(tmp_path / "a.jsonl", texts[:50])
    folder = tmp_path / "more"
    folder.mkdir()
    pq.write_table(pa.table({"text": texts[50:100]}), folder / "b.parquet")
    for number, text in enumerate(texts[100:]):
        (folder / f"c{number:03d}.txt").write_bytes(text.encode())
    sources = [str(tmp_path / "a.jsonl"), str(folder), str(folder / "*.parquet")]
    corpus = text_corpus(sources, place="SRC")
    assert list(corpus.read()) == texts
    whole = write_lines(tmp_path / "whole.jsonl", texts)
    both = [
        prepare(c, tmp_path / n, BYTES, RATIO)
        for c, n in ((corpus, "1"), (text_corpus(str(whole)), "2"))
    ]
    assert both[0].manifest["shards"] == both[1].manifest["shards"]


def test_without_a_ratio_all_of_it_trains(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "out", ratio=0.0)
    assert [path.name for path in sorted(done.folder.iterdir())] == ["prepare.json", "train"]
    assert done.manifest["shards"]["train"]["documents"] == done.manifest["counts"]["documents"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_prepare import run
count = 0
def report(progress):
    global count
    count += 1
    if count == {moment}:
        os.kill(os.getpid(), signal.SIGKILL)
run(Path({source!r}), Path({out!r}), processes={processes}, report=report)
"""


@pytest.mark.parametrize(("moment", "processes"), [(3, 1), (9, 2), (14, 1), (26, 2), (32, 1)])
def test_a_killed_preparation_goes_on_where_it_was(
    source: Path,
    tmp_path: Path,
    expected: dict[str, bytes | None],
    moment: int,
    processes: int,
) -> None:
    out = tmp_path / "out"
    script = KILLED.format(
        folder=str(Path(__file__).parent),
        moment=moment,
        source=str(source),
        out=str(out),
        processes=processes,
    )
    paths = [str(REPOSITORY), str(REPOSITORY / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    folder = tmp_path / ".out.prepare/parts"
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert len(before) >= min(moment - 1, 20)
    kept: dict[str, int] = {}

    def report(progress: Progress) -> None:
        if progress.what.startswith("grouping"):
            kept.update({path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")})

    done = run(source, out, processes, report=report)
    assert tree(done.folder) == expected
    assert before.items() <= kept.items(), "a part that was whole is built again"
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_part_is_built_again(
    source: Path, tmp_path: Path, expected: dict[str, bytes | None]
) -> None:
    def stop(progress: Progress) -> None:
        if progress.what.startswith("grouping"):
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(source, out, report=stop)
    folder = tmp_path / ".out.prepare/parts"
    files = sorted(folder.iterdir())
    for path, change in zip(files[::9], (flip, cut, flip, cut, flip), strict=False):
        change(path)
    words = folder / "words-000001.npy"
    flip(words)
    done = run(source, out)
    assert tree(done.folder) == expected


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_other_inputs_do_not_take_the_parts_of_a_stopped_preparation(
    source: Path, tmp_path: Path, expected: dict[str, bytes | None]
) -> None:
    def stop(progress: Progress) -> None:
        if progress.what.startswith("grouping"):
            raise KeyboardInterrupt

    other = write_lines(tmp_path / "other.jsonl", texts_with_duplicates()[::-1])
    with pytest.raises(KeyboardInterrupt):
        run(other, tmp_path / "out", report=stop)
    assert tree(run(source, tmp_path / "out").folder) == expected


@pytest.mark.parametrize("room", [64, 9000, 60_000])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_leaves_nothing_under_the_name(
    source: Path,
    tmp_path: Path,
    expected: dict[str, bytes | None],
    room: int,
    processes: int,
) -> None:
    with largest_file(room), pytest.raises(StoreError) as caught:
        run(source, tmp_path / "out", processes)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 74
    assert not (tmp_path / "out").exists()
    left = tree(tmp_path / ".out.prepare")
    assert not [name for name in left if name.endswith(".tmp")]
    assert tree(run(source, tmp_path / "out", processes).folder) == expected


def test_what_stands_there_already_is_not_prepared_again(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "out")
    before = tree(done.folder)
    again = run(source, tmp_path / "out", 2, 999)
    assert (done.was_there, again.was_there) == (False, True)
    assert again.manifest == done.manifest
    assert tree(done.folder) == before
    for other in ({"ratio": 0.1}, {"tokenizer": SMALL}):
        with pytest.raises(DataError, match="another preparation"):
            run(source, tmp_path / "out", **other)
    write_lines(source, texts_with_duplicates()[1:])
    with pytest.raises(DataError, match="another preparation"):
        run(source, tmp_path / "out")
    assert tree(done.folder) == before


@pytest.mark.parametrize("side", ["train", "held_out"])
@pytest.mark.parametrize(
    "name", ["tokens.bin", "tokens.idx.json", "tokens.docs.npy", "tokens.docs.json"]
)
def test_shards_that_were_damaged_are_not_taken_for_done(
    source: Path, tmp_path: Path, side: str, name: str
) -> None:
    done = run(source, tmp_path / "out")
    file = done.folder / side / name
    whole, before = file.read_bytes(), tree(tmp_path)
    for damage in (flip, cut, Path.unlink):
        damage(file)
        with pytest.raises(DataError) as caught:
            run(source, tmp_path / "out")
        assert side in caught.value.faults[0].place
        file.write_bytes(whole)
    assert tree(tmp_path) == before


def test_whole_shards_that_are_not_those_of_the_manifest_are_not_taken_for_done(
    source: Path, tmp_path: Path
) -> None:
    done = run(source, tmp_path / "out").folder
    for name in ("tokens.docs.npy", "tokens.docs.json"):
        (done / "held_out" / name).rename(tmp_path / name)
    said = r"held_out: is not the shard that .*prepare\.json names \(documents\)"
    for read in (lambda: run(source, done), lambda: inspect(done, tmp_path)):
        with pytest.raises(DataError, match=said):
            read()
    for name in ("tokens.docs.npy", "tokens.docs.json"):
        (tmp_path / name).rename(done / "held_out" / name)
    shutil.copytree(done / "held_out", done / "train", dirs_exist_ok=True)
    for read in (lambda: run(source, done), lambda: inspect(done, tmp_path)):
        with pytest.raises(DataError, match=r"train: is not the shard that .* names \(sha256\)"):
            read()
    (done / "prepare.json").write_text('{"shards": []}')
    with pytest.raises(DataError, match=r"prepare\.json: does not say which shards were written"):
        inspect(done, tmp_path)


@pytest.mark.parametrize("manifest", ["{", "[]", "{}", '{"format": 1}'])
def test_a_damaged_manifest_is_no_preparation(source: Path, tmp_path: Path, manifest: str) -> None:
    done = run(source, tmp_path / "out")
    (done.folder / "prepare.json").write_text(manifest)
    with pytest.raises(DataError, match="not overwritten"):
        run(source, tmp_path / "out")


def test_other_files_are_never_overwritten(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="not overwritten"):
        run(source, out)
    assert tree(out) == {"notes.txt": b"mine"}
    (out / "notes.txt").unlink()
    assert run(source, out).folder == out  # an empty folder is no content
    with pytest.raises(DataError, match="not a folder"):
        run(source, source)

    def appears(progress: Progress) -> None:
        (tmp_path / "late").mkdir(exist_ok=True)
        (tmp_path / "late/notes.txt").write_text("mine")

    with pytest.raises(DataError, match="was not there at the start"):
        run(source, tmp_path / "late", report=appears)
    assert tree(tmp_path / "late") == {"notes.txt": b"mine"}


def test_an_output_behind_a_link_is_the_folder_that_is_meant(
    source: Path, tmp_path: Path, expected: dict[str, bytes | None]
) -> None:
    (tmp_path / "disk/there").mkdir(parents=True)
    for name in ("there", "not_there"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
        done = run(source, tmp_path / name)
        assert (done.folder, tree(tmp_path / name)) == (tmp_path / "disk" / name, expected)
        assert (tmp_path / name).is_symlink()
        assert run(source, tmp_path / name).was_there
    assert run(source, tmp_path / "new/../other").folder == tmp_path / "other"
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("out", ["/", "/proc", "/dev/shm"])
def test_what_no_folder_can_take_the_place_of_is_refused_at_once(source: Path, out: str) -> None:
    if not Path(out).is_mount():
        pytest.skip(f"{out} is no mount point here")

    def never(progress: Progress) -> None:
        pytest.fail("nothing was to be read")

    with pytest.raises(DataError, match=f"--out: is a mount point.*{out}"):
        run(source, Path(out), report=never)


def test_of_two_at_once_one_prepares_and_the_other_says_so(
    source: Path, tmp_path: Path, expected: dict[str, bytes | None]
) -> None:
    codes: list[int | None] = []

    def try_it() -> None:
        with pytest.raises(DataError, match="another process is preparing this output"):
            run(source, tmp_path / "out")

    def another(progress: Progress) -> None:
        if progress.what == "reading and encoding" and len(codes) > 1:
            return
        process = multiprocessing.get_context("fork").Process(target=try_it)
        process.start()  # the lock is one of processes
        process.join()
        codes.append(process.exitcode)

    assert tree(run(source, tmp_path / "out", report=another).folder) == expected
    assert len(codes) > 3  # in every step
    assert set(codes) == {0}


@pytest.mark.parametrize("has_finished", [True, False])
def test_a_lock_that_was_removed_locks_nothing(
    source: Path,
    tmp_path: Path,
    expected: dict[str, bytes | None],
    monkeypatch: Any,
    has_finished: bool,
) -> None:
    """Whoever waits at the lock of a process that ends finds its folder gone, and what it wrote."""
    lockf, work = fcntl.lockf, tmp_path / ".out.prepare"
    elsewhere = run(source, tmp_path / "elsewhere").folder

    def as_another_ends(handle: Any, how: int) -> None:
        lockf(handle, how)
        if elsewhere.exists():
            shutil.rmtree(work)
            elsewhere.rename(tmp_path / ("out" if has_finished else "gone"))

    monkeypatch.setattr(fcntl, "lockf", as_another_ends)
    found = run(source, tmp_path / "out")
    assert found.was_there == has_finished
    assert tree(found.folder) == expected
    assert not work.exists()


def test_no_more_processes_start_than_there_are_parts(
    source: Path, tmp_path: Path, expected: dict[str, bytes | None]
) -> None:
    assert tree(run(source, tmp_path / "out", 10_000, 10**6).folder) == expected


def test_a_source_that_changes_while_it_is_read_is_refused(source: Path, tmp_path: Path) -> None:
    def change(progress: Progress) -> None:
        if progress.done and not progress.what.startswith("writing"):
            with source.open("a") as file:
                file.write('{"text": "more"}\n')

    with pytest.raises(DataError, match="changed while it was read"):
        run(source, tmp_path / "out", report=change)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "caf\xe9"}\n', "not UTF-8"),
        (b'{"text": "one"}\n', "1 document with text: too few"),
        (b'{"text": " "}\n\n{"text": ""}\n', "no text: 2 documents"),
        (b"", "no text: 0 documents"),
        (b'{"txt": "a"}\n', "Did you mean"),
        (b'{"text": "all the same text"}\n' * 30, "all 30 documents are the same text"),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_text_that_cannot_be_used_is_one_error(
    tmp_path: Path, content: bytes, message: str, processes: int
) -> None:
    source = tmp_path / "text.jsonl"
    source.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        run(source, tmp_path / "out", processes)
    assert len(caught.value.faults) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_a_document_that_no_tokenizer_takes_is_an_error_of_any_process(tmp_path: Path) -> None:
    texts = [*texts_with_duplicates(), " " * 1_200_000 + "x"]
    source = write_lines(tmp_path / "text.jsonl", texts)
    with pytest.raises(DataError, match="tiktoken cannot encode it") as caught:
        run(source, tmp_path / "out", 2, tokenizer=SMALL)
    place = f"{source}:{len(texts)}, the document starting "
    assert caught.value.faults[0].place.startswith(place)


def test_a_worker_that_is_killed_ends_the_work_and_the_next_call_goes_on(
    source: Path, tmp_path: Path, expected: dict[str, bytes | None]
) -> None:
    def kill_one(progress: Progress) -> None:
        if progress.done:
            psutil.Process().children()[0].kill()

    with pytest.raises(WorkerDiedError, match="a worker process was killed"):
        run(source, tmp_path / "out", 2, report=kill_one)
    assert list((tmp_path / ".out.prepare/parts").glob("part-*"))
    assert tree(run(source, tmp_path / "out").folder) == expected


def test_memory_of_the_parts_is_bounded(source: Path, tmp_path: Path) -> None:
    """However long the text, no more than a few parts of it are held."""
    corpus = text_corpus(str(source))
    taken = finished = most = 0

    def read() -> Iterator[str]:
        nonlocal taken, most
        for text in corpus.read():
            taken += len(text.encode())
            most = max(most, taken - finished)
            yield text

    def report(progress: Progress) -> None:
        nonlocal finished
        if progress.what.startswith("reading"):
            finished = progress.done

    prepare(
        replace(corpus, read=read), tmp_path / "out", BYTES, RATIO, 2, report, part_characters=PART
    )
    assert most < 8 * PART < taken
