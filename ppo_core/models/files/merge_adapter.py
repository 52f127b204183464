"""Merge an adapter into a copy of its base."""

import copy
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_core.models.adapters import check_adapter, load_peft, plain_model, using_adapter
from ppo_core.models.quantization import is_quantized

if TYPE_CHECKING:
    from peft import PeftModel


def merged_copy(
    model: "PeftModel",
    name: str | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Return a plain transformers model: the base merged with an adapter (default: the active one).

    Saving and loading the copy do not need peft. The PeftModel is not changed. The copy is on the
    CPU, because a GPU may have no memory for a second model. If the PeftModel is sharded, pass its
    unsharded state dict as `weights`, and use the copy only for saving. If the base is quantized,
    the copy has the dequantized weights, in the precision in which the base was loaded. The weights
    are not quantized again, because rounding would change the policy.

    Raises:
        ModelError: there is no adapter of this name.
    """
    name = name or model.active_adapter
    check_adapter(model, name)
    if is_quantized(model):
        weights = _dequantized(model)
    if weights is not None:
        return plain_model(_rebuilt(model, name, weights).merge_and_unload())
    with using_adapter(model, name):
        copied = _copy_on_cpu(model)
    return plain_model(copied.merge_and_unload())


def _copy_on_cpu(model: "PeftModel") -> "PeftModel":
    memo: dict[int, Tensor] = {
        id(weight): nn.Parameter(_on_cpu(weight), weight.requires_grad)
        for weight in model.parameters()
    }
    memo |= {id(buffer): _on_cpu(buffer) for buffer in model.buffers()}
    # deepcopy takes the copies of objects from its memo.
    return copy.deepcopy(model, memo)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _rebuilt(model: "PeftModel", name: str, weights: Mapping[str, Tensor]) -> "PeftModel":
    """Return a new unsharded, unquantized model with one adapter and the given weights."""
    from torch.distributed.fsdp import FSDPModule

    base = plain_model(model)
    # FSDP2 prepends its own classes to the model's class.
    kind: Any = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
    config = copy.deepcopy(base.config)
    # With this entry, the saved model would be quantized when it is loaded.
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = kind(config)
        adapted = load_peft().get_peft_model(
            plain, copy.deepcopy(model.peft_config[name]), adapter_name=name
        )
    own = {key: _plain_or_wrapped(key, weights) for key in adapted.state_dict()}
    if is_quantized(model):
        for layer, module in adapted.named_modules():
            # bitsandbytes replaces a Conv1D by a linear layer, whose weight is transposed.
            if isinstance(module, Conv1D):
                own[f"{layer}.weight"] = own[f"{layer}.weight"].T.contiguous()
    adapted.load_state_dict(own, assign=True)
    return adapted


def _dequantized(model: "PeftModel") -> dict[str, Tensor]:
    """Return the dequantized weights of a model with a quantized base, on the CPU."""
    from peft.utils.integrations import dequantize_module_weight

    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    weights = {name: tensor.detach().cpu() for name, tensor in named}
    for name, module in model.named_modules():
        if f"{name}.weight" in weights:
            quantized = module.weight
            weights[f"{name}.weight"] = dequantize_module_weight(module).detach().cpu()
            # PEFT may have replaced `module.weight` by a copy without the quantization state.
            module.weight = quantized
    return weights


def _plain_or_wrapped(key: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the weight `key`, named LAYER.base_layer.NAME if another adapter wraps the layer."""
    layer, _, name = key.rpartition(".")
    return weights[key] if key in weights else weights[f"{layer}.base_layer.{name}"]
