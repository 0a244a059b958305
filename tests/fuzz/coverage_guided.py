"""A fuzzer that follows the coverage of a reader: `python coverage_guided.py READER [OPTIONS]`.

It changes the choices of `damage`, and keeps those that reach new lines of the package. Stops at
the first input that is no clean error, with its traceback. Options are those of libFuzzer, such as
`-max_total_time=60`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import atheris

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

with atheris.instrument_imports(include=["workbench"]):
    from readers import READERS, Case


class Choices:
    """A source of choices that reads the fuzzer's bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = atheris.FuzzedDataProvider(data)

    def randint(self, a: int, b: int) -> int:
        """A number from a to b."""
        return int(self._data.ConsumeIntInRange(a, b))

    def choice(self, seq: Sequence[Any]) -> Any:
        """One of a sequence."""
        return seq[self.randint(0, len(seq) - 1)]


def main(arguments: list[str]) -> None:
    """Fuzzes the reader that the first argument names."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(READERS[arguments[1]], Path(folder))

        def one(data: bytes) -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                case.try_one(Choices(data))

        atheris.Setup([arguments[0], *arguments[2:]], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
