"""Record small trainings that go wrong: `python -m tests.helpers.runs.record_bad_runs FOLDER`.

Each function is a real training of a tiny policy. Its settings or its reward break one thing. The
metrics are the test data of `ppo_core.reporting.diagnosis`, in `tests/ppo_core/reporting/bad_runs`.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.reporting.metrics_file import UPDATE
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.models.tiny import make_policy, make_prompts, make_tokenizer

BATCH = 64
LIKED = 15
"""A reward likes words below this number, a quarter of all."""

NOT_READ = {
    "loss/kl_avg",
    "loss/policy_avg",
    "objective/entropy",
    "objective/kl_coef",
    "objective/non_score_reward",
    "policy/approxkl_avg",
    "val/clipfrac_avg",
    "val/ratio_var",
}
"""Metrics that no rule reads."""

Reward = Callable[[list[str], list[str]], list[float]]


def train(
    *,
    updates: int = 24,
    reward: Reward | None = None,
    model: PreTrainedModel | None = None,
    callbacks: Any = (),
    seed: int = 1,
    **settings: Any,
) -> list[dict[str, float]]:
    """Return the metrics of a training, which is healthy with the settings of this function."""
    given: dict[str, Any] = {
        "batch_size": BATCH,
        "per_device_train_batch_size": BATCH,
        "response_length": 16,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "kl_coef": 0.05,
    }
    config = PPOConfig(
        **given | settings,
        total_episodes=updates * BATCH,
        seed=seed,
        num_sample_generations=0,
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
    )
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(prompt) for prompt in make_prompts([2 + i % 3 for i in range(BATCH)])]
    model = model or make_policy("gpt_neox", seed=seed)
    trainer = PPOTrainer(
        config, tokenizer, model, None, reward or share_of_liked, texts, callbacks=list(callbacks)
    )
    return [{UPDATE: n, **metrics} for n, metrics in enumerate(trainer.train(), 1)]


def share_of_liked(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the share of words below LIKED."""
    return [
        sum(int(word[1:]) < LIKED for word in words) / max(1, len(words))
        for words in (words_of(response) for response in responses)
    ]


def words_of(response: str) -> list[str]:
    return [word for word in response.split() if word[1:].isdecimal()]


def length_of(prompts: list[str], responses: list[str]) -> list[float]:
    return [len(words_of(response)) / 16 for response in responses]


def brief(prompts: list[str], responses: list[str]) -> list[float]:
    return [-4 * value for value in length_of(prompts, responses)]


def repeated(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the share of words that occurred before."""
    rows = [words_of(response) for response in responses]
    return [3 * (1 - len(set(words)) / max(1, len(words))) for words in rows]


class Outlier:
    """The healthy reward, but a response of one batch gets 300."""

    def __init__(self, batch: int) -> None:
        self._batch, self._calls, self.__name__ = batch, 0, "outlier"

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        self._calls += 1
        found = share_of_liked(prompts, responses)
        return [300.0, *found[1:]] if self._calls == self._batch else found


class Broken(Outlier):
    """The healthy reward, but NaN for a response of one batch."""

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        return [
            math.nan if value == 300 else value for value in super().__call__(prompts, responses)
        ]


def slow_reward(prompts: list[str], responses: list[str]) -> list[float]:
    time.sleep(1.5)
    return share_of_liked(prompts, responses)


class SlowCallback(TrainerCallback):
    """A callback that takes longer than the update."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(2.5)


class Dropout(TrainerCallback):
    """A callback that turns dropout on after the trainer has turned it off."""

    def on_step_begin(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
                module.train()


def that_was_trained(reward: Reward, **settings: Any) -> PreTrainedModel:
    """Return a policy after a training with another reward."""
    model = make_policy("gpt_neox", seed=1)
    train(model=model, reward=reward, **settings)
    return model


RUNS: dict[str, Callable[[], list[dict[str, float]]]] = {
    "critic-explains-nothing": lambda: train(critic_learning_rate=0.3),
    "endless-warm-up": lambda: train(
        warmup_steps=4000, lr_scheduler_type="constant_with_warmup", learning_rate=2e-2
    ),
    "first-pass-off": lambda: train(
        updates=10, callbacks=[Dropout()], model=make_policy("gpt2", seed=1)
    ),
    "large-steps": lambda: train(learning_rate=2e-2, num_ppo_epochs=12, updates=12),
    "learns-nothing": lambda: train(learning_rate=1e-8),
    "length-growth": lambda: train(
        model=that_was_trained(brief, updates=25), reward=length_of, kl_coef=0.0
    ),
    "loss-spike": lambda: train(reward=Outlier(15)),
    "no-end-tokens": lambda: train(
        model=that_was_trained(length_of, updates=40, learning_rate=5e-3, kl_coef=0.0)
    ),
    "repetition": lambda: train(reward=repeated, learning_rate=5e-3, kl_coef=0.0),
    "skipped-steps": lambda: train(reward=Broken(5), updates=10),
    "slow-callback": lambda: train(updates=10, callbacks=[SlowCallback()]),
    "slow-reward": lambda: train(updates=10, reward=slow_reward),
    "slow-sampling": lambda: train(
        updates=10, local_rollout_forward_batch_size=1, response_length=48, num_ppo_epochs=1
    ),
    "useless-critic": lambda: train(critic_learning_rate=1e-9),
}
"""Trainings by the name of their file."""


def recorded(line: dict[str, float]) -> dict[str, float]:
    """Return the metrics that the rules read, rounded to four digits."""
    return {
        name: value if name == UPDATE else float(f"{value:.4g}")
        for name, value in line.items()
        if not name.startswith("rewards/") and name not in NOT_READ
    }


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or RUNS:
        lines = [json.dumps(recorded(line)) + "\n" for line in RUNS[name]()]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
