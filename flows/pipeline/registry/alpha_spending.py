"""Compute the alpha of the next decision from the history of a registered model."""

from collections.abc import Sequence
from dataclasses import replace

from pipeline.registry.decisions import Decision
from pipeline.settings.gate_configs import PromotionConfig

EQUAL_SHARES = 52
"""Number of decisions, from the first on, with equal shares: a year of weekly decisions."""


def limits_now(limits: PromotionConfig, decisions: Sequence[Decision]) -> PromotionConfig:
    """Return the limits of the decision that follows `decisions`, with a fixed `alpha`.

    If `false_promotion_rate` is set, e-LOND (arXiv:2311.06412) replaces `alpha` at decision t by

        alpha_t = false_promotion_rate * share_t * (1 + promotions before t)

    Then the expected fraction of false promotions among all promotions is at most
    `false_promotion_rate`, however the decisions depend on each other. Only the decisions of
    promotion gates count: a person's promotion tests nothing, and neither does a withdrawal.
    """
    if limits.false_promotion_rate is None:
        return limits
    of_runs = [one for one in decisions if one.is_of_run]
    promotions = sum(one.action == "promoted" for one in of_runs)
    alpha = limits.false_promotion_rate * share_of(len(of_runs) + 1) * (1 + promotions)
    return replace(limits, alpha=alpha, false_promotion_rate=None)


def share_of(number: int) -> float:
    """Return the share of decision `number`, counted from 1; the shares of all decisions sum to 1.

    The first EQUAL_SHARES shares are equal and sum to 1/2. All later shares also sum to 1/2.
    """
    if number <= EQUAL_SHARES:
        return 1 / (2 * EQUAL_SHARES)
    return EQUAL_SHARES / (2 * number * (number - 1))
