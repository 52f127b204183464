"""The sampling helpers of the classic loop."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.model_with_value_head import AutoModelForCausalLMWithValueHead
from ppo_core.trl.classic.sampling import LengthSampler, respond_to_batch
from tests.helpers.models.families import make_inputs, make_model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_likeliest_token_alone_is_greedy_generation():
    model, queries = make_model("gpt2"), make_inputs("gpt2")["input_ids"]
    model.generation_config.eos_token_id = None
    expected = model.generate(
        queries, attention_mask=torch.ones_like(queries), max_new_tokens=6, do_sample=False
    )[:, 5:]
    assert torch.equal(respond_to_batch(model, queries, 6, top_k=1), expected)
    assert torch.equal(respond_to_batch(model, queries, 6, top_p=1e-6), expected)


@torch.no_grad()
def test_tokens_are_drawn_as_often_as_they_are_likely():
    model = make_model("gpt2")
    query = make_inputs("gpt2")["input_ids"][1:]
    probabilities = model(query).logits[0, -1].double().softmax(dim=-1)
    draws = 4000
    drawn = respond_to_batch(model, query.expand(draws, -1), 1, generator=seeded())[:, 0]
    counts = torch.bincount(drawn, minlength=len(probabilities))
    assert chisquare(counts, probabilities * draws, sum_check=False).pvalue > 1e-3


@torch.no_grad()
def test_tokens_outside_the_top_k_are_never_drawn():
    model = make_model("gpt2")
    query = make_inputs("gpt2")["input_ids"][1:]
    likeliest = model(query).logits[0, -1].topk(3).indices
    drawn = respond_to_batch(model, query.expand(500, -1), 1, top_k=3, generator=seeded())
    assert set(drawn[:, 0].tolist()) == set(likeliest.tolist())


def test_a_value_head_changes_nothing_and_no_graph_is_kept():
    plain, queries = make_model("gpt2"), make_inputs("gpt2")["input_ids"]
    model = AutoModelForCausalLMWithValueHead(make_model("gpt2")).eval()
    expected = respond_to_batch(plain, queries, generator=seeded(1))
    assert expected.shape == (2, 20)
    assert torch.equal(respond_to_batch(model, queries, generator=seeded(1)), expected)
    assert not torch.equal(respond_to_batch(model, queries, generator=seeded(2)), expected)


def test_a_length_of_0_returns_no_tokens():
    queries = make_inputs("gpt2")["input_ids"]
    assert respond_to_batch(make_model("gpt2"), queries, 0).shape == (2, 0)


def test_an_encoder_is_refused():
    with pytest.raises(ModelError, match="T5"):
        respond_to_batch(make_model("t5"), make_inputs("t5")["input_ids"])


def test_lengths_are_drawn_evenly_and_never_the_upper_bound():
    sampler = LengthSampler(2, 6, generator=seeded())
    counts = Counter(sampler() for _ in range(2000))
    assert set(counts) == {2, 3, 4, 5}
    assert chisquare(list(counts.values())).pvalue > 1e-3
    assert isinstance(sampler(), int)


def test_a_generator_makes_lengths_repeat():
    first, second = (LengthSampler(1, 100, generator=seeded()) for _ in range(2))
    assert [first() for _ in range(5)] == [second() for _ in range(5)]


@pytest.mark.parametrize("bounds", [(0, 3), (4, 4), (5, 4)])
def test_bounds_without_a_length_between_them_are_refused(bounds: tuple[int, int]):
    with pytest.raises(ConfigError, match="min_value"):
        LengthSampler(*bounds)
