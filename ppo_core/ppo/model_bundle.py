"""The models of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from ppo_core.models.critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.rewards import RewardMix

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """The models of a run, in evaluation mode.

    The models are on the device, unless the engine shards weights.
    """

    policy: LanguageModel
    """Policy, which is trained in place."""

    adapted: "PeftModel | None"
    """The PeftModel around the policy; None for a policy without adapters."""

    saved_dtype: torch.dtype
    """Precision of the policy as the script passed it; the policy is saved in this precision."""

    reference: LanguageModel
    critic: Critic | None
    """None if the estimator of the advantages needs no critic."""

    rewards: RewardMix

    fingerprints: Mapping[str, dict[str, str]] = field(default_factory=dict)
    """Fingerprints of the weights that checkpoints do not contain, and shapes of the trained
    weights."""

    @property
    def shares_weights(self) -> bool:
        """Whether the reference is the policy's base model, with another adapter or without one."""
        return self.reference.model is self.policy.model


def reward_holders(rewards: RewardMix, module: nn.Module) -> list[nn.Module]:
    """Return the modules that contain the weights of the reward models, without duplicates.

    `module` contains the policy. For a reward adapter, `module` is returned, because the adapter is
    on the policy's base model.
    """
    own = [scorer.model for scorer in rewards.models()]
    return list(dict.fromkeys(one if isinstance(one, PreTrainedModel) else module for one in own))
