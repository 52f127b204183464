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
    """A plain model with one adapter merged into its weights, the active one unless named.

    It is saved and loaded without peft. The PeftModel is left as it is. `weights` are all of its
    state, where the model itself holds a part of it only; the copy is good to be saved then.

    Raises:
        ModelError: there is no such adapter, or the base is quantized.
    """
    if is_quantized(model):
        raise ModelError(
            "An adapter merged into quantized weights is rounded to their few bits: another "
            "policy than the one trained. Save the adapter, and merge it into the base loaded in "
            "full precision."
        )
    name = name or model.active_adapter
    if weights is not None:
        return plain_model(_rebuilt(model, name, weights).merge_and_unload())
    with using_adapter(model, name):
        copied = copy.deepcopy(model)
    return plain_model(copied.merge_and_unload())


def _rebuilt(model: "PeftModel", name: str, weights: Mapping[str, Tensor]) -> "PeftModel":
    """The same model with one adapter, made anew: the parts of a sharded one cannot be copied."""
    from torch.distributed.fsdp import FSDPModule

    base = plain_model(model)
    # FSDP2 puts classes of its own in front of a model's.
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
    """The tensor of a plain layer, around which an adapter that is left out may have been."""
    layer, _, name = key.rpartition(".")
    return weights[key] if key in weights else weights[f"{layer}.base_layer.{name}"]


def save_adapter(
    model: "PeftModel",
    folder: str | Path,
    name: str | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Save one adapter, the active one unless named, for `PeftModel.from_pretrained(base, folder)`.

    `weights` are the model's by the names of its parameters, at least those of the adapter, where
    the model itself holds a part of them only.

    Raises:
        ModelError: there is no such adapter.
    """
    name = name or model.active_adapter
    check_adapter(model, name)
    # The base is not the adapter's, whatever PEFT would add of it by itself.
    model.save_pretrained(
        str(folder), selected_adapters=[name], save_embedding_layers=False, state_dict=weights
    )
    own = Path(folder) / name
    if name != "default":  # PEFT puts every other name into a folder of its own
        for file in own.iterdir():
            file.replace(Path(folder) / file.name)
        own.rmdir()
    _sort_modules(Path(folder) / "adapter_config.json")


def adapter_parameters(model: "PeftModel", name: str | None = None) -> dict[str, nn.Parameter]:
    """The parameters of one adapter, the active one unless named, by their names in its file."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(
        model,
        state_dict=dict(model.named_parameters()),
        adapter_name=name or model.active_adapter,
        save_embedding_layers=False,
    )


def _sort_modules(path: Path) -> None:
    """PEFT writes names of modules as a set has them, another order in each process."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def fill_adapter(
    model: "PeftModel", name: str, weights: dict[str, Tensor], path: str | Path
) -> None:
    """Load weights that were saved in `path` into an adapter, all of them and nothing else.

    Raises:
        ModelError: they belong to an adapter on another base.
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
