"""The main numbers of the reports, logged to MLflow as metrics for the comparison of runs.

The full reports are logged as artifacts. Names of metrics never come from a data set.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.results.reward_report import RewardReport

Numbers = dict[str, float]


def reward_model_numbers(report: RewardReport) -> Numbers:
    """Return the headline numbers of a report on a reward model."""
    numbers = {
        "accuracy": report.accuracy.accuracy,
        "accuracy_low": report.accuracy.low,
        "accuracy_high": report.accuracy.high,
        "accuracy_of_longer_wins": report.accuracy.longer.accuracy,
        "calibration_error": report.calibration.error,
        "length_correlation": report.lengths.correlation,
        "sample_deviation": report.samples.deviation,
        "bias": report.bias,
        "gain": report.gain,
        "fit": report.fit,
    }
    return _under("reward_model", numbers)


def evaluation_numbers(evaluation: Mapping[str, Any]) -> Numbers:
    """Return the headline numbers of an evaluation."""
    numbers: Numbers = {}
    for contest, win_rate in evaluation["win_rate"].items():
        numbers |= _under(
            f"win_rate/{contest}",
            {
                name: win_rate[name]
                for name in ("rate", "low", "high", "flip_rate", "length_controlled")
            },
        )
    return {
        **numbers,
        **_under("improvement", _chosen(evaluation["improvement"], "difference", "low")),
        **_under("judge", _chosen(evaluation["trained_judge"], "accuracy", "low", "high")),
        # The KL of SFT from itself is only rounding error.
        **_under("kl", {"ppo": evaluation["kl"]["ppo"]}),
        **_under("distinct", evaluation["distinct"]),
        **_under("length", evaluation["length"]),
        **_under("repetition", evaluation["repetition"]),
        "evaluation/conclusive": float(evaluation["conclusive"]),
    }


def _chosen(numbers: Mapping[str, float] | None, *names: str) -> Numbers:
    """Return the named numbers; empty if there are none."""
    return {name: numbers[name] for name in names} if numbers else {}


def _under(group: str, numbers: Mapping[str, float | None]) -> Numbers:
    """Return the numbers that are not None, with the group as the prefix of their names."""
    return {f"{group}/{name}": float(value) for name, value in numbers.items() if value is not None}
