"""A frozen copy of a model, from which KL divergences are measured."""

import copy
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from ppo_core.errors import ConfigError, ModelError

Model = TypeVar("Model", bound=nn.Module)

LAYER_PATTERNS = (
    "transformer.h.{layer}",
    "gpt_neox.layers.{layer}",
    "model.decoder.layers.{layer}",
    "model.layers.{layer}",
    "decoder.block.{layer}",
)
"""Where families of transformers have their layers; `{layer}` stands for the number."""


def create_reference_model(
    model: Model, num_shared_layers: int | None = None, pattern: str | None = None
) -> Model:
    """A deep copy in evaluation mode of which no parameter is trained.

    With `num_shared_layers`, the first so many layers and what comes before them (all
    embeddings, and the encoder if there is one) are not copied: both models have the very same
    parameters there, frozen in both. A head that is tied to the embeddings is shared with them.
    `pattern` says how the layers are called, such as "transformer.h.{layer}"; the families of
    `LAYER_PATTERNS` are known.

    Raises:
        ModelError: the model has an adapter or is partitioned by ZeRO-3, or no layer of it
            fits the pattern.
        ConfigError: there are not so many layers, or the pattern has no place for a number.
    """
    _check_copyable(model)
    if num_shared_layers is None:
        if pattern is not None:
            raise ConfigError(f"{pattern=} takes effect only with num_shared_layers. Give both.")
        shared = set()
    else:
        shared = _first_parameters(model, num_shared_layers, pattern)
    # Deep-copying takes what its memo has instead of a copy.
    as_it_is = {id(p): p for name, p in model.named_parameters() if name in shared}
    reference = copy.deepcopy(model, as_it_is)
    return reference.requires_grad_(False).eval()


def _check_copyable(model: nn.Module) -> None:
    # PEFT leaves this attribute on whatever it put an adapter into.
    if any(getattr(module, "peft_config", None) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has an adapter: its reference is itself with the adapter "
            "disabled, and needs no copy. Hand over ref_model=None."
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelError(
            f"The parameters of {type(model).__name__} are partitioned by DeepSpeed ZeRO-3, and a "
            "copy would be empty (TRL #2557). Create the reference before the engine, or load it "
            "with from_pretrained."
        )


def _first_parameters(model: nn.Module, layers: int, pattern: str | None) -> set[str]:
    """Names of the parameters in the first layers and in what comes before them."""
    names = [name for name, _ in model.named_parameters()]
    numbers = _layer_numbers(names, pattern)
    if not numbers:
        tried = pattern or " or ".join(LAYER_PATTERNS)
        raise ModelError(
            f"{type(model).__name__} has no layers called {tried}. "
            f"Its parameters are called like {names[len(names) // 2]}: give a pattern that fits."
        )
    count = max(numbers.values()) + 1
    if not 1 <= layers <= count:
        raise ConfigError(
            f"num_shared_layers={layers} must be from 1 to {count}, the layers of "
            f"{type(model).__name__}, or None to share nothing."
        )
    first = {name for name, number in numbers.items() if number < layers}
    return first | (_names_before_layers(model) - numbers.keys())


def _layer_numbers(names: Iterable[str], pattern: str | None) -> dict[str, int]:
    """The layer of each parameter that is in one, by the first pattern that fits any."""
    if pattern is not None and "{layer}" not in pattern:
        raise ConfigError(f"{pattern=} must contain {{layer}}, where the number of a layer is.")
    for candidate in LAYER_PATTERNS if pattern is None else (pattern,):
        before, _, after = candidate.partition("{layer}")
        place = re.compile(rf"(?:^|\.){re.escape(before)}(\d+){re.escape(after)}\.")
        found = {name: match for name in names if (match := place.search(name))}
        if found:
            return {name: int(match[1]) for name, match in found.items()}
    return {}


def _names_before_layers(model: nn.Module) -> set[str]:
    """Names of the parameters of embeddings, and of the encoder."""
    before: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    policy: Any = getattr(model, "pretrained_model", model)
    if policy.config.is_encoder_decoder:
        before.append(policy.get_encoder())
    identities = {id(parameter) for module in before for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in identities}
