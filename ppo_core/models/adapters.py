"""Add, validate and select PEFT adapters on one base model."""

import copy
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from ppo_core.config.script_arguments import ModelArguments
from ppo_core.errors import ModelError
from ppo_core.errors.packages import require_package

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from typing_extensions import TypeIs

METHODS = ("LORA", "LOHA", "LOKR", "IA3", "OFT")
"""PEFT methods that add layers to the model; these layers can switch adapters between passes."""

_CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")

_ORIGIN = {"base_model_name_or_path", "revision", "peft_version", "inference_mode"}
"""Settings of an adapter that do not change its computation."""

_Switches = list[tuple[Any, str | list[str], bool]]
"""Triples of a layer with adapters, its active adapters, and whether adapters are disabled."""


CRITIC_ADAPTER = "critic"
"""Name of the adapter that a trainer uses for its critic."""


def is_peft(model: object) -> "TypeIs[PeftModel]":
    """Return whether a model is a PeftModel, without importing peft."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def plain_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PeftModel, with the adapters still in its layers.

    Any other model is returned as it is.

    Raises:
        ModelError: the model is not a transformers model, or an adapter of the PeftModel has an
            unsupported method or is merged into the base.
    """
    if is_peft(model):
        for config in model.peft_config.values():
            _check_method(config)
        if any(layer.merged_adapters for layer, _, _ in _switches(model)):
            raise ModelError(
                "An adapter is merged into the base, so it cannot be switched off or trained. Call "
                "model.unmerge_adapter() first."
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} is not a model of transformers.")
    return model


def lora_config(**settings: Any) -> "LoraConfig":
    """Return a `peft.LoraConfig`; the list ["all-linear"] of modules becomes PEFT's "all-linear".

    Raises:
        ModelError: the package peft is not installed.
    """
    if settings.get("target_modules") == ["all-linear"]:
        # The command line gives a list, which PEFT would interpret as names of modules.
        settings = {**settings, "target_modules": "all-linear"}
    config: LoraConfig = load_peft().LoraConfig(**settings)
    return config


def get_peft_config(model: ModelArguments) -> "LoraConfig | None":
    """Return the `peft.LoraConfig` of the policy's adapter, or None without `use_peft`.

    Raises:
        ModelError: the package peft is not installed.
    """
    if not model.use_peft:
        return None
    return lora_config(
        task_type="CAUSAL_LM",
        r=model.lora_r,
        lora_alpha=model.lora_alpha,
        target_modules=model.lora_target_modules,
        target_parameters=model.lora_target_parameters,
        modules_to_save=model.lora_modules_to_save,
        use_rslora=model.use_rslora,
        use_dora=model.use_dora,
    )


def add_adapter(model: nn.Module, peft_config: "PeftConfig", name: str = "default") -> "PeftModel":
    """Freeze a model, and add its first adapter, which is trainable, in place.

    The adapter is set to the model's training or evaluation mode. PEFT itself creates adapters in
    training mode, in which LoRA's dropout is active.

    Raises:
        ModelError: peft is not installed; the model is not a transformers model, or has an
            adapter; `peft_config` is not a PeftConfig; or PPO or the model does not support the
            adapter.
    """
    peft = load_peft()
    if is_peft(model) or getattr(model, "peft_config", None):
        raise ModelError(
            "The model has an adapter already, and an adapter on top of it could not be loaded "
            "again (TRL #4713). To train the existing adapter, pass no peft_config. To train a new "
            "adapter, first merge the existing adapter by model.merge_and_unload()."
        )
    config, base = _trainable(peft_config), plain_model(model)
    revision = getattr(base, "revision", None) if base.name_or_path else None
    try:
        adapted: PeftModel = peft.get_peft_model(base, config, name, revision=revision)
    except ValueError as error:
        _refuse(name, error)
    return adapted.train(model.training)


def add_critic_adapter(
    model: "PeftModel", peft_config: "PeftConfig", name: str = CRITIC_ADAPTER
) -> None:
    """Add a trainable adapter for the critic; the active adapter stays active and trainable.

    A trainer without a value model makes its critic of the adapter CRITIC_ADAPTER, if there is one.

    Raises:
        ModelError: `peft_config` is not a PeftConfig, has another method than the first adapter,
            or is not supported by PPO or the model; or another adapter has this name.
    """
    add_beside(model, _trainable(peft_config), name)
    model.set_requires_grad(name)


def check_adapter(model: "PeftModel", name: str) -> None:
    """Raise if the model has no adapter of this name.

    Raises:
        ModelError: there is no adapter of this name; the message lists the model's adapters.
    """
    if name not in model.peft_config:
        raise ModelError(
            f"There is no adapter {name!r}. The adapters of this model are "
            f"{', '.join(map(repr, model.peft_config))}."
        )


@contextmanager
def using_adapter(model: "PeftModel", name: str | None) -> Iterator[None]:
    """Use the adapter `name` in forward passes in this context, or only the base if `name` is None.

    Unlike PEFT's `set_adapter` and `disable_adapter`, this context leaves `requires_grad`
    unchanged, so that forward passes with different adapters can share one backward pass. On exit
    the previously active adapters are active again.

    Raises:
        ModelError: there is no adapter of this name.
    """
    if name is not None:
        check_adapter(model, name)
    wanted = [
        (layer, _choice(layer, name, active), name is None) for layer, active, _ in _switches(model)
    ]
    with _switched(wanted):
        yield


def train_adapters(model: "PeftModel") -> None:
    """Set the layers with adapters to training mode, which enables the adapters' dropout."""
    for layer, _, _ in _switches(model):
        layer.train()


def checkpoint_activations(model: "PeftModel") -> None:
    """Recompute activations in the backward pass, with the adapter of the forward pass.

    The backward pass runs outside `using_adapter`, where another adapter may be active. Plain
    checkpointing would recompute with the other adapter, and silently give wrong gradients. As
    always in transformers, activations are recomputed only in training mode.
    """
    settings = {"use_reentrant": False, "context_fn": partial(_recomputation, model)}
    recompute_activations(plain_model(model), settings)


def recompute_activations(model: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Enable activation checkpointing without transformers' hook on the embeddings.

    Only reentrant checkpointing needs the hook, and the fast path does not support hooks.
    """
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    model.disable_input_require_grads()


def adapter_settings(config: "PeftConfig") -> dict[str, str]:
    """Return the settings that affect the computation of an adapter with this configuration."""
    return {
        key: str(sorted(value) if isinstance(value, set) else value)
        for key, value in config.to_dict().items()
        if key not in _ORIGIN
    }


def load_peft() -> ModuleType:
    """Return the optional package peft.

    Raises:
        ModelError: peft is not installed.
    """
    require_package("peft", extra="peft", needed_by="Training of adapters", kind=ModelError)
    import peft

    # PEFT uses an old name of transformers; a user can do nothing about this warning.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    return peft


def _trainable(peft_config: "PeftConfig") -> "PeftConfig":
    """Return a copy of a configuration for PEFT to modify; raise if PPO cannot train with it."""
    if not isinstance(peft_config, load_peft().PeftConfig):
        raise ModelError(
            f"peft_config is a {type(peft_config).__name__}, and must be a PeftConfig. Pass, for "
            "example, peft.LoraConfig(task_type='CAUSAL_LM')."
        )
    _check_method(peft_config)
    if peft_config.inference_mode:
        raise ModelError(
            "peft_config has inference_mode=True, as saved adapters have, so nothing would be "
            "trained. To train a new adapter, set inference_mode=False. To train a saved adapter, "
            "load it by PeftModel.from_pretrained(..., is_trainable=True)."
        )
    return copy.deepcopy(peft_config)


def _check_method(config: "PeftConfig") -> None:
    """Raise if an adapter cannot be selected for each forward pass, or modifies the base model."""
    initial = getattr(config, "init_lora_weights", True)
    bias = getattr(config, "bias", "none")
    if config.peft_type not in METHODS:
        problem = (
            f"the method is not {' or '.join(METHODS)}: it has no adapter layers that could be "
            "switched between passes"
        )
    elif getattr(config, "alora_invocation_tokens", None):
        problem = (
            "it acts only after an invocation token, and the layers get hidden states, in which "
            "PEFT cannot find this token"
        )
    elif bias != "none":
        problem = f"bias={bias!r} trains biases of the base model, and so changes the reference"
    elif isinstance(initial, str) and initial.startswith(_CHANGE_THE_BASE):
        problem = f"init_lora_weights={initial!r} changes the base model, and so the reference"
    else:
        return
    raise ModelError(
        f"PPO cannot use this {config.peft_type} adapter: {problem}. Use a peft.LoraConfig with "
        "bias='none' and init_lora_weights=True."
    )


def add_beside(model: "PeftModel", config: "PeftConfig", name: str) -> None:
    """Add a frozen, inactive adapter to a PeftModel, in the model's training or evaluation mode.

    Raises:
        ModelError: PPO or the model does not support the adapter, or another adapter has this name.
    """
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


def _choice(layer: Any, name: str | None, active: str | list[str]) -> str | list[str]:
    """Return the adapters to activate in a layer; [] if the layer has no adapter `name`."""
    if name is None:
        return active
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
    for layer, active, disabled in wanted:
        # Set directly, because PEFT's setters also change requires_grad.
        layer._active_adapter = active
        layer._disable_adapters = disabled


def _recomputation(
    model: "PeftModel",
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpointed forward pass and of its recomputation."""
    return nullcontext(), _switched(_switches(model))
