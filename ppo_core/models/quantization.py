"""Base models in 4 or 8 bits: loaded by bitsandbytes, trained through adapters alone."""

from importlib.util import find_spec

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from ppo_core.errors import ConfigError, ModelError

QUANT_TYPES = ("nf4", "fp4")


def bitsandbytes_config(
    *,
    load_in_4bit: bool,
    load_in_8bit: bool,
    bnb_4bit_quant_type: str = "nf4",
    use_bnb_nested_quant: bool = False,
) -> BitsAndBytesConfig | None:
    """What `from_pretrained(quantization_config=...)` takes, or None where nothing is quantized.

    Products of 4-bit weights are computed in bfloat16, or in float16 where the GPU has no
    bfloat16 (QLoRA, arXiv:2305.14314).

    Raises:
        ConfigError: 4 and 8 bits are both asked for, or the type of the 4 bits is unknown.
        ModelError: there is no CUDA GPU, or bitsandbytes is not installed.
    """
    if load_in_4bit and load_in_8bit:
        raise ConfigError(
            "load_in_4bit and load_in_8bit are both True, and weights have one precision. Set one."
        )
    if bnb_4bit_quant_type not in QUANT_TYPES:
        raise ConfigError(
            f"bnb_4bit_quant_type={bnb_4bit_quant_type!r} must be one of {', '.join(QUANT_TYPES)}."
        )
    if not (load_in_4bit or load_in_8bit):
        return None
    _check_machine("load_in_4bit" if load_in_4bit else "load_in_8bit")
    if load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=use_bnb_nested_quant,
        bnb_4bit_compute_dtype=torch.bfloat16 if has_bf16 else torch.float16,
    )


def _check_machine(setting: str) -> None:
    if not torch.cuda.is_available():
        raise ModelError(
            f"{setting} needs a CUDA GPU, and torch sees none. Run on a machine with a GPU and a "
            f"CUDA build of torch, or leave {setting} out: an adapter trains on a base in full "
            "precision, too."
        )
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"{setting} needs the package bitsandbytes: pip install 'rlhf-flow[quantised]'."
        )


def is_quantized(model: nn.Module) -> bool:
    """Whether bitsandbytes holds the weights of a model, or of the base of a PeftModel."""
    # Set by the quantizers of transformers; a PeftModel hands on what its base has.
    return any(getattr(model, flag, False) for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"))


def check_quantized_trainable(model: nn.Module) -> None:
    """Refuse to train quantized weights, which have no gradient: only an adapter on them learns.

    Raises:
        ModelError: the model is quantized, and no trainable adapter is on it.
    """
    if not is_quantized(model):
        return
    # Its norms and embeddings are not quantized and may ask for gradients: they are no adapter.
    if not getattr(model, "peft_config", None):
        raise ModelError(
            f"{type(model).__name__} is quantized and has no adapter: its weights cannot be "
            "trained. Hand over a peft_config (--use_peft), or load it without load_in_4bit and "
            "load_in_8bit."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "The adapters on this quantized model are all frozen: nothing would learn. Load the "
            "one to train with PeftModel.from_pretrained(..., is_trainable=True)."
        )
