"""Standard output and signals: full, closed or cut short, `wb` says so once and ends quietly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_spec, untracked_run

from workbench.track.record import read_record
from workbench.track.store import Store

# What a caller sees that is not an answer: the interpreter's own noise.
NOISE = ("Traceback", "Exception ignored", "Error in sys")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one run in it."""
    folder = tmp_path_factory.mktemp("output")
    untracked_run(tiny_spec(folder), Store(folder / "mlruns"))
    return folder / "mlruns"


def start(home: Path, code: str = "", *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """`wb` in a process of its own, after some code."""
    lines = [
        "import os, signal, sys, time",
        f"sys.argv = {['wb', *arguments]!r}",
        textwrap.dedent(code),
        "from workbench.cli import main",
        "main()",
    ]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-c", "\n".join(lines)]
    environment = {**os.environ, "WB_HOME": str(home)}
    return subprocess.Popen(command, text=True, env=environment, **options)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    assert not any(noise in err for noise in NOISE), err
    return process.returncode, out or "", err


@pytest.mark.parametrize(
    "arguments",
    [("list",), ("show", "tiny", "--json"), ("show", "nothing", "--json"), ("--help",)],
)
def test_a_full_standard_output_is_one_message(home: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        code, _, err = ended(start(home, "", *arguments, stdout=full))
    assert code == 74
    assert err == "error: standard output: no space left on device\n"


def test_a_run_that_cannot_print_its_end_has_ended_well(tmp_path: Path) -> None:
    untracked = """
    from workbench import run
    from workbench.track.events import NullTracker
    run.tracker_for = lambda spec, store: NullTracker()
    """
    spec = tmp_path / "tiny.yaml"
    spec.write_text(tiny_spec(tmp_path).model_dump_json())
    with Path("/dev/full").open("w") as full:
        process = start(tmp_path / "mlruns", untracked, "run", str(spec), stdout=full)
        code, _, err = ended(process)
    assert code == 74
    assert err.splitlines()[-1] == "error: standard output: no space left on device"
    assert read_record(tmp_path / "mlruns/runs/tiny").status == "FINISHED"


@pytest.mark.parametrize("arguments", [("list",), ("show", "tiny", "--json"), ("--help",)])
def test_a_reader_that_has_gone_is_no_error(home: Path, arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended(start(home, "", *arguments, stdout=writing)) == (141, "", "")
    finally:
        os.close(writing)


def test_a_closed_standard_output_is_said(home: Path) -> None:
    code, _, err = ended(start(home, "sys.stdout = None", "list"))
    assert (code, err) == (74, "error: standard output: it is closed\n")


def test_a_terminal_that_lacks_a_letter_is_no_error(tmp_path: Path) -> None:
    code = "import workbench.views as v; v.run_table = lambda rows: 'naïve'"
    environment = "sys.stdout.reconfigure(encoding='ascii')\n"
    assert ended(start(tmp_path, environment + code, "list")) == (0, "na\\xefve\n", "")


WHILE_LOADING = """
import workbench.spec.load as load
def slow(*_):
    os.kill(os.getpid(), {number})
    time.sleep(30)
load.load_spec = slow
"""
WHILE_IMPORTING = """
class Slow:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), {number})
            time.sleep(30)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize("moment", [WHILE_LOADING, WHILE_IMPORTING])
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_during_start_up_is_answered(
    tmp_path: Path, moment: str, number: int, said: str
) -> None:
    code = moment.format(number=int(number))
    arguments = ("run", "x.yaml")
    assert ended(start(tmp_path, code, *arguments)) == (128 + number, "", f"{said}\n")
    exit_code, out, err = ended(start(tmp_path, code, *arguments, "--json"))
    assert (exit_code, err) == (128 + number, f"{said}\n")
    assert json.loads(out) == {
        "error": {"place": "wb", "value": None, "allowed": None, "message": said}
    }


def test_a_signal_that_was_ignored_from_outside_stays_ignored(home: Path) -> None:
    code = """
    import workbench.views as v
    v.run_table = lambda rows: os.kill(os.getpid(), signal.SIGINT) or "went on"
    """
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    text = ignoring + textwrap.dedent(code)
    assert ended(start(home, text, "list")) == (0, "went on\n", "")
