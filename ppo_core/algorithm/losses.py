"""PPO's policy loss and value loss per token, and the weight of each token in the total loss."""

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
    """Return the clipped surrogate loss (arXiv:1707.06347, eq. 7, negated) per token.

        ratio = exp(logprobs - old_logprobs)
        loss  = max(-A * ratio, -A * clip(ratio, 1 - cliprange, 1 + cliprange_high))
        loss  = min(loss, -dual_clip * A)  where A < 0

    cliprange_high defaults to cliprange. With a larger value, the probability of unlikely tokens
    can rise further (arXiv:2503.14476, eq. 10). dual_clip, above 1, bounds the loss of a token that
    has a negative advantage and a ratio above dual_clip (arXiv:1912.09729, eq. 5). None sets no
    bound.

    All tensors have equal shapes. Returns the loss, and a mask that is True where clipping or the
    dual_clip bound makes the gradient 0.
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


def importance_weights(logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float) -> Tensor:
    """Return truncated importance weights of tokens that were not sampled from the exact policy.

        weight = min(exp(logprobs - behavior_logprobs), cap)

    logprobs are log-probabilities under the policy at sampling time. behavior_logprobs are
    log-probabilities under the distribution from which the tokens were sampled. The distribution is

    - either the policy truncated by top_k and top_p (arXiv:2110.00641, eq. 5), so that the weights
      are at most 1;
    - or the policy as an inference engine computes it, with equal parameters but different rounding
      (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").

    The cap bounds the variance at the cost of some bias (IMPALA, arXiv:1802.01561, section 4.1).
    All tensors have equal shapes.
    """
    return torch.exp(logprobs - behavior_logprobs).clamp(max=cap)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped squared error of the critic per token (openai/baselines, ppo2).

        loss = 1/2 max((v - R)^2, (clip(v, v_old - cliprange_value, v_old + cliprange_value) - R)^2)

    All tensors have equal shapes. Returns the loss, and a mask that is True where the clipped term
    is larger than the unclipped one.
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
    """Return weights (B,): the weight of each counted token of response b in the total loss.

    The total loss is the sum of weight * loss over the counted tokens:

        token:        1 / num_tokens                         mean over all tokens
        sequence:     1 / (num_responses * lengths[b])       mean of the responses' means
        fixed_length: 1 / (num_responses * response_length)  arXiv:2503.20783

    lengths (B,) are the numbers of counted tokens per response. num_tokens and num_responses are
    totals of the optimizer step over all processes, so that the loss does not depend on the split
    into microbatches and processes. A response without counted tokens has weight 0.

    Raises:
        ValueError: `how` is unknown.
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
