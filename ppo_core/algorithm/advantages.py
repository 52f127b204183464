"""Advantages of tokens over the critic's values."""

import torch
from torch import Tensor


def gae_advantages(rewards: Tensor, values: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Return generalized advantage estimates (arXiv:1506.02438, eq. 16).

        delta[t] = rewards[t] + gamma * values[t+1] - values[t]
        A[t]     = delta[t] + gamma * gae_lambda * A[t+1]

    rewards and values are (B, T), and the caller has set them to 0 after each response's last
    token. Returns advantages (B, T), not standardized, and 0 after the last token.

    Decoupled GAE (arXiv:2503.01491) takes two calls: the policy's lambda gives the advantages of
    the policy loss, and the critic's lambda gives the returns A + values.

    An uncounted token inside a response is a step with reward 0 and value 0. The token before it
    therefore sees later values only through A[t+1], discounted by gamma * gae_lambda.
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
