"""Simulated weeks of the promotion gate: false promotions, power, and pairs that are judged.

PYTHONPATH=.:flows python -m tests.benchmarks.weeks
"""

from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeline.evaluation.until_decided import PAIRS_AT_ONCE, Rule
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.gate_configs import PromotionConfig
from tests.benchmarks.tables import make_table

RATES = (0.5, 0.53, 0.55, 0.6, 0.7, 0.8)
TIES = 0.2
WEEKS = 10_000
BEFORE = 512
"""Pairs that the gate of version 0.1 judged on the built-in task."""


@dataclass(frozen=True)
class Weeks:
    """Results of many weeks with one true win rate."""

    rate: float
    promoted: float
    """Share of the weeks in which the policy was promoted."""

    pairs: float
    """Mean number of pairs that were judged."""

    before: float
    """Share of the weeks in which the gate of version 0.1 would have promoted the policy."""


def simulate(rate: float, *, weeks: int = WEEKS, seed: int = 0) -> Weeks:
    """Decide `weeks` times about a policy of a true win rate, as the gate decides."""
    limits, most = PromotionConfig(), EvaluationConfig().num_examples
    least = limits.min_win_rate
    rule = Rule(least=least, gain=limits.gain_above(least), alpha=limits.alpha)
    rng = np.random.default_rng(seed)
    wins = 0.5 + (rate - 0.5) / (1 - TIES)  # of the pairs that are no ties
    promoted = pairs = before = 0
    for _ in range(weeks):
        ties = rng.uniform(size=most) < TIES
        points = np.where(ties, 0.5, rng.uniform(size=most) < wins)
        for stop in range(PAIRS_AT_ONCE, most + 1, PAIRS_AT_ONCE):
            if (decided := rule.decide(points[:stop])) != "undecided":
                break
        promoted += decided == "better"
        pairs += stop
        before += _promoted_before(points[:BEFORE])
    return Weeks(rate, promoted / weeks, pairs / weeks, before / weeks)


def _promoted_before(points: np.ndarray) -> bool:
    """Return whether the 95 % interval of the mean is above one half.

    The gate of version 0.1 used a bootstrap interval; the normal interval is close to it.
    """
    return bool(points.mean() - 1.96 * points.std() / np.sqrt(len(points)) > 0.5)


def weeks_table() -> Table:
    """Return the table of all true win rates."""
    table = make_table(
        f"{WEEKS:,} simulated weeks, {TIES:.0%} ties",
        "true win rate|promoted|pairs judged, mean|before: promoted|before: pairs",
    )
    for rate in RATES:
        found = simulate(rate)
        table.add_row(
            f"{rate:.0%}",
            f"{found.promoted:.2%}",
            f"{found.pairs:.0f}",
            f"{found.before:.2%}",
            str(BEFORE),
        )
    return table


if __name__ == "__main__":
    Console(width=100).print(weeks_table())
