"""The GPUs of a run, and what they and paid judges cost."""

from dataclasses import dataclass, field

from ppo_core.config.checks import is_finite
from ppo_core.errors import ConfigError

GPU_FACTS = (
    "memory_gib",
    "bf16_tflops",
    "fp32_tflops",
    "gb_per_second",
    "link_gb_per_second",
    "network_gb_per_second",
    "price_per_hour",
)
"""Numbers of a GPU that `gpus` may have; flows/gpus.toml says what they are."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The GPUs of the trainings, for the memory, time and price of a run.

    No result depends on them. The number of GPUs is `processes` x `num_nodes`.

    Raises:
        ConfigError: a number of a GPU is unknown or not above 0, or a price of a judge is below 0.
    """

    gpu: str = ""
    """Name of the GPU in flows/gpus.toml or `gpus`, as h100-80gb. Empty: the GPU that a step finds;
    name it to check a run of a cluster on a machine without GPUs."""

    gpus: dict[str, dict[str, float]] = field(default_factory=dict)
    """Numbers of GPUs in the place of those in flows/gpus.toml, or of further GPUs, by name: as
    `[hardware.gpus.h100-80gb]` with `price_per_hour = 2.5`, in US dollars."""

    judge_prices: dict[str, float] = field(default_factory=dict)
    """US dollars for 1,000 tokens of questions and replies of a judge, by the name of its model:
    as `"openai:gpt-4o-mini" = 0.0003`; 0 for a server of your own."""

    def __post_init__(self) -> None:
        """Raise if a number is unknown or out of range."""
        for name, facts in self.gpus.items():
            for fact, value in facts.items():
                if fact not in GPU_FACTS:
                    raise ConfigError(
                        f"gpus.{name}.{fact} is no number of a GPU. Known here: "
                        f"{', '.join(GPU_FACTS)}."
                    )
                _require_positive(f"gpus.{name}.{fact}", value)
        for name, price in self.judge_prices.items():
            if not (is_finite(price) and price >= 0):
                raise ConfigError(
                    f"judge_prices.{name}={price!r:.80} must be a finite number, at least 0."
                )


def _require_positive(name: str, value: float) -> None:
    if not (is_finite(value) and value > 0):
        raise ConfigError(f"{name}={value!r:.80} must be a finite number above 0.")
