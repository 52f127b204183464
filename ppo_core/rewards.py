"""From one score per response to one reward per token."""

import torch
from torch import Tensor


def penalise_missing_stop(scores: Tensor, has_stop: Tensor, penalty: float) -> Tensor:
    """Scores (B,), less the penalty where a response does not end in its stop token (B,).

    Subtracted from the score, which stays visible (TRL #2012, #2033; in arXiv:1909.08593 a
    fixed score replaces it).
    """
    return torch.where(has_stop, scores, scores - penalty)


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Rewards per token (arXiv:1909.08593, eq. 2, spread over the tokens).

        reward[b, t] = -kl_coef * kl[b, t] + (scores[b] if t is the last counted token)

    scores is (B,); kl and response_mask are (B, T), each row counting at least one token.
    Returns (B, T), 0 where the mask does not count.
    """
    last = response_mask.sum(dim=1, keepdim=True) - 1
    rewards = torch.where(response_mask, -kl_coef * kl, 0)
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))
