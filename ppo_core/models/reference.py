"""The reference of KL divergences: a frozen model, or the policy with another or no adapter."""

import copy
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.adapters import is_peft, plain_model, using_adapter
from ppo_core.models.model_with_value_head import ModelWithValueHead
from ppo_core.models.policy import LanguageModel, require_causal_lm

Model = TypeVar("Model", bound=nn.Module)

LAYER_PATTERNS = (
    "transformer.h.{layer}",
    "gpt_neox.layers.{layer}",
    "model.decoder.layers.{layer}",
    "model.layers.{layer}",
    "decoder.block.{layer}",
)
"""Name prefixes of a layer's parameters, one for each naming scheme of transformers; `{layer}` is
the layer number."""


def make_reference(
    model: nn.Module, ref_model: nn.Module | None, *, adapter: str | None
) -> LanguageModel:
    """Return the reference of a policy.

    If `ref_model` is None, the reference depends on the policy. The reference of a plain policy is
    a frozen copy. The reference of a PeftModel is the same model with the adapter `adapter`, or
    with no adapter if `adapter` is None. A given `ref_model` may itself have an adapter.

    Raises:
        ModelError: `ref_model` cannot be a reference.
    """
    if ref_model is None and is_peft(model):
        return LanguageModel(plain_model(model), within=partial(using_adapter, model, adapter))
    if ref_model is None:
        ref_model = create_reference_model(model)
    if isinstance(ref_model, ModelWithValueHead):
        ref_model = ref_model.pretrained_model
    if is_peft(ref_model):
        within = partial(using_adapter, ref_model, ref_model.active_adapter)
        return LanguageModel(plain_model(ref_model).eval(), within=within)
    return LanguageModel(require_causal_lm(ref_model, "reference").eval())


def create_reference_model(
    model: Model, num_shared_layers: int | None = None, pattern: str | None = None
) -> Model:
    """Return a frozen deep copy in evaluation mode.

    The first `num_shared_layers` layers, all embeddings and the encoder (if any) are not copied:
    both models share these parameters, frozen in both. A head that is tied to the embeddings is
    shared, too. If `num_shared_layers` is None, everything is copied. `pattern` is the name of a
    layer, such as "transformer.h.{layer}". If it is None, `LAYER_PATTERNS` are tried.

    Raises:
        ModelError: the model has an adapter or is partitioned by ZeRO-3, or no layer matches the
            pattern.
        ConfigError: the model does not have `num_shared_layers` layers, or the pattern lacks
            `{layer}` or is given without `num_shared_layers`.
    """
    _check_copyable(model)
    if num_shared_layers is None:
        if pattern is not None:
            raise ConfigError(f"{pattern=} takes effect only with num_shared_layers. Give both.")
        shared = set()
    else:
        shared = _first_parameters(model, num_shared_layers, pattern)
    # deepcopy does not copy objects that are in its memo.
    memo = {id(p): p for name, p in model.named_parameters() if name in shared}
    reference = copy.deepcopy(model, memo)
    return reference.requires_grad_(False).eval()


def _check_copyable(model: nn.Module) -> None:
    # PEFT sets this attribute on a module to which it added an adapter.
    if any(getattr(module, "peft_config", None) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has an adapter, so no copy is needed: the reference is "
            f"{type(model).__name__} itself with the adapter switched off. Pass ref_model=None."
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelError(
            f"The parameters of {type(model).__name__} are partitioned by DeepSpeed ZeRO-3, so a "
            "copy would be empty (TRL #2557). Create the reference before the engine, or load it "
            "with from_pretrained."
        )


def _first_parameters(model: nn.Module, layers: int, pattern: str | None) -> set[str]:
    """Return the names of parameters in the first layers, the embeddings and the encoder."""
    names = [name for name, _ in model.named_parameters()]
    numbers = _layer_numbers(names, pattern)
    if not numbers:
        tried = pattern or " or ".join(LAYER_PATTERNS)
        raise ModelError(
            f"{type(model).__name__} has no layers named {tried}. One of its parameters is "
            f"{names[len(names) // 2]}. Give a pattern that matches such names."
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
    """Return a dict from parameter name to layer number, by the first pattern that matches."""
    if pattern is not None and "{layer}" not in pattern:
        raise ConfigError(f"{pattern=} must contain {{layer}} in place of the layer number.")
    for candidate in LAYER_PATTERNS if pattern is None else (pattern,):
        prefix, _, suffix = candidate.partition("{layer}")
        layer = re.compile(rf"(?:^|\.){re.escape(prefix)}(\d+){re.escape(suffix)}\.")
        found = {name: match for name in names if (match := layer.search(name))}
        if found:
            return {name: int(match[1]) for name, match in found.items()}
    return {}


def _names_before_layers(model: nn.Module) -> set[str]:
    """Return the names of parameters of the embeddings and the encoder."""
    before: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    policy: Any = getattr(model, "pretrained_model", model)
    if policy.config.is_encoder_decoder:
        before.append(policy.get_encoder())
    identities = {id(parameter) for module in before for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in identities}
