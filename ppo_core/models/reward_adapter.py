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
    """A reward model that is an adapter on a shared base, and a head of its own.

    It has what `RewardModel` reads of a sequence classifier. Its only parameters are those of
    the head: `to()`, `train()` and `requires_grad_()` do not reach the shared base.
    """

    base_model: Callable[..., Any]
    """Token ids in, an output with `last_hidden_state` (B, S, D) under the adapter out."""

    def __init__(self, model: "PeftModel", name: str, score: nn.Linear) -> None:
        """Read hidden states under the adapter `name`, and scores by the head `score`."""
        super().__init__()
        base = plain_model(model)
        self.config = copy.deepcopy(base.config)
        self.config.num_labels = 1
        self.score = score
        within = partial(using_adapter, model, name)
        # Neither is a module, so the base does not become one of this module's parts.
        self.base_model = partial(_run, base.base_model, within)
        self.backbone = DecoderBackbone(base.base_model, within)

    @property
    def device(self) -> torch.device:
        """Where the head is; the base belongs there, too."""
        return self.score.weight.device

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would be one of the whole base.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "This reward model is an adapter on the policy's base, of which no critic can be "
            "copied. Give the critic an adapter of its own, with add_critic_adapter, or a value "
            "head on the policy, with shared_critic=True."
        )


def load_reward_adapter(
    model: "PeftModel", path: str | Path, name: str = "reward"
) -> AdapterClassifier:
    """Load a reward model that was trained as an adapter on the same base, beside the policy's.

    `path` is what PEFT saved of a classifier (task_type SEQ_CLS) with one label: the weights of
    its adapter, and its head `score`. Both are frozen; the active adapter stays active.

    Raises:
        ModelError: there is no such adapter in safetensors, it has no head for one score, it
            does not fit onto this base, or the name is taken.
    """
    peft = load_peft()
    try:
        config = peft.PeftConfig.from_pretrained(str(path))
        weights = load_file(str(cached_file(str(path), "adapter_model.safetensors")))
    except (OSError, ValueError) as error:
        raise ModelError(f"No reward adapter can be loaded from '{path}': {error}") from error
    score = _take_score(weights, path)
    # The causal base has no such modules: the head is the classifier's own.
    wholes = [one for one in config.modules_to_save or [] if one not in _CLASSIFIER_HEADS]
    config.modules_to_save = wholes or None
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
    """The head among the weights of a saved adapter, which are left without it; frozen."""
    prefix = "base_model.model.score."
    weight, bias = weights.pop(f"{prefix}weight", None), weights.pop(f"{prefix}bias", None)
    if weight is None or len(weight) != 1:
        found = "no head 'score'" if weight is None else f"a head with {len(weight)} labels"
        raise ModelError(
            f"The adapter '{path}' has {found}; a reward model has one, for its score. Train it "
            "as a ...ForSequenceClassification with num_labels=1 and task_type='SEQ_CLS'."
        )
    score = nn.Linear(weight.shape[1], 1, bias=bias is not None)
    score.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return score.requires_grad_(False)
