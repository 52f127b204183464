from pathlib import Path

import pytest
import torch
from pipeline_inputs import write_model

from pipeline.data import Rows
from pipeline.reward_validation import mean_reference_score, measure_accuracy
from ppo_core.errors import ModelError
from ppo_core.loading import load_reward_model
from ppo_core.reward_model import RewardModel


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> RewardModel:
    path: Path = tmp_path_factory.mktemp("reward")
    return load_reward_model(write_model(path, labels=1))


def score(model: RewardModel, prompt: str, text: str) -> float:
    return model.score_texts([prompt], [text]).item()


def test_accuracy_counts_the_pairs_in_the_right_order(reward_model: RewardModel):
    texts = sorted((f"w{i}" for i in range(8)), key=lambda t: score(reward_model, "w9", t))
    right = [{"prompt": "w9", "chosen": texts[i + 1], "rejected": texts[i]} for i in range(6)]
    wrong = [{"prompt": "w9", "chosen": texts[0], "rejected": texts[7]}]
    equal = [{"prompt": "w9", "chosen": texts[0], "rejected": texts[0]}]
    result = measure_accuracy(reward_model, right + wrong + equal)
    assert result.n == 8
    assert result.accuracy == 6.5 / 8
    assert result.low < result.accuracy < result.high


def test_pairs_need_no_prompt(reward_model: RewardModel):
    pair = {"chosen": "w1 w2", "rejected": "w3"}
    expected = score(reward_model, "", "w1 w2") > score(reward_model, "", "w3")
    assert measure_accuracy(reward_model, [pair]).accuracy == float(expected)


def test_scores_that_are_not_finite_are_refused_with_their_pair():
    class Broken:
        def score_texts(self, prompts, texts):
            return torch.tensor([0.0, float("nan")])

    pairs = [{"chosen": "a", "rejected": "b"}, {"chosen": "c", "rejected": "d"}]
    with pytest.raises(ModelError, match=r"held-out pair 1 are not finite.*'chosen': 'c'"):
        measure_accuracy(Broken(), pairs)


def test_the_bias_makes_references_worth_nothing(reward_model: RewardModel):
    rows = Rows("r", [{"prompt": "w1", "reference": f"w{i}"} for i in range(5)], [], "")
    bias = mean_reference_score(reward_model, rows)
    centred = RewardModel(reward_model.model, reward_model.tokenizer, bias=bias)
    assert mean_reference_score(centred, rows) == pytest.approx(0, abs=1e-6)


def test_prompts_without_references_leave_the_reward_as_it_is(reward_model: RewardModel, capsys):
    assert mean_reference_score(reward_model, Rows("r", [{"prompt": "w1"}], [], "")) == 0
    assert "no column reference" in capsys.readouterr().out
