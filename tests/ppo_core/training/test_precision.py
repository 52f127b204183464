"""Which precision a training takes by itself."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_core.config import placement
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.models.policy import LanguageModel
from ppo_core.training.model_setup import join_processes, trains_in_bf16
from tests.helpers.models.tiny import make_policy


def policy_of_width(width: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("width", [192, 128])
def test_bfloat16_is_taken_where_the_machine_has_it_and_the_policy_is_wide(
    width, has_units, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_units})
    policy = policy_of_width(width)
    assert trains_in_bf16(None, policy, use_cpu=True) == (has_units and width == 192)
    for asked in (True, False):
        assert trains_in_bf16(asked, policy, use_cpu=True) == asked


def test_weights_of_another_precision_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(placement, "SMALLEST_WIDTH", 8)
    assert trains_in_bf16(None, make_policy(), use_cpu=True)
    assert not trains_in_bf16(None, make_policy().double(), use_cpu=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_policy_in_half_precision_is_trained_under_autocast_unless_it_is_the_base_of_an_adapter(
    dtype, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(placement, "SMALLEST_WIDTH", 8)
    policy, config = make_policy().to(dtype), peft.LoraConfig(target_modules=["q_proj"])
    assert trains_in_bf16(None, policy, use_cpu=True)
    assert not trains_in_bf16(None, policy, use_cpu=True, adds_adapter=True)
    assert trains_in_bf16(None, make_policy(), use_cpu=True, adds_adapter=True)
    adapted = peft.get_peft_model(policy, config)
    assert not trains_in_bf16(None, adapted, use_cpu=True)
    assert trains_in_bf16(None, peft.get_peft_model(make_policy(), config), use_cpu=True)


def test_bfloat16_of_the_launcher_is_recorded_and_contradicts_only_an_explicit_false(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = PPOConfig(total_episodes=8, batch_size=4, stop_token_id=9, use_cpu=True)
    joined, engine = join_processes(config, make_policy())
    assert joined.bf16 and engine.computes_in_bf16
    with pytest.raises(ConfigError, match=r"bf16=False and mixed_precision: bf16 of accelerate"):
        join_processes(replace(config, bf16=False), make_policy())


def test_the_products_of_a_bfloat16_policy_are_of_log_probabilities_in_fp32():
    policy = LanguageModel(make_policy())
    states = torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(policy.head(states).float(), policy.logits(states))
        inside = policy.logits(states)
    assert torch.equal(inside, policy.logits(states))
