"""Find weights that are not finite before a model is used."""

from pathlib import Path

import torch
from safetensors import safe_open

from ppo_core.errors import ModelError


def require_finite_weights(path: str | Path) -> None:
    """Raise if a weight in the safetensors files of a local folder is not finite.

    The tensors are read one at a time. The check skips the weights of a hub id, 0-dimensional
    tensors, and tensors with less than two bytes per element.

    Raises:
        ModelError: a weight is NaN or infinite; the message names the file and the tensor.
    """
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                tensor = tensors.get_tensor(name)
                # A 0-dimensional tensor may be a masking constant, which fp16 stores as infinity.
                is_weight = tensor.is_floating_point() and tensor.ndim > 0
                if not is_weight or tensor.element_size() < 2:
                    continue
                if broken := tensor.numel() - int(torch.isfinite(tensor).sum()):
                    raise ModelError(
                        f"{broken:,} of {tensor.numel():,} weights of '{name}' in '{file}' are not "
                        "finite, so all that the model computes would be NaN. Take an earlier "
                        "checkpoint, or train the model again with a lower learning rate or in "
                        "fp32."
                    )
