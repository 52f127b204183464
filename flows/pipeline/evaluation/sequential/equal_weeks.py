"""Estimate how often the gate would promote an equal policy, from verdicts on equal policies."""

import numpy as np

from pipeline.evaluation.rates import Array
from pipeline.evaluation.sequential.until_decided import Rule

WEEKS = 10_000
"""Number of resampled weeks."""


def promoted_share(values: Array, rule: Rule, *, weeks: int = WEEKS, seed: int) -> float:
    """Return the share of resampled weeks in which a rule finds the candidate better.

    A week draws as many values as there are, with replacement. Each drawn value x becomes 1 - x
    with probability 1/2: candidate and opponent are the same policy, so their order is arbitrary.

    Args:
        values: points (N,) of the candidate in [0, 1], one for each prompt.
        rule: rule of the gate.
        weeks: number of resampled weeks.
        seed: seed of the draws.
    """
    rng = np.random.default_rng(seed)
    promoted = 0
    for _ in range(weeks):
        drawn = rng.choice(values, len(values))
        drawn = np.where(rng.uniform(size=len(values)) < 0.5, drawn, 1 - drawn)
        promoted += rule.first_decision(drawn)[0] == "better"
    return promoted / weeks
