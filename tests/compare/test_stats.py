"""Intervals over documents: cases by hand, and the properties of a cluster bootstrap."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from workbench.compare.scores import read_scores
from workbench.compare.stats import FEW, document_interval, document_intervals
from workbench.errors import UserError


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_two_documents_by_hand() -> None:
    """1/10 and 30/100 have the ratio of sums 31/110, not the mean of ratios (0.2). The residuals
    are -20/11 and 20/11, the shares of the text 1/11 and 10/11, so that they count as -2 and 20:
    the HC3 standard error is sqrt(404)/110. These two are worth 110^2/10100 = 1.2 documents: one
    degree of freedom, t(0.975, 1) = 12.7062 (tables)."""
    difference, weight = np.array([1.0, 30.0]), np.array([10.0, 100.0])
    half = 12.7062 * math.sqrt(404) / 110
    found = document_interval(difference, weight, rng())
    assert found == pytest.approx((31 / 110 - half, 31 / 110 + half), abs=1e-5)


def test_few_documents_have_the_freedom_of_their_effective_number() -> None:
    """Weights 1, 1, 1, 2 are worth 25/7 = 3.571 documents: 2.571 degrees
    of freedom. Of ratios 1, 2, 3 and 2 the ratio of sums is 2."""
    from scipy import stats

    difference, weight = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 1.0, 1.0, 2.0])
    error = math.sqrt(2 * (1 / 0.8) ** 2) / 5  # the residuals are -1, 0, 1 and 0
    half = float(stats.t.ppf(0.975, 25 / 7 - 1)) * error
    assert document_interval(difference, weight, rng()) == pytest.approx((2 - half, 2 + half))


def test_few_equal_documents_by_hand() -> None:
    """1, 2 and 6 have the mean 3; of three equal documents the residuals -2, -1, 3 count half as
    much again: sqrt(14 * 9/4)/3, and t(0.975, 2) = 4.30265 (tables)."""
    half = 4.30265 * math.sqrt(31.5) / 3
    found = document_interval(np.array([1.0, 2.0, 6.0]), np.ones(3), rng())
    assert found == pytest.approx((3 - half, 3 + half), abs=1e-4)


def test_bootstrap_t_is_scipys() -> None:
    """Of equal lengths the ratio is a mean: its t statistics under the same draws, one by one."""
    from scipy import stats

    values, draws = np.random.default_rng(0).gamma(0.5, 1.0, FEW), 401
    places = rng().integers(0, FEW, (draws, FEW))
    found = [stats.ttest_1samp(values[one], values.mean()).statistic for one in places]
    low, high = np.quantile(found, [0.025, 0.975], method="inverted_cdf")
    error = stats.sem(values)
    expected = values.mean() - high * error, values.mean() - low * error
    assert document_interval(values, np.ones(FEW), rng(), draws=draws) == pytest.approx(expected)


def test_differences_of_the_same_documents_share_their_draws() -> None:
    values, weight = np.random.default_rng(0).normal(0, 1, 30), np.arange(1.0, 31.0)
    alone = document_interval(values, weight, rng())
    both = document_intervals([np.full(30, math.nan), values, 2 * values], [weight] * 3, rng())
    assert both[0] is None
    assert both[1] == pytest.approx(alone)
    assert both[2] == pytest.approx([2 * end for end in alone or ()])


def test_equal_differences_per_token_leave_no_width() -> None:
    weight = np.array([5.0, 50.0, 500.0])
    assert document_interval(0.02 * weight, weight, rng()) == pytest.approx((0.02, 0.02))


def test_the_interval_is_near_the_normal_one_for_many_equal_documents() -> None:
    values = np.random.default_rng(0).normal(0.1, 1.0, 400)
    low, high = document_interval(values, np.ones(400), rng()) or (0, 0)
    half = 1.96 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.01)
    assert high == pytest.approx(values.mean() + half, abs=0.01)


def test_exchanging_the_runs_turns_the_interval_round() -> None:
    values, weight = np.random.default_rng(0).normal(0, 1, 30), np.arange(1.0, 31.0)
    low, high = document_interval(values, weight, rng()) or (0, 0)
    assert document_interval(-values, weight, rng()) == pytest.approx((-high, -low))


def test_the_generator_given_decides_the_draws() -> None:
    values, weight = np.random.default_rng(0).normal(0, 1, 30), np.ones(30)
    first = document_interval(values, weight, rng())
    assert document_interval(values, weight, rng()) == first
    assert document_interval(values, weight, np.random.default_rng(8)) != first


def test_many_documents_are_drawn_in_pieces() -> None:
    values, weight = np.random.default_rng(0).normal(0, 1, 5_000), np.ones(5_000)
    low, high = document_interval(values, weight, rng(), draws=500) or (0, 0)
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(5_000), rel=0.2)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_no_interval_where_nothing_can_be_drawn(values: list[float]) -> None:
    assert document_interval(np.array(values), np.ones(len(values)), rng()) is None


def test_a_text_that_stands_twice_is_one_cluster(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path = tmp_path / "scores.parquet"
    table = {
        "set": ["held_out", "held_out", "train_split"],
        "document": ["x", "x", "x"],
        "tokens": [2, 3, 100],
        "bytes": [8, None, 1],
        "nll_sum": [1.5, 2.0, 9.0],
    }
    parquet.write_table(pa.table(table), path)
    scores = read_scores(path)
    assert scores is not None
    sums = scores["held_out"].clusters()
    assert list(sums) == ["x"]
    assert sums["x"][[0, 2]].tolist() == [5.0, 3.5]
    assert math.isnan(sums["x"][1])  # bytes that are not known make no bits per byte


def test_scores_that_cannot_be_read_are_an_error_and_absent_ones_are_not(tmp_path: Path) -> None:
    assert read_scores(tmp_path / "none.parquet") is None
    (tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(UserError, match=r"bad\.parquet"):
        read_scores(tmp_path / "bad.parquet")


def test_documents_out_of_order_are_an_error(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = {
        "set": ["held_out", "train_split", "held_out"],
        "index": [0, 0, 1],
        "document": ["x", "y", "z"],
        "tokens": [2, 3, 100],
        "bytes": [8, 8, 1],
        "nll_sum": [1.5, 2.0, 9.0],
    }
    parquet.write_table(pa.table(table), tmp_path / "good.parquet")
    scores = read_scores(tmp_path / "good.parquet")
    assert scores is not None
    assert scores["held_out"].documents == ("x", "z")
    table["index"] = [1, 0, 0]
    parquet.write_table(pa.table(table), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match="not in the order of the set"):
        read_scores(tmp_path / "bad.parquet")
