"""Base models that bitsandbytes quantizes to 4 or 8 bits; only their adapters can be trained."""

import os
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from ppo_core.config.script_arguments import ModelArguments
from ppo_core.errors import ConfigError, ModelError
from ppo_core.errors.packages import require_package

QUANT_TYPES = ("nf4", "fp4")


def bitsandbytes_config(
    *,
    load_in_4bit: bool,
    load_in_8bit: bool,
    bnb_4bit_quant_type: str = "nf4",
    use_bnb_nested_quant: bool = False,
) -> BitsAndBytesConfig | None:
    """Return the `quantization_config` of `from_pretrained`, or None if nothing is quantized.

    Matmuls with 4-bit weights are computed in bfloat16 (QLoRA, arXiv:2305.14314), in float16 if the
    GPU does not support bfloat16, and in float32 without a GPU.

    Raises:
        ConfigError: both 4 and 8 bits are set, or `bnb_4bit_quant_type` is unknown.
        ModelError: bitsandbytes is not installed.
    """
    if load_in_4bit and load_in_8bit:
        raise ConfigError("load_in_4bit and load_in_8bit are both True. Set only one.")
    if bnb_4bit_quant_type not in QUANT_TYPES:
        raise ConfigError(
            f"bnb_4bit_quant_type={bnb_4bit_quant_type!r} must be one of {', '.join(QUANT_TYPES)}."
        )
    if not (load_in_4bit or load_in_8bit):
        return None
    setting = "load_in_4bit" if load_in_4bit else "load_in_8bit"
    require_package("bitsandbytes", extra="quantised", needed_by=setting, kind=ModelError)
    if load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=use_bnb_nested_quant,
        bnb_4bit_compute_dtype=_compute_dtype(),
    )


def get_quantization_config(model: ModelArguments) -> BitsAndBytesConfig | None:
    """Return the `bitsandbytes_config` for a model's settings."""
    return bitsandbytes_config(
        load_in_4bit=model.load_in_4bit,
        load_in_8bit=model.load_in_8bit,
        bnb_4bit_quant_type=model.bnb_4bit_quant_type,
        use_bnb_nested_quant=model.use_bnb_nested_quant,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Return the `device_map` that puts a quantized model on this process's GPU; None without GPUs.

    Launchers put the number of the GPU into the environment variable LOCAL_RANK.
    """
    return {"": int(os.environ.get("LOCAL_RANK", "0"))} if torch.cuda.is_available() else None


def _compute_dtype() -> torch.dtype:
    if not torch.cuda.is_available():
        return torch.float32
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    # float16 would need loss scaling, which is not implemented.
    return torch.bfloat16 if has_bf16 else torch.float32


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model, or the base of a PeftModel, is quantized by bitsandbytes."""
    # transformers sets these flags on the base; a PeftModel returns the attributes of its base.
    return any(getattr(model, flag, False) for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"))


def keep_differentiable(model: nn.Module) -> None:
    """Keep 4-bit weights on the CPU in the layout whose matmuls have gradients.

    On a CPU with AVX512-BF16 and in evaluation mode, bitsandbytes 0.50 repacks the weights for a
    matmul without gradients. PPO trains in evaluation mode, so gradients would be silently wrong.
    """
    layer: Any
    for layer in model.modules():
        if getattr(layer, "support_avx512bf16_for_cpu", False):
            layer.state_dict()  # restores weights that were repacked already
            layer.support_avx512bf16_for_cpu = False


def check_quantized_trainable(model: nn.Module) -> None:
    """Raise if a quantized model has no trainable adapter: quantized weights get no gradient.

    Raises:
        ModelError: the model is quantized and has no trainable adapter.
    """
    if not is_quantized(model):
        return
    # `requires_grad` does not prove that there is an adapter: norms and embeddings are not
    # quantized, so they may require gradients.
    if not getattr(model, "peft_config", None):
        raise ModelError(
            f"{type(model).__name__} is quantized and has no adapter, but quantized weights cannot "
            "be trained. Pass a peft_config (--use_peft), or load the model without load_in_4bit "
            "and load_in_8bit."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "The adapters on this quantized model are all frozen, so nothing would be trained. "
            "Load the adapter by PeftModel.from_pretrained(..., is_trainable=True)."
        )
