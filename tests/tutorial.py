"""Runs docs/tutorial.md as a newcomer would: every command, in a fresh copy of the sources.

`python tests/tutorial.py` does so and prints how long each section took, as Markdown; with `--json
FILE` the same as data. Nothing of this environment is used but Python, git and the package index.

Blocks of the tutorial: `sh` is run by bash, with `set -e`; `exit=N` after it says how it ends where
that is not 0. `text` is what the block before prints on standard output: words as they stand, `...`
for anything, whole numbers exactly, decimals within what another processor makes of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
MINUTES = 30
_DECIMAL = re.compile(r"[-+]?\d[\d,]*\.\d+")
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Which settings a newcomer's shell has not, by how they begin.
_OURS = ("PYTHON", "VIRTUAL_ENV", "WB_", "MLFLOW_", "GIT_", "OMP_", "GOMP_", "PYTEST_", "COVERAGE_")


@dataclass(frozen=True)
class Block:
    """Commands of one section, how they end, and what they print where that is shown."""

    section: str
    commands: str
    exit_code: int
    expected: str | None


@dataclass(frozen=True)
class Done:
    """A block that was run: its wall time in seconds, and what it printed."""

    block: Block
    seconds: float
    printed: str


class TutorialError(AssertionError):
    """A command did not end, or print, as the tutorial says."""


def blocks(text: str) -> list[Block]:
    """The blocks of commands, each with the output shown after it.

    Raises:
        ValueError: an output stands after no command, or a block is of no known kind.
    """
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        kind, options, body = match.groups()
        section = re.findall(r"^## (.+)$", text[: match.start()], re.MULTILINE)[-1]
        if kind == "sh":
            ends = re.fullmatch(r"\s*(?:exit=(\d+))?\s*", options)
            if ends is None:
                raise ValueError(f"options that are not known: {options}")
            found.append(Block(section, body, int(ends[1] or 0), None))
        elif kind == "text" and found and found[-1].expected is None:
            last = found.pop()
            found.append(Block(last.section, last.commands, last.exit_code, body))
        else:
            raise ValueError(f"a block of kind {kind} does not belong here: {body[:60]}")
    return found


def difference(expected: str, printed: str) -> str | None:
    """Why what was printed is not what is shown; None where it is."""
    pattern, numbers = "", []
    for word in re.split(r"(\s+|\.\.\.)", expected.strip()):
        if word == "...":
            pattern += r"[\s\S]*?"
        elif word.isspace():
            pattern += r"\s+"
        else:
            last = 0
            for number in _DECIMAL.finditer(word):
                pattern += re.escape(word[last : number.start()]) + f"({_DECIMAL.pattern})"
                numbers.append(number.group())
                last = number.end()
            pattern += re.escape(word[last:])
    # What is left out may be nothing: the spaces around it are then one.
    pattern = pattern.replace(r"\s+[\s\S]*?\s+", r"\s[\s\S]*?")
    found = re.fullmatch(pattern, printed.strip())
    if found is None:
        return f"expected:\n{expected}\nprinted:\n{printed}"
    for shown, seen in zip(numbers, found.groups(), strict=True):
        a, b = (float(value.replace(",", "")) for value in (shown, seen))
        if abs(a - b) > max(0.05, 0.02 * abs(a)):
            return f"the tutorial shows {shown}, it is {seen}; printed:\n{printed}"
    return None


def run_block(block: Block, state: Path, folder: Path) -> Done:
    """Runs a block where the one before ended: in its folder, with its variables.

    Raises:
        TutorialError: it ends otherwise, or prints something else.
    """
    setup = f". {state}\n" if state.exists() else ""
    keep = f'trap \'export -p >{state}; printf "cd %q\\n" "$PWD" >>{state}\' EXIT\n'
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", f"{setup}{keep}set -e\n{block.commands}"],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=MINUTES * 60,
    )
    seconds = time.monotonic() - started
    if done.returncode != block.exit_code:
        said = f"ended with {done.returncode}:\n{block.commands}\n{done.stdout}\n{done.stderr}"
        raise TutorialError(said)
    if block.expected is not None and (why := difference(block.expected, done.stdout)):
        raise TutorialError(f"{block.commands}\n{why}\nstandard error:\n{done.stderr}")
    return Done(block, seconds, done.stdout)


def serve_block(block: Block, state: Path, folder: Path) -> Done:
    """Runs `wb ui` until its page answers, then ends it as Ctrl-C does.

    Raises:
        TutorialError: it shows no page, or does not end.
    """
    started = time.monotonic()
    server = subprocess.Popen(
        ["bash", "-c", f". {state}\nexec {block.commands}"],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        page = server.stdout.readline().strip()
        with urllib.request.urlopen(page, timeout=60) as answer:
            if b"<html" not in answer.read():
                raise TutorialError(f"{page} shows no page")
        server.send_signal(signal.SIGINT)
        if server.wait(60) != block.exit_code:
            raise TutorialError(f"{block.commands} ended with {server.returncode}")
    finally:
        server.kill()
        server.wait()
    return Done(block, time.monotonic() - started, page)


def run_tutorial(folder: Path) -> Iterator[Done]:
    """Runs every block below an empty folder, in which a copy of the sources is put first.

    Raises:
        TutorialError: a block ends otherwise than shown, or prints something else.
    """
    sources = folder / "workbench"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, sources / name)
    state = folder / "state.sh"
    for block in blocks(TUTORIAL.read_text(encoding="utf-8")):
        serves = block.commands.startswith("wb ui")
        yield (serve_block if serves else run_block)(block, state, sources)


def _environment() -> dict[str, str]:
    """That of a new shell, with a name for git: its Python is the one below this environment."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    here = Path(sys.prefix, "bin").resolve()
    found = [p for p in own.get("PATH", os.defpath).split(os.pathsep) if Path(p).resolve() != here]
    own["PATH"] = os.pathsep.join([str(Path(sys.base_prefix, "bin")), *found])
    who = {"NAME": "A Newcomer", "EMAIL": "newcomer@example.org"}
    own |= {f"GIT_{r}_{k}": v for r in ("AUTHOR", "COMMITTER") for k, v in who.items()}
    return own | {"GIT_CONFIG_GLOBAL": os.devnull}


def times(done: list[Done]) -> dict[str, float]:
    """Section -> seconds."""
    found: dict[str, float] = {}
    for one in done:
        found[one.block.section] = found.get(one.block.section, 0.0) + one.seconds
    return found


def table(seconds: dict[str, float]) -> str:
    """The times as a Markdown table, with their sum."""
    rows = [f"| {section} | {value:,.0f} |" for section, value in seconds.items()]
    total = f"| all of it, without reading | {sum(seconds.values()):,.0f} |"
    return "\n".join(["| section of the tutorial | seconds |", "| --- | ---: |", *rows, total])


def main() -> None:
    """Runs the tutorial and prints its times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the times there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wb-tutorial-") as folder:
        done = []
        for one in run_tutorial(Path(folder)):
            done.append(one)
            head = one.block.commands.splitlines()[0]
            print(f"{one.seconds:6.1f} s  {head}", file=sys.stderr, flush=True)
    print(table(times(done)))
    if asked.json:
        cores = len(os.sched_getaffinity(0))
        document = {"cores": cores, "seconds": times(done), "total": sum(times(done).values())}
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
