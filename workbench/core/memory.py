"""How much memory a run has taken."""

from __future__ import annotations

import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Most memory taken so far, in bytes: of the GPU where one trains, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
