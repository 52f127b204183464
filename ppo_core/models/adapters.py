"""What PPO needs of PEFT: adapters on one base model, switched around its forward passes."""

import copy
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from ppo_core.errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from typing_extensions import TypeIs

METHODS = ("LORA", "LOHA", "LOKR", "IA3", "OFT")
"""PEFT methods that keep every adapter in layers of its own, so that it can be switched."""

_CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")

_WHENCE = {"base_model_name_or_path", "revision", "peft_version", "inference_mode"}
"""Settings of an adapter that change nothing in what it does."""

_Switches = list[tuple[Any, str | list[str], bool]]
"""Each layer that has adapters, the ones that it uses, and whether it is switched off."""


def is_peft(model: object) -> "TypeIs[PeftModel]":
    """Whether a model is a PeftModel; peft is not imported to find out."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside of a PeftModel, its layers adapted; any other as it is.

    Raises:
        ModelError: it is no transformers model, its adapters cannot be switched, or they are
            merged into the base.
    """
    if is_peft(model):
        for config in model.peft_config.values():
            _check_method(config)
        if any(layer.merged_adapters for layer, _, _ in _switches(model)):
            raise ModelError(
                "An adapter is merged into the base, where it cannot be switched or trained. Call "
                "model.unmerge_adapter() first."
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is no model of transformers.")
    return model


def lora_config(**settings: Any) -> "LoraConfig":
    """A `peft.LoraConfig` of settings from a command line.

    Raises:
        ModelError: the package peft is not installed.
    """
    if settings.get("target_modules") == ["all-linear"]:
        # In a list the word would be the name of a module.
        settings = {**settings, "target_modules": "all-linear"}
    config: LoraConfig = load_peft().LoraConfig(**settings)
    return config


def add_adapter(model: nn.Module, peft_config: "PeftConfig", name: str = "default") -> "PeftModel":
    """Put a first, trainable adapter on a model, which is frozen and changed in place.

    The adapter is in the model's own mode: PEFT creates it in training mode, where LoRA's
    dropout would act although the model is in evaluation mode.

    Raises:
        ModelError: peft is not installed, the model is none of transformers or has adapters
            already, `peft_config` is no PeftConfig, or PPO or the model cannot take this one.
    """
    peft = load_peft()
    if is_peft(model) or getattr(model, "peft_config", None):
        raise ModelError(
            "The model has an adapter already, and another one on top could not be loaded again "
            "(TRL #4713). Hand it over without a peft_config to train its own, or merge it first: "
            "model.merge_and_unload()."
        )
    config = _trainable(peft_config)
    try:
        adapted: PeftModel = peft.get_peft_model(plain_model(model), config, adapter_name=name)
    except ValueError as error:
        _refuse(name, error)
    return adapted.train(model.training)


def add_critic_adapter(model: "PeftModel", peft_config: "PeftConfig", name: str = "critic") -> None:
    """Put a second trainable adapter beside the active one, which stays active and trainable.

    Raises:
        ModelError: `peft_config` is no PeftConfig, is of another method than the first, or PPO
            or the model cannot take it; or the name is taken.
    """
    add_beside(model, _trainable(peft_config), name)
    model.set_requires_grad(name)


def check_adapter(model: "PeftModel", name: str) -> None:
    """Refuse a name that no adapter has.

    Raises:
        ModelError: there is none; the message lists those there are.
    """
    if name not in model.peft_config:
        raise ModelError(
            f"There is no adapter {name!r}. The adapters of this model are "
            f"{', '.join(map(repr, model.peft_config))}."
        )


@contextmanager
def using_adapter(model: "PeftModel", name: str | None) -> Iterator[None]:
    """Inside, forward passes use this adapter, or the base model alone where the name is None.

    Nothing but the choice changes: whatever required a gradient does so still, unlike with
    PEFT's `set_adapter` and `disable_adapter`, so passes under several adapters can share one
    backward pass. Afterwards the choice is as before.

    Raises:
        ModelError: there is no adapter of this name.
    """
    if name is not None:
        check_adapter(model, name)
    now = _switches(model)
    with _switched([(layer, _choice(layer, name, used), name is None) for layer, used, _ in now]):
        yield


def checkpoint_activations(model: "PeftModel") -> None:
    """Compute activations again in the backward pass, each under its forward pass's adapter.

    The backward pass runs outside of `using_adapter`: plain checkpointing would compute them
    under whatever adapter is active by then, and give the gradient of another model without a
    word. As always in transformers, it acts while the model is in training mode.
    """
    settings = {"use_reentrant": False, "context_fn": partial(_recomputation, model)}
    plain_model(model).activation_checkpointing_enable(activation_checkpointing_kwargs=settings)


def adapter_settings(model: "PeftModel", name: str | None = None) -> dict[str, str]:
    """What one adapter does with its weights, the active one unless named: scale, places, ..."""
    settings = model.peft_config[name or model.active_adapter].to_dict()
    return {
        key: str(sorted(value) if isinstance(value, set) else value)
        for key, value in settings.items()
        if key not in _WHENCE
    }


def load_peft() -> ModuleType:
    """The package peft, which is an extra.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            "Adapters need the package peft: pip install 'rlhf-flow[peft]'."
        ) from error
    return peft


def _trainable(peft_config: "PeftConfig") -> "PeftConfig":
    """A copy of a configuration, which PEFT fills in; refused if PPO cannot train it."""
    if not isinstance(peft_config, load_peft().PeftConfig):
        raise ModelError(
            f"peft_config is a {type(peft_config).__name__}, and must be a PeftConfig, such as "
            "peft.LoraConfig(task_type='CAUSAL_LM')."
        )
    _check_method(peft_config)
    if peft_config.inference_mode:
        raise ModelError(
            "peft_config has inference_mode=True, as it is read from a saved adapter: nothing "
            "would be trained. Set inference_mode=False, or load that adapter with "
            "PeftModel.from_pretrained(..., is_trainable=True)."
        )
    return copy.deepcopy(peft_config)


def _check_method(config: "PeftConfig") -> None:
    """Refuse an adapter that cannot be switched by layer, or leaves another model when off."""
    initial = getattr(config, "init_lora_weights", True)
    bias = getattr(config, "bias", "none")
    if config.peft_type not in METHODS:
        problem = f"its method is none of {', '.join(METHODS)}, so it cannot be switched by layer"
    elif getattr(config, "alora_invocation_tokens", None):
        problem = "it acts from an invocation token on, which hidden states alone do not show"
    elif bias != "none":
        problem = f"bias={bias!r} trains biases of the base, and the reference with them"
    elif isinstance(initial, str) and initial.startswith(_CHANGE_THE_BASE):
        problem = f"init_lora_weights={initial!r} changes the base, and the reference with it"
    else:
        return
    raise ModelError(
        f"PPO cannot use this {config.peft_type} adapter: {problem}. Use a peft.LoraConfig with "
        "bias='none' and init_lora_weights=True."
    )


def add_beside(model: "PeftModel", config: "PeftConfig", name: str) -> None:
    """A further adapter, frozen and not active, in the model's own mode."""
    _check_method(config)
    try:
        model.add_adapter(name, config)
    except ValueError as error:
        _refuse(name, error)
    model.train(model.training)


def _refuse(name: str, error: ValueError) -> NoReturn:
    raise ModelError(f"PEFT cannot add the adapter {name!r}: {error}") from error


def _switches(model: "PeftModel") -> _Switches:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers = (layer for layer in model.modules() if isinstance(layer, kinds))
    return [(layer, layer.active_adapter, layer.disable_adapters) for layer in layers]


def _choice(layer: Any, name: str | None, used: str | list[str]) -> str | list[str]:
    """What a layer uses under an adapter; one that the adapter left alone uses nothing."""
    if name is None:
        return used
    return name if name in layer._get_available_adapters() else []


@contextmanager
def _switched(wanted: _Switches) -> Iterator[None]:
    before = [(layer, layer.active_adapter, layer.disable_adapters) for layer, _, _ in wanted]
    try:
        _switch(wanted)
        yield
    finally:
        _switch(before)


def _switch(wanted: _Switches) -> None:
    for layer, used, off in wanted:
        # PEFT's own setters change these two and requires_grad with them.
        layer._active_adapter = used
        layer._disable_adapters = off


def _recomputation(
    model: "PeftModel",
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a checkpointed forward pass, and of the same pass computed again."""
    return nullcontext(), _switched(_switches(model))
