"""Compare PPO with the baselines of SFT, as a table and as sentences."""

from pipeline.reports.document import as_decimal, as_interval, as_percent, as_points
from pipeline.results.evaluation import Baseline, Baselines, Evaluation, PairedDifference, WinRate

BASELINE_TITLES = {
    "greedy": "SFT, greedy",
    "best_of_4": "SFT, best of 4",
}
"""Baseline -> its title."""

BASELINE_COLUMNS = (
    "wins against SFT",
    "95 % interval",
    "KL, nats",
    "PPO gains",
    "95 % interval, points",
)
"""Headers of `baseline_rows`, without the first column, which has the titles."""


def baseline_rows(evaluation: Evaluation) -> tuple[tuple[str, ...], ...]:
    """Return the table of SFT, its baselines and PPO; empty without baselines."""
    baselines = evaluation.baselines
    if baselines is None:
        return ()
    return (
        ("SFT", as_percent(0.5), "", "0", "", ""),
        *((BASELINE_TITLES[name], *_cells(one)) for name, one in baselines.found.items()),
        ("PPO", *_rate(baselines.ppo), as_divergence(evaluation.kl_of_ppo), "", ""),
    )


def worth_of_ppo(baselines: Baselines) -> list[str]:
    """Compare PPO with the baselines of SFT, as sentences, or say why they were not compared."""
    best = baselines.found["best_of_4"]
    if baselines.ppo is None or best.win_rate is None or best.gain is None:
        return [f"PPO was not compared with what SFT reaches without PPO: {best.why}"]
    sentence = (
        f"On {baselines.ppo.n} prompts, PPO wins {as_percent(baselines.ppo.rate)} against SFT; the "
        "best of 4 samples by the reward model wins "
        f"{as_percent(best.win_rate.rate)} without any training. {_verdict(best.gain)}"
    )
    sentences = [sentence]
    greedy = baselines.found.get("greedy")
    if greedy and greedy.win_rate and greedy.gain:
        sentences.append(
            f"Greedy decoding of SFT wins {as_percent(greedy.win_rate.rate)}, and PPO "
            f"{as_percent(baselines.ppo.rate)}. {_verdict(greedy.gain)}"
        )
    return [*sentences, *([baselines.note] if baselines.note else [])]


def as_divergence(kl: float | None) -> str:
    """Return a KL divergence with two decimals, which hide the rounding error of SFT's value."""
    return "none" if kl is None else as_decimal(kl, 2)


def _cells(one: Baseline) -> tuple[str, ...]:
    gain = ("", "") if one.gain is None else as_points(one.gain)
    return (*_rate(one.win_rate), as_divergence(one.kl), *gain)


def _rate(rate: WinRate | None) -> tuple[str, str]:
    return ("not measured", "") if rate is None else (as_percent(rate.rate), as_interval(rate))


def _verdict(gain: PairedDifference) -> str:
    points, interval = as_points(gain)
    difference = f"{points}, 95 % interval {interval}"
    if gain.low > 0:
        return f"PPO is better: {difference}."
    if gain.high < 0:
        return f"PPO is worse: {difference}."
    return f"Which of the two is better is not clear: {difference}."
