"""The models of a run, as the phases of an update use them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from ppo_core.models.actor_critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.reward_functions import RewardMix

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """The models of a run, in evaluation mode and on the device."""

    policy: LanguageModel
    """Trained in place."""

    adapted: "PeftModel | None"
    """The PeftModel that the policy's weights are in, if it is one."""

    reference: LanguageModel
    critic: Critic
    rewards: RewardMix

    @property
    def shares_weights(self) -> bool:
        """Whether the reference is the policy with other adapters, and no model of its own."""
        return self.reference.model is self.policy.model


def reward_holders(rewards: RewardMix, module: nn.Module) -> list[nn.Module]:
    """The modules whose weights the rewards read, each once.

    `module` is the policy's, or what it was prepared in: a reward adapter is on its base.
    """
    own = [scorer.model for scorer in rewards.models()]
    return list(dict.fromkeys(one if isinstance(one, PreTrainedModel) else module for one in own))
