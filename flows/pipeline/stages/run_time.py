"""Estimate the time of PPO before a run, from its sizes and the speed of this machine."""

import time
from math import ceil

import torch
from torch import Tensor

from pipeline.launch.commands import gpus
from pipeline.settings.settings import Settings
from ppo_core.models.loading import load_config

ROWS = 2_048
"""Rows of the matrix whose product is timed: tokens of a batch."""

SECONDS = 0.3
"""Time for which products are repeated."""

UTILIZATION = 0.4
"""Fraction of the speed of matrix products that PPO reaches. Between 0.2 and 0.6 was measured, so
an estimate is right to a factor of two."""


def estimate_ppo_seconds(
    settings: Settings, *, policy: int, reward_model: int, episodes: int, tokens: float
) -> float:
    """Return roughly how many seconds PPO takes on machines like this one.

    A forward pass takes 2 operations for each parameter and token, and a backward pass 4
    (arXiv:2001.08361, section 2.1). Policy, reference, critic and reward model each read every
    sequence once, the policy also samples it, and each PPO epoch trains policy and critic on it.

    Args:
        settings: settings of the run.
        policy: number of parameters of the policy, and of the critic.
        reward_model: number of parameters of the reward model.
        episodes: number of responses.
        tokens: mean number of tokens of a prompt and its response.
    """
    passes = 2 * (4 * policy + reward_model)
    training = settings.ppo.num_ppo_epochs * 6 * 2 * policy
    devices = (settings.processes or gpus() or 1) if gpus() else 1
    speed = UTILIZATION * _operations_per_second(settings) * devices * settings.num_nodes
    return episodes * tokens * (passes + training) / speed


def describe_seconds(seconds: float) -> str:
    """Return a rough time in words."""
    if seconds < 90:
        return f"{ceil(seconds)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _operations_per_second(settings: Settings) -> float:
    """Return the speed of matrix products of the policy's width on one device of this machine."""
    width = load_config(settings.policy).get_text_config().hidden_size
    device = "cuda" if gpus() else "cpu"
    dtype = torch.bfloat16 if settings.ppo.bf16 else torch.float32
    left = torch.ones(ROWS, width, device=device, dtype=dtype)
    right = torch.ones(width, 4 * width, device=device, dtype=dtype)
    _wait_for(left @ right)
    products, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < SECONDS:
        _wait_for(left @ right)
        products += 1
    return products * 2 * ROWS * width * 4 * width / spent


def _wait_for(product: Tensor) -> None:
    """Wait until a GPU has computed the product."""
    product[0, 0].item()
