"""Initial values of critics, and policy and critic in one module."""

import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_core.models.critic import ActorCritic, Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from tests.helpers.models.rollouts import TEMPERATURE, make_rollout, row_of
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer


def test_the_critic_starts_as_the_centred_score_of_the_response_so_far():
    reward_model = RewardModel(make_classifier(), make_tokenizer(), bias=0.3, gain=2.0)
    critic = Critic.from_reward_model(reward_model)
    rollout = make_rollout()
    values = critic(rollout.token_rows(torch.tensor([0])))
    row = row_of(rollout, 0)
    expected = reward_model.score_encoded([row[: 3 + t] for t in range(5)], batch_size=8)
    assert_close(values.detach(), expected)


def test_training_the_critic_leaves_the_reward_model_alone():
    reward_model = RewardModel(make_classifier(), make_tokenizer())
    critic = Critic.from_reward_model(reward_model)
    shared = {id(p) for p in reward_model.model.parameters()} & {id(p) for p in critic.parameters()}
    assert not shared


def test_a_critic_from_the_policy_starts_by_expecting_nothing():
    critic = Critic.from_policy(make_policy("gpt2"))
    values = critic(make_rollout().token_rows(torch.arange(3)))
    assert_close(values, torch.zeros(11))


def test_neighbours_and_padding_change_no_row():
    rollout = make_rollout()
    module = ActorCritic(LanguageModel(make_policy()), Critic.from_policy(make_policy(seed=3)))
    torch.nn.init.normal_(module.critic.head.weight)
    module.double()

    def of_rows(rows: Tensor) -> tuple[Tensor, ...]:
        predictions, values = module(
            rollout.token_rows(rows), TEMPERATURE, lambda logprobs, _: logprobs**2
        )
        return predictions.loss, predictions.logprobs, predictions.entropies, values

    together = of_rows(torch.arange(3))
    alone = [of_rows(torch.tensor([b])) for b in range(3)]
    assert_close(together[0], sum(one[0] for one in alone), rtol=1e-6, atol=0)
    for full, *parts in zip(together[1:], *(one[1:] for one in alone), strict=True):
        assert_close(full, torch.cat(parts), rtol=0, atol=1e-6)
