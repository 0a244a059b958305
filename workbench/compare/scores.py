"""The score of every document, as an evaluation leaves them in its parquet file.

M documents of a set, in the order of the set.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.compare.arrow import floats_of
from workbench.compare.imported import UNTOUCHED
from workbench.compare.stats import Floats
from workbench.errors import UserError

TOKENS, BYTES, NLL_SUM = range(3)
_COLUMNS = ["set", "document", "tokens", "bytes", "nll_sum"]
_CLEAN = "clean"
_INDEX = "index"  # of the document in its set; files of earlier versions do not have it


@dataclass(frozen=True)
class SetScores:
    """One evaluation set: content hashes of its documents [M], and `rows` [M, 3] with scored
    tokens, bytes (NaN: there is no text) and summed NLL in nats; whether each is clean: it does not
    overlap the training text (None: not measured; empty: not kept)."""

    documents: tuple[str, ...]
    rows: Floats
    clean: tuple[bool | None, ...] = ()

    @property
    def sha256(self) -> str | None:
        """The identity of the set: SHA-256 over the hashes of its documents in order."""
        return _identity(self.documents)

    @property
    def nll(self) -> float:
        """Nats per token: the sum of NLL over the sum of scored tokens."""
        return float(self.rows[:, NLL_SUM].sum() / self.rows[:, TOKENS].sum())

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte; NaN where there is no text."""
        return float(self.rows[:, NLL_SUM].sum() / math.log(2) / self.rows[:, BYTES].sum())

    def clean_rows(self, clean: bool = True) -> Floats:
        """The rows of the documents that are clean, or of those that are not."""
        return self.rows[[one is clean for one in self.clean]]

    @property
    def clean_nll(self) -> float | None:
        """Nats per token over the clean documents alone; None where there are none."""
        rows = self.clean_rows()
        tokens = rows[:, TOKENS].sum()
        return float(rows[:, NLL_SUM].sum() / tokens) if tokens else None

    def clusters(self) -> dict[str, Floats]:
        """Document -> its row [3]; a text that stands in the set twice is one cluster."""
        sums: dict[str, Floats] = {}
        for document, row in zip(self.documents, self.rows, strict=True):
            sums[document] = sums.get(document, np.zeros(3)) + row
        return sums


@lru_cache(maxsize=8)
def _identity(documents: tuple[str, ...]) -> str | None:
    try:
        hashes = b"".join(map(bytes.fromhex, documents))
    except ValueError:
        return None
    return hashlib.sha256(hashes).hexdigest()


def scores_path(folder: Path, step: int) -> Path:
    """Where the per-document scores of an evaluation are kept."""
    return folder / "evaluations" / f"step_{step:08d}.parquet"


def read_scores(path: Path) -> dict[str, SetScores] | None:
    """The scores of every set in a file. None: there is no such file.

    Raises:
        UserError: the file is there and is not a table of scores.
    """
    if not path.exists():
        return None
    try:
        return _read(path)
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many kinds for a damaged file, some when it is used
        message = f"not a table of document scores: {error}"
        raise UserError.at(str(path), message, None, UNTOUCHED) from None


def _read(path: Path) -> dict[str, SetScores]:
    import pyarrow.parquet as parquet

    # Not `read_table`, which imports pandas.
    with parquet.ParquetFile(path) as file:
        known = [*_COLUMNS, *({_INDEX, _CLEAN} & set(file.schema_arrow.names))]
        table = file.read(columns=known)
    owners = _texts(table.column("set"))
    numbers = [floats_of(table.column(name)) for name in _COLUMNS[2:]]
    rows = np.array(numbers, dtype=np.float64).T.reshape(-1, 3)
    counts = rows[:, TOKENS]
    if wrong := counts[~(counts >= 0)].tolist():
        message = "no document can have so many scored tokens"
        raise UserError.at(str(path), message, wrong[0], "0 or more")
    found: dict[str, SetScores] = {}
    for name in dict.fromkeys(owners.tolist()):
        places = np.flatnonzero(owners == name)
        mine = _rows_of(table, places)
        if _INDEX in known and mine.column(_INDEX).to_pylist() != list(range(len(places))):
            message = f"the documents of {name} are not in the order of the set"
            raise UserError.at(str(path), message, None, UNTOUCHED)
        clean = tuple(mine.column(_CLEAN).to_pylist()) if _CLEAN in known else ()
        documents = _shared(tuple(map(str, mine.column("document").to_pylist())))
        found[name] = SetScores(documents, rows[places], clean)
    return found


def _rows_of(table: Any, places: npt.NDArray[np.intp]) -> Any:
    """The rows of a table at ascending places; those that follow one another without `take`, which
    imports pandas."""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return table.slice(first, len(places))
    return table.take(places)


def _texts(column: Any) -> Any:
    """[M] the values of a column of texts."""
    return np.array(column.to_pylist(), dtype=object)


@lru_cache(maxsize=8)
def _shared(documents: tuple[str, ...]) -> tuple[str, ...]:
    """One tuple for all evaluations of the same documents."""
    return documents
