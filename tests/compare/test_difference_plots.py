"""Pictures of differences: what was measured is seen, and no interval is hidden by its width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_arms import write_arm

from workbench.compare import compare_arms, plots
from workbench.compare.arm_figures import draw
from workbench.compare.arm_report import render_arms_markdown
from workbench.compare.difference_plots import Effect, Seeds, difference, effects, view_of

HUGE = (-16.508, 16.241)


def labels(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def written(figure: Any) -> str:
    """All words of a figure."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def markers(axes: Any) -> list[str]:
    return [line.get_marker() for line in axes.lines if line.get_marker() in ("v", "^", "<", ">")]


def test_an_axis_shows_intervals_whole_where_that_hides_nothing() -> None:
    assert view_of([0.1, 0.2], [(-0.3, 0.6)]) is None
    assert view_of([], [(-9.0, 9.0)]) is None  # nothing else would be seen
    assert view_of([0.0], [(-9.0, 9.0)]) is None
    assert view_of([0.1], [None]) is None
    view = view_of([-0.28, 0.01], [HUGE])
    assert view is not None
    low, high = view
    assert HUGE[0] < low < -0.28 < 0.01 < high < HUGE[1]
    assert view_of([0.5, float("nan")], [(-90.0, 90.0)]) == pytest.approx((-0.3, 0.8))


def test_an_interval_beyond_the_picture_has_arrows_and_its_numbers() -> None:
    rows = [
        Effect(
            "wide", -0.134, HUGE, (-0.16, -0.112), (-0.277, 0.009), ("-0.134", "[-16.5, +16.2]")
        ),
        Effect("half", 0.1, (0.05, 40.0), None, (0.09, 0.11), ("+0.1", "[+0.05, +40.0]")),
        Effect("narrow", 0.1, (0.05, 0.15), None, (0.09, 0.11), ("+0.1", "[+0.05, +0.15]")),
        Effect("none", 0.1, None, None, (), ("+0.1", "-")),
    ]
    with plots.styled():
        figure = effects(rows, axis="x", title="t", level="99.44 %")
        words = written(figure)
    axes = figure.axes[0]
    assert markers(axes) == ["<", ">", ">"]
    assert axes.get_xlim()[0] < -0.277
    assert axes.get_xlim()[1] < 1
    for row in rows:
        assert row.written[1] in words
    assert "99.44 % interval over seeds; arrow: it goes on beyond the picture" in labels(figure)
    whole = [Effect("a", 0.1, (-0.2, 0.4), None, (0.0, 0.2), ("+0.1", "[-0.2, +0.4]"))]
    with plots.styled():
        figure = effects(whole, axis="x", title="t", level="95 %")
    assert markers(figure.axes[0]) == []
    low, high = figure.axes[0].get_xlim()
    assert low <= -0.2 < 0.4 <= high
    assert "95 % interval over seeds" in labels(figure)


def test_every_seed_is_drawn_over_training_and_the_last_interval_written() -> None:
    each = np.array([[-0.05, 0.0], [-0.1, 0.0]])
    made: dict[str, Any] = {
        "axis": "NLL",
        "title": "t",
        "between": "95 % interval",
        "last": "[-9, 8]",
    }
    with plots.styled():
        figure = difference(
            [100, 200], [-0.02, -0.05], [(-0.1, 0.05), (-9.0, 8.0)], seeds=Seeds(each, True), **made
        )
    for axes in figure.axes:  # the curve, and its last point
        assert markers(axes) == ["v", "^"]
        assert sum(line.get_marker() == "x" for line in axes.lines) == 2
        assert axes.get_ylim()[1] < 1
    assert (
        labels(figure)[-1]
        == "95 % interval, goes on beyond the picture\n(at the last point [-9, 8])"
    )
    with plots.styled():
        figure = difference(
            [100, 200], [-0.02, -0.05], [(-0.2, 0.1), (-0.3, 0.2)], seeds=Seeds(each, False), **made
        )
    assert markers(figure.axes[0]) == []
    assert not any(line.get_marker() == "x" for line in figure.axes[0].lines)
    assert labels(figure)[-1] == "95 % interval"


def test_what_is_written_beside_bars_stays_in_the_picture() -> None:
    with plots.styled():
        figure = plots.bars(
            ["a" * 60, "b"],
            [1_500.0, 1.0],
            ["1,500 tokens/s"] * 2,
            [None, None],
            axis="x",
            title="t",
        )
        figure.canvas.draw()
    assert figure.axes[0].get_xlim()[0] == 0, "a bar that does not begin at zero lies"
    width = figure.bbox.width
    for text in figure.axes[0].texts:
        assert text.get_window_extent().x1 <= width


def test_a_report_on_arms_draws_the_pointwise_band_and_the_zero_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure that the report shows, as matplotlib holds it when it is saved."""
    for name, shifts in (("a", {1: 0.0, 2: 0.01, 3: -0.02}), ("b", {4: 0.0, 5: 0.03, 6: -0.03})):
        write_arm(tmp_path, name, shifts)
    arms = {name: sorted(tmp_path.glob(f"{name}-s*")) for name in ("a", "b")}
    comparison = compare_arms(arms, treatment=["seed"])
    saved: dict[str, Any] = {}

    def keep(figure: Any, path: Path) -> tuple[int, int]:
        saved[path.name] = figure
        return 1, 1

    monkeypatch.setattr(plots, "save", keep)
    drawn = draw(comparison, tmp_path)
    figure = saved["difference-0-0.png"]
    results = comparison.pairs[0].results
    assert results is not None
    series = results.series["held_out/nll"]
    assert labels(figure) == [
        "no difference",
        "difference",
        "95 % interval over 3 seeds, pointwise",
    ]
    assert len(figure.axes) == 2  # over training, and the last point
    for axes in figure.axes:
        zeros = [line for line in axes.lines if line.get_label() == "no difference"]
        assert [list(line.get_ydata()) for line in zeros] == [[0, 0]]
        assert all(line.get_visible() and line.get_linewidth() >= 1 for line in zeros)
        low, high = axes.get_ylim()
        assert low < 0 < high
    (band,) = figure.axes[0].collections[:1]
    corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
    assert np.isnan(series.interval[0]).all()  # before training all seeds are alike
    for tokens, ends in list(zip(series.tokens, series.interval.tolist(), strict=True))[1:]:
        assert {(float(tokens), end) for end in ends} <= corners
    assert "the verdict is of the last point" in drawn["answer:b"].figures[0].caption
    assert "95 % over seeds, pointwise" in render_arms_markdown(comparison)
