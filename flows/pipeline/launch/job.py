"""What the processes of a PPO training are given: a file of prompts and one of settings."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.inputs.rows import read_rows
from pipeline.settings.settings import Settings
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.data.atomic_files import write_atomically

SETTINGS_FILE = "settings.json"


def write_job(
    settings: Settings,
    *,
    policy: str,
    reward_model: str,
    reading: Mapping[str, Any],
    folder: Path,
    policy_dir: Path,
) -> Path:
    """Write what `python -m ppo_core` needs; returns the file of settings that it takes.

    Args:
        settings: of the run.
        policy: folder or hub id of the policy to start from.
        reward_model: folder or hub id of the reward model.
        reading: how it is to be read: bias and gain.
        folder: where the job, its checkpoints and its metrics are.
        policy_dir: where the final policy will be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = read_rows(settings.prompts, ["prompt"], ["reference"]).column("prompt")
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in prompts)
    write_atomically(folder / "prompts.jsonl", rows)
    config = {
        **asdict(settings.ppo),
        "output_dir": str(folder),
        "sft_model_path": policy,
        "reward_model_path": reward_model,
        # The policy's answers are shown after the training, and no prompt is held out for samples.
        "num_sample_generations": 0,
    }
    script = ScriptArguments(
        dataset_name=str(folder / "prompts.jsonl"),
        resume_from_checkpoint="latest",
        reward_bias=reading["bias"],
        reward_gain=reading["gain"],
        reward_end_of_text=settings.reward_model_training.end_of_text,
        policy_dir=str(policy_dir),
    )
    model = {"model_name_or_path": policy}
    if settings.lora.r:
        model |= {
            "use_peft": True,
            "lora_r": settings.lora.r,
            "lora_alpha": settings.lora.alpha,
            "lora_target_modules": settings.lora.target_modules,
        }
    path = folder / SETTINGS_FILE
    everything = config | asdict(script) | asdict(ModelArguments(**model))
    write_atomically(path, json.dumps(everything, indent=2))
    return path
