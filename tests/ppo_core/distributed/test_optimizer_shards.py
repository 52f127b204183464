"""Optimizer states of parameters, as checkpoints read and restore them."""

import torch
from torch import nn
from torch.optim import AdamW

from ppo_core.distributed.optimizer_shards import read_state, write_state


def test_the_moments_of_a_parameter_without_dimensions_follow_its_device():
    """Only the step count stays on the CPU."""
    parameter = nn.Parameter(torch.tensor(2.0))
    optimizer = AdamW([parameter], foreach=False)
    parameter.square().backward()
    optimizer.step()
    saved = read_state(optimizer, parameter)
    elsewhere = nn.Parameter(torch.empty((), device="meta"))
    resumed = AdamW([elsewhere], foreach=False)
    write_state(resumed, elsewhere, saved)
    devices = {name: tensor.device.type for name, tensor in resumed.state[elsewhere].items()}
    assert devices == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}
