"""The numbers of the reports that the registry keeps as metrics, so that runs can be compared.

The reports are whole in the artifacts. Only these names, which no data set decides on, are metrics.
"""

from collections.abc import Mapping
from typing import Any

Numbers = dict[str, float]


def reward_model_numbers(report: Mapping[str, Any]) -> Numbers:
    """What to know of a reward model's report at a glance."""
    accuracy, samples = report["accuracy"], report["samples"]
    numbers = {
        "accuracy": accuracy["accuracy"],
        "accuracy_low": accuracy["low"],
        "accuracy_high": accuracy["high"],
        "accuracy_of_longer_wins": accuracy["longer"]["accuracy"],
        "calibration_error": report["calibration"]["error"],
        "length_correlation": report["lengths"]["correlation"],
        "sample_deviation": samples["deviation"],
        "bias": report["bias"],
        "gain": report["gain"],
        "fit": report["fit"],
    }
    return _under("reward_model", numbers)


def evaluation_numbers(evaluation: Mapping[str, Any]) -> Numbers:
    """What to know of an evaluation at a glance."""
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
        **_under("improvement", {n: evaluation["improvement"][n] for n in ("difference", "low")}),
        # Of SFT from itself it is rounding alone.
        **_under("kl", {"ppo": evaluation["kl"]["ppo"]}),
        **_under("distinct", evaluation["distinct"]),
        **_under("length", evaluation["length"]),
        **_under("repetition", evaluation["repetition"]),
        "evaluation/conclusive": float(evaluation["conclusive"]),
    }


def _under(group: str, numbers: Mapping[str, float | None]) -> Numbers:
    """The numbers that are there, their names behind the group's."""
    return {f"{group}/{name}": float(value) for name, value in numbers.items() if value is not None}
