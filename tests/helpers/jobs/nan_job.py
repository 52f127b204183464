"""A run of two processes, one of which has numbers that are not finite.

    torchrun --nproc-per-node 2 -m tests.helpers.jobs.nan_job WHERE

Rank 1 is the one with NaN, except for "everywhere".
"""

import dataclasses
import sys

import torch
from torch import nn
from torch.distributed import destroy_process_group

from ppo_core.errors import PPOError
from tests.ppo_core.training.test_trainer import CONFIG, make_trainer

CONFIG_OF_TWO = dataclasses.replace(
    CONFIG, total_episodes=3 * CONFIG.batch_size, per_device_train_batch_size=2, ddp_timeout=30
)


def spoil(module: nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))


def main(where: str) -> int:
    rank = None

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        scores = [len(response) / 10 for response in responses]
        if where == "score" and rank == 1:
            scores[0] = float("nan")
        if where == "everywhere":
            scores = [float("nan")] * len(scores)
        if where == "error" and rank == 1:
            raise ZeroDivisionError("division by zero")
        if where == "shape" and rank == 1:
            return scores[:-1]
        return scores

    trainer = make_trainer(CONFIG_OF_TWO, reward_model=reward)
    rank = trainer.engine.rank
    if rank == 1 and where in ("policy", "critic", "reference"):
        spoil(getattr(trainer, where))
    try:
        trainer.train()
    except PPOError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    destroy_process_group()
    sys.exit(code)
