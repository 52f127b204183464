"""Responses that are sampled by captured steps are those of steps that are not captured."""

from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from ppo_core.data.types import Rollout
from ppo_core.models.adapters import add_adapter
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout import fast_decoder
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings
from tests.helpers.models.tiny import EOS, make_policy, make_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def sampled(policy: LanguageModel, *, bf16: bool) -> Rollout:
    """Responses of different lengths, so that sequences are dropped and prompts are added."""
    uniforms = torch.rand(40, 48, generator=torch.Generator().manual_seed(3))
    settings = SamplingSettings(stop_token_id=EOS, temperature=3.0)
    prompts = make_prompts([3 + n % 7 for n in range(40)])
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        return sample_responses(policy, prompts, uniforms, settings, batch_size=16)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[torch.cuda.CUDAGraph]:
    """The graphs that are replayed, one entry for each time."""
    replay, found = torch.cuda.CUDAGraph.replay, []

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        found.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noted)
    return found


def launched(policy: LanguageModel, *, bf16: bool) -> Rollout:
    """The responses of steps whose kernels are launched one by one."""
    with patch.object(fast_decoder, "CapturedSteps", lambda *_: None):
        return sampled(policy, bf16=bf16)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2"])
def test_captured_steps_sample_the_same_responses(family: str, replays: list[torch.cuda.CUDAGraph]):
    policy = LanguageModel(make_policy(family).cuda())
    captured = sampled(policy, bf16=False)
    assert len(replays) > 50
    assert len(set(replays)) > 1  # fewer sequences at the end
    expected = launched(policy, bf16=False)
    assert expected.response_lengths.unique().numel() > 3
    assert torch.equal(captured.response_ids, expected.response_ids)
    assert_close(captured.logprobs, expected.logprobs, rtol=0, atol=1e-4)


def test_captured_steps_in_bf16_have_the_log_probabilities_of_bf16():
    policy = LanguageModel(make_policy().cuda())
    captured, expected = sampled(policy, bf16=True), launched(policy, bf16=True)
    same = (captured.response_ids == expected.response_ids).all(dim=1)
    assert same.float().mean() > 0.5
    assert_close(captured.logprobs[same], expected.logprobs[same], rtol=0, atol=5e-2)


def test_captured_steps_with_adapters_on_a_base_in_bf16(replays: list[torch.cuda.CUDAGraph]):
    adapted = add_adapter(make_policy("qwen2"), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "lora" not in name:
            parameter.data = parameter.data.bfloat16()
    policy = LanguageModel(adapted.get_base_model().cuda())
    captured = sampled(policy, bf16=True)
    assert len(replays) > 50
    expected = launched(policy, bf16=True)
    same = (captured.response_ids == expected.response_ids).all(dim=1)
    assert same.float().mean() > 0.5
    assert_close(captured.logprobs[same], expected.logprobs[same], rtol=0, atol=5e-2)


def test_each_phase_reads_the_weights_of_its_own_time():
    policy = LanguageModel(make_policy().cuda())
    before = sampled(policy, bf16=True)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.5)
    after, expected = sampled(policy, bf16=True), launched(policy, bf16=True)
    assert not torch.equal(after.response_ids, before.response_ids)
    same = (after.response_ids == expected.response_ids).all(dim=1)
    assert same.float().mean() > 0.5


@pytest.mark.parametrize("bf16", [False, True])
def test_shared_keys_are_read_by_fast_kernels(bf16: bool):
    """The other kernel stores all scores, and copies the keys in fp32."""
    policy = LanguageModel(make_policy("qwen2").cuda())
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        assert sampled(policy, bf16=bf16).response_lengths.max() > 1


def test_a_capture_that_finds_the_memory_full_changes_no_response():
    policy = LanguageModel(make_policy().cuda())
    expected = launched(policy, bf16=False)
    torch.cuda.empty_cache()
    filled = 256 * 2**20
    most = torch.cuda.memory_reserved() + filled
    torch.cuda.set_per_process_memory_fraction(most / torch.cuda.mem_get_info()[1])
    try:
        torch.empty(filled, dtype=torch.uint8, device="cuda")  # from now on, PyTorch caches it
        captured = sampled(policy, bf16=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(captured.response_ids, expected.response_ids)


def test_captures_of_one_rollout_after_the_other_keep_no_memory():
    policy = LanguageModel(make_policy().cuda())
    reserved = []
    for _ in range(6):
        sampled(policy, bf16=False)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]
