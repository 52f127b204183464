"""Default learning rates, batch sizes and KL weights for models of different sizes.

A learning rate that suits a billion parameters leaves a model of a million parameters nearly
untrained. A rate that suits a million parameters destroys a model of a billion. Sources of the
rates, by the size of the model:

- 1M: measured on the two small tasks of this project, a story model of 0.7M and a summarizer of
  0.9M parameters.
- 10M: chosen between the rates of 1M and 100M; not measured, and without a source.
- 100M: PPO from GPT-2 124M, arXiv:1909.08593 (1.41e-5); the rates of SFT and reward model are
  chosen between the rates of 10M and 1B. In arXiv:1909.08593, the weight of the KL divergence
  starts at 0.15 and adapts. Smaller models use 0.15, too, because their high learning rates move
  them far from the reference.
- 1B: PPO from "The N+ Implementation Details of RLHF with PPO", arXiv:2403.17031 (3e-6, and 0.05
  for the KL divergence, for Pythia 1B to 6.9B); SFT (9.65e-6, rounded here to 1e-5) and reward
  model (9e-6) from InstructGPT, arXiv:2203.02155, appendix C.
- 8B: reward model and PPO from the cards of OpenRLHF/Llama-3-8b-rm-700k (9e-6) and
  OpenRLHF/Llama-3-8b-rlhf-100k (5e-7, 100,000 responses). The PPO rate is chosen between this 5e-7
  and the 3e-6 of arXiv:2403.17031. The rate of SFT has no source.

With LoRA, every rate is ten times as high: Schulman et al., "LoRA Without Regret" (2025).
"""

import math
from dataclasses import dataclass, replace

LORA_FACTOR = 10
"""Factor by which a learning rate is multiplied if only adapters are trained."""


@dataclass(frozen=True, kw_only=True)
class SizedDefaults:
    """Default settings for one range of model sizes."""

    most_parameters: float
    """Number of parameters of the largest model in the range."""

    sft_learning_rate: float
    """Peak learning rate of SFT."""

    reward_learning_rate: float
    """Peak learning rate of the reward model's training."""

    ppo_learning_rate: float
    """Peak learning rate of policy and critic."""

    batch_size: int
    """Examples or pairs in one forward and backward pass of supervised training."""

    gradient_accumulation_steps: int
    """Forward and backward passes in one optimizer step of supervised training."""

    ppo_batch_size: int
    """Responses of one PPO update."""

    ppo_device_batch_size: int
    """Responses in one forward and backward pass of PPO on one device."""

    total_episodes: int
    """Responses of a PPO run."""

    kl_coef: float
    """Weight of the KL divergence from the reference."""


_TABLE = (
    SizedDefaults(
        most_parameters=3e6,
        sft_learning_rate=2e-3,
        reward_learning_rate=2e-3,
        ppo_learning_rate=5e-4,
        batch_size=16,
        gradient_accumulation_steps=1,
        ppo_batch_size=128,
        ppo_device_batch_size=32,
        total_episodes=8_192,
        kl_coef=0.15,
    ),
    SizedDefaults(
        most_parameters=3e7,
        sft_learning_rate=3e-4,
        reward_learning_rate=2e-4,
        ppo_learning_rate=1e-4,
        batch_size=16,
        gradient_accumulation_steps=2,
        ppo_batch_size=256,
        ppo_device_batch_size=32,
        total_episodes=16_384,
        kl_coef=0.15,
    ),
    SizedDefaults(
        most_parameters=3e8,
        sft_learning_rate=5e-5,
        reward_learning_rate=5e-5,
        ppo_learning_rate=1.41e-5,
        batch_size=16,
        gradient_accumulation_steps=2,
        ppo_batch_size=512,
        ppo_device_batch_size=16,
        total_episodes=100_000,
        kl_coef=0.15,
    ),
    SizedDefaults(
        most_parameters=3e9,
        sft_learning_rate=1e-5,
        reward_learning_rate=9e-6,
        ppo_learning_rate=3e-6,
        batch_size=8,
        gradient_accumulation_steps=4,
        ppo_batch_size=512,
        ppo_device_batch_size=8,
        total_episodes=100_000,
        kl_coef=0.05,
    ),
    SizedDefaults(
        most_parameters=math.inf,
        sft_learning_rate=5e-6,
        reward_learning_rate=9e-6,
        ppo_learning_rate=1e-6,
        batch_size=2,
        gradient_accumulation_steps=16,
        ppo_batch_size=512,
        ppo_device_batch_size=4,
        total_episodes=100_000,
        kl_coef=0.05,
    ),
)


def sized_defaults(parameters: int, *, lora: bool) -> SizedDefaults:
    """Return the defaults for a model with this number of parameters, embeddings included.

    Args:
        parameters: number of parameters of the whole model, even if only adapters are trained.
        lora: whether adapters are trained instead of all weights.
    """
    row = next(row for row in _TABLE if parameters <= row.most_parameters)
    if not lora:
        return row
    return replace(
        row,
        sft_learning_rate=LORA_FACTOR * row.sft_learning_rate,
        reward_learning_rate=LORA_FACTOR * row.reward_learning_rate,
        ppo_learning_rate=LORA_FACTOR * row.ppo_learning_rate,
    )
