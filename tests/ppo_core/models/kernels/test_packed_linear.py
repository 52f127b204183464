"""Packed linear layers: equal outputs, and the model unchanged."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ppo_core.data.types import Rollout
from ppo_core.models.adapters import add_adapter
from ppo_core.models.kernels import packed_linear
from ppo_core.models.kernels.packed_linear import packed
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings
from tests.helpers.models.tiny import EOS, make_policy, make_prompts

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="a PyTorch without oneDNN"
)
needs_bf16 = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16", False), reason="no bfloat16 units"
)

MANY = packed_linear.MIN_PASSES


def packed_in(module: nn.Module) -> set[str]:
    """Names of the packed layers."""
    parts = module.named_modules()
    return {name for name, part in parts if isinstance(part, packed_linear._PackedLinear)}


def sampled(policy: LanguageModel) -> Rollout:
    """Responses of different lengths, so that later passes have fewer sequences."""
    uniforms = torch.rand(20, 40, generator=torch.Generator().manual_seed(3))
    settings = SamplingSettings(stop_token_id=EOS, temperature=3.0)
    prompts = make_prompts([3 + n % 7 for n in range(20)])
    return sample_responses(policy, prompts, uniforms, settings, batch_size=20)


ADAPTERS = {
    "adapted layers": peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]),
    "adapted weights": peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["self_attn.q_proj.weight"]
    ),
    "an adapted head": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
}


def make_model(kind: str) -> LanguageModel:
    if kind not in ADAPTERS:
        return LanguageModel(make_policy(kind))
    model = add_adapter(make_policy(), ADAPTERS[kind])
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(parameter)
    return LanguageModel(model.base_model.model)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "qwen2", *ADAPTERS])
def test_packed_models_sample_equal_responses(kind, monkeypatch):
    policy = make_model(kind)
    plain = sampled(policy)
    assert plain.response_lengths.unique().numel() > 3
    monkeypatch.setattr(packed_linear, "MIN_NUMEL", 0)
    returned = []

    def note(module: nn.Module, rows: int, passes: int) -> nn.Module:
        returned.append(packed(module, rows, passes))
        return returned[-1]

    monkeypatch.setattr("ppo_core.rollout.decoder.packed", note)
    monkeypatch.setattr("ppo_core.models.policy.packed", note)
    fast = sampled(policy)
    backbone, head = returned
    assert len(packed_in(backbone)) >= 2 * 4
    assert packed_in(head) == (set() if kind == "an adapted head" else {""})
    assert fast.response_ids.tolist() == plain.response_ids.tolist()
    assert_close(fast.logprobs, plain.logprobs, rtol=0, atol=1e-5)


@needs_bf16
def test_the_packed_head_stays_in_fp32_under_autocast(monkeypatch):
    monkeypatch.setattr(packed_linear, "MIN_NUMEL", 0)
    policy = LanguageModel(make_policy())
    states = torch.randn(20, 32)
    expected = policy.logits(states)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        fast = policy.logits_of_rows(20, MANY)
        assert fast != policy.logits
        assert_close(fast(states), expected, rtol=0, atol=1e-5)


def make_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 300), nn.ReLU(), nn.Linear(300, 8), nn.Dropout(0.5)).eval()


@pytest.mark.parametrize("rows", [1, 16, 33, 100])
def test_only_large_matrices_are_packed(rows):
    layers = make_layers()
    states = torch.randn(rows, 256)
    with torch.no_grad():
        fast = packed(layers, 32, MANY)
        assert_close(fast(states), layers(states), rtol=0, atol=1e-5)
        assert_close(fast(states[None])[0], layers(states), rtol=0, atol=1e-5)
    assert packed_in(fast) == {"0"} and packed_in(layers) == set()
    assert fast[2] is layers[2]
    assert type(fast) is type(layers) and not fast.training


@needs_bf16
def test_a_packed_matmul_under_autocast_equals_autocasts():
    layers = make_layers()
    states = torch.randn(32, 256)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        fast = packed(layers[0], 32, MANY)
        output = fast(states)
        expected = layers[0](states)
    assert packed_in(fast) == {""}
    assert output.dtype == expected.dtype == torch.bfloat16
    assert_close(output, expected, rtol=2**-7, atol=2**-7)


def add_a_hook(linear: nn.Linear) -> None:
    linear.register_forward_pre_hook(lambda *_: None)


def replace_forward(linear: Any) -> None:
    linear.forward = linear.forward


def make_fp64(linear: nn.Linear) -> None:
    linear.double()


@pytest.mark.parametrize("change", [add_a_hook, replace_forward, make_fp64])
def test_a_layer_with_hooks_or_another_precision_is_not_packed(change):
    layers = make_layers()
    change(layers[0])
    assert packed(layers, 32, MANY) is layers


def test_too_few_passes_or_too_large_modules_are_not_packed(monkeypatch):
    layers = make_layers()
    assert packed(layers, 32, packed_linear.MIN_PASSES - 1) is layers
    monkeypatch.setattr(packed_linear, "MAX_NUMEL", 256 * 300 - 1)
    assert packed(layers, 32, MANY) is layers


def test_sampling_leaves_the_policy_unpacked(monkeypatch):
    monkeypatch.setattr(packed_linear, "MIN_NUMEL", 0)
    model = make_policy()
    ids = torch.arange(3, 13)[None]

    def logits() -> Tensor:
        with torch.no_grad():
            return model(ids).logits

    before = logits()
    sampled(LanguageModel(model))
    assert packed_in(model) == set()
    assert_close(logits(), before, rtol=0, atol=0)
