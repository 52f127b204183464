"""Metrics of a scored batch, against values by hand."""

import math

import pytest
import torch

from ppo_core.data.types import Scores
from ppo_core.reporting.metrics import objective_metrics, spread
from tests.helpers.models.rollouts import make_rollout


def test_the_spread_of_eleven_values_is_the_second_and_the_last_but_one():
    values = torch.tensor([3.0, 11.0, 1.0, 2.0, 4.0, 10.0, 5.0, 6.0, 9.0, 7.0, 8.0])
    assert spread("score", values) == {"score_p10": 2.0, "score_p90": 10.0}


def test_quantiles_between_two_values_are_interpolated():
    assert spread("n", torch.tensor([0, 10])) == {"n_p10": 1.0, "n_p90": 9.0}


def test_the_spread_of_scores_and_lengths_is_a_metric_of_a_batch():
    rollout = make_rollout((1, 1, 1), (5, 2, 4))
    scores = Scores(
        ref_logprobs=rollout.logprobs, values=None, scores=torch.tensor([-1.0, 0.0, 3.0])
    )
    metrics = objective_metrics(rollout, scores, torch.zeros(3, 5), kl_coef=0.1)
    found = {name: value for name, value in metrics.items() if name.endswith(("p10", "p90"))}
    assert found == {
        "objective/scores_p10": pytest.approx(-0.8),
        "objective/scores_p90": pytest.approx(2.4),
        "val/response_length_p10": pytest.approx(2.4),
        "val/response_length_p90": pytest.approx(4.8),
    }


def test_a_score_that_is_not_a_number_has_no_spread():
    found = spread("score", torch.tensor([1.0, math.nan, 2.0]))
    assert all(math.isnan(value) for value in found.values())
