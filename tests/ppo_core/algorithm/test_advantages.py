"""Advantages without a critic, against results by hand."""

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from ppo_core.algorithm.advantages import (
    gae_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    returns_to_go,
)


def test_returns_to_go_are_discounted_sums():
    rewards = tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    # 1 + (2 + 4/2)/2 = 3, 2 + 4/2 = 4.
    expected = tensor([[3.0, 4.0, 4.0], [3.0, 0.0, 0.0]])
    assert_close(returns_to_go(rewards, gamma=0.5), expected)


def test_returns_to_go_are_the_returns_of_gae_with_lambda_1_and_any_critic():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    over_critic = gae_advantages(rewards, values, gamma=0.9, gae_lambda=1.0)
    assert_close(returns_to_go(rewards, gamma=0.9), over_critic + values)


def test_a_response_is_compared_with_the_others_of_its_group():
    # Groups (1, 3) and (0, 0).
    pairs = leave_one_out_advantages(tensor([1.0, 3.0, 0.0, 0.0]), group=2)
    assert pairs.tolist() == [-2.0, 2.0, 0.0, 0.0]
    # Group (0, 3, 6): the others' means are 4.5, 3 and 1.5.
    three = leave_one_out_advantages(tensor([0.0, 3.0, 6.0]), group=3)
    assert three.tolist() == [-4.5, 0.0, 4.5]


def test_an_advantage_over_the_group_is_in_its_standard_deviations():
    # Of (1, 3): mean 2, deviation sqrt(2).
    pairs = group_relative_advantages(tensor([1.0, 3.0, 5.0, 5.0]), group=2)
    assert pairs.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0, 0.0], abs=1e-3)
    # Of (0, 3, 6): mean 3, deviation 3.
    three = group_relative_advantages(tensor([0.0, 3.0, 6.0]), group=3)
    assert three.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-3)


def test_an_advantage_over_the_group_need_not_be_scaled():
    rewards = tensor([0.0, 3.0, 6.0, 1.0, 1.0, 4.0])
    expected = [-3.0, 0.0, 3.0, -1.0, -1.0, 2.0]
    assert group_relative_advantages(rewards, group=3, scales=False).tolist() == expected


@pytest.mark.parametrize("advantages", [leave_one_out_advantages, group_relative_advantages])
def test_a_constant_added_to_the_rewards_of_a_prompt_changes_nothing(advantages):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    added = tensor([5.0, -3.0, 100.0]).repeat_interleave(4)
    assert_close(advantages(rewards + added, group=4), advantages(rewards, group=4))


@pytest.mark.parametrize("advantages", [leave_one_out_advantages, group_relative_advantages])
@pytest.mark.parametrize(("responses", "group"), [(4, 1), (5, 2)])
def test_responses_that_form_no_groups_are_refused(advantages, responses: int, group: int):
    with pytest.raises(ValueError, match=f"{responses} responses .* groups of {group}"):
        advantages(torch.zeros(responses), group=group)
