"""How several processes divide what they do: every part once, whatever their number."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.core.parallel import Ranks
from workbench.core.shards import Shards


def member(kind: type[Ranks], rank: int, size: int) -> Ranks:
    """One of several processes, who asks the others nothing."""
    made = object.__new__(kind)
    made.rank, made.size = rank, size
    return made


@pytest.mark.parametrize("kind", [Ranks, Shards])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_window_of_an_update_is_trained_by_one_process(kind: type[Ranks], size: int) -> None:
    windows = np.arange(12 * 5).reshape(12, 5)
    trained = [member(kind, rank, size).rows(windows) for rank in range(size)]
    assert [len(part) for part in trained] == [12 // size] * size
    assert sorted(np.concatenate(trained)[:, 0].tolist()) == windows[:, 0].tolist()


@pytest.mark.parametrize("kind", [Ranks, Shards])
@pytest.mark.parametrize("count", [0, 1, 5, 8])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_every_batch_of_an_evaluation_is_one_processs_own(
    kind: type[Ranks], count: int, size: int
) -> None:
    """Those that hold a part of the model work on as many, since each needs the others' parts."""
    shares = [list(member(kind, rank, size).share(iter(range(count)))) for rank in range(size)]
    own = [item for share in shares for item, is_own in share if is_own]
    assert sorted(own) == list(range(count))
    if kind is Shards:
        assert len({len(share) for share in shares}) == 1
