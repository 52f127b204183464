"""The share of repeated n-grams."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from ppo_core.algorithm.repetition import repeated_share
from ppo_core.data.batching import pad_rows


def share(*tokens: int, n: int = 3) -> float:
    return repeated_share(tensor([tokens]), tensor([len(tokens)]), n).item()


def test_by_hand():
    # 121 212 121 212 123: five 3-grams, three different ones
    assert_close(share(1, 2, 1, 2, 1, 2, 3), 2 / 5)
    # 1111 has two 3-grams, the second a repeat
    assert share(1, 1, 1, 1) == 0.5
    assert share(1, 2, 3, 4, 5) == 0.0


def test_a_response_with_no_room_for_a_repeat_has_none():
    assert share(7, 7, 7) == 0.0
    assert share(7, 7) == 0.0
    assert share(7, 7, n=1) == 0.5


def test_fillers_and_neighbours_change_nothing():
    ids = tensor([[1, 2, 1, 2, 1, 9, 9, 9], [9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
    shares = repeated_share(ids, tensor([5, 8, 8]))
    assert_close(shares, tensor([1 / 3, 5 / 6, 0.0]))


def test_no_responses_have_no_shares():
    assert repeated_share(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)).shape == (0,)


@given(
    rows=st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=4),
    n=st.integers(1, 4),
)
def test_the_share_is_that_of_a_count(rows, n):
    expected = []
    for row in rows:
        counts = Counter(" ".join(map(str, row[i : i + n])) for i in range(len(row)))
        counts = Counter({gram: k for gram, k in counts.items() if gram.count(" ") == n - 1})
        repeats = sum(k - 1 for k in counts.values())
        expected.append(repeats / counts.total() if counts else 0.0)
    ids, lengths = pad_rows(rows)
    assert_close(repeated_share(ids, lengths, n), tensor(expected), rtol=0, atol=1e-7)
