"""Saves checkpoints beside training where that is safe, else between two steps.

It is safe where another device trains and this machine has room for a copy of the state: on a CPU
the writing would take cores from the steps whose time is measured. What is saved is the state at
the step, whatever is trained meanwhile; a process that dies while it is written has the checkpoint
before it, as always.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import torch

from workbench.core.checkpoint import Snapshot, snapshot, write_checkpoint
from workbench.core.parallel import ALONE, Team
from workbench.core.shard_files import save_shards
from workbench.core.train import TrainState

# The copy may take this share of the memory that is free.
_ROOM = 0.5


class Saver:
    """Writes the checkpoints of one run, one at a time."""

    def __init__(self, folder: Path, keep: int, device: torch.device, team: Team = ALONE) -> None:
        """Keeps the newest `keep` checkpoints under `folder`.

        Rank zero of a team writes for all, unless each holds a part of the model: then all write.
        """
        self._folder, self._keep, self._device, self._team = folder, keep, device, team
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: TrainState, spec: dict[str, Any], *, last: bool = False) -> None:
        """Takes the state as it is now; it may still be on its way to the disk afterwards. `last`:
        the run ends with it.

        Raises:
            StoreError: this checkpoint, or the one before, cannot be written.
        """
        if self._team.is_sharded:
            save_shards(state, self._folder, spec, self._keep, self._team, last=last)
            return
        if not self._team.is_first:
            return
        self.wait()
        taken = snapshot(state, spec)
        if not overlaps(self._device, taken.nbytes):
            write_checkpoint(taken, self._folder, self._keep)
            return
        # A daemon: whoever asks to end at once does not wait for it.
        self._thread = threading.Thread(
            target=self._write, args=(taken.copied(),), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Returns when what was saved is on the disk.

        Raises:
            StoreError: it cannot be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, taken: Snapshot) -> None:
        try:
            write_checkpoint(taken, self._folder, self._keep)
        except BaseException as error:  # told to the thread that trains
            self._error = error


def overlaps(device: torch.device, nbytes: int) -> bool:
    """Whether a state of so many bytes is written while the device trains."""
    return device.type != "cpu" and nbytes < _ROOM * psutil.virtual_memory().available
