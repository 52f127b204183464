"""Write and read a trained critic: a transformers backbone and its value head in one folder.

The folder has the files that the backbone's `save_pretrained` writes, and `value_head.safetensors`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModel, PreTrainedModel

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.critic import Critic
from ppo_core.models.files.saved_precision import cast_weights, name_dtype
from ppo_core.models.files.value_head_files import read_head, save_head
from ppo_core.models.loading import empty_model, load_model, reading
from ppo_core.models.policy import LanguageModel

_HEAD = "summary."
"""Prefix of the names of the head's tensors, see `SavedHead`."""


def require_whole_critic(critic: Critic | None, policy: LanguageModel) -> None:
    """Raise unless a critic can be saved: it needs its own backbone, which transformers can load.

    Raises:
        ConfigError: there is no critic, or the critic is a head or an adapter on the policy.
        ModelError: transformers has no class that loads the critic's backbone without a head.
    """
    if critic is None or critic.adapter is not None or critic.backbone is policy.backbone:
        kind = "no critic" if critic is None else "a critic on the policy's own backbone"
        raise ConfigError(
            f"The run has {kind}, so no critic can be saved. Leave critic_dir out, or set "
            "advantage_estimator='gae' and shared_critic=False."
        )
    model = critic.model
    known: Any = MODEL_MAPPING.get(type(getattr(model, "config", None)), None)  # type: ignore[arg-type]
    if known is not type(model):
        raise ModelError(
            f"The backbone of the critic, a {type(model).__name__}, cannot be loaded alone by "
            "transformers, so the critic cannot be saved. Leave critic_dir out."
        )


def write_critic(
    critic: Critic, weights: Mapping[str, Tensor], head: Mapping[str, Tensor], folder: Path
) -> None:
    """Write the unsharded weights of a critic's backbone and head into a folder."""
    model = cast(PreTrainedModel, critic.model)
    model.save_pretrained(folder, state_dict=cast_weights(dict(weights), model.dtype))
    name_dtype(folder, model.dtype)
    save_head({_HEAD + name: tensor for name, tensor in head.items()}, folder)


def load_critic(path: str | Path) -> Critic:
    """Return, in fp32, the critic that `write_critic` has written.

    Raises:
        ModelError: a file is refused, the folder has no value head, or the head does not fit the
            backbone.
    """
    with reading("critic", path):
        tensors = _read_head(path)
        model = load_model(AutoModel, path, {"dtype": "float32"})
    backbone = DecoderBackbone(model)
    head = nn.Linear(backbone.width(), 1)
    _require_shapes(tensors, head.state_dict(), path)
    head.load_state_dict(tensors)
    return Critic(backbone, head)


def check_critic(path: str | Path) -> None:
    """Raise unless a folder has a value head that fits the hidden states of its backbone.

    The weights of the backbone are not read.

    Raises:
        ModelError: see `load_critic`.
    """
    with reading("critic", path):
        # The LM head reads the same states as the value head.
        lm_head: Any = empty_model(path).get_output_embeddings()
        expected = nn.Linear(lm_head.in_features, 1, device="meta")
        tensors = _read_head(path)
    _require_shapes(tensors, expected.state_dict(), path)


def _read_head(path: str | Path) -> dict[str, Tensor]:
    saved = read_head(path)
    if saved is None:
        raise ModelError(
            f"'{path}' has no value head, so it is not a critic. Give the critic_dir of an "
            "earlier training run."
        )
    return {name.removeprefix(_HEAD): tensor for name, tensor in saved.tensors.items()}


def _require_shapes(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: str | Path
) -> None:
    shapes, needed = (
        {name: tuple(tensor.shape) for name, tensor in of.items()} for of in (tensors, expected)
    )
    if shapes != needed:
        raise ModelError(
            f"The value head of the critic '{path}' has the shapes {shapes}, but its backbone "
            f"needs {needed}: they are parts of two models. Give the folder of one critic."
        )
