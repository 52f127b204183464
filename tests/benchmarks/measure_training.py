"""`python -m tests.benchmarks.measure_training SIDE KIND FOLDER MICROBATCH ACCUMULATION SETTING`.

Trains one epoch on the rows of a folder, by ours or by TRL in its own environment; KIND is sft or
reward, SETTING is shipped or fp32 (see `trainings.Setting`). Saves the trained model in the folder
KIND/SIDE, and prints seconds of the training and peak memory in bytes as a line of JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.worker import own_stdout, peak_bytes

RATE = 1e-4
MAX_LENGTH = 512


def ours(
    kind: str, folder: Path, rows: list[dict[str, str]], sizes: tuple[int, int], setting: str
) -> float:
    """Train by ours; return the seconds of the steps."""
    from ppo_core.models.kernels.cpu_memory import prepare_cpu_process
    from ppo_core.supervised.supervised_config import SupervisedConfig
    from ppo_core.supervised.training import train_reward_model, train_sft

    prepare_cpu_process()
    config = SupervisedConfig(
        learning_rate=RATE,
        batch_size=sizes[0],
        gradient_accumulation_steps=sizes[1],
        max_length=MAX_LENGTH,
        bf16=None if setting == "shipped" else False,
    )
    train = train_sft if kind == "sft" else train_reward_model
    return train(folder / "policy", rows, config, folder / kind / "ours")["seconds"]


def trl(
    kind: str, folder: Path, rows: list[dict[str, str]], sizes: tuple[int, int], setting: str
) -> float:
    """Train by TRL; return the seconds of the steps."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    config, trainer = (SFTConfig, SFTTrainer) if kind == "sft" else (RewardConfig, RewardTrainer)
    settings: dict[str, Any] = {
        "output_dir": str(folder / kind / "trl"),
        "learning_rate": RATE,
        "per_device_train_batch_size": sizes[0],
        "gradient_accumulation_steps": sizes[1],
        "num_train_epochs": 1,
        "max_length": MAX_LENGTH,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if setting == "fp32":
        settings |= {"bf16": False, "gradient_checkpointing": False}
    made = trainer(
        model=str(folder / "policy"),
        args=config(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
    )
    seconds = float(made.train().metrics["train_runtime"])
    made.save_model()
    return seconds


def main(side: str, kind: str, folder: Path, sizes: tuple[int, int], setting: str) -> None:
    """Train, and print the measurements."""
    channel = own_stdout()
    rows = json.loads((folder / f"{kind}.json").read_text())
    seconds = (ours if side == "ours" else trl)(kind, folder, rows, sizes, setting)
    found = {"seconds": seconds, "peak_bytes": peak_bytes("cpu")}
    print(json.dumps(found), file=channel, flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    side, kind, folder, microbatch, accumulation, setting = sys.argv[1:]
    main(side, kind, Path(folder), (int(microbatch), int(accumulation)), setting)
