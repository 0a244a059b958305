"""Trains small language models, and knows when two runs may be compared.

For notebooks and scripts: `from workbench import load_run, compare_runs, to_frame`; see
`workbench.notebook`. They are loaded when they are first asked for, so that `import workbench`
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.errors import UserError
    from workbench.notebook import (
        Run,
        Runs,
        compare_arms,
        compare_runs,
        load_run,
        load_runs,
        to_frame,
    )

__all__ = [
    "Run",
    "Runs",
    "UserError",
    "compare_arms",
    "compare_runs",
    "load_run",
    "load_runs",
    "to_frame",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "workbench.errors" if name == "UserError" else "workbench.notebook"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
