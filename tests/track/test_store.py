"""The store: one owner for each run folder, and a listing that survives what it finds."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from full_disks import largest_file
from track.tracked_runs import end_run, make_record, make_run

from workbench.errors import StoreError, UserError
from workbench.track.record import write_record
from workbench.track.store import Store, effective_status, is_locked, lock_run, release_run


def start(store: Store, name: str, then: str = "time.sleep(60)") -> subprocess.Popen[str]:
    """Another process that claims a run, says so, and goes on."""
    code = f"""
    import sys, time, os
    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    from track.tracked_runs import make_run
    from workbench.track.store import Store
    folder, record, journal = make_run(Store({str(store.home)!r}), {name!r}, 3)
    print("ready", flush=True)
    {then}
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_home_is_the_environment_then_the_nearest_parent_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "project" / "deep" / "inside"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert Store().home == inner / "mlruns"
    (tmp_path / "project" / "mlruns").mkdir()
    assert Store().home == tmp_path / "project" / "mlruns"
    monkeypatch.setenv("WB_HOME", "elsewhere")
    assert Store().home == inner / "elsewhere"


def test_a_name_is_claimed_once_and_the_error_says_what_to_do(store: Store) -> None:
    folder, record, _ = make_run(store, "first")
    with pytest.raises(UserError) as caught:
        store.create_run("first")
    assert "RUNNING" in str(caught.value)
    end_run(folder, record)
    before = (folder / "metrics.csv").read_bytes()
    with pytest.raises(UserError) as caught:
        store.create_run("first")
    assert "FINISHED" in str(caught.value)
    assert "first-2" in str(caught.value)
    assert (folder / "metrics.csv").read_bytes() == before


@pytest.mark.parametrize("name", ["../x", "..", ".", "a/b", "", ".hidden", "/etc", "a\n", "ä"])
def test_a_name_cannot_leave_the_store(store: Store, name: str) -> None:
    with pytest.raises(UserError):
        store.create_run(name)
    assert not store.runs.exists()


def test_a_killed_run_shows_as_died_and_a_living_one_as_running(store: Store) -> None:
    living, dead = start(store, "living"), start(store, "dead")
    try:
        assert {e.name: e.status for e in store.list_runs()} == {
            "living": "RUNNING",
            "dead": "RUNNING",
        }
        assert not lock_run(store.runs / "living")
        dead.kill()
        dead.wait()
        entries = {e.name: e for e in store.list_runs()}
        assert entries["living"].status == "RUNNING"
        assert entries["dead"].status == "KILLED"
        assert entries["dead"].died
        assert not entries["living"].died
        assert json.loads((store.runs / "dead" / "run_config.json").read_text())["status"] == (
            "RUNNING"
        )
    finally:
        for process in (living, dead):
            process.kill()
            process.wait()


def test_a_forked_worker_that_survives_does_not_keep_its_dead_parent_alive(store: Store) -> None:
    # The worker speaks itself: its parent may go on before it has let go of the lock.
    code = """if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)"""
    process = start(store, "parent", code)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        assert effective_status(store.runs / "parent") == "RUNNING"
        process.kill()
        process.wait()
        os.kill(worker, 0)  # it is still there
        assert effective_status(store.runs / "parent") == "KILLED"
    finally:
        os.kill(worker, signal.SIGKILL)


def test_of_many_processes_one_gets_the_name(store: Store) -> None:
    code = f"""
    import time
    from workbench.track.store import Store
    from workbench.errors import UserError
    while time.time() < {time.time() + 2.5}: pass
    try:
        Store({str(store.home)!r}).create_run("wanted")
        print("mine", flush=True)
        time.sleep(2)
    except UserError:
        print("taken")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    said = sorted(process.communicate()[0].strip() for process in processes)
    assert said == ["mine"] + ["taken"] * 5


def test_a_claim_that_ended_before_it_began_can_be_claimed_again(store: Store) -> None:
    folder = store.create_run("again")
    with pytest.raises(UserError, match="starting"):
        store.create_run("again")
    release_run(folder)
    assert store.create_run("again") == folder
    store.discard_run(folder)
    assert not folder.exists()
    assert store.list_runs() == []


def test_discard_keeps_a_run_that_has_a_record(store: Store) -> None:
    folder, _, _ = make_run(store)
    store.discard_run(folder)
    assert (folder / "metrics.csv").exists()


def test_a_listing_does_not_keep_a_run_from_starting(store: Store) -> None:
    folder = store.create_run("busy")
    release_run(folder)
    looking = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from pathlib import Path\nfrom workbench.track.store import is_locked\n"
            f"print(flush=True)\nwhile True: is_locked(Path({str(folder)!r}))",
        ],
        stdout=subprocess.PIPE,
    )
    assert looking.stdout is not None
    looking.stdout.readline()
    try:
        for _ in range(200):
            assert lock_run(folder)
            release_run(folder)
    finally:
        looking.kill()
        looking.wait()
    assert not is_locked(folder)


def test_runs_are_found_by_name_id_or_unique_beginning(store: Store) -> None:
    records = {}
    for name in ("alpha", "alphabet", "beta"):
        folder, record, _ = make_run(store, name, 1)
        end_run(folder, record)
        records[name] = record
    assert store.find_run("alpha").name == "alpha"  # exact, though another begins with it
    assert store.find_run("bet").name == "beta"  # no run id has a t in it
    assert store.find_run(records["beta"].id).name == "beta"
    assert store.find_run(records["alphabet"].id[:12]).name == "alphabet"
    with pytest.raises(UserError, match=r"alpha .*alphabet") as caught:
        store.find_run("al")
    assert "more than one" in str(caught.value)
    with pytest.raises(UserError, match="Did you mean 'beta'"):
        store.find_run("betta")
    with pytest.raises(UserError, match="no such run"):
        store.find_run("")


def test_the_listing_shows_damage_and_goes_on(store: Store) -> None:
    folder, record, _ = make_run(store, "good", 1)
    end_run(folder, record)
    damages = {
        "empty": b"",
        "cut": (folder / "run_config.json").read_bytes()[:200],
        "binary": b"\xff\xfe\x00",
        "list": b"[1, 2]",
        "other": b'{"name": "x"}',
        "deep": b"[" * 100_000,
    }
    for name, content in damages.items():
        (store.runs / name).mkdir()
        (store.runs / name / "run_config.json").write_bytes(content)
    (store.runs / "nothing").mkdir()
    (store.runs / "a file").write_text("not a run")
    entries = store.list_runs()
    assert [e.name for e in entries if e.fault is None] == ["good"]
    assert entries[0].name == "good"
    assert {e.name for e in entries if e.fault} == {*damages, "nothing"}
    assert store.find_run("good").record == record


def test_the_newest_run_comes_first(store: Store) -> None:
    for name, started in (("old", "2025"), ("new", "2026"), ("older", "2024")):
        record = make_record(name)
        record.started = f"{started}-01-01T00:00:00+00:00"
        write_record(record, store.create_run(name))
    assert [e.name for e in store.list_runs()] == ["new", "old", "older"]


def test_a_store_that_cannot_be_written_says_where_and_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for home, reason in ((tmp_path / "file", "not a directory"), (Path("/proc/wb"), "no such")):
        with pytest.raises(StoreError) as caught:
            Store(home).create_run("x")
        assert str(home) in str(caught.value)
        assert reason in str(caught.value)
        assert caught.value.exit_code == 74


def test_a_read_only_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the system's answer is put in its place."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    store.runs.mkdir(parents=True)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StoreError, match="read-only file system; WB_HOME") as caught:
        store.create_run("x")
    assert str(store.runs) in str(caught.value)


def test_a_claim_on_a_full_disk_still_holds(store: Store) -> None:
    """The lock needs no room; only the note of who has it does."""
    with largest_file(0):
        folder = store.create_run("x")
    assert is_locked(folder)
    with pytest.raises(UserError, match="starting"):
        store.create_run("x")


BEFORE_THE_RECORD = {"metrics.csv": "step,tokens\n", "source-12ab.diff": "+ x\n", ".tmp": "{"}


def test_the_folder_of_a_run_that_died_before_its_record_is_taken_again(store: Store) -> None:
    folder = store.runs / "early"
    folder.mkdir(parents=True)
    for name, text in BEFORE_THE_RECORD.items():
        (folder / name).write_text(text)
    assert store.create_run("early") == folder
    assert [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["metrics.csv", "notes.txt", "checkpoints"])
def test_what_is_worth_keeping_is_never_taken(store: Store, name: str) -> None:
    """A record that somebody removed does not make what was measured free to overwrite."""
    folder = store.runs / "early"
    folder.mkdir(parents=True)
    for each, text in BEFORE_THE_RECORD.items():
        (folder / each).write_text(text)
    if name == "checkpoints":
        (folder / name).mkdir()
    else:
        (folder / name).write_text("step,tokens\n1,128\n")
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(UserError, match="never overwritten"):
        store.create_run("early")
    assert set(before) <= {path.name for path in folder.iterdir()}
