"""The formulas of PPO against results computed by hand, and their properties."""

import itertools
import json
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from ppo_core.algorithm.advantages import gae_advantages
from ppo_core.algorithm.kl import full_kl, kl_per_token
from ppo_core.algorithm.kl_controller import AdaptiveKL
from ppo_core.algorithm.losses import aggregation_weights, policy_loss, value_loss
from ppo_core.algorithm.masking import length_mask, masked_mean, masked_var
from ppo_core.algorithm.reward_shaping import (
    clip_scores,
    length_penalty,
    overlong_penalty,
    penalize_missing_stop,
    token_rewards,
)
from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.algorithm.temperature import tempered
from ppo_core.algorithm.top_k_top_p import truncated
from ppo_core.algorithm.whitening import masked_whiten, whiten
from ppo_core.data.batching import PASS_COST, length_sorted_batches, pad_rows, token_batches

NAN, INF = float("nan"), float("inf")


def test_k1_is_the_difference_of_log_probabilities():
    actual = kl_per_token(tensor([-1.0, -2.0]), tensor([-1.5, -1.0]), "k1")
    assert_close(actual, tensor([0.5, -1.0]))


def test_k3_by_hand():
    # log q - log p = -0.5 and 1.0; k3 = exp(d) - 1 - d
    actual = kl_per_token(tensor([-1.0, -2.0]), tensor([-1.5, -1.0]), "k3")
    expected = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert_close(actual, tensor(expected))


def test_k2_and_abs_by_hand():
    logprobs, ref_logprobs = tensor([-1.0, -2.0]), tensor([-1.5, -1.0])  # differences 0.5 and -1
    assert_close(kl_per_token(logprobs, ref_logprobs, "k2"), tensor([0.125, 0.5]))
    assert_close(kl_per_token(logprobs, ref_logprobs, "abs"), tensor([0.5, 1.0]))


@pytest.mark.parametrize("estimator", ["k7", "full"])
def test_an_unknown_estimator_is_refused_by_name_and_the_choices_are_listed(estimator):
    with pytest.raises(ValueError, match=f"'{estimator}'.* k1, k2, k3 or abs.*full_kl"):
        kl_per_token(tensor([0.0]), tensor([0.0]), estimator)


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


def loss_gradient(logits, ref_logits, loss):
    """Return the exact expectation over V tokens of the gradient of a loss per sampled token."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (logprobs.detach().exp() * loss(logprobs, ref_logits.log_softmax(0))).sum().backward()
    return logits.grad


def test_in_the_loss_k1_pulls_nowhere_k2_the_right_way_and_k3_as_the_reverse_divergence_does():
    torch.manual_seed(0)
    logits, ref_logits = torch.randn(2, 50, dtype=torch.float64)
    of = {
        estimator: loss_gradient(
            logits, ref_logits, lambda p, q, name=estimator: kl_per_token(p, q, name)
        )
        for estimator in ("k1", "k2", "k3")
    }
    forward, reverse = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    full_kl(forward, ref_logits).backward()
    full_kl(ref_logits, reverse).backward()
    assert_close(of["k1"], torch.zeros(50, dtype=torch.float64))
    assert_close(of["k2"], forward.grad)
    assert_close(of["k3"], reverse.grad)
    assert (forward.grad - reverse.grad).abs().max() > 0.01


def test_the_full_divergence_by_hand():
    # p = 1/2, 1/2; q = 1/4, 3/4: 1/2 log 2 + 1/2 log 2/3
    actual = full_kl(tensor([[[0.0, 0.0]]]), tensor([[[0.0, math.log(3)]]]))
    assert_close(actual, tensor([[0.5 * math.log(2) + 0.5 * math.log(2 / 3)]]))


def test_a_token_that_nobody_draws_adds_nothing_to_the_full_divergence_nor_to_its_gradient():
    logits = tensor([0.0, 0.0, -INF]).requires_grad_()
    actual = full_kl(logits, tensor([0.0, math.log(3), -INF]))
    actual.backward()
    assert_close(actual.detach(), full_kl(tensor([0.0, 0.0]), tensor([0.0, math.log(3)])))
    assert logits.grad.isfinite().all()


def test_the_full_divergence_is_what_k1_averages_to():
    torch.manual_seed(0)
    logits, ref_logits = torch.randn(2, 7, 50, dtype=torch.float64)
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    assert_close(full_kl(logits, ref_logits), (p.exp() * kl_per_token(p, q, "k1")).sum(-1))


def test_the_coefficient_rises_above_the_target_and_falls_below_it():
    control = AdaptiveKL(0.1, target=6.0, horizon=1000)
    control.update(6.6, 100)  # error 0.1: times 1 + 0.1 * 0.1
    assert control.kl_coef == pytest.approx(0.1 * 1.01)
    control.update(3.0, 500)  # error -0.5, clipped to -0.2: times 1 - 0.2 * 0.5
    assert control.kl_coef == pytest.approx(0.1 * 1.01 * 0.9)
    control.update(600.0, 500)  # error 99, clipped to 0.2
    assert control.kl_coef == pytest.approx(0.1 * 1.01 * 0.9 * 1.1)


def test_at_the_target_the_coefficient_stays():
    control = AdaptiveKL(0.1, target=6.0, horizon=1000)
    control.update(6.0, 500)
    assert control.kl_coef == 0.1


def test_a_divergence_that_is_not_finite_leaves_the_coefficient():
    control = AdaptiveKL(0.1, target=6.0, horizon=1000)
    for divergence in (math.nan, math.inf, 6.0):
        control.update(divergence, 500)
        assert control.kl_coef == 0.1


def test_a_resumed_controller_goes_on_where_the_first_one_stopped():
    first, resumed = (AdaptiveKL(0.1, target=6.0, horizon=1000) for _ in range(2))
    first.update(9.0, 100)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for control in (first, resumed):
        control.update(1.0, 100)
    assert resumed.kl_coef == first.kl_coef


def test_the_mean_and_the_trend_of_the_divergence_decide():
    control = AdaptiveKL(0.1, target=6.0, horizon=1000, window=400, lookahead=1000)
    control.update(2.0, 100)  # the mean begins at the first batch: error -2/3, clipped
    assert control.kl_coef == pytest.approx(0.1 * 0.98)
    # The mean rises by a quarter of 4, to 3, at 0.01 an episode: 13 ahead, far above the target.
    control.update(6.0, 100)
    assert control.kl_coef == pytest.approx(0.1 * 0.98 * 1.02)
    resumed = AdaptiveKL(0.1, target=6.0, horizon=1000, window=400, lookahead=1000)
    resumed.load_state_dict(json.loads(json.dumps(control.state_dict())))
    for each in (control, resumed):
        each.update(2.7, 100)  # 2.925, and 2.175 ahead
    assert resumed.kl_coef == control.kl_coef == pytest.approx(0.1 * 0.98 * 1.02 * 0.98)


@pytest.mark.parametrize("updates", [30, 60, 240])
@pytest.mark.parametrize("equilibrium", [3.0, 8.0, 25.0])
def test_a_run_lands_on_its_target(updates: int, equilibrium: float):
    """A run whose divergence moves towards an equilibrium that falls as kl_coef rises."""
    control = AdaptiveKL.landing(0.05, 8.0, episodes=64 * updates, batch=64)
    noise = np.random.default_rng(updates).normal(size=updates)
    divergence = 0.0
    for n in range(updates):
        pull = equilibrium * (0.05 / control.kl_coef) ** 0.75
        divergence += (pull - divergence) * (1 - math.exp(-4 / updates))
        control.update(divergence * math.exp(0.12 * noise[n]), 64)
    assert divergence == pytest.approx(8.0, rel=0.15)


def test_one_update_of_a_short_run_moves_the_coefficient_by_a_fifth_at_most():
    control = AdaptiveKL.landing(0.1, 6.0, episodes=128, batch=64)
    control.update(600.0, 64)
    assert control.kl_coef == pytest.approx(0.12)


def test_a_missing_stop_costs_the_penalty_and_a_present_one_nothing():
    actual = penalize_missing_stop(tensor([2.0, -1.0]), tensor([True, False]), 1.5)
    assert_close(actual, tensor([2.0, -2.5]))


def test_rewards_by_hand():
    # kl_coef 0.1; the score lands on the last counted token, wherever the padding begins.
    mask = tensor([[True, True, True], [True, False, False]])
    kl = tensor([[1.0, 2.0, -1.0], [3.0, NAN, NAN]])
    actual = token_rewards(tensor([5.0, 7.0]), kl, mask, kl_coef=0.1)
    assert_close(actual, tensor([[-0.1, -0.2, 5.1], [6.7, 0.0, 0.0]]))


def test_the_score_lands_on_the_last_counted_token_of_a_mask_with_gaps():
    mask = tensor([[True, False, True, False], [False, True, True, True]])
    kl = tensor([[1.0, NAN, 2.0, NAN], [NAN, 3.0, 4.0, 5.0]])
    actual = token_rewards(tensor([10.0, 20.0]), kl, mask, kl_coef=1.0)
    assert_close(actual, tensor([[-1.0, 0.0, 8.0, 0.0], [0.0, -3.0, -4.0, 15.0]]))


def test_a_row_that_counts_nothing_is_refused_by_its_number():
    mask = tensor([[True, True], [False, False], [True, False], [False, False]])
    with pytest.raises(ValueError, match=r"rows \[1, 3\]"):
        token_rewards(torch.ones(4), torch.zeros(4, 2), mask, kl_coef=0.1)


def test_every_token_costs_the_length_penalty():
    actual = length_penalty(tensor([1.0, 1.0]), tensor([0, 30]), 0.1)
    assert_close(actual, tensor([1.0, -2.0]))


def test_the_overlong_penalty_grows_over_the_buffer_and_no_further():
    # room for 10, buffer 4: from 6 tokens on, a quarter of the penalty for each
    actual = overlong_penalty(
        tensor([1, 6, 7, 9, 10, 12]), response_length=10, buffer=4, penalty=2.0
    )
    assert_close(actual, tensor([0.0, 0.0, 0.5, 1.5, 2.0, 2.0]))


def test_scores_are_clipped_on_both_sides():
    assert_close(clip_scores(tensor([-9.0, 0.5, 9.0]), 2.0), tensor([-2.0, 0.5, 2.0]))


def test_moments_by_hand():
    # 1, 2: mean 1.5, deviation sqrt(1/2). Then 6: mean 3, squares 4 + 1 + 9, deviation sqrt(7)
    moments = RunningMoments()
    moments.update(tensor([1.0, 2.0]))
    assert (moments.mean, moments.std) == pytest.approx((1.5, math.sqrt(0.5)))
    moments.update(tensor([6.0]))
    assert (moments.mean, moments.std) == pytest.approx((3.0, math.sqrt(7)))
    assert_close(moments.scale(tensor([7.0]), center=False), tensor([7 / math.sqrt(7)]))
    assert_close(moments.scale(tensor([7.0]), center=True), tensor([4 / math.sqrt(7)]))


@settings(max_examples=50, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.floats(-1000, 1000), min_size=1, max_size=6), min_size=1, max_size=6
    ),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_moments_of_any_split_are_those_of_one_pass(batches, offset):
    moments, everything = RunningMoments(), []
    for batch in batches:
        batch = [value + offset for value in batch]
        everything += batch
        moments.update(tensor(batch, dtype=torch.float64))
    assume(len(everything) > 1 and statistics.stdev(everything) > 1e-3)
    assert moments.mean == pytest.approx(statistics.fmean(everything), rel=1e-12, abs=1e-9)
    assert moments.std == pytest.approx(statistics.stdev(everything), rel=1e-9)


def test_moments_of_a_thousand_scores_agree_with_one_pass_to_the_last_digits():
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    for size in (1, 7, 64, 1000):
        moments = RunningMoments()
        for batch in scores.split(size):
            moments.update(batch)
        assert moments.mean == pytest.approx(scores.mean().item(), rel=1e-12)
        assert moments.std == pytest.approx(scores.std().item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_do_not_round_as_the_scores_do(dtype):
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(0)) + 300
    scores, moments = scores.to(dtype), RunningMoments()
    for batch in scores.split(64):
        moments.update(batch)
    assert moments.mean == pytest.approx(scores.double().mean().item(), rel=1e-12)
    assert moments.std == pytest.approx(scores.double().std().item(), rel=1e-12)


@pytest.mark.parametrize("seen", [[], [5.0], [2.0, 2.0, 2.0], [0.0, 0.0], [0.1] * 7, [1e9 / 3] * 9])
def test_scores_that_tell_no_deviation_are_divided_by_one(seen):
    moments = RunningMoments()
    for batch in (seen[:1], seen[1:]):
        if batch:
            moments.update(tensor(batch, dtype=torch.float64))
    assert moments.std == 1.0
    assert_close(moments.scale(tensor([3.0]), center=False), tensor([3.0]))


def test_resumed_moments_go_on_where_the_first_ones_stopped():
    first, resumed = RunningMoments(), RunningMoments()
    first.update(tensor([1.0, 2.0, 7.0]))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for moments in (first, resumed):
        moments.update(tensor([-4.0, 0.1]))
    assert (resumed.count, resumed.mean, resumed.std) == (first.count, first.mean, first.std)


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


def test_gae_takes_a_gap_for_a_step_worth_nothing():
    # gamma 1, lambda 0.5; the second token does not count. deltas: 0+0-.5=-.5   0+.6-0=.6   1-.6=.4
    # backwards: A2=.4   A1=.6+.5*.4=.8   A0=-.5+.5*.8=-.1
    actual = gae_advantages(
        tensor([[0.0, 0.0, 1.0]]), tensor([[0.5, 0.0, 0.6]]), gamma=1.0, gae_lambda=0.5
    )
    assert_close(actual, tensor([[-0.1, 0.8, 0.4]]))


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


def test_the_upper_side_may_be_clipped_on_its_own():
    # A = 1, clip 0.2 and 0.5. r=1.4: -1.4; r=1.6: -1.5 clipped; r=0.5, A=-1: 0.8 clipped
    loss, clipped = policy_loss(
        tensor([1.4, 1.6, 0.5]).log(),
        torch.zeros(3),
        tensor([1.0, 1.0, -1.0]),
        cliprange=0.2,
        cliprange_high=0.5,
    )
    assert_close(loss, tensor([-1.4, -1.5, 0.8]))
    assert clipped.tolist() == [False, True, True]


def test_dual_clip_bounds_the_loss_of_bad_tokens_alone():
    # A=-2, bound 3 * 2 = 6.  r=5: 10, bounded. r=2.5: 5. r=0.5: 1.6 clipped.  A=1, r=5: -1.2
    logprobs = tensor([5.0, 2.5, 0.5, 5.0]).log().requires_grad_()
    loss, clipped = policy_loss(
        logprobs, torch.zeros(4), tensor([-2.0, -2.0, -2.0, 1.0]), cliprange=0.2, dual_clip=3.0
    )
    loss.sum().backward()
    assert_close(loss.detach(), tensor([6.0, 5.0, 1.6, -1.2]))
    assert clipped.tolist() == [True, False, True, True]
    assert_close(logprobs.grad, tensor([0.0, 5.0, 0.0, 0.0]))


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


AGGREGATIONS = ["token", "sequence", "fixed_length"]


def weights_of(lengths, how, *, num_tokens=None, num_responses=None):
    return aggregation_weights(
        tensor(lengths, dtype=torch.float64),
        how,
        num_tokens=num_tokens or sum(lengths),
        num_responses=num_responses or len(lengths),
        response_length=10,
    )


def test_aggregation_weights_by_hand():
    # 3 responses of 1, 4 and 3 tokens, room for 10
    lengths = [1, 4, 3]
    assert weights_of(lengths, "token").tolist() == [1 / 8] * 3
    assert weights_of(lengths, "sequence").tolist() == [1 / 3, 1 / 12, 1 / 9]
    assert weights_of(lengths, "fixed_length").tolist() == [1 / 30] * 3


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_a_row_that_counts_nothing_weighs_nothing(how):
    weights = weights_of([2, 0, 3], how)
    assert weights[1] == 0
    assert (weights[[0, 2]] > 0).all()


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_totals_may_be_tensors_as_the_processes_sum_them(how):
    weights = aggregation_weights(
        tensor([1, 4]),
        how,
        num_tokens=tensor(8),
        num_responses=tensor(3),
        response_length=10,
    )
    expected = weights_of([1, 4], how, num_tokens=8, num_responses=3)
    assert_close(weights, expected.float())


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 10), min_size=2, max_size=8), how=st.sampled_from(AGGREGATIONS)
)
def test_the_weights_of_a_split_are_those_of_the_whole_step(lengths, how):
    whole = weights_of(lengths, how)
    totals = {"num_tokens": sum(lengths), "num_responses": len(lengths)}
    parts = [weights_of(part, how, **totals) for part in (lengths[:1], lengths[1:])]
    assert_close(torch.cat(parts), whole, rtol=0, atol=0)
    if how != "fixed_length":  # a mean: a loss of 1 everywhere stays 1
        assert (whole * tensor(lengths)).sum().item() == pytest.approx(1)


def test_an_unknown_aggregation_is_refused_and_the_choices_are_listed():
    with pytest.raises(ValueError, match=r"'tokens'.*token, sequence or fixed_length"):
        weights_of([1], "tokens")


def test_standardise_by_hand():
    # counted: 1, 2, 3, 6; mean 3, squares 4+1+0+9 = 14, variance 14/3
    values = tensor([[1.0, 2.0, NAN], [3.0, 6.0, 100.0]])
    mask = tensor([[True, True, False], [True, True, False]])
    deviation = math.sqrt(14 / 3)
    expected = tensor([[-2.0, -1.0, 0.0], [0.0, 3.0, 0.0]]) / deviation
    assert_close(masked_whiten(values, mask, keep_mean=False), expected)
    assert_close(masked_var(values, mask), tensor(14 / 3))
    for row in (masked_whiten(values[:, :2], mask[:, :2].float()), whiten(values[:, :2])):
        assert_close(row, expected[:, :2])
    with_mean = torch.where(mask, expected + 3.0, 0.0)
    assert_close(masked_whiten(values, mask, keep_mean=True), with_mean)


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
    out = masked_whiten(values, mask, keep_mean=False)
    assert abs(out[mask].mean()) < 1e-6
    assert abs(out[mask].std() - 1) < 1e-4
    assert (out[~mask] == 0).all()


def test_the_same_value_everywhere_standardises_to_zero_and_not_to_nan():
    out = masked_whiten(
        torch.full((2, 3), 4.0), torch.ones(2, 3, dtype=torch.bool), keep_mean=False
    )
    assert_close(out, torch.zeros(2, 3))


def test_masked_mean_ignores_what_the_mask_hides():
    assert masked_mean(tensor([1.0, NAN, 3.0]), tensor([True, False, True])) == 2.0


def test_masked_mean_of_nothing_is_zero():
    assert masked_mean(tensor([NAN]), tensor([False])) == 0.0


def test_the_temperature_divides_the_logits():
    logits = tensor([[1.0, 3.0]], requires_grad=True)
    assert_close(tempered(logits, 0.5).detach(), tensor([[2.0, 6.0]]))
    assert_close(logits.detach(), tensor([[1.0, 3.0]]))
    in_place = logits.detach()
    assert tempered(in_place, 0.5) is in_place
    assert_close(in_place, tensor([[2.0, 6.0]]))


def test_sampling_is_cut_to_the_likeliest_tokens_first_by_number_then_by_probability():
    probabilities = tensor([[0.1, 0.4, 0.2, 0.3]])
    logits = probabilities.log()

    def kept(**cut):
        return truncated(logits, **cut).isfinite()[0].nonzero()[:, 0].tolist()

    assert kept(top_k=3, top_p=1.0) == [1, 2, 3]
    assert kept(top_k=0, top_p=0.65) == [1, 3]
    assert kept(top_k=0, top_p=0.75) == [1, 2, 3]
    # of 0.4, 0.3 and 0.2 renormalised the first two hold 0.78
    assert kept(top_k=3, top_p=0.75) == [1, 3]
    assert kept(top_k=9, top_p=1.0) == [0, 1, 2, 3]
    cut = truncated(logits, top_k=0, top_p=0.65)[0]
    assert_close(cut.softmax(0), tensor([0.0, 4 / 7, 0.0, 3 / 7]))


def test_at_least_one_token_can_always_be_drawn():
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    for cut in ({"top_k": 1, "top_p": 1.0}, {"top_k": 0, "top_p": 1e-9}):
        assert (truncated(logits, **cut).isfinite().nonzero()[:, 1] == logits.argmax(1)).all()


def test_of_equal_tokens_those_with_the_lower_ids_stay():
    logits = torch.zeros(2, 1000)
    for cut in ({"top_k": 3, "top_p": 1.0}, {"top_k": 4, "top_p": 0.75}):
        for row in truncated(logits, **cut):
            assert row.isfinite().nonzero()[:, 0].tolist() == [0, 1, 2]


def test_with_nothing_to_cut_the_logits_come_back_as_they_are():
    logits = torch.zeros(1, 3)
    assert truncated(logits, top_k=0, top_p=1.0) is logits


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), top_k=st.integers(0, 12), top_p=st.floats(0.05, 0.99))
def test_the_tokens_that_stay_are_the_smallest_set_that_reaches_top_p(seed, top_k, top_p):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 10, generator=generator, dtype=torch.float64)
    first = truncated(logits, top_k=top_k, top_p=1.0).softmax(1)
    cut = truncated(logits, top_k=top_k, top_p=top_p)
    stays = cut.isfinite()
    assert torch.equal(cut[stays], logits[stays])
    for row, kept in zip(first, stays, strict=True):
        least = row[kept].min()
        assert (row[~kept] <= least).all()
        assert row[kept].sum() >= top_p - 1e-9
        assert row[kept].sum() - least < top_p + 1e-9
    alone = torch.cat([truncated(row[None], top_k=top_k, top_p=top_p) for row in logits])
    assert torch.equal(alone, cut)


def test_half_precision_logits_are_normalised_in_full_precision():
    assert tempered(torch.zeros(1, 3, dtype=torch.bfloat16), 1.0).dtype == torch.float32
    assert tempered(torch.zeros(1, 3, dtype=torch.float64), 1.0).dtype == torch.float64


def test_rows_are_padded_on_the_side_that_is_asked_for():
    right, lengths = pad_rows([[5], [6, 7]])
    assert right.tolist() == [[5, 0], [6, 7]]
    assert lengths.tolist() == [1, 2]
    assert pad_rows([[5], [6, 7]], side="left")[0].tolist() == [[0, 5], [6, 7]]


@pytest.mark.parametrize(
    ("lengths", "size", "most", "expected"),
    [
        # A forward pass costs as much as 128 tokens: padding 4 sequences is cheaper.
        ([30, 9, 50, 9], 4, None, [[2, 0, 1, 3]]),
        # 40 rows of 20 beside a row of 400 would be 40 x 400 tokens.
        ([20] * 40 + [400], 8, None, [[40], list(range(40))]),
        # At most 100 tokens, so two rows of 50 or three of 30.
        ([50, 30, 50, 30, 30], 1, 100, [[0, 2], [1, 3, 4]]),
        # A row that is longer than that is alone.
        ([30, 200, 30], 1, 100, [[1], [0, 2]]),
    ],
)
def test_batches_of_tokens_are_cut_where_passes_cost_least(lengths, size, most, expected):
    batches = token_batches(tensor(lengths), size, max_tokens=most)
    assert [batch.tolist() for batch in batches] == expected


def test_a_gpu_gets_fewer_passes():
    lengths = tensor([149] * 12 + [120] * 12 + [85] * 12)
    numbers = [len(token_batches(lengths, 36, device=torch.device(d))) for d in ("cpu", "cuda")]
    assert numbers == [3, 1]


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=9),
    size=st.integers(1, 4),
    most=st.none() | st.integers(50, 1000),
)
def test_no_other_cut_of_the_sorted_rows_costs_less(lengths, size, most):
    batches = token_batches(tensor(lengths), size, max_tokens=most)
    ordered = sorted(lengths, reverse=True)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths)))
    assert [lengths[n] for batch in batches for n in batch] == ordered
    most = most or size * ordered[0]

    def cost(cuts: tuple[int, ...]) -> float:
        parts = [ordered[a:b] for a, b in itertools.pairwise((0, *cuts, len(ordered)))]
        if any(len(part) > 1 and len(part) * part[0] > most for part in parts):
            return math.inf
        return sum(PASS_COST + len(part) * part[0] for part in parts)

    places = range(1, len(ordered))
    subsets = (c for n in range(len(ordered)) for c in itertools.combinations(places, n))
    found = tuple(itertools.accumulate(len(batch) for batch in batches[:-1]))
    assert cost(found) == min(cost(cuts) for cuts in subsets)


def test_batches_hold_every_row_once_longest_first():
    batches = length_sorted_batches(tensor([3, 9, 5, 9, 1]), 2)
    assert [batch.tolist() for batch in batches] == [[1, 3], [2, 0], [4]]


def test_a_mask_of_numbers_weighs_the_values():
    values = tensor([[1.0, 5.0, 9.0]])
    assert masked_mean(values, tensor([[1.0, 3.0, 0.0]])).item() == 4.0
    assert masked_mean(values, tensor([[1, 0, 1]])).item() == 5.0
    assert masked_mean(values, torch.zeros(1, 3)).item() == 0.0


def test_no_process_has_more_tokens_than_the_limit_of_its_share():
    lengths = tensor([4096] + [3600] * 15)
    parts = token_batches(lengths, 1, max_tokens=4096, processes=8)
    assert sorted(index for part in parts for index in part.tolist()) == list(range(16))
    for part in parts:
        shares = [part[rank::8] for rank in range(8)]
        assert max(len(share) for share in shares) * int(lengths[part].max()) <= 4096
    assert [len(part) for part in parts] == [8, 8]
