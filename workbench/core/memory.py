"""How this process takes memory from the system, so that large tensors are not faulted in anew.

A training step allocates and frees the same large tensors over and over. By default glibc gives
each back to the kernel and asks for it again, and the kernel zeroes every 4 KiB page of it on first
touch: on a CPU this costs more than the arithmetic of a small model.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

import torch

# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Makes this process keep what it frees for its next allocation, in huge pages if possible.

    To be called before the first large tensor. Returns whether the C library took the settings;
    elsewhere than on glibc nothing is changed.
    """
    # Read by torch's CPU allocator at its first large allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 25), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 1 << 26))
    return all(mallopt(key, value) == 1 for key, value in settings)


def peak_bytes(device: torch.device) -> int:
    """Most memory taken so far, in bytes: of the GPU where one trains, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
