"""Weights of one adapter: saved, loaded, and merged into a plain model."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
    """Return a plain copy of the model with one adapter (default: the active one) merged.

    The copy is saved and loaded without peft; the PeftModel is unchanged. `weights` is the full
    state dict if the model itself is sharded; then use the copy only for saving.

    Raises:
        ModelError: there is no such adapter, or the base is quantized.
    """
    if is_quantized(model):
        raise ModelError(
            "An adapter merged into quantized weights is rounded to their few bits, which gives "
            "another policy than the trained one. Save the adapter, and merge it into the base "
            "loaded in full precision."
        )
    name = name or model.active_adapter
    if weights is not None:
        return plain_model(_rebuilt(model, name, weights).merge_and_unload())
    with using_adapter(model, name):
        copied = copy.deepcopy(model)
    return plain_model(copied.merge_and_unload())


def _rebuilt(model: "PeftModel", name: str, weights: Mapping[str, Tensor]) -> "PeftModel":
    """Return a new model with one adapter and full weights; a sharded one cannot be copied."""
    from torch.distributed.fsdp import FSDPModule

    base = plain_model(model)
    # FSDP2 prepends its own classes to the model's class.
    kind: Any = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        plain = kind(copy.deepcopy(base.config))
        adapted = load_peft().get_peft_model(
            plain, copy.deepcopy(model.peft_config[name]), adapter_name=name
        )
    own = {key: _plain_or_wrapped(key, weights) for key in adapted.state_dict()}
    adapted.load_state_dict(own, assign=True)
    return adapted


def _plain_or_wrapped(key: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the weight `key`, which another adapter may have wrapped as `base_layer`."""
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

    `weights` maps parameter names to full tensors, at least those of the adapter, if the model
    itself is sharded.

    Raises:
        ModelError: there is no such adapter.
    """
    name = name or model.active_adapter
    check_adapter(model, name)
    # save_embedding_layers=False, because PEFT would add embeddings of the base by itself.
    model.save_pretrained(
        str(folder), selected_adapters=[name], save_embedding_layers=False, state_dict=weights
    )
    own = Path(folder) / name
    if name != "default":  # PEFT saves an adapter of any other name in a subfolder
        for file in own.iterdir():
            file.replace(Path(folder) / file.name)
        own.rmdir()
    _sort_modules(Path(folder) / "adapter_config.json")


def adapter_parameters(model: "PeftModel", name: str | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter (default: the active one), by their names in its file."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(
        model,
        state_dict=dict(model.named_parameters()),
        adapter_name=name or model.active_adapter,
        save_embedding_layers=False,
    )


def _sort_modules(path: Path) -> None:
    """Sort the names of modules, which PEFT writes in the order of a set."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def fill_adapter(
    model: "PeftModel", name: str, weights: dict[str, Tensor], path: str | Path
) -> None:
    """Load the weights saved in `path` into an adapter; names and shapes must match exactly.

    Raises:
        ModelError: the weights do not match, as they belong to an adapter on another base.
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
            f"the first {key} of shape {shape}. Load the base that it was trained on."
        )
    set_peft_model_state_dict(model, weights, adapter_name=name)
