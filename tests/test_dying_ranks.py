"""A process of several that ends while they train: those that are left say which, and why."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from test_ranks import WHOLE, ran, spec_file

from workbench.core import failures
from workbench.core.failures import PeerError, RollCall
from workbench.errors import UserError

pytestmark = pytest.mark.ddp


def roll_called(silent: set[int], size: int = 4) -> dict[int, PeerError]:
    """What each process that is left comes to know; they ask at once, as they do."""
    store = dist.HashStore()
    found: dict[int, PeerError] = {}

    def ask(rank: int) -> None:
        found[rank] = RollCall(store, rank, size).explain(RuntimeError("Connection closed by peer"))

    askers = [threading.Thread(target=ask, args=(rank,)) for rank in set(range(size)) - silent]
    for one in askers:
        one.start()
    for one in askers:
        one.join()
    return found


@pytest.mark.parametrize(("silent", "speaks"), [({0}, 1), ({2}, 0), ({0, 1}, 2), ({1, 3}, 0)])
def test_the_lowest_rank_that_is_left_names_those_that_are_gone(
    silent: set[int], speaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "ROLL_CALL_SECONDS", 0.3)
    found = roll_called(silent)
    assert [rank for rank, error in sorted(found.items()) if not error.agreed] == [speaks]
    names = ", ".join(f"rank {rank}" for rank in sorted(silent))
    assert {error.faults[0].place for error in found.values()} == {names}


def test_a_process_that_left_word_is_named_with_its_cause() -> None:
    store = dist.HashStore()
    RollCall(store, 2, 3).post(UserError.at("data.path", "is gone"))
    found = RollCall(store, 1, 3).explain(RuntimeError("Connection closed by peer"))
    assert str(found) == "rank 2: has ended: data.path: is gone"
    assert found.exit_code == UserError.exit_code
    assert found.agreed, "it has said so itself"


class Lost:
    """A store whose process is gone."""

    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("Connection reset by peer")


def test_without_the_store_each_says_that_rank_zero_is_lost() -> None:
    for rank in (1, 2):
        found = RollCall(Lost(), rank, 3).explain(RuntimeError("Connection closed by peer"))
        assert str(found) == "rank 0: the connection to it is lost"
        assert not found.agreed


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_killed_rank_is_named_by_those_that_are_left(tmp_path: Path, parallel: str) -> None:
    training = WHOLE | {"global_batch_size": 6, "parallel": parallel}
    spec = spec_file(tmp_path, "three", training=training)
    cases: list[dict[str, Any]] = [
        {"name": f"killed_{rank}", "processes": 3, "spec": spec, "kill": [rank, 7]}
        for rank in (0, 2)
    ]
    found = ran(tmp_path, cases)
    for rank in (0, 2):
        run = found[f"killed_{rank}"]
        left = [other for other in range(3) if other != rank]
        assert run.codes == [-9 if one == rank else 74 for one in range(3)], run.said
        assert run.after_kill is not None
        assert run.after_kill < 20
        # The store was at rank zero: without it each speaks for itself.
        speak = left if rank == 0 else [0]
        for one in left:
            assert (f"error: rank {rank}: " in run.said[one]) == (one in speak), run.said
            assert "Traceback" not in run.said[one]
    resume = {"name": "killed_0", "processes": 3, "spec": spec, "options": ["--resume"]}
    again = ran(tmp_path, [resume])["killed_0"]
    assert again.codes == [0] * 3, again.said
    assert again.record.model_dump()["resumes"][-1]["step"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_an_error_of_one_rank_alone_ends_all_by_name_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for the reports of what is no user's error
    training = WHOLE | {"global_batch_size": 6, "parallel": parallel}
    spec = spec_file(tmp_path, "three", training=training)
    cases: list[dict[str, Any]] = [
        {"name": f"failing_{rank}", "processes": 3, "spec": spec, "meddle": [rank, "failing", 7]}
        for rank in (0, 2)
    ]
    found = ran(tmp_path, cases)
    cause = "LookupError: nowhere to be found"
    for rank in (0, 2):
        run = found[f"failing_{rank}"]
        assert run.seconds < 30, "all of it, of which the start takes the most"
        assert "Traceback" not in "".join(run.said)
        # It says so itself, rank zero for all where it is another; the rest are silent.
        expected: list[list[str]] = [[], [], []]
        expected[rank] = [f"{'rank 2: ' if rank else ''}error: wb: a fault in wb itself: {cause}"]
        if rank:
            expected[0] = [f"error: rank 2: has ended: {cause}"]
        for one, said in enumerate(run.said):
            errors = [line.split(";")[0] for line in said.splitlines() if "error: " in line]
            if run.codes[one] == 74 and one not in (0, rank):
                # Rank zero had ended, and with it the store, before this one could ask.
                assert errors == [f"rank {one}: error: rank 0: the connection to it is lost"]
            else:
                assert (run.codes[one], errors) == (70, expected[one])
        assert run.document["status"] == "FAILED"
        error = f"PeerError: rank 2: has ended: {cause}" if rank else cause
        assert run.document["error"] == error
