"""Damaged files: always a clean error, never a crash, a hang or a number that a hash forbids."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from readers import READERS, Case

# Every example writes and reads files: their time is that of the disk.
CALM = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
LONG = 2000


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def of(name: str) -> Case:
        if name not in made:
            made[name] = Case(READERS[name], tmp_path_factory.mktemp("fuzz"))
        return made[name]

    return of


def check(case: Case, count: int, phases: list[Phase]) -> int:
    """Reads that many damaged inputs at least."""
    done = 0

    @settings(
        deadline=None,
        max_examples=count,
        suppress_health_check=CALM,
        derandomize=count < LONG,
        database=None,
        phases=phases,
    )
    @given(st.randoms(use_true_random=False))
    def every(draw: object) -> None:
        nonlocal done
        case.try_one(draw)  # type: ignore[arg-type]
        done += 1

    every()
    return done


@pytest.mark.parametrize("name", READERS)
def test_damage_is_a_clean_error(case: Callable[[str], Case], name: str) -> None:
    count = READERS[name].short
    assert check(case(name), count, [Phase.generate]) >= count


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_thousands_of_damaged_files(case: Callable[[str], Case], name: str) -> None:
    assert check(case(name), LONG, list(Phase)) >= LONG


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "spec",
        "own shard, hashes made to fit",
        "Megatron",
        "checkpoint",
        "checkpoint, hashes made to fit",
        "run record",
        "journal",
    ],
)
def test_a_fuzzer_that_follows_the_coverage_finds_nothing(name: str, tmp_path: Path) -> None:
    """In a process of its own, since it instruments what it imports."""
    command = [sys.executable, str(Path(__file__).with_name("coverage_guided.py")), name]
    done = subprocess.run(
        [*command, "-max_total_time=40", "-max_len=400"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Done " in done.stderr
