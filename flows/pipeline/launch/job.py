"""Write the input of a PPO training: a file of prompts and a file of settings."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.inputs.run_rewards import RunRewards
from pipeline.settings.settings import Settings
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.io.atomic_files import write_atomically

JOB_FILE = "settings.json"


def ppo_config(settings: Settings) -> PPOConfig:
    """Return the settings of PPO; their KL warning names the limit of the promotion gate."""
    max_kl = settings.promotion.max_kl
    if not math.isfinite(max_kl):
        return settings.ppo
    note = f"Promotion will be refused above promotion.max_kl={max_kl:g}."
    return replace(settings.ppo, warn_kl_note=note)


def write_job(
    rewards: RunRewards,
    *,
    policy: str,
    reward_model: str,
    reward_bias: float,
    reward_gain: float,
    folder: Path,
    policy_dir: Path,
) -> Path:
    """Write the input files of `python -m ppo_core`, and return the path of the settings file.

    Args:
        rewards: rewards of the run, with its data sets.
        policy: folder or hub id of the policy to start from.
        reward_model: folder or hub id of the reward model.
        reward_bias: offset that is subtracted from each score of the reward model.
        reward_gain: factor for a score after subtracting `reward_bias`.
        folder: folder of the input files, the checkpoints and the metrics.
        policy_dir: folder of the final policy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = rewards.data.settings
    rows = "".join(json.dumps(row) + "\n" for row in rewards.prompts())
    write_atomically(folder / "prompts.jsonl", rows)
    config = {
        **asdict(ppo_config(settings)),
        "output_dir": str(folder),
        "sft_model_path": policy,
        "reward_model_path": rewards.own_path(reward_model),
        # The evaluation shows answers after the training, so PPO need not sample any to show.
        "num_sample_generations": 0,
    }
    script = ScriptArguments(
        dataset_name=str(folder / "prompts.jsonl"),
        prompt_format=settings.prompt_format,
        resume_from_checkpoint="latest",
        rewards=settings.rewards or None,
        reward_bias=reward_bias,
        reward_gain=reward_gain,
        reward_end_of_text=settings.reward_model_training.end_of_text,
        policy_dir=str(policy_dir),
    )
    model = ModelArguments(model_name_or_path=policy)
    if settings.lora.r:
        model = replace(
            model,
            use_peft=True,
            lora_r=settings.lora.r,
            lora_alpha=settings.lora.alpha,
            lora_target_modules=settings.lora.target_modules,
            dtype=settings.lora.dtype,
        )
    path = folder / JOB_FILE
    everything = config | asdict(script) | asdict(model)
    write_atomically(path, json.dumps(everything, indent=2))
    return path
