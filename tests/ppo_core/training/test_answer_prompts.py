"""Answers of a policy: the training's own sampler, and the distance from a reference."""

import math

import pytest
import torch

from ppo_core.errors import ConfigError, DataError
from ppo_core.models.policy import LanguageModel
from ppo_core.training.answer_prompts import answer_prompts
from tests.helpers.models.tiny import make_policy, make_tokenizer

PROMPTS = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w10"]
SAMPLING = {"response_length": 12, "temperature": 0.7, "seed": 3, "stop_token_id": 9}


def answer(model, **changes):
    return answer_prompts(model, make_tokenizer(), PROMPTS, **{**SAMPLING, **changes})


def test_the_same_seed_gives_the_same_texts_in_batches_of_any_size():
    texts = answer(make_policy()).texts
    assert texts == answer(make_policy(), batch_size=1).texts
    assert texts != answer(make_policy(), seed=4).texts
    assert len(set(texts)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("w1 " * 60, "longer than 52 tokens, the context of 64 minus"), ("", "have no token")],
    ids=["too long", "empty"],
)
def test_a_prompt_that_cannot_be_answered_is_refused(prompt, words):
    with pytest.raises(DataError, match=words):
        answer_prompts(make_policy("gpt2"), make_tokenizer(), ["w1", prompt], **SAMPLING)


def test_a_text_in_place_of_a_list_of_prompts_is_refused():
    with pytest.raises(DataError, match="prompts='w1 w2' is a single text"):
        answer_prompts(make_policy(), make_tokenizer(), "w1 w2", **SAMPLING)


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_a_temperature_that_no_distribution_has_is_refused(temperature):
    with pytest.raises(ConfigError, match=f"temperature={temperature} must be"):
        answer(make_policy(), temperature=temperature)


def test_no_prompts_have_no_answers():
    answers = answer_prompts(make_policy(), make_tokenizer(), [], **SAMPLING)
    assert (answers.texts, answers.kl, answers.stopped) == ([], None, [])


def test_a_response_has_stopped_if_its_last_token_is_the_stop_token():
    answers = answer(make_policy(), stop_token_id=None, stop=None, temperature=0)
    assert answers.stopped is None
    # Greedy responses repeat a token, which is the first one here.
    token = make_tokenizer()(answers.texts[0].split()[0])["input_ids"][0]
    stopped = answer(make_policy(), stop_token_id=token, temperature=0)
    assert stopped.texts[0] == ""
    assert stopped.stopped == [token_text_stops(text, answers.texts[0]) for text in answers.texts]


def token_text_stops(text: str, stop: str) -> bool:
    return stop.split()[0] in text.split()


def test_greedy_texts_depend_on_no_seed():
    greedy = answer(make_policy(), temperature=0)
    assert greedy.texts == answer(make_policy(), temperature=0, seed=9).texts
    assert greedy.kl is None


def test_the_distance_of_greedy_texts_is_what_the_reference_says_of_their_tokens():
    policy = make_policy()
    found = answer(
        policy,
        temperature=0,
        stop_token_id=None,
        stop=None,
        load_reference=lambda: policy,
        reference_temperature=0.7,
    )
    logprobs = []
    for prompt in PROMPTS:
        ids = make_tokenizer()(prompt, return_tensors="pt")["input_ids"]
        for _ in range(12):
            logits = LanguageModel(policy).model(ids).logits[0, -1].detach()
            logprobs.append(torch.log_softmax(logits / 0.7, -1).max().item())
            ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    assert found.kl == pytest.approx(-sum(logprobs) / len(PROMPTS), rel=1e-4)


def test_the_divergence_from_itself_is_nothing():
    policy = make_policy()
    assert answer(policy, load_reference=lambda: policy).kl == pytest.approx(0, abs=1e-5)


def test_restricted_sampling_takes_likely_tokens_only_and_measures_no_divergence():
    policy = make_policy()
    greedy = answer(policy, temperature=0).texts
    likeliest = answer(policy, top_k=1, load_reference=lambda: make_policy(seed=5))
    assert likeliest.texts == greedy
    assert likeliest.kl is None
    assert answer(policy, top_p=1e-6).texts == greedy
    assert answer(policy).texts != greedy
