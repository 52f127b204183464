"""Deployments that would end without memory, time or GPUs are refused before they are made."""

import re
from pathlib import Path
from typing import Any

import pytest

from deployment.size_check import check_sizes
from ppo_core.errors import ConfigError
from tests.helpers.inputs.preset_inputs import write_published_config
from tests.helpers.runs.deployments import write_deployment

SMALL, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"

OF_7B = {
    "reward_model": "Skywork/Skywork-Reward-V2-Qwen3-0.6B",
    "lora": {"r": 16, "alpha": 32, "dtype": "bfloat16"},
    "ppo": {"local_rollout_forward_batch_size": 8, "total_episodes": 20_000},
}
"""Settings of the preset with which a policy of 7B fits 24 GB."""

Case = tuple[dict[str, Any], dict[str, Any], str]

CASES: dict[str, Case] = {
    "a time limit of ten hours": (
        {},
        {"train_policy": {"timeout_minutes": 600}},
        "timeout_minutes=600 stops the step after 10.0 h, and PPO takes roughly 13.1 h on 1 x l4",
    ),
    "the day of the example, for a policy of 7B": (
        OF_7B,
        {"train_policy": {"memory_gib": 64}},
        "timeout_minutes=1440 stops the step after 24.0 h, and PPO takes roughly 7",
    ),
    "twice the episodes": (
        {"ppo": {"total_episodes": 120_000}},
        {},
        "timeout_minutes=1440 stops the step after 24.0 h, and PPO takes roughly 26.2 h",
    ),
    "few responses sampled together": (
        {"ppo": {"local_rollout_forward_batch_size": 4}},
        {},
        "a larger local_rollout_forward_batch_size, or fewer episodes",
    ),
    "no recomputed activations": (
        {"ppo": {"gradient_checkpointing": False, "shared_critic": False}},
        {},
        "which 19.8 are usable: it would run out of GPU memory. These settings fit:\n[ppo]",
    ),
    "more rows in a pass than fit": (
        {"ppo": {"per_device_train_batch_size": 64}},
        {},
        "steps.train_policy: PPO needs about ",
    ),
    "a reward model with long pairs": (
        {"reward_model_training": {"batch_size": 64, "max_length": 2048}},
        {},
        "steps.load_reward_model: reward model needs about ",
    ),
    "a reward model trained in fp32 without recomputing": (
        {"reward_model_training": {"bf16": False, "gradient_checkpointing": False}},
        {},
        "steps.load_reward_model: reward model needs about 46.7 GiB",
    ),
    "SFT of long demonstrations": (
        {"sft_data": "s3://my-bucket/x", "sft": {"batch_size": 32, "max_length": 4096}},
        {"load_policy": {"gpu": 1}},
        "steps.load_policy: SFT needs about ",
    ),
    "all parameters of 7B on 24 GB": (
        {"reward_model": OF_7B["reward_model"]},
        {},
        "PPO needs about 162.2 GiB per GPU, and l4-24gb has 22.0",
    ),
    "too little main memory": (
        {},
        {"train_policy": {"memory_gib": 8}},
        "steps.train_policy.memory_gib=8, and PPO needs about 12 GiB of main memory per machine",
    ),
    "more processes than GPUs": (
        {"processes": 4},
        {},
        "processes=4, but steps.load_reward_model.gpu=1. Each process",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_deployment_that_cannot_end_well_is_refused_with_both_numbers(case: str, tmp_path: Path):
    settings, steps, message = CASES[case]
    policy = LARGE if "7B" in case else SMALL
    published = {"policy": write_published_config(policy, tmp_path)}
    if reward_model := settings.get("reward_model"):
        published["reward_model"] = write_published_config(reward_model, tmp_path)
    files = write_deployment(tmp_path, "step-functions", {"steps": steps}, settings | published)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_sizes(files)
