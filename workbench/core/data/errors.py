"""The error of data that cannot be used: place, value, what is allowed."""

from __future__ import annotations

from typing import Any

from workbench.errors import Fault, UserError


class DataError(UserError):
    """A file, a document or a corpus that cannot be used."""

    @classmethod
    def at(
        cls, place: str, message: str, value: Any = None, allowed: str | None = None
    ) -> DataError:
        """The error of a single fault."""
        return cls(Fault(place, message, value, allowed))
