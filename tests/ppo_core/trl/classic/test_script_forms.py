"""Forms of scripts for TRL 0.11 beside the plain loop: dtypes, adapters, sampling, statistics."""

import logging
from functools import partial

import numpy as np
import peft
import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GenerationConfig,
)

from ppo_core.classic import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    create_reference_model,
)
from ppo_core.errors import ConfigError, ModelError
from tests.helpers.models.families import make_model
from tests.helpers.models.tiny import make_policy
from tests.ppo_core.models.test_adapters import save_classifier
from tests.ppo_core.trl.classic.test_classic_trainer import (
    CONFIG,
    QUERIES,
    RESPONSES,
    changed,
    make_trainer,
    read_all,
    sgd,
    step,
    weights,
    with_head,
)

LORA = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM")
HALVES = [torch.bfloat16, torch.float16]
OF_MODEL = GenerationConfig.from_model_config(make_policy().config)
"""As a model has it: with ids of special tokens, and flags of outputs."""

STATISTICS = (
    "objective/kl objective/kl_dist objective/logprobs objective/ref_logprobs objective/kl_coef "
    "objective/entropy ppo/mean_non_score_reward ppo/mean_scores ppo/std_scores "
    "tokens/queries_len_mean tokens/queries_len_std tokens/queries_dist "
    "tokens/responses_len_mean tokens/responses_len_std tokens/responses_dist "
    "ppo/loss/policy ppo/loss/value ppo/loss/total ppo/policy/entropy ppo/policy/approxkl "
    "ppo/policy/policykl ppo/policy/clipfrac ppo/policy/advantages ppo/policy/advantages_mean "
    "ppo/policy/ratio ppo/returns/mean ppo/returns/var ppo/val/vpred ppo/val/error "
    "ppo/val/clipfrac ppo/val/mean ppo/val/var ppo/val/var_explained ppo/learning_rate "
    "time/ppo/forward_pass time/ppo/compute_rewards time/ppo/compute_advantages "
    "time/ppo/optimize_step time/ppo/calc_stats time/ppo/total"
).split()
"""All statistics of TRL 0.11."""


# --- Precision ---


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_policy_in_half_precision_shares_layers_with_its_reference(dtype):
    # The detoxification example of TRL.
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("gpt2").to(dtype))
    reference = create_reference_model(model, num_shared_layers=1)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    trainer = make_trainer(model=model, ref_model=reference, optimizer=optimizer)
    before = weights(trainer)
    assert step(trainer)["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert any(not value.equal(before[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_policy_in_half_precision_is_saved_in_it(tmp_path, dtype):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("gpt2").to(dtype))
    trainer = make_trainer(changed(learning_rate=0.1), model=model, ref_model=None)
    step(trainer)
    trainer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, dtype="auto")
    assert loaded.pretrained_model.dtype == dtype
    for name, value in loaded.pretrained_model.state_dict().items():
        assert_close(value, weights(trainer)[name].to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("by", ["trainer", "model"])
def test_a_checkpoint_in_half_precision_stays_so(tmp_path, dtype, is_trained, by):
    make_model("gpt2").to(dtype).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = {*file.keys()}
    for _ in range(2):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
        trainer = make_trainer(changed(learning_rate=0.1), model=model, ref_model=None)
        if is_trained:
            step(trainer)
        (trainer if by == "trainer" else model).save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            # The output head is the embedding, so it has no weights in the file.
            assert {*file.keys()} - {"v_head.summary.weight", "v_head.summary.bias"} == names
            assert {file.get_tensor(name).dtype for name in names} == {dtype}
        assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == dtype


def test_a_checkpoint_in_half_precision_that_is_loaded_in_fp32_is_saved_in_fp32(tmp_path):
    make_model("gpt2").to(torch.bfloat16).save_pretrained(tmp_path)
    load = AutoModelForCausalLMWithValueHead.from_pretrained
    load(tmp_path, dtype=torch.float32).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float32


# --- Adapters ---


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "with an adapter"])
def test_an_adapter_is_trained_beside_a_given_reference(adapted: bool):
    reference = with_head(seed=1, **({"peft_config": LORA} if adapted else {}))
    trainer = make_trainer(model=with_head(peft_config=LORA), ref_model=reference)
    assert trainer.ref_model is reference
    expected = make_trainer(model=with_head(), ref_model=with_head(seed=1))
    assert step(trainer)["objective/kl"] == pytest.approx(step(expected)["objective/kl"], abs=1e-5)


def test_the_reference_of_an_adapter_is_no_model_of_its_own():
    assert make_trainer(model=with_head(peft_config=LORA), ref_model=None).ref_model is None


@pytest.mark.parametrize("labels", [1, 2])
def test_a_reward_adapter_scores_each_token(tmp_path, labels: int):
    classifier = save_classifier(make_policy("gpt2"), tmp_path, labels=labels)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path / "base", peft_config=LORA, reward_adapter=tmp_path / "reward"
    )
    ids = torch.randint(2, 61, (3, 7))
    mask = torch.ones_like(ids)
    scores = model.compute_reward_score(ids, attention_mask=mask)
    assert scores.shape == (3, 7, labels)
    assert_close(scores[:, -1], classifier(input_ids=ids).logits)
    trainer = make_trainer(model=model, ref_model=None)
    model = trainer.accelerator.unwrap_model(trainer.model)
    step(trainer)
    assert_close(model.compute_reward_score(ids), scores, rtol=0, atol=0)
    model.load_state_dict(model.state_dict())
    assert_close(model.compute_reward_score(ids), scores, rtol=0, atol=0)
    trainer.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved").eval()
    assert_close(loaded(ids)[0], model(ids)[0])


def test_a_model_without_a_reward_adapter_says_so(tmp_path):
    with pytest.raises(ModelError, match="has no reward adapter"):
        with_head().compute_reward_score(QUERIES[0][None])
    with pytest.raises(ModelError, match="needs a policy with an adapter of its own"):
        AutoModelForCausalLMWithValueHead.from_pretrained(make_model("gpt2"), reward_adapter="x")


# --- Sampling ---


def test_step_takes_the_temperature_of_generate():
    trainer = make_trainer()
    trainer.generate(QUERIES, max_new_tokens=1, temperature=0.5)
    _, expected, _ = read_all(trainer.model, RESPONSES, temperature=0.5)
    stats = step(trainer)
    assert_close(torch.from_numpy(stats["objective/logprobs"]).sum(), expected.sum().detach())
    fixed = make_trainer(changed(temperature=0.5))
    assert stats["objective/kl"] == pytest.approx(step(fixed)["objective/kl"], rel=1e-5)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5, "top_k": 0.0}], ids=str)
def test_the_loss_corrects_for_top_k_and_top_p(cut, caplog):
    config = changed(kl_penalty="full", learning_rate=0.1, temperature=0.9)
    trainers = []
    for arguments in ({}, cut):
        model = with_head()
        trainer = make_trainer(config, model=model, optimizer=sgd(model, 0.1))
        torch.manual_seed(3)
        sampled = trainer.generate(QUERIES, max_new_tokens=5, return_prompt=False, **arguments)
        trainers.append((trainer, sampled))
    (plain, _), (cutting, responses) = trainers
    policy = cutting.model.pretrained_model
    shares = []
    with torch.no_grad():
        for query, response in zip(QUERIES, responses, strict=True):
            logits = policy(torch.cat([query, response])[None]).logits[0, len(query) - 1 : -1]
            probabilities = (logits / 0.9).softmax(dim=1)
            for token, row in zip(response, probabilities, strict=True):
                order = row.argsort(descending=True)
                kept = order[:3] if cut.get("top_k") else order[: nucleus(row, 0.5)]
                assert token in kept
                shares.append(row[kept].sum().item())
    stats = cutting.step(QUERIES, responses, [1.0] * 6)
    before = plain.step(QUERIES, responses, [1.0] * 6)
    # The weight of a token is the share of the policy that was not cut off.
    advantages = stats["ppo/policy/advantages"]
    counted = np.concatenate(
        [row[: len(response)] for row, response in zip(advantages, responses, strict=True)]
    )
    assert before["ppo/loss/policy"] == pytest.approx(-counted.mean(), abs=1e-5)
    expected = -(counted * np.array(shares)).mean()
    assert stats["ppo/loss/policy"] == pytest.approx(expected, abs=1e-5)
    assert caplog.records == []


def nucleus(row: torch.Tensor, share: float) -> int:
    """Number of the likeliest tokens that together have this probability."""
    return int((row.sort(descending=True)[0].cumsum(0) < share).sum()) + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"do_sample": False, "top_k": 3}, "samples with do_sample=False"),
        ({"repetition_penalty": 1.3}, "samples with repetition_penalty=1.3"),
        ({"min_length": 3, "no_repeat_ngram_size": 2}, "min_length=3, no_repeat_ngram_size=2"),
        ({"top_k": 3}, "top_k=3 and top_p=1.0: step() corrects the loss"),
        ({"generation_config": GenerationConfig(top_k=3)}, "top_k=3 and top_p=1.0"),
        ({"generation_config": OF_MODEL, "top_k": 3}, "top_k=3 and top_p=1.0"),
    ],
    ids=str,
)
def test_statistics_that_are_biased_cause_one_warning(arguments, words: str, caplog):
    trainer = make_trainer()
    for _ in range(2):
        responses = trainer.generate(
            QUERIES, max_new_tokens=5, return_prompt=False, batch_size=6, **arguments
        )
    with caplog.at_level(logging.WARNING):
        step(trainer, responses=responses)
    (warning,) = [
        r.getMessage() for r in caplog.records if r.name.startswith("ppo_core.trl.classic")
    ]
    assert words in warning
    assert trainer._step.sampled.is_restricted == ("top_k" in words)


def test_greedy_responses_are_the_likeliest():
    trainer = make_trainer()
    query = QUERIES[0]
    response = trainer.generate(query, do_sample=False, max_new_tokens=1, return_prompt=False)
    assert response[0, 0] == trainer.model(query[None])[0][0, -1].argmax()


# --- The rest ---


def test_every_statistic_of_trl_is_there():
    stats = step(make_trainer(changed(ppo_epochs=2)))
    assert [name for name in STATISTICS if name not in stats] == []
    width = max(map(len, RESPONSES))
    for name in ("objective/logprobs", "objective/ref_logprobs", "ppo/policy/advantages"):
        assert stats[name].shape == (6, width)
    assert stats["objective/kl_dist"].shape == (6,)
    assert -stats["objective/logprobs"].sum() / 6 == pytest.approx(stats["objective/entropy"])
    phases = [value for name, value in stats.items() if name.startswith("time/ppo/")]
    assert sum(phases) == pytest.approx(2 * stats["time/ppo/total"], rel=0.2)


def test_the_value_prediction_is_the_mean_of_the_new_values():
    stats = step(make_trainer())
    assert stats["ppo/val/vpred"] == pytest.approx(stats["ppo/val/mean"], abs=1e-5)
    later = step(make_trainer(changed(ppo_epochs=2, learning_rate=0.1)))
    assert abs(later["ppo/val/vpred"] - later["ppo/val/mean"]) > 1e-3


def test_shared_layers_beside_a_reference_are_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="num_shared_layers=1 has no effect"):
        make_trainer(num_shared_layers=1)


def test_a_trainer_without_a_data_set_says_what_to_pass():
    with pytest.warns(UserWarning, match="pass batches of batch_size=6 responses to step"):
        make_trainer()


def test_gradients_that_the_script_wants_to_see_are_zeros_after_a_step():
    model = with_head()
    optimizer = sgd(model, 0.1)
    optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)
    trainer = make_trainer(model=model, optimizer=optimizer)
    step(trainer)
    assert [name for name, p in trainer.model.named_parameters() if p.grad is None] == []


def test_settings_that_are_assigned_after_the_trainer_are_for_the_next_one(caplog):
    config = changed(CONFIG)
    trainer = make_trainer(config)
    config.mini_batch_size = 3
    (record,) = caplog.records
    assert "mini_batch_size=3 does not change the existing trainer" in record.message
    assert trainer.config.mini_batch_size == 6
    assert make_trainer(config).config.mini_batch_size == 3
    with pytest.raises(ConfigError, match="after the trainer was created"):
        trainer.config.mini_batch_size = 3


def test_settings_may_be_assigned_before_the_trainer_and_are_checked_by_it():
    config = PPOConfig()
    config.mini_batch_size = 6
    config.batch_size = 4
    with pytest.raises(ConfigError, match="batch_size=4 is not a multiple"):
        make_trainer(config)
    config = changed(CONFIG)
    config.temperature = 0.5
    assert make_trainer(config).config.temperature == 0.5


def test_a_head_that_is_no_linear_layer_is_refused():
    tiny = {"d_model": 8, "src_vocab_size": 9, "tgt_vocab_size": 9, "langs": ["en", "de"]}
    for side in ("encoder", "decoder"):
        tiny |= {f"{side}_layers": 1, f"{side}_attention_heads": 1, f"{side}_ffn_dim": 8}
    with pytest.raises(ModelError, match="head of FSMTForConditionalGeneration is a Embedding"):
        AutoModelForSeq2SeqLMWithValueHead.from_pretrained(
            FSMTForConditionalGeneration(FSMTConfig(**tiny))
        )
