"""Advantages and returns, with a critic (GAE) or without one (REINFORCE++, RLOO, GRPO)."""

import torch
from torch import Tensor


def gae_advantages(rewards: Tensor, values: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Return generalized advantage estimates (arXiv:1506.02438, eq. 16).

        delta[t] = rewards[t] + gamma * values[t+1] - values[t]
        A[t]     = delta[t] + gamma * gae_lambda * A[t+1]

    rewards and values are (B, T), and the caller has set them to 0 after each response's last
    token. Returns advantages (B, T), not standardized, and 0 after the last token.

    For decoupled GAE (arXiv:2503.01491), call this function twice: with the policy's lambda to get
    the advantages of the policy loss, and with the critic's lambda to get the returns A + values.

    The caller must first remove uncounted tokens (`ppo_core.algorithm.masking`) from inside a
    response: if one stayed, values[t+1] would be 0 for the token before it.
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


def returns_to_go(rewards: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted sum of the rewards from each token to the end (REINFORCE).

        R[t] = rewards[t] + gamma * R[t+1]

    rewards are (B, T), and the caller has set them to 0 after each response's last token. Returns
    (B, T). REINFORCE++ (arXiv:2501.03262) trains no critic, and standardizes these returns over the
    batch.
    """
    return gae_advantages(rewards, torch.zeros_like(rewards), gamma=gamma, gae_lambda=1.0)


def leave_one_out_advantages(rewards: Tensor, *, group: int) -> Tensor:
    """Return each response's reward minus the mean of the group's other rewards (RLOO).

        A[i] = r[i] - 1 / (G - 1) * sum over j != i of r[j]

    This is arXiv:2402.14740, eq. 9. rewards (B,) has one reward per response. Each G = `group` >= 2
    consecutive responses answer the same prompt. Returns (B,).
    """
    rewards = _grouped(rewards, group)
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (group - 1)
    return (rewards - others).flatten()


def group_relative_advantages(rewards: Tensor, *, group: int, scales: bool = True) -> Tensor:
    """Return each response's reward, standardized within its group (GRPO).

        A[i] = (r[i] - mean(r)) / (std(r) + 1e-4)

    This is arXiv:2402.03300, section 4.1.2, with Bessel's correction in std. If `scales` is False,
    rewards are not divided by std (Dr. GRPO, arXiv:2503.20783). The division gives every prompt the
    same weight, even if the rewards of its responses are nearly equal. For shapes see
    `leave_one_out_advantages`.
    """
    rewards = _grouped(rewards, group)
    centered = rewards - rewards.mean(dim=1, keepdim=True)
    if scales:
        centered = centered / (rewards.std(dim=1, keepdim=True) + 1e-4)
    return centered.flatten()


def _grouped(rewards: Tensor, group: int) -> Tensor:
    """Return rewards (B,) as (B / group, group)."""
    if group < 2 or len(rewards) % group:
        raise ValueError(f"{len(rewards)} responses do not split into groups of {group} >= 2.")
    return rewards.reshape(-1, group)
