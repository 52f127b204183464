"""From one score per response to one reward per token."""

import torch
from torch import Tensor


def penalize_missing_stop(scores: Tensor, has_stop: Tensor, penalty: float) -> Tensor:
    """Scores (B,), less the penalty where a response does not end in its stop token (B,).

    Subtracted from the score, which stays visible (TRL #2012, #2033; in arXiv:1909.08593 a
    fixed score replaces it).
    """
    return torch.where(has_stop, scores, scores - penalty)


def length_penalty(scores: Tensor, lengths: Tensor, per_token: float) -> Tensor:
    """Scores (B,), less `per_token` for each of a response's tokens; lengths is (B,)."""
    return scores - per_token * lengths


def overlong_penalty(
    lengths: Tensor, *, response_length: int, buffer: int, penalty: float
) -> Tensor:
    """What to subtract from the scores of responses that nearly fill the room they have.

        penalty * clip((lengths - (response_length - buffer)) / buffer, 0, 1)

    0 up to response_length - buffer tokens, and the whole penalty at response_length
    (arXiv:2503.14476, eq. 13, negated). lengths is (B,); returns (B,), never negative, and all 0
    if the buffer is 0.
    """
    if buffer == 0:
        return torch.zeros(lengths.shape, device=lengths.device)
    return penalty * ((lengths - (response_length - buffer)) / buffer).clamp(0, 1)


def clip_scores(scores: Tensor, bound: float) -> Tensor:
    """Scores (B,) clipped to -bound .. bound."""
    return scores.clamp(-bound, bound)


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """Rewards per token (arXiv:1909.08593, eq. 2, spread over the tokens).

        reward[b, t] = -kl_coef * kl[b, t] + (scores[b] if t is the last counted token)

    scores is (B,); kl and response_mask are (B, T). The mask may have gaps: tokens inside a
    response that do not count. Returns (B, T), 0 where the mask does not count.

    Raises:
        ValueError: a row counts no token, so that its score would have no place.
    """
    places = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, places, -1).amax(dim=1, keepdim=True)
    if empty := (last < 0).nonzero()[:, 0].tolist():
        raise ValueError(
            f"response_mask counts no token in rows {empty}: their scores would be lost. Leave "
            "these responses out, or count one token of each."
        )
    rewards = torch.where(response_mask, -kl_coef * kl, 0)
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))
