"""The command line: exit codes, one voice for errors, one JSON document."""

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_disks import largest_file, tree
from tiny_runs import sections, tiny_spec, untracked_run

from workbench import run as runner
from workbench.cli import _guarded
from workbench.errors import out_of_memory
from workbench.track.events import NullTracker
from workbench.track.journal import read_metrics
from workbench.track.record import read_record, write_record
from workbench.track.store import Store, release_run

TINY = """\
model: {profile: custom, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
        num_key_value_heads: 1, intermediate_size: 16, shared_intermediate_size: 32}
tokenizer: {name: bytes}
data: {dataset: random}
training: {steps: 1, batch_size: 2, seq_len: 16}
"""
EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def wb(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "WB_HOME": str(home / "store")}
    command = [sys.executable, "-m", "workbench", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "arguments", [("frob",), ("list", "--bogus"), ("compare", "a"), ("compare", "a", "b", "--at=x")]
)
def test_a_wrong_call_is_exit_2_and_no_crash(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    plain = wb(tmp_path, *arguments)
    assert plain.returncode == 2
    assert "fault in wb" not in plain.stderr
    assert "Traceback" not in plain.stderr
    as_json = wb(tmp_path, *arguments, "--json")
    assert as_json.returncode == 2
    assert not json.loads(as_json.stdout)["error"]["message"].endswith(".")  # "; allowed" follows


def test_every_fault_of_a_spec_is_one_line(tmp_path: Path) -> None:
    spec = tmp_path / "bad.yaml"
    spec.write_text("data: {dataset: random}\nlr: 1\ntraining: {steps: 010}\n")
    done = wb(tmp_path, "run", str(spec))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 2
    assert not (tmp_path / "store" / "runs").exists()


def test_a_rank_is_one_only_where_there_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedulers and shells set RANK for reasons of their own."""
    monkeypatch.setenv("RANK", "one of them")
    assert wb(tmp_path, "frob").stderr.startswith("error: ")
    monkeypatch.setenv("RANK", "1")
    alone = wb(tmp_path, "frob", "--json")
    assert json.loads(alone.stdout)["error"]["message"]
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    of_two = wb(tmp_path, "frob", "--json")
    assert (of_two.stdout, of_two.stderr[:14]) == ("", "rank 1: error:")


def seconds(*command: str) -> float:
    """The best of five tries."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    return min(times)


def test_help_answers_at_once() -> None:
    # On a machine that is busy, or slow, a bare interpreter takes longer too.
    slowness = max(1.0, seconds("-c", "pass") / 0.03)
    assert seconds("-m", "workbench", "--help") < 0.5 * slowness


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["compare", "a"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['wb', *{arguments!r}]\n"
        "from workbench.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code in (0, 2)\n"
        "heavy = {'torch', 'mlflow', 'pandas', 'matplotlib', 'numpy', 'scipy', 'rich'}\n"
        # Typer itself takes pydantic for the options of a single command.
        "heavy |= {'pydantic'} if sys.argv[1] == '--help' else set()\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Finished runs `one`, `two` (the same with another learning rate), `other` (another seed); and
    `running`, which this process holds."""
    folder = tmp_path_factory.mktemp("runs")
    store = Store(folder / "mlruns")
    untracked_run(tiny_spec(folder, "one"), store)
    untracked_run(tiny_spec(folder, "two", optimizer={"lr": 1e-3}), store)
    untracked_run(tiny_spec(folder, "other", seed=43), store)
    running = store.create_run("running")
    record = read_record(store.runs / "one")
    record.id, record.name, record.status = "f" * 32, "running", "RUNNING"
    record.ended, record.effective.budget.finished = None, False
    write_record(record, running)
    shutil.copy(store.runs / "one" / "metrics.csv", running)
    yield store
    release_run(running)


class Console:
    """`wb` within this process, on a store."""

    def __init__(self, home: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.home, self._capture = home, capture

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WB_HOME", str(self.home))
            patch.setattr(runner, "tracker_for", lambda spec, store: NullTracker())
            self._capture.readouterr()
            code = _guarded(list(arguments))
        out, err = self._capture.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    def document(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """The exit code, and the one strict JSON document that standard output is."""

        def refuse(word: str) -> None:
            raise AssertionError(f"not strict JSON: {word}")

        code, out, _ = self(*arguments, "--json")
        document = json.loads(out, parse_constant=refuse)
        assert isinstance(document, dict)
        return code, document


@pytest.fixture
def console(runs: Store, capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(runs.home, capsys)


@pytest.fixture
def empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Console:
    """`wb` on a store that is not there yet."""
    return Console(tmp_path / "mlruns", capsys)


@pytest.mark.parametrize(
    ("change", "code", "rule"),
    [
        ("", 0, None),
        ("seed: 43", 3, "seeds"),
        ("training: {precision: fp32}", 3, "precision"),
        ("training: {steps: 200}", 3, "budget"),
        ("optimizer: {lr: 1e-4}", 3, "optimizer"),
        ("tokenizer: {name: bytes}", 3, "tokenizer"),
    ],
)
def test_the_100m_arms_are_comparable_but_for_what_is_changed(
    console: Console, tmp_path: Path, change: str, code: int, rule: str | None
) -> None:
    other = tmp_path / "dense.yaml"
    other.write_text(f"extends: [{EXPERIMENTS / '100m_mha_dense.yaml'}]\n{change}\n")
    arm = str(EXPERIMENTS / "100m_mha.yaml")
    found, document = console.document("check", arm, str(other), "--treatment", "model")
    assert found == code, document
    refusing = [e["rule"] for e in document["rules"] if e["effects"]["nll"] == "refuse"]
    assert refusing == ([rule] if rule else [])


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved(
    empty: Console, tmp_path: Path
) -> None:
    spec = tmp_path / "tiny.yaml"
    spec.write_text(TINY)
    decay = "optimizer.weight_decay=1e30"  # times the rate it is beyond float32
    code, out, err = empty("run", str(spec), "optimizer.lr=1e30", decay)
    assert code == 4, err
    assert "weights that are not finite" in err
    assert out == ""
    folder = empty.home / "runs" / "tiny"
    assert read_record(folder).status == "FAILED"
    assert not list(folder.glob("checkpoints/step_*"))


def spec_file(folder: Path, **changes: Any) -> str:
    """The tiny spec as a file."""
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(sections(folder, **changes)))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (("one", "two", "--treatment", "optimizer.lr"), 0, "comparable"),
        (("one", "two", "--treatment", "optimizer.lr", "--strict"), 0, "comparable"),
        (("one", "two"), 3, "refused"),
        (("one", "two", "--allow", "optimizer=a test"), 0, "flagged"),
        (("one", "two", "--allow", "optimizer=a test", "--strict"), 1, "flagged"),
        (("one", "other"), 3, "refused"),
    ],
)
def test_the_verdict_of_two_runs_is_the_exit_code(
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    verdict: str,
) -> None:
    got, document = console.document("compare", *arguments)
    assert (got, document["verdict"]) == (code, verdict)
    assert (document["results"] is None) == (verdict == "refused")
    assert Path(document["report"], "report.md").is_file()
    monkeypatch.setattr("workbench.compare.report.draw", lambda *_: {})
    got, out, err = console("compare", *arguments)
    assert got == code
    assert verdict in out.lower()
    # The runs of this store were followed by nobody.
    reason = "MLflow does not have this report: it does not have these runs yet."
    assert err == f"{reason} Later: wb sync {arguments[0]} {arguments[1]}\n"


def test_a_run_beside_itself_is_a_mistake(console: Console) -> None:
    code, document = console.document("compare", "one", "one")
    assert code == 2
    assert "same run twice" in document["error"]["message"]


def test_a_run_that_still_trains_is_no_side_of_a_comparison(console: Console) -> None:
    code, document = console.document("compare", "one", "running")
    assert code == 2
    assert "still going" in document["error"]["message"]
    assert document["error"]["place"].endswith("running")


def test_a_run_that_is_not_there_is_exit_2_with_those_that_are(console: Console) -> None:
    code, document = console.document("compare", "one", "twi")
    assert code == 2
    assert "Did you mean 'two'" in document["error"]["message"]


@pytest.mark.parametrize("given", ["seeds", "seeds=", "seeds= ", "=why", "nonsense=why"])
def test_an_override_without_rule_or_reason_is_exit_2(console: Console, given: str) -> None:
    before = tree(console.home)
    code, document = console.document("compare", "one", "other", "--allow", given)
    assert code == 2
    assert document["error"]["message"]
    assert tree(console.home) == before


def test_list_and_show_say_what_is_there(console: Console) -> None:
    code, document = console.document("list")
    assert code == 0
    statuses = {row["run"]: row["status"] for row in document["runs"]}
    ended = dict.fromkeys(("one", "two", "other"), "FINISHED")
    assert statuses == {**ended, "running": "RUNNING"}
    code, out, _ = console("list")
    assert code == 0
    assert all(name in out for name in statuses)
    code, document = console.document("show", "one")
    assert (code, document["status"], document["name"]) == (0, "FINISHED", "one")
    assert document["folder"] == str(console.home / "runs" / "one")
    code, out, _ = console("show", document["id"][:8])
    assert code == 0
    assert document["id"] in out
    assert f"{document['results']['final']['held_out/nll']:.6f}" in out


def test_numbers_that_are_not_finite_stay_strict_json(console: Console) -> None:
    folder = console.home / "runs" / "endless"
    shutil.copytree(console.home / "runs" / "two", folder)
    try:
        text = (folder / "run_config.json").read_text()
        record = read_record(folder)
        record.results.final["held_out/nll"] = float("nan")
        write_record(record, folder)
        assert text != (folder / "run_config.json").read_text()
        assert console.document("show", "endless")[1]["results"]["final"]["held_out/nll"] == "NaN"
        console.document("list")
    finally:
        shutil.rmtree(folder)


def test_a_store_without_runs_is_an_empty_list(empty: Console) -> None:
    assert empty.document("list") == (0, {"runs": []})
    assert empty("list")[0] == 0
    assert not empty.home.exists()


def test_a_run_answers_with_one_document(empty: Console, tmp_path: Path) -> None:
    code, document = empty.document("run", spec_file(tmp_path))
    assert (code, document["exit_code"], document["status"]) == (0, 0, "FINISHED")
    assert read_record(Path(document["folder"])).status == "FINISHED"
    assert Path(document["folder"], "curves.png").is_file()
    # The command to try next: a comparison, where one is worth it.
    code, out, _ = empty("run", spec_file(tmp_path), "seed=43")
    assert code == 0
    assert "show tiny-s43" in out
    code, out, _ = empty("run", spec_file(tmp_path), "name=gates", "model.qk_norm=false")
    assert code == 0
    assert "compare tiny gates" in out


@pytest.mark.parametrize("tokenizer", ["bytes", "o200k_base"])
def test_a_dry_run_writes_nothing(
    empty: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})  # what other tests have loaded
    path = spec_file(tmp_path, tokenizer={"name": tokenizer})
    before = tree(tmp_path)
    code, document = empty.document("run", path, "--dry-run")
    assert code == 0
    assert document["parameters"]["total"] > 0
    code, out, _ = empty("run", path, "--dry-run")
    assert code == 0
    assert "nothing was trained or written" in out
    assert tree(tmp_path) == before


def test_a_crash_is_exit_70_with_a_report(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("workbench.views.run_rows", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = console("list")
    assert (code, out) == (70, "")
    assert len(err.splitlines()) == 1
    assert "ZeroDivisionError: on purpose" in err
    (report,) = tmp_path.iterdir()
    assert str(report) in err
    assert report.read_text().startswith("wb list\n")
    assert "Traceback" in report.read_text()
    assert console.document("list")[0] == 70
    with largest_file(10):
        code, _, err = console("list")
    assert code == 70
    assert "no report could be written (file too large)" in err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 240. TiB"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_no_fault_of_the_program(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("workbench.views.run_rows", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = console("list")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: memory: there is too little of it here: {error}; allowed: ")
    assert not list(tmp_path.iterdir())


def test_memory_that_torch_and_numpy_cannot_have_is_told_as_such() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**55)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**55)
    for error in (of_torch.value, of_numpy.value):
        fault = out_of_memory(error)
        assert fault
        assert fault.place == "memory"
    assert out_of_memory(RuntimeError("another")) is None


def test_a_file_that_may_not_be_read_is_the_users_mistake(
    empty: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec_file(tmp_path)
    corpus = tmp_path / "corpus.txt"
    real = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == corpus:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    code, document = empty.document("run", path)
    assert code == 2
    assert document["error"]["place"] == str(corpus)
    assert "permission denied" in document["error"]["message"].lower()


def test_a_folder_that_may_not_be_entered_is_the_users_mistake(
    empty: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec_file(tmp_path)
    real = os.stat

    def refuse(name: Any, *arguments: Any, **options: Any) -> Any:
        if str(name) == str(tmp_path / "corpus.txt"):
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    code, document = empty.document("run", path)
    assert code == 2
    assert "corpus.txt" in document["error"]["place"] + str(document["error"]["value"])


READ_ONLY = (errno.EROFS, "Read-only file system")
NOT_ALLOWED = (errno.EACCES, "Permission denied")


@pytest.mark.parametrize("error", [READ_ONLY, NOT_ALLOWED])
@pytest.mark.parametrize("dataset", ["text", "random"])
def test_a_store_that_may_not_be_written_is_exit_74(
    empty: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: tuple[int, str],
    dataset: str,
) -> None:
    data = {} if dataset == "text" else {"dataset": "random"}
    path = spec_file(tmp_path, data=data)
    if dataset == "random":
        document = json.loads(Path(path).read_text())
        Path(path).write_text(json.dumps({**document, "data": data}))
    real = os.mkdir

    def refuse(name: Any, *arguments: Any, **options: Any) -> None:
        if Path(name).is_relative_to(empty.home):
            raise OSError(*error, str(name))
        real(name, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    code, document = empty.document("run", path)
    assert code == 74
    assert document["error"]["place"].startswith(str(empty.home))
    assert error[1].lower() in document["error"]["message"]
    assert "WB_HOME" in document["error"]["message"]
    code, _, err = empty("run", path)
    assert code == 74
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("room", [10, 3000])
def test_a_disk_without_room_for_the_text_is_exit_74(
    empty: Console, tmp_path: Path, room: int
) -> None:
    path = spec_file(tmp_path)
    with largest_file(room):
        code, document = empty.document("run", path)
    assert code == 74
    assert document["error"]["place"] == str(empty.home / "cache" / "corpus")
    assert not any(".tmp" in name for name in tree(empty.home))
    assert empty.document("list") == (0, {"runs": []})


def test_an_error_of_the_system_has_a_place(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("workbench.track.store.read_entry", fail)
    code, document = console.document("list")
    assert code == 74
    assert "track/store.py:" in document["error"]["place"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_runs_that_start_at_once_on_no_store_are_all_in_mlflow(tmp_path: Path, count: int) -> None:
    spec = spec_file(tmp_path)
    names = [f"run-{number}" for number in range(count)]
    environment = {**os.environ, "WB_HOME": str(tmp_path / "store")}
    command = [sys.executable, "-m", "workbench", "run", spec, "--json"]
    processes = [
        subprocess.Popen(
            [*command, f"name={name}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name in names
    ]
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert (process.returncode, err) == (0, "")
        assert json.loads(out)["status"] == "FINISHED"
    with sqlite3.connect(tmp_path / "store" / "mlflow.db") as database:
        found = database.execute("select name, status from runs order by name").fetchall()
        scores = database.execute("select value from latest_metrics where key = 'held_out/nll'")
        assert len(scores.fetchall()) == count
    assert found == [(name, "FINISHED") for name in names]
    for name in names:
        assert read_metrics(tmp_path / "store/runs" / name / "metrics.csv")["step"] == [
            0,
            1,
            2,
            3,
            4,
        ]


def test_a_seed_that_no_generator_takes_is_refused_before_a_run(console: Console) -> None:
    path = console.home.parent / "huge.yaml"
    path.write_text("data: {dataset: random}\nseed: 99999999999999999999999\n")
    code, document = console.document("run", str(path), "--dry-run")
    assert code == 2
    assert document["error"]["place"].endswith("seed")


@pytest.mark.parametrize(
    ("arguments", "place", "value", "allowed"),
    [
        ("frobnicate", "command line", "frobnicate", "run, "),
        ("study chekc", "command line", "chekc", "check, "),
        ("list --jso", "command line", "--jso", "see wb list --help"),
        ("list extra", "command line", "extra", "see wb list --help"),
        ("compare a b --at=x", "--at", "x", "see wb compare --help"),
        ("run a.yaml --nproc 0", "--nproc", "0", "see wb run --help"),
        ("study run a --launcher moon", "--launcher", "moon", "see wb study run --help"),
        ("run nowhere.yaml", "nowhere.yaml", "nowhere.yaml", "a YAML file"),
        ("study run nowhere.yaml", "nowhere.yaml", "nowhere.yaml", "a YAML file"),
        ("plan nowhere.yaml", "nowhere.yaml", "nowhere.yaml", "a YAML file"),
        ("show nowhere", "run", "nowhere", "a name"),
    ],
)
def test_an_error_names_the_value_and_what_is_allowed(
    empty: Console, arguments: str, place: str, value: str, allowed: str
) -> None:
    code, document = empty.document(*arguments.split())
    error = document["error"]
    assert code == 2
    assert (error["place"], error["value"]) == (place, value)
    assert allowed in error["allowed"]
    _, _, said = empty(*arguments.split())
    assert said.count(value) == 1 or place != value  # a path is not said twice
