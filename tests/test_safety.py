"""What comes from outside stays outside: no path leads out of its folder, no secret gets in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import tiny_spec, untracked_run

from workbench.cli import _guarded
from workbench.errors import UserError
from workbench.json_files import parse_json, read_json
from workbench.run import RunOutcome
from workbench.spec.load import MOST_BYTES, load_spec
from workbench.track import ui as ui_module
from workbench.track.record import read_record
from workbench.track.store import Store

SECRET = "correct-horse-battery"
Wb = Callable[..., tuple[int, str]]


@pytest.fixture
def wb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Wb:
    monkeypatch.setenv("WB_HOME", str(tmp_path / "mlruns"))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["wb", *arguments])
        code = _guarded(list(arguments))
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


# -- JSON and YAML


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 1}', "stands twice"),
        ('{"b": [{"a": 1, "a": 2}]}', "stands twice"),
        ("[NaN]", "NaN"),
        ("[-Infinity]", "Infinity"),
        ("[1e999]", "too large"),
        ("[" + "9" * 400 + "]", "too large"),
        ('["\\ud800"]', "surrogates"),
        ("[" * 100_000, "too deeply"),
        ("9" * 5000, "too large"),
        ("\ufeff{}", "BOM"),
        ("{}{}", "Extra data"),
    ],
)
def test_json_is_strict(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text.encode())


def test_json_that_is_right_is_read_as_it_is() -> None:
    document = {"a": [1, 2.5, None, True, "😀 é"], "b": {"a": {}}, "Udine\\ud": 10**300}
    assert parse_json(json.dumps(document).encode()) == document


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(Path("/dev/zero"))
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="more than such a file"):
        read_json(tmp_path / "sparse.json")
    with pytest.raises(UserError, match="longer than a spec"):
        load_spec(Path("/dev/zero"))
    (tmp_path / "long.yaml").write_bytes(b"# " + b"x" * MOST_BYTES)
    with pytest.raises(UserError, match="longer than a spec"):
        load_spec(tmp_path / "long.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 2000 + "]" * 2000, "too deeply"),
        ("- " * 200 + "1", "too deeply"),
        ("seed: " + "9" * 5000, "too many digits"),
        ('notes: "\\ud800"', "surrogate"),
        ('notes: "a\\0b"', "null byte"),
        ('"a\\0b": 1', "null byte"),
        ('extends: ["a\\0b"]', "null byte"),
        ('notes: "\\U00110000"', "not YAML"),
        ("data: {dataset: {a: 1}}", "data.dataset"),
        ("data: {text_file: ~nobody-of-this-name/x}", "data.text_file: this user has no home"),
        ("data: {held_out: [{path: ~nobody-of-this-name/x}]}", "no home"),
    ],
)
def test_what_no_spec_holds_is_one_clear_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load_spec(tmp_path / "run.yaml")
    assert "run.yaml" in str(caught.value)


def test_specs_that_extend_one_another_without_end_are_refused(tmp_path: Path) -> None:
    """Each file extends the next one twice: 2 ** 30 reads."""
    for number in range(30):
        (tmp_path / f"{number}.yaml").write_text(f"extends: [{number + 1}.yaml, {number + 1}.yaml]")
    (tmp_path / "30.yaml").write_text("seed: 1")
    with pytest.raises(UserError, match="extends more than 100 files"):
        load_spec(tmp_path / "0.yaml")


def test_an_override_that_is_deeper_than_any_spec_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {dataset: random}")
    with pytest.raises(UserError, match="key=value"):
        load_spec(tmp_path / "run.yaml", ["a." * 10_000 + "b=1"])


# -- paths


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunOutcome:
    folder = tmp_path_factory.mktemp("finished")
    return untracked_run(tiny_spec(folder), Store(folder / "mlruns"))


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/b", "..", ".hidden"])
def test_a_name_cannot_lead_out_of_the_store(tmp_path: Path, wb: Wb, name: str) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_spec(tmp_path).model_dump_json())
    before = sorted(tmp_path.iterdir())
    for words in (
        ["run", str(path), f"name={name}"],
        ["run", str(path), f"name={name}", "--resume"],
    ):
        code, said = wb(*words)
        assert code == 2
        assert name in said
    for command in (["show"], ["verify"], ["sync"], ["compare", "x"]):
        assert wb(*command, name)[0] == 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/hostname", "a/b", ".."])
def test_a_manifest_names_only_files_of_its_checkpoint(
    finished: RunOutcome, tmp_path: Path, name: str
) -> None:
    import shutil

    from workbench.core.checkpoint import is_whole
    from workbench.core.restore import open_checkpoint

    (saved,) = finished.folder.glob("checkpoints/*")
    copy = Path(shutil.copytree(saved, tmp_path / "run/checkpoints/step_00000004"))
    (tmp_path / "run/outside.safetensors").write_bytes(b"x")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert not is_whole(copy)
    with pytest.raises(UserError, match="not whole"):
        open_checkpoint(copy)


def test_a_manifest_that_leaves_a_file_out_vouches_for_nothing(
    finished: RunOutcome, tmp_path: Path
) -> None:
    """A state without a hash would be believed as it stands there."""
    import shutil

    from workbench.core.restore import open_checkpoint

    (saved,) = finished.folder.glob("checkpoints/*")
    for name in ("state.json", "model.safetensors", "optimizer.safetensors"):
        copy = Path(shutil.copytree(saved, tmp_path / name / "step_00000004"))
        manifest = json.loads((copy / "manifest.json").read_text())
        del manifest["files"][name]
        (copy / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match="not whole"):
            open_checkpoint(copy)


def test_a_record_of_scores_elsewhere_reads_nothing_there(
    finished: RunOutcome, tmp_path: Path
) -> None:
    """What a record calls the file of its scores lies in the folder of the run."""
    record = json.loads((finished.folder / "run_config.json").read_text())
    added = {"name": "unproven.x", "step": 4, "tokens": 512, "when": "2026-01-01", "source": "x"}
    added |= {"sha256": "0" * 64, "checkpoint_sha256": "0" * 64, "values": {"unproven.x/nll": 1.0}}
    for scores in ("../../outside.parquet", "/etc/hostname"):
        record["results"]["additions"] = [added | {"scores": scores}]
        (tmp_path / "run_config.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match="scores"):
            read_record(tmp_path)
    record["results"]["additions"] = [added | {"scores": "evaluations/step_4.parquet"}]
    (tmp_path / "run_config.json").write_text(json.dumps(record))
    assert read_record(tmp_path).results.additions[0].scores == "evaluations/step_4.parquet"


@pytest.mark.parametrize("tags", [True, "a", ["a"], 1])
def test_tags_of_a_record_are_a_mapping(finished: RunOutcome, tmp_path: Path, tags: Any) -> None:
    record = json.loads((finished.folder / "run_config.json").read_text())
    record["spec"]["tracking"]["tags"] = tags
    (tmp_path / "run_config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"tracking\.tags"):
        read_record(tmp_path)


def test_a_table_whose_texts_are_no_text_is_a_clear_error(tmp_path: Path) -> None:
    """What pyarrow reads without a look at it, and stumbles over later."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from workbench.compare.scores import read_scores
    from workbench.compare.table import read_table
    from workbench.core.evaluate import SetScore, write_scores

    score = SetScore("held_out", ["ab" * 32] * 2, np.ones(2), np.ones(2, np.int64), None)
    path = tmp_path / "step_00000004.parquet"
    write_scores([score], path)
    table = parquet.ParquetFile(path).read()
    place = table.schema.get_field_index("document")
    damaged = pa.array([b"\xb4"] * 2, pa.binary()).view(pa.string())
    parquet.write_table(table.set_column(place, "document", damaged), path)
    with pytest.raises(UserError, match="not a table of document scores"):
        read_scores(path)
    (tmp_path / "metrics.csv").write_bytes(b"step,\xf4b\n0,1\n")
    with pytest.raises(UserError, match=r"metrics\.csv"):
        read_table(tmp_path / "metrics.csv")


# -- secrets


def test_a_secret_of_the_environment_is_nowhere(
    tmp_path: Path, wb: Wb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the notes, a tag, a name of the command: not in the record, checkpoint or what is said."""
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://ada:{SECRET}@127.0.0.1:1")
    monkeypatch.setenv("WB_MLFLOW_WAIT", "0")
    spec = tiny_spec(tmp_path, tracking={"tags": {"where": f"https://h/?q={SECRET}"}})
    path = tmp_path / "tiny.yaml"
    path.write_text(spec.model_dump_json())
    said = [
        wb("run", str(path), f"notes=see {SECRET}"),
        wb("show", "tiny"),
        wb("list"),
        wb("sync", "tiny"),
    ]
    assert [code for code, _ in said] == [0, 0, 0, 74]
    files = [one for one in (tmp_path / "mlruns").rglob("*") if one.is_file()]
    assert any(one.name == "state.json" for one in files)
    for one in files:
        assert SECRET.encode() not in one.read_bytes(), one
    assert SECRET not in "".join(text for _, text in said)


def test_an_error_or_its_traceback_shows_no_secret(
    tmp_path: Path, wb: Wb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    uri = f"training.steps=http://ada:hunter2@h/{SECRET}"
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_spec(tmp_path).model_dump_json())
    for options in ([], ["--json"], ["--debug"]):
        code, said = wb("run", str(path), uri, *options)
        assert code == 2
        assert "training.steps" in said
        assert SECRET not in said
        assert "hunter2" not in said


# -- the UI


class FakeServer:
    """Stands for MLflow's server, which answers at once and is stopped by Ctrl-C."""

    pid, returncode = 0, 0

    def wait(self, *_: object) -> int:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("host", "is_told"), [(None, False), ("localhost", False), ("0.0.0.0", True)]
)
def test_only_loopback_is_listened_on_unless_told_which_is_then_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str | None, is_told: bool
) -> None:
    """What is started with which address; that the server keeps to it is in test_ui.py."""
    import contextlib

    started: list[str] = []

    def start(store: Store, host: str, port: int, log: object) -> FakeServer:
        started.append(host)
        return FakeServer()

    monkeypatch.setattr(ui_module, "_start", start)
    monkeypatch.setattr(ui_module, "_stop", lambda server: None)
    monkeypatch.setattr(ui_module, "_wait_until_it_answers", lambda *_: None)
    monkeypatch.setattr(ui_module, "_experiment_id", lambda *_: "1")
    monkeypatch.setattr(ui_module, "store_database", lambda store: contextlib.nullcontext())
    said: list[str] = []
    options: dict[str, Any] = {} if host is None else {"host": host}
    assert ui_module.ui(Store(tmp_path), port=0, say=said.append, **options) == 0
    assert started == [host or "127.0.0.1"]
    warned = [line for line in said if "whoever reaches this machine can read and change" in line]
    assert bool(warned) == is_told


@pytest.mark.slow
def test_told_to_it_listens_on_every_address_and_says_so(tmp_path: Path) -> None:
    code = (
        "import sys; from workbench.track.store import Store; from workbench.track.ui import ui\n"
        f"ui(Store({str(tmp_path / 'mlruns')!r}), '0.0.0.0', 0, say=lambda t: print(t, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split(":")[2].partition("/")[0])
        assert "whoever reaches this machine" in process.stdout.readline()
        own = socket.gethostbyname(socket.gethostname())
        with socket.create_connection((own, port), timeout=10):
            pass
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert os.WIFEXITED(process.returncode) or process.returncode
