"""Our measuring process: `python -m tests.benchmarks.measure_ours TASK`, paced by stdin."""

from typing import Any

import torch

from ppo_core import PPOConfig, PPOTrainer, RewardModel
from ppo_core.models.kernels.cpu_memory import prepare_cpu_process
from tests.benchmarks.tasks import Task
from tests.benchmarks.worker import Pace, begin, load, load_tokenizer


def config(task: Task) -> PPOConfig:
    """Return the settings of a task."""
    settings: dict[str, Any] = {
        "output_dir": f"{task.models}/ours",
        "batch_size": task.batch,
        "per_device_train_batch_size": task.microbatch,
        "num_mini_batches": 1,
        "num_ppo_epochs": task.epochs,
        "advantage_estimator": task.estimator,
        "total_episodes": task.updates * task.batch,
        "response_length": task.response_length,
        "stop_token": "eos" if task.ends_early else None,
        "temperature": 0.7,
        "bf16": task.bf16,
        "use_cpu": task.device == "cpu",
        "num_sample_generations": 0,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return PPOConfig(**settings)


def describe(logs: dict[str, float]) -> dict[str, float]:
    """Return an update's seconds by phase and mean tokens, from the trainer's log."""
    phases = {name: logs[f"time/{name}"] for name in ("sampling", "scoring", "updating")}
    return phases | {"tokens": logs["val/response_length"]}


def measure(pace: Pace) -> None:
    """Run the updates of a task."""
    task = pace.task
    tokenizer = load_tokenizer(task)
    pace.describe = describe
    PPOTrainer(
        args=config(task),
        processing_class=tokenizer,
        model=load(task, "policy"),
        ref_model=load(task, "policy"),
        # TRL scores the sampled tokens without appending an end of text.
        reward_model=RewardModel(load(task, "reward"), tokenizer, end_of_text=False),
        value_model=load(task, "critic") if task.estimator == "gae" else None,
        train_dataset=[{"input_ids": row} for row in task.prompts],
        callbacks=[pace],
    ).train()


if __name__ == "__main__":
    torch.manual_seed(0)
    pace = begin()
    if pace.task.device == "cpu":
        prepare_cpu_process()
    measure(pace)
