"""The two losses of PPO, per token, and the weights of tokens in them."""

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss (arXiv:1707.06347, eq. 7, negated), per token.

        ratio = exp(logprobs - old_logprobs)
        loss  = max(-A * ratio, -A * clip(ratio, 1 - cliprange, 1 + cliprange_high))
        loss  = min(loss, -dual_clip * A)  where A < 0

    Without cliprange_high both sides are cliprange; a higher upper side lets unlikely tokens
    grow (arXiv:2503.14476, eq. 10). dual_clip, above 1, bounds the loss of a token that was bad
    and has become likely (arXiv:1912.09729, eq. 5); without it there is no bound.

    All of one shape. Returns the loss, and True where a clip holds: there the gradient is 0.
    """
    high = cliprange if cliprange_high is None else cliprange_high
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + high)
    loss, holds = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is None:
        return loss, holds
    bound = -dual_clip * advantages
    bounded = (advantages < 0) & (loss > bound)
    return torch.where(bounded, bound, loss), holds | bounded


def importance_weights(logprobs: Tensor, behaviour_logprobs: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weight of each token that another distribution has drawn.

        weight = min(exp(logprobs - behaviour_logprobs), cap)

    logprobs are the policy's when the tokens were drawn, behaviour_logprobs those of what drew
    them: a part of the policy (top_k, top_p), where the weight is its share and at most 1
    (arXiv:2110.00641, eq. 5), or another engine with the same weights, whose rounding differs
    (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    The cap bounds the variance and costs some bias (IMPALA, arXiv:1802.01561, section 4.1).
    All of one shape.
    """
    return torch.exp(logprobs - behaviour_logprobs).clamp(max=cap)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Clipped squared error of the critic, per token (PPO's first code, openai/baselines ppo2).

        loss = 1/2 max((v - R)^2, (clip(v, v_old - cliprange_value, v_old + cliprange_value) - R)^2)

    All of one shape. Returns the loss, and True where the clipped side was the larger one.
    """
    near = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns) ** 2
    clipped = (near - returns) ** 2
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped


def aggregation_weights(
    lengths: Tensor,
    how: str,
    *,
    num_tokens: float | Tensor,
    num_responses: float | Tensor,
    response_length: int,
) -> Tensor:
    """Weight of every counted token of a row, so that the loss is sum of weight * loss per token.

        token:        1 / num_tokens                         mean over all tokens
        sequence:     1 / (num_responses * lengths[b])       mean over responses of their means
        fixed_length: 1 / (num_responses * response_length)  arXiv:2503.20783

    lengths (B,) counts the tokens of each row that the mask counts; num_tokens and num_responses
    are totals of the whole optimizer step over all processes, so that no split changes the loss.
    Returns (B,), 0 for a row that counts nothing.

    Raises:
        ValueError: `how` is none of these.
    """
    counted = torch.ones_like(lengths)
    if how == "token":
        shares = counted * num_tokens
    elif how == "sequence":
        shares = lengths * num_responses
    elif how == "fixed_length":
        shares = counted * num_responses * response_length
    else:
        raise ValueError(
            f"loss_aggregation={how!r} is unknown; choose token, sequence or fixed_length."
        )
    return torch.where(lengths > 0, 1 / shares, 0)
