"""4-bit and 8-bit bases: which combinations raise, and with which message."""

import pytest
import torch

from ppo_core.config.script_arguments import ModelArguments
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.adapters import add_adapter
from ppo_core.models.quantization import bitsandbytes_config, check_quantized_trainable
from ppo_core.training.cli import loading_options
from tests.helpers.models.tiny import make_policy

peft = pytest.importorskip("peft")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)


def quantised_policy():
    """Return a tiny policy with the flag that transformers' 4-bit quantizer sets."""
    policy = make_policy("qwen2")
    policy.is_loaded_in_4bit = True
    return policy


def test_nothing_is_quantised_unless_asked_for():
    assert bitsandbytes_config(load_in_4bit=False, load_in_8bit=False) is None


def test_both_precisions_at_once_are_refused():
    with pytest.raises(ConfigError, match="load_in_4bit and load_in_8bit"):
        bitsandbytes_config(load_in_4bit=True, load_in_8bit=True)


def test_an_unknown_type_of_4_bits_is_refused():
    with pytest.raises(ConfigError, match="'int4' must be one of nf4, fp4"):
        bitsandbytes_config(load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="int4")


def test_without_bitsandbytes_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("ppo_core.errors.packages.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'rlhf-flow\[quantised\]'"):
        bitsandbytes_config(load_in_4bit=True, load_in_8bit=False)


def test_4_bits_with_nested_constants_compute_in_what_the_gpu_has(gpu, monkeypatch):
    monkeypatch.setattr("ppo_core.errors.packages.find_spec", lambda name: name)
    config = bitsandbytes_config(load_in_4bit=True, load_in_8bit=False, use_bnb_nested_quant=True)
    assert (config.load_in_4bit, config.load_in_8bit) == (True, False)
    assert config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    config = bitsandbytes_config(load_in_4bit=True, load_in_8bit=False)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert not config.bnb_4bit_use_double_quant


def test_each_process_loads_its_quantized_base_onto_its_own_gpu(gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert loading_options(ModelArguments(use_peft=True, load_in_8bit=True))["device_map"] == {
        "": 1
    }
    assert "device_map" not in loading_options(ModelArguments())


def test_8_bits_are_asked_for_as_such(gpu, monkeypatch):
    monkeypatch.setattr("ppo_core.errors.packages.find_spec", lambda name: name)
    config = bitsandbytes_config(load_in_4bit=False, load_in_8bit=True)
    assert (config.load_in_4bit, config.load_in_8bit) == (False, True)


def test_a_quantised_base_is_trained_with_an_adapter_or_not_at_all():
    policy = quantised_policy()
    with pytest.raises(ModelError, match="quantized and has no adapter"):
        check_quantized_trainable(policy)
    adapted = add_adapter(policy, peft.LoraConfig(r=2))
    check_quantized_trainable(adapted)
    adapted.requires_grad_(False)
    with pytest.raises(ModelError, match="all frozen"):
        check_quantized_trainable(adapted)
    check_quantized_trainable(make_policy("qwen2"))
