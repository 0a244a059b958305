"""The journal `metrics.csv`: one complete line for each logged step, appended and synced.

A line is whole for whoever reads it, and for this process's death, when `write` returns. It reaches
the disk a moment later, and before anything that builds on it: see `Journal.sync`.

An empty cell is "not measured"; `nan` and `inf` are measured values. Numbers are written in the
shortest form that reads back as the same number, so that reading returns what was written.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from workbench.errors import UserError, reason_of, storing
from workbench.track.background_sync import BackgroundSync

Number = float | int
Row = dict[str, float | None]

# The columns of the runner that this package replaces, in its order.
ORIGINAL_COLUMNS = (
    "step",
    "train_loss",
    "train_ppl",
    "eval_loss",
    "eval_ppl",
    "lr",
    "shared_lr",
    "expert_lr",
    "tok_s",
    "expert_0_share",
    "expert_1_share",
    "expert_2_share",
    "expert_3_share",
    "expert_dead_count",
    "shared_gate",
    "routed_gate",
    "shared_rms",
    "routed_rms",
    "shared_grad_norm",
    "routed_grad_norm",
    "expert_0_grad_norm",
    "expert_1_grad_norm",
    "expert_2_grad_norm",
    "expert_3_grad_norm",
    "expert_diversity_loss",
    "expert_diversity_lambda",
    "router_aux_loss",
    "router_aux_weight",
    "total_loss",
)

# Original columns that repeat a named number; filled by `legacy_cells`, sent nowhere.
TWINS = ("train_loss", "train_ppl", "eval_loss", "eval_ppl", "tok_s", "total_loss")

_TRAIN = (
    "tokens",
    "train/nll",
    "train/objective",
    "train/smoothing",
    "train/z_loss",
    "train/balance",
    "train/diversity",
    "grad_norm",
    "muon_lr",
    "route_entropy",
)
_PER_SET = ("nll", "perplexity", "bits_per_byte")

# Measurements of time, speed or memory. Every other column is reproducible bit for bit.
MEASURED_COLUMNS = (
    "tok_s",
    "tokens_per_s",
    "step_seconds",
    "data_seconds",
    "peak_memory_gb",
    "unix_time",
)

# The original runner wrote nan for "off" and "not evaluated", but in these it was a value.
_ALWAYS_MEASURED = {"step", "train_loss", "train_ppl", "lr", "total_loss"}


def columns(evaluation_sets: Sequence[str]) -> tuple[str, ...]:
    """The columns of a run that evaluates these sets, fixed from its start to its end."""
    named = [f"{name}/{kind}" for name in evaluation_sets for kind in kinds_of(name)]
    measured = [name for name in MEASURED_COLUMNS if name not in ORIGINAL_COLUMNS]
    every = (*ORIGINAL_COLUMNS, *_TRAIN, *named, *measured)
    assert len(set(every)) == len(every), f"a column stands twice: {every}"
    return every


def kinds_of(evaluation_set: str) -> tuple[str, ...]:
    """The numbers of an evaluation set; training text has no documents apart from training."""
    return _PER_SET if evaluation_set == "train_split" else (*_PER_SET, "clean_nll")


def legacy_cells(values: Mapping[str, Number | None]) -> dict[str, Number | None]:
    """The original columns that repeat named numbers (nats per token, tokens per second)."""
    train, held_out = values.get("train/nll"), values.get("held_out/nll")
    cells = {
        "train_loss": train,
        "train_ppl": perplexity(train),
        "eval_loss": held_out,
        "eval_ppl": values.get("held_out/perplexity", perplexity(held_out)),
        "tok_s": values.get("tokens_per_s"),
        "total_loss": values.get("train/objective"),
    }
    return {name: value for name, value in cells.items() if value is not None}


def perplexity(nll: float | None) -> float | None:
    """exp(nll); infinite where that overflows, None where it was not measured."""
    if nll is None:
        return None
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


class Journal:
    """Appends rows to a new `metrics.csv`.

    Raises:
        StoreError: the file exists, or cannot be written.
    """

    _handle: int
    _sync: BackgroundSync

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self.names = tuple(names)
        self._known = frozenset(names)
        self._last_step, self._last_time = -1, 0.0
        with storing(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._open(flags)
            try:
                self._append(_line(self.names))
                self._sync.wait()
                _sync_folder(path.parent)  # only then is the name of a new file safe
            except OSError:
                self.close()
                path.unlink(missing_ok=True)
                raise

    @classmethod
    def reopen(cls, path: Path, names: Sequence[str]) -> Journal:
        """Goes on with a journal, which must have these columns and end with a whole line.

        Raises:
            UserError: it has other columns, or cannot be read.
            StoreError: it cannot be written.
        """
        there = read_metrics(path)
        if tuple(there) != tuple(names):
            changed = sorted(set(there) ^ set(names)) or ["their order"]
            message = "the columns are not those of the run that goes on"
            raise UserError.at(str(path), message, ", ".join(changed))
        journal = cls.__new__(cls)
        journal.path, journal.names = path, tuple(names)
        journal._known = frozenset(names)
        journal._last_step = int(
            max((step for step in there["step"] if step is not None), default=-1)
        )
        journal._last_time = max((t for t in there.get("unix_time", []) if t), default=0.0)
        with storing(path):
            journal._open(os.O_WRONLY | os.O_APPEND)
            journal._sync.wait()
        return journal

    def write(self, values: Mapping[str, Number | None]) -> None:
        """Appends one row: `step` and any of the columns. Steps must increase.

        Raises:
            KeyError: a value has no column.
            StoreError: the disk is full; the file is left as it was. Or the disk did not take
                earlier rows; the file is left with those that it took.
        """
        unknown = values.keys() - self._known
        if unknown:
            raise KeyError(f"no such columns in {self.path.name}: {sorted(unknown)}")
        step = values["step"]
        assert isinstance(step, int), f"a step is an integer, not {step!r}"
        assert step > self._last_step, f"steps must increase: {step} after {self._last_step}"
        # The wall-clock time of a row is what lets it be sent elsewhere twice and stored once.
        # A clock that was set back does not turn the order of the rows round.
        now = max(round(time.time(), 3), self._last_time)
        row = {"unix_time": now, **legacy_cells(values), **values}
        line = _line([_cell(row.get(name)) for name in self.names])
        with storing(self.path, len(line)), self._cut_to_the_disk():
            self._append(line)
            self._sync.ask()
        self._last_step, self._last_time = step, now

    def sync(self) -> None:
        """Returns when every row is on the disk.

        Raises:
            StoreError: the disk did not take some; the file is left with those that it took.
        """
        if self._handle >= 0:
            with storing(self.path), self._cut_to_the_disk():
                self._sync.wait()

    def close(self) -> None:
        """Closes the file; more than once is fine."""
        if self._handle >= 0:
            self._sync.close()
            os.close(self._handle)
            self._handle = -1

    def _open(self, flags: int) -> None:
        self._handle = os.open(self.path, flags, 0o644)
        self._sync = BackgroundSync(self._handle)

    @contextlib.contextmanager
    def _cut_to_the_disk(self) -> Iterator[None]:
        """Where rows did not reach the disk, nobody is to take them for written."""
        try:
            yield
        except OSError:
            if self._sync.failed:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, self._sync.synced)
            raise

    def _append(self, line: bytes) -> None:
        """One line; or nothing at all, where the disk does not take all of it."""
        before = os.fstat(self._handle).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._handle, rest) :]
        except OSError:
            os.ftruncate(self._handle, before)
            raise


class Tail:
    """Reads the rows of a growing `metrics.csv`, each once, as their lines are completed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._lines = 0
        self._names: list[str] = []

    def rows(self, most_bytes: int = 4 << 20) -> list[Row]:
        """The next complete rows, of at most so many bytes; none when all have been read, or
        while there is no file.

        Raises:
            UserError: a complete line is not a row.
            OSError: the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset, self._lines = 0, 0  # it was trimmed: start again
                file.seek(self._offset)
                text = file.read(most_bytes)
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        if len(text) == most_bytes and not complete:
            raise UserError.at(f"{self.path}:{self._lines + 1}", "not a row: too long")
        rows = []
        for line in complete.splitlines():
            self._lines += 1
            cells = self._split(line)
            if self._lines == 1:
                self._names = cells
                if len(set(cells)) != len(cells):
                    twice = next(name for name in cells if cells.count(name) > 1)
                    raise UserError.at(f"{self.path}:1", "a column stands twice", twice)
            else:
                rows.append(self._row(cells))
        self._offset += len(complete)
        return rows

    @property
    def names(self) -> list[str]:
        """The columns, once the first line has been read."""
        return self._names

    def _split(self, line: bytes) -> list[str]:
        try:
            return next(csv.reader([line.decode()], strict=True), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError.at(f"{self.path}:{self._lines}", f"not a row: {error}") from None

    def _row(self, cells: list[str]) -> Row:
        place = f"{self.path}:{self._lines}"
        if len(cells) != len(self._names):
            message = f"{len(cells)} cells under {len(self._names)} columns"
            raise UserError.at(place, message)
        try:
            row = {
                name: float(cell) if cell else None
                for name, cell in zip(self._names, cells, strict=True)
            }
        except ValueError as error:
            raise UserError.at(place, f"not a number: {error}"[:200]) from None
        step = row.get("step", 0.0)
        if step is None or not 0 <= step < 2**53 or not step.is_integer():
            raise UserError.at(f"{place}: step", "not a step", step, "a whole number >= 0")
        return row


def read_metrics(path: Path) -> dict[str, list[float | None]]:
    """Every column of a `metrics.csv`, this package's or the original runner's.

    Of the original's file, `nan` becomes None where it meant that nothing was measured, and a step
    may stand twice: its resume kept the rows past the checkpoint. A last line without its end, as
    a crash leaves it, is not read.

    Raises:
        UserError: the file is missing, unreadable, or not a table of numbers with steps.
    """
    tail = Tail(path)
    rows: list[Row] = []
    try:
        while more := tail.rows():
            rows += more
    except OSError as error:
        raise UserError.at(str(path), f"unreadable: {reason_of(error)}") from None
    if "step" not in tail.names:
        what = "there is no such file" if not path.exists() else "there is no column `step`"
        raise UserError.at(str(path), what)
    original = tuple(tail.names) == ORIGINAL_COLUMNS
    steps = [] if original else [row["step"] or 0 for row in rows]
    for before, step in pairwise(steps):
        if step <= before:
            message = f"the row of step {step:.0f} stands after that of step {before:.0f}"
            raise UserError.at(str(path), message, None, "each step once, in their order")
    table = {name: [row[name] for row in rows] for name in tail.names}
    if original:
        for name in set(table) - _ALWAYS_MEASURED:
            table[name] = [None if v is None or math.isnan(v) else v for v in table[name]]
    return table


def _cell(value: Number | None) -> str:
    """`repr` of a number: the shortest text that reads back as it."""
    if value is None:
        return ""
    assert not isinstance(value, bool), "a truth value is not a measurement"
    return repr(value if type(value) is int else float(value))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
