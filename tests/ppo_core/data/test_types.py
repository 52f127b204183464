"""Records: prompt and response joined to token sequences."""

import torch

from tests.helpers.models.rollouts import make_rollout, row_of


def test_rows_join_prompt_and_response_without_a_gap():
    rollout = make_rollout()
    joined = rollout.token_rows(torch.tensor([2, 0]))
    assert joined.ids[0, :5].tolist() == row_of(rollout, 2)
    assert joined.ids[1].tolist() == row_of(rollout, 0)
    assert joined.lengths.tolist() == [5, 8]
    assert joined.state.tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 6]
    assert joined.targets.tolist() == row_of(rollout, 2)[1:] + row_of(rollout, 0)[3:]
