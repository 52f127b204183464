"""Scores against the plain transformers forward."""

import pytest
import torch
from torch.testing import assert_close
from transformers import BertConfig, BertForSequenceClassification

from ppo_core.errors import DataError, ModelError
from ppo_core.models.critic import Critic
from ppo_core.models.reward_model import RewardEnsemble, RewardModel
from tests.helpers.models.tiny import (
    CONFIGS,
    EOS,
    VOCABULARY,
    make_classifier,
    make_prompts,
    make_tokenizer,
)


@pytest.mark.parametrize("family", CONFIGS)
def test_scores_are_those_of_the_plain_forward(family):
    model = make_classifier(family)
    rows = make_prompts([9, 4, 6])
    reward_model = RewardModel(model, make_tokenizer(), bias=0.5, gain=2.0)
    scores = reward_model.score_encoded(rows, batch_size=2)
    for row, score in zip(rows, scores, strict=True):
        assert_close(score, 2 * (model(torch.tensor([row])).logits[0, 0].detach() - 0.5))


def test_an_end_token_equal_to_the_pad_token_is_still_the_one_that_is_scored():
    model = make_classifier()
    model.config.pad_token_id = EOS
    rows = [[5, 6, EOS], [5, 6, 7, 8]]
    actual = RewardModel(model, make_tokenizer()).score_encoded(rows, batch_size=2)
    hidden = model.model(torch.tensor([rows[0]])).last_hidden_state
    assert_close(actual[0], model.score(hidden[0, -1])[0].detach())


def test_an_encoder_is_a_reward_model_too():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
    )
    model = BertForSequenceClassification(config).eval()
    reward_model = RewardModel(model, make_tokenizer())
    rows = [[5, 6, 7], [8, 9]]
    actual = reward_model.score_encoded(rows, batch_size=2)
    for row, score in zip(rows, actual, strict=True):
        assert_close(score, model(torch.tensor([row])).logits[0, 0].detach())
    with pytest.raises(ModelError, match="value_model=None"):
        Critic.from_reward_model(reward_model)


def test_members_with_different_tokenizers_are_refused():
    members = [RewardModel(make_classifier(), make_tokenizer(prefix=one)) for one in "wwv"]
    assert len(RewardEnsemble(members[:2]).members) == 2
    with pytest.raises(ModelError, match="member 1 and member 3 of the reward model have differ"):
        RewardEnsemble(members)


def test_an_ensemble_reads_what_all_of_its_members_read():
    long, short = (RewardModel(make_classifier(), make_tokenizer()) for _ in range(2))
    short.model.config.max_position_embeddings = 8
    ensemble = RewardEnsemble([long, short])
    assert long.can_read([5] * 9)
    assert ensemble.can_read([5] * 8) and not ensemble.can_read([5] * 9)


def test_a_text_longer_than_the_reward_model_reads_is_refused():
    reward_model = RewardModel(make_classifier(), make_tokenizer())
    with pytest.raises(DataError, match=r"65 tokens .* context is 64"):
        reward_model.score_encoded([[5] * 65], batch_size=1)


def test_a_text_without_a_token_is_refused():
    reward_model = RewardModel(make_classifier(), make_tokenizer(), end_of_text=False)
    with pytest.raises(DataError, match="Text 1 has no token"):
        reward_model.score_texts(["w1", ""], ["w2", ""])
