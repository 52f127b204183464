"""The GPUs of a run, and the prices of GPUs and paid judges."""

from dataclasses import dataclass, field

from ppo_core.config.field_checks import is_finite
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
"""Properties of a GPU that `gpus` can set; flows/gpus.toml explains them."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The GPUs of the trainings, for computing the memory, time and price of a run.

    No result depends on these settings. The number of GPUs is `processes` x `num_nodes`.

    Raises:
        ConfigError: a property of a GPU is unknown or not above 0, or a price of a judge is below
            0.
    """

    gpu: str = ""
    """Name of the GPU in flows/gpus.toml or `gpus`, such as h100-80gb. If empty, the GPU of the
    machine is used. On a machine without GPUs, the name lets you check a run for a cluster."""

    gpus: dict[str, dict[str, float]] = field(default_factory=dict)
    """Properties of each GPU, by its name. They replace or extend the properties in
    flows/gpus.toml. Example: `[hardware.gpus.h100-80gb]` with `price_per_hour = 2.5`, in US
    dollars."""

    judge_prices: dict[str, float] = field(default_factory=dict)
    """Price of a judge in US dollars per 1,000 tokens of questions and replies, by name of the
    judge, as in `"openai:gpt-4o-mini" = 0.0003`; 0 for your own server."""

    def __post_init__(self) -> None:
        """Raise if a property is unknown or out of range."""
        for name, facts in self.gpus.items():
            for fact, value in facts.items():
                if fact not in GPU_FACTS:
                    raise ConfigError(
                        f"gpus.{name}.{fact} is not a property of a GPU. Known here: "
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
