"""Estimate the time of PPO before a run, from its sizes and the speed of this machine."""

import time
from math import ceil

import torch
from torch import Tensor

from pipeline.launch.commands import gpus
from pipeline.settings.settings import Settings
from ppo_core.data.text_config import text_config
from ppo_core.models.loading import load_config

ROWS = 2_048
"""Rows of the matrix whose product is timed: tokens of a batch."""

SECONDS = 0.3
"""Time for which products are repeated."""

UTILIZATION = {"cpu": 0.9, "cuda": 0.2}
"""Fraction of the speed of matrix products that PPO reaches, if all responses had full length. The
value for CPUs is fitted to four runs of two tasks on a busy machine, which took 0.6 to 1.7 times
the estimate. That for GPUs is an assumption: sampling waits for memory there."""


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
    device, devices = ("cuda", settings.processes or gpus()) if gpus() else ("cpu", 1)
    speed = UTILIZATION[device] * _operations_per_second(settings, device)
    speed *= devices * settings.num_nodes
    return episodes * tokens * (passes + training) / speed


def describe_seconds(seconds: float) -> str:
    """Return a rough time in words."""
    if seconds < 90:
        return f"{ceil(seconds)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def _operations_per_second(settings: Settings, device: str) -> float:
    """Return the speed of matrix products of the policy's width on one device of this machine."""
    width = text_config(load_config(settings.policy)).hidden_size
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
