"""A PPO training whose reward function never returns after two updates; its folder is the job's."""

import sys
import time
from pathlib import Path

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.distributed.process import end_with_parent, write_stacks_on_request
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.models.tiny import make_policy, make_tokenizer

calls = 0


def sleepy_reward(prompts: list[str], responses: list[str]) -> list[float]:
    """Score two batches, and never return from the third."""
    global calls
    calls += 1
    if calls > 2:
        time.sleep(3600)
    return [float(len(response)) for response in responses]


def main(job: Path) -> None:
    """Train in the folder of the job."""
    config = PPOConfig(
        output_dir=str(job.parent),
        total_episodes=80,
        batch_size=8,
        response_length=6,
        num_sample_generations=0,
        use_cpu=True,
        disable_tqdm=True,
    )
    PPOTrainer(
        config,
        make_tokenizer(),
        make_policy(),
        make_policy(),
        sleepy_reward,
        [f"w{number} w{number + 1}" for number in range(16)],
    ).train()


if __name__ == "__main__":
    end_with_parent()
    write_stacks_on_request()
    main(Path(sys.argv[1]))
