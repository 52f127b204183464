"""Pairs that are added against repeated text and against answers to other prompts."""

import pytest

from ppo_core.data.rows.read_rows import read_source
from ppo_core.data.sources.source import source_of_rows
from ppo_core.supervised.examples.added_pairs import added_pairs
from ppo_core.supervised.examples.encoded_rows import encode_rows
from ppo_core.supervised.supervised_config import SupervisedConfig
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import EOS


def rows_of(*rows):
    return read_source(source_of_rows(rows), "pairs", is_chat=False)


def added(rows, **shares):
    return [
        [(row["prompt"], row["chosen"], row["rejected"]) for row in more]
        for more in added_pairs(list(rows.table), SupervisedConfig(**shares))
    ]


PAIRS = (
    {"prompt": "w0", "chosen": "w1", "rejected": "w2", "margin": 3.0},
    {"prompt": "w0", "chosen": "w3", "rejected": "w4", "margin": 1.0},
    {"prompt": "w5", "chosen": "w6", "rejected": "w7", "margin": 1.0},
    {"prompt": "w8", "chosen": "w6", "rejected": "w9", "margin": 1.0},
)


def test_the_chosen_response_wins_against_itself_written_twice():
    found = added(rows_of(*PAIRS), repeated_text_pairs=0.5)
    assert found == [[], [("w0", "w3", "w3 w3")], [], [("w8", "w6", "w6 w6")]]


def test_the_chosen_response_wins_against_that_to_the_next_other_prompt():
    # A response that is equal to the chosen one is passed over; the first row follows the last.
    found = added(rows_of(*PAIRS), other_prompt_pairs=1.0)
    assert found == [
        [("w0", "w1", "w6")],
        [("w0", "w3", "w6")],
        [("w5", "w6", "w1")],
        [("w8", "w6", "w1")],
    ]


@pytest.mark.parametrize(
    ("row", "shares"),
    [
        ({"prompt": "w0", "chosen": "w1", "rejected": "w2", "tie": True}, {}),
        ({"prompt": "w0", "chosen": "w1", "rejected": "w2"}, {"repeated_text_pairs": 0.0}),
    ],
    ids=["a tie", "one prompt"],
)
def test_rows_without_a_second_prompt_or_a_winner_get_no_pairs(row, shares):
    shares = {"repeated_text_pairs": 1.0, "other_prompt_pairs": 1.0, **shares}
    assert added(rows_of(row, row), **shares) == [[], []]


def test_a_judgment_of_a_rejected_response_gets_no_pairs():
    row = {"row": 0, "prompt": "w0", "chosen": None, "rejected": "w2", "margin": None}
    assert added_pairs([row], SupervisedConfig(repeated_text_pairs=1.0)) == [[]]


def test_a_share_draws_rows_at_equal_distances():
    rows = rows_of(*(PAIRS[0] | {"chosen": f"w{number}"} for number in range(10, 50)))
    counts = [len(more) for more in added(rows, repeated_text_pairs=0.125)]
    assert [number for number, count in enumerate(counts) if count] == [7, 15, 23, 31, 39]


def test_encoded_pairs_follow_their_row_unless_they_are_too_long():
    rows = rows_of({**PAIRS[0]}, {**PAIRS[1], "chosen": "w3 w3 w3"})
    config = SupervisedConfig(repeated_text_pairs=1.0)
    tokenizer = make_chat_tokenizer(None)
    encoded = encode_rows("pairs", rows, tokenizer, config, limit=6, overlong="error")
    found = [(row["chosen"], row["rejected"], row["margin"]) for row in encoded.table]
    assert found == [
        ([3, 4, EOS], [3, 5, EOS], 3.0),
        ([3, 4, EOS], [3, 4, 4, EOS], 0.0),
        ([3, 6, 6, 6, EOS], [3, 7, EOS], 1.0),
    ]
    assert encoded.left_out == {}
    default = SupervisedConfig()
    plain = encode_rows("pairs", rows, tokenizer, default, limit=6, overlong="error")
    assert plain.digest != encoded.digest


def test_the_settings_of_a_result_lack_shares_of_0():
    names = SupervisedConfig(other_prompt_pairs=0.5).settings_of_result()
    assert names["other_prompt_pairs"] == 0.5
    assert "repeated_text_pairs" not in names
