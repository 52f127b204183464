"""Simulated evaluations of a guard: equal policies refused, and worse policies found."""

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeline.evaluation.guards.compare import compare_scores
from pipeline.settings.gate_configs import GuardsConfig
from tests.benchmarks.tables import make_table

PROMPTS = (64, 256, 1_024)
BAD = (0.0, 0.05, 0.2)
"""Shares of the champion's answers that have no point."""

WORSE = (0.0, 0.05, 0.1)
"""How much larger the share of the policy is."""

RUNS = 1_000
FEWEST_LOSSES = 9
"""Fewest prompts, all lost, after which a policy is shown to be worse."""


def refused(count: int, bad: float, worse: float, *, runs: int = RUNS, seed: int = 0) -> float:
    """Return the share of runs in which the guard refuses a policy.

    The answers to a prompt are independent, as at a high temperature with another seed. Answers
    that agree more often give a guard more power.
    """
    rng = np.random.default_rng(seed)
    prompts, margin = [str(number) for number in range(count)], GuardsConfig().margin
    found = 0
    for _ in range(runs):
        own = (rng.random(count) >= bad + worse).astype(float)
        other = (rng.random(count) >= bad).astype(float)
        # Fewer losses pass for certain; their interval is not computed.
        if other.sum() - own.sum() >= FEWEST_LOSSES:
            result = compare_scores(prompts, own, other, margin=margin, source="")
            found += not result.passed
    return found / runs


def guards_table() -> Table:
    """Return the table of refusals by number of prompts."""
    table = make_table(
        f"Policies refused by a guard with a margin of {GuardsConfig().margin:.0%}, {RUNS:,} runs",
        "|".join(["champion", "policy", *(f"{count:,} prompts" for count in PROMPTS)]),
    )
    for worse in WORSE:
        for bad in BAD:
            shares = (refused(count, bad, worse) for count in PROMPTS)
            table.add_row(f"{bad:.0%}", f"{bad + worse:.0%}", *(f"{one:.1%}" for one in shares))
    return table


if __name__ == "__main__":
    Console(width=100).print(guards_table())
