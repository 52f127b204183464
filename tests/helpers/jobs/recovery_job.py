"""The job of `test_recovery` in several processes: resume a run of one process, and save for one.

The checkpoints are written while the processes go on talking to each other about the training.

    torchrun --nproc-per-node 2 -m tests.helpers.jobs.recovery_job FOLDER SHARDING

One trainer does it all, since DeepSpeed allows a process no second one.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import destroy_process_group

from tests.ppo_core.checkpointing.test_recovery import noisy_length, trainer_in
from tests.ppo_core.training.test_export import LONG, without_clocks

CONFIG = dataclasses.replace(
    LONG,
    total_episodes=32,
    batch_size=8,
    num_ppo_epochs=1,
    per_device_train_batch_size=2,
    save_steps=1,
    async_save=True,
    ema_decay=None,
    reference_refresh_updates=0,
    learning_rate=1e-4,
    critic_learning_rate=2e-4,
)


class Reward:
    """The length of a response, with or without noise from the process's generators."""

    is_noisy = False

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        if self.is_noisy:
            return noisy_length(prompts, responses)
        return [len(response) / 10 for response in responses]


def trainer_of(folder: Path, sharding: str, **changes):
    config = dataclasses.replace(CONFIG, sharding=sharding)
    parts = {"reward_model": Reward(), "pretrain_dataset": None, **changes}
    return trainer_in(folder, config, **parts)


def weights_and_moments(trainer) -> dict[str, Tensor]:
    """Return unsharded weights, in the main process only, and moments."""
    engine, train_state = trainer.engine, trainer._train_state
    states = engine.optimizer_states(train_state.module, train_state.optimizer)
    moments = {f"{name}/{k}": v.clone() for name, state in states for k, v in state.items()}
    return moments | (engine.full_state_dict(train_state.module) or {})


def main(folder: Path, sharding: str) -> None:
    run = folder / "run"
    reward = Reward()
    trainer = trainer_of(run, sharding, reward_model=reward)

    # Resume the run that one process began, and save a checkpoint for one process to end.
    history = trainer.train(resume_from_checkpoint=folder / "begun" / "checkpoint-1")
    result = weights_and_moments(trainer)
    if trainer.engine.is_main:
        save_file({name: t.cpu().clone() for name, t in result.items()}, folder / "ended.st")
        (folder / "ended.json").write_text(json.dumps(history))
        shutil.copytree(run / "checkpoint-3", folder / "left" / "checkpoint-3")

    # The same updates, uninterrupted and resumed, with different noise in each process.
    reward.is_noisy = True
    ends = []
    for update in (2, 3):
        trainer.train(resume_from_checkpoint=run / f"checkpoint-{update}")
        metrics = without_clocks(trainer.state.log_history)
        ends.append((weights_and_moments(trainer), torch.get_rng_state(), metrics))
        torch.manual_seed(99)
    (whole, whole_rng, whole_metrics), (parts, rng, metrics) = ends
    assert whole.keys() == parts.keys()
    different = [name for name, tensor in whole.items() if not torch.equal(tensor, parts[name])]
    assert not different, different
    assert torch.equal(whole_rng, rng) and whole_metrics == metrics
    assert metrics != history


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    destroy_process_group()
