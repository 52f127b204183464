"""The two losses of PPO, per token; whoever calls decides over which tokens to average."""

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, cliprange: float
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss (arXiv:1707.06347, eq. 7, negated), per token.

        ratio = exp(logprobs - old_logprobs)
        loss  = max(-A * ratio, -A * clip(ratio, 1 - cliprange, 1 + cliprange))

    All of one shape. Returns the loss, and True where the clipped side was the larger one.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(unclipped, clipped), clipped > unclipped


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
