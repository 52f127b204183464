"""A reward model that is an adapter on the policy's base model."""

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
from ppo_core.models.adapters import add_beside, load_peft, plain_model, using_adapter
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.files.adapter_weights import fill_adapter
from ppo_core.models.loading import reading

_CLASSIFIER_HEADS = ("score", "classifier")

_HOW_TO_TRAIN = "Train a ...ForSequenceClassification with num_labels=1 and task_type='SEQ_CLS'."


class AdapterClassifier(nn.Module):
    """A reward model that consists of an adapter on the policy's base model, and a head.

    The class has the attributes of a sequence classifier that `RewardModel` uses. Its parameters
    are only the head's, so `to()`, `train()` and `requires_grad_()` do not affect the base.
    """

    base_model: Callable[..., Any]
    """Function that runs the base with the adapter, and returns `last_hidden_state` (B, S, D)."""

    def __init__(self, model: "PeftModel", name: str, score: nn.Linear) -> None:
        """Take a PeftModel, the name of its reward adapter, and the head of the reward model."""
        super().__init__()
        base = plain_model(model)
        self.config = copy.deepcopy(base.config)
        self.config.num_labels = score.out_features
        self.score = score
        within = partial(using_adapter, model, name)
        # The next two values are not nn.Modules, so the base does not become a submodule.
        self.base_model = partial(_run, base.base_model, within)
        self.backbone = DecoderBackbone(base.base_model, within)

    @property
    def device(self) -> torch.device:
        """Return the device of the head; the base must be on the same device."""
        return self.score.weight.device

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raise, because a copy would contain a copy of the base.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "This reward model is an adapter on the policy's base model, so it cannot be copied as "
            "the critic. Give the critic an adapter with add_critic_adapter, or set "
            "shared_critic=True, which puts a value head on the policy."
        )


def load_reward_adapter(
    model: "PeftModel", path: str | Path, name: str = "reward"
) -> AdapterClassifier:
    """Load a reward model that was trained as an adapter on the policy's base.

    Raises:
        ModelError: the head has several labels; or see `load_adapter_classifier`.
    """
    classifier = load_adapter_classifier(model, path, name)
    if classifier.config.num_labels != 1:
        model.delete_adapter(name)
        raise ModelError(
            f"The adapter '{path}' has a head with {classifier.config.num_labels} labels, but a "
            f"reward model needs a head with one score. {_HOW_TO_TRAIN}"
        )
    return classifier


def load_adapter_classifier(model: "PeftModel", path: str | Path, name: str) -> AdapterClassifier:
    """Load a classifier that was trained as an adapter on the policy's base.

    `path` is the folder or hub id of a PEFT classifier (task_type SEQ_CLS). Its files contain the
    weights of an adapter and of the head `score`. Adapter and head are loaded frozen. The active
    adapter of the model stays active.

    Raises:
        ModelError: the path has no adapter in safetensors, the adapter has no head or does not fit
            this base, or another adapter has this name.
    """
    peft = load_peft()
    with reading("reward adapter", path):
        config = peft.PeftConfig.from_pretrained(str(path))
        weights = load_file(str(cached_file(str(path), "adapter_model.safetensors")))
    score = _take_score(weights, path)
    # Leave the head out: PEFT would look for it in the base, a causal model without this head.
    modules = [name for name in config.modules_to_save or [] if name not in _CLASSIFIER_HEADS]
    config.modules_to_save = modules or None
    add_beside(model, config, name)
    try:
        fill_adapter(model, name, weights, path)
    except ModelError:
        model.delete_adapter(name)
        raise
    base = plain_model(model)
    return AdapterClassifier(model, name, score.to(base.device, base.dtype)).eval()


def _run(
    backbone: nn.Module, within: Callable[[], AbstractContextManager[None]], **inputs: Any
) -> Any:
    with within():
        return backbone(**inputs)


def _take_score(weights: dict[str, Tensor], path: str | Path) -> nn.Linear:
    """Remove the head from the weights of a saved adapter, and return the frozen head."""
    prefix = "base_model.model.score."
    weight, bias = weights.pop(f"{prefix}weight", None), weights.pop(f"{prefix}bias", None)
    if weight is None:
        raise ModelError(
            f"The adapter '{path}' has no head 'score', but a reward model needs a head with one "
            f"score. {_HOW_TO_TRAIN}"
        )
    score = nn.Linear(weight.shape[1], len(weight), bias=bias is not None)
    score.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return score.requires_grad_(False)
