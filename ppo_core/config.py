"""Settings of the trainings: frozen, checked once, when they are made."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from ppo_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Everything that decides what PPO does, apart from the models and the prompts.

    Names and defaults are the field's own: "The N+ Implementation Details of RLHF
    with PPO" (arXiv:2403.17031) and the PPO trainer of TRL 1.12.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    total_episodes: int = 100_000
    """Responses to sample in the whole run; rounded up to whole updates of `batch_size`."""

    batch_size: int = 512
    """Responses sampled for one PPO update, over all processes."""

    num_ppo_epochs: int = 4
    """Passes over each batch of responses."""

    num_mini_batches: int = 1
    """Optimizer steps in one pass; must divide `batch_size`."""

    microbatch_size: int = 16
    """Responses in one forward and backward pass of one process; memory grows with it,
    results do not depend on it."""

    generation_batch_size: int = 64
    """Prompts sampled, or responses scored, together by one process; memory grows with
    it, results do not depend on it."""

    response_length: int = 53
    """Most tokens of a response, the stop token included."""

    temperature: float = 0.7
    """The policy is softmax(logits / temperature), in sampling and in training alike."""

    stop_token_id: int | None = None
    """Token that ends a response; None takes the tokenizer's end-of-sequence token."""

    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a response that has no stop token."""

    kl_coef: float = 0.05
    """Weight of the KL divergence from the reference, per token, inside the reward."""

    kl_estimator: Literal["k1", "k3"] = "k1"
    """How that divergence is estimated from one sample (http://joschu.net/blog/kl-approx.html)."""

    whiten_rewards: bool = False
    """Divide the token rewards by their standard deviation over the batch; the mean is kept."""

    whiten_advantages: bool = True
    """Standardise the advantages over the batch: mean 0, standard deviation 1."""

    gamma: float = 1.0
    """Discount per token."""

    lam: float = 0.95
    """Lambda of generalized advantage estimation."""

    cliprange: float = 0.2
    """The probability ratio is clipped to 1 - cliprange .. 1 + cliprange."""

    cliprange_value: float = 0.2
    """A new value is clipped to this distance from the value at sampling time."""

    vf_coef: float = 0.1
    """Weight of the value loss beside the policy loss."""

    learning_rate: float = 3e-6
    """Peak learning rate of policy and critic."""

    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate goes to 0 over the optimizer steps of the run, or stays."""

    warmup_ratio: float = 0.0
    """Share of the optimizer steps in which the learning rate rises from 0."""

    adam_beta1: float = 0.9
    """AdamW's decay of the mean of the gradient."""

    adam_beta2: float = 0.999
    """AdamW's decay of the mean of the squared gradient."""

    adam_epsilon: float = 1e-5
    """AdamW's epsilon."""

    weight_decay: float = 0.0
    """AdamW's weight decay, per step and unit of learning rate; norms and biases have none."""

    max_grad_norm: float = 1.0
    """Gradients of policy and critic together are scaled down to this norm."""

    seed: int = 1
    """Seed of the order of the prompts, of sampling and of the order of the updates."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded."""
        for name in (
            "total_episodes",
            "batch_size",
            "num_ppo_epochs",
            "num_mini_batches",
            "microbatch_size",
            "generation_batch_size",
            "response_length",
        ):
            _require_count(self, name)
        for name in ("temperature", "learning_rate", "adam_epsilon", "max_grad_norm"):
            _require(self, name, getattr(self, name) > 0, "above 0")
        for name in (
            "missing_eos_penalty",
            "kl_coef",
            "cliprange",
            "cliprange_value",
            "vf_coef",
            "weight_decay",
        ):
            _require(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("gamma", "lam", "warmup_ratio"):
            _require(self, name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name in ("adam_beta1", "adam_beta2"):
            _require(self, name, 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        for name, known in (
            ("kl_estimator", ("k1", "k3")),
            ("lr_scheduler_type", ("linear", "cosine", "constant")),
        ):
            _require(self, name, getattr(self, name) in known, f"one of {', '.join(known)}")
        if left := self.batch_size % self.num_mini_batches:
            raise ConfigError(
                f"num_mini_batches={self.num_mini_batches} does not divide "
                f"batch_size={self.batch_size}: {left} responses would be dropped in every pass. "
                "Choose a batch_size that is a multiple of it."
            )

    @property
    def num_updates(self) -> int:
        """PPO updates in the whole run."""
        return ceil(self.total_episodes / self.batch_size)

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.num_updates * self.num_ppo_epochs * self.num_mini_batches


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
    """Examples, or pairs, of one optimizer step on one device."""

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

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded."""
        for name in ("num_epochs", "batch_size", "max_length"):
            _require_count(self, name)
        _require(self, "learning_rate", self.learning_rate > 0, "above 0")
        _require(self, "weight_decay", self.weight_decay >= 0, "at least 0")
        _require(self, "warmup_ratio", 0 <= self.warmup_ratio < 1, "at least 0 and below 1")


def _require_count(config: PPOConfig | SupervisedConfig, name: str) -> None:
    value = getattr(config, name)
    _require(config, name, isinstance(value, int) and value >= 1, "a whole number, at least 1")


def _require(config: PPOConfig | SupervisedConfig, name: str, holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={getattr(config, name)!r} must be {what}.")
