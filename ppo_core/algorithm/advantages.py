"""How much better a token was than the critic expected."""

import torch
from torch import Tensor


def gae_advantages(rewards: Tensor, values: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimates (arXiv:1506.02438, eq. 16).

        delta[t] = rewards[t] + gamma * values[t+1] - values[t]
        A[t]     = delta[t] + gamma * gae_lambda * A[t+1]

    rewards and values are (B, T) and already 0 after each response's last token, so the
    value past the end is 0. Returns (B, T), not standardised, 0 after the last token.

    Decoupled lambdas (arXiv:2503.01491) are two calls: the advantages of the policy come from
    its own lambda, the returns of the critic, A + values, from the critic's.

    A token inside a response that does not count is a step of its own, of reward and value 0:
    where the mask has gaps, the estimate before a gap does not see the value behind it but
    through A[t+1], with gamma * gae_lambda.
    """
    if rewards.shape != values.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and values {tuple(values.shape)} differ.")
    deltas = rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        following = deltas[:, t] + gamma * gae_lambda * following
        advantages[:, t] = following
    return advantages
