"""Whether a reward model's scores hold up however they are computed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, BertConfig, BloomConfig

from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.results.reward_report import Contract
from pipeline.reward_validation.odd_texts import LONGEST, odd_rows
from pipeline.reward_validation.padding import score_left_padded, score_right_padded
from pipeline.reward_validation.score_invariance import check_contract
from pipeline.reward_validation.scores import TextScorer
from ppo_core.models.reward_model import RewardModel
from tests.helpers.models.tiny import (
    CONFIGS,
    EOS,
    PAD,
    UNK,
    VOCABULARY,
    make_classifier,
    make_tokenizer,
)
from tests.helpers.models.word_models import word_reward


def pair(chosen: str, rejected: str, prompt: str = "w9", *, tie: bool = False) -> LabeledPair:
    return LabeledPair(prompt=prompt, chosen=chosen, rejected=rejected, tie=tie)


PAIRS = [pair(f"w{i} w{i + 1}" + " w5" * (i % 4), f"w{i + 7}") for i in range(20)]


def tiny_reward(family: str = "llama", **options: bool) -> RewardModel:
    return RewardModel(make_classifier(family), make_tokenizer(), **options)


def check(model: RewardModel, pairs: Sequence[LabeledPair] = PAIRS) -> Contract:
    return check_contract(TextScorer(model), pairs, tolerance=1e-3)


def random_classifier(config: object) -> RewardModel:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return RewardModel(model.eval(), make_tokenizer(), end_of_text=False)


# --- Batches and fillers ---------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_a_decoder_scores_a_text_the_same_in_every_batch(family: str):
    contract = check(tiny_reward(family), [replace(pair, tie=True) for pair in PAIRS])
    assert contract.reasons == []
    assert contract.deviation > 0.1
    for difference in (contract.batch, contract.right_filler, contract.left_filler):
        assert difference.share == difference.largest / contract.deviation < 1e-4


@pytest.mark.parametrize("score_padded", [score_right_padded, score_left_padded])
def test_padded_rows_that_fill_the_memory_are_scored_a_few_at_a_time(score_padded: Any):
    model = tiny_reward()
    rows = [model.encode(each.prompt, each.chosen) for each in PAIRS]
    expected, sizes = score_padded(model, rows), []

    def full(module: object, args: object, inputs: dict[str, Any]) -> None:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    model.model.base_model.register_forward_pre_hook(full, with_kwargs=True)
    assert np.allclose(score_padded(model, rows), expected, rtol=0, atol=1e-5)
    assert sizes == [20, 10, 5, 5, 5, 5]


def test_the_deviation_is_that_of_the_scores_of_real_texts():
    # Values 1 and 3 in turn: mean 2, squares 1 each, 32 over 31; the odd texts are unknown.
    model = word_reward("sum", {"w1": 1.0, "w2": 3.0, "<unk>": 100.0})
    contract = check(model, [pair("w2", "w1")] * 16)
    assert contract.deviation == pytest.approx((32 / 31) ** 0.5)


def test_bias_and_gain_are_part_of_every_score():
    plain, scaled = tiny_reward(), tiny_reward()
    scaled.bias, scaled.gain = 0.5, 3.0
    rows = [plain.encode("w1", "w2 w3"), plain.encode("w1", "w4")]
    expected = (score_left_padded(plain, rows) - 0.5) * 3
    assert score_left_padded(scaled, rows) == pytest.approx(expected, abs=1e-6)
    assert check(scaled).reasons == []


def test_an_encoder_is_not_filled_on_the_left():
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=PAD,
    )
    contract = check(random_classifier(config))
    assert contract.left_filler is None
    assert contract.reasons == []
    assert contract.batch.share < 1e-3


def test_a_model_without_places_is_not_filled_on_the_left():
    config = BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, num_labels=1, pad_token_id=PAD
    )
    assert check(random_classifier(config)).left_filler is None


def test_a_model_needs_no_pad_token_and_may_have_one_that_it_does_not_know():
    # No text has one: scripts add it to the tokenizer and leave the model as it is.
    expected = check(tiny_reward()).left_filler
    added, without = tiny_reward(), tiny_reward()
    added.tokenizer.add_special_tokens({"pad_token": "<added>"})
    without.tokenizer.pad_token = None
    assert added.tokenizer.pad_token_id == VOCABULARY
    for model in (added, without):
        contract = check(model)
        assert contract.left_filler == expected
        assert contract.vocabulary.largest_id == 60
        assert contract.reasons == []


def test_scores_that_are_finite_alone_only_are_refused_and_the_record_stays_json():
    model = tiny_reward()

    def break_batches(module, args, output):
        if len(output.last_hidden_state) > 1:
            output.last_hidden_state.fill_(float("nan"))

    model.model.base_model.register_forward_hook(break_batches)
    contract = check(model, [replace(pair, tie=True) for pair in PAIRS])
    assert (contract.batch.largest, contract.batch.share) == (None, None)
    assert len(contract.reasons) == 3
    assert "differ without bound" in contract.reasons[0]
    json.dumps(asdict(contract), allow_nan=False)


def test_a_model_that_reads_its_neighbours_is_refused():
    contract = check(word_reward("leaks", every=1.0))
    assert contract.batch.largest > 10
    assert any("alone and in a batch" in reason for reason in contract.reasons)


def test_a_model_that_reads_fillers_is_refused():
    # The widest text decides: so many fillers more, each worth 1, unless the context is full.
    model = word_reward("reads fillers", {"<pad>": 1.0})
    pairs = [pair("w1 " * 19, "w5 w6")] * 2
    contract = check(model, pairs)
    assert contract.right_filler.largest == 20
    assert any("with and without padding after it" in reason for reason in contract.reasons)
    pairs = [pair("w1 " * 50, "w5 w6")] * 2
    assert check(model, pairs).right_filler.largest == 64 - 51
    pairs = [pair("w1 " * 63, "w5 w6")] * 2
    assert check(model, pairs).right_filler.largest == 0


def test_a_model_that_overlooks_its_mask_is_refused_on_the_left_alone():
    model = tiny_reward()

    def overlook(module, args, inputs):
        return args, {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}

    model.model.base_model.register_forward_pre_hook(overlook, with_kwargs=True)
    contract = check(model)
    (reason,) = contract.reasons
    assert "with and without padding before it" in reason
    assert contract.left_filler.share > 0.01 > contract.batch.share


def test_a_difference_is_held_against_the_deviation():
    model = tiny_reward()
    largest = check(model).batch.share
    assert 0 < largest < 1e-4
    strict = check_contract(TextScorer(model), PAIRS, tolerance=largest / 2)
    assert any("alone and in a batch" in reason for reason in strict.reasons)
    assert check_contract(TextScorer(model), PAIRS, tolerance=largest * 100).reasons == []


def test_equal_scores_have_no_share_and_no_difference():
    contract = check(word_reward())
    assert (contract.deviation, contract.batch.largest, contract.batch.share) == (0, 0, None)
    assert contract.reasons == []


# --- Odd texts -------------------------------------------------------------------


def test_odd_texts_fill_the_context_and_end_as_texts_do():
    rows = odd_rows(tiny_reward(), "w1", "w2 w3")
    body = [5, 6] * 31
    assert rows["long"] == [4, *body, EOS]
    assert rows["one word"] == [4, *[5] * 62, EOS]
    assert rows["empty"] == [4, EOS]
    assert {len(row) for row in odd_rows(tiny_reward(end_of_text=False), "w1", "w2").values()} >= {
        1,
        64,
    }


def test_odd_texts_are_no_longer_than_the_tokenizer_allows_or_a_machine_takes():
    model = tiny_reward()
    model.tokenizer.model_max_length = 40
    assert len(odd_rows(model, "w1", "w2")["long"]) == 40
    model = tiny_reward()
    model.model.config.max_position_embeddings = 100_000
    assert len(odd_rows(model, "w1", "w2")["long"]) == LONGEST


def test_a_prompt_as_long_as_the_context_leaves_odd_texts_their_place():
    rows = odd_rows(tiny_reward(), " ".join(["w1"] * 64), "w2 w3")
    assert rows["empty"] == [*[4] * 63, EOS]
    assert rows["Arabic"][-5:] == [UNK, UNK, UNK, UNK, EOS]
    assert {len(row) for row in rows.values()} == {64}
    full = pair("w2", "w3", prompt=" ".join(["w1"] * 62))
    assert check(tiny_reward(), [full, *PAIRS]).odd_scores.keys() == rows.keys()


def test_a_text_without_any_token_is_left_out():
    model = tiny_reward(end_of_text=False)
    assert "empty" not in odd_rows(model, "", "w2")
    assert set(odd_rows(model, "", "")) == set(odd_rows(model, "", "w2")) - {"long", "one word"}
    contract = check(model, [pair("w1 w2", "w3", prompt="")] * 3)
    assert "empty" not in contract.odd_scores


def test_a_score_that_is_not_finite_is_refused_by_name():
    contract = check(word_reward("sum", {"<unk>": float("inf"), "w1": 1.0}))
    broken = [name for name, score in contract.odd_scores.items() if score is None]
    assert broken == ["emoji", "Arabic", "Chinese", "combining", "control"]
    assert contract.odd_scores["empty"] == 0
    (reason,) = contract.reasons
    assert "not finite: emoji, Arabic, Chinese, combining, control." in reason


# --- The end-of-sequence token ---------------------------------------------------


def test_a_model_that_was_trained_without_the_token_is_found():
    # It reads the last token: the token itself is worth 0 after both texts, a tie, so half right;
    # without it every pair is right. The scores w1 = 1 and w2 = -1 both move by 1.
    model = word_reward("last", {"w1": 1.0, "w2": -1.0}, end_of_text=True)
    contract = check(model, [pair("w5 w1", "w5 w2")] * 20)
    ends = contract.end_of_text
    assert (ends.as_set, ends.accuracy, ends.other_accuracy) == (True, 0.5, 1.0)
    assert (ends.difference, ends.gain_low, ends.gain_high, ends.n) == (1.0, 0.5, 0.5, 20)
    (reason,) = contract.reasons
    assert "trained without" in reason
    assert "end_of_text = false" in reason


def test_a_model_that_was_trained_with_the_token_is_found():
    # It reads the last token but one: w5 in both texts, unless the token stands behind them.
    model = word_reward("last but one", {"w1": 1.0, "w2": -1.0})
    contract = check(model, [pair("w5 w1", "w5 w2")] * 20)
    assert (contract.end_of_text.as_set, contract.end_of_text.other_accuracy) == (False, 1.0)
    (reason,) = contract.reasons
    assert "trained with the token" in reason
    assert "end_of_text = true" in reason


def test_a_gain_that_may_be_chance_is_no_reason():
    # The other way turns 1 of 20 pairs right: mean 0.05, standard error 0.05, t = 2.093.
    model = word_reward("last", {"w1": 1.0, "w2": -1.0}, end_of_text=True)
    contract = check(model, [pair("w5", "w6")] * 18 + [pair("w1", "w2"), pair("w1", "w2")])
    # Two pairs of 20 gain one half each: mean 0.05, squared deviations 0.45 - 0.05 = 0.4,
    # standard error sqrt(0.45 / 19 / 20) = 0.0344.
    ends = contract.end_of_text
    assert ends.other_accuracy - ends.accuracy == pytest.approx(0.05)
    assert ends.gain_low == pytest.approx(0.05 - 2.093 * 0.0344, abs=1e-4)
    assert ends.gain_high == pytest.approx(0.05 + 2.093 * 0.0344, abs=1e-4)
    assert contract.reasons == []


def test_only_decided_pairs_that_can_be_read_both_ways_are_compared():
    full = " ".join(["w5"] * 63)
    pairs = [
        *PAIRS[:4],
        pair("w1", "w2", tie=True),
        pair("", "w1", prompt=""),
        pair(full, "w1"),
    ]
    assert check(tiny_reward(end_of_text=False), pairs[:5]).end_of_text.n == 4
    model = word_reward("sum", every=1.0)
    assert check(model, [*PAIRS[:4], pairs[6]]).end_of_text.n == 4
    assert check(word_reward("sum", end_of_text=True), [*PAIRS[:4], pairs[5]]).end_of_text.n == 4
    assert check(model, PAIRS[:1]).end_of_text is None


def test_a_tokenizer_without_the_token_has_one_way_only():
    model = tiny_reward(end_of_text=False)
    model.tokenizer.eos_token = None
    assert check(model).end_of_text is None


# --- The tokenizer ---------------------------------------------------------------


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused():
    # 61 embeddings, ids 0 .. 60; 60 words after three special tokens end at id 62.
    contract = check(word_reward(every=1.0, words=60))
    assert (contract.vocabulary.largest_id, contract.vocabulary.embeddings) == (62, 61)
    (reason,) = contract.reasons
    assert "ids up to 62, but the model has embeddings only for ids below 61" in reason
    assert check(word_reward(every=1.0)).vocabulary.largest_id == 60


def test_texts_of_another_tokenizer_are_refused():
    # One prompt and one word a text: of 4 tokens a pair the first is unknown in all, or in none.
    pairs = [pair("w1", "w2", prompt="strange")] * 2
    contract = check(tiny_reward(), pairs)
    assert contract.vocabulary.unknown == 0.5
    assert any("50.0% of the tokens of real texts are unknown" in r for r in contract.reasons)
    assert check(tiny_reward()).vocabulary.unknown == 0


def test_an_end_token_is_not_unknown_where_both_are_one():
    model = tiny_reward()
    model.tokenizer.unk_token = "<eos>"
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", EOS)]
    )
    assert check(model).vocabulary.unknown == 0
    model.tokenizer.unk_token = None
    assert check(model).vocabulary.unknown is None


def test_digests_tell_tokenizers_and_templates_apart():
    first, same, other = (
        check(word_reward(every=1.0, **words)).vocabulary for words in ({}, {}, {"words": 57})
    )
    assert first == same
    assert first.digest != other.digest
    model = tiny_reward()
    assert check(model).vocabulary.chat_template is None
    model.tokenizer.chat_template = "{{ messages }}"
    with_template = check(model).vocabulary
    model.tokenizer.chat_template = "{{ messages[0] }}"
    assert None is not with_template.chat_template != check(model).vocabulary.chat_template
    model.tokenizer.eos_token = "w1"
    assert check(model).vocabulary.digest != with_template.digest


def test_the_record_is_json():
    for model in (tiny_reward(), word_reward("sum", {"<unk>": float("inf")})):
        record = asdict(check(model))
        assert json.loads(json.dumps(record, allow_nan=False)) == record
