"""Write the input of a PPO training: a file of prompts and a file of settings."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.inputs.flow_run import CRITIC
from pipeline.inputs.run_rewards import RunRewards
from pipeline.launch.commands import gpus
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import LoraConfig
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.io.atomic_files import write_atomically
from ppo_core.ppo.schedule import make_schedule

JOB_FILE = "settings.json"

NUM_WATCHED, NUM_SAMPLE_TABLES = 8, 5
"""Number of training prompts whose answers the page of the run shows, and number of times that PPO
answers these prompts during the training."""


@dataclass(frozen=True)
class Pause:
    """The end of a part of the training. The next part may have another reward model."""

    after_updates: int
    """Number of updates after which the training pauses, counted from the start of the first
    part."""

    has_new_reward: bool
    """Whether this part starts from a checkpoint that was trained with another reward model."""


@dataclass(frozen=True, kw_only=True)
class JobModels:
    """The models of a training, as folders or hub ids."""

    policy: str
    """The policy to start from, which is also the reference."""

    reward_model: str

    reward_bias: float
    """Offset that is subtracted from each score of the reward model."""

    reward_gain: float
    """Factor for a score after subtracting `reward_bias`."""

    critic: str | None = None
    """The critic to start from; None to start from the reward model."""


def ppo_config(settings: Settings) -> PPOConfig:
    """Return the settings of PPO; if promotion.max_kl is finite, the KL warning mentions it."""
    max_kl = settings.promotion.max_kl
    if not math.isfinite(max_kl):
        return settings.ppo
    note = f"Promotion will be refused above promotion.max_kl={max_kl:g}."
    return replace(settings.ppo, warn_kl_note=note)


def updates_of_ppo(settings: Settings, num_prompts: int) -> int:
    """Return the number of updates of PPO.

    Without the setting `processes`, every machine is assumed to have as many GPUs as this one.

    Raises:
        ConfigError: see `make_schedule`.
    """
    processes = (settings.processes or gpus() or 1) * settings.num_nodes
    schedule = make_schedule(settings.ppo, num_prompts=num_prompts, num_processes=processes)
    return schedule.num_updates


def write_job(
    rewards: RunRewards,
    models: JobModels,
    *,
    folder: Path,
    policy_dir: Path,
    pause: Pause | None = None,
) -> Path:
    """Write the input files of `python -m ppo_core`, and return the path of the settings file.

    Args:
        rewards: rewards of the run, with its data sets.
        models: the models that the training starts from, and the reward model.
        folder: folder for the input files, the checkpoints and the metrics, and with `start_from`
            also for the final critic.
        policy_dir: folder for the final policy.
        pause: the end of this part of the training; None to train to the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = rewards.data.settings
    own = rewards.own_path(models.reward_model)
    has_model = own or any(one.kind == "reward-model" for one in rewards.named)
    rows = "".join(json.dumps(row) + "\n" for row in rewards.prompts())
    write_atomically(folder / "prompts.jsonl", rows)
    config = {
        **asdict(ppo_config(settings)),
        "output_dir": str(folder),
        "sft_model_path": models.policy,
        "reward_model_path": own,
        "num_sample_generations": NUM_SAMPLE_TABLES,
    }
    script = ScriptArguments(
        dataset_name=str(folder / "prompts.jsonl"),
        prompt_format=settings.prompt_format,
        resume_from_checkpoint="latest",
        rewards=settings.rewards or None,
        # If no reward uses these two settings, the command accepts only their default values.
        reward_bias=models.reward_bias if own else ScriptArguments.reward_bias,
        reward_gain=models.reward_gain if own else ScriptArguments.reward_gain,
        reward_end_of_text=settings.reward_model_training.end_of_text
        if has_model
        else ScriptArguments.reward_end_of_text,
        policy_dir=str(policy_dir),
        watched_prompts=NUM_WATCHED,
        critic_path=models.critic,
        critic_dir=str(folder / CRITIC) if settings.start_from else None,
        resume_anyway=pause is not None and pause.has_new_reward,
        stop_after_updates=None if pause is None else pause.after_updates,
    )
    path = folder / JOB_FILE
    everything = config | asdict(script) | asdict(_model_arguments(models.policy, settings.lora))
    write_atomically(path, json.dumps(everything, indent=2))
    return path


def _model_arguments(policy: str, lora: LoraConfig) -> ModelArguments:
    if not lora.r:
        return ModelArguments(model_name_or_path=policy)
    return ModelArguments(
        model_name_or_path=policy,
        use_peft=True,
        lora_r=lora.r,
        lora_alpha=lora.alpha,
        lora_target_modules=lora.target_modules,
        dtype=lora.dtype,
    )
