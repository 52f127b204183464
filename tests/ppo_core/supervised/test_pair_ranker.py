"""The reward model in training: its losses, its head, and the position of the score."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
)

from pipeline.demo.task import write_base_model
from ppo_core.errors import ModelError
from ppo_core.models import backbones
from ppo_core.models.backbones import Decoding
from ppo_core.models.loading import load_policy
from ppo_core.supervised.examples.reward_pairs import collate_pairs
from ppo_core.supervised.pair_ranker import (
    PairRanker,
    centering_losses,
    preference_losses,
)
from ppo_core.supervised.pair_ranker import make_classifier as make_ranked_classifier
from tests.helpers.models.tiny import make_classifier


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base_model(folder, seed=1)
    return folder


def test_preference_loss_matches_the_numbers_done_by_hand():
    # differences 0 and ln 3: -log(1/2) = ln 2, -log(3/4) = ln(4/3); their mean is ln(8/3) / 2
    losses = preference_losses(torch.tensor([1.0, 2.0 + math.log(3)]), torch.tensor([1.0, 2.0]))
    assert_close(losses.mean(), torch.tensor(math.log(8 / 3) / 2))


def test_a_margin_is_taken_off_the_difference_before_the_sigmoid():
    # differences ln 3 and 0, margins ln 3 and -ln 3: -log(1/2) = ln 2, -log(3/4) = ln(4/3)
    ln3 = math.log(3)
    losses = preference_losses(
        torch.tensor([ln3, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([ln3, -ln3])
    )
    assert_close(losses.mean(), torch.tensor(math.log(8 / 3) / 2))


def test_centering_loss_matches_the_numbers_done_by_hand():
    # (1 + 2)^2 = 9 and (0 - 1)^2 = 1; their mean is 5
    losses = centering_losses(torch.tensor([1.0, 0.0]), torch.tensor([2.0, -1.0]))
    assert losses.tolist() == [9, 1]


def test_the_loss_of_a_batch_of_pairs_has_its_margins_and_its_centering():
    ranker = PairRanker(make_classifier(), center_rewards_coefficient=0.1).double().eval()
    rows = [
        {"chosen": [3, 4, 1], "rejected": [3, 5], "margin": 0.5},
        {"chosen": [6, 1], "rejected": [6, 7, 8, 1], "margin": 0.0},
    ]
    scores = [
        [ranker.classifier(torch.tensor([row[side]])).logits.item() for row in rows]
        for side in ("chosen", "rejected")
    ]
    pairs = list(zip(*scores, (0.5, 0.0), strict=True))
    expected = sum(
        -math.log(1 / (1 + math.exp(rejected + margin - chosen))) + 0.1 * (chosen + rejected) ** 2
        for chosen, rejected, margin in pairs
    )
    loss, sums = ranker(**collate_pairs(rows), weights=torch.ones(2))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    differences = [chosen - rejected for chosen, rejected, _ in pairs]
    expected_sums = [sum(one > 0 for one in differences), sum(differences)]
    assert sums.tolist() == pytest.approx(expected_sums, abs=1e-6)


def test_a_pair_counts_by_its_weight():
    ranker = PairRanker(make_classifier()).double().eval()
    rows = [
        {"chosen": [3, 4, 1], "rejected": [3, 5], "margin": 0.0, "weight": 1.0},
        {"chosen": [6, 1], "rejected": [6, 7, 1], "margin": 0.0, "weight": 0.25},
    ]
    ones = [collate_pairs([{**row, "weight": 1.0}]) for row in rows]
    losses, sums = zip(*(ranker(**batch) for batch in ones), strict=True)
    batch = collate_pairs(rows)
    loss, both = ranker(**batch)
    assert loss.item() == pytest.approx(losses[0].item() + 0.25 * losses[1].item(), abs=1e-6)
    assert both.tolist() == pytest.approx((sums[0] + sums[1]).tolist(), abs=1e-6)
    assert ranker.units(batch).item() == 2


def test_a_judgment_of_one_response_has_the_loss_of_its_cross_entropy():
    # With the log odds ln 3 of a positive judgment, a score s is liked with sigmoid(s + ln 3).
    ranker, odds = PairRanker(make_classifier()).double().eval(), math.log(3)
    rows = [
        {"chosen": [3, 4, 1], "rejected": [], "margin": -odds, "weight": 1.0},
        {"chosen": [], "rejected": [6, 7, 8, 1], "margin": odds, "weight": 0.5},
        {"chosen": [6, 1], "rejected": [6, 7, 1], "margin": 0.0, "weight": 1.0},
    ]
    texts = [rows[0]["chosen"], rows[1]["rejected"], rows[2]["chosen"], rows[2]["rejected"]]
    liked, disliked, chosen, rejected = (
        ranker.classifier(torch.tensor([text])).logits.item() for text in texts
    )
    expected = (
        -math.log(1 / (1 + math.exp(-liked - odds)))
        - 0.5 * math.log(1 / (1 + math.exp(disliked + odds)))
        - math.log(1 / (1 + math.exp(rejected - chosen)))
    )
    batch = collate_pairs(rows)
    assert batch["given"].tolist() == [0, 3, 4, 5]
    loss, sums = ranker(**batch)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert sums[1].item() == pytest.approx(liked - disliked + chosen - rejected, abs=1e-6)
    # An average answer of score 0 is liked in 3 of 4 judgments.
    with torch.no_grad():
        ranker.classifier.score.weight.zero_()
    loss, _ = ranker(**collate_pairs(rows[:1]))
    assert loss.item() == pytest.approx(math.log(4 / 3), abs=1e-6)


def test_the_sums_of_a_batch_are_exact_under_bf16(monkeypatch):
    ranker = PairRanker(make_classifier()).eval()
    # The model's own products round differently by the size of the batch.
    monkeypatch.setattr(
        ranker, "score", lambda states: torch.tensor([0.3, 0.2]).repeat(len(states) // 2)
    )
    row = {"chosen": [3, 4, 1], "rejected": [3, 5], "margin": 0.0}
    with torch.autocast("cpu", torch.bfloat16):
        (one, ones), (many, sums) = (
            ranker(**collate_pairs([row] * count), weights=torch.ones(count)) for count in (1, 257)
        )
    # 257 is not a number of bfloat16.
    assert many.item() == pytest.approx(257 * one.item(), rel=1e-5)
    assert sums.tolist() == pytest.approx((257 * ones).tolist(), rel=1e-5)


def test_a_new_classifier_has_the_backbone_of_the_policy(base):
    policy = load_policy(base)
    classifier = make_ranked_classifier(policy, pad_token_id=0)
    assert classifier.base_model is policy.base_model
    assert not any(tensor.is_meta for tensor in classifier.state_dict().values())
    assert (classifier.config.num_labels, classifier.config.pad_token_id) == (1, 0)


def test_scores_do_not_depend_on_padding_neighbours_or_pad_tokens_in_the_text(base):
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    ranker = PairRanker(classifier).eval().double()
    # The first sequence ends with the token that pads the second.
    pairs = torch.tensor([[[4, 9, 0, 0], [7, 8, 0, 0]], [[4, 9, 0, 0], [4, 9, 5, 0]]])
    lengths = torch.tensor([[4, 2], [2, 3]])
    together = ranker.score(ranker.backbone.last_states(pairs, lengths))
    alone = [
        ranker.score(ranker.backbone.hidden_states(ids[None, :length])[:, -1])
        for ids, length in zip(pairs.flatten(0, 1), lengths.flatten().tolist(), strict=True)
    ]
    assert_close(together, torch.cat(alone), rtol=0, atol=1e-6)


def test_a_ranker_whose_fast_states_differ_uses_the_forward_pass_of_transformers(monkeypatch):
    rows = [{"chosen": [3, 4, 1], "rejected": [3, 5], "margin": 0.0}]
    fast = PairRanker(make_classifier(), keeps_head=True)
    assert fast.backbone.fastest is Decoding.FAST
    assert not fast.backbone.passes_mask
    expected, _ = fast(**collate_pairs(rows), weights=torch.ones(1))
    own = backbones.last_states
    monkeypatch.setattr(backbones, "last_states", lambda *inputs: own(*inputs).roll(1, dims=0))
    ranker = PairRanker(make_classifier(), keeps_head=True)
    assert ranker.backbone.fastest is Decoding.PADDED
    loss, _ = ranker(**collate_pairs(rows), weights=torch.ones(1))
    assert_close(loss, expected, rtol=0, atol=1e-6)


def test_a_ranker_that_sees_padding_gets_a_mask_for_pairs_and_single_responses():
    classifier = make_classifier()

    def count(_, args: tuple, inputs: dict, output: Any) -> None:
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        output.last_hidden_state *= mask.sum(dim=1)[:, None, None]

    classifier.base_model.register_forward_hook(count, with_kwargs=True)
    ranker = PairRanker(classifier)
    assert ranker.backbone.passes_mask
    rows = [
        {"chosen": [3, 4, 1], "rejected": [3, 5], "margin": 0.0, "weight": 1.0},
        {"chosen": [6, 7, 8, 1], "rejected": [], "margin": 0.0, "weight": 1.0},
    ]
    together, _ = ranker(**collate_pairs(rows))
    alone = sum(ranker(**collate_pairs([row]))[0] for row in rows)
    assert_close(together, alone, rtol=0, atol=1e-6)


def test_a_ranker_whose_scores_depend_on_the_other_texts_is_refused():
    classifier = make_classifier()
    layer = classifier.base_model.layers[0]
    layer.register_forward_hook(lambda _, inputs, out: out - out.mean(dim=0, keepdim=True))
    with pytest.raises(ModelError, match=r"model type llama.*the reward model's states differ by"):
        PairRanker(classifier)


def test_the_head_starts_at_the_published_scale(base):
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    head = PairRanker(classifier).classifier.score.weight
    # 128 draws of standard deviation 1/sqrt(129) = 0.0880; four standard errors are 0.022.
    assert head.std().item() == pytest.approx(0.088, abs=0.022)


def test_a_classifier_that_does_not_read_the_last_token_is_refused():
    tiny = BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        num_labels=1,
    )
    with pytest.raises(ModelError, match="not a last-token classifier"):
        PairRanker(BertForSequenceClassification(tiny))
