"""Takes the files of a run back to a step, as if nothing had been trained after it."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import UserError, storing
from workbench.track.journal import Number
from workbench.track.layer_table import SEGMENTS, TABLE, rewind_table
from workbench.track.record import write_text
from workbench.track.store import METRICS

_STEP = re.compile(r"step_(\d{8})")
_EVALUATIONS, _CHECKPOINTS = "evaluations", "checkpoints"


def rewind(
    folder: Path, step: int, *, keep_row: bool, keep_scores: bool, take_row: bool
) -> dict[str, Number | None] | None:
    """Removes every row, score and checkpoint after `step`, and trims a torn last line.

    Args:
        step: the step of the checkpoint; 0 removes everything.
        keep_row: the row of `step` itself stays.
        keep_scores: with its evaluation; else the numbers and scores of that are removed.
        take_row: the row is returned instead, without an evaluation, to be written with one.

    Raises:
        UserError: the metrics cannot be read.
        StoreError: the store cannot be written; each file is as it was or as it is to be.
    """
    row = _rewind_metrics(folder / METRICS, step, keep_row, keep_scores, take_row)
    with storing(folder):
        for path in _half_written(folder):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        rewind_table(folder, step if keep_row else step - 1)
        for path in _after(folder / _EVALUATIONS, step if keep_scores else step - 1):
            path.unlink()
        for path in _after(folder / _CHECKPOINTS, step):
            shutil.rmtree(path)
    return row


def copy_history(source: Path, target: Path) -> None:
    """Copies what a run has measured into the folder of another one.

    Raises:
        StoreError: it cannot be read or written.
    """
    with storing(target):
        for name in (METRICS, TABLE):
            if (source / name).exists():
                shutil.copyfile(source / name, target / name)
        for name in (_EVALUATIONS, SEGMENTS):
            if (source / name).is_dir():
                shutil.copytree(source / name, target / name)


def _rewind_metrics(
    path: Path, step: int, keep_row: bool, keep_scores: bool, take_row: bool
) -> dict[str, Number | None] | None:
    if not path.exists():
        return None
    with storing(path):
        raw = path.read_bytes()
    complete = raw[: raw.rfind(b"\n") + 1]
    try:
        lines = list(csv.reader(io.StringIO(complete.decode()), strict=True))
        if not lines or step == 0:
            with storing(path):
                path.unlink()
            return None
        names = lines[0]
        at = names.index("step")
        kept: list[list[str]] = [names]
        taken: dict[str, Number | None] | None = None
        for cells in lines[1:]:
            row_step = int(cells[at])
            if row_step < step or (row_step == step and keep_row and keep_scores):
                kept.append(cells)
            elif row_step == step and keep_row:
                bare = _without_scores(names, cells)
                if take_row:
                    taken = {n: _number(c) for n, c in zip(names, bare, strict=True) if c}
                else:
                    kept.append(bare)
    except (ValueError, IndexError, csv.Error) as error:
        raise UserError.at(str(path), f"cannot be taken back to step {step}: {error}") from None
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(kept)
    if text.getvalue().encode() != raw:
        write_text(path, text.getvalue())
    return taken


def _without_scores(names: list[str], cells: list[str]) -> list[str]:
    """A row without the numbers of an evaluation."""
    scored = {name.rpartition("/")[0] for name in names if name.endswith("/perplexity")}
    return [
        "" if name in ("eval_loss", "eval_ppl") or name.rpartition("/")[0] in scored else cell
        for name, cell in zip(names, cells, strict=True)
    ]


def _number(cell: str) -> Number:
    return int(cell) if re.fullmatch(r"-?\d+", cell) else float(cell)


def _half_written(folder: Path) -> list[Path]:
    """What a process that was killed has left under a temporary name: whoever rewinds a run holds
    its lock, so that nobody is writing."""
    places = (folder, *(folder / name for name in (_EVALUATIONS, _CHECKPOINTS, SEGMENTS)))
    found = [path for place in places if place.is_dir() for path in place.iterdir()]
    return [
        path
        for path in found
        if path.name.startswith(".") and path.suffix != ".lock" and path.name != ".lock"
    ]


def _after(folder: Path, step: int) -> Iterator[Path]:
    """What is named by a step after this one."""
    for path in sorted(folder.glob("step_*")) if folder.is_dir() else ():
        found = _STEP.match(path.name)
        if found and int(found[1]) > step:
            yield path
