"""Sampling: the right distribution, the right ends, nothing from the neighbours."""

from functools import partial

import pytest
import torch
from scipy.stats import chisquare
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from ppo_core.data.encode_prompts import encode_prompt, response_segments, response_text
from ppo_core.data.prompt_stream import PromptStream
from ppo_core.data.prompts import check_prompt_lengths
from ppo_core.data.segments import encode_sequence
from ppo_core.errors import DataError, ModelError, RunInterruptedError
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.decoder import can_add_prompts
from ppo_core.rollout.kv_cache import TransformersView
from ppo_core.rollout.sample_responses import SamplingCallbacks, sample_responses
from ppo_core.rollout.token_sampling import (
    BLOCK,
    NO_STOP_TOKEN,
    SamplingSettings,
    sample_tokens,
    stop_token,
)
from tests.helpers.models.tiny import CONFIGS, EOS, PAD, make_policy, make_prompts, make_tokenizer
from tests.helpers.slow_cases import slow

LENGTHS = [3, 9, 5, 12, 1, 7]


def sample(
    policy,
    prompts,
    *,
    stop=EOS,
    temperature=0.7,
    length=15,
    seed=0,
    batch_size=4,
    any_active=bool,
    on_finished=lambda _: None,
    before_batch=lambda: None,
    **cut,
):
    uniforms = torch.rand(len(prompts), length, generator=torch.Generator().manual_seed(seed))
    return sample_responses(
        policy,
        prompts,
        uniforms,
        SamplingSettings(stop_token_id=stop, temperature=temperature, **cut),
        batch_size=batch_size,
        callbacks=SamplingCallbacks(
            any_active=any_active, on_finished=on_finished, before_batch=before_batch
        ),
    )


def settings(temperature, **cut) -> SamplingSettings:
    return SamplingSettings(stop_token_id=EOS, temperature=temperature, **cut)


@pytest.mark.parametrize("family", CONFIGS)
def test_recorded_log_probabilities_are_those_of_a_training_pass(family):
    policy = LanguageModel(make_policy(family))
    rollout = sample(policy, make_prompts(LENGTHS))
    with torch.no_grad():
        expected, _ = policy(rollout.token_rows(torch.arange(len(rollout))), 0.7)
    assert_close(rollout.logprobs[rollout.response_mask], expected, rtol=0, atol=1e-5)
    assert (rollout.logprobs[~rollout.response_mask] == 0).all()


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_are_those_of_generate(family):
    model = make_policy(family)
    prompts = make_prompts(LENGTHS)
    rollout = sample(LanguageModel(model), prompts, temperature=0)
    for b, prompt in enumerate(prompts):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=15,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )[0, len(prompt) :]
        assert rollout.response_ids[b, : rollout.response_lengths[b]].tolist() == expected.tolist()


@pytest.mark.parametrize("tokens", [20, 2 * BLOCK, 300])
def test_tokens_are_drawn_as_often_as_their_probability_says(tokens):
    torch.manual_seed(0)
    logits, n = torch.randn(tokens), 20_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(1))
    drawn, logprobs, behavior = sample_tokens(logits.repeat(n, 1), uniforms, settings(0.7))
    assert behavior is logprobs
    probabilities = torch.softmax(logits / 0.7, -1)
    expected = (probabilities.double() / probabilities.double().sum() * n).numpy()
    assert chisquare(torch.bincount(drawn, minlength=tokens).numpy(), expected).pvalue > 0.001
    assert_close(logprobs, probabilities[drawn].log())


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_number():
    torch.manual_seed(0)
    logits = torch.randn(50, 3 * BLOCK + 7)
    uniforms = torch.cat([torch.rand(48), torch.tensor([0.0, 1 - 2**-24])])
    drawn, _, _ = sample_tokens(logits.clone(), uniforms, settings(1.0))
    exact = torch.softmax(logits.double(), -1).cumsum(-1)
    expected = torch.searchsorted(exact, uniforms.double()[:, None], right=True)[:, 0]
    assert drawn.tolist() == expected.tolist()


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    drawn, _, _ = sample_tokens(logits, torch.tensor([0.0, 0.5, 1 - 2**-24]), settings(1.0))
    assert drawn.tolist() == [1, 3, 3]


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.7}])
def test_restricted_sampling_draws_from_the_truncated_distribution_and_records_both(cut):
    torch.manual_seed(0)
    logits, n = torch.randn(20), 20_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(1))
    drawn, logprobs, behavior = sample_tokens(logits.repeat(n, 1), uniforms, settings(0.7, **cut))
    policy = torch.softmax(logits.double() / 0.7, -1)
    order = policy.argsort(descending=True)
    kept = order[: cut.get("top_k", 20)]
    inside = policy[kept] / policy[kept].sum()
    needed = int((inside.cumsum(0) < cut.get("top_p", 1.0)).sum()) + 1
    kept = kept[:needed]
    expected = torch.zeros(20, dtype=torch.float64)
    expected[kept] = policy[kept] / policy[kept].sum()
    counts = torch.bincount(drawn, minlength=20)
    assert counts[expected == 0].sum() == 0
    assert chisquare(counts[kept].numpy(), (expected[kept] * n).numpy()).pvalue > 0.001
    assert_close(logprobs, policy[drawn].log().float())
    assert_close(behavior, expected[drawn].log().float())


def test_a_restricted_rollout_records_both_log_probabilities():
    policy, prompts = LanguageModel(make_policy()), make_prompts(LENGTHS)
    plain, cut = sample(policy, prompts), sample(policy, prompts, top_k=3)
    assert plain.behavior_logprobs is None
    mask = cut.response_mask
    assert (cut.behavior_logprobs[mask] > cut.logprobs[mask]).all()
    with torch.no_grad():
        expected, _ = policy(cut.token_rows(torch.arange(len(cut))), 0.7)
    assert_close(cut.logprobs[mask], expected, rtol=0, atol=1e-5)


def test_a_response_does_not_depend_on_neighbours_order_or_batch_size():
    policy, prompts = LanguageModel(make_policy()), make_prompts(LENGTHS)
    together = sample(policy, prompts)
    uniforms = torch.rand(len(prompts), 15, generator=torch.Generator().manual_seed(0))
    for b, prompt in enumerate(prompts):
        alone = sample_responses(
            policy,
            [prompt],
            uniforms[b : b + 1],
            settings(0.7),
            batch_size=1,
        )
        assert alone.response_ids[0].tolist() == together.response_ids[b].tolist()
        assert_close(alone.logprobs[0], together.logprobs[b], rtol=0, atol=1e-5)


def test_a_response_ends_with_its_first_stop_token_or_at_the_length():
    rollout = sample(LanguageModel(make_policy()), make_prompts([4] * 40), stop=9, length=30)
    assert 0 < rollout.has_stop.sum() < 40
    for ids, length, stopped in zip(
        rollout.response_ids.tolist(),
        rollout.response_lengths.tolist(),
        rollout.has_stop.tolist(),
        strict=True,
    ):
        counted, rest = ids[:length], ids[length:]
        assert 9 not in counted[:-1]
        assert (counted[-1] == 9) == stopped
        assert stopped or length == 30
        assert not any(rest)


def test_a_sampled_pad_token_counts_like_any_other():
    rollout = sample(LanguageModel(make_policy()), make_prompts([4] * 60), length=30)
    counted = rollout.response_ids[rollout.response_mask]
    assert (counted == PAD).any()
    is_pad = rollout.response_ids[:, :-1] == PAD
    assert (is_pad & rollout.response_mask[:, 1:]).any()


def test_an_end_token_in_the_prompt_ends_nothing():
    prompts = [[EOS, 5, EOS, 6], [7, EOS]]
    rollout = sample(LanguageModel(make_policy()), prompts, stop=EOS)
    assert (rollout.response_lengths > 1).all()


def test_the_whole_batch_may_stop_at_once():
    prompts = make_prompts([3, 3])
    policy = LanguageModel(make_policy())
    first = sample(policy, prompts, temperature=0, length=1).response_ids[0, 0].item()
    rollout = sample(policy, prompts[:1], temperature=0, stop=first)
    assert rollout.response_lengths.tolist() == [1]
    assert rollout.has_stop.tolist() == [True]


def by_transformers(policy: PreTrainedModel) -> PreTrainedModel:
    """Return the policy with a hook, so that the forward passes are those of transformers."""
    policy.base_model.register_forward_pre_hook(lambda *_: None)
    return policy


def with_a_window() -> PreTrainedModel:
    """Return a policy with a sliding window of four positions."""
    torch.manual_seed(0)
    like = CONFIGS["llama"].to_dict()
    config = MistralConfig(**{name: like[name] for name in LIKE_LLAMA}, sliding_window=4)
    return AutoModelForCausalLM.from_config(config).eval()


LIKE_LLAMA = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads max_position_embeddings"
).split()
POLICIES = {
    **{family: partial(make_policy, family) for family in CONFIGS},
    "by transformers": lambda: by_transformers(make_policy()),
    "with a window": with_a_window,
}


@pytest.mark.parametrize("batch_size", [4, *slow(9)])
@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_continuous_batching_samples_the_same_responses_as_batches(make, batch_size):
    policy, prompts = LanguageModel(make()), make_prompts([1, 9, 5, 12, 3, 7, 2] * 5)
    drawn = partial(sample, policy, prompts, stop=9, length=30, batch_size=batch_size)
    numbers: list[int] = []
    continuous = drawn(any_active=None, on_finished=numbers.append)
    in_batches = drawn(any_active=bool)
    assert 0 < continuous.has_stop.sum() < len(prompts)
    assert continuous.response_ids.tolist() == in_batches.response_ids.tolist()
    assert continuous.response_lengths.tolist() == in_batches.response_lengths.tolist()
    assert continuous.has_stop.tolist() == in_batches.has_stop.tolist()
    assert_close(continuous.logprobs, in_batches.logprobs, rtol=0, atol=1e-5)
    assert sum(numbers) == len(prompts)


@pytest.mark.parametrize("make", [make_policy, lambda: by_transformers(make_policy())])
def test_prompts_replace_finished_responses(make):
    policy, prompts = LanguageModel(make()), make_prompts([4] * 40)
    passes: list[int] = []
    embedding = policy.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, inputs, out: passes.append(out.shape[1] == 1))
    sample(policy, prompts, stop=15, length=30, any_active=bool)
    in_batches = sum(passes)
    passes.clear()
    lengths = sample(policy, prompts, stop=15, length=30, any_active=None).response_lengths
    # Four at a time; finished ones stay until enough of them can be dropped together.
    assert sum(passes) < 0.8 * in_batches
    assert sum(passes) >= (lengths.sum() - len(lengths)) / 4


def of_64_columns() -> PreTrainedModel:
    """Return a GPT-Neo, which reads its causal mask from a table of 64 x 64 columns."""
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=CONFIGS["gpt2"].vocab_size,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global"], 2]],
        max_position_embeddings=64,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
@pytest.mark.parametrize(
    "make",
    [lambda: make_policy("gpt2"), lambda: by_transformers(make_policy("gpt2")), of_64_columns],
    ids=["64 positions", "64 positions by transformers", "64 columns"],
)
def test_positions_and_columns_stay_within_the_context(make, seed):
    policy, prompts = LanguageModel(make()), make_prompts([20] * 6 + [2] * 20)
    drawn = partial(sample, policy, prompts, stop=9, length=44, seed=seed)
    continuous = drawn(any_active=None)
    assert (continuous.response_lengths == 44).any()
    assert continuous.has_stop.any()
    assert continuous.response_ids.tolist() == drawn(any_active=bool).response_ids.tolist()


def test_memory_is_reserved_once():
    policy = LanguageModel(by_transformers(make_policy()))
    policy.backbone.is_checked = True
    reserved: set[int] = set()

    def remember(module: object, inputs: object, output: BaseModelOutputWithPast) -> None:
        if isinstance(cache := output.past_key_values, TransformersView):
            reserved.update(layer.keys.untyped_storage().data_ptr() for layer in cache.layers)

    policy.backbone.module.register_forward_hook(remember)
    sample(policy, make_prompts([12] * 4 + [5] * 12), stop=15, length=20, any_active=None)
    assert len(reserved) == 2  # the keys of each layer


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, False),
    ],
)
def test_prompts_can_be_added_unless_rotary_angles_depend_on_other_sequences(changes, expected):
    like = CONFIGS["llama"].to_dict()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**like, **changes})).eval()
    policy = LanguageModel(model)
    assert can_add_prompts(policy, policy.backbone) == expected


@pytest.mark.parametrize("stop", [EOS, 9, 15])
@pytest.mark.parametrize("any_active", [None, bool], ids=["continuous", "in batches"])
def test_before_batch_is_called_once_for_each_batch_whenever_responses_end(stop, any_active):
    """Processes wait for each other in `before_batch`, so they must call it equally often."""
    asked: list[int] = []
    policy, prompts = LanguageModel(make_policy()), make_prompts([4] * 22)
    sample(policy, prompts, stop=stop, any_active=any_active, before_batch=lambda: asked.append(1))
    assert len(asked) == 6


def test_before_batch_may_raise_before_further_prompts_are_read():
    asked: list[int] = []

    def interrupt() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise RunInterruptedError("Stop.")

    with pytest.raises(RunInterruptedError):
        sample(
            LanguageModel(make_policy()),
            make_prompts([4] * 22),
            any_active=None,
            before_batch=interrupt,
        )


@pytest.mark.parametrize("passes", [1, 12, 20], ids=["sooner", "later", "at the length"])
def test_passes_continue_until_no_process_has_an_active_response_and_change_nothing(passes):
    policy, prompts = LanguageModel(make_policy()), make_prompts([4, 2])
    made, told = [], []
    policy.backbone.module.register_forward_hook(lambda *call: made.append(1))
    alone = sample(policy, prompts, stop=9, length=20, seed=17)
    assert alone.response_lengths.tolist() == [4, 9]
    made.clear()

    def any_active(here: bool) -> bool:
        """Return whether any process is active: the others need `passes` passes."""
        told.append(here)
        return here or len(told) < passes

    together = sample(policy, prompts, stop=9, length=20, seed=17, any_active=any_active)
    assert len(made) == max(9, passes)
    assert len(told) == len(made)
    assert told == [True] * 8 + [False] * (len(told) - 8)
    for name in ("response_ids", "response_lengths", "has_stop", "logprobs"):
        assert torch.equal(getattr(together, name), getattr(alone, name)), name


def test_the_stop_token_is_the_one_that_is_set_else_the_end_of_sequence():
    tokenizer = make_tokenizer()
    assert stop_token(tokenizer, "eos", None) == EOS
    assert stop_token(tokenizer, "eos", 7) == 7
    assert stop_token(tokenizer, None, None) == NO_STOP_TOKEN
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="Set stop_token_id"):
        stop_token(tokenizer, "eos", None)


def test_prompts_keep_their_start_token_and_lose_an_end_token():
    tokenizer = make_tokenizer()
    assert encode_prompt(tokenizer, "w0 w1") == [3, 4]
    assert encode_sequence(tokenizer, response_segments(tokenizer, "w0", end=True)) == [3, EOS]
    assert encode_sequence(tokenizer, response_segments(tokenizer, "w0", end=False)) == [3]
    tokenizer.backend_tokenizer.post_processor = ends_everything()
    assert tokenizer("w0")["input_ids"] == [3, EOS]
    assert encode_prompt(tokenizer, "w0 w1") == [3, 4]
    assert encode_prompt(tokenizer, "w0 <eos>") == [3, EOS, EOS]


def ends_everything():
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])


def test_text_is_what_the_response_adds_to_its_prompt():
    tokenizer = make_tokenizer()
    assert response_text(tokenizer, [3, 4], [5, EOS]) == " w2"
    assert response_text(tokenizer, [3, 4], [EOS]) == ""


def test_every_pass_shows_every_prompt_once_in_a_new_order():
    stream = PromptStream(7, seed=5)
    rows = [row for _ in range(7) for row in stream.next_batch(4)]
    passes = [rows[i : i + 7] for i in range(0, 28, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert passes[0] != passes[1]
    assert PromptStream(7, seed=5).next_batch(28) == rows
    assert PromptStream(7, seed=6).next_batch(28) != rows


def test_prompts_that_leave_no_room_are_refused_with_their_row():
    prompts = make_prompts([3, 11, 4])
    check_prompt_lengths(prompts, context=16, response_length=5)
    check_prompt_lengths(prompts, context=None, response_length=5)
    with pytest.raises(DataError, match=r"1 of 3 prompts are longer than 10 .*row 1, has 11"):
        check_prompt_lengths(prompts, context=16, response_length=6)
    with pytest.raises(DataError, match="row 1"):
        check_prompt_lengths([[3], []], context=16, response_length=6)
    with pytest.raises(DataError, match="no prompts"):
        check_prompt_lengths([], context=16, response_length=6)
