"""The divergence of sampled answers: exact at each token, unbiased over the answers."""

import pytest
import torch

from ppo_core.errors import ModelError
from ppo_core.errors.out_of_memory import BatchSize
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings
from ppo_core.training.answer_divergence import divergence_of_samples
from tests.helpers.models.tiny import make_policy

STOP, TEMPERATURE = 9, 0.7


def samples(policy, prompts, length):
    uniforms = torch.rand(len(prompts), length, generator=torch.Generator().manual_seed(0))
    settings = SamplingSettings(stop_token_id=STOP, temperature=TEMPERATURE)
    return sample_responses(policy, prompts, uniforms, settings, batch_size=len(prompts))


def measured(policy, other, rollout, batch_size=8):
    batches = BatchSize(batch_size, "answering")
    return divergence_of_samples(policy, rollout, lambda: other, batches)


@torch.no_grad()
def next_token(policy, other, ids):
    """Return the policy's distribution after some tokens, and its divergence, in fp64."""
    p, q = (
        torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double() / TEMPERATURE, -1)
        for model in (policy, other)
    )
    return p.exp(), (p.exp() * (p - q)).sum().item()


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_divergence_is_the_sum_over_tokens_and_the_mean_over_answers(family, batch_size):
    prompts = [[4, 5, 6], [7], [8, 10], [11, 12, 13, 14]]
    policy, other = make_policy(family), make_policy(family, seed=5)
    model = LanguageModel(policy)
    rollout = samples(model, prompts, 12)
    assert len(set(rollout.response_lengths.tolist())) > 1
    expected = 0.0
    rows = zip(prompts, rollout.response_ids.tolist(), rollout.response_lengths, strict=True)
    for prompt, response, length in rows:
        for number in range(length):
            expected += next_token(policy, other, prompt + response[:number])[1]
    found = measured(model, other, rollout, batch_size)
    assert found == pytest.approx(expected / len(prompts), rel=1e-4)


def test_a_reference_with_another_vocabulary_is_refused():
    policy = LanguageModel(make_policy())
    rollout = samples(policy, [[4, 5]], 2)
    other = make_policy(vocabulary=policy.model.config.vocab_size + 1)
    with pytest.raises(ModelError, match=r"The policy has \d+ tokens and the reference \d+, so"):
        measured(policy, other, rollout)


def test_the_estimate_has_the_mean_of_all_answers():
    policy, other = make_policy(), make_policy(seed=5)
    first, exact = next_token(policy, other, [4, 5])
    later = torch.tensor(
        [
            0.0 if token == STOP else next_token(policy, other, [4, 5, token])[1]
            for token in range(len(first))
        ]
    )
    expected = exact + (first * later).sum().item()
    deviation = (first * (later - (first * later).sum()) ** 2).sum().sqrt().item()
    count = 2000
    model = LanguageModel(policy)
    rollout = samples(model, [[4, 5]] * count, 2)
    found = measured(model, other, rollout, count)
    assert found == pytest.approx(expected, abs=4 * deviation / count**0.5)
