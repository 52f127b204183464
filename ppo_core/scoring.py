"""A rollout in; reference log-probabilities, values and reward scores out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.models import Critic, LanguageModel, RewardModel
from ppo_core.prompts import response_texts
from ppo_core.records import Rollout, Scores
from ppo_core.tensors import length_sorted_batches


def score(
    rollout: Rollout,
    *,
    reference: LanguageModel,
    critic: Critic,
    reward: Callable[[Rollout], Tensor],
    batch_size: int,
) -> Scores:
    """Everything that PPO needs to know about a rollout, `batch_size` rows at a time.

    reward gives the scores (B,) of a rollout.
    """
    return Scores(
        scores=reward(rollout),
        ref_logprobs=reference_logprobs(reference, rollout, batch_size),
        values=critic_values(critic, rollout, batch_size),
    )


def score_tokens(reward_model: RewardModel, rollout: Rollout, batch_size: int) -> Tensor:
    """Scores (B,) of the very tokens that were sampled, for a reward model that reads them."""
    scores = torch.empty(len(rollout), device=rollout.logprobs.device)
    for rows in length_sorted_batches(rollout.row_lengths, batch_size):
        joined = rollout.token_rows(rows)
        scores[rows] = reward_model.score_rows(joined.ids, joined.lengths)
    return scores


def score_texts(
    reward_model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    rollout: Rollout,
    batch_size: int,
) -> Tensor:
    """Scores (B,) of the texts that were sampled, for a reward model with other tokens.

    `tokenizer` is the policy's; the reward model encodes the texts by its own, and its
    end-of-sequence token stands in for the policy's stop token (TRL #1674, #3595).
    """
    rows = [
        reward_model.encode(prompt, response, end=end)
        for prompt, response, end in zip(
            prompts, response_texts(tokenizer, rollout), rollout.has_stop.tolist(), strict=True
        )
    ]
    return reward_model.score_encoded(rows, batch_size).to(rollout.logprobs)


@torch.no_grad()
def reference_logprobs(reference: LanguageModel, rollout: Rollout, batch_size: int) -> Tensor:
    """Log-probabilities (B, T) of the responses under the reference; 0 where not counted."""
    logprobs = torch.zeros_like(rollout.logprobs)
    for rows in length_sorted_batches(rollout.row_lengths, batch_size):
        counted, _ = reference(rollout.token_rows(rows), rollout.temperature)
        logprobs[rows] = _spread(counted, rollout.response_mask[rows])
    return logprobs


@torch.no_grad()
def critic_values(critic: Critic, rollout: Rollout, batch_size: int) -> Tensor:
    """Values (B, T) of the states before each response token; 0 where not counted."""
    values = torch.zeros_like(rollout.logprobs)
    for rows in length_sorted_batches(rollout.row_lengths, batch_size):
        values[rows] = _spread(critic(rollout.token_rows(rows)), rollout.response_mask[rows])
    return values


def _spread(counted: Tensor, mask: Tensor) -> Tensor:
    """N counted values to their places in (B, T)."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, counted)
