"""The journal: what is written is read back exactly, whatever happens in between."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from track.tracked_runs import SETS, rows

from workbench.errors import StoreError, UserError
from workbench.track.journal import (
    MEASURED_COLUMNS,
    ORIGINAL_COLUMNS,
    Journal,
    Tail,
    columns,
    read_metrics,
)

LEGACY = Path(__file__).parents[1] / "data" / "legacy_run_gqa" / "metrics.csv"


def same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isnan(a) and math.isnan(b))


def test_the_original_columns_come_first_and_in_their_order() -> None:
    header = LEGACY.read_text().splitlines()[0].split(",")
    assert list(ORIGINAL_COLUMNS) == header
    assert len(ORIGINAL_COLUMNS) == 29
    names = columns(SETS)
    assert names[:29] == ORIGINAL_COLUMNS
    assert names[29:40] == (
        "tokens",
        "train/nll",
        "train/objective",
        "train/smoothing",
        "train/z_loss",
        "train/balance",
        "train/diversity",
        "grad_norm",
        "muon_lr",
        "route_entropy",
        "train_split/nll",
    )
    assert set(MEASURED_COLUMNS) <= set(names)


def test_written_rows_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    journal = Journal(path, columns(SETS))
    for row in rows(9):
        journal.write(row)
    journal.close()
    table = read_metrics(path)
    assert tuple(table) == columns(SETS)
    for index, row in enumerate(rows(9)):
        for name in columns(SETS):
            if name in row:
                assert same(table[name][index], row[name]), name
    assert table["held_out/nll"][1] is None  # not measured, which is not NaN
    assert math.isnan(table["train/nll"][2])
    assert table["train/objective"][3] == math.inf
    assert path.read_text().splitlines()[3].split(",")[30] == "nan"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(width=64), min_size=1, max_size=5))
def test_every_float_survives(tmp_path_factory: pytest.TempPathFactory, values: list) -> None:
    path = tmp_path_factory.mktemp("floats") / "metrics.csv"
    journal = Journal(path, columns([]))
    for step, value in enumerate(values):
        journal.write({"step": step, "grad_norm": value})
    journal.close()
    read = read_metrics(path)["grad_norm"]
    assert all(same(a, b) for a, b in zip(read, values, strict=True))


def test_original_columns_are_filled_from_the_named_numbers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "m.csv", columns(SETS))
    journal.write({"step": 0, "held_out/nll": 2.0, "held_out/perplexity": math.exp(2.0)})
    journal.write({"step": 1, "train/nll": 1.5, "train/objective": 1.75, "tokens_per_s": 10.0})
    journal.write({"step": 2, "train/nll": 1e6, "train_split/nll": 1.0})
    journal.close()
    table = read_metrics(tmp_path / "m.csv")
    assert table["train_loss"] == [None, 1.5, 1e6]
    assert table["train_ppl"] == [None, math.exp(1.5), math.inf]
    assert table["eval_loss"] == [2.0, None, None]  # held out only, never the training split
    assert table["eval_ppl"] == [math.exp(2.0), None, None]
    assert table["total_loss"] == [None, 1.75, None]
    assert table["tok_s"] == [None, 10.0, None]
    for name in ("expert_0_share", "shared_gate", "router_aux_loss"):
        assert table[name] == [None, None, None]


def test_an_unknown_column_a_repeated_step_or_a_second_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    journal = Journal(path, columns(SETS))
    journal.write({"step": 5})
    before = path.read_bytes()
    with pytest.raises(KeyError, match="held_out/nl"):
        journal.write({"step": 6, "held_out/nl": 1.0})
    for step in (5, 4):
        with pytest.raises(AssertionError, match="increase"):
            journal.write({"step": step})
    with pytest.raises(AssertionError):
        journal.write({"step": 6, "grad_norm": True})
    with pytest.raises(StoreError, match="exists"):
        Journal(path, columns(SETS))
    assert path.read_bytes() == before


def test_a_torn_last_line_is_not_read_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    journal = Journal(path, columns(SETS))
    for row in rows(4):
        journal.write(row)
    whole = path.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read_metrics(path)["step"]) == 3
    path.write_bytes(whole)
    assert len(read_metrics(path)["step"]) == 4
    lines = whole.splitlines(keepends=True)
    for bad in (b"1,2,3\n", lines[2].replace(b"0,", b"x,", 1), b"\xff\n", b'"\n'):
        path.write_bytes(b"".join([*lines[:2], bad, *lines[3:]]))
        with pytest.raises(UserError, match=r"metrics\.csv:3"):
            read_metrics(path)


def test_the_original_runners_file_is_read() -> None:
    table = read_metrics(LEGACY)
    assert table["step"] == [1, 5, 10, 15, 20]
    assert table["train_loss"][0] == 6.219815
    assert table["eval_loss"] == [None, None, 5.974131, None, 5.88497]
    assert table["router_aux_loss"] == [None] * 5


@pytest.mark.parametrize("content", [None, b"", b"a,b\n1,2\n"])
def test_what_is_no_table_of_steps_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "metrics.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.csv"):
        read_metrics(path)


def test_a_tail_gives_every_row_once_also_in_small_pieces_and_after_a_trim(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    tail = Tail(path)
    assert tail.rows() == []
    journal = Journal(path, columns(SETS))
    for row in rows(3):
        journal.write(row)
    assert [r["step"] for r in tail.rows()] == [0, 1, 2]
    assert tail.rows() == []
    with path.open("ab") as file:
        file.write(b"3,")  # a line that is not complete yet
    assert tail.rows() == []
    path.write_bytes(path.read_bytes()[:-2])
    journal.write(rows(1, first=3)[0])
    assert [r["step"] for r in tail.rows()] == [3]
    small, steps = Tail(path), []
    while got := small.rows(most_bytes=1000):
        steps += [r["step"] for r in got]
    assert steps == [0, 1, 2, 3]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    assert [r["step"] for r in tail.rows()] == [0, 1]


def test_a_full_disk_leaves_whole_lines_and_a_clear_error(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write stops in the middle of a line."""
    path = tmp_path / "metrics.csv"
    code = f"""
    import resource, signal, sys
    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    from pathlib import Path
    from track.tracked_runs import SETS, rows
    from workbench.errors import StoreError
    from workbench.track.journal import Journal, columns
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = Journal(Path({str(path)!r}), columns(SETS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        for row in rows(100): journal.write(row)
    except StoreError as error:
        print(error, error.exit_code)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert "metrics.csv" in done.stdout, done.stderr
    assert "74" in done.stdout
    content = path.read_bytes()
    assert content.endswith(b"\n")
    assert len(content) < 2000
    steps = read_metrics(path)["step"]
    assert steps == list(range(len(steps)))
    assert len(steps) > 3


def with_fsync(patch: pytest.MonkeyPatch, path: Path, then: Callable[[], None]) -> None:
    """From now on `then` is called before this file is synced: what it raises, the disk says."""
    fsync = os.fsync

    def synced(handle: int) -> None:
        if os.fstat(handle).st_ino == path.stat().st_ino:
            then()
        fsync(handle)

    patch.setattr(os, "fsync", synced)


def test_a_row_does_not_wait_for_the_disk_and_a_sync_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, free, before_it = tmp_path / "metrics.csv", threading.Event(), set(threading.enumerate())
    journal = Journal(path, columns(SETS))
    asked: list[int] = []

    def slow() -> None:
        asked.append(path.stat().st_size)
        assert free.wait(20)

    with_fsync(monkeypatch, path, slow)
    for row in rows(50):  # returns although the disk does not answer
        journal.write(row)
    assert read_metrics(path)["step"] == list(range(50))
    deadline = time.monotonic() + 20
    while not asked:  # nobody has to ask for the sync
        assert time.monotonic() < deadline
        time.sleep(0.01)
    timer = threading.Timer(0.3, free.set)
    timer.start()
    before = time.monotonic()
    journal.sync()
    assert time.monotonic() - before > 0.2
    timer.join()
    assert asked[-1] == path.stat().st_size
    assert len(asked) < 50, "rows that come at once go to the disk together"
    journal.close()
    assert set(threading.enumerate()) <= before_it


@pytest.mark.parametrize("how", ["write", "sync"])
def test_rows_that_did_not_reach_the_disk_are_an_error_and_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "metrics.csv"
    journal = Journal(path, columns(SETS))
    journal.write(rows(1)[0])
    journal.sync()

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with_fsync(monkeypatch, path, full)

    def until_it_is_noticed() -> None:
        for step in range(1, 2000):
            journal.write(rows(1, first=step)[0])
            if how == "sync":
                journal.sync()
            time.sleep(0.01)

    with pytest.raises(StoreError, match=r"metrics\.csv.*no space left"):
        until_it_is_noticed()
    assert read_metrics(path)["step"] == [0]
    journal.close()
    assert read_metrics(path)["step"] == [0]


def test_a_kill_at_any_moment_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    code = f"""
    from pathlib import Path
    from workbench.track.journal import Journal, columns
    journal = Journal(Path({str(path)!r}), columns(["held_out"]))
    print(flush=True)
    for step in range(10**6):
        journal.write({{"step": step, "train/nll": 1 / (step + 3)}})
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    while len(path.read_bytes()) < 5000:
        assert process.poll() is None
    process.kill()
    process.wait()
    steps = read_metrics(path)["step"]
    assert steps == list(range(len(steps)))
    assert len(steps) > 5
