"""The backend that decodes a model is the fastest whose log-probabilities are the model's own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    XLNetConfig,
)

from ppo_core.errors import ModelError
from ppo_core.models.backbones import Decoding
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.decoding_check import (
    DecodingCheck,
    OwnForward,
    check_padding,
    choose_backend,
    own_logprobs,
    sequences_of,
)
from ppo_core.rollout.sample_responses import SamplingCallbacks, sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings
from tests.architectures.zoo import small_model
from tests.helpers.models.tiny import EOS, PAD, VOCABULARY, make_policy, make_prompts

LENGTHS = [3, 9, 5, 9, 1, 3, 9]
TOKENS = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": 2}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}

BY_LENGTH: dict[str, PreTrainedConfig] = {
    "recurrent": MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=2, **TOKENS),
    "linear attention beside attention": Qwen3NextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **TOKENS,
    ),
    "positions that ignore the mask": BartConfig(
        d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, **TOKENS
    ),
}


def make(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config)(**config.to_dict())).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def chosen(policy: LanguageModel) -> DecodingCheck:
    return choose_backend(policy, OwnForward.of(policy, make_prompts([5])))


def test_each_way_to_compute_a_padded_batch_is_measured_once():
    policy, measured = LanguageModel(make_policy()), []
    policy.backbone.fastest = Decoding.PADDED

    def difference() -> float:
        measured.append(policy.backbone.passes_mask)
        return 1.0

    with pytest.raises(ModelError, match="is not supported"):
        check_padding("values", policy.model, policy.backbone, difference)
    assert measured == [False, True]


def sample(policy: LanguageModel, lengths=LENGTHS, *, pads=False, **callbacks):
    uniforms = torch.rand(len(lengths), 8, generator=torch.Generator().manual_seed(1))
    if pads:
        uniforms[::2, 2] = 0  # draws the first token of the vocabulary, the pad token
    return sample_responses(
        policy,
        make_prompts(lengths),
        uniforms,
        SamplingSettings(stop_token_id=EOS, temperature=1.0),
        batch_size=2,
        callbacks=SamplingCallbacks(**callbacks),
    )


def assert_own_logprobs(policy: LanguageModel, rollout) -> None:
    for b in range(len(rollout)):
        start, end = int(rollout.prompt_lengths[b]), int(rollout.row_lengths[b])
        tokens = rollout.token_rows(torch.tensor([b])).ids[0].tolist()
        with torch.no_grad():
            logprobs = own_logprobs(policy, tokens)
        expected = [logprobs[at - 1, tokens[at]].item() for at in range(start, end)]
        actual = rollout.logprobs[b, : end - start].tolist()
        assert actual == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_models_that_take_no_padded_prompts_are_decoded_by_prompt_length(kind):
    policy = LanguageModel(make(BY_LENGTH[kind]))
    rollout = sample(policy)
    assert policy.backbone.decoding is Decoding.BY_LENGTH
    assert_own_logprobs(policy, rollout)
    with torch.no_grad():
        together, _ = policy(rollout.token_rows(torch.arange(len(rollout))), 1.0)
    assert_close(together, rollout.logprobs[rollout.response_mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["kosmos-2.5", "roberta"])
def test_a_sampled_pad_token_has_no_position_where_the_model_gives_it_none(name):
    policy = LanguageModel(small_model(name))
    rollout = sample(policy, pads=True)
    assert policy.backbone.decoding is Decoding.COUNTING
    assert PAD in rollout.response_ids[rollout.response_mask]
    assert_own_logprobs(policy, rollout)


def test_a_window_over_the_response_alone_is_decoded_to_its_end_and_refused():
    policy = LanguageModel(small_model("unlimited_ocr"))
    with pytest.raises(ModelError, match=r"model type unlimited_ocr.*length .*\(difference 0\.\d"):
        sample(policy)


def test_a_model_without_a_number_of_layers_is_refused_in_one_sentence():
    policy = LanguageModel(small_model("blt"))
    with pytest.raises(ModelError, match=r"type blt has no num_hidden_layers"):
        sample(policy)


def test_a_head_with_further_layers_is_read_at_its_largest_matrix():
    policy = LanguageModel(
        make(BertConfig(is_decoder=True, intermediate_size=64, **SMALL, **TOKENS))
    )
    assert_own_logprobs(policy, sample(policy))


class TwoProcesses:
    """Threads that exchange a value each, and fail if they call for different reasons."""

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=30)
        self._calls = [("", False), ("", False)]

    def any(self, rank: int, reason: str, value: bool) -> bool:
        self._calls[rank] = reason, value
        self._barrier.wait()
        (one, first), (other, second) = self._calls
        self._barrier.wait()
        assert one == other
        return first or second


@pytest.mark.parametrize("requires_equal_passes", [False, True])
def test_processes_with_prompts_of_other_lengths_call_each_other_equally_often(
    requires_equal_passes,
):
    processes = TwoProcesses()

    def run(rank: int) -> None:
        policy = LanguageModel(make(BY_LENGTH["positions that ignore the mask"]))
        meeting = (
            {"any_active": partial(processes.any, rank, "active")} if requires_equal_passes else {}
        )
        before = partial(processes.any, rank, "batch", True)
        lengths = [LENGTHS, [4] * len(LENGTHS)][rank]
        assert_own_logprobs(policy, sample(policy, lengths, before_batch=before, **meeting))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def test_the_choice_is_explained():
    fast = chosen(LanguageModel(make_policy()))
    assert (fast.kind, fast.rejected) == (Decoding.FAST, ())
    mamba = chosen(LanguageModel(make(BY_LENGTH["recurrent"])))
    assert "MambaForCausalLM does not keep keys and values by sequence" in str(mamba)
    assert "decoded by the model's own cache" in str(mamba)


def test_an_encoder_is_refused_in_one_sentence():
    model = make(BertConfig(is_decoder=False, intermediate_size=64, **SMALL, **TOKENS))
    message = r"BertLMHeadModel \(model type bert\) is not causal .*does not set is_decoder=True"
    with pytest.raises(ModelError, match=message):
        chosen(LanguageModel(model))


def test_a_model_that_no_backend_decodes_is_refused_with_its_type_and_the_difference():
    policy = LanguageModel(make(XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, **TOKENS)))
    with pytest.raises(ModelError, match=r"XLNetLMHeadModel \(model type xlnet\).* \d"):
        sample(policy)


def test_sequences_are_of_the_prompts_tokens_and_different_lengths():
    prompts = make_prompts([3, 2])
    sequences = sequences_of(prompts)
    assert len({len(each) for each in sequences}) == len(sequences) == 3
    assert {token for each in sequences for token in each} <= {*prompts[0], *prompts[1]}
    assert sequences_of([[70]], vocabulary=VOCABULARY)[0][:3] == [0, 1, 0]
