"""Where the record of an imported run comes from, and what of the source was not taken at its word.

A run of another trainer is known by what that trainer wrote down. What it did not write is missing
here too, and what it is known to have written wrongly is corrected, with the reason.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Importer = Literal["complexity", "mlflow", "csv"]


class _Kept(BaseModel):
    model_config = ConfigDict(extra="allow")


class Correction(_Kept):
    """One claim of the source that does not hold.

    `leaf` is the fact or number it is about, `recorded` what the source says, `here` what stands in
    this record instead (None: that is not known).
    """

    leaf: str
    recorded: Any = None
    here: Any = None
    why: str


class Imported(_Kept):
    """What a record was made of: `files` are those in the run's folder, name -> SHA-256."""

    importer: Importer
    source: str
    when: str
    files: dict[str, str] = {}
    corrections: list[Correction] = []
    notes: list[str] = []
