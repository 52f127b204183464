"""Settings of supervised training: frozen, checked once, when they are made."""

from dataclasses import dataclass

from ppo_core.config.checks import require, require_count


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """Everything that decides one supervised training, apart from the model and the data.

    Raises:
        ConfigError: a value is out of range.
    """

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW; it falls linearly to 0 at the end."""

    num_epochs: int = 1
    """Passes over the data."""

    batch_size: int = 32
    """Examples, or pairs, of one forward and backward pass on one device."""

    gradient_accumulation_steps: int = 1
    """Batches of one optimizer step."""

    max_length: int = 512
    """Most tokens of prompt and response together; longer examples are refused."""

    warmup_ratio: float = 0.03
    """Share of the optimizer steps in which the learning rate rises from 0."""

    weight_decay: float = 0.0
    """AdamW's weight decay, per step and unit of learning rate; norms and biases have none."""

    seed: int = 1
    """Seed of the order of the examples and of the reward head's first weights."""

    end_of_text: bool = True
    """Append the end-of-sequence token to every response."""

    completion_only_loss: bool = True
    """SFT learns completions and assistant turns alone; False learns the prompts as well."""

    centre_rewards_coefficient: float = 0.0
    """Weight of the squared sum of a pair's two scores, which pulls the scores of a reward
    model towards a mean of 0 (arXiv:2312.09244)."""

    bf16: bool = False
    """Train in bfloat16 by autocast, with master weights in fp32."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded."""
        for name in ("num_epochs", "batch_size", "gradient_accumulation_steps", "max_length"):
            require_count(self, name)
        require(self, "learning_rate", self.learning_rate > 0, "above 0")
        for name in ("weight_decay", "centre_rewards_coefficient"):
            require(self, name, getattr(self, name) >= 0, "at least 0")
        require(self, "warmup_ratio", 0 <= self.warmup_ratio < 1, "at least 0 and below 1")
