"""Defaults of the sections of the settings, which depend on the size of the policy."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.settings.gate_configs import PromotionConfig
from ppo_core.config.sized_defaults import sized_defaults

WARN_SHARE = 0.75
"""Default of ppo.warn_kl as a fraction of promotion.max_kl, so that PPO warns before the limit."""

UNKNOWN_SIZE = 10**9
"""Number of parameters for which defaults are chosen until the size of the policy is known."""

_SUPERVISED_SIZES = {"batch_size": "gradient_accumulation_steps"}
_INSTEAD_OF = {
    "sft": _SUPERVISED_SIZES,
    "reward_model_training": _SUPERVISED_SIZES,
    "ppo": {
        "gradient_accumulation_steps": "batch_size",
        "num_train_epochs": "total_episodes",
        "save_steps": "save_total_limit",
    },
}
"""Section -> given setting -> other setting, whose default is dropped. Both settings determine the
same size, or the default of the other setting fits only the flow's default of the given setting."""


def section_defaults(parameters: int, adapted: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return section -> the flow's defaults; the sections in `adapted` train adapters."""
    sft, reward, ppo = (
        sized_defaults(parameters, lora=name in adapted)
        for name in ("sft", "reward_model_training", "ppo")
    )
    supervised = {
        "batch_size": sft.batch_size,
        "gradient_accumulation_steps": sft.gradient_accumulation_steps,
        # Ten checkpoints in the training, so that a retried step can resume.
        "save_steps": 0.1,
    }
    return {
        "sft": {"learning_rate": sft.sft_learning_rate, **supervised},
        "reward_model_training": {"learning_rate": reward.reward_learning_rate, **supervised},
        "ppo": {
            "learning_rate": ppo.ppo_learning_rate,
            "batch_size": ppo.ppo_batch_size,
            "per_device_train_batch_size": ppo.ppo_device_batch_size,
            "total_episodes": ppo.total_episodes,
            "kl_coef": ppo.kl_coef,
            # Ten checkpoints in the training, so that a retried step can resume.
            "save_steps": 0.1,
            "save_total_limit": 2,
            "warn_kl": WARN_SHARE * PromotionConfig.max_kl,
        },
    }


def with_section_defaults(
    name: str, section: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Add the missing defaults to a section, except defaults that its settings contradict."""
    contradicted = {other for given, other in _INSTEAD_OF[name].items() if given in section}
    kept = {key: value for key, value in defaults.items() if key not in contradicted}
    return {**kept, **section}


def kl_warning(promotion: object) -> dict[str, float]:
    """Return the default of warn_kl for a section's `max_kl`; {} without a valid finite max_kl."""
    max_kl = promotion.get("max_kl") if isinstance(promotion, Mapping) else None
    if isinstance(max_kl, int | float) and 0 < max_kl <= sys.float_info.max:
        return {"warn_kl": WARN_SHARE * max_kl}
    return {}
