"""Starts two processes of a run in a network of their own, and takes the network away.

Usage, in a network namespace: lost_network.py METRICS_FILE WORDS_AFTER_PYTHON...
Prints the exit codes and how many seconds after the loss the last process ended.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def loopback(flags: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        fcntl.ioctl(own, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags))


def recorded(metrics: Path) -> int:
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def main(metrics: Path, words: list[str]) -> None:
    loopback(IFF_UP)
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen([sys.executable, *words], env=common | {"RANK": str(rank)})
        for rank in range(2)
    ]
    while recorded(metrics) < 8:
        assert all(one.poll() is None for one in ranks)
        time.sleep(0.05)
    loopback(0)
    lost = time.monotonic()
    codes = [one.wait() for one in ranks]
    print("codes", codes, "seconds", round(time.monotonic() - lost), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
