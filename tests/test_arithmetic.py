"""The pure functions of PPO against sums done by hand, and the properties they keep."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from ppo_core.advantages import gae_advantages
from ppo_core.kl import kl_per_token
from ppo_core.losses import policy_loss, value_loss
from ppo_core.rewards import penalise_missing_stop, token_rewards
from ppo_core.tensors import (
    length_mask,
    length_sorted_batches,
    masked_mean,
    masked_sum,
    pad_rows,
    standardise,
    tempered,
)

NAN = float("nan")


def test_k1_is_the_difference_of_log_probabilities():
    actual = kl_per_token(tensor([-1.0, -2.0]), tensor([-1.5, -1.0]), "k1")
    assert_close(actual, tensor([0.5, -1.0]))


def test_k3_by_hand():
    # log q - log p = -0.5 and 1.0; k3 = exp(d) - 1 - d
    actual = kl_per_token(tensor([-1.0, -2.0]), tensor([-1.5, -1.0]), "k3")
    expected = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert_close(actual, tensor(expected))


def test_an_unknown_estimator_is_refused_by_name():
    with pytest.raises(ValueError, match="k7"):
        kl_per_token(tensor([0.0]), tensor([0.0]), "k7")


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimators_average_to_the_divergence_of_the_distributions(estimator):
    # All V outcomes weighted by p instead of samples: the estimate's expectation, exactly.
    torch.manual_seed(0)
    p = torch.log_softmax(torch.randn(50, dtype=torch.float64), 0)
    q = torch.log_softmax(torch.randn(50, dtype=torch.float64), 0)
    exact = (p.exp() * (p - q)).sum()
    assert_close((p.exp() * kl_per_token(p, q, estimator)).sum(), exact)


def test_k3_is_never_negative():
    torch.manual_seed(0)
    assert (kl_per_token(torch.randn(1000), torch.randn(1000), "k3") >= 0).all()


def test_a_missing_stop_costs_the_penalty_and_a_present_one_nothing():
    actual = penalise_missing_stop(tensor([2.0, -1.0]), tensor([True, False]), 1.5)
    assert_close(actual, tensor([2.0, -2.5]))


def test_rewards_by_hand():
    # kl_coef 0.1; the score lands on the last counted token, wherever the padding begins.
    mask = tensor([[True, True, True], [True, False, False]])
    kl = tensor([[1.0, 2.0, -1.0], [3.0, NAN, NAN]])
    actual = token_rewards(tensor([5.0, 7.0]), kl, mask, kl_coef=0.1)
    assert_close(actual, tensor([[-0.1, -0.2, 5.1], [6.7, 0.0, 0.0]]))


def test_gae_matches_the_sum_done_by_hand():
    # gamma 1, lambda 0.5. deltas: 0+.2-.5=-.3   0+.6-.2=.4   1-.6=.4
    # backwards: A2=.4   A1=.4+.5*.4=.6   A0=-.3+.5*.6=0
    actual = gae_advantages(
        tensor([[0.0, 0.0, 1.0]]), tensor([[0.5, 0.2, 0.6]]), gamma=1.0, gae_lambda=0.5
    )
    assert_close(actual, tensor([[0.0, 0.6, 0.4]]))


def test_gae_discounts_by_gamma():
    # gamma .5, lambda 1: A1 = 2 - 1 = 1; A0 = 0 + .5*1 - 4 + .5*1 = -3
    actual = gae_advantages(tensor([[0.0, 2.0]]), tensor([[4.0, 1.0]]), gamma=0.5, gae_lambda=1.0)
    assert_close(actual, tensor([[-3.0, 1.0]]))


def test_gae_with_lambda_one_is_the_return_less_the_value():
    torch.manual_seed(0)
    rewards, values = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    actual = gae_advantages(rewards, values, gamma=1.0, gae_lambda=1.0)
    assert_close(actual, to_go - values)


def test_gae_with_lambda_zero_is_the_one_step_error():
    rewards, values = tensor([[1.0, 2.0]]), tensor([[3.0, 5.0]])
    actual = gae_advantages(rewards, values, gamma=1.0, gae_lambda=0.0)
    assert_close(actual, tensor([[1.0 + 5.0 - 3.0, 2.0 - 5.0]]))


def test_padding_changes_no_advantage():
    torch.manual_seed(0)
    rewards, values = torch.randn(3, 5), torch.randn(3, 5)
    short = gae_advantages(rewards, values, gamma=0.9, gae_lambda=0.7)
    padded = torch.nn.functional.pad
    long = gae_advantages(
        padded(rewards, (0, 4)), padded(values, (0, 4)), gamma=0.9, gae_lambda=0.7
    )
    assert_close(long, padded(short, (0, 4)), rtol=0, atol=0)


def test_gae_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match="differ"):
        gae_advantages(torch.zeros(2, 3), torch.zeros(2, 4), gamma=1.0, gae_lambda=1.0)


def test_policy_loss_by_hand():
    # ratios 1.5 and 0.5, clip 0.2; A = 1, -1
    #  A=+1 r=1.5: max(-1.5, -1.2) = -1.2 clipped      A=-1 r=1.5: max(1.5, 1.2) = 1.5
    #  A=+1 r=0.5: max(-0.5, -0.8) = -0.5              A=-1 r=0.5: max(0.5, 0.8) = 0.8 clipped
    logprobs = tensor([1.5, 1.5, 0.5, 0.5]).log()
    advantages = tensor([1.0, -1.0, 1.0, -1.0])
    loss, clipped = policy_loss(logprobs, torch.zeros(4), advantages, cliprange=0.2)
    assert_close(loss, tensor([-1.2, 1.5, -0.5, 0.8]))
    assert clipped.tolist() == [True, False, False, True]


def test_a_clipped_token_has_no_gradient_and_another_has_minus_a_times_ratio():
    logprobs = tensor([1.5, 1.1]).log().requires_grad_()
    loss, _ = policy_loss(logprobs, torch.zeros(2), tensor([1.0, 2.0]), cliprange=0.2)
    loss.sum().backward()
    assert_close(logprobs.grad, tensor([0.0, -2.0 * 1.1]))


def test_value_loss_by_hand():
    # old 1, return 3, clip 0.5. v = 2: clipped to 1.5, max(1, 2.25)/2 = 1.125, the clipped side
    # v = 1.2: inside the range, (1.8)^2 / 2 = 1.62. v = 0: clipped to 0.5, max(9, 6.25)/2 = 4.5
    loss, clipped = value_loss(
        tensor([2.0, 1.2, 0.0]), torch.ones(3), torch.full((3,), 3.0), cliprange_value=0.5
    )
    assert_close(loss, tensor([1.125, 1.62, 4.5]))
    assert clipped.tolist() == [True, False, False]


def test_standardise_by_hand():
    # counted: 1, 2, 3, 6; mean 3, squares 4+1+0+9 = 14, variance 14/3
    values = tensor([[1.0, 2.0, NAN], [3.0, 6.0, 100.0]])
    mask = tensor([[True, True, False], [True, True, False]])
    deviation = math.sqrt(14 / 3)
    expected = tensor([[-2.0, -1.0, 0.0], [0.0, 3.0, 0.0]]) / deviation
    assert_close(standardise(values, mask, keep_mean=False), expected)
    with_mean = torch.where(mask, expected + 3.0, 0.0)
    assert_close(standardise(values, mask, keep_mean=True), with_mean)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 8), min_size=2, max_size=6),
    scale=st.floats(0.01, 100),
)
def test_standardised_values_have_mean_zero_and_deviation_one(seed, lengths, scale):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(lengths), 8, generator=generator, dtype=torch.float64) * scale + 3
    mask = length_mask(tensor(lengths), 8)
    assume(values[mask].std() > 0.01)  # below, epsilon=1e-8 shows
    out = standardise(values, mask, keep_mean=False)
    assert abs(out[mask].mean()) < 1e-6
    assert abs(out[mask].std() - 1) < 1e-4
    assert (out[~mask] == 0).all()


def test_the_same_value_everywhere_standardises_to_zero_and_not_to_nan():
    out = standardise(torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool), keep_mean=False)
    assert_close(out, torch.zeros(2, 3))


def test_statistics_over_two_processes_are_those_of_one():
    torch.manual_seed(0)
    values, mask = torch.randn(6, 5), length_mask(tensor([5, 1, 2, 4, 3, 5]), 5)
    whole = standardise(values, mask, keep_mean=True)
    other = standardise_of_half(values, mask, slice(3, 6))
    half = standardise_of_half(values, mask, slice(0, 3))
    assert_close(torch.cat([half, other]), whole)


def standardise_of_half(values, mask, rows):
    """One process's part, its sums completed with those of the other process."""
    others = torch.ones(len(values), dtype=torch.bool)
    others[rows] = False
    mean = masked_mean(values, mask)
    missing = iter(
        [
            torch.stack([masked_sum(values[others], mask[others]), mask[others].sum()]),
            torch.stack(
                [masked_sum((values[others] - mean) ** 2, mask[others]), mask[others].sum()]
            ),
        ]
    )
    return standardise(
        values[rows], mask[rows], keep_mean=True, sum_over_processes=lambda own: own + next(missing)
    )


def test_masked_mean_ignores_what_the_mask_hides():
    assert masked_mean(tensor([1.0, NAN, 3.0]), tensor([True, False, True])) == 2.0


def test_masked_mean_of_nothing_is_zero():
    assert masked_mean(tensor([NAN]), tensor([False])) == 0.0


def test_the_temperature_divides_the_logits():
    assert_close(tempered(tensor([[1.0, 3.0]]), 0.5), tensor([[2.0, 6.0]]))


def test_half_precision_logits_are_normalised_in_full_precision():
    assert tempered(torch.zeros(1, 3, dtype=torch.bfloat16), 1.0).dtype == torch.float32
    assert tempered(torch.zeros(1, 3, dtype=torch.float64), 1.0).dtype == torch.float64


def test_rows_are_padded_on_the_side_that_is_asked_for():
    right, lengths = pad_rows([[5], [6, 7]])
    assert right.tolist() == [[5, 0], [6, 7]]
    assert lengths.tolist() == [1, 2]
    assert pad_rows([[5], [6, 7]], side="left")[0].tolist() == [[0, 5], [6, 7]]


def test_batches_hold_every_row_once_longest_first():
    batches = length_sorted_batches(tensor([3, 9, 5, 9, 1]), 2)
    assert [batch.tolist() for batch in batches] == [[1, 3], [2, 0], [4]]
