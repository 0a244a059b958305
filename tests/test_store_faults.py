"""Stores that fail while they are used: a disk that fills or may not be written, another owner, a
clock that is set back. The disks are real ones, small and seen by one process alone."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from full_disks import on_a_disk_of
from tiny_runs import tiny_parts, tiny_spec, untracked_run

from workbench import recorder as recorder_module
from workbench import run as runner
from workbench.core.footprint import checkpoint_bytes, whole_weights_bytes
from workbench.errors import StoreError
from workbench.room import OTHER_BYTES, require_room
from workbench.run import RunOutcome
from workbench.track import journal as journal_module
from workbench.track.events import NullTracker, Values
from workbench.track.journal import read_metrics
from workbench.track.record import read_record
from workbench.track.reserve import LEAST_BYTES, Reserve
from workbench.track.store import Store

# In a process that sees a small disk at {disk}: trains there, and prints how each run ended.
ON_A_SMALL_DISK = """
import contextlib, io, json, os, shutil, signal, sys
from pathlib import Path
from tiny_runs import tiny_spec
from workbench import run as runner
from workbench.cli import _guarded
from workbench.core.checkpoint import checkpoints
from workbench.core.restore import open_checkpoint
from workbench.track.events import NullTracker
from workbench.track.journal import read_metrics
from workbench.track.record import read_record

disk = Path({disk!r})
SMALL = dict(hidden_size=32, num_hidden_layers=1)
filler = disk / "filler"

def fill(left):
    # Whatever else is on the disk, so many bytes are free after it.
    stat = os.statvfs(disk)
    size = stat.f_bavail * stat.f_frsize - left
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)

class Filling(NullTracker):
    def __init__(self, step, left):
        self.step, self.left = step, left
    def log(self, values):
        if values["step"] == self.step:
            fill(self.left)

def attempt(name, tracker, **changes):
    os.environ["WB_HOME"] = str(disk / name)
    runner.tracker_for = lambda spec, store: tracker
    spec = disk / f"{{name}}.yaml"
    spec.write_text(tiny_spec(disk, name, model=SMALL, **changes).model_dump_json())
    words = ["run", str(spec), "--json"]
    sys.argv = ["wb", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _guarded(words)
    filler.unlink(missing_ok=True)
    folder = disk / name / "runs" / name
    found = {{"code": code, "out": out.getvalue(), "err": err.getvalue()[-2000:]}}
    if (folder / "run_config.json").exists():
        record = read_record(folder)
        kept = checkpoints(folder / "checkpoints")
        for one in kept:
            open_checkpoint(one)
        found |= {{
            "status": record.status,
            "error": record.error,
            "steps": read_metrics(folder / "metrics.csv")["step"],
            "points": [point.step for point in record.points],
            "kept": [path.name for path in kept],
            "there": sorted(path.name for path in folder.glob("checkpoints/*")),
            "hidden": sorted(str(p.relative_to(folder)) for p in folder.rglob(".*")),
            "scores": sorted(path.name for path in folder.glob("evaluations/*")),
        }}
    return found

found = {{}}
"""
CHECKPOINT = """
found["checkpoint"] = attempt(
    "checkpoint", Filling(3, 60_000), checkpoint={"save_steps": 2}, evaluation={"eval_steps": 0}
)
fill(100_000)
found["none"] = attempt("none", NullTracker())
"""
OTHERS = """
found["metrics"] = attempt(
    "metrics", Filling(3, 0), training={"steps": 60}, evaluation={"eval_steps": 0}
)
found["scores"] = attempt("scores", Filling(3, 0), evaluation={"eval_steps": 4})
found["record"] = attempt("record", Filling(3, 12_288), evaluation={"eval_steps": 4})
"""
MOUNT = pytest.mark.skipif(
    subprocess.run(
        ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "-m", "true"],
        capture_output=True,
        check=False,
    ).returncode
    != 0,
    reason="no disk of one's own can be mounted here; test_full_disk.py has limits in its place",
)


def ended(disk: Path, scenario: str, size: str = "8m") -> dict[str, Any]:
    """How the runs of a scenario ended."""
    disk.mkdir()
    code = ON_A_SMALL_DISK.format(disk=str(disk)) + scenario + "\nprint(json.dumps(found))"
    done = on_a_disk_of(size, code, disk)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_told(found: dict[str, Any], what: str) -> None:
    """Exit 74, the file, and how much is missing: on the console and in the record."""
    assert found["code"] == 74, found
    error = json.loads(found["out"])["error"]
    for said in (f"{error['place']}: {error['message']}", found["error"]):
        assert what in said
        assert "no space left on device" in said.lower()
        need, free, more = (
            int(number.replace(",", ""))
            for number in re.search(
                r"needs ([\d,]+) bytes, ([\d,]+) are free, at least ([\d,]+) more", said
            ).groups()  # type: ignore[union-attr]
        )
        assert more == max(need - free, 1)
    assert found["status"] == "FAILED"
    assert found["hidden"] == [".lock"]
    assert found["steps"] == sorted(found["steps"])


@MOUNT
@pytest.mark.slow
def test_a_disk_that_fills_during_a_save_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    found = ended(tmp_path / "disk", CHECKPOINT)
    one = found["checkpoint"]
    assert_told(one, "step_00000004")
    assert one["kept"] == one["there"] == ["step_00000002"]
    assert one["steps"] == [0, 1, 2, 3, 4]
    # And one without room for any checkpoint does not begin.
    assert found["none"]["code"] == 74
    assert "no room for a checkpoint: it needs" in found["none"]["out"]
    assert "status" not in found["none"]


@MOUNT
@pytest.mark.slow
def test_a_disk_that_fills_at_any_other_time_ends_the_run_as_failed(tmp_path: Path) -> None:
    found = ended(tmp_path / "disk", OTHERS)
    for name, what in (
        ("metrics", "metrics.csv"),
        ("scores", ".parquet"),
        ("record", "run_config"),
    ):
        assert_told(found[name], what)
        assert set(found[name]["points"]) <= set(found[name]["steps"])
    assert found["metrics"]["steps"][:4] == [0, 1, 2, 3]
    assert found["scores"]["scores"] == ["step_00000000.parquet"]


READ_ONLY = """
import contextlib, io, json, os, subprocess, sys
from pathlib import Path
from tiny_runs import tiny_spec, untracked_run
from workbench.cli import _guarded
from workbench.track.store import Store

disk, found = Path({disk!r}), {{}}
store = Store(disk / "mlruns")
for name, rate in (("one", 3e-3), ("two", 1e-3)):
    untracked_run(tiny_spec(disk, name, optimizer={{"lr": rate}}), store)
spec = disk / "new.yaml"
spec.write_text(tiny_spec(disk, "new").model_dump_json())
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
os.environ["WB_HOME"] = str(store.home)
for words in (
    ["list"], ["show", "one"], ["run", str(spec)], ["run", str(spec), "name=one", "--resume"],
    ["compare", "one", "two", "--treatment", "optimizer.lr"], ["sync", "one"], ["verify", "one"],
):
    sys.argv = ["wb", *words, "--json"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _guarded([*words, "--json"])
    found[" ".join(w for w in words if "/" not in w)] = code, out.getvalue(), err.getvalue()[-900:]
print(json.dumps(found))
"""


@MOUNT
@pytest.mark.slow
def test_a_read_only_store_is_read_and_whatever_writes_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = on_a_disk_of("16m", READ_ONLY.format(disk=str(disk)), disk)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    codes = {command: code for command, (code, _, _) in found.items()}
    assert codes.pop("list") == codes.pop("show one") == codes.pop("verify one") == 0, found
    assert set(codes.values()) == {74}, found
    for command in codes:
        _, out, err = found[command]
        assert "read-only file system" in (out + err).lower(), command
        assert "Traceback" not in err


AS_ANOTHER = """
import contextlib, io, json, os, sys
os.environ["WB_HOME"] = {home!r}
from workbench.cli import _guarded
found = {{}}
for words in (["list"], ["show", "tiny"], ["run", {spec!r}], ["sync", "tiny"]):
    sys.argv = ["wb", *words, "--json"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _guarded([*words, "--json"])
    found[words[0]] = code, out.getvalue() + err.getvalue()[-900:]
print(json.dumps(found))
"""
NOBODY = 65534
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2


def as_another(home: Path, spec: Path) -> dict[str, Any]:
    """What the commands answer to somebody who does not own the store."""
    libc = ctypes.CDLL(None, use_errno=True)

    def become() -> None:
        """Root without the right to pass over the modes of files is like anybody."""
        if os.geteuid() == 0:
            for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
                assert libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0

    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER.format(home=str(home), spec=str(spec))],
        preexec_fn=become,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=home.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def shared(tmp_path: Path) -> Any:
    """A run in a store, a spec of another one, and the way to give the store away."""
    outcome = untracked_run(tiny_spec(tmp_path), Store(tmp_path / "mlruns"))
    spec = tmp_path / "new.yaml"
    spec.write_text(tiny_spec(tmp_path, "new").model_dump_json())
    home = tmp_path / "mlruns"

    def give_away(folders: int, files: int) -> None:
        for path in [*sorted(home.rglob("*"), reverse=True), home]:
            path.chmod(folders if path.is_dir() else files)
            if os.geteuid() == 0:
                os.chown(path, NOBODY, NOBODY)

    yield outcome, spec, give_away
    home.chmod(0o755)
    for path in home.rglob("*"):
        path.chmod(0o755)


@pytest.mark.slow
def test_a_store_of_another_user_is_read_where_it_may_be(shared: Any) -> None:
    outcome, spec, give_away = shared
    give_away(0o555, 0o444)
    found = as_another(outcome.folder.parents[1], spec)
    assert found["list"][0] == found["show"][0] == 0, found
    for command in ("run", "sync"):
        code, said = found[command]
        assert code == 74, said
        assert "permission denied" in said
        assert "WB_HOME" in said or command == "sync"
    give_away(0o000, 0o000)
    found = as_another(outcome.folder.parents[1], spec)
    for code, said in found.values():
        assert code == 74, said
        assert "permission denied" in said.lower()
        assert "Traceback" not in said


class SetBack(NullTracker):
    """Sets the clock back by a day when the row of a step has been written."""

    def __init__(self, step: int, patch: pytest.MonkeyPatch) -> None:
        self._step, self._patch = step, patch

    def log(self, values: Values) -> None:
        if values["step"] == self._step:
            time, now = journal_module.time.time, recorder_module.now
            yesterday = datetime.now(UTC) - timedelta(days=1)
            assert now()
            self._patch.setattr(journal_module.time, "time", lambda: time() - 86_400)
            self._patch.setattr(recorder_module, "now", yesterday.isoformat)


def test_a_clock_that_is_set_back_turns_nothing_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runner, "tracker_for", lambda spec, store: SetBack(2, patch))
        outcome = runner.run(tiny_spec(tmp_path), Store(tmp_path / "mlruns"), ["run"], quiet=True)
    record = read_record(outcome.folder)
    assert record.ended is not None
    assert record.ended >= record.started
    assert (record.results.seconds or -1) > 0
    assert (record.results.tokens_per_s or 1) > 0
    times = read_metrics(outcome.folder / "metrics.csv")["unix_time"]
    assert times == sorted(times, key=lambda t: t or 0)
    assert times[-1] == times[2]
    assert all((s or 0) >= 0 for s in read_metrics(outcome.folder / "metrics.csv")["step_seconds"])


# -- room


def test_a_run_whose_checkpoints_do_not_fit_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = tiny_spec(tmp_path), Store(tmp_path / "not/there/yet")
    one = checkpoint_bytes(spec, 257)
    said: list[str] = []

    def with_free(free: int) -> None:
        usage = lambda path: type("Usage", (), {"free": free})  # noqa: E731
        monkeypatch.setattr("workbench.room.shutil.disk_usage", usage)
        require_room(spec, 257, 4, store, said.append)

    with_free(3 * one + OTHER_BYTES)
    assert said == []
    with_free(3 * one + OTHER_BYTES - 1)
    assert "up to 3 will be there" in said[0]
    with pytest.raises(StoreError, match=r"at least 1 more are needed") as caught:
        with_free(one + OTHER_BYTES - 1)
    assert caught.value.exit_code == 74


def test_the_weights_in_one_file_that_processes_add_to_the_last_checkpoint_need_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = tiny_spec(tmp_path), Store(tmp_path)
    one, weights = checkpoint_bytes(spec, 257), whole_weights_bytes(spec, 257)
    said: list[str] = []

    def with_free(free: int, steps: int) -> None:
        usage = lambda path: type("Usage", (), {"free": free})  # noqa: E731
        monkeypatch.setattr("workbench.room.shutil.disk_usage", usage)
        require_room(spec, 257, steps, store, said.append, in_parts=True)

    with_free(3 * one + weights + OTHER_BYTES, 4)
    assert said == []
    with_free(3 * one + weights + OTHER_BYTES - 1, 4)
    assert f"the last with {weights:,} more" in said[0]
    with_free(one + weights + OTHER_BYTES, 1)  # it saves once, at its end
    with pytest.raises(StoreError, match=r"at least 1 more are needed"):
        with_free(one + weights + OTHER_BYTES - 1, 1)


def test_the_size_that_is_foreseen_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    from workbench.core.checkpoint import save_checkpoint
    from workbench.core.train import train

    parts = tiny_parts(tmp_path)
    next(train(parts.spec, parts.state))
    saved = save_checkpoint(parts.state, tmp_path / "c", {}, keep=1)
    size = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    foreseen = checkpoint_bytes(parts.spec, parts.data.tokenizer.vocab_size)
    assert foreseen <= size < foreseen + 100_000


def test_a_reserve_takes_room_and_gives_it_back_once(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path, 10)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks * 512 >= LEAST_BYTES
    assert reserve.release()
    assert not reserve.release()
    assert list(tmp_path.iterdir()) == []
    assert not Reserve(tmp_path / "nowhere", 10).release()


def test_an_outcome_is_what_its_record_says(tmp_path: Path) -> None:
    """No reserve stays behind a run, however it ended."""
    outcome: RunOutcome = untracked_run(tiny_spec(tmp_path), Store(tmp_path / "mlruns"))
    assert [p.name for p in outcome.folder.rglob(".*")] == [".lock"]
