"""The model types that the flow takes are those whose numbers were measured."""

import re

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from ppo_core.models.files.model_types import EXACT, SCORING_ENCODERS, UNTRAINABLE
from ppo_core.models.reward_model import RewardModel
from tests.architectures.zoo import small_config
from tests.helpers.models.tiny import make_tokenizer
from tests.helpers.paths import ROOT

TABLE = ROOT / "tests" / "benchmarks" / "ARCHITECTURES.md"


def types_with(result: str) -> set[str]:
    return set(re.findall(rf"^\| (\S+) \| {result} \|", TABLE.read_text(), re.MULTILINE))


def test_the_exact_types_are_those_of_the_measured_table():
    assert len(EXACT) > 200
    assert types_with("exact") == EXACT
    assert UNTRAINABLE.keys() <= types_with("refused")


@pytest.mark.parametrize("name", sorted(SCORING_ENCODERS))
def test_an_encoder_scores_a_text_alone_as_in_a_batch(name: str):
    config = small_config(name)
    config.num_labels = 1
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    rows = [[5, 6, 7, 8, 9, 10, 11], [8, 9], [20, 21, 22, 23]]
    scores = RewardModel(model, make_tokenizer()).score_encoded(rows, batch_size=3)
    alone = [model(torch.tensor([row])).logits[0, 0].detach() for row in rows]
    assert_close(scores, torch.stack(alone), atol=1e-5, rtol=1e-5)
    assert scores.unique().numel() == len(rows)
