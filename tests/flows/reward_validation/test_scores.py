"""Every text of a validation is scored once, in PPO's precision, and the log says how far it is."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from pipeline.reward_validation import scores
from pipeline.reward_validation.scores import TextScorer
from ppo_core.models.reward_model import RewardModel
from tests.helpers.models.tiny import make_classifier, make_tokenizer


class CountingModel(RewardModel):
    """A reward model that keeps the rows that it scored, and their precision."""

    def __init__(self) -> None:
        super().__init__(make_classifier(), make_tokenizer())
        self.rows: list[list[int]] = []
        self.precisions: set[torch.dtype] = set()

    def score_encoded(self, rows, batch_size):
        self.rows += rows
        enabled = torch.is_autocast_enabled("cpu")
        self.precisions.add(torch.get_autocast_dtype("cpu") if enabled else torch.float32)
        return super().score_encoded(rows, batch_size)


ROWS = [[5, 6, 7], [8, 9], [5, 6, 7], [9, 8, 7, 6], [8, 9]]


def test_equal_texts_are_scored_once_and_in_their_order():
    model = CountingModel()
    scorer = TextScorer(model)
    first = scorer.scores(ROWS)
    assert sorted(model.rows) == [[5, 6, 7], [8, 9], [9, 8, 7, 6]]
    again = scorer.scores([*ROWS[::-1], [4]])
    assert model.rows[3:] == [[4]]
    assert again[:-1].tolist() == first[::-1].tolist()
    alone = [float(RewardModel.score_encoded(model, [row], 1)[0]) for row in ROWS]
    assert_close(first, np.array(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("bf16", "precision"), [(True, torch.bfloat16), (False, torch.float32)])
def test_scores_have_the_precision_of_ppo(bf16: bool, precision: torch.dtype):
    model = CountingModel()
    TextScorer(model, bf16=bf16).scores(ROWS)
    assert model.precisions == {precision}


def test_a_score_that_is_not_finite_stays_what_it_is():
    model = CountingModel()
    with torch.no_grad():
        model.model.score.weight.fill_(float("nan"))
    assert np.isnan(TextScorer(model).scores(ROWS)).all()


def test_a_long_validation_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(scores, "BATCH_SIZE", 1)
    monkeypatch.setattr(scores, "BAR_DELAY", 0.0)
    monkeypatch.setattr("ppo_core.io.progress_bar.SECONDS_BETWEEN_LINES", 0.0)
    TextScorer(CountingModel()).scores(ROWS)
    said = capsys.readouterr().err
    assert "scoring" in said and "3/3" in said
