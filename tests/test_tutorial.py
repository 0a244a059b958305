"""Every command of docs/tutorial.md ends and prints as it says, all of them in half an hour."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import tutorial
from tutorial import Block, TutorialError, blocks, difference, run_block

SHOWN = """
dense: finished
  files      .../runs/dense
  result     held_out/nll 5.3465 (nats/token)
...
next: wb show dense
"""


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("dense: finished\n files /a b/runs/dense\n result held_out/nll 5.351 (nats/token)\n", ""),
        (
            "dense: failed\n files /x/runs/dense\n result held_out/nll 5.3465 (nats/token)",
            "printed",
        ),
        ("dense: finished\n files /x/runs/dense\n result held_out/nll 6.1 (nats/token)\n", "6.1"),
        (
            "dense: finished\n files /x/runs/other\n result held_out/nll 5.3465 (nats/token)",
            "printed",
        ),
    ],
)
def test_what_is_printed_must_be_what_is_shown(printed: str, said: str) -> None:
    for between in ("", "curve there\n"):
        found = difference(SHOWN, f"{printed}\n{between}next: wb show dense")
        assert (found is None) if not said else (found is not None and said in found)
    if not said:
        assert difference(SHOWN, printed + "\nnext: wb show routed")


def test_whole_numbers_are_exact() -> None:
    assert difference("2 of 24 documents", "2 of 24 documents") is None
    assert difference("2 of 24 documents", "2 of 25 documents")


def test_blocks_go_on_where_the_last_ended_and_a_wrong_end_is_seen(tmp_path: Path) -> None:
    text = "## One\n```sh\nmkdir a\ncd a\nexport x='1 2'\n```\n## Two\n"
    text += "```sh exit=3\necho $x in $PWD\nexit 3\n```\n```text\n1 2 in .../a\n```\n"
    first, second = blocks(text)
    assert (first.section, second.section, second.exit_code) == ("One", "Two", 3)
    state = tmp_path / "state.sh"
    run_block(first, state, tmp_path)
    assert run_block(second, state, tmp_path).printed.startswith("1 2 in /")
    for commands, code, expected in (("false", 0, None), ("true", 3, None), ("echo b", 0, "c")):
        with pytest.raises(TutorialError):
            run_block(Block("Three", commands, code, expected), state, tmp_path)
    with pytest.raises(ValueError, match="does not belong"):
        blocks("## A\n```text\nx\n```\n")


def test_a_newcomers_shell_has_python_and_nothing_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where git itself runs the tests, and where no `python3` is on the path."""
    for name in ("PYTHONPATH", "WB_HOME", "MLFLOW_TRACKING_URI", "GIT_DIR", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PATH", os.pathsep.join([f"{sys.prefix}/bin/", "/usr/bin", "/bin"]))
    said = 'python3 -c "import sys; print(sys.base_prefix, sys.version_info[:2])"\n'
    said += "env | cut -d= -f1 | sort\ngit init -q x && git -C x rev-parse --show-toplevel\n"
    printed = run_block(Block("One", said, 0, None), tmp_path / "state.sh", tmp_path).printed
    first, *names = printed.splitlines()
    assert first == f"{sys.base_prefix} {tuple(sys.version_info[:2])}"
    assert not {"PYTHONPATH", "WB_HOME", "MLFLOW_TRACKING_URI", "GIT_DIR"} & set(names)
    assert names[-1] == str(tmp_path / "x")


@pytest.mark.slow
def test_a_newcomer_gets_from_install_to_a_published_comparison(tmp_path: Path) -> None:
    done = list(tutorial.run_tutorial(tmp_path))
    assert len(done) == len(blocks(tutorial.TUTORIAL.read_text()))
    assert (tmp_path / "published.git").is_dir()
    seconds = tutorial.times(done)
    print(tutorial.table(seconds))
    assert sum(seconds.values()) < tutorial.MINUTES * 60
