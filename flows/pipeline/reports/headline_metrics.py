"""The main numbers of the reports, logged to MLflow as metrics to compare runs.

The full reports are logged as artifacts. The names of metrics never contain text of a data set.
"""

from collections.abc import Mapping

from pipeline.results.evaluation import Evaluation
from pipeline.results.reward_report import RewardReport

Numbers = dict[str, float]


def reward_model_numbers(report: RewardReport) -> Numbers:
    """Return the headline numbers of a report on a reward model."""
    numbers: dict[str, float | None] = {
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
    if found := report.on_policy:
        numbers |= {f"best_of_{k}": rate for k, rate in found.best_of.items()}
        numbers |= {"best_of_4_low": found.low, "best_of_4_high": found.high}
        numbers["on_policy_accuracy"] = found.accuracy.accuracy if found.accuracy else None
    if people := report.people:
        numbers |= {"people": people.accuracy, "people_low": people.low, "people_high": people.high}
    return _under("reward_model", numbers)


def evaluation_numbers(evaluation: Evaluation) -> Numbers:
    """Return the headline numbers of an evaluation."""
    numbers: Numbers = {}
    for contest, win_rate in evaluation.win_rate.items():
        numbers |= _under(
            f"win_rate/{contest}",
            {
                "rate": win_rate.rate,
                "low": win_rate.low,
                "high": win_rate.high,
                "flip_rate": win_rate.flip_rate,
                "length_controlled": win_rate.length_controlled,
                "style_controlled": win_rate.style_controlled,
            },
        )
    if gained := evaluation.improvement:
        numbers |= _under("improvement", {"difference": gained.difference, "low": gained.low})
    if judge := evaluation.trained_judge:
        figures = {"accuracy": judge.accuracy, "low": judge.low, "high": judge.high}
        numbers |= _under("judge", figures)
    for name, one in evaluation.baselines.found.items() if evaluation.baselines else ():
        if one.win_rate and one.gain:
            gains = {"gain": one.gain.difference, "gain_low": one.gain.low}
            rates = {"rate": one.win_rate.rate, "kl": one.kl}
            numbers |= _under(f"baseline/{name}", rates) | _under(f"baseline/{name}", gains)
    return {
        **numbers,
        # The KL divergence of SFT from itself is left out, because it is only a rounding error.
        **_under("kl", {"ppo": evaluation.kl_of_ppo}),
        **_under("distinct", evaluation.distinct),
        **_under("length", evaluation.length),
        **_under("repetition", evaluation.repetition),
        **_under("guards", {name: one.difference for name, one in evaluation.guards.items()}),
        "evaluation/conclusive": float(evaluation.conclusive),
    }


def _under(group: str, numbers: Mapping[str, float | None]) -> Numbers:
    """Return the numbers that are not None, with the group as the prefix of their names."""
    return {f"{group}/{name}": float(value) for name, value in numbers.items() if value is not None}
