"""TRL's measuring process: `python -m tests.benchmarks.measure_trl TASK`, in its own environment.

The settings give TRL the same work as ours. `bf16` and `gradient_checkpointing`, which TRL turns on
without effect, are off.
"""

from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from tests.benchmarks.tasks import Task
from tests.benchmarks.worker import Pace, begin, load, load_tokenizer


def config(task: Task) -> PPOConfig:
    """Return the settings of a task."""
    return PPOConfig(
        output_dir=f"{task.models}/trl",
        per_device_train_batch_size=task.microbatch,
        gradient_accumulation_steps=task.accumulation,
        num_mini_batches=1,
        num_ppo_epochs=task.epochs,
        total_episodes=task.updates * task.batch,
        response_length=task.response_length,
        stop_token="eos" if task.ends_early else None,
        temperature=0.7,
        bf16=bool(task.bf16),
        gradient_checkpointing=False,
        use_cpu=task.device == "cpu",
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class Phases:
    """Reads the clock between sampling, scoring and updating in TRL's update.

    TRL's `train()` is one function, so the two module-level functions that it calls between the
    phases are wrapped.
    """

    def __init__(self, pace: Pace, trainer: PPOTrainer) -> None:
        self.pace = pace
        self.trained = trainer.model
        self.learning_began: float | None = None
        self.generate, self.forward = ppo_trainer.batch_generation, ppo_trainer.forward
        ppo_trainer.batch_generation = self.timed_generation
        ppo_trainer.forward = self.timed_forward

    def timed_generation(self, model: Any, queries: Any, *others: Any) -> Any:
        self.sampling_began = self.pace.now()
        generated = self.generate(model, queries, *others)
        self.sampling_ended = self.pace.now()
        self.learning_began = None
        answers = generated[0][:, queries.shape[1] :]
        self.tokens = mean_length(answers, self.pace.task)
        return generated

    def timed_forward(self, model: Any, *others: Any) -> Any:
        if model is self.trained and self.learning_began is None:
            self.learning_began = self.pace.now()
        return self.forward(model, *others)

    def describe(self, logs: dict[str, float]) -> dict[str, float]:
        """Return seconds by phase and mean tokens of the update that just ended."""
        assert self.learning_began is not None
        return {
            "sampling": self.sampling_ended - self.sampling_began,
            "scoring": self.learning_began - self.sampling_ended,
            "updating": self.pace.now() - self.learning_began,
            "tokens": self.tokens,
        }


def mean_length(answers: torch.Tensor, task: Task) -> float:
    """Return the mean length of responses (B, T), with the first stop token."""
    if not task.ends_early:
        return float(answers.shape[1])
    stop = load_tokenizer(task).eos_token_id
    before = (answers == stop).cumsum(dim=1) - (answers == stop).long() == 0
    return before.float().sum(dim=1).mean().item()


def batches(trainer: PPOTrainer, task: Task) -> DataLoader:
    """Return a data loader with the same prompts for every update, as in ours.

    It has one batch more than is used: at the last batch of a data loader accelerate makes every
    microbatch an optimizer step.
    """
    rows = [{"input_ids": row} for row in task.prompts] * (task.updates + 1)
    loader = DataLoader(rows, batch_size=task.batch, collate_fn=trainer.data_collator)
    return trainer.accelerator.prepare(loader)


def measure(pace: Pace) -> None:
    """Run the updates of a task."""
    task = pace.task
    trainer = PPOTrainer(
        args=config(task),
        processing_class=load_tokenizer(task),
        model=load(task, "policy"),
        ref_model=load(task, "policy"),
        reward_model=load(task, "reward"),
        value_model=load(task, "critic"),
        train_dataset=Dataset.from_dict({"input_ids": task.prompts}),
        callbacks=[pace],
    )
    trainer.dataloader = batches(trainer, task)
    pace.describe = Phases(pace, trainer).describe
    trainer.train()


if __name__ == "__main__":
    torch.manual_seed(0)
    measure(begin())
