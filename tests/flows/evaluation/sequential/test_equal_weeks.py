"""How often the gate would promote an equal policy."""

import numpy as np

from pipeline.evaluation.sequential.equal_weeks import promoted_share
from pipeline.evaluation.sequential.until_decided import Rule


def test_the_share_keeps_to_alpha_also_where_one_side_won_all_pairs():
    rule = Rule(least=0.5, gain=None, alpha=0.05)
    share = promoted_share(np.ones(200), rule, weeks=2000, seed=1)
    assert 0.001 < share < 0.05
    assert promoted_share(np.ones(200), rule, weeks=2000, seed=1) == share


def test_pairs_that_are_all_ties_promote_nothing():
    rule = Rule(least=0.5, gain=None, alpha=0.05)
    assert promoted_share(np.full(200, 0.5), rule, weeks=50, seed=1) == 0


def test_a_gate_that_asks_for_less_than_half_promotes_equal_policies():
    rule = Rule(least=0.3, gain=None, alpha=0.05)
    assert promoted_share(np.ones(200), rule, weeks=200, seed=1) > 0.99
