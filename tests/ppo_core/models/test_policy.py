"""Log-probabilities, entropies and losses against the plain transformers forward."""

import peft
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import Gemma2Config, Gemma2ForCausalLM, T5Config, T5ForConditionalGeneration

from ppo_core.errors import ModelError
from ppo_core.models import lm_head
from ppo_core.models.adapters import add_adapter, plain_model
from ppo_core.models.kernels import decoder_families
from ppo_core.models.policy import LanguageModel
from tests.architectures.zoo import small_model
from tests.helpers.models.rollouts import TEMPERATURE, make_rollout, row_of
from tests.helpers.models.tiny import CONFIGS, VOCABULARY, make_policy


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probabilities_entropies_and_gradients_are_those_of_the_plain_forward(
    family, monkeypatch
):
    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 3 * VOCABULARY)  # several chunks
    policy, rollout = make_policy(family).double(), make_rollout()
    logprobs, entropies = LanguageModel(policy)(rollout.token_rows(torch.arange(3)), TEMPERATURE)
    logprobs.sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters()}

    policy.zero_grad()
    expected, expected_entropies = [], []
    for b in range(3):
        row = torch.tensor(row_of(rollout, b))
        start = int(rollout.prompt_lengths[b])
        logits = policy(row[None]).logits[0, start - 1 : -1] / TEMPERATURE
        plain = torch.log_softmax(logits, -1)
        expected.append(plain[torch.arange(len(plain)), row[start:]])
        expected_entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    torch.cat(expected).sum().backward()

    assert_close(logprobs.double(), torch.cat(expected), rtol=0, atol=1e-6)
    assert_close(entropies.double(), torch.cat(expected_entropies), rtol=0, atol=1e-6)
    for name, parameter in policy.named_parameters():
        assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


CAPPED = Gemma2Config(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    final_logit_softcapping=2.0,
)


def gradients_of(policy: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("case", [*CONFIGS, "capped", "adapter"])
def test_a_loss_of_each_token_has_the_gradient_of_its_log_probabilities(case, monkeypatch):
    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 3 * VOCABULARY)  # several chunks
    if case == "capped":
        torch.manual_seed(0)
        policy = Gemma2ForCausalLM(CAPPED).eval()
    else:
        policy = make_policy("llama" if case == "adapter" else case)
    if case == "adapter":
        policy = add_adapter(policy, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
        torch.nn.init.normal_(policy.base_model.model.lm_head.lora_B["default"].weight)
    policy.double()
    model = LanguageModel(plain_model(policy) if case == "adapter" else policy)
    rows, targets = make_rollout().token_rows(torch.arange(3)), torch.randn(11).double()

    def of_tokens(logprobs: Tensor, part: slice) -> Tensor:
        return (logprobs - targets[part]) ** 2

    states = model.backbone.states(rows)
    loss, logprobs, entropies, _ = model.predict(states, rows, TEMPERATURE, of_tokens)
    fused = gradients_of(policy, 3 * loss)
    expected, expected_entropies = model(rows, TEMPERATURE)
    plain = gradients_of(policy, 3 * of_tokens(expected, slice(None)).sum())
    assert_close(logprobs, expected.detach(), rtol=0, atol=1e-12)
    assert_close(entropies, expected_entropies, rtol=0, atol=1e-12)
    assert fused.keys() == plain.keys()
    for name, gradient in plain.items():
        assert_close(fused[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_logits_of_one_chunk_are_all_that_exists(monkeypatch):
    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 4 * VOCABULARY)
    policy = LanguageModel(make_policy())
    widths = []
    policy.head.register_forward_hook(lambda _, __, product: widths.append(len(product)))
    policy(make_rollout().token_rows(torch.arange(3)), TEMPERATURE)
    assert widths == [4, 4, 3]


def test_a_head_that_caps_its_logits_is_followed():
    model = Gemma2ForCausalLM(CAPPED).eval()
    ids = torch.tensor([[5, 6, 7]])
    policy = LanguageModel(model)
    assert_close(policy.logits(policy.backbone.hidden_states(ids)[0]), model(ids).logits[0])


@pytest.mark.parametrize("name", ["recurrent_gemma", "aya_vision", "muse_glimmer"])
@torch.no_grad()
def test_caps_and_scales_are_those_that_the_model_applies(name):
    model = small_model(name)
    ids = torch.tensor([[5, 6, 7]])
    policy = LanguageModel(model)
    expected = model(input_ids=ids, use_cache=False).logits[0]
    assert_close(policy.logits(policy.backbone.hidden_states(ids)[0]), expected)


@pytest.mark.parametrize(
    "change",
    [lambda logits: logits * 3, lambda logits: 30 * torch.tanh(logits / 30)],
    ids=["scale", "cap far above the logits"],
)
def test_a_head_of_unknown_kind_is_refused_before_it_lies(change):
    model = make_policy()
    plain = model.forward

    def forward(**inputs):
        output = plain(**inputs)
        output.logits = change(output.logits)
        return output

    model.forward = forward
    with pytest.raises(ModelError, match="LlamaForCausalLM is not supported: its logits differ"):
        LanguageModel(model)


def test_an_encoder_decoder_that_does_not_tell_its_first_token_is_refused_in_one_sentence():
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=VOCABULARY)
    model = T5ForConditionalGeneration(config).eval()
    model.config.decoder_start_token_id = None
    message = (
        r"T5ForConditionalGeneration \(model type t5\) has an encoder beside its decoder, and "
    )
    with pytest.raises(ModelError, match=message + ".*does not set decoder_start_token_id, so"):
        LanguageModel(model)


@pytest.mark.parametrize("family", CONFIGS)
def test_half_precision_on_a_gpu_keeps_the_fast_path(family: str, monkeypatch: pytest.MonkeyPatch):
    # The fast path of a GPU, whose bfloat16 rounds differently from the model's own forward.
    monkeypatch.setattr(decoder_families, "_has_enough_bits", lambda _: True)
    policy = LanguageModel(make_policy(family).bfloat16())
    assert policy.backbone.module is policy.model.base_model
    assert policy.backbone.fast_layers() is not None
