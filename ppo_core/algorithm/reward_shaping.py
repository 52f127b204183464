"""Rewards per token: the scores of responses, penalties on the scores, and the KL penalty."""

import torch
from torch import Tensor


def penalize_missing_stop(scores: Tensor, has_stop: Tensor, penalty: float) -> Tensor:
    """Return scores (B,), with the penalty subtracted where has_stop (B,) is False.

    Unlike replacing the score by a fixed value (arXiv:1909.08593), subtracting keeps the
    differences between scores (TRL #2012, #2033).
    """
    return torch.where(has_stop, scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, per_token: float) -> Tensor:
    """Return scores (B,) minus `per_token` times the lengths (B,) of the responses."""
    return scores - per_token * lengths


def overlong_penalty(
    lengths: Tensor, *, response_length: int, buffer: int, penalty: float
) -> Tensor:
    """Return penalties (B,) of responses of the given lengths (B,), to subtract from the scores.

        penalty * clip((lengths - (response_length - buffer)) / buffer, 0, 1)

    This is arXiv:2503.14476, eq. 13, negated. The penalty rises from 0 at response_length - buffer
    tokens to `penalty` at response_length tokens. `buffer` must be at least 1.
    """
    return penalty * ((lengths - (response_length - buffer)) / buffer).clamp(0, 1)


def clip_scores(scores: Tensor, bound: float) -> Tensor:
    """Return scores (B,) clipped to [-bound, bound]."""
    return scores.clamp(-bound, bound)


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return rewards (B, T) per token (arXiv:1909.08593, eq. 2, spread over the tokens).

        reward[b, t] = -kl_coef * kl[b, t] + (scores[b] if t is the last counted token)

    scores is (B,); kl and response_mask are (B, T). The mask may also be False inside a response.
    Rewards are 0 where the mask is False.

    Raises:
        ValueError: a response has no counted token, so its score has no position.
    """
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(dim=1, keepdim=True)
    if empty := (last < 0).nonzero()[:, 0].tolist():
        raise ValueError(
            f"response_mask is all False in rows {empty}, so the scores of these responses would "
            "be lost. Remove the responses, or set one position of each row to True."
        )
    rewards = torch.where(response_mask, -kl_coef * kl, 0)
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))
