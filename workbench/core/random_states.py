"""The states of every generator that a run could draw from, as JSON can hold them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The present states of Python's, numpy's and torch's generators, those of devices included."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), cached],
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in cuda],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Puts every generator back.

    Raises:
        KeyError, TypeError, ValueError: these are no such states.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(state) for state in states["cuda"]])


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
