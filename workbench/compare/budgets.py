"""Whether runs of two tokenizers have read as much text, at unequal numbers of tokens.

Two budgets match in tokens or in bytes. In bytes they match to within one update, or `SHARE` of
them, since nobody can stop between two updates. Where they do, each place of a schedule has to lie
at the same byte, too; as far as that is known, by the run's bytes a token up to the point compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Facts = Mapping[str, Any]

TOKENS, BYTES = "effective.budget.tokens", "effective.budget.bytes"
SHARE = 0.005

_TOKENIZER = "effective.tokenizer.sha256"
_UPDATE = ("effective.optimizer.sequences_per_update", "training.seq_len")
_WARMUP = "effective.optimizer.warmup_steps"
_SCHEDULED = ("effective.budget.decay_tokens", "effective.budget.ramp_tokens")

# The leaves that are judged in bytes where the tokens are.
COUNTED = (BYTES, *_SCHEDULED, _WARMUP)


class _Pace(NamedTuple):
    """How a run reads: what it has read, and how much with one update."""

    tokens: int
    bytes: int
    update_tokens: int

    def at(self, tokens: float) -> float:
        """The bytes read after so many tokens."""
        return tokens * self.bytes / self.tokens

    @property
    def update_bytes(self) -> float:
        return self.at(self.update_tokens)


def same_in_bytes(a: Facts, b: Facts, leaf: str) -> bool | None:
    """Whether a leaf of `COUNTED` is the same in bytes; None where bytes do not decide it: the
    tokens are equal, the tokenizer is one, or the text read is not known."""
    if leaf not in COUNTED or (paces := _paces(a, b)) is None:
        return None
    if not _near(paces[0].bytes, paces[1].bytes, paces):
        return False if leaf == BYTES else None
    first, second = (
        _places(facts.get(leaf), leaf, pace) for facts, pace in zip((a, b), paces, strict=True)
    )
    if first is None or second is None:
        return None
    if first.keys() != second.keys():
        return False
    return all(_near(first[name], second[name], paces) for name in first)


def near(a: float, b: float, update_bytes: float) -> bool:
    """Whether two numbers of bytes are one budget, for updates of so many bytes at most."""
    return abs(a - b) <= max(update_bytes, SHARE * max(a, b))


def is_in_bytes(a: Facts, b: Facts) -> bool:
    """Whether two runs are compared at unequal tokens and the same bytes."""
    return same_in_bytes(a, b, BYTES) is True


def _paces(a: Facts, b: Facts) -> tuple[_Pace, _Pace] | None:
    tokenizers = a.get(_TOKENIZER), b.get(_TOKENIZER)
    first, second = _pace(a), _pace(b)
    if None in tokenizers or tokenizers[0] == tokenizers[1] or first is None or second is None:
        return None
    return None if first.tokens == second.tokens else (first, second)


def _pace(facts: Facts) -> _Pace | None:
    sequences, length = (facts.get(name) for name in _UPDATE)
    counts = [
        one
        for one in (facts.get(TOKENS), facts.get(BYTES), sequences, length)
        if isinstance(one, int) and not isinstance(one, bool) and one > 0
    ]
    if len(counts) < 4:
        return None
    return _Pace(counts[0], counts[1], counts[2] * counts[3])


def _near(a: float, b: float, paces: tuple[_Pace, _Pace]) -> bool:
    return near(a, b, max(pace.update_bytes for pace in paces))


def _places(value: Any, leaf: str, pace: _Pace) -> dict[str, float] | None:
    """The places of a leaf in bytes, by name; None: it is no count, such as what does not apply."""
    if leaf == BYTES:
        return {"": float(pace.bytes)}
    places = value if isinstance(value, Mapping) else {"": value}
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in places.values()):
        return None
    scale = pace.update_tokens if leaf == _WARMUP else 1
    return {str(name): pace.at(scale * tokens) for name, tokens in places.items()}
