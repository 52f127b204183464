"""The figures of the reports: what is drawn, and where."""

import io
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.reports.figures import (
    COLOR,
    DPI,
    accuracy_by_margin_plot,
    baseline_plot,
    best_of_k_plot,
    reliability_plot,
    reward_model_figures,
    score_plot,
    win_rate_plot,
)
from pipeline.results.evaluation import WinRate
from pipeline.results.reward_report import Bin, Rate, References, Samples
from tests.helpers.inputs.sample_reports import (
    changed,
    evaluation_result,
    reward_report,
    win_rate,
)


def pixels(png: bytes) -> np.ndarray:
    """The picture as (height, width, 3)."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def blue(png: bytes) -> np.ndarray:
    """Where the data is drawn, (height, width) of bool."""
    colour = [int(COLOR[i : i + 2], 16) for i in (1, 3, 5)]
    return (pixels(png) == colour).all(axis=2)


def rate(value: float, *, judge: str = "rule") -> WinRate:
    """A rate without an interval to speak of."""
    return win_rate(rate=value, low=value, high=value, n=10, judge=judge)


def samples(**changes: Any) -> Samples:
    return replace(
        reward_report().samples,
        **{
            "counts": [1, 2, 3],
            "edges": [0.0, 1.0, 2.0, 3.0],
            "best_of": {"1": 1.0, "2": 2.0},
            "references": None,
        }
        | changes,
    )


@pytest.fixture(scope="module")
def figures() -> dict[str, bytes]:
    return reward_model_figures(reward_report())


def test_every_figure_of_a_report_is_a_picture_900_pixels_wide(figures: dict[str, bytes]):
    assert set(figures) == {"accuracy-by-margin", "reliability", "sample-scores", "best-of-k"}
    evaluation = evaluation_result()
    ours = [win_rate_plot(evaluation.win_rate), baseline_plot(evaluation)]
    for png in (*figures.values(), *ours):
        height, width, _ = pixels(png).shape
        assert width == 6 * DPI == 900
        assert 250 < height < 900
        assert blue(png).sum() > 500


def test_the_same_report_gives_the_same_files(figures: dict[str, bytes]):
    assert reward_model_figures(reward_report()) == figures


def test_rates_of_0_50_and_100_percent_are_drawn_evenly_from_the_left_to_the_right():
    names = ("sft_vs_reference", "ppo_vs_reference", "ppo_vs_sft")
    rates = dict(zip(names, (0.0, 0.5, 1.0), strict=True))
    drawn = blue(win_rate_plot({name: rate(value) for name, value in rates.items()}))
    rows, columns = np.nonzero(drawn)
    # Three dots of a few pixels each, one under the other: cut between the thirds of their span.
    cuts = np.linspace(rows.min(), rows.max() + 1, 4)
    zero, half, whole = (
        columns[(start <= rows) & (rows < end)].mean() for start, end in pairwise(cuts)
    )
    assert zero < half < whole
    assert half - zero == pytest.approx(whole - half, abs=1)


def test_an_interval_is_drawn_as_wide_as_it_is():
    def width(low: float, high: float) -> int:
        contest = replace(rate(0.5), low=low, high=high)
        return int(blue(win_rate_plot({"ppo_vs_sft": contest})).any(axis=0).sum())

    # 0.2 .. 0.8 is three times as wide as 0.4 .. 0.6.
    assert width(0.2, 0.8) == pytest.approx(3 * width(0.4, 0.6), rel=0.03)


def test_baselines_are_drawn_by_their_divergence_and_win_rate():
    evaluation = evaluation_result()
    changes: dict[str, Any] = {"kl": {"sft": 0.0, "ppo": 4.0}}
    for name, kl, wins in (("greedy", 1.0, 0.2), ("best_of_4", 2.0, 0.4)):
        changes |= {
            f"baselines.found.{name}.win_rate": rate(wins),
            f"baselines.found.{name}.kl": kl,
        }
    drawn = baseline_plot(changed(evaluation, {**changes, "baselines.ppo": rate(0.8)}))
    assert drawn
    rows, columns = np.nonzero(blue(drawn))
    # From left to right: greedy, the best of 4, and PPO, twice as far each time, and as high.
    (x0, y0), (x1, y1), (x2, y2) = (
        (columns[group].mean(), rows[group].mean())
        for group in np.split(
            np.argsort(columns, kind="stable"),
            np.flatnonzero(np.diff(np.sort(columns)) > 20) + 1,
        )
    )
    assert x2 - x1 == pytest.approx(2 * (x1 - x0), abs=2)
    assert y1 - y2 == pytest.approx(2 * (y0 - y1), abs=2)
    assert baseline_plot(changed(evaluation, {"kl": {"sft": 0.0, "ppo": None}})) is None
    assert baseline_plot(changed(evaluation, {"baselines": None})) is None


def test_points_that_are_as_right_as_sure_lie_on_a_straight_line():
    bins = [Bin(accuracy=at, low=at, high=at, n=10, confidence=at) for at in (0.5, 0.6, 0.9)]
    drawn = blue(reliability_plot(replace(reward_report().calibration, bins=bins)))
    height = drawn.shape[0]
    rows, columns = np.nonzero(drawn[: height * 3 // 4])
    left = columns < columns.min() + 20
    right = columns > columns.max() - 20
    middle = ~left & ~right
    (x0, y0), (x1, y1), (x2, y2) = (
        (columns[group].mean(), rows[group].mean()) for group in (left, middle, right)
    )
    # From 0.5 to 0.6 is a quarter of the way to 0.9.
    assert x1 - x0 == pytest.approx((x2 - x0) / 4, abs=1)
    assert y1 - y0 == pytest.approx((y2 - y0) / 4, abs=1)
    assert y2 < y0


def test_the_bars_of_a_histogram_are_as_high_as_their_counts():
    drawn = blue(score_plot(samples()))
    columns = np.flatnonzero(drawn.any(axis=0))
    # The middles of three bars that stand side by side.
    middles = np.quantile(columns, [1 / 6, 3 / 6, 5 / 6]).astype(int)
    heights = drawn[:, middles].sum(axis=0)
    # 1 : 2 : 3.
    assert heights[1] == pytest.approx(2 * heights[0], abs=3)
    assert heights[2] == pytest.approx(3 * heights[0], abs=3)


@pytest.mark.parametrize("plot", [score_plot, best_of_k_plot])
def test_the_references_are_drawn_where_there_are_any(plot: Any):
    references = References(mean=1.5, above_samples=0.5, low=0.4, high=0.6)
    with_them = plot(samples(references=references))
    assert (pixels(with_them) != pixels(plot(samples()))).any()


def test_samples_that_all_score_the_same_are_drawn():
    alike = samples(counts=[0, 6], edges=[11.5, 12.0, 12.5], best_of={"1": 12.0, "2": 12.0})
    assert blue(score_plot(alike)).any()
    assert blue(best_of_k_plot(alike)).any()


def test_names_are_text_and_no_formulas():
    # matplotlib reads what stands between two dollar signs as TeX, and refuses this one.
    judge = r"python:$\frac{$:judge"
    assert blue(win_rate_plot({"ppo_vs_sft": rate(0.5, judge=judge)})).any()
    by_margin = {judge: Rate(accuracy=0.5, low=0.5, high=0.5, n=10)}
    accuracy = replace(reward_report().accuracy, by_margin=by_margin)
    assert blue(accuracy_by_margin_plot(accuracy)).any()


def test_a_long_name_makes_a_figure_taller_and_not_wider():
    short, long = (
        pixels(win_rate_plot({"ppo_vs_sft": rate(0.5, judge=judge)})).shape
        for judge in ("rule", "a judge of many words " * 20)
    )
    assert long[0] > short[0] + 100
    assert long[1] == short[1]
