"""A rollout in; reference log-probabilities, values and reward scores out."""

import torch
from torch import Tensor

from ppo_core.data.batching import token_batches
from ppo_core.data.types import Rollout
from ppo_core.models.actor_critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel


def score_tokens(reward_model: RewardModel, rollout: Rollout, batch_size: int) -> Tensor:
    """Scores (B,) of the very tokens that were sampled, for a reward model that reads them.

    The stop token gives way to the end that the reward model was trained with.
    """
    scores = torch.empty(len(rollout), device=rollout.logprobs.device)
    for rows in token_batches(rollout.row_lengths, batch_size):
        ids = rollout.token_rows(rows).ids
        lengths = rollout.row_lengths[rows] - rollout.has_stop[rows].long()
        if reward_model.end_of_text:
            ids = torch.nn.functional.pad(ids, (0, 1))
            end = torch.full_like(lengths, int(reward_model.tokenizer.eos_token_id))
            ids = ids.scatter(1, lengths[:, None], end[:, None])
            lengths = lengths + 1
        scores[rows] = reward_model.score_rows(ids, lengths)
    return scores


@torch.no_grad()
def reference_logprobs(reference: LanguageModel, rollout: Rollout, batch_size: int) -> Tensor:
    """Log-probabilities (B, T) of the responses under the reference; 0 where not counted."""
    logprobs = torch.zeros_like(rollout.logprobs)
    for rows in token_batches(rollout.row_lengths, batch_size):
        counted, _ = reference(rollout.token_rows(rows), rollout.temperature)
        logprobs[rows] = _spread(counted, rollout.response_mask[rows])
    return logprobs


@torch.no_grad()
def critic_values(critic: Critic, rollout: Rollout, batch_size: int) -> Tensor:
    """Values (B, T) of the states before each response token; 0 where not counted."""
    values = torch.zeros_like(rollout.logprobs)
    for rows in token_batches(rollout.row_lengths, batch_size):
        values[rows] = _spread(critic(rollout.token_rows(rows)), rollout.response_mask[rows])
    return values


@torch.no_grad()
def full_kl(
    policy: LanguageModel, reference: LanguageModel, rollout: Rollout, batch_size: int
) -> Tensor:
    """Exact KL(policy || reference) (B, T) at each counted token; 0 where not counted."""
    divergences = torch.zeros_like(rollout.logprobs)
    for rows in token_batches(rollout.row_lengths, batch_size):
        tokens = rollout.token_rows(rows)
        states = policy.backbone.states(tokens)
        counted = policy.full_kl(states, reference, tokens, rollout.temperature)
        divergences[rows] = _spread(counted, rollout.response_mask[rows])
    return divergences


def _spread(counted: Tensor, mask: Tensor) -> Tensor:
    """N counted values to their places in (B, T)."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, counted)
