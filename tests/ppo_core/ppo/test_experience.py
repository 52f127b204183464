"""From scores to what the update learns: shaped scores, rewards, advantages, returns."""

import dataclasses

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.types import Experience, Rollout, Scores
from ppo_core.ppo.experience import divergence, make_experience, shaped_scores

PLAIN = {"whiten_advantages": False, "whiten_rewards": False, "lam": 0.5, "kl_coef": 0.0}


def make_rollout(mask: list[list[int]], has_stop: list[bool] | None = None) -> Rollout:
    counted = tensor(mask).bool()
    rows, width = counted.shape
    last = (counted * torch.arange(1, width + 1)).amax(dim=1)
    return Rollout(
        prompt_ids=torch.ones(rows, 1, dtype=torch.long),
        prompt_lengths=torch.ones(rows, dtype=torch.long),
        response_ids=torch.ones(rows, width, dtype=torch.long),
        response_lengths=last,
        has_stop=tensor(has_stop or [True] * rows),
        logprobs=torch.zeros(rows, width),
        temperature=1.0,
        response_mask=counted,
    )


def shaped(*batches: list[float], moments=None, rollout=None, **settings) -> list[float]:
    """The scores of the last batch, after all of them in turn."""
    moments = moments or RunningMoments()
    config = PPOConfig(**settings)
    for batch in batches:
        rollout = rollout or make_rollout([[1]] * len(batch))
        result = shaped_scores(tensor(batch), rollout, config, moments)
    return result.tolist()


def experience_of(scores, values, mask, kl=None, **settings) -> Experience:
    rollout = make_rollout(mask)
    zeros = torch.zeros(rollout.response_mask.shape)
    judged = Scores(
        ref_logprobs=zeros,
        values=None if values is None else tensor(values),
        scores=tensor(scores),
        full_kl=zeros if kl is None else tensor(kl),
    )
    config = PPOConfig(**({} if values is None else PLAIN) | settings)
    return make_experience(
        rollout,
        judged,
        divergence(rollout, judged, config.kl_estimator),
        config,
        kl_coef=settings.get("kl_coef", 0.0),
    )


# --- Scores ---


def test_scores_are_as_they_came_unless_a_setting_says_otherwise():
    assert shaped([3.0, -100.0]) == [3.0, -100.0]


def test_scores_are_divided_by_the_standard_deviation_of_all_seen_so_far():
    # All four: mean 4, squares 9 + 1 + 1 + 9 = 20, over 3.
    assert shaped([1.0, 3.0], [5.0, 7.0], use_score_scaling=True) == pytest.approx(
        [5 / (20 / 3) ** 0.5, 7 / (20 / 3) ** 0.5]
    )


def test_the_running_mean_comes_off_first_where_it_is_asked_for():
    actual = shaped([1.0, 3.0], [5.0, 7.0], use_score_scaling=True, use_score_norm=True)
    assert actual == pytest.approx([1 / (20 / 3) ** 0.5, 3 / (20 / 3) ** 0.5])


def test_the_moments_learn_nothing_where_they_are_not_used():
    moments = RunningMoments()
    shaped([1.0, 3.0], moments=moments)
    assert moments.count == 0


def test_scores_are_clipped_behind_the_scaling():
    assert shaped([10.0, 20.0], score_clip=2.0) == [2.0, 2.0]
    # Standard deviation of 10 and 20: 7.07.
    actual = shaped([10.0, 20.0], score_clip=2.0, use_score_scaling=True)
    assert actual == pytest.approx([10 / 50**0.5, 2.0])


def test_penalties_come_off_behind_the_clip():
    rollout = make_rollout([[1, 1, 1, 1], [1, 1, 0, 0]], has_stop=[False, True])
    penalties = {
        "missing_eos_penalty": ({"missing_eos_penalty": 3.0}, [-2.0, 1.0]),
        "length": ({"length_penalty": 0.5}, [1 - 4 * 0.5, 1 - 2 * 0.5]),
        # The last three of four places: at 4 tokens all of it, at 2 a third.
        "overlong": (
            {"overlong_buffer": 3, "overlong_penalty": 6.0, "response_length": 4},
            [1 - 6.0, 1 - 2.0],
        ),
    }
    for settings, expected in penalties.values():
        actual = shaped([9.0, 9.0], rollout=rollout, score_clip=1.0, **settings)
        assert actual == pytest.approx(expected), settings


# --- Divergence ---


def test_the_divergence_is_the_estimate_where_tokens_count_and_the_exact_one_if_there_is_one():
    rollout = dataclasses.replace(make_rollout([[1, 1, 0]]), logprobs=tensor([[-1.0, -2.0, 9.0]]))
    scores = Scores(
        ref_logprobs=tensor([[-1.5, -1.0, 0.0]]), values=torch.zeros(1, 3), scores=torch.zeros(1)
    )
    assert_close(divergence(rollout, scores, "k1"), tensor([[0.5, -1.0, 0.0]]))
    assert_close(divergence(rollout, scores, "k2"), tensor([[0.125, 0.5, 0.0]]))
    exact = dataclasses.replace(scores, full_kl=tensor([[0.3, 0.4, 0.0]]))
    assert divergence(rollout, exact, "full") is exact.full_kl


def test_the_divergence_is_in_the_reward_or_in_the_loss():
    kl = [[1.0, 2.0]]
    parts = {"scores": [4.0], "values": [[0.0, 0.0]], "mask": [[1, 1]], "lam": 1.0}
    in_reward = experience_of(kl=kl, kl_coef=0.1, **parts)
    assert_close(in_reward.returns, tensor([[4 - 0.1 - 0.2, 4 - 0.2]]))
    assert in_reward.kl_loss_coef == 0
    in_loss = experience_of(kl=kl, kl_coef=0.1, kl_in_loss=True, kl_estimator="k2", **parts)
    assert_close(in_loss.returns, tensor([[4.0, 4.0]]))
    assert in_loss.kl_loss_coef == 0.1


# --- Advantages and returns ---


def test_critic_and_policy_have_a_lambda_each():
    # Rewards 0 0 1, values .5 .2 .6, so deltas are -.3 .4 .4.
    # lambda .5: A2 = .4, A1 = .4 + .5 * .4 = .6, A0 = -.3 + .5 * .6 = 0
    # lambda 1:  A2 = .4, A1 = .8, A0 = .5; plus values: 1, 1, 1
    actual = experience_of([1.0], [[0.5, 0.2, 0.6]], [[1, 1, 1]], lam_critic=1.0)
    assert_close(actual.advantages, tensor([[0.0, 0.6, 0.4]]), rtol=0, atol=1e-6)
    assert_close(actual.returns, tensor([[1.0, 1.0, 1.0]]))


def test_one_lambda_serves_both_unless_the_critic_has_its_own():
    actual = experience_of([1.0], [[0.5, 0.2, 0.6]], [[1, 1, 1]])
    assert_close(actual.returns, tensor([[0.5, 0.8, 1.0]]))


@pytest.mark.parametrize("lam_critic", [None, 0.9])
def test_tokens_on_both_sides_of_a_gap_follow_one_another(lam_critic):
    # What lies in a gap, or behind the end, is not a step of the policy.
    settings = {"lam_critic": lam_critic, "gamma": 0.9, "kl_coef": 0.1}
    close = experience_of([1.0], [[0.5, 0.2, 0.6]], [[1, 1, 1]], kl=[[0.1, 0.2, 0.3]], **settings)
    apart = experience_of(
        [1.0],
        [[0.0, 0.5, 0.0, 0.0, 0.2, 0.6, 0.0]],
        [[0, 1, 0, 0, 1, 1, 0]],
        kl=[[0.0, 0.1, 0.0, 0.0, 0.2, 0.3, 0.0]],
        **settings,
    )
    for name in ("advantages", "returns"):
        spread: Tensor = torch.zeros(1, 7)
        spread[:, [1, 4, 5]] = getattr(close, name)
        assert_close(getattr(apart, name), spread)


def test_whitened_advantages_have_mean_0_and_deviation_1_and_returns_stay():
    parts = ([1.0, -2.0], [[0.5, 0.2, 0.6], [0.1, 0.3, 0.0]], [[1, 1, 1], [1, 1, 0]])
    plain, whitened = experience_of(*parts), experience_of(*parts, whiten_advantages=True)
    counted = whitened.advantages[whitened.rollout.response_mask]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6)
    assert counted.std().item() == pytest.approx(1, abs=1e-5)
    own = plain.advantages[plain.rollout.response_mask]
    assert_close(counted, (own - own.mean()) / own.std())
    assert whitened.advantages[1, 2] == 0
    assert_close(whitened.returns, plain.returns)


def test_whitened_rewards_keep_their_mean():
    # Rewards 0 3 and -3 over three counted tokens: mean 0, deviation 3.
    parts = ([3.0, -3.0], [[0.0, 0.0], [0.0, 0.0]], [[1, 1], [1, 0]])
    actual = experience_of(*parts, whiten_rewards=True, lam=1.0)
    assert_close(actual.returns, tensor([[1.0, 1.0], [-1.0, 0.0]]))
    # Rewards 0 6 and 0: mean 2, deviation 12 ** .5.
    shifted = experience_of([6.0, 0.0], *parts[1:], whiten_rewards=True, lam=0.0)
    root = 12**0.5
    expected = tensor([[2 - 2 / root, 2 + 4 / root], [2 - 2 / root, 0.0]])
    assert_close(shifted.returns, expected)


# --- Without a critic ---

GAPS = [[1, 0, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 1]]
"""Masks of two responses to each of two prompts; some have a gap, such as the output of a tool."""

KL = [[1.0, 0.0, 2.0, 0.0], [1.0, 1.0, 1.0, 0.0], [4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]]


def test_reinforce_sums_the_rewards_of_the_counted_tokens_from_each_on():
    experience = experience_of(
        [5.0, 0.0, 1.0, 1.0],
        None,
        GAPS,
        KL,
        advantage_estimator="reinforce",
        samples_per_prompt=2,
        whiten_advantages=False,
        gamma=0.5,
        kl_coef=1.0,
    )
    # Row 0 has the rewards -1 and 5 - 2, one after the other: -1 + 3/2 = 0.5.
    # Row 1 has -1, -1, -1: -1 - (1 + 1/2)/2 = -1.75.  Row 2 has 1 - 4.
    # Row 3 has 0, 0 and 1 - 2: its first is -1/4.
    expected = [[0.5, 0, 3, 0], [-1.75, -1.5, -1, 0], [-3, 0, 0, 0], [-0.25, -0.5, 0, -1]]
    assert_close(experience.advantages, tensor(expected))
    assert experience.values is None
    assert experience.returns is None


def test_reinforce_standardizes_over_the_batch():
    settings = {"advantage_estimator": "reinforce", "kl_coef": 1.0}
    advantages = experience_of([5.0, 0.0, 1.0, 1.0], None, GAPS, KL, **settings).advantages
    counted = advantages[tensor(GAPS).bool()]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6)
    assert counted.std().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # The rewards of whole responses are 5 - 3, 0 - 3, 1 - 4 and 1 - 2.
        ("rloo", [5.0, -5.0, -2.0, 2.0]),
        ("grpo", [0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5]),
    ],
)
def test_each_counted_token_has_the_advantage_of_its_response(
    estimator: str, expected: list[float]
):
    settings = {"advantage_estimator": estimator, "samples_per_prompt": 2, "kl_coef": 1.0}
    experience = experience_of([5.0, 0.0, 1.0, 1.0], None, GAPS, KL, **settings)
    assert_close(experience.advantages, tensor(GAPS) * tensor(expected)[:, None], rtol=0, atol=1e-3)


def test_grpo_without_the_deviation_and_with_the_divergence_in_the_loss():
    experience = experience_of(
        [5.0, 0.0, 1.0, 1.0],
        None,
        GAPS,
        KL,
        advantage_estimator="grpo",
        samples_per_prompt=4,
        scale_by_group_std=False,
        kl_in_loss=True,
        kl_estimator="k2",
        kl_coef=1.0,
    )
    mean = 7 / 4
    expected = tensor([5.0, 0.0, 1.0, 1.0]) - mean
    assert_close(experience.advantages, tensor(GAPS) * expected[:, None])
    assert experience.kl_loss_coef == 1.0
