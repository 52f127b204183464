"""Save, load and merge the weights of one adapter."""

import copy
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_core.errors import ModelError
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
    CPU, because a GPU may have no memory for a second model. If the PeftModel is
    sharded, pass its unsharded state dict as `weights`, and use the copy only for saving. If the
    base is quantized, the copy has the dequantized weights, in the precision in which the base was
    loaded. They are not quantized again, because rounding would change the policy.

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


def save_adapter(
    model: "PeftModel",
    folder: str | Path,
    name: str | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Save one adapter (default: the active one) for `PeftModel.from_pretrained(base, folder)`.

    If the model is sharded, pass `weights`: parameter names to unsharded tensors, with at least
    all parameters of the adapter.

    Raises:
        ModelError: there is no adapter of this name.
    """
    name = name or model.active_adapter
    check_adapter(model, name)
    # save_embedding_layers=False, because PEFT's default may also save the base's embeddings.
    model.save_pretrained(
        str(folder), selected_adapters=[name], save_embedding_layers=False, state_dict=weights
    )
    lift_adapter(folder, name)
    _sort_modules(Path(folder) / "adapter_config.json")


def lift_adapter(folder: str | Path, name: str) -> None:
    """Move the files of a saved adapter to `folder`, where `PeftModel.from_pretrained` looks.

    PEFT saves an adapter in a subfolder, unless the name of the adapter is "default".
    """
    own = Path(folder) / name
    if name != "default":
        for file in own.iterdir():
            file.replace(Path(folder) / file.name)
        own.rmdir()


def adapter_parameters(model: "PeftModel", name: str | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter (default: the active one) by their names in files."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(
        model,
        state_dict=dict(model.named_parameters()),
        adapter_name=name or model.active_adapter,
        save_embedding_layers=False,
    )


def _sort_modules(path: Path) -> None:
    """Sort the module names in a configuration file, because PEFT writes sets in random order."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def fill_adapter(
    model: "PeftModel", name: str, weights: dict[str, Tensor], path: str | Path
) -> None:
    """Copy weights that were read from `path` into the adapter `name`.

    Raises:
        ModelError: names or shapes differ from the adapter's, so the weights are for another base.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    empty = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    wanted = {(key, tuple(tensor.shape)) for key, tensor in empty.items()}
    given = {(key, tuple(tensor.shape)) for key, tensor in weights.items()}
    if wanted != given:
        key, shape = min(wanted ^ given)
        raise ModelError(
            f"The adapter '{path}' was trained on another base than this "
            f"{type(model.get_base_model()).__name__}: {len(wanted ^ given)} tensors do not fit, "
            f"the first of them {key} of shape {shape}. Load the adapter on the base that it was "
            "trained on."
        )
    set_peft_model_state_dict(model, weights, adapter_name=name)
