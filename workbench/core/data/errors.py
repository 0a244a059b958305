"""The error of data that cannot be used: place, value, what is allowed."""

from __future__ import annotations

import hashlib
from typing import Any, Self

from workbench.errors import Fault, UserError


class DataError(UserError):
    """A file, a document or a corpus that cannot be used."""

    @classmethod
    def at(
        cls, place: str, message: str, value: Any = None, allowed: str | None = None
    ) -> DataError:
        """The error of a single fault."""
        return cls(Fault(place, message, value, allowed))


class UnencodableError(DataError):
    """A text that the tokenizer cannot take.

    `sha256` is that of its UTF-8 bytes: whoever knows where texts stand finds it by that.
    """

    sha256: bytes

    @classmethod
    def of(cls, text: str, reason: str) -> Self:
        """The error of a text, which shows how it starts."""
        error = cls(Fault(f"document starting {text[:40]!r}", reason))
        error.sha256 = hashlib.sha256(text.encode("utf-8")).digest()
        return error

    def standing_at(self, place: str) -> DataError:
        """The same error under the place of the text."""
        (fault,) = self.faults
        return DataError.at(f"{place}, the {fault.place}", fault.message)
