"""Load a policy with its value head, from files of this package or of TRL, and save the head."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from ppo_core.errors import ConfigError, ModelError
from ppo_core.errors.packages import require_package
from ppo_core.models.files.model_folder import (
    ADAPTER_CONFIG,
    INDEX,
    PICKLES,
    WEIGHTS,
    check_config_keys,
    pickled,
    read_object,
)
from ppo_core.models.files.saved_precision import half_precision
from ppo_core.models.loading import load_model, reading
from ppo_core.models.quantization import bitsandbytes_config

HEAD_FILE = "value_head.safetensors"
PREFIX = "v_head."

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


class SavedHead(NamedTuple):
    """A value head read from a file."""

    tensors: dict[str, Tensor]
    """Tensors by name: `summary.weight` (1, D) and `summary.bias` (1,)."""

    of_trl: bool
    """Whether the head was read from the policy's weights file, where TRL saves it."""


def load_with_head(
    auto_class: Any, path: str | Path, arguments: Mapping[str, Any], *, is_trainable: bool
) -> tuple[nn.Module, SavedHead | None, torch.dtype | None]:
    """Return the policy of a folder or hub id, its value head, and the half precision of its files.

    The head is None if no head was saved. If the path has an adapter, the policy is a PeftModel and
    the precision is None. The precision is also None if the files are not in half precision.
    `arguments` are arguments of transformers' `from_pretrained`, and also `load_in_4bit` and
    `load_in_8bit`.

    Raises:
        ModelError: the model cannot be loaded, or loading it needs a pickle or remote code.
        ConfigError: arguments contradict each other.
    """
    _refuse_code(arguments)
    arguments = _with_quantization(arguments)
    hub = {name: arguments[name] for name in _HUB_ARGUMENTS if name in arguments}
    with reading("model", path):
        written = None
        if (config := _find(path, "config.json", **hub)) is not None:
            check_config_keys(content := read_object(config), path)
            written = half_precision(content)
        head = read_head(path, **hub)
        if _find(path, ADAPTER_CONFIG, **hub) is not None:
            return _load_adapter(auto_class, path, arguments, hub, is_trainable), head, None
        return load_model(auto_class, path, arguments, unused=[PREFIX]), head, written


def save_head(tensors: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write the tensors of a head, named as in `SavedHead`, to `value_head.safetensors`."""
    named = {PREFIX + name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(named, Path(folder) / HEAD_FILE, metadata={"format": "pt"})


def read_head(path: str | Path, **hub: Any) -> SavedHead | None:
    """Return the value head that is saved in a folder or hub id, or None.

    Raises:
        ModelError: the only weights are in a pickle, which is not read.
    """
    if (own := _find(path, HEAD_FILE, **hub)) is not None:
        return SavedHead(_tensors_of_head(own), of_trl=False)
    if (weights := _find(path, WEIGHTS, **hub)) is not None:
        tensors = _tensors_of_head(weights)
    elif (index := _find(path, INDEX, **hub)) is not None:
        tensors = _tensors_of_shards(path, index, **hub)
    else:
        _refuse_pickle(path, **hub)
        return None
    return SavedHead(tensors, of_trl=True) if tensors else None


def _refuse_code(arguments: Mapping[str, Any]) -> None:
    if arguments.get("trust_remote_code"):
        raise ModelError(
            "trust_remote_code=True would run code from the checkpoint. Leave trust_remote_code "
            "out, and use a model that is part of transformers."
        )
    if arguments.get("use_safetensors") is False:
        raise ModelError(
            "use_safetensors=False would read a pickle, which can run code. Leave use_safetensors "
            "out. If the checkpoint has no safetensors, an error message says how to convert it."
        )


def _with_quantization(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for `load_model`, with `quantization_config` instead of `load_in_...`."""
    # `load_model` sets the arguments that refuse code and pickles.
    refused = ("trust_remote_code", "use_safetensors")
    others = {name: value for name, value in arguments.items() if name not in refused}
    config = bitsandbytes_config(
        load_in_4bit=others.pop("load_in_4bit", False),
        load_in_8bit=others.pop("load_in_8bit", False),
    )
    if config is None:
        return others
    if others.get("quantization_config") is not None:
        raise ConfigError(
            "load_in_4bit or load_in_8bit is given together with quantization_config, which also "
            "sets the precision. Pass only quantization_config."
        )
    return {**others, "quantization_config": config}


def _load_adapter(
    auto_class: Any,
    path: str | Path,
    arguments: Mapping[str, Any],
    hub: Mapping[str, Any],
    is_trainable: bool,
) -> nn.Module:
    require_package("peft", extra="peft", needed_by=f"The adapter '{path}'", kind=ModelError)
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(path), **hub)
    if not config.base_model_name_or_path:
        raise ModelError(
            f"The adapter '{path}' does not name its base model. Add the folder or hub id of the "
            'base to adapter_config.json as "base_model_name_or_path".'
        )
    # The arguments revision and subfolder locate the adapter, not the base.
    of_base = {k: v for k, v in arguments.items() if k not in ("revision", "subfolder")}
    if _find(path, _ADAPTER_WEIGHTS, **hub) is None:
        raise ModelError(
            f"The adapter '{path}' has no {_ADAPTER_WEIGHTS}. Other files are pickles, which can "
            "run code and are not read. Save the adapter with save_pretrained."
        )
    base = load_model(
        auto_class, config.base_model_name_or_path, {"revision": config.revision, **of_base}
    )
    return PeftModel.from_pretrained(
        base, str(path), config=config, is_trainable=is_trainable, **hub
    )


def _find(path: str | Path, name: str, **hub: Any) -> Path | None:
    """Return the path of a file of a folder or hub id, or None; download the file if needed."""
    found = cached_file(path, name, **hub, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _tensors_of_head(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as tensors:
        return {
            name.removeprefix(PREFIX): tensors.get_tensor(name)
            for name in tensors.keys()  # noqa: SIM118, `tensors` is not a dict
            if name.startswith(PREFIX)
        }


def _tensors_of_shards(path: str | Path, index: Path, **hub: Any) -> dict[str, Tensor]:
    shard_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
    shards = {shard for name, shard in shard_of.items() if name.startswith(PREFIX)}
    # transformers loads the shards later, and reports missing shards.
    files = [file for shard in sorted(shards) if (file := _find(path, shard, **hub))]
    return {name: tensor for file in files for name, tensor in _tensors_of_head(file).items()}


def _refuse_pickle(path: str | Path, **hub: Any) -> None:
    for name in PICKLES:
        if _find(path, name, **hub) is not None:
            raise pickled(path, name)
