"""The rules of the package's structure, read from its syntax trees: nothing is imported here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "workbench"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MOST_LINES = 450

# What the modules of a package may import of the others; within itself each may import all.
LAYERS: dict[str, set[str]] = {
    "workbench.spec": {"workbench.errors"},
    "workbench.core": {
        "workbench.spec",
        "workbench.errors",
        "workbench.json_files",
        "workbench.launched",
    },
    "workbench.track": {"workbench.spec", "workbench.errors", "workbench.json_files"},
    "workbench.compare": {
        "workbench.spec",
        "workbench.track.record",
        "workbench.track.journal",
        "workbench.track.position",
        "workbench.errors",
    },
    "workbench.study": {
        "workbench.spec",
        "workbench.core.schedules",
        "workbench.foresee",
        "workbench.plan",
        "workbench.track",
        "workbench.compare",
        "workbench.live",
        "workbench.errors",
    },
    "workbench.live": set(),
    "workbench.errors": set(),
    "workbench.json_files": set(),
    "workbench.launched": set(),
}


def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), str(MODULES[name]))


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, `from a import b` as `a.b`, however deep it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def modules_of(package: str) -> list[str]:
    return [name for name in MODULES if within(name, package)]


def third_parties(name: str) -> set[str]:
    return {imported.partition(".")[0] for imported in imports(tree_of(name))}


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_one_way(package: str) -> None:
    assert modules_of(package)
    for name in modules_of(package):
        for imported in imports(tree_of(name)):
            if within(imported, "workbench"):
                allowed = {package, *LAYERS[package]}
                assert any(within(imported, one) for one in allowed), f"{name} imports {imported}"


def test_only_one_module_knows_mlflow_and_not_before_it_needs_it() -> None:
    users = [name for name in MODULES if "mlflow" in third_parties(name)]
    assert users == ["workbench.track.mlflow_store"]
    assert not at_once(users[0]) & {"mlflow"}


@pytest.mark.parametrize(
    "package", ["workbench.spec", "workbench.compare", "workbench.foresee", "workbench.study"]
)
def test_specs_and_comparisons_need_neither_torch_nor_mlflow(package: str) -> None:
    for name in modules_of(package):
        assert not third_parties(name) & {"torch", "mlflow"}, name


def at_once(name: str) -> set[str]:
    """The packages that are loaded together with a module: imports outside functions, and not
    those for the type checker alone."""
    found: set[str] = set()
    pending: list[ast.AST] = list(tree_of(name).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {imported.partition(".")[0] for imported in imports(node)}
        pending += ast.iter_child_nodes(node)
    return found


def test_the_command_line_loads_nothing_heavy_by_itself() -> None:
    heavy = {"torch", "mlflow", "pandas", "matplotlib", "numpy", "pydantic", "scipy", "rich"}
    for name in ("cli", "commands", "eval_command", "study_commands", "answers"):
        assert not at_once(f"workbench.{name}") & heavy, name


@pytest.mark.parametrize("name", modules_of("workbench.core"))
def test_the_core_prints_nothing(name: str) -> None:
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("print", "sys.stdout.write"), node.lineno


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_its_job_in_its_first_line(name: str) -> None:
    tree = tree_of(name)
    if not tree.body:
        assert MODULES[name].name == "__init__.py"
        return
    first = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert re.fullmatch(r"[A-Z`].{10,}[.:]", first), f"{name}: {first!r}"


@pytest.mark.parametrize("name", MODULES)
def test_no_module_is_much_over_400_lines(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES
