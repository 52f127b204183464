"""A reward model that is an adapter on the policy's own base."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from ppo_core.errors import ModelError

if TYPE_CHECKING:
    from peft import PeftModel
from ppo_core.models.adapter_weights import fill_adapter
from ppo_core.models.adapters import add_beside, load_peft, plain_model, using_adapter
from ppo_core.models.backbones import DecoderBackbone

_CLASSIFIER_HEADS = ("score", "classifier")


class AdapterClassifier(nn.Module):
    """A reward model made of an adapter on a shared base and its own head.

    It has the attributes of a sequence classifier that `RewardModel` uses. Its only parameters
    are the head's: `to()`, `train()` and `requires_grad_()` do not affect the shared base.
    """

    base_model: Callable[..., Any]
    """Run the base under the adapter; the output has `last_hidden_state` (B, S, D)."""

    def __init__(self, model: "PeftModel", name: str, score: nn.Linear) -> None:
        """Use the base of `model` under the adapter `name`, and the head `score`."""
        super().__init__()
        base = plain_model(model)
        self.config = copy.deepcopy(base.config)
        self.config.num_labels = 1
        self.score = score
        within = partial(using_adapter, model, name)
        # Not modules, so that the base does not become a submodule.
        self.base_model = partial(_run, base.base_model, within)
        self.backbone = DecoderBackbone(base.base_model, within)

    @property
    def device(self) -> torch.device:
        """Return the device of the head, which must be the base's."""
        return self.score.weight.device

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse to copy the full base.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "This reward model is an adapter on the policy's base, so it cannot be copied as the "
            "critic. Give the critic its own adapter with add_critic_adapter, or use a value head "
            "on the policy with shared_critic=True."
        )


def load_reward_adapter(
    model: "PeftModel", path: str | Path, name: str = "reward"
) -> AdapterClassifier:
    """Load a reward model that was trained as an adapter on the policy's base.

    `path` is the folder or hub id of a PEFT classifier (task_type SEQ_CLS) with one label: the
    weights of its adapter and its head `score`. Both are loaded frozen; the active adapter stays
    active.

    Raises:
        ModelError: there is no such adapter in safetensors, it has no head with one score, it
            does not match this base, or the name is in use.
    """
    peft = load_peft()
    try:
        config = peft.PeftConfig.from_pretrained(str(path))
        weights = load_file(str(cached_file(str(path), "adapter_model.safetensors")))
    except (OSError, ValueError) as error:
        raise ModelError(f"No reward adapter can be loaded from '{path}': {error}") from error
    score = _take_score(weights, path)
    # The causal base has no classifier head.
    modules = [name for name in config.modules_to_save or [] if name not in _CLASSIFIER_HEADS]
    config.modules_to_save = modules or None
    add_beside(model, config, name)
    fill_adapter(model, name, weights, path)
    base = plain_model(model)
    return AdapterClassifier(model, name, score.to(base.device, base.dtype)).eval()


def _run(
    backbone: nn.Module, within: Callable[[], AbstractContextManager[None]], **inputs: Any
) -> Any:
    with within():
        return backbone(**inputs)


def _take_score(weights: dict[str, Tensor], path: str | Path) -> nn.Linear:
    """Remove the head from the weights of a saved adapter, and return it, frozen."""
    prefix = "base_model.model.score."
    weight, bias = weights.pop(f"{prefix}weight", None), weights.pop(f"{prefix}bias", None)
    if weight is None or len(weight) != 1:
        found = "no head 'score'" if weight is None else f"a head with {len(weight)} labels"
        raise ModelError(
            f"The adapter '{path}' has {found}; a reward model needs a head with one score. Train "
            "it as a ...ForSequenceClassification with num_labels=1 and task_type='SEQ_CLS'."
        )
    score = nn.Linear(weight.shape[1], 1, bias=bias is not None)
    score.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return score.requires_grad_(False)
