"""The alpha of a decision, from the history of decisions."""

from itertools import pairwise

import pytest

from pipeline.registry.alpha_spending import limits_now, share_of
from pipeline.registry.decisions import Action, Decision
from pipeline.settings.gate_configs import PromotionConfig
from ppo_core.errors import ConfigError


def decision(action: Action, by: str = "run RLHF/1") -> Decision:
    return Decision(
        number=1, action=action, version=1, champion=1, reasons=(), by=by, at="", key=by
    )


PROMOTED, REFUSED = decision("promoted"), decision("refused")
LIMITS = PromotionConfig(false_promotion_rate=0.05)


def test_the_shares_of_all_decisions_sum_to_1_and_never_grow():
    shares = [share_of(number) for number in range(1, 200_001)]
    # The rest after decision n is 26 / n.
    assert sum(shares) + 26 / 200_000 == pytest.approx(1)
    assert sum(shares[:52]) == pytest.approx(0.5)
    assert all(later <= earlier for earlier, later in pairwise(shares))


@pytest.mark.parametrize(
    ("history", "alpha"),
    [
        ([], 0.05 / 104),
        ([REFUSED] * 51, 0.05 / 104),
        ([REFUSED] * 52, 0.05 * 26 / (53 * 52)),
        ([PROMOTED], 0.05 / 104 * 2),
        ([PROMOTED, REFUSED, PROMOTED], 0.05 / 104 * 3),
        ([PROMOTED] * 10 + [REFUSED] * 90, 0.05 * 26 / (101 * 100) * 11),
    ],
)
def test_alpha_follows_from_decisions_and_promotions(history: list[Decision], alpha: float):
    assert limits_now(LIMITS, history).alpha == pytest.approx(alpha)


@pytest.mark.parametrize(
    "other",
    [
        decision("promoted", "person A"),
        decision("rolled back", "person A"),
        decision("rolled back", "run Retrain/7"),
        decision("found", "?"),
    ],
)
def test_what_people_decide_and_what_is_withdrawn_is_no_test(other: Decision):
    assert limits_now(LIMITS, [other] * 60) == limits_now(LIMITS, [])


def test_without_the_setting_alpha_is_fixed():
    limits = PromotionConfig(alpha=0.01)
    assert limits_now(limits, [PROMOTED] * 60 + [REFUSED] * 60) == limits


def test_a_fixed_alpha_beside_it_is_refused():
    with pytest.raises(ConfigError, match=r"alpha=0\.01 would be ignored"):
        PromotionConfig(alpha=0.01, false_promotion_rate=0.05)
