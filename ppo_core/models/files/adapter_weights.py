"""Save and load the weights of one adapter."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ppo_core.errors import ModelError
from ppo_core.models.adapters import check_adapter

if TYPE_CHECKING:
    from peft import PeftModel


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
