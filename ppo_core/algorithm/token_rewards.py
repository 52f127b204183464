"""Turn one score per response into one reward per token."""

import torch
from torch import Tensor


def penalize_missing_stop(scores: Tensor, has_stop: Tensor, penalty: float) -> Tensor:
    """Return scores (B,) minus the penalty where has_stop (B,) is False.

    Subtracting preserves the score's information (TRL #2012, #2033); arXiv:1909.08593 replaces
    the score by a fixed value.
    """
    return torch.where(has_stop, scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, per_token: float) -> Tensor:
    """Return scores (B,) minus `per_token` times the lengths (B,) of the responses."""
    return scores - per_token * lengths


def overlong_penalty(
    lengths: Tensor, *, response_length: int, buffer: int, penalty: float
) -> Tensor:
    """Return the penalty (B,) of responses that are close to their maximum length.

        penalty * clip((lengths - (response_length - buffer)) / buffer, 0, 1)

    The penalty is 0 up to response_length - buffer tokens and full at response_length
    (arXiv:2503.14476, eq. 13, negated); never negative, and 0 for all if the buffer is 0. lengths
    is (B,).
    """
    if buffer == 0:
        return torch.zeros(lengths.shape, device=lengths.device)
    return penalty * ((lengths - (response_length - buffer)) / buffer).clamp(0, 1)


def clip_scores(scores: Tensor, bound: float) -> Tensor:
    """Return scores (B,) clipped to [-bound, bound]."""
    return scores.clamp(-bound, bound)


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return rewards (B, T) per token (arXiv:1909.08593, eq. 2, spread over the tokens).

        reward[b, t] = -kl_coef * kl[b, t] + (scores[b] if t is the last counted token)

    scores is (B,); kl and response_mask are (B, T). The mask may have gaps: uncounted tokens
    inside a response. Rewards are 0 where the mask is False.

    Raises:
        ValueError: a response has no counted token that could carry its score.
    """
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(dim=1, keepdim=True)
    if empty := (last < 0).nonzero()[:, 0].tolist():
        raise ValueError(
            f"response_mask counts no token in rows {empty}: their scores would be lost. Leave "
            "these responses out, or count one token of each."
        )
    rewards = torch.where(response_mask, -kl_coef * kl, 0)
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))
