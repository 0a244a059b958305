"""What README and docs name exists: commands with their options, make targets, files, links, names.

The commands are parsed, not run: that takes no time, and a renamed option is found the same.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from workbench.commands import _rewritten, app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs" / "notebook.py"]
LINKED = [*(page for page in PAGES if page.suffix == ".md"), ROOT / "CHANGELOG.md"]
LINKED += [ROOT / "reports" / "README.md", ROOT / "mlruns" / "README.md"]
WB = re.compile(r"^(?:\.venv/bin/)?wb\s+")
TORCHRUN = re.compile(r"^torchrun\s.*-m workbench\s+")
FOLDERS = ("experiments/", "configs/", "docs/", "reports/", "tests/", "workbench/")
COMMAND: Any = typer.main.get_command(app)


def code_lines(text: str) -> Iterator[str]:
    """Every line of a block of code: fenced, or set in by four spaces."""
    fenced = False
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith(("    ", "#     ")):
            yield line.removeprefix("# ").strip()


def spans(text: str) -> list[str]:
    """Every code span outside of blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("    "))
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def arguments_of(line: str) -> list[str] | None:
    """The arguments of `wb` in a line; None: it is no call of `wb`."""
    for pattern in (WB, TORCHRUN):
        if found := pattern.match(line):
            rest = re.split(r"\s+(?:&&|\|\||[|>;])\s", line[found.end() :])[0]
            return shlex.split(rest, comments=True)
    return None


def problem(arguments: list[str], *, whole: bool) -> str | None:
    """Why `wb` would not take the arguments; None: it would.

    Args:
        whole: whether they are a call as it stands, and not a mention or a synopsis, in which
            arguments may be left out, and words stand for numbers.
    """
    if not whole:
        words = (word.strip("[]") for word in arguments)
        arguments = [word for word in words if word not in ("...", "")]
        arguments = [word.removesuffix("...") for word in arguments]
        flags = {name for one in _parameters(COMMAND) if one.is_flag for name in one.opts}
        if arguments and arguments[-1].startswith("--") and arguments[-1] not in flags:
            arguments.append("VALUE")  # which an option that is only mentioned goes without
    command, context, name = COMMAND, None, "wb"
    rest = _rewritten(arguments)
    try:
        while hasattr(command, "commands"):
            # Parsed alone: options of the whole program act at once where they are taken.
            context = command.context_class(command, info_name=name, parent=context)
            taken, words, _ = command.make_parser(context).parse_args(args=list(rest))
            if not words and (taken or not whole):
                return None
            name, command, rest = command.resolve_command(context, words)
        if "--help" in rest:
            return None
        if whole:
            command.make_context(name, list(rest), parent=context)
        else:
            context = command.context_class(command, info_name=name, parent=context)
            command.make_parser(context).parse_args(args=list(rest))
    except Exception as error:
        return getattr(error, "message", None) or str(error) or type(error).__name__
    return None


def _parameters(command: Any) -> Iterator[Any]:
    """The options of a command and of all below it."""
    yield from (one for one in command.params if one.param_type_name == "option")
    for below in getattr(command, "commands", {}).values():
        yield from _parameters(below)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_that_wb_takes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = {}
    for line in code_lines(text):
        if (arguments := arguments_of(line)) is not None:
            synopsis = "[" in line or "..." in line
            if why := problem(arguments, whole=not synopsis):
                wrong[line] = why
    for span in spans(text):
        if (arguments := arguments_of(span)) is not None and (
            why := problem(arguments, whole=False)
        ):
            wrong[span] = why
    assert not wrong


def test_the_pages_name_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = [arguments for span in spans(text) if (arguments := arguments_of(span))]
    assert {words[0] for words in named} >= set(COMMAND.commands)


@pytest.mark.parametrize(
    "line",
    [
        "wb run spec.yaml --no-such-option",
        "wb runn spec.yaml",
        "wb study chek plan.yaml",
        "wb compare a b --att 5",
        "wb run spec.yaml --nproc many",
        "wb eval",
        "torchrun --nproc-per-node 2 -m workbench rn spec.yaml",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    arguments = arguments_of(line)
    assert arguments is not None
    assert problem(arguments, whole=True)
    if "many" not in line and line != "wb eval":
        assert problem(arguments, whole=False)


def test_calls_and_synopses_are_read_as_they_are_meant() -> None:
    for line in (
        "wb run spec.yaml a.b=1 c=2   # a comment",
        ".venv/bin/wb compare --a x y --b z w --names p,q",
        "wb run spec.yaml --resume",
        "wb list --json | jq .runs > runs.json",
    ):
        arguments = arguments_of(line)
        assert arguments is not None
        assert problem(arguments, whole=True) is None
    for line in ("wb run SPEC [key=value ...] --nproc N", "wb compare", "wb study"):
        arguments = arguments_of(line)
        assert arguments is not None
        assert problem(arguments, whole=False) is None


def targets(text: str) -> set[str]:
    """The targets of every `make X` in blocks and spans."""
    found = [*code_lines(text), *spans(text)]
    return {match[1] for line in found if (match := re.match(r"make ([a-z][\w-]*)", line))}


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_every_make_target_is_one_that_make_knows() -> None:
    named = set.union(*(targets(page.read_text(encoding="utf-8")) for page in PAGES))
    assert {"run", "test", "test-all", "check"} <= named
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named |= set(re.findall(r"make ([a-z][\w-]*)", makefile))
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony
    assert named - {"test"} <= {*phony[1].split()}, "not all of these are targets"
    for target in [*sorted(named), "no-such-target"]:
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == (target != "no-such-target"), done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_repository_that_are_named_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    words = [word for line in (*code_lines(text), *spans(text)) for word in line.split()]
    named = {word.strip("',;:()") for word in words if word.startswith(FOLDERS)}
    named = {word for word in named if not set(word) & set("<>*{}$")}
    missing = {word for word in named if not (ROOT / word.partition("::")[0]).exists()}
    if page.name == "tutorial.md":  # of the project that it makes
        missing = {word for word in missing if not word.startswith("reports/")}
    assert not missing


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_link_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"(?<!\\)\]\(([^)\s]+)\)", prose):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", [p for p in PAGES if p.suffix == ".md"], ids=lambda p: p.name)
def test_python_shown_imports_what_there_is(page: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    lines = [line for line in code_lines(page.read_text("utf-8")) if line.startswith("from workb")]
    for source in (*blocks, *lines):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("workbench"):
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, alias.name) for alias in node.names)


def test_every_page_is_linked_from_the_readme_and_built() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    assert {page.stem for page in PAGES[1:] if page.suffix == ".md"} <= {"index", *listed}
    generated = {"index.md", "api.md", "spec.md"}  # of the pages that `make docs` builds
    for page in PAGES[1:]:
        assert page.name in generated or f"](docs/{page.name})" in text, page.name
