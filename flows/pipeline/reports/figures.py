"""Draw the figures of the reports as PNG files."""

import io
import textwrap
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.reports.baselines import BASELINE_TITLES
from pipeline.reports.terminal import CONTEST_TITLES
from pipeline.results.evaluation import Evaluation, WinRate
from pipeline.results.reward_report import Accuracy, Calibration, RewardReport, SampleScores

INCHES = 6.0
"""Width of a figure in inches."""

DPI = 150
"""Pixels per inch. A figure is 900 pixels wide, and pages show it 600 pixels wide."""

COLOR = "#1f5f99"
QUIET = "#50565f"

MARGINS = {"people": "people's margin", "model": "the model's own margin"}
"""Source of the margins by which the accuracy is grouped -> title."""


def reward_model_figures(report: RewardReport) -> dict[str, bytes]:
    """Return name -> figure about a reward model."""
    return {
        "accuracy-by-margin": accuracy_by_margin_plot(report.accuracy),
        "reliability": reliability_plot(report.calibration),
        "sample-scores": score_plot(report.samples),
        "best-of-k": best_of_k_plot(report.samples),
    }


def accuracy_by_margin_plot(accuracy: Accuracy) -> bytes:
    """Plot the accuracy by margin, with a line at 50 %."""
    rates = accuracy.by_margin
    figure, axes = _draw_rates(
        f"Accuracy by {MARGINS[accuracy.margin_of]}; dashed: a tossed coin",
        {name: (rate.accuracy, rate.low, rate.high) for name, rate in rates.items()},
    )
    axes.set_xlabel("right, % of pairs with the 95 % interval")
    return _as_png(figure)


def reliability_plot(calibration: Calibration) -> bytes:
    """Plot the accuracy and the number of pairs by confidence."""
    bins = calibration.bins
    sure = [part.confidence for part in bins]
    figure = _figure("Accuracy by confidence; dashed: as right as it is sure", height=4.4)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    upper.plot([0.5, 1], [0.5, 1], "--", color=QUIET, linewidth=1)
    upper.vlines(sure, [part.low for part in bins], [part.high for part in bins], COLOR)
    upper.plot(sure, [part.accuracy for part in bins], "o", color=COLOR)
    upper.set_ylabel("right, % of pairs")
    upper.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    lower.bar(sure, [part.n for part in bins], width=0.006, color=COLOR)
    lower.set(xlim=(0.49, 1.01), xlabel="confidence: sigmoid of the margin, %", ylabel="pairs")
    lower.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    lower.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    return _as_png(figure)


def score_plot(samples: SampleScores) -> bytes:
    """Plot the histogram of the scores of the SFT policy's samples, and the references' mean."""
    figure = _figure(f"Scores of the SFT policy's samples{_dashed(samples)}", height=2.8)
    axes = figure.subplots()
    axes.stairs(samples.counts, samples.edges, fill=True, color=COLOR)
    if samples.references:
        axes.axvline(samples.references.mean, linestyle="--", color=QUIET, linewidth=1)
    axes.set(xlabel="score", ylabel="samples")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return _as_png(figure)


def best_of_k_plot(samples: SampleScores) -> bytes:
    """Plot the expected score of the best of k samples, and the references' mean."""
    figure = _figure(f"Best of k samples of a prompt{_dashed(samples)}", height=2.8)
    axes = figure.subplots()
    sizes = list(samples.best_of)
    axes.plot(sizes, list(samples.best_of.values()), "o-", color=COLOR)
    if samples.references:
        axes.axhline(samples.references.mean, linestyle="--", color=QUIET, linewidth=1)
    axes.set(xlabel="k, samples", ylabel="expected score")
    return _as_png(figure)


def _dashed(samples: SampleScores) -> str:
    return "; dashed: mean of the references" if samples.references else ""


def win_rate_plot(win_rates: Mapping[str, WinRate]) -> bytes:
    """Plot the win rate of each contest with its interval, and a line at 50 %."""
    judges = ", ".join(dict.fromkeys(rate.judge for rate in win_rates.values()))
    figure, axes = _draw_rates(
        f"Judged by {judges}",
        {
            CONTEST_TITLES[name]: (rate.rate, rate.low, rate.high)
            for name, rate in win_rates.items()
        },
    )
    axes.set(xlim=(-0.03, 1.03), xlabel="wins, % of pairs with the 95 % interval, ties as halves")
    return _as_png(figure)


def baseline_plot(evaluation: Evaluation) -> bytes | None:
    """Plot win rates against SFT by KL divergence.

    Return None without baselines, or if the win rate or the divergence of PPO is not known.
    """
    baselines, kl = evaluation.baselines, evaluation.kl_of_ppo
    if baselines is None or baselines.ppo is None or kl is None:
        return None
    points = {
        BASELINE_TITLES[name]: (one.kl, one.win_rate)
        for name, one in baselines.found.items()
        if one.kl is not None and one.win_rate is not None
    }
    points["PPO"] = (kl, baselines.ppo)
    figure = _figure(f"Judged by {baselines.ppo.judge}; dashed: SFT", height=3.4)
    axes = figure.subplots()
    axes.axhline(0.5, linestyle="--", color=QUIET, linewidth=1)
    axes.plot(0, 0.5, "o", color=QUIET, clip_on=False)
    for name, (divergence, rate) in points.items():
        axes.vlines(divergence, rate.low, rate.high, COLOR)
        axes.plot(divergence, rate.rate, "o", color=COLOR)
        axes.annotate(name, (divergence, rate.rate), (6, 4), textcoords="offset points")
    # Leave room for the names at the right of the points.
    axes.set_xlim(0, 1.5 * max(divergence for divergence, _ in points.values()))
    axes.set(xlabel="KL of an answer from SFT, nats", ylabel="wins against SFT, % of pairs")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    return _as_png(figure)


def _draw_rates(title: str, rates: Mapping[str, tuple[float, float, float]]) -> tuple[Figure, Axes]:
    """Plot rates with their intervals, the first rate on top, and a line at 50 %."""
    figure = _figure(title, height=0.8 + 0.5 * len(rates))
    axes = figure.subplots()
    axes.axvline(0.5, linestyle="--", color=QUIET, linewidth=1)
    for row, (rate, low, high) in enumerate(rates.values()):
        axes.hlines(row, low, high, COLOR)
        axes.plot(rate, row, "o", color=COLOR)
        axes.annotate(f"{rate:.1%}", (rate, row), (0, 6), textcoords="offset points", ha="center")
    names = [_wrapped(name, 26) for name in rates]
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params("y", length=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    return figure, axes


def _figure(title: str, *, height: float) -> Figure:
    """Return an empty figure; `height` does not include the title."""
    lines = _wrapped(title, 75)
    height += 0.2 * (1 + lines.count("\n"))
    figure = Figure(figsize=(INCHES, height), dpi=DPI, layout="constrained")
    figure.suptitle(lines, x=0.01, ha="left", fontsize=10, parse_math=False)
    return figure


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _as_png(figure: Figure) -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
