"""Settings of supervised training, immutable and validated."""

from dataclasses import asdict, dataclass
from typing import Any

from ppo_core.config.field_checks import check_fields, is_finite, require, require_kept_checkpoints
from ppo_core.config.run_config import Sharding
from ppo_core.io.validation import Count, NotNegative, Seed, Share, ShareBelow1, Steps

_NOT_OF_THE_RESULT = (
    "sharding",
    "offload",
    "save_steps",
    "save_total_limit",
    "gradient_checkpointing",
    # Only the product of these two matters.
    "batch_size",
    "gradient_accumulation_steps",
)
"""Settings that change a result by no more than rounding."""

_ADDS_PAIRS = ("repeated_text_pairs", "other_prompt_pairs")
"""Settings that add pairs. At 0 they are not recorded: checkpoints of version 0.1 lack them."""

RATE_FILE = "learning-rate.json"
"""Name of the file with the result of a learning-rate search, in the folder of the training."""

LOSS_AT = "loss_at_"
"""Prefix of metric names; each of these metrics is the loss for one rate that a search tried."""


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """All settings of one supervised training except the model and the data.

    Raises:
        ConfigError: a value is out of range.
    """

    learning_rate: float | str | None = None
    """Peak learning rate of AdamW; after the warmup the rate falls linearly to 0. None chooses a
    rate for the size of the model, see `ppo_core.config.sized_defaults`. `auto`, for a reward model
    only, tries three rates around this default on 5 % of the pairs (at least 1,000 if there are
    enough), and chooses the best."""

    num_epochs: Count = 1
    """Number of passes over the data."""

    batch_size: Count = 32
    """A pass on one device has at most `batch_size` times the tokens of the step's longest example
    or pair, padding included. So a pass may have more than `batch_size` examples if they are
    short."""

    gradient_accumulation_steps: Count = 1
    """An optimizer step has batch_size * gradient_accumulation_steps examples or pairs in all.
    Several processes divide these among themselves."""

    max_length: Count = 512
    """Maximum number of tokens of prompt plus response."""

    warmup_ratio: ShareBelow1 = 0.03
    """Fraction of the optimizer steps in which the learning rate rises linearly from 0."""

    weight_decay: NotNegative = 0.0
    """Weight decay coefficient of AdamW; norms and biases have no weight decay."""

    seed: Seed = 1
    """Seed of the order of the examples, of new weights (reward head, adapters) and of dropout."""

    end_of_text: bool = True
    """Append the end-of-sequence token to every response."""

    completion_only_loss: bool = True
    """Count only completions and assistant turns in the SFT loss; False also counts prompts."""

    center_rewards_coefficient: NotNegative = 0.0
    """Weight of an additional loss, the squared sum of the two scores of a pair. The loss pulls
    the mean score of a reward model towards 0 (arXiv:2312.09244)."""

    repeated_text_pairs: Share = 0.0
    """For this fraction of the pairs, also train a reward model on a pair in which the chosen
    response wins against the same response written twice. So the reward model learns not to prefer
    repeated text."""

    other_prompt_pairs: Share = 0.0
    """For this fraction of the pairs, also train a reward model on a pair in which the chosen
    response wins against the chosen response to another prompt (arXiv:2409.13156)."""

    bf16: bool | None = None
    """Train with bfloat16 autocast and fp32 weights. None, as in PPO: True on a GPU with bfloat16,
    and on a CPU with bfloat16 units if the hidden size is at least 192. With None, a checkpoint
    also resumes on a machine that chooses another precision."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; this saves memory and takes about a third more
    time."""

    sharding: Sharding | None = None
    """How several processes train one model: ddp (each process has the full model), zero1 to zero3
    (DeepSpeed) or fsdp2 (PyTorch). None uses the sharding of accelerate launch if there is one,
    else ddp in several processes."""

    offload: bool = False
    """Keep optimizer states in the memory of the CPU, under zero3 and fsdp2 also the weights."""

    save_steps: Steps = 0.0
    """Number of optimizer steps between two checkpoints in output_dir; below 1 a fraction of all
    steps; 0 writes no checkpoint."""

    save_total_limit: Count | None = 2
    """Number of newest checkpoints to keep; None keeps all."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of range."""
        check_fields(self)
        rate = self.learning_rate
        is_rate = not isinstance(rate, str | bool | None) and is_finite(rate) and rate > 0
        require(self, "learning_rate", is_rate or rate in (None, "auto"), "above 0, or auto")
        require_kept_checkpoints(self)

    @property
    def rows_per_step(self) -> int:
        """Number of examples or pairs in one optimizer step of all processes."""
        return self.batch_size * self.gradient_accumulation_steps

    def settings_of_result(self) -> dict[str, Any]:
        """Return the settings that change the result by more than rounding."""
        given = asdict(self) | {"rows_per_step": self.rows_per_step}
        unused = {name for name in _ADDS_PAIRS if not given[name]}.union(_NOT_OF_THE_RESULT)
        return {name: value for name, value in given.items() if name not in unused}
