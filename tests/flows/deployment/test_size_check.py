"""Trainings are compared with the GPUs, memory and time limits of a deployment, by name."""

from pathlib import Path
from typing import Any

import pytest

from deployment.flow_commands import DeploymentFiles
from deployment.size_check import check_sizes
from ppo_core.errors import ConfigError
from tests.helpers.deployments import SCHEDULERS, write_deployment
from tests.helpers.preset_inputs import write_published_config

SMALL, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"

LORA = {"lora": {"r": 16, "alpha": 32, "dtype": "bfloat16"}}
"""Settings with which a policy of 7B fits 24 GB."""


def written(
    folder: Path,
    scheduler: str = "step-functions",
    *,
    policy: str = SMALL,
    settings: dict[str, Any] | None = None,
    **steps: dict[str, Any],
) -> DeploymentFiles:
    """The example with a policy of published size, and changed steps."""
    changed = {"policy": write_published_config(policy, folder), **(settings or {})}
    return write_deployment(folder, scheduler, {"steps": steps}, changed)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_example_fits_its_machines_and_its_time(scheduler: str, tmp_path: Path):
    lines = check_sizes(written(tmp_path, scheduler))
    assert not [line for line in lines if line.startswith(("warning", "sizes"))]
    reward, memory, time = lines
    assert reward.startswith("steps.load_reward_model: reward model needs about ")
    assert memory == (
        "steps.train_policy: PPO needs about 13.3 GiB per GPU, and l4-24gb has 22.0, of which "
        "19.8 are usable."
    )
    # By hand: 118 updates of 512 responses, in 16 batches of 32; decoding takes 118 x 16 x 512 x
    # 20.0 ms = 5.4 h, and the passes over 1,536 tokens of each response take the rest.
    assert time == (
        "steps.train_policy: PPO takes roughly 13.1 h on 1 x l4-24gb, with prompts of 1,024 tokens "
        "and responses of full length; an attempt is stopped after 24.0 h."
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_time_limit_below_the_computed_time_is_refused_with_both(scheduler: str, tmp_path: Path):
    files = written(tmp_path, scheduler, train_policy={"timeout_minutes": 600})
    refused = (
        r"steps\.train_policy\.timeout_minutes=600 stops an attempt after 10\.0 h, and PPO takes "
        r"roughly 13\.1 h on 1 x l4-24gb.*Set it to at least 946"
    )
    with pytest.raises(ConfigError, match=refused):
        check_sizes(files)


def test_the_day_of_the_example_is_too_short_for_the_preset_of_7b(tmp_path: Path):
    settings = {**LORA, "ppo": {"local_rollout_forward_batch_size": 8, "total_episodes": 20_000}}
    given = write_published_config("Skywork/Skywork-Reward-V2-Qwen3-0.6B", tmp_path)
    files = written(
        tmp_path,
        policy=LARGE,
        settings={**settings, "reward_model": given},
        train_policy={"memory_gib": 64},
    )
    with pytest.raises(ConfigError, match=r"timeout_minutes=1440 .* 24\.0 h, and PPO takes rou"):
        check_sizes(files)


def test_epochs_over_prompts_that_are_not_read_have_no_time(tmp_path: Path):
    files = written(tmp_path)
    text = files.settings.read_text()
    files.settings.write_text(text.replace("total_episodes = 60000", "num_train_epochs = 2"))
    assert check_sizes(files)[-1].startswith("time: not compared: num_train_epochs is set")


def test_metaflows_default_is_the_limit_of_a_step_without_one(tmp_path: Path):
    files = written(tmp_path, train_policy={"timeout_minutes": 0})
    assert "an attempt is stopped after 120.0 h." in check_sizes(files)[-1]


def test_more_memory_than_the_gpu_has_is_refused_with_settings_that_fit(tmp_path: Path):
    large = {"ppo": {"shared_critic": False, "gradient_checkpointing": False}}
    with pytest.raises(ConfigError, match=r"l4-24gb has 22\.0.*it would end") as refused:
        check_sizes(written(tmp_path, settings=large))
    assert "steps.train_policy: PPO needs about " in str(refused.value)
    assert "shared_critic = true" in str(refused.value)


def test_what_fits_only_without_room_for_cuda_is_a_warning(tmp_path: Path):
    lines = check_sizes(written(tmp_path, settings={"ppo": {"shared_critic": False}}))
    (warning,) = [line for line in lines if line.startswith("warning: steps.")]
    assert "PPO needs about 20." in warning
    assert "of which 19.8 are usable. These settings fit:\n[ppo]\n" in warning


def test_the_reward_model_is_compared_with_its_own_step(tmp_path: Path):
    settings = {"reward_model_training": {"batch_size": 64, "max_length": 2048}}
    with pytest.raises(ConfigError, match=r"steps\.load_reward_model: reward model needs about"):
        check_sizes(written(tmp_path, settings=settings))


def test_too_little_main_memory_is_refused(tmp_path: Path):
    files = written(tmp_path, train_policy={"memory_gib": 8})
    with pytest.raises(ConfigError, match=r"memory_gib=8, and PPO needs about 12 GiB of main"):
        check_sizes(files)


def test_processes_need_a_gpu_each_and_idle_gpus_are_a_warning(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"processes=4 in the settings, and steps\.\w+\.gpu=1"):
        check_sizes(written(tmp_path, settings={"processes": 4}))
    lines = check_sizes(written(tmp_path, train_policy={"gpu": 4}))
    assert "warning: steps.train_policy.gpu=4 and processes=1: the other GPUs are paid" in lines[1]


def test_the_gpu_of_argo_is_the_type_of_the_step(tmp_path: Path):
    large = {"gpu_type": "NVIDIA-H100-80GB-HBM3"}
    lines = check_sizes(written(tmp_path, "argo", train_policy=large))
    assert "and h100-80gb has 79.2" in lines[1]
    assert "and l4-24gb has 22.0" in lines[0]


def test_an_unknown_gpu_is_said_and_compared_with_nothing(tmp_path: Path):
    strange = {"gpu_type": "NVIDIA-GTX-1080"}
    lines = check_sizes(written(tmp_path, "argo", train_policy=strange))
    assert lines[-1].startswith("steps.load_reward_model: ")
    assert "sizes: PPO is not compared with steps.train_policy, whose type of GPU" in lines[0]
    lines = check_sizes(written(tmp_path, settings={"hardware": {"gpu": ""}}))
    assert len(lines) == 2


def test_a_budget_below_the_computed_hours_is_a_warning(tmp_path: Path):
    files = write_deployment(
        tmp_path,
        "argo",
        {"alarms": {"gpu_hours": 10.0}},
        {"policy": write_published_config(SMALL, tmp_path)},
    )
    assert check_sizes(files)[-1] == (
        "warning: alarms.gpu_hours=10, and PPO alone takes about 13.1 GPU hours: each run would "
        "raise the alarm."
    )


@pytest.mark.parametrize("policy", ["models:/rlhf-policy@champion", "no-folder/no-model"])
def test_models_that_cannot_be_read_here_are_said(policy: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (line,) = check_sizes(write_deployment(tmp_path, "argo", {}, {"policy": policy}))
    assert line.startswith("sizes: not compared with the machines, because a model could not be")
    assert line.endswith("run --check` computes them where it can be.")


def test_a_step_without_gpus_is_compared_with_nothing(tmp_path: Path):
    on_cpu = {"gpu": 0, "gpu_type": ""}
    files = written(tmp_path, "argo", train_policy=on_cpu, load_reward_model=on_cpu)
    assert check_sizes(files) == []
