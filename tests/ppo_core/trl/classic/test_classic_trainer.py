"""The classic loop: one step against plain autograd, and every argument of TRL's scripts."""

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, HfArgumentParser

from ppo_core.classic import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
)
from ppo_core.config.ppo_config import PPOConfig as UpdateConfig
from ppo_core.errors import ConfigError, DataError, ModelError, TrainingError
from ppo_core.trl.classic.classic_config import CLASSIC_INSTEAD, CLASSIC_NO_EFFECT
from ppo_core.trl.classic.generation import generate_responses
from tests.helpers.models.families import make_model
from tests.helpers.models.tiny import EOS, PAD, make_policy, make_prompts, make_tokenizer
from tests.helpers.runs.forked_python import run_python
from tests.ppo_core.config.test_unsupported_settings import TRL_0_11

CONFIG = PPOConfig(
    batch_size=6, mini_batch_size=6, ppo_epochs=1, learning_rate=1e-3, ratio_threshold=1e9
)
QUERIES = [torch.tensor(row) for row in make_prompts([3, 5, 1, 4, 2, 3])]
RESPONSES = [torch.tensor(row) for row in make_prompts([4, 2, 5, 1, 3, 5], seed=1)]
SCORES = [0.3, -1.0, 2.0, 0.5, 1.5, -0.2]
FAMILIES = ("gpt2", "t5")


def with_head(family: str = "gpt2", *, seed: int = 0, **details):
    encoder_decoder = family in ("t5", "bart")
    kind = (
        AutoModelForSeq2SeqLMWithValueHead if encoder_decoder else AutoModelForCausalLMWithValueHead
    )
    model = kind.from_pretrained(make_model(family, seed=seed), **details)
    torch.manual_seed(7)
    torch.nn.init.normal_(model.v_head.summary.weight, std=0.2)
    return model.eval()


def make_trainer(config: PPOConfig = CONFIG, *, family: str = "gpt2", **changes) -> PPOTrainer:
    parts = {"model": with_head(family), "ref_model": with_head(family, seed=1), **changes}
    return PPOTrainer(config, tokenizer=make_tokenizer(), **parts)


def step(trainer: PPOTrainer, *, responses=RESPONSES, scores=SCORES, masks=None):
    return trainer.step(QUERIES, responses, [torch.tensor(score) for score in scores], masks)


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def changed(config: PPOConfig = CONFIG, **changes) -> PPOConfig:
    return dataclasses.replace(config, **changes)


# --- A plain step: one sequence at a time, the model's own forward pass, autograd ---


def read(model, query, response):
    """Logits (T, V) and values (T,) at the positions that predict a response."""
    if model.config.is_encoder_decoder:
        start = torch.tensor([model.config.decoder_start_token_id])
        before = torch.cat([start, response[:-1]])[None]
        logits, _, values = model(input_ids=query[None], decoder_input_ids=before)
        return logits[0], values[0]
    logits, _, values = model(input_ids=torch.cat([query, response])[None])
    return logits[0, len(query) - 1 : -1], values[0, len(query) - 1 : -1]


def read_all(model, responses, temperature=1.0):
    """Logits, log-probabilities and values of all responses, concatenated."""
    rows = [read(model, *row) for row in zip(QUERIES, responses, strict=True)]
    logits = torch.cat([row[0] for row in rows]) / temperature
    chosen = torch.cat(list(responses))
    logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    return logits, logprobs, torch.cat([row[1] for row in rows])


def plain_penalty(kind, logits, ref_logits, difference):
    if kind == "full":
        p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)
    return {"kl": difference, "abs": difference.abs(), "mse": 0.5 * difference**2}[kind]


def plain_step(config: PPOConfig, model, reference, *, responses=RESPONSES, scores=SCORES):
    """Take `ppo_epochs` steps of SGD on the full batch; return the statistics by name."""
    with torch.no_grad():
        logits, old, old_values = read_all(model, responses, config.temperature)
        ref_logits, ref, _ = read_all(reference, responses, config.temperature)
    kl = plain_penalty(config.kl_penalty, logits, ref_logits, old - ref)
    advantages, returns = [], []
    lengths = [len(response) for response in responses]
    for row_kl, row_values, score in zip(
        kl.split(lengths), old_values.split(lengths), scores, strict=True
    ):
        following = next_value = 0.0
        of_row = []
        for t in reversed(range(len(row_kl))):
            reward = -config.init_kl_coef * row_kl[t] + (score if t == len(row_kl) - 1 else 0)
            delta = reward + config.gamma * next_value - row_values[t]
            following = delta + config.gamma * config.lam * following
            next_value = row_values[t]
            of_row.insert(0, following)
        advantages += of_row
        returns += [a + v for a, v in zip(of_row, row_values, strict=True)]
    advantages, returns = torch.stack(advantages), torch.stack(returns)
    advantages = (advantages - advantages.mean()) / advantages.std()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    policy_losses, value_losses = [], []
    for _ in range(config.ppo_epochs):
        _, logprobs, values = read_all(model, responses, config.temperature)
        ratio = (logprobs - old).exp()
        near = ratio.clamp(1 - config.cliprange, 1 + config.cliprange)
        policy_loss = -torch.minimum(advantages * ratio, advantages * near).mean()
        moved = (values - old_values).clamp(-config.cliprange_value, config.cliprange_value)
        errors = (values - returns) ** 2, (old_values + moved - returns) ** 2
        value_loss = 0.5 * torch.maximum(*errors).mean()
        optimizer.zero_grad()
        (policy_loss + config.vf_coef * value_loss).backward()
        optimizer.step()
        policy_losses.append(policy_loss.item())
        value_losses.append(value_loss.item())
    return {
        "objective/kl": kl.sum().item() / len(responses),
        "objective/entropy": -old.sum().item() / len(responses),
        "ppo/val/mean": old_values.mean().item(),
        "ppo/returns/mean": returns.mean().item(),
        "ppo/returns/var": returns.var(correction=0).item(),
        "ppo/loss/policy": sum(policy_losses) / config.ppo_epochs,
        "ppo/loss/value": sum(value_losses) / config.ppo_epochs,
    }


def sgd(model, learning_rate):
    return torch.optim.SGD(model.parameters(), lr=learning_rate)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"kl_penalty": "kl", "ppo_epochs": 3, "learning_rate": 0.05},
        {"kl_penalty": "full", "temperature": 0.7},
        {"kl_penalty": "abs", "gamma": 0.9, "lam": 0.5},
        {"kl_penalty": "mse", "cliprange": 0.01, "cliprange_value": 0.01, "ppo_epochs": 2},
    ],
    ids=lambda changes: changes["kl_penalty"],
)
def test_a_step_is_plain_autograd_on_the_same_batch(family: str, changes):
    config = changed(
        learning_rate=0.01, **{k: v for k, v in changes.items() if k != "learning_rate"}
    )
    model = with_head(family)
    plain, reference = copy.deepcopy(model), with_head(family, seed=1)
    expected = plain_step(config, plain, reference)
    trainer = make_trainer(
        config, family=family, model=model, optimizer=sgd(model, config.learning_rate)
    )
    before = weights(trainer)
    stats = step(trainer)
    for name, value in expected.items():
        assert stats[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    for name, value in plain.state_dict().items():
        assert_close(weights(trainer)[name], value, rtol=0, atol=1e-5, msg=name)
    assert any(not torch.equal(before[name], value) for name, value in weights(trainer).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ratio_is_1_at_the_first_step(family: str):
    trainer = make_trainer(family=family)
    responses = trainer.generate(QUERIES, return_prompt=False, max_new_tokens=5, batch_size=4)
    stats = step(trainer, responses=responses)
    assert stats["ppo/policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert stats["ppo/policy/approxkl"] < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_that_is_its_own_reference_has_no_divergence(family: str):
    stats = step(make_trainer(family=family, ref_model=None))
    assert stats["objective/kl"] == pytest.approx(0, abs=1e-5)


def test_the_start_token_of_a_decoder_is_not_trained():
    with_start = [torch.cat([torch.tensor([PAD]), response]) for response in RESPONSES]
    masks = [torch.ones_like(row) for row in with_start]
    plain, started = make_trainer(family="t5"), make_trainer(family="t5")
    stats, same = step(plain), step(started, responses=with_start, masks=masks)
    assert stats["ppo/loss/value"] == same["ppo/loss/value"]
    assert all(torch.equal(weights(plain)[name], value) for name, value in weights(started).items())


# --- response_masks ---


def interrupted(token: int):
    """Responses with two tokens of a tool after the first, and masks that exclude them."""
    tool = torch.tensor([token, token])
    responses = [torch.cat([row[:1], tool, row[1:]]) for row in RESPONSES]
    masks = [torch.ones_like(row) for row in responses]
    for mask in masks:
        mask[1:3] = 0
    return responses, masks


def test_masked_tokens_at_the_end_change_nothing():
    longer = [torch.cat([row, torch.tensor([9, 9])]) for row in RESPONSES]
    masks = [torch.tensor([1] * len(row) + [0, 0]) for row in RESPONSES]
    models = with_head(), with_head()
    # SGD: Adam would amplify rounding errors of zero gradients to full steps.
    plain, masked = (make_trainer(model=model, optimizer=sgd(model, 0.01)) for model in models)
    expected, actual = step(plain), step(masked, responses=longer, masks=masks)
    for name in expected:
        if not name.startswith(("time", "tokens")):
            own, value = actual[name], expected[name]
            if np.ndim(value) == 2:
                assert (own[:, value.shape[1] :] == 0).all(), name
                own = own[:, : value.shape[1]]
            # Longer sequences are summed in another order.
            assert own == pytest.approx(value, abs=1e-5), name
    for name, value in weights(plain).items():
        assert_close(weights(masked)[name], value, rtol=0, atol=1e-5, msg=name)


def test_masked_tokens_inside_a_response_are_context_and_not_trained():
    trainer = make_trainer()
    responses, masks = interrupted(9)
    stats = step(trainer, responses=responses, masks=[mask.bool() for mask in masks])
    with torch.no_grad():
        _, logprobs, values = read_all(make_trainer().model, responses)
    counted = torch.cat(masks).bool()
    assert stats["objective/entropy"] == pytest.approx(
        -logprobs[counted].sum().item() / 6, abs=1e-4
    )
    assert stats["ppo/val/mean"] == pytest.approx(values[counted].mean().item(), abs=1e-5)


def test_advantages_skip_masked_tokens():
    # Values and KL rewards are 0 and lambda is 1: the return of a token is the score discounted by
    # the counted tokens after it. If masked tokens were steps, gamma < 1 would discount more.
    config = changed(init_kl_coef=0.0, gamma=0.5, lam=1.0)
    model = with_head()
    torch.nn.init.zeros_(model.v_head.summary.weight)
    torch.nn.init.zeros_(model.v_head.summary.bias)
    responses, masks = interrupted(9)
    stats = step(make_trainer(config, model=model), responses=responses, masks=masks)
    returns = [
        score * 0.5**t
        for score, row in zip(SCORES, RESPONSES, strict=True)
        for t in range(len(row))
    ]
    assert stats["ppo/returns/mean"] == pytest.approx(sum(returns) / len(returns), abs=1e-6)


# --- After a step ---


def test_the_coefficient_adapts_after_a_step_as_by_hand():
    trainer = make_trainer(changed(init_kl_coef=0.2, target=6.0, horizon=100))
    first = step(trainer)
    error = min(max(first["objective/kl"] / 6.0 - 1, -0.2), 0.2)
    assert error != 0
    assert first["objective/kl_coef"] == 0.2
    assert step(trainer)["objective/kl_coef"] == pytest.approx(0.2 * (1 + error * 6 / 100))


def test_a_coefficient_that_does_not_adapt_stays():
    trainer = make_trainer(changed(adap_kl_ctrl=False, horizon=10))
    assert [step(trainer)["objective/kl_coef"] for _ in range(2)] == [0.2, 0.2]


def test_a_step_whose_ratio_is_above_the_threshold_is_skipped():
    # Every step is above a threshold below 1, also the first.
    trainer = make_trainer(changed(ratio_threshold=0.5, ppo_epochs=4))
    before = weights(trainer)
    # Of each batch, only the first of four steps is tried. With more skipped steps in a row than
    # max_skipped_steps, the run continues.
    assert [step(trainer)["ppo/skipped_steps"] for _ in range(4)] == [1, 2, 3, 4]
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())


class CountingSGD(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


def test_early_stopping_ends_the_passes_over_a_batch():
    counts = []
    for early_stopping in (False, True):
        model = with_head()
        optimizer = CountingSGD(model.parameters(), lr=0.3)
        config = changed(ppo_epochs=5, early_stopping=early_stopping, target_kl=1e-3)
        step(make_trainer(config, model=model, optimizer=optimizer))
        counts.append(optimizer.steps)
    # The second pass sees the change of the first, and is the last.
    assert counts == [5, 2]


def test_a_schedule_steps_once_after_each_step_and_its_rate_holds_for_all_minibatches():
    rates = []

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    model = with_head()
    optimizer = Watching(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    config = changed(mini_batch_size=2)
    trainer = make_trainer(config, model=model, optimizer=optimizer, lr_scheduler=schedule)
    assert [step(trainer)["ppo/learning_rate"] for _ in range(2)] == [1e-3, 5e-4]
    assert rates == [1e-3] * 3 + [5e-4] * 3


def test_minibatches_and_accumulation_are_optimizer_steps():
    model = with_head()
    optimizer = CountingSGD(model.parameters(), lr=1e-3)
    config = changed(mini_batch_size=1, gradient_accumulation_steps=3, ppo_epochs=2)
    step(make_trainer(config, model=model, optimizer=optimizer))
    assert optimizer.steps == 4


@pytest.mark.parametrize("form", [np.array, torch.tensor])
def test_a_score_may_be_an_array_with_one_number(form):
    expected = step(make_trainer())["ppo/mean_scores"]
    given = [form([score]) for score in SCORES]
    assert step(make_trainer(), scores=given)["ppo/mean_scores"] == pytest.approx(expected)


def test_scores_are_scaled_centred_and_clipped():
    first = step(make_trainer(changed(use_score_scaling=True)))
    scores = torch.tensor(SCORES)
    assert first["ppo/mean_scores"] == pytest.approx((scores / scores.std()).mean().item())
    centred = changed(use_score_scaling=True, use_score_norm=True)
    assert step(make_trainer(centred))["ppo/mean_scores"] == pytest.approx(0, abs=1e-6)
    clipped = step(make_trainer(changed(score_clip=0.5)))
    assert clipped["ppo/mean_scores"] == pytest.approx((0.3 - 0.5 + 0.5 * 3 - 0.2) / 6)
    several = make_trainer(changed(use_score_scaling=True))
    step(several)
    twice = torch.cat([scores, scores + 1])
    later = step(several, scores=[score + 1 for score in SCORES])
    assert later["ppo/mean_scores"] == pytest.approx(((scores + 1) / twice.std()).mean().item())


# --- generate ---


def test_one_query_returns_a_matrix_and_a_list_of_queries_a_list():
    trainer = make_trainer()
    one = trainer.generate(QUERIES[0], max_new_tokens=4)
    assert one.shape[0] == 1 and torch.equal(one[0, : len(QUERIES[0])], QUERIES[0])
    several = trainer.generate(QUERIES, max_new_tokens=4, batch_size=4)
    assert len(several) == 6
    for query, row in zip(QUERIES, several, strict=True):
        assert torch.equal(row[: len(query)], query)
        assert 1 <= len(row) - len(query) <= 4
    alone = trainer.generate(QUERIES, max_new_tokens=4, return_prompt=False)
    assert all(1 <= len(row) <= 4 for row in alone)


def test_a_response_ends_with_its_first_end_of_sequence_token():
    trainer = make_trainer()
    queries = QUERIES * 10
    several = trainer.generate(queries, return_prompt=False, max_new_tokens=30, batch_size=60)
    assert any(len(row) < 30 for row in several)
    for row in several:
        assert EOS not in row[:-1]
        assert len(row) == 30 or row[-1] == EOS
    one_of_two = trainer.generate(
        queries, return_prompt=False, max_new_tokens=30, batch_size=60, eos_token_id=[EOS, 9]
    )
    assert any(row[-1] == 9 for row in one_of_two)
    assert all(9 not in row[:-1] and EOS not in row[:-1] for row in one_of_two)


def test_a_single_response_may_continue_past_the_end_token():
    model = with_head()
    say_nothing_but(model, EOS)
    trainer = make_trainer(model=model)
    row = trainer.generate(QUERIES[0], max_new_tokens=5, eos_token_id=100_000)[0]
    assert row[len(QUERIES[0]) :].tolist() == [EOS] * 5
    (row,) = trainer.generate(QUERIES[:1], max_new_tokens=5, eos_token_id=100_000)
    assert row[len(QUERIES[0]) :].tolist() == [EOS]


@pytest.mark.parametrize("family", ("gpt2", "gpt_neox", "t5"))
def test_padding_does_not_change_greedy_answers(family: str):
    model = make_model(family)

    def answers(batch_size):
        return generate_responses(
            model,
            QUERIES,
            ends=[EOS],
            pad_token_id=PAD,
            batch_size=batch_size,
            return_prompt=False,
            length_sampler=None,
            arguments={"do_sample": False, "max_new_tokens": 8, "eos_token_id": EOS},
        )

    for alone, together in zip(answers(1), answers(6), strict=True):
        assert torch.equal(alone, together)


def test_an_encoder_decoder_gives_its_start_token_and_no_prompt():
    trainer = make_trainer(family="t5")
    for row in trainer.generate(QUERIES, max_new_tokens=4):
        assert row[0] == PAD and 2 <= len(row) <= 5


def test_the_length_sampler_draws_max_new_tokens_for_each_batch():
    lengths = iter([1, 5, 3])
    rows = make_trainer().generate(
        QUERIES, length_sampler=lambda: next(lengths), batch_size=2, return_prompt=False
    )
    limits = [1, 1, 5, 5, 3, 3]
    assert all(len(row) <= limit for row, limit in zip(rows, limits, strict=True))
    assert max(len(row) for row in rows) > 1
    assert (
        len(make_trainer().generate(QUERIES[0], LengthSampler(2, 3), return_prompt=False)[0]) <= 2
    )


def test_responses_are_those_of_the_policy_that_step_trains():
    trainer = make_trainer(changed(temperature=0.5))
    query = QUERIES[0]
    drawn = torch.stack(
        trainer.generate([query] * 4000, max_new_tokens=1, batch_size=4000, return_prompt=False)
    )[:, 0]
    with torch.no_grad():
        expected = (trainer.model(query[None])[0][0, -1] / 0.5).softmax(-1)
    shares = torch.bincount(drawn, minlength=len(expected)) / 4000
    # Four standard deviations of the largest share.
    assert_close(shares, expected, rtol=0, atol=4 * 0.5 / 4000**0.5)


def test_settings_of_the_model_that_restrict_sampling_are_overruled():
    model = with_head()
    settings = model.pretrained_model.generation_config
    settings.top_k, settings.min_length, settings.forced_eos_token_id = 1, 30, EOS
    torch.manual_seed(0)
    rows = make_trainer(model=model).generate([QUERIES[0]] * 30, max_new_tokens=3, batch_size=30)
    ends = torch.stack([row[-1] for row in rows])
    assert len(ends.unique()) > 5


def say_nothing_but(model, token: int) -> None:
    """Set the last hidden state of a GPT-2 to the embedding of one token for every input."""
    body = model.pretrained_model.transformer
    with torch.no_grad():
        body.ln_f.weight.zero_()
        body.ln_f.bias.copy_(100 * body.wte.weight[token])


@pytest.mark.parametrize("given", [True, False], ids=["given", "copied"])
def test_the_reference_answers_for_itself(given: bool):
    model, reference = with_head(), with_head()
    if given:
        say_nothing_but(reference, 9)
    trainer = make_trainer(ref_model=reference if given else None, model=model)
    if not given:
        say_nothing_but(model, 9)
    answers = trainer.generate(
        [QUERIES[0]] * 50,
        max_new_tokens=2,
        batch_size=50,
        return_prompt=False,
        generate_ref_response=True,
    )
    shares = [(torch.cat(rows) == 9).float().mean() for rows in answers]
    assert shares[given] == 1 and shares[not given] < 0.3
    single, ref_single = trainer.generate(QUERIES[0], max_new_tokens=2, generate_ref_response=True)
    assert ((ref_single if given else single)[0, len(QUERIES[0]) :] == 9).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_return_sequences": 7}, "num_return_sequences=7 is not supported"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True is not supported"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0.*do_sample=False"),
    ],
)
def test_arguments_that_cannot_be_honored_are_refused(arguments, words: str):
    with pytest.raises(ConfigError, match=words):
        make_trainer().generate(QUERIES[0], **arguments)


def test_greedy_responses_ignore_the_temperature():
    greedy, cold = (
        make_trainer().generate(QUERIES, do_sample=False, max_new_tokens=3, **temperature)
        for temperature in ({}, {"temperature": 0})
    )
    assert all(torch.equal(row, other) for row, other in zip(greedy, cold, strict=True))


def test_arguments_that_do_not_change_the_distribution_cause_no_warning(caplog):
    usual = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True}
    make_trainer().generate(
        QUERIES[0], **usual, temperature=1.0, pad_token_id=EOS, max_new_tokens=2, num_beams=1
    )
    assert caplog.records == []


def test_responses_that_end_without_an_end_token_have_no_padding():
    class ThirdToken:
        def __call__(self, ids, scores, **kwargs):
            return ids[:, -1] % 3 == 0

    rows = make_trainer().generate(
        QUERIES * 3, stopping_criteria=[ThirdToken()], max_new_tokens=9, return_prompt=False
    )
    assert any(len(row) < 9 for row in rows)
    assert all(not (row[:-1] % 3 == 0).any() for row in rows)


@pytest.mark.parametrize("query", [torch.ones(1, 3).long(), torch.tensor([]).long(), [3, 4]])
def test_a_query_that_is_no_vector_is_refused(query):
    with pytest.raises(DataError, match="query 0 must be a tensor"):
        make_trainer().generate([query])


# --- LoRA ---


@pytest.fixture
def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1)
    return lambda: with_head("gpt2", peft_config=config)


def test_a_lora_policy_trains_its_adapter_and_the_head_alone(lora):
    trainer = make_trainer(model=lora(), ref_model=None)
    before = weights(trainer)
    first = step(trainer)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    moved = {
        name for name, value in weights(trainer).items() if not torch.equal(before[name], value)
    }
    assert moved and all("lora_" in name or name.startswith("v_head") for name in moved)
    assert any("lora_" in name for name in moved) and "v_head.summary.weight" in moved
    assert abs(step(trainer)["objective/kl"]) > 1e-4


def test_the_reference_of_a_lora_policy_is_the_base(lora):
    model, base = lora(), make_model("gpt2")
    trainer = make_trainer(changed(learning_rate=0.5), model=model, ref_model=None)
    for _ in range(3):
        step(trainer)
    # A temperature near 0: greedy decoding.
    cold = make_trainer(changed(temperature=1e-4), model=model, ref_model=None)
    answers, ref_answers = cold.generate(QUERIES, max_new_tokens=6, generate_ref_response=True)
    expected = [
        base.generate(query[None], do_sample=False, max_new_tokens=6)[0] for query in QUERIES
    ]
    assert all(torch.equal(row, own) for row, own in zip(ref_answers, expected, strict=True))
    assert not all(torch.equal(row, own) for row, own in zip(answers, expected, strict=True))


# --- Data ---


def test_batches_are_full_and_reshuffled_in_each_pass():
    trainer = make_trainer(changed(remove_unused_columns=False))
    rows = Dataset.from_dict({"number": list(range(20)), "text": [str(i) for i in range(20)]})
    loader = trainer.prepare_dataloader(rows)
    passes = [[batch["number"] for batch in loader] for _ in range(2)]
    assert [[len(batch) for batch in one] for one in passes] == [[6, 6, 6]] * 2
    assert passes[0] != passes[1]
    assert all(len({n for batch in one for n in batch}) == 18 for one in passes)


def test_unused_columns_are_removed_unless_the_settings_keep_them():
    rows = Dataset.from_dict(
        {"input_ids": [[1, 2]] * 6, "query": ["q"] * 6, "label": [1] * 6, "review": ["r"] * 6}
    )
    for keep, expected in ((False, {"input_ids", "query", "label"}), (True, {*rows.column_names})):
        trainer = make_trainer(changed(remove_unused_columns=not keep), dataset=rows)
        (batch,) = trainer.dataloader
        assert set(batch) == expected


def test_a_collator_makes_the_batch_and_rows_without_names_are_stacked():
    rows = [(torch.tensor([i]), i) for i in range(6)]
    trainer = make_trainer(dataset=rows)
    ((ids, numbers),) = trainer.dataloader
    assert ids.shape == (6, 1) and sorted(numbers.tolist()) == [*range(6)]
    (collated,) = make_trainer(dataset=rows, data_collator=len).dataloader
    assert collated == 6


@pytest.mark.parametrize("dataset", ["imdb", DatasetDict(train=Dataset.from_dict({"query": [1]}))])
def test_a_name_or_all_splits_in_the_place_of_a_data_set_are_refused(dataset):
    with pytest.raises(DataError, match="choose a split"):
        make_trainer(dataset=dataset)


def test_a_stream_of_rows_is_refused():
    stream = Dataset.from_dict({"query": ["a"]}).to_iterable_dataset().map(lambda row: row)
    with pytest.raises(DataError, match="Load it without streaming=True"):
        make_trainer(dataset=stream)


def test_a_data_set_smaller_than_a_batch_is_refused():
    trainer = make_trainer(dataset=[{"input_ids": [1]}] * 5)
    assert len(trainer.dataloader) == 0
    with pytest.raises(DataError, match="5 rows, too few for one batch of 6"):
        next(iter(trainer.dataloader))


# --- Two processes ---

TWO_PROCESSES = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from ppo_core.classic import PPOConfig, PPOTrainer
from tests.ppo_core.trl.classic.test_classic_trainer import read, with_head
from tests.helpers.models.tiny import make_tokenizer

class Watching(torch.optim.SGD):
    def step(self, closure=None):
        distances.append(own_distance())
        return super().step(closure)

def own_distance():
    apart = []
    with torch.no_grad():
        for query, response in zip(queries, responses):
            new, old = (read(one, query, response)[0].log_softmax(-1) for one in (model, first))
            moved = (new - old).gather(1, response[:, None])
            apart.append(moved.expm1() - moved)
    return torch.cat(apart).mean().item()

config = PPOConfig(
    batch_size=4, mini_batch_size=4, ppo_epochs=9, early_stopping=True, ratio_threshold=1e9,
    target_kl=float(sys.argv[2]), adap_kl_ctrl=False, init_kl_coef=0.0, cliprange=0.9,
)
distances = []
model, first = with_head(), with_head()
optimizer = Watching(model.parameters(), lr=0.01)
rows = [{"input_ids": [i], "label": i} for i in range(21)]
trainer = PPOTrainer(config, model, None, make_tokenizer(), rows, optimizer)
passes = [[n for batch in trainer.dataloader for n in batch["label"]] for _ in range(2)]
rank = trainer.accelerator.process_index
queries = [torch.tensor([5 + i, 6]) for i in range(4)]
if rank == 0:  # tokens that are hard to come by, with scores far apart
    responses = [torch.tensor([8 + i, 9, 10, 11]) for i in range(4)]
    scores = [5.0, -5.0, 5.0, -5.0]
else:  # the likeliest ones, all worth nothing
    responses = [read(model, query, torch.tensor([3]))[0].argmax(-1) for query in queries]
    scores = [0.0] * 4
stats = trainer.step(queries, responses, scores)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps({
    "passes": passes, "distances": distances, "mean_scores": stats["ppo/mean_scores"],
    "weight": model.v_head.summary.weight.sum().item(),
}))
"""


TARGET_KL = 0.025


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("two")
    script = folder / "train.py"
    script.write_text(TWO_PROCESSES)
    ran = run_python(script, folder, TARGET_KL, processes=2)
    assert ran.codes == [0, 0], ran.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_processes_of_which_one_is_far_and_one_is_near_stop_early_together(two_processes):
    far, near = two_processes
    # The mean of both processes stopped them: alone, the near one would have continued.
    assert far["distances"][-1] > 1.5 * TARGET_KL > near["distances"][-1]
    assert 1 < len(far["distances"]) == len(near["distances"]) < 9
    assert far["weight"] == near["weight"]


def test_processes_share_the_data_set_and_the_statistics(two_processes):
    first, second = two_processes
    for own, other in zip(first["passes"], second["passes"], strict=True):
        assert len(own) == len(other) == 8
        assert not set(own) & set(other)
    assert first["passes"][0] != first["passes"][1]
    assert first["mean_scores"] == second["mean_scores"] == 0


# --- Logs and files ---


BATCH = {
    "query": [f"question {i}" for i in range(6)],
    "response": [f"answer {i}" for i in range(6)],
    "ref_rewards": [torch.tensor(float(i)) for i in range(6)],
}


def log_two_steps(trainer: PPOTrainer) -> list[dict]:
    history = [step(trainer) for _ in range(2)]
    for stats in history:
        trainer.log_stats(stats, BATCH, SCORES, ["query", "response", "ref_rewards"])
    return history


def test_tensorboard_gets_the_statistics_and_the_texts(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    config = changed(log_with="tensorboard", output_dir=str(tmp_path / "out"))
    history = log_two_steps(make_trainer(config))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    names = events.Tags()["scalars"]
    (kl,) = [name for name in names if name.endswith("objective/kl")]
    points = [(point.step, point.value) for point in events.Scalars(kl)]
    assert points == [(i + 1, pytest.approx(s["objective/kl"])) for i, s in enumerate(history)]
    (reward,) = [name for name in names if name.endswith("env/reward_mean")]
    assert events.Scalars(reward)[0].value == pytest.approx(sum(SCORES) / 6)
    (texts,) = [name for name in events.Tags()["tensors"] if "completions" in name]
    assert b"answer 5" in events.Tensors(texts)[0].tensor_proto.string_val[0]
    lines = (tmp_path / "out/completions/step-000002.jsonl").read_text().splitlines()
    assert json.loads(lines[3]) == {
        "query": "question 3",
        "response": "answer 3",
        "score": 0.5,
        "ref_rewards": 3.0,
    }


def test_mlflow_gets_the_statistics_and_the_texts(tmp_path: Path, mlflow_client):
    history = log_two_steps(make_trainer(changed(log_with="mlflow", output_dir=str(tmp_path))))
    (run,) = mlflow_client.search_runs(["0"])
    points = mlflow_client.get_metric_history(run.info.run_id, "ppo/loss/total")
    assert sorted((point.step, point.value) for point in points) == [
        (i + 1, pytest.approx(stats["ppo/loss/total"])) for i, stats in enumerate(history)
    ]
    import mlflow

    table = mlflow.load_table("completions.json", run_ids=[run.info.run_id])
    assert len(table) == 12 and table["ref_rewards"].tolist()[:6] == [*range(6)]


def test_scores_that_are_whole_numbers_are_logged(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = make_trainer(changed(log_with="tensorboard", output_dir=str(tmp_path)))
    is_right = [torch.tensor(int(score > 0)) for score in SCORES]
    trainer.log_stats(step(trainer, scores=is_right), BATCH, is_right)
    assert trainer._reporter.state.log_history[-1]["env/reward_mean"] == pytest.approx(4 / 6)


def test_without_log_with_nothing_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer()
    trainer.log_stats(step(trainer), BATCH, SCORES)
    assert not list(tmp_path.iterdir())


def test_a_column_to_log_that_is_not_there_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = make_trainer(changed(log_with="tensorboard", output_dir=str(tmp_path)))
    with pytest.raises(DataError, match="no column 'mood'"):
        trainer.log_stats(step(trainer), BATCH, SCORES, ["query", "response", "mood"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_and_loaded_model_has_the_same_values(tmp_path: Path, family: str):
    trainer = make_trainer(changed(kl_penalty="full"), family=family)
    step(trainer)
    trainer.save_pretrained(tmp_path)
    loaded = type(trainer.model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        for ours, saved in zip(
            read_all(trainer.model, RESPONSES), read_all(loaded, RESPONSES), strict=True
        ):
            assert_close(saved, ours, rtol=0, atol=1e-5)
    second = make_trainer(CONFIG, family=family, model=loaded)
    assert step(second)["ppo/val/mean"] == pytest.approx(step(trainer)["ppo/val/mean"], abs=1e-5)
    assert "objective/kl" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "tokenizer.json").exists()


def test_a_lora_policy_is_saved_with_its_head(tmp_path: Path, lora):
    model = lora()
    base = tmp_path / "base"
    make_model("gpt2").save_pretrained(base)
    model.pretrained_model.peft_config["default"].base_model_name_or_path = str(base)
    trainer = make_trainer(changed(learning_rate=0.1), model=model, ref_model=None)
    step(trainer)
    trainer.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved/model.safetensors").exists()
    loaded = type(model).from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        for ours, saved in zip(
            read_all(model, RESPONSES), read_all(loaded, RESPONSES), strict=True
        ):
            assert_close(saved, ours, rtol=0, atol=1e-5)


def test_the_saved_policy_is_a_plain_transformers_model(tmp_path: Path):
    trainer = make_trainer()
    trainer.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = QUERIES[0][None]
    assert_close(plain(ids).logits, trainer.model(ids)[0], rtol=0, atol=1e-6)


def test_an_unreachable_hub_is_a_training_error(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises((TrainingError, ConfigError), match="cheer"):
        make_trainer().push_to_hub("me/cheer", token="hf_none")


# --- Arguments and settings ---


def test_arguments_may_be_positional():
    model, tokenizer = with_head(), make_tokenizer()
    rows = [{"input_ids": [i]} for i in range(6)]
    optimizer = sgd(model, 0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trainer = PPOTrainer(CONFIG, model, None, tokenizer, rows, optimizer, len, 1, schedule)
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is schedule
    assert [*trainer.dataloader] == [6]
    ours = model.pretrained_model.transformer.h
    theirs = trainer.ref_model.pretrained_model.transformer.h
    assert ours[0].ln_1.weight is theirs[0].ln_1.weight
    assert ours[1].ln_1.weight is not theirs[1].ln_1.weight


def test_the_accelerator_and_the_device_are_attributes():
    trainer = make_trainer()
    assert trainer.accelerator.device == trainer.current_device
    assert trainer.accelerator.is_main_process and trainer.accelerator.process_index == 0
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.model


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"training_data_collator": len}, ConfigError, "training_data_collator is not supported"),
        ({"model": make_policy("gpt2")}, ModelError, "AutoModelForCausalLMWithValueHead"),
        ({"config": UpdateConfig()}, ConfigError, "takes ppo_core.classic.PPOConfig"),
    ],
)
def test_arguments_that_cannot_work_are_refused(changes, error, words: str):
    with pytest.raises(error, match=words):
        make_trainer(**changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((QUERIES[:5], RESPONSES, SCORES), "5 rows as query, but batch_size is 6"),
        ((QUERIES, RESPONSES[:5], SCORES), "5 rows as response"),
        ((QUERIES, RESPONSES, SCORES[:5]), "5 rows as score"),
        ((QUERIES, RESPONSES, SCORES, [torch.ones(4)]), "1 rows as mask"),
        ((QUERIES, RESPONSES, [torch.ones(2)] * 6), r"Score 0 is tensor\(\[1., 1.\]\)"),
        ((QUERIES, RESPONSES, [torch.ones(1, 1)] * 6), r"Score 0 is tensor\(\[\[1.\]\]\)"),
        ((QUERIES, RESPONSES, [float("nan")] * 6), "must be finite"),
        ((QUERIES, RESPONSES, [1.0, None] * 3), "Score 1 is None. Pass one number"),
        ((QUERIES, RESPONSES, ["a"] * 6), "Score 0 is 'a'"),
        ((QUERIES, [torch.tensor([])] * 6, SCORES), "response 0 must be a tensor"),
        ((QUERIES, [[3, 4]] * 6, SCORES), "response 0 must be a tensor .* but is list"),
        ((QUERIES, RESPONSES, SCORES, [torch.zeros(len(r)) for r in RESPONSES]), "counts 0 of 4"),
        ((QUERIES, RESPONSES, SCORES, [torch.ones(9)] * 6), "for a response of 4"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_batch_that_cannot_be_used_is_refused(arguments, words: str):
    with pytest.raises(DataError, match=words):
        make_trainer().step(*arguments)


def test_every_setting_of_the_classic_trainer_is_honored_or_refused_with_a_hint():
    ours = {field.name for field in dataclasses.fields(PPOConfig)}
    assert set(TRL_0_11) <= ours | set(CLASSIC_INSTEAD)
    assert not ours & set(CLASSIC_INSTEAD)


@pytest.mark.parametrize("name", sorted(CLASSIC_INSTEAD))
def test_a_value_that_changes_nothing_is_accepted_and_another_is_refused(name: str, caplog):
    accepted, instead = CLASSIC_INSTEAD[name]
    for value in accepted:
        assert PPOConfig(**{name: value}) == PPOConfig()
    assert caplog.records == []
    if name in CLASSIC_NO_EFFECT:
        assert PPOConfig(**{name: "something else"}) == PPOConfig()
        (record,) = caplog.records
        assert record.getMessage() == f"{name}='something else' has no effect here: {instead}."
        return
    with pytest.raises(ConfigError) as refused:
        PPOConfig(**{name: "something else"})
    assert f"{name}='something else' is not supported: {instead}." in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 6, "mini_batch_size": 4}, "2 responses would be left over"),
        ({"kl_penalty": "k3"}, "one of kl, abs, mse, full"),
        ({"target": 0}, "^target=0"),
        ({"ppo_epochs": 0}, "^ppo_epochs=0"),
        ({"init_kl_coef": -1}, "^init_kl_coef=-1"),
        ({"horizon": 0.5}, "^horizon=0.5"),
        ({"max_grad_norm": 0.0}, "^max_grad_norm=0.0"),
        ({"use_score_norm": True}, "needs|takes effect only with use_score_scaling"),
        ({"num_ppo_epochs": 4}, "no setting num_ppo_epochs.*mean ppo_epochs"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_classic_names(changes, words: str):
    with pytest.raises(ConfigError, match=words):
        PPOConfig(**changes)


def test_settings_are_read_from_a_command_line():
    (config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(
        ["--batch_size", "16", "--mini_batch_size", "4", "--kl_penalty", "full", "--steps", "100"]
    )
    assert (config.batch_size, config.kl_penalty, config.total_ppo_epochs) == (16, "full", 7)
    assert config.model_name == "gpt2"
