"""Reference, critic and reward on a rollout: row by row what each model says alone."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from ppo_core.data.encode_prompts import response_texts
from ppo_core.models.critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.logprobs_and_values import critic_values, exact_kl, response_logprobs
from ppo_core.ppo.rewards import ModelReward, score_tokens
from tests.helpers.models.rollouts import make_rollout, row_of
from tests.helpers.models.tiny import EOS, make_classifier, make_policy, make_tokenizer


def make_wordy_rollout():
    """A rollout of plain words, which survive the way through text."""
    rollout = make_rollout((3, 7, 1, 4), (5, 2, 4, 1))
    return dataclasses.replace(
        rollout,
        prompt_ids=rollout.prompt_ids.clamp(min=3),
        response_ids=rollout.response_ids.clamp(min=3),
    )


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_every_row_gets_what_its_own_tokens_give(batch_size):
    rollout = make_wordy_rollout()
    reference = LanguageModel(make_policy())
    critic = Critic.from_reward_model(RewardModel(make_classifier(), make_tokenizer()))
    reward_model = RewardModel(make_classifier(), make_tokenizer())
    ref_logprobs = response_logprobs(reference, rollout, batch_size)
    given_values = critic_values(critic, rollout, batch_size)
    scores = score_tokens(reward_model, rollout, batch_size)
    mask = rollout.response_mask
    assert (ref_logprobs[~mask] == 0).all()
    assert (given_values[~mask] == 0).all()
    for b in range(4):
        joined = rollout.token_rows(torch.tensor([b]))
        with torch.no_grad():
            logprobs, _ = reference(joined, rollout.temperature)
            values = critic(joined)
        assert_close(ref_logprobs[b][mask[b]], logprobs)
        assert_close(given_values[b][mask[b]], values)
        ended = [*row_of(rollout, b), EOS]
        assert_close(scores[b], reward_model.score_encoded([ended], 1)[0])


@pytest.mark.parametrize("end_of_text", [True, False])
def test_what_is_scored_ends_as_what_the_reward_model_was_trained_on(end_of_text):
    rollout = make_wordy_rollout()
    stop = 9
    rollout.response_ids[0, 4] = stop
    rollout.has_stop[0] = True
    reward_model = RewardModel(make_classifier(), make_tokenizer(), end_of_text=end_of_text)
    scores = score_tokens(reward_model, rollout, 4)
    end = [EOS] if end_of_text else []
    stopped, cut_off = row_of(rollout, 0), row_of(rollout, 1)
    assert stopped[-1] == stop
    expected = reward_model.score_encoded([stopped[:-1] + end, cut_off + end], 2)
    assert_close(scores[:2], expected)


def test_scores_by_text_are_those_by_token_where_both_read_the_same_words():
    rollout = make_wordy_rollout()
    rollout.response_ids[1, 1] = EOS
    rollout.has_stop[1] = True
    tokenizer = make_tokenizer()
    reward_model = RewardModel(make_classifier(), tokenizer)
    prompts = [
        tokenizer.decode(ids[:n])
        for ids, n in zip(rollout.prompt_ids, rollout.prompt_lengths, strict=True)
    ]
    texts = response_texts(tokenizer, rollout)
    by_text = reward_model.score_texts(prompts, texts, 2)
    assert_close(by_text, score_tokens(reward_model, rollout, 2))


def test_scores_by_text_use_the_reward_models_own_ids():
    # Another vocabulary in another order: misreading the policy's ids would change the score.
    rollout, tokenizer = make_wordy_rollout(), make_tokenizer()
    other = make_tokenizer(prefix="v")
    other.add_tokens(["w7"])
    rollout.response_ids[:] = tokenizer.get_vocab()["w7"]
    model = make_classifier()
    model.resize_token_embeddings(len(other))
    reward_model = RewardModel(model, other)
    assert not reward_model.reads_tokens_of(tokenizer)
    actual = ModelReward(reward_model, tokenizer, 4)(["v1"] * 4, rollout)
    w7, v1 = other.get_vocab()["w7"], other.get_vocab()["v1"]
    expected = reward_model.score_encoded([[v1] + [w7] * n + [EOS] for n in (5, 2, 4, 1)], 4)
    assert_close(actual, expected)


def test_the_reference_at_the_policys_weights_has_the_policys_log_probabilities():
    rollout = make_wordy_rollout()
    policy, reference = LanguageModel(make_policy()), LanguageModel(make_policy())
    assert_close(response_logprobs(reference, rollout, 2), response_logprobs(policy, rollout, 3))


def test_scoring_keeps_no_graph():
    rollout = make_wordy_rollout()
    critic = Critic.from_policy(make_policy())
    assert not critic_values(critic, rollout, 2).requires_grad
    assert not response_logprobs(LanguageModel(make_policy()), rollout, 2).requires_grad


def test_the_exact_divergence_is_the_sum_over_the_vocabulary():
    rollout = make_wordy_rollout()
    policy, reference = LanguageModel(make_policy()), LanguageModel(make_policy(seed=4))
    actual = exact_kl(policy, reference, rollout, 2)
    assert (actual[~rollout.response_mask] == 0).all()
    for b in range(4):
        start = int(rollout.prompt_lengths[b])
        row = torch.tensor([row_of(rollout, b)])
        with torch.no_grad():
            p, q = (
                (model.model(row).logits[0, start - 1 : -1].double() / 0.7).log_softmax(-1)
                for model in (policy, reference)
            )
        expected = (p.exp() * (p - q)).sum(-1)
        assert_close(actual[b][rollout.response_mask[b]].double(), expected, rtol=0, atol=1e-5)
