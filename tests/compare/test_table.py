"""The fast reader of `metrics.csv` reads what the journal's own reads, and leaves it the rest."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from workbench.compare.table import read_table
from workbench.errors import UserError
from workbench.track.journal import Journal, read_metrics


@pytest.mark.parametrize(
    "text",
    [
        "step,tokens,x\n1,10,0.1\n2,20,\n",
        "step,tokens,x\n1,10,nan\n2,20,inf\n3,30,-inf\n",
        "step,tokens,x\n1,10,0.1\n2,20,0.30000000000000004\n3,30,5e-324\n4,40,1.797693",  # cut
        "step,tokens,x\n1,10,1_000\n2,20, 7 \n",  # Python's own numbers
        "step,tokens,x\n",
        "step,x\n1,\n2,\n",
        "step,tokens,x\r\n1,10,0.5\r\n",
    ],
)
def test_both_readers_agree(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(text.encode())
    expected, found = read_metrics(path), read_table(path)
    assert list(found) == list(expected)
    for name, column in expected.items():
        assert repr(found[name]) == repr(column)
        assert found.known(name).tolist() == [value is not None for value in column]
        numbers = [math.nan if value is None else value for value in column]
        assert repr(found.numbers(name).tolist()) == repr(numbers)
    assert "step" in found
    assert "y" not in found


def test_a_journal_is_read_bit_for_bit(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.csv", ["step", "x"])
    values = [1 / 3, 2**-1074, 1e308, -0.0, math.pi * 1e-7, 123456789.123456789]
    for step, value in enumerate(values):
        journal.write({"step": step, "x": value})
    journal.close()
    assert repr(read_table(tmp_path / "metrics.csv")["x"]) == repr(values)


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "step,x\n1,2,3\n", "step,x\n1\n", "step,x\n1,q\n"]
)
def test_faults_are_those_of_the_journal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(UserError) as expected:
        read_metrics(path)
    with pytest.raises(UserError) as found:
        read_table(path)
    assert str(found.value) == str(expected.value)
