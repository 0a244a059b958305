"""Settings of this process that must be made before torch is loaded.

A training step allocates and frees the same large tensors over and over. By default glibc gives
each back to the kernel and asks for it again, and the kernel zeroes every 4 KiB page of it on first
touch: on a CPU this costs more than the arithmetic of a small model. And OpenMP's threads spin
while they wait for one another: as soon as another process wants a core too, the one that works
waits for the one that spins, and a step takes many times as long.
"""

from __future__ import annotations

import ctypes
import os
import sys

# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

# Rounds that a thread of GNU OpenMP spins before it sleeps.
_SPINS = "1000"


def prepare_process() -> None:
    """Makes this process keep what it frees, and wait without spinning.

    What the user has set in the environment is left as it is. Torch's huge pages
    (`THP_MEM_ALLOC_ENABLE`) are not asked for: it then aligns tensors to 2 MiB, and a heap that is
    kept fragments step by step, to twice the memory that is in use.
    """
    # Who has lost another process says which; torch would add the addresses of its own functions.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another C library: nothing to tune
    mallopt(_M_MMAP_THRESHOLD, 1 << 25)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 1 << 26)
