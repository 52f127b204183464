"""Trainings are compared with the GPUs, memory and time limits of a deployment.

What is refused is in tests/hostile/test_deployments.py.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployment.deploy_flow import DeploymentFiles
from deployment.size_check import check_sizes
from pipeline.storage.addresses import S3Address
from pipeline.storage.s3_client import s3_client
from pipeline.storage.upload import publish
from ppo_core.errors import ConfigError
from tests.helpers.inputs.preset_inputs import write_published_config
from tests.helpers.runs.deployments import SCHEDULERS, write_deployment
from tests.helpers.servers.servers import BUCKET, s3

SMALL = "Qwen/Qwen2.5-0.5B-Instruct"


def written(
    folder: Path,
    scheduler: str = "step-functions",
    *,
    settings: dict[str, Any] | None = None,
    **steps: dict[str, Any],
) -> DeploymentFiles:
    """The example with a policy of published size, and changed steps."""
    changed = {"policy": write_published_config(SMALL, folder), **(settings or {})}
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


def test_epochs_over_prompts_that_are_not_read_have_no_time(tmp_path: Path):
    files = written(tmp_path)
    text = files.settings.read_text()
    files.settings.write_text(text.replace("total_episodes = 60000", "num_train_epochs = 2"))
    assert check_sizes(files)[-1].startswith("time: not compared: num_train_epochs is set")


def test_metaflows_default_is_the_limit_of_a_step_without_one(tmp_path: Path):
    files = written(tmp_path, train_policy={"timeout_minutes": 0})
    assert "an attempt is stopped after 120.0 h." in check_sizes(files)[-1]


def test_the_limit_of_a_run_is_compared_with_ppo_too(tmp_path: Path):
    files = written(tmp_path, train_policy={"timeout_minutes": 0})
    limited = replace(files, deployment=replace(files.deployment, timeout_hours=12.0))
    message = r"timeout_hours=12 stops the step after 12\.0 h, .* 13\.1 h .*at least 16"
    with pytest.raises(ConfigError, match=message):
        check_sizes(limited)


def test_what_fits_only_without_room_for_cuda_is_a_warning(tmp_path: Path):
    lines = check_sizes(written(tmp_path, settings={"ppo": {"shared_critic": False}}))
    (warning,) = [line for line in lines if line.startswith("warning: steps.")]
    assert "PPO needs about 20." in warning
    assert "of which 19.8 are usable. These settings fit:\n[ppo]\n" in warning


def test_idle_gpus_are_a_warning(tmp_path: Path):
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
    assert "flows/gpus.toml (NVIDIA-L4, NVIDIA-A10G, " in lines[0]
    assert "Otherwise, describe the GPU in the settings file as [hardware.gpus.NAME]" in lines[0]
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


@pytest.mark.parametrize(
    "models",
    [
        {"policy": "models:/rlhf-policy@champion"},
        {"policy": "no-folder/no-model"},
        {"reward_model": "no-folder/no-model"},
        {"rewards": ["reward-model", "old=reward-model:models:/old/3"]},
        {"rewards": ["reward-model", "reward-model:no-folder/no-model"]},
    ],
)
def test_models_that_cannot_be_read_here_are_said(
    models: dict[str, Any], tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (line,) = check_sizes(written(tmp_path, "argo", settings=models))
    assert line.startswith("sizes: not compared with the machines, because a model could not be")
    assert line.endswith("run --check` on a machine that can read the model.")


def test_a_reward_model_in_s3_counts_as_a_second_model_that_scores(tmp_path: Path, monkeypatch):
    alone = check_sizes(written(tmp_path))[1]
    with s3() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3_client.cache_clear()
        place = S3Address.parse(f"s3://{BUCKET}/second-reward-model")
        publish(tmp_path / "Qwen2.5-0.5B-Instruct", place)
        both = {"rewards": ["reward-model", f"reward-model:{place}"]}
        together = check_sizes(written(tmp_path, settings=both))[1]
    s3_client.cache_clear()
    sizes = [float(re.search("needs about (.*?) GiB", one)[1]) for one in (alone, together)]
    # By hand: 494 million parameters of 4 bytes, without the LM head of a policy.
    assert sizes[1] - sizes[0] == pytest.approx(494.0e6 * 4 / 2**30, abs=0.1)


def test_a_reward_function_does_not_hide_the_sizes(tmp_path: Path):
    both = {"rewards": ["reward-model", "python:rewards.py:score"]}
    assert check_sizes(written(tmp_path, settings=both)) == check_sizes(written(tmp_path))


def test_the_step_of_a_given_reward_model_trains_a_judge_or_a_fresh_model(tmp_path: Path):
    def trains(**settings: Any) -> bool:
        folder = str(tmp_path / "Qwen2.5-0.5B-Instruct")
        lines = check_sizes(written(tmp_path, settings={"reward_model": folder} | settings))
        return lines[0].startswith("steps.load_reward_model: reward model needs about ")

    assert trains(judge="")
    judge = "python:judge.py:judge"
    assert trains(judge=judge, fresh_pairs={"count": 100, "labeller": judge})
    assert not trains(judge=judge)


def test_a_built_in_task_has_no_policy_to_read(tmp_path: Path):
    files = write_deployment(tmp_path, "argo")
    files.settings.write_text('task = "tldr"\n')
    (line,) = check_sizes(files)
    assert "a model could not be read: the settings name no policy." in line


def test_sft_is_compared_with_its_own_step(tmp_path: Path):
    with_gpu = {"gpu": 1, "gpu_type": "NVIDIA-L4"}
    settings = {
        "sft_data": "s3://my-bucket/x",
        "sft": {"bf16": True, "max_length": 512, "batch_size": 2},
    }
    files = written(tmp_path, "argo", settings=settings, load_policy=with_gpu)
    assert check_sizes(files)[0].startswith("steps.load_policy: SFT needs about ")
    # Without a GPU there is nothing to compare.
    files = written(tmp_path, "argo", settings=settings)
    assert "load_policy" not in " ".join(check_sizes(files))


def test_a_step_without_gpus_is_compared_with_nothing(tmp_path: Path):
    on_cpu = {"gpu": 0, "gpu_type": ""}
    files = written(tmp_path, "argo", train_policy=on_cpu, load_reward_model=on_cpu)
    assert check_sizes(files) == []
