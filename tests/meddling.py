"""What happens to one process of several while it trains, for `ranks.py`: each done to itself.

A case asks for it by `"meddle": [rank, name, ...]`, with what the way of this name takes.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench import run as runner
from workbench.core import saving, shard_files
from workbench.core.data import stream_data
from workbench.core.data.stream_files import StreamFile
from workbench.core.parallel import Team
from workbench.errors import UserError
from workbench.recorder import Follower, Recorder

SMALL = 1 << 12  # bytes


def after_step(step: int, act: Callable[[], None]) -> None:
    """Acts when the row of this step is written."""
    for kind in (Recorder, Follower):
        kind.flush = _followed(kind.flush, step, act)  # type: ignore[method-assign]


def _followed(flush: Any, step: int, act: Callable[[], None]) -> Any:
    def after(recorder: Any) -> None:
        flush(recorder)
        if recorder._parts.state.step == step:
            act()

    return after


def send(number: int) -> None:
    """Sends a signal to this process."""
    os.kill(os.getpid(), number)


def signalled(step: int, name: str) -> None:
    """This process alone gets a signal, after a step."""
    after_step(step, lambda: send(signal.Signals[name]))


def failing(step: int) -> None:
    """This process alone raises, after a step."""

    def fail() -> None:
        raise LookupError("nowhere to be found")

    after_step(step, fail)


def signalled_while_waiting(file: int) -> None:
    """The server of a file of the stream is lost, and this process is told to end as it waits."""
    whole = stream_data.folder_source

    def lost() -> Any:
        send(signal.SIGTERM)
        raise ConnectionResetError("gone")

    def with_a_lost_file(*given: Any) -> Any:
        source = whole(*given)
        files = list(source.files)
        files[file] = StreamFile(files[file].name, lost, remote=True)
        return replace(source, files=tuple(files))

    stream_data.folder_source = with_a_lost_file


def killed_in_save(step: int, where: str) -> None:
    """Ends by SIGKILL while the checkpoint of a step is saved: where its own part is written and
    the others do not know, or where only the name is missing."""
    if where == "part":
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as Writer

        write = Writer.write_data

        def written(*given: Any) -> Any:
            done = write(*given)
            done.wait()
            send(signal.SIGKILL)

        after_step(step, lambda: setattr(Writer, "write_data", written))
    else:
        after_step(
            step, lambda: setattr(shard_files, "publish", lambda *given: send(signal.SIGKILL))
        )


def without_room(step: int) -> None:
    """From a step on, no file of this process takes more than a few bytes of a checkpoint."""

    def fill() -> None:
        for module, name in ((shard_files, "_write"), (saving, "write_checkpoint")):
            setattr(module, name, _small(getattr(module, name)))

    after_step(step, fill)


def _small(write: Any) -> Any:
    def limited(*given: Any) -> Any:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, hard))
        try:
            return write(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


def without_checkpoint() -> None:
    """This process does not reach the checkpoint that the run is to go on from."""

    def lost(path: Any) -> Any:
        raise UserError.at(str(path), "there is no checkpoint here")

    runner.open_checkpoint = lost


def rounding_otherwise() -> None:
    """This process finds another norm of the same gradients, as with other threads."""
    norm = Team.gradient_norm
    Team.gradient_norm = lambda *given: norm(*given) * (1 + 1e-6)  # type: ignore[method-assign]


WAYS: dict[str, Callable[..., None]] = {
    way.__name__: way
    for way in (
        signalled,
        failing,
        signalled_while_waiting,
        killed_in_save,
        without_room,
        without_checkpoint,
        rounding_otherwise,
    )
}
